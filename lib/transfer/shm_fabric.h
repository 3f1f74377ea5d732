// transfer/shm_fabric.h: the fabric inside one machine: the arena of a peer is mapped, a write or a read is
// a copy, and mostly there is none: view() is the peer's memory.
//
// No daemon moves bytes through it, on purpose: a rank or a store on the arena's own machine attaches to the
// arena socket itself (transfer/shm.h, kv::ArenaClient) and reads and writes its slots in place, without an
// operation, a queue or a copy; a fabric between them could only add one.  It exists so that what asks a
// Fabric, the conformance suite above all, means the same on one machine as between two.  The loop thread must
// not copy payload for others, so it is no way to move pages of a busy host.
//
// There is no guard: whoever may attach to the arena socket is of the same user and may write anywhere
// in the arena (transfer/shm.h).  expose(), conceal() and tickets are bookkeeping only, what checks there
// are is the mapped Region's: generation and bounds.
//
// Owner: the loop thread, which copies: copy_turn_bytes a turn, so that others get theirs.
// Bounds: transfer/fabric.h.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/fd.h"
#include "loop/loop.h"
#include "transfer/fabric.h"
#include "wire/messages.h"

namespace di::transfer {

inline constexpr std::uint64_t copy_turn_bytes = 2 << 20;

struct ShmFabricOptions {
  Peer self;
  // Where a peer's arena socket is.
  std::function<std::string(const Peer& peer)> arena_path;
  // Maps what the socket answered.
  std::function<Result<std::unique_ptr<Region>>(const wire::arena_region& region, Fd fd)> map;
  Duration dial_wait = transfer::dial_wait;
  Duration dial_pause_min = transfer::dial_pause_min;
  Duration dial_pause_max = transfer::dial_pause_max;
};

class ShmFabric : public Fabric {
 public:
  // Maps the peer's arena now, for view(); the first operation does so as well.
  virtual void attach(const Peer& peer) = 0;
  virtual void set_self(const Peer& self) = 0;
};

[[nodiscard]] std::unique_ptr<ShmFabric> make_shm_fabric(loop::Loop& loop, const ShmFabricOptions& options);

}  // namespace di::transfer
