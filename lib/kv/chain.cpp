#include "kv/chain.h"

#include <array>
#include <cinttypes>
#include <cstdio>

#include "base/assert.h"

namespace di::kv {

namespace {

// The bytes of one hash, reused from block to block.
class Fields {
 public:
  explicit Fields(std::string_view tag) {
    add(as_bytes(tag));
    start_ = bytes_.size();
  }

  void restart() { bytes_.resize(start_); }
  void number(std::uint32_t value) {
    std::byte raw[4];
    put_le<std::uint32_t>(raw, value);
    bytes_.insert(bytes_.end(), raw, raw + 4);
  }
  void add(ByteView field) {
    number(static_cast<std::uint32_t>(field.size()));
    bytes_.insert(bytes_.end(), field.begin(), field.end());
  }
  void add(std::string_view text) { add(as_bytes(text)); }
  void add(std::span<const std::uint32_t> tokens) {
    number(static_cast<std::uint32_t>(tokens.size() * 4));
    const std::size_t at = bytes_.size();
    bytes_.resize(at + tokens.size() * 4);
    for (std::size_t i = 0; i < tokens.size(); ++i) put_le<std::uint32_t>(&bytes_[at + i * 4], tokens[i]);
  }

  [[nodiscard]] const Bytes& bytes() const { return bytes_; }

 private:
  Bytes bytes_;
  std::size_t start_ = 0;
};

constexpr std::string_view block_tag = "DIKV0 block";

}  // namespace

Digest namespace_salt(ByteView secret, const Namespace& who) {
  Fields fields("DIKV0 salt");
  fields.add(who.domain);
  fields.add(who.user_id);
  fields.add(who.cache_salt);
  return hmac_sha256(secret, fields.bytes());
}

std::uint64_t tenant_number(std::string_view name) {
  Fields fields("DIKV0 tenant");
  fields.add(name);
  const Digest digest = sha256(fields.bytes());
  const auto number = get_le<std::uint64_t>(digest.data());
  return number == tenant_nobody ? 1 : number;
}

std::string tenant_text(std::uint64_t number) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016" PRIx64, number);
  return text.data();
}

Key chain_root(const ChainOrigin& origin) {
  Fields fields("DIKV0 root");
  fields.add(ByteView(origin.fingerprint.raw));
  fields.add(ByteView(origin.revision.raw));
  fields.add(origin.adapter);
  fields.add(ByteView(origin.salt));
  return Key{sha256(fields.bytes())};
}

Key chain_private_root(const Key& last_public, const Digest& salt) {
  Fields fields("DIKV0 private");
  fields.add(ByteView(last_public.raw));
  fields.add(ByteView(salt));
  return Key{sha256(fields.bytes())};
}

Key block_key(const Key& parent, std::span<const std::uint32_t> tokens, std::span<const Digest> images) {
  Fields fields(block_tag);
  fields.add(ByteView(parent.raw));
  fields.add(tokens);
  fields.number(static_cast<std::uint32_t>(images.size()));
  for (const Digest& digest : images) fields.add(ByteView(digest));
  return Key{sha256(fields.bytes())};
}

std::vector<Key> chain_keys(const Key& parent, std::span<const std::uint32_t> tokens,
                            std::uint32_t block_tokens, std::span<const BlockImage> images,
                            std::uint32_t first_block) {
  DI_ASSERT(block_tokens > 0);
  const std::size_t blocks = tokens.size() / block_tokens;
  std::vector<Key> keys;
  keys.reserve(blocks);
  Sha256 hash;
  Fields fields(block_tag);
  Key last = parent;
  std::size_t image = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t number = first_block + block;
    while (image < images.size() && images[image].block < number) ++image;
    std::size_t end = image;
    while (end < images.size() && images[end].block == number) ++end;
    fields.restart();
    fields.add(ByteView(last.raw));
    fields.add(tokens.subspan(block * block_tokens, block_tokens));
    fields.number(static_cast<std::uint32_t>(end - image));
    for (; image < end; ++image) fields.add(ByteView(images[image].digest));
    hash.update(fields.bytes());
    last.raw = hash.finish();
    keys.push_back(last);
  }
  return keys;
}

}  // namespace di::kv
