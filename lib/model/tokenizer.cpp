#include "model/tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "base/file.h"
#include "base/json.h"

namespace di::model {

namespace {

constexpr TokenId no_token = UINT32_MAX;

// The bytes of the well-formed UTF-8 character at the front of `text`, or 0.
std::size_t utf8_character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (text.empty()) return 0;
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  std::size_t bytes = 0;
  unsigned char low = 0x80;   // bounds of the second byte: they exclude overlong forms,
  unsigned char high = 0xbf;  // surrogates and what lies beyond U+10FFFF
  if (first >= 0xc2 && first <= 0xdf) {
    bytes = 2;
  } else if (first >= 0xe0 && first <= 0xef) {
    bytes = 3;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;
  } else if (first >= 0xf0 && first <= 0xf4) {
    bytes = 4;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  if (text.size() < bytes || byte(1) < low || byte(1) > high) return 0;
  for (std::size_t i = 2; i < bytes; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  return bytes;
}

// The length of the longest prefix that is UTF-8, or (when that is empty) of the longest that has no
// character in it.
std::size_t utf8_run_bytes(std::string_view text, bool& valid) {
  std::size_t at = 0;
  while (const std::size_t bytes = utf8_character_bytes(text.substr(at))) at += bytes;
  valid = at > 0;
  if (!valid) {
    while (at < text.size() && utf8_character_bytes(text.substr(at)) == 0) ++at;
  }
  return at;
}

void utf8_append(std::string& out, std::uint32_t code_point) {
  if (code_point < 0x80) {
    out.push_back(static_cast<char>(code_point));
  } else {  // the byte-level alphabet ends at U+0143
    out.push_back(static_cast<char>(0xc0 | (code_point >> 6)));
    out.push_back(static_cast<char>(0x80 | (code_point & 0x3f)));
  }
}

// GPT-2's bijection of bytes to printable characters: printable Latin-1 stands for itself, the other
// 68 bytes are U+0100 and on, in order.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    bytes_.fill(-1);
    std::uint32_t next = 0x100;
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      const std::uint32_t code_point = printable ? byte : next++;
      bytes_[code_point] = static_cast<int>(byte);
      utf8_append(characters_[byte], code_point);
    }
  }

  [[nodiscard]] const std::string& character(unsigned char byte) const { return characters_[byte]; }

  // False when `text` has a character outside the alphabet.
  bool to_bytes(std::string_view text, std::string& out) const {
    out.clear();
    for (std::size_t i = 0; i < text.size();) {
      const std::size_t bytes = utf8_character_bytes(text.substr(i));
      std::uint32_t code_point = static_cast<unsigned char>(text[i]);
      if (bytes == 2) {
        code_point = ((code_point & 0x1f) << 6) | (static_cast<unsigned char>(text[i + 1]) & 0x3f);
      } else if (bytes != 1) {
        return false;
      }
      if (code_point >= bytes_.size() || bytes_[code_point] < 0) return false;
      out.push_back(static_cast<char>(bytes_[code_point]));
      i += bytes;
    }
    return true;
  }

 private:
  std::array<int, 0x144> bytes_;
  std::array<std::string, 256> characters_;
};

