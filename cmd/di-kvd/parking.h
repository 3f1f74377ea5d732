// cmd/di-kvd/parking.h: where the memory of an arena is while di-kvd is dead.
//
// Its descriptor is left with somebody who lives on: systemd, whose service manager keeps it for the next
// start (FDSTORE=1), or a di-hold process that di-kvd starts beside itself.  Whoever it is keeps the memory
// and nothing else; what it means is in the memory (kv/arena_index.h).
//
// A question to the holder that is not answered in time ends the connection: the answer may still come, and
// would be taken for that to the next question.  A holder is started only where nobody listens.
//
// Owner: the loop thread; take(), put() and drop() block until they are answered, before the loop runs.
// Bounds: one descriptor; one holder, which ends when it has been alone for holder_alone; one question at a
// time, for at most answer_wait.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "base/result.h"
#include "base/time.h"
#include "loop/loop.h"

namespace di::kvd {

enum class Park : std::uint8_t { automatic, systemd, holder, off };

inline constexpr Duration holder_alone = std::chrono::minutes(10);
// It answers at once; a machine that is short of memory may not let it run for a while.
inline constexpr Duration holder_answer_wait = seconds(5);

class Parking {
 public:
  Parking(Park mode, std::string run_dir, std::string instance, Duration answer_wait = holder_answer_wait);
  ~Parking();

  // Who keeps it: automatic has become one of the others.
  [[nodiscard]] Park mode() const { return mode_; }
  [[nodiscard]] std::string_view keeper() const;

  // What was parked for this instance; invalid when nothing was.  With a holder: of the one that runs.
  Fd take();
  // Parks `fd`, in place of what was parked before.  It stays the caller's.  Errors: io, timeout, unreachable.
  Status put(int fd);
  // Nothing is parked any more.  Who still has the descriptor of a large memory calls this first and closes it
  // then: the holder would be busy with freeing it.
  void drop();
  // From now on a holder that ends is replaced, and `fd` parked again.
  void watch(loop::Loop& loop, int fd);

 private:
  // Errors: unreachable (nobody listens), denied, io.
  Result<Fd> connect_holder() const;
  Result<Fd> start_holder();
  // Connects to the one that runs, or to one that is started for it.
  Status reach_holder();
  // One question, one answer; after an error there is no connection.
  Result<bool> ask(std::string_view word, int fd, Fd* answer);
  [[nodiscard]] std::string line_of(std::string_view word) const;
  void watch_holder();
  void holder_readable();
  void on_retry();
  void not_parked(const Error& why);
  void let_go();

  Park mode_;
  std::string run_dir_;
  std::string instance_;
  std::string socket_path_;
  Duration answer_wait_;
  Fd holder_;        // connection
  pid_t child_ = 0;  // when we started it
  int fd_ = -1;
  loop::Loop* loop_ = nullptr;
  std::unique_ptr<loop::Watch> watch_;
  bool putting_ = false;  // asked in the loop, and not answered yet
  std::unique_ptr<loop::Timer> retry_;
};

}  // namespace di::kvd
