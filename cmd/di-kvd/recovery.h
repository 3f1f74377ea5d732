// cmd/di-kvd/recovery.h: the arena of a host at its start: the one that was parked, or a new one, and the
// work that follows when it was parked.
//
// arena_open() blocks, before the loop runs.  Recovery belongs to the loop thread; its threads only read
// the payload of slots that nobody else may use until their results are in.  Bounds: check_threads_max
// threads, results_a_post results at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "host/core.h"
#include "kv/arena.h"
#include "loop/loop.h"
#include "parking.h"

namespace di::kvd {

// A rank lets go when it sees that nobody will own its mapping, or has had no arena for a while (lib/worker),
// and its batch is over.
inline constexpr Duration arena_let_go_within = seconds(20);

struct OpenedArena {
  std::unique_ptr<kv::ArenaOwner> arena;
  std::optional<kv::Former> former;  // it was parked
};
// Takes what is parked if it is what `options` ask for, or makes a new one and parks it.
Result<OpenedArena> arena_open(Parking& parking, const kv::ArenaOwner::Options& options);
// A new one, whatever is parked.  `former` is the memory that it replaces, if there is one: it is given up and
// waited for, at most arena_let_go_within, because there may not be memory for two.
// Both end with `cancelled` when options.stopped says so while they wait.
Result<OpenedArena> arena_make(Parking& parking, const kv::ArenaOwner::Options& options, Fd former);

// Compares the bytes of the pages of an earlier start with their checksums, and waits for the processes of
// that time to let go.  `moved` is called after each step that the core took.
class Recovery {
 public:
  Recovery(loop::Loop& loop, kv::ArenaOwner& arena, host::Core& core, loop::Callback moved);
  ~Recovery();
  Recovery(const Recovery&) = delete;
  Recovery& operator=(const Recovery&) = delete;

 private:
  struct Outcome {
    std::uint32_t slot = 0;
    bool good = false;
  };
  void work();
  void report(std::vector<Outcome> outcomes);
  void look();
  [[nodiscard]] host::Now now() const;

  loop::Loop& loop_;
  kv::ArenaOwner& arena_;
  host::Core& core_;
  loop::Callback moved_;
  std::vector<host::Recovery::Check> checks_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::size_t good_ = 0;
  std::size_t done_ = 0;
  Instant started_;
  loop::Timer former_timer_;
  std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace di::kvd
