// transfer/verbs_message.h: what the two sides of a verbs connection say to each other.
//
// A *set-up* travels once each way on the TCP connection that showed the ticket, behind the peer in the
// payload of hello and welcome (transfer/frame.h):
//   2 bytes of peer, peer; 1 rails; 1 lanes, then each: 1 rail, 4 queue pair, 4 PSN, 2 LID, 1 MTU, 1 reads,
//   1 global, 16 GID;
//   4 memories, then each: 8 address, 8 bytes, and for each lane 4 remote key
// It is the one place where an address or a key is told, and only the side that asks tells any.
//
// A *message* is a SEND of 48 bytes on the queue pair:
//   offset bytes
//        0     1  kind: 1 read, 2 write, 3 answer
//        1     1  reserved, zero
//        2     2  code of an answer
//        4     4  tag of the request: its place among those under way in the low bits, a count above
//        8     8  transfer
//       16     4  slot
//       20     4  its generation
//       24     8  offset in the slot
//       32     8  offset in the asker's memory
//       40     4  which memory
//       44     4  bytes
// An answer has zeros from 8 on.  A read that went well is answered by the immediate of the WRITE, its tag,
// instead.  Little-endian.
//
// Pure.  Bound: verbs_setup_bytes_max.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "transfer/fabric.h"
#include "transfer/verbs.h"

namespace di::transfer {

inline constexpr std::size_t verbs_message_bytes = 48;
inline constexpr std::size_t verbs_lanes_max = 8;
inline constexpr std::size_t verbs_memories_max = 4096;
inline constexpr std::uint32_t verbs_setup_bytes_max = 1 << 20;

struct VerbsMemory {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> keys;  // one a lane

  bool operator==(const VerbsMemory&) const = default;
};
// A queue pair, and the rail that it is on: the n-th of either side.
struct VerbsLane {
  std::uint8_t rail = 0;
  VerbsAddress address;

  bool operator==(const VerbsLane&) const = default;
};
struct VerbsSetup {
  Peer peer;
  std::uint8_t rails = 0;        // that this side has, also while they are down
  std::vector<VerbsLane> lanes;  // by rail, ascending
  std::vector<VerbsMemory> memories;

  bool operator==(const VerbsSetup&) const = default;
};
[[nodiscard]] Bytes verbs_setup_encode(const VerbsSetup& setup);
// Errors: corrupt.
[[nodiscard]] Result<VerbsSetup> verbs_setup_decode(ByteView bytes);

enum class VerbsKind : std::uint8_t { read = 1, write = 2, answer = 3 };
struct VerbsMessage {
  VerbsKind kind = VerbsKind::read;
  Code code = Code::ok;
  std::uint32_t tag = 0;
  TransferId transfer = 0;
  SlotName slot;
  std::uint64_t offset = 0;
  std::uint64_t memory_offset = 0;
  std::uint32_t memory = 0;
  std::uint32_t bytes = 0;

  bool operator==(const VerbsMessage&) const = default;
};
[[nodiscard]] std::array<std::byte, verbs_message_bytes> verbs_message_encode(const VerbsMessage& message);
// Errors: corrupt.
[[nodiscard]] Result<VerbsMessage> verbs_message_decode(ByteView bytes);

}  // namespace di::transfer
