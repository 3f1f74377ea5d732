// host/port.h: what the cores of a di-kvd host need from outside, and the small values they share.
//
// The cores never touch shared memory: index entries are written and segments are summed through
// ArenaPort, which the shell implements with kv::ArenaOwner and a test with vectors.  Bytes go to and
// come from other machines through DataPort, which the shell implements with transfer::Fabric.
// Messages leave as wire::Envelope in an Outbox, in the order they are to be sent.
// Owner: the loop thread of di-kvd.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <optional>
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

  void at_once() { liveness = Instant{}; }
  void sooner_product(Instant at) { product = std::min(product, at); }
  void sooner_liveness(Instant at) { liveness = std::min(liveness, at); }
};

using wire::Peer;

// What a peer is to this host; follows from program and role of its Member.
enum class PeerKind : std::uint8_t { router, meta, store, host, rank, other };

// Answers that the parts of a host need about its peers.
class Peers {
 public:
  virtual ~Peers() = default;
  // The generation that is up; nothing when the instance is away.
  [[nodiscard]] virtual std::optional<Peer> store_up(const std::string& instance) const = 0;
  // Another host; not this one.
  [[nodiscard]] virtual std::optional<Peer> arena_up(const std::string& instance) const = 0;
  [[nodiscard]] virtual std::optional<Peer> meta_up() const = 0;
  [[nodiscard]] virtual bool attached(const Peer& peer) const = 0;
  // On another machine: it reaches this arena through the data plane only.
  [[nodiscard]] virtual bool remote(const Peer& peer) const = 0;
};

// Who holds: everything that is acquired for a request belongs to one of these and goes with it.
struct Holder {
  Peer client;
  RequestId request;
  std::uint16_t attempt = 0;
  std::uint16_t rank = 0;  // of the client: what one rank lets go of is not what another holds

  friend auto operator<=>(const Holder&, const Holder&) = default;
};

// A segment of a column where it lies in the payload.  No bytes: it is stored nowhere and counts as zeros.
struct Strip {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Shared memory, as kv::ArenaOwner offers it.  `segment_crc` reads one segment of a slot's payload.  The code
// of a stripe is store/erasure.h's; a call of encode or decode takes one layer group, about a millisecond.
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
  [[nodiscard]] virtual bool has_code(std::uint32_t data_columns, std::uint32_t parity_columns) = 0;
  // Makes the parity of one layer group.
  //   data    [k]      in the order of the columns; a shorter one counts as if zeros followed
  //   parity  [m]      each as long as the longest of them
  // Returns CRC32C of [k + m] of them, 0 for one without bytes.
  [[nodiscard]] virtual std::vector<std::uint32_t> encode(std::span<const Strip> data,
                                                          std::span<const Strip> parity) = 0;
  struct CodeColumn {
    bool present = false;  // a data column that is not stored is there
    std::uint32_t crc = 0;
    Strip strip;
  };
  // Makes columns of one layer group out of others.
  //   columns  [k + m]  of these at least k are present
  //   wanted   numbers of columns that are not: at most m, ascending; their strips and checksums are in `columns`
  // Returns the columns that do not match their checksums, a bit for each; with any the bytes made are of no use.
  [[nodiscard]] virtual std::uint32_t decode(std::uint32_t data_columns, std::span<const CodeColumn> columns,
                                             std::span<const std::uint32_t> wanted) = 0;
  // The XOR of these is zero, a shorter one as if zeros followed.
  [[nodiscard]] virtual bool xor_is_zero(std::span<const Strip> columns) = 0;
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
  virtual Status push(std::uint64_t push, const Peer& peer, std::uint64_t transfer, const transfer::Place& to,
                      std::uint64_t offset, transfer::Class cls) = 0;
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
