#include "kv/chain.h"

#include <gtest/gtest.h>

#include <array>
#include <set>

#include "base/file.h"
#include "base/json.h"

namespace di::kv {
namespace {

Bytes hex(const std::string& text) {
  Bytes out;
  EXPECT_TRUE(from_hex(text, out)) << text;
  return out;
}
Digest digest_of(const std::string& text) {
  const Bytes bytes = hex(text);
  Digest out{};
  EXPECT_EQ(bytes.size(), out.size());
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

// D02, D03: these keys hold for every process, machine and build.
TEST(Chain, golden_vectors) {
  const auto text = file_read(std::string(DI_SOURCE_DIR) + "/tests/golden/kv/chain.jsonl", 1 << 20);
  ASSERT_TRUE(text.ok());
  int vectors = 0;
  std::size_t at = 0;
  while (at < text->size()) {
    const std::size_t end = text->find('\n', at);
    const auto v = Json::parse(std::string_view(*text).substr(at, end - at));
    at = end + 1;
    ASSERT_TRUE(v.ok());
    const auto str = [&](std::string_view key) { return v->find(key)->as_string(); };
    SCOPED_TRACE(str("name"));
    const Digest salt =
        namespace_salt(hex(str("secret")), {str("domain"), str("user_id"), str("cache_salt")});
    EXPECT_EQ(to_hex(salt), str("salt"));
    Key root = chain_root(
        {Key{digest_of(str("fingerprint"))}, Key{digest_of(str("revision"))}, str("adapter"), salt});
    if (!str("public").empty()) root = chain_private_root(Key{digest_of(str("public"))}, salt);
    EXPECT_EQ(root.text(), str("root"));
    std::vector<std::uint32_t> tokens;
    for (const Json& id : v->find("tokens")->as_array())
      tokens.push_back(static_cast<std::uint32_t>(id.as_i64()));
    std::vector<BlockImage> images;
    for (const Json& pair : v->find("images")->as_array()) {
      images.push_back({static_cast<std::uint32_t>(pair.as_array()[0].as_i64()),
                        digest_of(pair.as_array()[1].as_string())});
    }
    const auto block_tokens = static_cast<std::uint32_t>(v->find("block_tokens")->as_i64());
    const std::vector<Key> keys = chain_keys(root, tokens, block_tokens, images);
    ASSERT_EQ(keys.size(), v->find("keys")->as_array().size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      EXPECT_EQ(keys[i].text(), v->find("keys")->as_array()[i].as_string());
    }
    ++vectors;
  }
  EXPECT_EQ(vectors, 6);
}

// On every disk: these numbers hold for good.
TEST(Chain, a_tenant_has_one_number) {
  EXPECT_EQ(tenant_number("default"), 0xb1de19c07c54d2d5U);
  EXPECT_EQ(tenant_number("lab"), 0xea44fe8c066796c1U);
  EXPECT_EQ(tenant_number(""), 0x1424c689eb6d5eadU);
  static_assert(tenant_nobody == 0);
}

// Everything a key depends on, in one place; each test changes one ingredient.
struct Ingredients {
  std::string secret = "secret";
  std::string domain = "acme";
  std::string user_id = "u1";
  std::string cache_salt = "s1";
  Key fingerprint{sha256(as_bytes("layout"))};
  Key revision{sha256(as_bytes("weights"))};
  std::string adapter;
  std::vector<std::uint32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<BlockImage> images = {{1, sha256(as_bytes("cat"))}};

  [[nodiscard]] Key root() const {
    return chain_root(
        {fingerprint, revision, adapter, namespace_salt(as_bytes(secret), {domain, user_id, cache_salt})});
  }
  [[nodiscard]] std::vector<Key> keys() const { return chain_keys(root(), tokens, 4, images); }
};

void expect_all_keys_differ(const Ingredients& changed) {
  const std::vector<Key> before = Ingredients{}.keys();
  const std::vector<Key> after = changed.keys();
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_NE(before[i], after[i]) << i;
}

TEST(Chain, secret_changes_the_keys) {
  Ingredients i;
  i.secret = "Secret";
  expect_all_keys_differ(i);
}
// D02: so do tenants.
TEST(Chain, isolation_domain_changes_the_keys) {
  Ingredients i;
  i.domain = "acmf";
  expect_all_keys_differ(i);
}
TEST(Chain, user_id_changes_the_keys) {
  Ingredients i;
  i.user_id = "";
  expect_all_keys_differ(i);
}
TEST(Chain, cache_salt_changes_the_keys) {
  Ingredients i;
  i.cache_salt = "s2";
  expect_all_keys_differ(i);
}
TEST(Chain, layout_changes_the_keys) {
  Ingredients i;
  i.fingerprint.raw[31] ^= std::byte{1};
  expect_all_keys_differ(i);
}
TEST(Chain, weights_change_the_keys) {
  Ingredients i;
  i.revision.raw[0] ^= std::byte{1};
  expect_all_keys_differ(i);
}
TEST(Chain, adapter_changes_the_keys) {
  Ingredients i;
  i.adapter = "lora";
  expect_all_keys_differ(i);
}
TEST(Chain, first_token_changes_every_key) {
  Ingredients i;
  i.tokens[0] = 9;
  expect_all_keys_differ(i);
}
TEST(Chain, later_token_changes_later_keys_only) {
  Ingredients i;
  i.tokens[7] = 9;
  EXPECT_EQ(i.keys()[0], Ingredients{}.keys()[0]);
  EXPECT_NE(i.keys()[1], Ingredients{}.keys()[1]);
}
TEST(Chain, image_changes_the_key_of_its_block) {
  Ingredients i;
  i.images[0].digest[5] ^= std::byte{1};
  EXPECT_EQ(i.keys()[0], Ingredients{}.keys()[0]);
  EXPECT_NE(i.keys()[1], Ingredients{}.keys()[1]);
  i.images.clear();
  EXPECT_NE(i.keys()[1], Ingredients{}.keys()[1]);
}
TEST(Chain, order_of_images_matters) {
  const Digest a = sha256(as_bytes("a"));
  const Digest b = sha256(as_bytes("b"));
  const std::array<std::uint32_t, 2> tokens = {1, 2};
  EXPECT_NE(block_key({}, tokens, std::array{a, b}), block_key({}, tokens, std::array{b, a}));
}
TEST(Chain, parent_changes_the_key) {
  const std::array<std::uint32_t, 2> tokens = {1, 2};
  EXPECT_NE(block_key({}, tokens), block_key(Key{sha256({})}, tokens));
}
TEST(Chain, private_root_depends_on_both_sides) {
  const Key public_key{sha256(as_bytes("p"))};
  const Digest salt = sha256(as_bytes("s"));
  EXPECT_NE(chain_private_root(public_key, salt), chain_private_root(Key{salt}, public_key.raw));
  EXPECT_NE(chain_private_root(public_key, salt), chain_private_root(public_key, sha256(as_bytes("t"))));
}

// Moving bytes from one field to its neighbour must not give the same hash.
// D01.
TEST(Chain, fields_cannot_run_into_each_other) {
  const Bytes secret(16, std::byte{7});
  std::set<Key> seen;
  for (const Namespace& who :
       {Namespace{"ab", "c", ""}, Namespace{"a", "bc", ""}, Namespace{"abc", "", ""},
        Namespace{"", "abc", ""}, Namespace{"", "", "abc"}, Namespace{"ab", "", "c"}}) {
    EXPECT_TRUE(seen.insert(Key{namespace_salt(secret, who)}).second);
  }
  // Nor can an adapter pass for a salt.
  const auto root = [&](const std::string& adapter, const std::string& cache_salt) {
    return chain_root({Key{}, Key{}, adapter, namespace_salt(secret, {"", "", cache_salt})});
  };
  seen.clear();
  for (const auto& [adapter, cache_salt] : std::initializer_list<std::pair<std::string, std::string>>{
           {"X", ""}, {"", "X"}, {"X", "X"}, {"ab", "c"}, {"a", "bc"}, {"abc", ""}, {"", "abc"}, {"", ""}}) {
    EXPECT_TRUE(seen.insert(root(adapter, cache_salt)).second) << adapter << "," << cache_salt;
  }
}

// A block of twice the tokens is not two blocks, and a block with an image is not a longer block whose
// tokens spell the image's digest.
TEST(Chain, longer_input_is_another_input) {
  const std::array<std::uint32_t, 2> two = {1, 2};
  const std::array<std::uint32_t, 4> four = {1, 2, 3, 4};
  EXPECT_NE(block_key({}, four), block_key(block_key({}, two), std::span(four).subspan(2)));
  const Digest image = sha256(as_bytes("image"));
  std::vector<std::uint32_t> spelled = {1, 2, 1, 32};
  for (std::size_t i = 0; i < 32; i += 4) spelled.push_back(get_le<std::uint32_t>(&image[i]));
  EXPECT_NE(block_key({}, two, std::array<Digest, 1>{image}), block_key({}, spelled));
  // A key of a chain is no root of another: the tags differ.
  EXPECT_NE(chain_root({}), block_key({}, {}));
}

TEST(Chain, extending_from_any_block_gives_the_same_keys) {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t i = 0; i < 40; ++i) tokens.push_back(i * 7);
  const std::vector<BlockImage> images = {{1, sha256(as_bytes("a"))}, {3, sha256(as_bytes("b"))}, {9, {}}};
  const std::vector<Key> all = chain_keys({}, tokens, 4, images);
  ASSERT_EQ(all.size(), 10u);
  for (std::uint32_t from = 1; from < 10; ++from) {
    const std::vector<Key> rest =
        chain_keys(all[from - 1], std::span(tokens).subspan(from * 4), 4, images, from);
    EXPECT_EQ(rest, std::vector<Key>(all.begin() + from, all.end())) << from;
  }
}

// D04: a prompt that is cached to its last token has something left to compute.
TEST(Chain, usable_blocks_leaves_a_token_to_compute) {
  EXPECT_EQ(usable_blocks(0, 32), 0u);
  EXPECT_EQ(usable_blocks(1, 32), 0u);
  EXPECT_EQ(usable_blocks(32, 32), 0u);
  EXPECT_EQ(usable_blocks(33, 32), 1u);
  EXPECT_EQ(usable_blocks(64, 32), 1u);
  EXPECT_EQ(usable_blocks(2000, 32), 62u);
}

}  // namespace
}  // namespace di::kv