// The published files are written for Oniguruma.  What PCRE2 reads differently is rewritten or
// refused: `\s` (PCRE2 counts U+180E, Unicode since 6.3 does not), nested classes and `&&`.
Result<std::string> pattern_translate(std::string_view pattern) {
  constexpr std::string_view space =
      "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{"
      "3000}";
  std::string out;
  bool in_class = false;
  bool class_open = false;  // directly after `[` or `[^`, where `]` would be a character
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const bool first_in_class = std::exchange(class_open, false);
    if (c == '\\') {
      if (++i == pattern.size()) return Error{Code::invalid, 0, "pattern ends in a backslash"};
      const char escaped = pattern[i];
      if (escaped == 's') {
        out.append(in_class ? "" : "[").append(space).append(in_class ? "" : "]");
      } else if (escaped == 'S') {
        if (in_class) return Error{Code::unsupported, 0, "\\S in a character class of a pattern"};
        out.append("[^").append(space).append("]");
      } else if (escaped == 'h' || escaped == 'H' || escaped == 'R' || escaped == 'O' || escaped == 'N' ||
                 escaped == 'K' || escaped == 'C' || escaped == 'Q' || escaped == 'E') {
        // A hexadecimal digit there, horizontal space here, and the like.
        return Error{Code::unsupported, 0, std::string("\\") + escaped + " in a pattern"};
      } else {
        out.append({c, escaped});
      }
      continue;
    }
    if (in_class) {
      if (c == '[') return Error{Code::unsupported, 0, "a class inside a character class of a pattern"};
      if (c == '&' && i + 1 < pattern.size() && pattern[i + 1] == '&') {
        return Error{Code::unsupported, 0, "&& in a character class of a pattern"};
      }
      if (c == '^' && first_in_class && out.back() == '[') {
        class_open = true;
      } else if (c == ']') {
        if (first_in_class) return Error{Code::unsupported, 0, "] first in a character class of a pattern"};
        in_class = false;
      }
    } else if (c == '[') {
      in_class = class_open = true;
    }
    out.push_back(c);
  }
  return out;
}

class Pattern {
 public:
  static Result<Pattern> compile(std::string_view text, bool literal) {
    std::string translated(text);
    std::uint32_t flags = PCRE2_UTF | PCRE2_NO_UTF_CHECK;
    if (literal) {
      flags |= PCRE2_LITERAL;
    } else {
      auto result = pattern_translate(text);
      if (!result) return result.error();
      translated = std::move(*result);
      flags |= PCRE2_UCP;
    }
    int code = 0;
    std::size_t offset = 0;
    Pattern pattern;
    pattern.code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                      flags, &code, &offset, nullptr));
    if (pattern.code_ == nullptr) {
      return Error{Code::invalid, 0, "pattern '" + std::string(text) + "': " + message(code)};
    }
    std::uint32_t match_empty = 0;
    pcre2_pattern_info(pattern.code_.get(), PCRE2_INFO_MATCHEMPTY, &match_empty);
    if (match_empty != 0) {
      return Error{Code::unsupported, 0, "pattern '" + std::string(text) + "' can match nothing"};
    }
    // Without the compiler (a hardened kernel may forbid it) matching is slower and the same.
    pattern.jit_ = pcre2_jit_compile(pattern.code_.get(), PCRE2_JIT_COMPLETE) == 0;
    return pattern;
  }

  // Calls piece(view, is_match) for each match and each gap of `text`, in order.  `text` is UTF-8.
  template <class Piece>
  Status for_each(std::string_view text, Piece&& piece) const {
    const std::unique_ptr<pcre2_match_data, Free> data(pcre2_match_data_create(1, nullptr));
    if (data == nullptr) return Error{Code::no_space, 0, "no memory to match a pattern"};
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    std::size_t at = 0;
    while (at < text.size()) {
      // The subject is checked once by the caller; pcre2_match would check it all again each time.
      const int count =
          jit_ ? pcre2_jit_match(code_.get(), subject, text.size(), at, 0, data.get(), nullptr)
               : pcre2_match(code_.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK, data.get(), nullptr);
      if (count == PCRE2_ERROR_NOMATCH) break;
      if (count < 0) return Error{Code::no_space, 0, "matching a pattern: " + message(count)};
      const std::size_t* range = pcre2_get_ovector_pointer(data.get());
      if (range[1] <= range[0] || range[0] < at) {  // \K is refused; this is for what else there may be
        return Error{Code::unsupported, 0, "a pattern matched backwards"};
      }
      if (range[0] > at) piece(text.substr(at, range[0] - at), false);
      piece(text.substr(range[0], range[1] - range[0]), true);
      at = range[1];
    }
    if (at < text.size()) piece(text.substr(at), false);
    return Ok{};
  }

 private:
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  };

  static std::string message(int code) {
    std::array<PCRE2_UCHAR, 256> text{};
    pcre2_get_error_message(code, text.data(), text.size());
    return reinterpret_cast<const char*>(text.data());
  }

  std::unique_ptr<pcre2_code, Free> code_;
  bool jit_ = false;
};

