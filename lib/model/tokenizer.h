// model/tokenizer.h: text to token ids and back, from a Hugging Face tokenizer.json as it is.
//
// Owns the vocabulary, the merges and the compiled patterns (PCRE2) of one file.  Immutable after
// load: any thread may call it.  Bounds: a file of `tokenizer_bytes_max`, ids below `vocab_max`; an
// encode works in memory proportional to its text and in time n log n, also for one endless word.
//
// What is read: byte-level BPE, merges as "a b" or ["a","b"], ignore_merges, added tokens, and a
// pre-tokenizer of Split steps with ByteLevel last.  Anything that would change ids and is not one of
// these is refused at load with the file and what it was, so that a model is never fed wrong ids.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace di::model {

using TokenId = std::uint32_t;

inline constexpr std::size_t tokenizer_bytes_max = std::size_t{128} << 20;  // V3's has 8 MB
inline constexpr TokenId vocab_max = 1U << 20;      // the largest published have 262,144
inline constexpr std::size_t split_steps_max = 16;  // V3's has 3

struct EncodeOptions {
  // False: the text is data.  No added token (special or not) comes out of it, whatever it spells,
  // so a user cannot forge the marks between turns.  True: added tokens are cut out first.
  bool allow_special = false;
  // An encode ends early once it has more tokens than this: the caller wants to know that, not them all.
  std::size_t tokens_max = SIZE_MAX;
};

class Tokenizer {
 public:
  // Errors: those of reading the file; `invalid` for broken content, `unsupported` for what is not
  // read here.  Every message begins with the path.
  static Result<Tokenizer> load(const std::string& path);
  // The same from text; `path` is for messages only.
  static Result<Tokenizer> parse(std::string_view json, std::string_view path);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Any bytes: what is not UTF-8 is encoded byte-level as pieces of its own, so that
  // decode(encode(x)) == x always (unless a Split of the file removes what it matches).
  // Errors: `no_space` when a pattern of the file runs into PCRE2's limits on this text.
  [[nodiscard]] Result<std::vector<TokenId>> encode(std::string_view text, EncodeOptions options = {}) const;

  // At least so many tokens come out of a text of `bytes`; 0 where the file has a Split that removes text.
  [[nodiscard]] std::size_t tokens_min(std::size_t bytes) const;

  // The raw bytes of a token, possibly a part of a character; an added token's are its content.
  // Empty for an id that is in no vocabulary.  The view lives as long as the tokenizer.
  [[nodiscard]] std::string_view id_to_bytes(TokenId id) const;
  [[nodiscard]] bool id_known(TokenId id) const;
  // True for an added token marked special: not shown to clients.
  [[nodiscard]] bool id_special(TokenId id) const;
  [[nodiscard]] std::string decode(std::span<const TokenId> ids, bool skip_special = false) const;

  // The id of an added token by its content, or else of a vocabulary entry by its raw bytes.
  [[nodiscard]] std::optional<TokenId> token_to_id(std::string_view bytes) const;
  // The id of an added token by its content.
  [[nodiscard]] std::optional<TokenId> added_to_id(std::string_view content) const;
  // One past the largest id, added tokens included; ids below it may be unused.
  [[nodiscard]] TokenId vocab_size() const;

 private:
  struct State;
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace di::model
