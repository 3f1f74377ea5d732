// wire/ids.h: the identifiers that travel in messages.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#include "base/bytes.h"

namespace di {

// 16 bytes drawn by the router for each client request; every message of the request carries it.
struct RequestId {
  std::array<std::byte, 16> raw{};

  friend auto operator<=>(const RequestId&, const RequestId&) = default;
  // The one spelling in logs, metrics and control output: 32 hexadecimal digits.
  [[nodiscard]] std::string text() const { return to_hex(raw); }
  [[nodiscard]] bool is_zero() const { return *this == RequestId{}; }
};

// A block key: SHA-256 over the chain up to and including the block (kv/chain.h).  Keys are full
// on the wire and on disk; the all-zero key means "none".
struct Key {
  std::array<std::byte, 32> raw{};

  friend auto operator<=>(const Key&, const Key&) = default;
  // The comparison that the compiler would make goes byte by byte.
  friend bool operator==(const Key& a, const Key& b) {
    return std::memcmp(&a.raw, &b.raw, sizeof a.raw) == 0;
  }
  [[nodiscard]] std::string text() const { return to_hex(raw); }
  [[nodiscard]] bool is_zero() const { return *this == Key{}; }
};

}  // namespace di

template <>
struct std::hash<di::RequestId> {
  std::size_t operator()(const di::RequestId& id) const noexcept {
    std::size_t h;
    std::memcpy(&h, id.raw.data(), sizeof h);  // drawn at random: any 8 bytes are a hash
    return h;
  }
};

template <>
struct std::hash<di::Key> {
  std::size_t operator()(const di::Key& key) const noexcept {
    std::size_t h;
    std::memcpy(&h, key.raw.data(), sizeof h);  // SHA-256: any 8 bytes are a hash
    return h;
  }
};