enum class SplitBehavior : std::uint8_t { isolated, removed, merged_with_previous };

struct SplitStep {
  Pattern pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
};

// What ByteLevel splits by when use_regex is true.
constexpr std::string_view byte_level_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Replaces `pieces` by what the step makes of each of them.
Status split(const SplitStep& step, std::vector<std::string_view>& pieces) {
  std::vector<std::string_view> out;
  out.reserve(pieces.size() * 2);
  for (const std::string_view whole : pieces) {
    const std::size_t first = out.size();
    bool previous_match = false;
    DI_TRY(step.pattern.for_each(whole, [&](std::string_view piece, bool is_match) {
      switch (step.behavior) {
        case SplitBehavior::isolated:
          out.push_back(piece);
          break;
        case SplitBehavior::removed:
          if (!is_match) out.push_back(piece);
          break;
        case SplitBehavior::merged_with_previous:
          if (is_match && !previous_match && out.size() > first) {
            out.back() = {out.back().data(), out.back().size() + piece.size()};
          } else {
            out.push_back(piece);
          }
          previous_match = is_match;
          break;
      }
    }));
  }
  pieces = std::move(out);
  return Ok{};
}

struct Merge {
  std::uint32_t rank = 0;
  TokenId product = no_token;
};

// (left, right) -> Merge: open addressing, because this look-up is most of an encode.
class MergeTable {
 public:
  explicit MergeTable(std::size_t count) {
    std::size_t slots = 16;
    while (slots < count * 2) slots *= 2;
    slots_.resize(slots);
  }

  // A pair given again takes the later rank, as in the Hugging Face reader.
  void put(TokenId left, TokenId right, Merge merge) {
    std::size_t at = slot(left, right);
    while (slots_[at].merge.product != no_token && !(slots_[at].left == left && slots_[at].right == right)) {
      at = (at + 1) & (slots_.size() - 1);
    }
    slots_[at] = {left, right, merge};
  }

  // product == no_token when the pair does not merge.
  [[nodiscard]] Merge find(TokenId left, TokenId right) const {
    std::size_t at = slot(left, right);
    while (slots_[at].merge.product != no_token) {
      if (slots_[at].left == left && slots_[at].right == right) return slots_[at].merge;
      at = (at + 1) & (slots_.size() - 1);
    }
    return {};
  }

 private:
  struct Slot {
    TokenId left = 0;
    TokenId right = 0;
    Merge merge;
  };

  [[nodiscard]] std::size_t slot(TokenId left, TokenId right) const {
    const std::uint64_t key = (std::uint64_t{left} << 32 | right) * 0x9e3779b97f4a7c15ULL;
    return static_cast<std::size_t>(key >> 20) & (slots_.size() - 1);
  }

  std::vector<Slot> slots_;
};

// A symbol of the word in work: a doubly linked list in a vector, so that a merge is O(1).
struct Symbol {
  TokenId id = no_token;  // no_token: merged into the symbol before it
  std::int32_t previous = -1;
  std::int32_t next = -1;
};

struct Candidate {
  std::uint32_t rank = 0;
  std::int32_t at = 0;  // index of the left symbol
  TokenId product = no_token;

  // For a heap whose top is the lowest rank, leftmost first.
  friend bool operator<(const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  }
};

// Memory that one encode uses again for each of its words.
struct Work {
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

// A trie over bytes: the longest added token at a position, in one pass however many there are.
class AddedTrie {
 public:
  void put(std::string_view content, TokenId id) {
    std::uint32_t node = 0;
    for (const char c : content) {
      const auto [entry, fresh] = edges_.try_emplace(key(node, c), static_cast<std::uint32_t>(ids_.size()));
      if (fresh) ids_.push_back(no_token);
      node = entry->second;
    }
    ids_[node] = id;
    first_[static_cast<unsigned char>(content.front())] = true;
  }

