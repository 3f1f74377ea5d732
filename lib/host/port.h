// host/port.h: what the cores of a di-kvd host need from outside, and the small values they share.
//
// The cores never touch shared memory: index entries are written and segments are summed through
// ArenaPort, which the shell implements with kv::ArenaOwner and a test with vectors.  Bytes go to and
// come from other machines through DataPort, which the shell implements with transfer::Fabric.
// Messages leave as wire::Envelope in an Outbox, in the order they are to be sent.
// Owner: the loop thread of di-kvd.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/time.h"
#include "kv/arena.h"
#include "transfer/fabric.h"
#include "wire/envelope.h"

namespace di::host {

// The two time lines (path.md section 1).  Product: fetch_delay, holds.  Liveness: leases, answers of
// peers, back-off.  A simulation gives the same instant twice.
struct Now {
  Instant product;
  Instant liveness;
};

// When on_time() has something to do; instant_never: nothing waits on that line.
struct Due {
  Instant product = instant_never;
  Instant liveness = instant_never;

  void sooner_product(Instant at) { product = std::min(product, at); }
  void sooner_liveness(Instant at) { liveness = std::min(liveness, at); }
};

using wire::Peer;

// What a peer is to this host; follows from program and role of its Member.
enum class PeerKind : std::uint8_t { router, meta, store, host, rank, other };

// Who holds: everything that is acquired for a request belongs to one of these and goes with it.
struct Holder {
  Peer client;
  RequestId request;
  std::uint16_t attempt = 0;

  friend auto operator<=>(const Holder&, const Holder&) = default;
};

// Shared memory, as kv::ArenaOwner offers it.  `segment_crc` reads one segment of a slot's payload.
class ArenaPort {
 public:
  virtual ~ArenaPort() = default;
  virtual void slot_assign(const kv::ArenaOwner::Slot& slot) = 0;
  virtual void slot_state(std::uint32_t slot, kv::SlotState state) = 0;
  virtual void slot_crcs(std::uint32_t slot, std::span<const std::uint32_t> crcs) = 0;
  virtual void slot_segments(std::uint32_t slot, std::uint32_t segments) = 0;
  // For the next owner of the arena: before the state says sealed.
  virtual void slot_record(std::uint32_t slot, const kv::PageRecord& record) = 0;
  virtual void slot_stored(std::uint32_t slot) = 0;
  virtual void slot_free(std::uint32_t slot) = 0;
  virtual void entry_open(std::uint32_t handle) = 0;
  virtual void entry_set(std::uint32_t handle, const kv::Readiness& readiness) = 0;
  virtual void entry_close(std::uint32_t handle) = 0;
  // CRC32C over `bytes` bytes at `offset` of the payload.
  [[nodiscard]] virtual std::uint32_t segment_crc(std::uint64_t offset, std::uint64_t bytes) = 0;
};

// The data plane, as transfer::Fabric offers it.  Each push is answered by Core::on_pushed, once, and
// each conceal by Core::on_concealed, once, both from a later turn.
class DataPort {
 public:
  virtual ~DataPort() = default;
  // Lets `peer` reach slots of this arena under `transfer`, or more slots under one that is exposed.
  // Errors: busy.
  virtual Status expose(const Peer& peer, std::uint64_t transfer, transfer::Access access,
                        std::vector<transfer::SlotName> slots) = 0;
  virtual void conceal(const Peer& peer, std::uint64_t transfer) = 0;
  // Writes payload bytes [offset, offset + bytes) of this arena to a place in the peer's.  `push` is the
  // caller's number for it.  Errors: busy, unreachable.
  virtual Status push(std::uint64_t push, const Peer& peer, std::uint64_t transfer,
                      const transfer::Place& to, std::uint64_t offset, transfer::Class cls) = 0;
  virtual void cancel(std::uint64_t push) = 0;
  // A peer has said that it has written into this arena: before its bytes are looked at.
  virtual void see_arrivals() const = 0;
  // Bytes a second that the link to the peer has moved lately; 0: not known.
  [[nodiscard]] virtual double rate(const Peer& peer) const = 0;
};

using Outbox = std::vector<wire::Envelope>;

// Numbers that the parts of one host share.  Tags name exchanges with di-meta, transfers name exposures
// of this arena, pushes name writes into others; each is unique within the host's generation.
struct Numbers {
  std::uint64_t tag = 1;
  std::uint64_t transfer = 1;
  std::uint64_t push = 1;
};

// A number that names an exchange with di-meta: it travels as the request id of the question and
// comes back with the answer.
[[nodiscard]] inline RequestId tag_request(std::uint64_t tag) {
  RequestId id;
  put_le<std::uint64_t>(id.raw.data(), tag);
  return id;
}
[[nodiscard]] inline std::uint64_t request_tag(const RequestId& id) {
  const std::uint64_t tag = get_le<std::uint64_t>(id.raw.data());
  return tag_request(tag) == id ? tag : 0;
}

}  // namespace di::host
