#include "transfer/frame.h"

#include <algorithm>

#include "base/checksum.h"

namespace di::transfer {

namespace {

constexpr std::uint32_t magic = 0x30444944;  // DID0
constexpr std::uint8_t flag_sealed = 1;
constexpr std::size_t crc_at = 8;

Error corrupt(const char* why) {
  return Error{Code::corrupt, 0, why};
}

}  // namespace

FrameHeader frame_encode(const Frame& frame) {
  FrameHeader at{};
  put_le<std::uint32_t>(&at[0], magic);
  put_le<std::uint16_t>(&at[4], frame_version);
  put_le<std::uint8_t>(&at[6], static_cast<std::uint8_t>(frame.kind));
  put_le<std::uint8_t>(&at[7], frame.sealed ? flag_sealed : 0);
  put_le<std::uint16_t>(&at[12], static_cast<std::uint16_t>(frame.code));
  put_le<std::uint64_t>(&at[16], frame.number);
  put_le<std::uint64_t>(&at[24], frame.transfer);
  put_le<std::uint32_t>(&at[32], frame.slot.slot);
  put_le<std::uint32_t>(&at[36], frame.slot.generation);
  put_le<std::uint64_t>(&at[40], frame.offset);
  put_le<std::uint32_t>(&at[48], frame.bytes);
  put_le<std::uint32_t>(&at[crc_at], crc32c(at));
  return at;
}

Result<Frame> frame_decode(std::span<const std::byte, frame_header_bytes> bytes) {
  if (get_le<std::uint32_t>(&bytes[0]) != magic) return corrupt("no frame: wrong magic");
  FrameHeader at;
  std::copy(bytes.begin(), bytes.end(), at.begin());
  const auto crc = get_le<std::uint32_t>(&at[crc_at]);
  put_le<std::uint32_t>(&at[crc_at], 0);
  if (crc32c(at) != crc) return corrupt("frame: wrong header checksum");
  if (get_le<std::uint16_t>(&at[4]) != frame_version) {
    return Error{Code::unsupported, 0, "frame of another version"};
  }
  const auto kind = get_le<std::uint8_t>(&at[6]);
  const auto flags = get_le<std::uint8_t>(&at[7]);
  const auto code = get_le<std::uint16_t>(&at[12]);
  if (kind < static_cast<std::uint8_t>(FrameKind::hello) ||
      kind > static_cast<std::uint8_t>(FrameKind::data)) {
    return corrupt("frame of no known kind");
  }
  if ((flags & ~flag_sealed) != 0) return corrupt("frame with unknown flags");
  if (code > static_cast<std::uint16_t>(Code::stale)) return corrupt("frame with an unknown code");
  if (get_le<std::uint16_t>(&at[14]) != 0 || get_le<std::uint32_t>(&at[52]) != 0 ||
      get_le<std::uint64_t>(&at[56]) != 0) {
    return corrupt("frame: reserved bytes are not zero");
  }
  Frame frame;
  frame.kind = static_cast<FrameKind>(kind);
  frame.sealed = flags == flag_sealed;
  frame.code = static_cast<Code>(code);
  frame.number = get_le<std::uint64_t>(&at[16]);
  frame.transfer = get_le<std::uint64_t>(&at[24]);
  frame.slot = {get_le<std::uint32_t>(&at[32]), get_le<std::uint32_t>(&at[36])};
  frame.offset = get_le<std::uint64_t>(&at[40]);
  frame.bytes = get_le<std::uint32_t>(&at[48]);
  if (frame.bytes > frame_payload_bytes_max) return corrupt("frame: too long");
  return frame;
}

Frame frame_hello(const TicketSecret& secret, bool sealed) {
  std::array<std::byte, ticket_bytes> at;
  std::transform(secret.begin(), secret.end(), at.begin(), [](std::uint8_t b) { return std::byte{b}; });
  Frame frame;
  frame.kind = FrameKind::hello;
  frame.sealed = sealed;
  frame.number = get_le<std::uint64_t>(&at[0]);
  frame.transfer = get_le<std::uint64_t>(&at[8]);
  return frame;
}

TicketSecret frame_ticket(const Frame& hello) {
  std::array<std::byte, ticket_bytes> at;
  put_le<std::uint64_t>(&at[0], hello.number);
  put_le<std::uint64_t>(&at[8], hello.transfer);
  TicketSecret secret;
  std::transform(at.begin(), at.end(), secret.begin(),
                 [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
  return secret;
}

Bytes peer_encode(const Peer& peer) {
  Bytes bytes(4 + peer.instance.size());
  put_le<std::uint32_t>(bytes.data(), peer.generation);
  const ByteView name = as_bytes(peer.instance);
  std::copy(name.begin(), name.end(), bytes.begin() + 4);
  return bytes;
}

Result<Peer> peer_decode(ByteView bytes) {
  if (bytes.size() <= 4 || bytes.size() > hello_payload_bytes_max) return corrupt("frame names no peer");
  Peer peer;
  peer.generation = get_le<std::uint32_t>(bytes.data());
  peer.instance = as_text(bytes.subspan(4));
  return peer;
}

}  // namespace di::transfer
