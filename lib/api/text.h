// api/text.h: from the bytes of tokens to the text a client may see.
//
// A token is any string of bytes: a character may spread over several tokens, and a stop string may
// begin in one and end in another.  What could still become a character or a stop string is held
// back; everything else goes out with the token that brought it.  Nothing here knows tokens' ids.
//
// Owner: the thread of the answer (one object per choice).  Bounds: 3 bytes of an unfinished
// character, and less than the longest stop string (`stop_bytes_max`) of held-back text.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace di::api {

inline constexpr std::size_t stop_strings_max = 16;  // spec/api.md 2.2
// Bounds the text that can be held back; far above any stop string seen in the wild.
inline constexpr std::size_t stop_bytes_max = 1024;

// Makes valid UTF-8 of a stream of bytes.  Bytes that can no longer become a character turn into
// U+FFFD, one for each maximal part of an ill-formed sequence (Unicode 15, section 3.9; what
// browsers and Python do), so the result does not depend on how the bytes were cut.
class Utf8Assembler {
 public:
  // Appends to `out` the text that is certain now.
  void push(std::string_view bytes, std::string& out);
  // The stream ends: a character that was begun becomes U+FFFD.
  void finish(std::string& out);
  [[nodiscard]] std::size_t held_bytes() const { return held_count_; }

 private:
  void begin(unsigned char byte, std::string& out);

  std::array<char, 4> held_{};
  std::uint8_t held_count_ = 0;
  std::uint8_t want_count_ = 0;                // bytes of the character that is held, once complete
  unsigned char next_min_ = 0, next_max_ = 0;  // the range in which its next byte must be
};

// Finds the first stop string to be complete and passes on the text before it, never a byte of it.
// When several end at the same byte the longest one counts.  Text that may be the beginning of a
// stop string is held back.  The outcome does not depend on how the text was cut.
class StopMatcher {
 public:
  // At most stop_strings_max strings, none empty, none longer than stop_bytes_max (validated with
  // the request, asserted here).
  explicit StopMatcher(std::vector<std::string> stops);

  // Appends to `out` what may be sent.  True once a stop string is complete: the answer ends here
  // and later text is ignored.
  bool push(std::string_view text, std::string& out);
  // Text that cannot be part of a match: it ends any match that had begun and goes out whole.
  void pass(std::string_view text, std::string& out);
  // The answer ends without a match: what is held back goes out.
  void finish(std::string& out);
  [[nodiscard]] bool matched() const { return matched_; }
  [[nodiscard]] std::size_t held_bytes() const { return held_.size(); }

 private:
  struct Stop {
    std::string text;
    std::vector<std::uint16_t> fallback;  // Knuth-Morris-Pratt: longest border of each prefix
    std::uint16_t matched = 0;            // bytes of `text` the stream ends with
  };

  std::vector<Stop> stops_;
  std::array<bool, 256> first_{};  // bytes that begin a stop string
  std::string held_;
  bool matched_ = false;
};

// The two in a row, for one choice of an answer.
class AnswerText {
 public:
  struct Options {
    std::vector<std::string> stops;
    // Stop strings count only in text after this many tokens.
    std::int64_t min_tokens = 0;
  };

  explicit AnswerText(Options options);

  // One token's bytes; appends what may be sent.  True once a stop string is complete; further
  // tokens are ignored then, whatever the engine still produces before it halts.
  bool token(std::string_view bytes, std::string& out);
  // The answer ended on its own (end of text, length): appends the rest.
  void finish(std::string& out);
  [[nodiscard]] bool stopped() const { return stops_.matched(); }
  // Tokens given so far, the one that completed a stop string included and none after it.
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }

 private:
  Utf8Assembler utf8_;
  StopMatcher stops_;
  std::int64_t min_tokens_;
  std::int64_t tokens_ = 0;
};

}  // namespace di::api
