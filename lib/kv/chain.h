// kv/chain.h: the identity of cached blocks (design.md section 0, decision 1): roots, salts and keys.
//
// Pure; any thread.  A key stands for everything its block depends on: layout, weights, adapter, who may
// share it, and every token up to its end.  Roots and salts are made in one place, di-router; others
// extend a chain from the key they were given and never see a salt.
//
// Every hash starts with a tag of its own and every field carries its length (U32, little-endian, in
// front of the bytes), so no two different inputs hash the same bytes:
//   salt   = HMAC-SHA-256(secret, f("DIKV0 salt") f(domain) f(user_id) f(cache_salt))
//   root   = SHA-256(f("DIKV0 root") f(fingerprint) f(revision) f(adapter) f(salt))
//   key_i  = SHA-256(f("DIKV0 block") f(key_{i-1}) f(token ids, U32 each) U32(count of images) f(digest)...)
//   tenant = first 8 bytes, little-endian, of SHA-256(f("DIKV0 tenant") f(name)); 1 instead of 0
//   private root after a public prefix = SHA-256(f("DIKV0 private") f(last public key) f(salt))
// Golden vectors: tests/golden/kv/chain.jsonl.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/crypto.h"
#include "wire/ids.h"

namespace di::kv {

// Who shares a cache: requests with the same three values do.
struct Namespace {
  std::string_view domain;      // the tenant's isolation domain
  std::string_view user_id;     // empty when the request gives none
  std::string_view cache_salt;  // empty when the request gives none
};
// `secret` comes from the catalogue of di-meta.
[[nodiscard]] Digest namespace_salt(ByteView secret, const Namespace& who);

// Whose a page is, for quotas: goes with its request and is kept with its stripe.  Not secret, and it says
// nothing that a key does not.  tenant_nobody: no tenant is known.
inline constexpr std::uint64_t tenant_nobody = 0;
[[nodiscard]] std::uint64_t tenant_number(std::string_view name);
// As it is shown where the name is not known: 16 hex digits.
[[nodiscard]] std::string tenant_text(std::uint64_t number);

struct ChainOrigin {
  Key fingerprint;           // of the layout
  Key revision;              // of the weights
  std::string_view adapter;  // empty for the base model
  Digest salt{};
};
[[nodiscard]] Key chain_root(const ChainOrigin& origin);
// Root of the private part behind an operator-declared public prefix.
[[nodiscard]] Key chain_private_root(const Key& last_public, const Digest& salt);

// An image whose placeholder tokens lie (also) in block `block`; its tokens do not say which image it is.
struct BlockImage {
  std::uint32_t block = 0;
  Digest digest{};
};

// Key of one full block.
[[nodiscard]] Key block_key(const Key& parent, std::span<const std::uint32_t> tokens,
                            std::span<const Digest> images = {});
// Keys of all full blocks of `tokens`, whose first block has number `first_block` in the images' count.
// `images` is ordered by block, and inside a block by position.
[[nodiscard]] std::vector<Key> chain_keys(const Key& parent, std::span<const std::uint32_t> tokens,
                                          std::uint32_t block_tokens, std::span<const BlockImage> images = {},
                                          std::uint32_t first_block = 0);

// Blocks of a prompt that may come from a cache: one token is always left to compute.
[[nodiscard]] constexpr std::uint32_t usable_blocks(std::uint64_t tokens, std::uint32_t block_tokens) {
  return tokens == 0 ? 0 : static_cast<std::uint32_t>((tokens - 1) / block_tokens);
}

}  // namespace di::kv