  // The length of the longest token at the front of `text` (0: none) and its id.
  std::size_t longest(std::string_view text, TokenId& id) const {
    if (!first_[static_cast<unsigned char>(text.front())]) return 0;
    std::uint32_t node = 0;
    std::size_t found = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto entry = edges_.find(key(node, text[i]));
      if (entry == edges_.end()) break;
      node = entry->second;
      if (ids_[node] != no_token) {
        id = ids_[node];
        found = i + 1;
      }
    }
    return found;
  }

 private:
  static std::uint64_t key(std::uint32_t node, char c) {
    return std::uint64_t{node} << 8 | static_cast<unsigned char>(c);
  }

  std::unordered_map<std::uint64_t, std::uint32_t> edges_;
  std::vector<TokenId> ids_{no_token};
  std::array<bool, 256> first_{};
};

struct Token {
  std::string bytes;
  bool known = false;
  bool special = false;
  bool plain = false;  // plain text can produce it: a byte, or the product of a merge
};

// A stretch of text, or an added token found in it.
struct Stretch {
  std::string_view text;
  TokenId added = no_token;
};

void cut_added(const AddedTrie& trie, std::vector<Stretch>& stretches) {
  std::vector<Stretch> out;
  for (const Stretch& stretch : stretches) {
    if (stretch.added != no_token) {
      out.push_back(stretch);
      continue;
    }
    std::size_t plain = 0;
    for (std::size_t i = 0; i < stretch.text.size();) {
      TokenId id = no_token;
      const std::size_t bytes = trie.longest(stretch.text.substr(i), id);
      if (bytes == 0) {
        ++i;
        continue;
      }
      if (i > plain) out.push_back({stretch.text.substr(plain, i - plain), no_token});
      out.push_back({stretch.text.substr(i, bytes), id});
      i += bytes;
      plain = i;
    }
    if (plain < stretch.text.size()) out.push_back({stretch.text.substr(plain), no_token});
  }
  stretches = std::move(out);
}

}  // namespace

struct Tokenizer::State {
  std::vector<Token> tokens;                     // by id
  std::unordered_map<std::string, TokenId> ids;  // raw bytes of the vocabulary's entries
  std::unordered_map<std::string, TokenId> added_ids;
  std::array<TokenId, 256> byte_ids{};
  MergeTable merges{0};
  bool ignore_merges = false;
  std::size_t token_bytes_max = 1;  // of the longest token
  std::vector<SplitStep> steps;
  AddedTrie added_raw;         // normalized = false: cut out first, as Hugging Face does,
  AddedTrie added_normalized;  // then these (there is no normalizer, only the order differs)

  Status read(const Json& root);
  Status read_added(const Json& root);
  Status read_model(const Json& model);
  Status read_merges(const Json& list, const std::unordered_map<std::string_view, TokenId>& vocab);
  Status read_pre_tokenizer(const Json& json);
  Status read_split(const Json& json);
  void put_token(TokenId id, Token token);
  void encode_word(std::string_view word, Work& work, std::vector<TokenId>& out) const;
};

namespace {

Error invalid(std::string message) {
  return Error{Code::invalid, 0, std::move(message)};
}
Error unsupported(std::string message) {
  return Error{Code::unsupported, 0, std::move(message)};
}

bool absent(const Json* json) {
  return json == nullptr || json->is_null();
}

std::string_view type_of(const Json& json) {
  const Json* type = json.find("type");
  return type != nullptr && type->is_string() ? std::string_view(type->as_string()) : std::string_view{};
}

// A boolean member; `otherwise` when absent.
Result<bool> flag(const Json& json, std::string_view key, bool otherwise) {
  const Json* member = json.find(key);
  if (absent(member)) return otherwise;
  if (!member->is_bool())
    return invalid("'" + std::string(key) + "' is a " + std::string(member->type_name()) +
                   ", want a boolean");
  return member->as_bool();
}

Status refuse_flag(const Json& json, std::string_view key) {
  const auto value = flag(json, key, false);
  if (!value) return value.error();
  if (*value) return unsupported("'" + std::string(key) + "': true");
  return Ok{};
}

// "a", "a b": a list in words for a message.
std::string type_words(const Json& json) {
  const std::string_view type = type_of(json);
  return type.empty() ? std::string("without a type") : "of type '" + std::string(type) + "'";
}

// Nothing, or a Sequence of nothing.
bool normalizer_empty(const Json* json) {
  if (absent(json)) return true;
  if (type_of(*json) != "Sequence") return false;
  const Json* list = json->find("normalizers");
  return list != nullptr && list->is_array() && list->as_array().empty();
}

}  // namespace

