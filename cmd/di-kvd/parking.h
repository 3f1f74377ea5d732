// cmd/di-kvd/parking.h: where the memory of an arena is while di-kvd is dead.
//
// Its descriptor is left with somebody who lives on: systemd, whose service manager keeps it for the next
// start (FDSTORE=1), or a di-hold process that di-kvd starts beside itself.  Whoever it is keeps the memory
// and nothing else; what it means is in the memory (kv/arena_index.h).
//
// Owner: the loop thread; open() to put() block for at most a second, before the loop runs.  Bounds: one
// descriptor; one holder, which ends when it has been alone for holder_alone.
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

class Parking {
 public:
  Parking(Park mode, std::string run_dir, std::string instance);
  ~Parking();

  // Who keeps it: automatic has become one of the others.
  [[nodiscard]] Park mode() const { return mode_; }
  [[nodiscard]] std::string_view keeper() const;

  // What was parked for this instance; invalid when nothing was.  With a holder: of the one that runs.
  Fd take();
  // Parks `fd`, in place of what was parked before.  It stays the caller's.  Errors: io, unreachable.
  Status put(int fd);
  // Nothing is parked any more.
  void drop();
  // From now on a holder that ends is replaced, and `fd` parked again.
  void watch(loop::Loop& loop, int fd);

 private:
  Result<Fd> connect_holder() const;
  Result<Fd> start_holder();
  // One question, one answer.
  Result<bool> ask(std::string_view word, int fd, Fd* answer);
  void holder_readable();
  void replace_holder();

  Park mode_;
  std::string run_dir_;
  std::string instance_;
  std::string socket_path_;
  Fd holder_;        // connection
  pid_t child_ = 0;  // when we started it
  int fd_ = -1;
  loop::Loop* loop_ = nullptr;
  std::unique_ptr<loop::Watch> watch_;
  std::unique_ptr<loop::Timer> retry_;
};

}  // namespace di::kvd
