#include "base/checksum.h"

#include <isa-l/crc.h>

namespace di {

std::uint32_t crc32c(ByteView bytes) {
  return crc32c_extend(0, bytes);
}

std::uint32_t crc32c_extend(std::uint32_t crc, ByteView bytes) {
  // ISA-L takes and returns the register without the inversions and an int length.
  std::uint32_t state = ~crc;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  constexpr std::size_t piece_bytes_max = std::size_t{1} << 30;
  while (left > 0) {
    const std::size_t piece = left < piece_bytes_max ? left : piece_bytes_max;
    // The parameter is not const in ISA-L 2.30 although the bytes are only read.
    auto* raw = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(at));
    state = crc32_iscsi(raw, static_cast<int>(piece), state);
    at += piece;
    left -= piece;
  }
  return ~state;
}

}  // namespace di