void Tokenizer::State::put_token(TokenId id, Token token) {
  if (id >= tokens.size()) tokens.resize(std::size_t{id} + 1);
  token_bytes_max = std::max(token_bytes_max, token.bytes.size());
  token.known = true;
  tokens[id] = std::move(token);
}

Status Tokenizer::State::read(const Json& root) {
  if (!root.is_object()) return invalid("is a JSON " + std::string(root.type_name()) + ", want an object");
  for (const char* key : {"truncation", "padding"}) {
    if (!absent(root.find(key))) return unsupported("'" + std::string(key) + "' is set");
  }
  if (!normalizer_empty(root.find("normalizer"))) {
    return unsupported("a normalizer " + type_words(*root.find("normalizer")));
  }
  const Json* model = root.find("model");
  if (absent(model) || !model->is_object()) return invalid("'model' is missing");
  if (const auto status = read_model(*model); !status) return status.error().in("model");
  if (const auto status = read_added(root); !status) return status.error().in("added_tokens");
  const Json* pre_tokenizer = root.find("pre_tokenizer");
  if (absent(pre_tokenizer)) return unsupported("no pre_tokenizer, want one that ends in ByteLevel");
  if (const auto status = read_pre_tokenizer(*pre_tokenizer); !status)
    return status.error().in("pre_tokenizer");
  // The post-processor adds what the chat format adds here, or trims offsets, which we have none of.
  const Json* decoder = root.find("decoder");
  if (absent(decoder) || type_of(*decoder) != "ByteLevel") {
    return unsupported(absent(decoder) ? std::string("no decoder, want ByteLevel")
                                       : "a decoder " + type_words(*decoder) + ", want ByteLevel");
  }
  return Ok{};
}

Status Tokenizer::State::read_model(const Json& model) {
  if (!absent(model.find("type")) && type_of(model) != "BPE")
    return unsupported(type_words(model) + ", want BPE");
  const Json* dropout = model.find("dropout");
  if (!absent(dropout) && !(dropout->is_number() && dropout->as_double() == 0))
    return unsupported("'dropout' is set");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json* affix = model.find(key);
    if (!absent(affix) && !(affix->is_string() && affix->as_string().empty())) {
      return unsupported("'" + std::string(key) + "' is set");
    }
  }
  DI_TRY(refuse_flag(model, "byte_fallback"));
  const auto ignore = flag(model, "ignore_merges", false);
  if (!ignore) return ignore.error();
  ignore_merges = *ignore;

  const Json* vocab = model.find("vocab");
  if (absent(vocab) || !vocab->is_object()) return invalid("'vocab' is missing or not an object");
  static const ByteAlphabet alphabet;
  std::unordered_map<std::string_view, TokenId> by_text;  // views into the Json
  by_text.reserve(vocab->as_object().size());
  ids.reserve(vocab->as_object().size());
  for (const auto& [text, id] : vocab->as_object()) {
    if (!id.is_integer() || id.as_i64() < 0 || id.as_i64() >= vocab_max) {
      return invalid("vocab entry '" + text + "': want an id from 0 to " + std::to_string(vocab_max - 1));
    }
    const auto token_id = static_cast<TokenId>(id.as_i64());
    if (token_id < tokens.size() && tokens[token_id].known) {
      return invalid("vocab entry '" + text + "': id " + std::to_string(token_id) + " is taken");
    }
    if (!by_text.emplace(text, token_id).second) return invalid("vocab entry '" + text + "' appears twice");
    Token token;
    // A special token may be listed here in plain text; no merge leads to it and its bytes are its text.
    if (alphabet.to_bytes(text, token.bytes)) {
      ids.emplace(token.bytes, token_id);
    } else {
      token.bytes = text;
    }
    put_token(token_id, std::move(token));
  }
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const auto entry = by_text.find(alphabet.character(static_cast<unsigned char>(byte)));
    if (entry == by_text.end()) {
      return invalid("vocab has no token for byte " + std::to_string(byte) + ": not a byte-level vocabulary");
    }
    byte_ids[byte] = entry->second;
    tokens[entry->second].plain = true;
  }
  const Json* list = model.find("merges");
  if (absent(list) || !list->is_array()) return invalid("'merges' is missing or not an array");
  return read_merges(*list, by_text);
}

