// base/bytes.h: byte strings, and little-endian integers in them.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace di {

using Bytes = std::vector<std::byte>;
using ByteView = std::span<const std::byte>;
using MutableByteView = std::span<std::byte>;

[[nodiscard]] inline ByteView as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}
[[nodiscard]] inline std::string_view as_text(ByteView bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Little-endian, whatever the host is; the caller guarantees sizeof(T) bytes at `at`.
template <std::unsigned_integral T>
void put_le(std::byte* at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}
template <std::unsigned_integral T>
[[nodiscard]] T get_le(const std::byte* at) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | (static_cast<T>(std::to_integer<std::uint8_t>(at[i])) << (8 * i)));
  }
  return value;
}

[[nodiscard]] constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}

// Lower-case hexadecimal.
[[nodiscard]] std::string to_hex(ByteView bytes);
// False when `text` is not an even number of hexadecimal digits.
[[nodiscard]] bool from_hex(std::string_view text, Bytes& out);

}  // namespace di
