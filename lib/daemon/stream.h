// daemon/stream.h: messages on a stream socket: 64-byte header, body, and the next.
//
// Used by both sides of the control socket.  Pure: bytes in, messages out.
#pragma once

#include <optional>

#include "base/bytes.h"
#include "wire/codec.h"
#include "wire/header.h"

namespace di::daemon {

template <class M>
void stream_append(Bytes& out, const M& message) {
  wire::Header header;
  header.number = M::number;
  const Bytes body = wire::body_encode(message);
  const auto head = wire::header_encode(header, body);
  out.insert(out.end(), head.begin(), head.end());
  out.insert(out.end(), body.begin(), body.end());
}

// The first message in `bytes`, or nothing when it is not whole yet.  `used` is its length.
// Refused with a Fault: more than `body_bytes_max` announced, or a broken header.
struct StreamMessage {
  wire::Header header;
  ByteView body;
  std::size_t used = 0;
};
[[nodiscard]] inline wire::Decoded<std::optional<StreamMessage>> stream_take(ByteView bytes,
                                                                             std::size_t body_bytes_max) {
  using Taken = std::optional<StreamMessage>;
  if (bytes.size() < wire::header_bytes) return Taken{};
  constexpr std::size_t body_bytes_offset = 12;
  const std::size_t body_bytes = get_le<std::uint32_t>(&bytes[body_bytes_offset]);
  if (body_bytes > body_bytes_max) return wire::Fault::body_length;
  if (bytes.size() < wire::header_bytes + body_bytes) return Taken{};
  const ByteView body = bytes.subspan(wire::header_bytes, body_bytes);
  wire::Decoded<wire::Header> header = wire::header_decode(bytes.first(wire::header_bytes), body);
  if (!header) return header.fault();
  return Taken{StreamMessage{*header, body, wire::header_bytes + body_bytes}};
}

}  // namespace di::daemon