Status Tokenizer::State::read_merges(const Json& list,
                                     const std::unordered_map<std::string_view, TokenId>& vocab) {
  merges = MergeTable(list.as_array().size());
  std::uint32_t rank = 0;
  std::string product;
  for (const Json& merge : list.as_array()) {
    const std::string where = "merge " + std::to_string(rank);
    std::string_view left;
    std::string_view right;
    if (merge.is_string()) {
      const std::string_view text = merge.as_string();
      const std::size_t space = text.find(' ');
      if (space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos) {
        left = text.substr(0, space);
        right = text.substr(space + 1);
      }
    } else if (merge.is_array() && merge.as_array().size() == 2 && merge.as_array()[0].is_string() &&
               merge.as_array()[1].is_string()) {
      left = merge.as_array()[0].as_string();
      right = merge.as_array()[1].as_string();
    }
    if (left.empty() || right.empty()) return invalid(where + ": want \"a b\" or [\"a\",\"b\"]");
    product.assign(left).append(right);
    std::array<TokenId, 3> found{};
    const std::array<std::string_view, 3> parts{left, right, product};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto entry = vocab.find(parts[i]);
      if (entry == vocab.end()) return invalid(where + ": '" + std::string(parts[i]) + "' is not in vocab");
      found[i] = entry->second;
    }
    merges.put(found[0], found[1], {rank, found[2]});
    tokens[found[2]].plain = true;
    ++rank;
  }
  return Ok{};
}

Status Tokenizer::State::read_added(const Json& root) {
  const Json* list = root.find("added_tokens");
  if (absent(list)) return Ok{};
  if (!list->is_array()) return invalid("is a JSON " + std::string(list->type_name()) + ", want an array");
  for (const Json& entry : list->as_array()) {
    const Json* content = entry.find("content");
    const Json* id = entry.find("id");
    if (absent(content) || !content->is_string() || content->as_string().empty()) {
      return invalid("an entry has no 'content'");
    }
    const std::string& text = content->as_string();
    if (absent(id) || !id->is_integer() || id->as_i64() < 0 || id->as_i64() >= vocab_max) {
      return invalid("'" + text + "': want an id from 0 to " + std::to_string(vocab_max - 1));
    }
    const auto token_id = static_cast<TokenId>(id->as_i64());
    for (const char* key : {"single_word", "lstrip", "rstrip"}) {
      if (const auto status = refuse_flag(entry, key); !status) return status.error().in("'" + text + "'");
    }
    const auto special = flag(entry, "special", false);
    const auto normalized = flag(entry, "normalized", !(special && *special));
    if (!special) return special.error().in("'" + text + "'");
    if (!normalized) return normalized.error().in("'" + text + "'");
    if (token_id < tokens.size() && tokens[token_id].known && tokens[token_id].bytes != text) {
      return invalid("'" + text + "': id " + std::to_string(token_id) + " is taken by another token");
    }
    if (!added_ids.emplace(text, token_id).second) return invalid("'" + text + "' appears twice");
    const bool plain = token_id < tokens.size() && tokens[token_id].plain;
    if (plain && *special) return invalid("'" + text + "' is special, but plain text can produce it");
    // With ignore_merges a whole word is looked up: it must not find a token that only we may place.
    if (!plain) ids.erase(text);
    (*normalized ? added_normalized : added_raw).put(text, token_id);
    put_token(token_id, Token{text, true, *special, plain});
  }
  return Ok{};
}

