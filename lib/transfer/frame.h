// transfer/frame.h: the 64-byte header of a frame on a data connection.
//
//   offset bytes
//        0     4  magic, the characters DID0
//        4     2  version, 1
//        6     1  kind
//        7     1  flags: bit 0 sealed
//        8     4  CRC32C of the header, computed with this field zero
//       12     2  code of an answer, 0 is ok
//       14     2  reserved, zero
//       16     8  number of the request, counted by the dialler; in a hello the first half of the ticket
//       24     8  transfer; in a hello the second half of the ticket
//       32     4  slot
//       36     4  its generation
//       40     8  offset in the slot
//       48     4  bytes: of the payload that follows, or, in a read, that are wanted
//       52    12  reserved, zero
//
// Little-endian, written byte by byte.  The dialler sends hello, write and read; the acceptor answers
// with welcome, wrote and data, in the order of the requests.  The payload of hello and welcome is the
// sender's generation (4 bytes) and instance.  On a sealed connection the header is followed by a tag of
// 16 bytes over it, and a payload, which is encrypted, by another tag: the header is proven before a byte
// of its payload is put anywhere.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/bytes.h"
#include "base/result.h"
#include "transfer/fabric.h"

namespace di::transfer {

inline constexpr std::size_t frame_header_bytes = 64;
inline constexpr std::uint16_t frame_version = 1;
// Payload of one frame.  Above this is nonsense, whatever max_unit_bytes the other side runs with.
inline constexpr std::uint32_t frame_payload_bytes_max = 16 << 20;
inline constexpr std::uint32_t hello_payload_bytes_max = 4 + 256;

enum class FrameKind : std::uint8_t { hello = 1, welcome = 2, write = 3, wrote = 4, read = 5, data = 6 };

struct Frame {
  FrameKind kind = FrameKind::hello;
  bool sealed = false;
  Code code = Code::ok;
  std::uint64_t number = 0;
  TransferId transfer = 0;
  SlotName slot;
  std::uint64_t offset = 0;
  std::uint32_t bytes = 0;

  bool operator==(const Frame&) const = default;
  // What follows the header.
  [[nodiscard]] std::uint32_t payload_bytes() const { return kind == FrameKind::read ? 0 : bytes; }
};

using FrameHeader = std::array<std::byte, frame_header_bytes>;
using TicketSecret = std::array<std::uint8_t, ticket_bytes>;

[[nodiscard]] FrameHeader frame_encode(const Frame& frame);
// Errors: corrupt, unsupported (another version).
[[nodiscard]] Result<Frame> frame_decode(std::span<const std::byte, frame_header_bytes> bytes);

[[nodiscard]] Frame frame_hello(const TicketSecret& secret, bool sealed);
[[nodiscard]] TicketSecret frame_ticket(const Frame& hello);

[[nodiscard]] Bytes peer_encode(const Peer& peer);
// Errors: corrupt.
[[nodiscard]] Result<Peer> peer_decode(ByteView bytes);

}  // namespace di::transfer
