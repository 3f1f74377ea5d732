#include "account/key.h"

#include <algorithm>

#include "base/assert.h"

namespace di::account {

namespace {

constexpr std::string_view key_prefix = "sk-di-";
constexpr std::size_t key_id_chars = 8;
constexpr std::size_t key_secret_chars = 43;
constexpr std::string_view hash_prefix = "sha256:";
constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

bool well_formed(std::string_view key) {
  const std::size_t secret_at = key_prefix.size() + key_id_chars + 1;
  if (key.size() != secret_at + key_secret_chars || !key.starts_with(key_prefix) || key[secret_at - 1] != '-')
    return false;
  return std::all_of(key.begin(), key.end(),
                     [](char c) { return alphabet.find(c) != std::string_view::npos; });
}

std::string random_text(std::size_t chars) {
  std::string out(chars, '\0');
  Bytes raw(chars);
  random_bytes(raw);
  for (std::size_t i = 0; i < chars; ++i)
    out[i] = alphabet[std::to_integer<std::size_t>(raw[i]) % alphabet.size()];
  return out;
}

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

bool equals_ignoring_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&](char x, char y) { return lower(x) == lower(y); });
}

}  // namespace

Status key_check(std::string_view key) {
  Bytes raw;
  if (key.starts_with(hash_prefix)) {
    if (from_hex(key.substr(hash_prefix.size()), raw) && raw.size() == Digest{}.size()) return {};
    return Error{Code::invalid, 0, "an API key given as sha256: needs 64 hexadecimal digits"};
  }
  if (well_formed(key)) return {};
  return Error{Code::invalid, 0,
               "an API key must look like sk-di-XXXXXXXX-(43 characters), as di-ctl keygen api makes it"};
}

Status KeyTable::add(std::string_view key, std::string_view tenant) {
  if (by_hash_.size() >= keys_max) return Error{Code::no_space, 0, "too many API keys"};
  DI_TRY(key_check(key));
  Digest hash;
  std::string key_id;
  if (key.starts_with(hash_prefix)) {
    Bytes raw;
    DI_ASSERT(from_hex(key.substr(hash_prefix.size()), raw));
    std::copy(raw.begin(), raw.end(), hash.begin());
    key_id = to_hex(ByteView(raw).first(key_id_chars / 2));
  } else {
    hash = sha256(as_bytes(key));
    key_id = key.substr(key_prefix.size(), key_id_chars);
  }
  if (!by_hash_.emplace(hash, KeyEntry{std::string(tenant), std::move(key_id)}).second) {
    return Error{Code::exists, 0, "an API key is given twice"};
  }
  return {};
}

const KeyEntry* KeyTable::find(std::string_view key) const {
  const auto found = by_hash_.find(sha256(as_bytes(key)));
  return found == by_hash_.end() ? nullptr : &found->second;
}

std::string key_generate() {
  return std::string(key_prefix) + random_text(key_id_chars) + "-" + random_text(key_secret_chars);
}

std::string key_hash_text(std::string_view key) {
  return std::string(hash_prefix) + to_hex(sha256(as_bytes(key)));
}

Result<std::optional<std::string>> key_of_headers(std::optional<std::string_view> authorization,
                                                  std::optional<std::string_view> x_api_key) {
  std::optional<std::string> bearer;
  if (authorization.has_value()) {
    const std::string_view text = trimmed(*authorization);
    const std::size_t space = text.find(' ');
    if (space == std::string_view::npos || !equals_ignoring_case(text.substr(0, space), "bearer")) {
      if (!x_api_key.has_value())
        return Error{Code::invalid, 0, "the Authorization header must be 'Bearer KEY'"};
    } else {
      bearer = trimmed(text.substr(space + 1));
    }
  }
  if (x_api_key.has_value()) {
    const std::string other(trimmed(*x_api_key));
    if (bearer.has_value() && *bearer != other)
      return Error{Code::invalid, 0, "two different API keys in one request"};
    return std::optional<std::string>(other);
  }
  return bearer;
}

}  // namespace di::account