Status Tokenizer::State::read_pre_tokenizer(const Json& json) {
  std::vector<const Json*> parts;
  if (type_of(json) == "Sequence") {
    const Json* list = json.find("pretokenizers");
    if (absent(list) || !list->is_array()) return invalid("'pretokenizers' is missing or not an array");
    for (const Json& part : list->as_array()) parts.push_back(&part);
  } else {
    parts.push_back(&json);
  }
  if (parts.size() > split_steps_max)
    return unsupported("more than " + std::to_string(split_steps_max) + " steps");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Json& part = *parts[i];
    const std::string_view type = type_of(part);
    if (type == "Split") {
      DI_TRY(read_split(part));
    } else if (type == "ByteLevel" && i + 1 == parts.size()) {
      const auto prefix = flag(part, "add_prefix_space", true);  // the default there is true
      if (!prefix) return prefix.error();
      if (*prefix) return unsupported("ByteLevel with add_prefix_space");
      const auto use_regex = flag(part, "use_regex", true);
      if (!use_regex) return use_regex.error();
      if (*use_regex) {
        auto pattern = Pattern::compile(byte_level_pattern, false);
        if (!pattern) return pattern.error();
        steps.push_back({std::move(*pattern), SplitBehavior::isolated});
      }
      return Ok{};
    } else {
      return unsupported("a step " + type_words(part) + ", want Split steps and then ByteLevel");
    }
  }
  return unsupported("no ByteLevel step at the end");
}

Status Tokenizer::State::read_split(const Json& json) {
  DI_TRY(refuse_flag(json, "invert"));
  const Json* pattern = json.find("pattern");
  const Json* regex = pattern == nullptr ? nullptr : pattern->find("Regex");
  const Json* literal = pattern == nullptr ? nullptr : pattern->find("String");
  const Json* text = regex != nullptr ? regex : literal;
  if (text == nullptr || !text->is_string() || text->as_string().empty()) {
    return invalid("a Split has no 'pattern' with 'Regex' or 'String'");
  }
  auto compiled = Pattern::compile(text->as_string(), regex == nullptr);
  if (!compiled) return compiled.error();
  const Json* behavior = json.find("behavior");
  const std::string name = behavior != nullptr && behavior->is_string() ? behavior->as_string() : "";
  SplitStep step{std::move(*compiled), SplitBehavior::isolated};
  if (name == "Removed") {
    step.behavior = SplitBehavior::removed;
  } else if (name == "MergedWithPrevious") {
    step.behavior = SplitBehavior::merged_with_previous;
  } else if (name != "Isolated") {
    return unsupported("a Split with behavior '" + name + "'");
  }
  steps.push_back(std::move(step));
  return Ok{};
}

void Tokenizer::State::encode_word(std::string_view word, Work& work, std::vector<TokenId>& out) const {
  if (ignore_merges) {
    if (const auto entry = ids.find(std::string(word)); entry != ids.end()) {
      out.push_back(entry->second);
      return;
    }
  }
  std::vector<Symbol>& symbols = work.symbols;
  symbols.clear();
  for (const char c : word) {
    const auto at = static_cast<std::int32_t>(symbols.size());
    symbols.push_back({byte_ids[static_cast<unsigned char>(c)], at - 1, at + 1});
  }
  symbols.back().next = -1;

  std::vector<Candidate>& heap = work.heap;
  heap.clear();
  const auto offer = [&](std::int32_t left, std::int32_t right) {
    const Merge merge =
        merges.find(symbols[static_cast<std::size_t>(left)].id, symbols[static_cast<std::size_t>(right)].id);
    if (merge.product != no_token) heap.push_back({merge.rank, left, merge.product});
    return merge.product != no_token;
  };
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
    offer(static_cast<std::int32_t>(i), static_cast<std::int32_t>(i + 1));
  }
  std::make_heap(heap.begin(), heap.end());
  while (!heap.empty()) {
    const Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
    Symbol& left = symbols[static_cast<std::size_t>(best.at)];
    if (left.id == no_token || left.next < 0) continue;
    Symbol& right = symbols[static_cast<std::size_t>(left.next)];
    // An entry is stale once either side has merged with another.
    if (merges.find(left.id, right.id).product != best.product) continue;
    left.id = best.product;
    right.id = no_token;
    left.next = right.next;
    if (left.next >= 0) symbols[static_cast<std::size_t>(left.next)].previous = best.at;
    if (left.previous >= 0 && offer(left.previous, best.at)) std::push_heap(heap.begin(), heap.end());
    if (left.next >= 0 && offer(best.at, left.next)) std::push_heap(heap.begin(), heap.end());
  }
  for (std::int32_t at = 0; at >= 0; at = symbols[static_cast<std::size_t>(at)].next) {
    out.push_back(symbols[static_cast<std::size_t>(at)].id);
  }
}

