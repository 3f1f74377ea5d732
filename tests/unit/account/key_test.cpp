#include "account/key.h"

#include <gtest/gtest.h>

#include <fstream>

namespace di::account {
namespace {

TEST(Key, GeneratedKeysAreFoundByTextAndByHash) {
  const std::string key = key_generate();
  EXPECT_EQ(key.size(), 6U + 8 + 1 + 43);
  KeyTable table;
  ASSERT_TRUE(table.add(key, "acme"));
  ASSERT_NE(table.find(key), nullptr);
  EXPECT_EQ(table.find(key)->tenant, "acme");
  EXPECT_EQ(table.find(key)->key_id, key.substr(6, 8));
  EXPECT_EQ(table.find(key + "x"), nullptr);
  EXPECT_EQ(table.find(""), nullptr);
  EXPECT_EQ(table.add(key, "other").error().code, Code::exists);

  KeyTable hashed;
  ASSERT_TRUE(hashed.add("sha256:" + to_hex(sha256(as_bytes(key))), "acme"));
  EXPECT_NE(hashed.find(key), nullptr);
  EXPECT_EQ(key_hash_text(key), "sha256:" + to_hex(sha256(as_bytes(key))));
  EXPECT_TRUE(key_check(key));
  EXPECT_TRUE(key_check(key_hash_text(key)));
}

TEST(Key, MalformedKeysAreRefused) {
  KeyTable table;
  for (const char* bad : {"", "sk-di-", "sk-12345", "sha256:abc",
                          "sk-di-aaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}) {
    EXPECT_EQ(table.add(bad, "t").error().code, Code::invalid) << bad;
    EXPECT_EQ(key_check(bad).error().code, Code::invalid) << bad;
  }
}

TEST(Key, FileErrorsNameTheFile) {
  KeyTable table;
  const std::string path = testing::TempDir() + "di-key-test";
  std::ofstream(path) << key_generate() << "\nrest is ignored\n";
  EXPECT_TRUE(table.add_file(path, "default"));
  std::ofstream(path) << "nonsense\n";
  EXPECT_NE(table.add_file(path, "default").error().message.find(path), std::string::npos);
  EXPECT_EQ(table.add_file("/nonexistent/key", "default").error().code, Code::not_found);
}

TEST(Key, Headers) {
  EXPECT_FALSE(key_of_headers(std::nullopt, std::nullopt)->has_value());
  EXPECT_EQ(**key_of_headers("Bearer abc", std::nullopt), "abc");
  EXPECT_EQ(**key_of_headers("bearer  abc ", std::nullopt), "abc");
  EXPECT_EQ(**key_of_headers(std::nullopt, "abc"), "abc");
  EXPECT_EQ(**key_of_headers("Bearer abc", "abc"), "abc");
  EXPECT_FALSE(key_of_headers("Bearer abc", "def"));
  EXPECT_FALSE(key_of_headers("Basic abc", std::nullopt));
}

}  // namespace
}  // namespace di::account
