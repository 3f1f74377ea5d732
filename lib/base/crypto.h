// base/crypto.h: SHA-256 and random bytes (OpenSSL).  Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "base/bytes.h"

namespace di {

using Digest = std::array<std::byte, 32>;

// Incremental SHA-256.  The algorithm is fetched once per process (EVP_MD_fetch), which makes a
// short hash three times cheaper (spec/store.md 1.4).
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void update(ByteView bytes);
  // The digest so far; the object starts over afterwards.
  [[nodiscard]] Digest finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

[[nodiscard]] Digest sha256(ByteView bytes);
[[nodiscard]] Digest hmac_sha256(ByteView key, ByteView bytes);

// Fills from the operating system's generator; a failure there is fatal.
void random_bytes(MutableByteView out);
[[nodiscard]] std::uint64_t random_u64();

}  // namespace di
