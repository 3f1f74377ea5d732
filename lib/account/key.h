// account/key.h: API keys: who may call, looked up by hash.
//
// A table is immutable once filled; a reload makes a new one and swaps it.  Keys have 256 random bits,
// so a plain SHA-256 is kept and looked up: no comparison of secrets, no timing signal.  Only the 8
// characters of the key id appear in logs and records.  Bound: keys_max.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/crypto.h"
#include "base/result.h"

namespace di::account {

inline constexpr std::size_t keys_max = 1'000'000;
inline constexpr std::size_t key_file_bytes_max = 4096;

struct KeyEntry {
  std::string tenant;
  std::string key_id;
};

class KeyTable {
 public:
  // `key` is a key's text, or "sha256:" and its 64 hexadecimal digits (key_hash_text).
  // Errors: invalid (malformed), exists (given twice), no_space.
  Status add(std::string_view key, std::string_view tenant);
  // key_file.cpp.  A file whose first line is one key.  Errors name the file.
  Status add_file(const std::string& path, std::string_view tenant);
  // Null when unknown.  Valid as long as the table.
  [[nodiscard]] const KeyEntry* find(std::string_view key) const;
  [[nodiscard]] std::size_t count() const { return by_hash_.size(); }

 private:
  std::map<Digest, KeyEntry> by_hash_;
};

// Whether `key` is one of the two forms that KeyTable::add() takes.
[[nodiscard]] Status key_check(std::string_view key);

// "sk-di-<8>-<43>", drawn from the operating system's generator.
[[nodiscard]] std::string key_generate();
// "sha256:" and the digits of it: what a configuration holds instead of the key.
[[nodiscard]] std::string key_hash_text(std::string_view key);

// The key that a request's headers carry: "Authorization: Bearer KEY" or "x-api-key: KEY".
// nullopt when there is none.  Errors: invalid when two different ones are given.
[[nodiscard]] Result<std::optional<std::string>> key_of_headers(std::optional<std::string_view> authorization,
                                                                std::optional<std::string_view> x_api_key);

}  // namespace di::account
