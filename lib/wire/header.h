// wire/header.h: the fixed 64-byte header in front of every message, little-endian, byte by byte.
//
//   offset  bytes  field
//        0      4  magic "DIW0"
//        4      2  protocol version
//        6      2  message number
//        8      4  header CRC32C, computed with this field zero
//       12      4  body bytes
//       16      4  body CRC32C
//       20      4  cluster number
//       24      4  sender number
//       28      4  sender generation
//       32      4  destination generation; 0 = any (registration, control)
//       36     16  request id; zero when the message belongs to no request
//       52      2  attempt
//       54      2  rank
//       56      4  deadline, remaining milliseconds; 0 = none
//       60      4  reserved, zero
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/result.h"
#include "wire/messages.h"

namespace di::wire {

inline constexpr std::size_t header_bytes = 64;
inline constexpr std::size_t body_bytes_max = std::size_t{64} << 20;

struct Header {
  U16 version = protocol_version;
  U16 number = 0;
  U32 body_bytes = 0;
  U32 body_crc = 0;
  U32 cluster = 0;
  U32 sender = 0;
  U32 sender_generation = 0;
  U32 destination_generation = 0;
  RequestId request;
  U16 attempt = 0;
  U16 rank = 0;
  U32 deadline_ms = 0;

  bool operator==(const Header&) const = default;
};

// Why a frame was refused.  Each has a counter of this name; none of them stops the receiver.
enum class Fault : std::uint8_t {
  header_short,
  magic,
  header_checksum,
  body_length,
  body_checksum,
  cluster,
  version,
  number,
  reserved,
  field_range,
  trailing_bytes,
};
inline constexpr int fault_count = 11;
[[nodiscard]] std::string_view fault_name(Fault fault);

// A Result-like for decoders: a value or the Fault.
template <class T>
class [[nodiscard]] Decoded {
 public:
  Decoded(T value) : value_(std::move(value)), good_(true) {}  // NOLINT: implicit on purpose
  Decoded(Fault fault) : fault_(fault) {}                      // NOLINT: implicit on purpose
  explicit operator bool() const { return good_; }
  T& operator*() {
    DI_ASSERT(good_);
    return value_;
  }
  T* operator->() { return &**this; }
  [[nodiscard]] Fault fault() const {
    DI_ASSERT(!good_);
    return fault_;
  }

 private:
  T value_{};
  Fault fault_ = Fault::header_short;
  bool good_ = false;
};

// Fills in lengths and checksums of `body`.
[[nodiscard]] std::array<std::byte, header_bytes> header_encode(Header header, ByteView body);
// Checks length, magic, checksum, version and reserved bytes, and then that `body` has the length and
// checksum it announces.  The cluster is the caller's to compare.
[[nodiscard]] Decoded<Header> header_decode(ByteView frame, ByteView body);

}  // namespace di::wire
