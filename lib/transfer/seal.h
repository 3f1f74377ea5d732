// transfer/seal.h: AES-256-GCM over the two directions of a data connection (OpenSSL or intel-ipsec-mb
// underneath).
//
// A message is begun with what is authenticated only, takes its text in pieces and ends with a tag.  The
// nonce of message n in one direction is (direction, n), 4 and 8 bytes little-endian; a key serves one
// connection, so no nonce is ever used twice under it.
//
// Owner: the thread of the connection.  Bound: one cipher context.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "base/bytes.h"
#include "transfer/fabric.h"

namespace di::transfer {

inline constexpr std::size_t seal_tag_bytes = 16;
using SealKey = std::array<std::uint8_t, seal_key_bytes>;
using SealTag = std::array<std::byte, seal_tag_bytes>;

enum class SealDirection : std::uint32_t { from_dialler = 1, from_acceptor = 2 };

class Sealer {
 public:
  Sealer(const SealKey& key, SealDirection direction);
  ~Sealer();
  Sealer(const Sealer&) = delete;
  Sealer& operator=(const Sealer&) = delete;

  void begin(ByteView authenticated);
  // `sealed` has the length of `text` and may be the same memory.
  void update(ByteView text, MutableByteView sealed);
  [[nodiscard]] SealTag finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class Opener {
 public:
  Opener(const SealKey& key, SealDirection direction);
  ~Opener();
  Opener(const Opener&) = delete;
  Opener& operator=(const Opener&) = delete;

  void begin(ByteView authenticated);
  // What comes out is not to be trusted before finish() says so.
  void update(ByteView sealed, MutableByteView text);
  [[nodiscard]] bool finish(const SealTag& tag);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace di::transfer