Result<std::vector<TokenId>> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  std::vector<TokenId> out;
  // Symbols are numbered in 31 bits; the daemons bound a prompt far below this.
  if (text.size() >= INT32_MAX) return Error{Code::invalid, 0, "text of 2 GiB or more"};
  out.reserve(text.size() / 3);
  std::vector<Stretch> stretches;
  if (!text.empty()) stretches.push_back({text, no_token});
  if (options.allow_special) {
    cut_added(state_->added_raw, stretches);
    cut_added(state_->added_normalized, stretches);
  }
  Work work;
  std::vector<std::string_view> pieces;
  for (const Stretch& stretch : stretches) {
    if (out.size() > options.tokens_max) break;
    if (stretch.added != no_token) {
      out.push_back(stretch.added);
      continue;
    }
    std::string_view rest = stretch.text;
    while (!rest.empty()) {
      bool valid = false;
      const std::size_t bytes = utf8_run_bytes(rest, valid);
      pieces.assign(1, rest.substr(0, bytes));
      if (valid) {
        for (const SplitStep& step : state_->steps) DI_TRY(split(step, pieces));
      }
      for (const std::string_view piece : pieces) {
        state_->encode_word(piece, work, out);
        if (out.size() > options.tokens_max) return out;
      }
      rest.remove_prefix(bytes);
    }
  }
  return out;
}

std::size_t Tokenizer::tokens_min(std::size_t bytes) const {
  const auto removes = [](const SplitStep& step) { return step.behavior == SplitBehavior::removed; };
  if (std::any_of(state_->steps.begin(), state_->steps.end(), removes)) return 0;
  return (bytes + state_->token_bytes_max - 1) / state_->token_bytes_max;
}

std::string_view Tokenizer::id_to_bytes(TokenId id) const {
  return id < state_->tokens.size() ? std::string_view(state_->tokens[id].bytes) : std::string_view{};
}

bool Tokenizer::id_known(TokenId id) const {
  return id < state_->tokens.size() && state_->tokens[id].known;
}

bool Tokenizer::id_special(TokenId id) const {
  return id < state_->tokens.size() && state_->tokens[id].special;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::string out;
  for (const TokenId id : ids) {
    if (!(skip_special && id_special(id))) out.append(id_to_bytes(id));
  }
  return out;
}

std::optional<TokenId> Tokenizer::added_to_id(std::string_view content) const {
  const auto entry = state_->added_ids.find(std::string(content));
  if (entry == state_->added_ids.end()) return std::nullopt;
  return entry->second;
}

std::optional<TokenId> Tokenizer::token_to_id(std::string_view bytes) const {
  if (const auto added = added_to_id(bytes)) return added;
  const auto entry = state_->ids.find(std::string(bytes));
  if (entry == state_->ids.end()) return std::nullopt;
  return entry->second;
}

TokenId Tokenizer::vocab_size() const {
  return static_cast<TokenId>(state_->tokens.size());
}

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::parse(std::string_view json, std::string_view path) {
  const auto root = Json::parse(json);
  if (!root) return root.error().in(path);
  auto state = std::make_unique<State>();
  if (const auto status = state->read(*root); !status) return status.error().in(path);
  return Tokenizer(std::move(state));
}

Result<Tokenizer> Tokenizer::load(const std::string& path) {
  const auto text = file_read(path, tokenizer_bytes_max);
  if (!text) return text.error();
  return parse(*text, path);
}

}  // namespace di::model
