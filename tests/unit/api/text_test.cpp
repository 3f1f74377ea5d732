#include "api/text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "base/rng.h"

namespace di::api {
namespace {

const std::string mark = "\xef\xbf\xbd";

std::string from_hex(std::string_view hex) {
  std::string out;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    out.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return out;
}

// Another way to say what well-formed is: decode the number, then look at it.
std::size_t character_bytes(std::string_view s) {
  const auto b = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(s[i])); };
  if (s.empty()) return 0;
  if (b(0) < 0x80) return 1;
  const std::size_t count = (b(0) >> 5) == 6 ? 2 : (b(0) >> 4) == 14 ? 3 : (b(0) >> 3) == 30 ? 4 : 0;
  if (count == 0 || s.size() < count) return 0;
  std::uint32_t code = b(0) & (0xffU >> (count + 1));
  for (std::size_t i = 1; i < count; ++i) {
    if ((b(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (b(i) & 0x3f);
  }
  const std::uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < least[count] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return 0;
  return count;
}

// Whether some bytes after `s` would make one character of it.
bool could_begin(std::string_view s) {
  if (s.empty() || s.size() >= 4) return false;
  std::string longer(s);
  // Any continuation byte beyond the second decides nothing, so 80 and the ends of its range do.
  for (int second = 0x80; second <= 0xbf; ++second) {
    for (std::size_t total = 2; total <= 4; ++total) {
      if (total <= s.size()) continue;
      longer.assign(s);
      if (longer.size() == 1) longer.push_back(static_cast<char>(second));
      while (longer.size() < total) longer.push_back(static_cast<char>(0x80));
      if (character_bytes(longer) == total) return true;
    }
  }
  return false;
}

std::string reference_text(std::string_view bytes) {
  std::string out;
  while (!bytes.empty()) {
    if (const std::size_t count = character_bytes(bytes); count > 0) {
      out.append(bytes.substr(0, count));
      bytes.remove_prefix(count);
      continue;
    }
    std::size_t bad = 1;
    for (std::size_t count = std::min<std::size_t>(3, bytes.size()); count > 1; --count) {
      if (could_begin(bytes.substr(0, count))) {
        bad = count;
        break;
      }
    }
    out.append(mark);
    bytes.remove_prefix(bad);
  }
  return out;
}

std::string assemble(const std::vector<std::string>& pieces) {
  Utf8Assembler utf8;
  std::string out;
  for (const std::string& piece : pieces) utf8.push(piece, out);
  utf8.finish(out);
  return out;
}

TEST(Utf8Assembler, A01CharactersSpreadOverTokens) {
  Utf8Assembler utf8;
  std::string all;
  for (const char* hex : {"f09f", "a699", "20", "ec82", "bceab2", "b9", "ec82b4"}) {
    std::string delta;
    utf8.push(from_hex(hex), delta);
    EXPECT_EQ(delta.find(mark), std::string::npos) << hex;
    EXPECT_EQ(reference_text(delta), delta) << "a delta is valid by itself";
    all += delta;
  }
  EXPECT_EQ(utf8.held_bytes(), 0U);
  utf8.finish(all);
  EXPECT_EQ(all, "🦙 삼겹살");
}

TEST(Utf8Assembler, A02BytesThatCannotBecomeACharacterAreNotHeld) {
  Utf8Assembler utf8;
  std::string out;
  utf8.push("a", out);
  EXPECT_EQ(out, "a");
  utf8.push("\xff", out);
  EXPECT_EQ(out, "a" + mark);
  utf8.push("b", out);
  EXPECT_EQ(out, "a" + mark + "b");
  utf8.push("c", out);
  EXPECT_EQ(out, "a" + mark + "bc");
}

TEST(Utf8Assembler, A02GoodTextBesideABrokenCharacterStays) {
  EXPECT_EQ(assemble({"ab\xe2\x82", "cd"}), "ab" + mark + "cd");
  EXPECT_EQ(assemble({"\xe2\x82", "\xe2\x82\xac"}), mark + "€");
  EXPECT_EQ(assemble({"\xed\xa0\x80"}), mark + mark + mark);  // a surrogate, as browsers and Python show it
}

TEST(Utf8Assembler, A02ACutInsideACharacterEndsInAMark) {
  Utf8Assembler utf8;
  std::string out;
  utf8.push(from_hex("f09f"), out);
  EXPECT_EQ(out, "");
  EXPECT_EQ(utf8.held_bytes(), 2U);
  utf8.finish(out);
  EXPECT_EQ(out, mark);
}

// Every string of up to four bytes out of the edges of all ranges, in one piece, byte by byte, and
// cut in two at each place: the same text, equal to the reference, and never more held than could
// still become a character.
TEST(Utf8Assembler, EveryShortStringAndEveryCut) {
  const std::vector<unsigned char> alphabet = {0x41, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc1,
                                               0xc2, 0xe0, 0xe1, 0xed, 0xf0, 0xf1, 0xf4, 0xf5};
  std::string bytes;
  std::size_t failures = 0;
  const auto check = [&] {
    const std::string want = reference_text(bytes);
    if (assemble({bytes}) != want) ++failures;
    for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
      if (assemble({bytes.substr(0, cut), bytes.substr(cut)}) != want) ++failures;
    }
    Utf8Assembler utf8;
    std::string out;
    for (const char c : bytes) {
      utf8.push(std::string_view(&c, 1), out);
      if (reference_text(out) != out) ++failures;
    }
    const std::size_t held = utf8.held_bytes();
    if (held > 0 && !could_begin(std::string_view(bytes).substr(bytes.size() - held))) ++failures;
    utf8.finish(out);
    if (out != want) ++failures;
    EXPECT_EQ(failures, 0U) << testing::PrintToString(bytes);
    return failures == 0;
  };
  for (const unsigned char a : alphabet) {
    for (const unsigned char b : alphabet) {
      for (const unsigned char c : alphabet) {
        for (const unsigned char d : alphabet) {
          bytes = {static_cast<char>(a), static_cast<char>(b), static_cast<char>(c), static_cast<char>(d)};
          if (!check()) return;
        }
        bytes.pop_back();
        if (!check()) return;
      }
    }
  }
}

struct Sent {
  std::string text;
  bool matched = false;
  friend bool operator==(const Sent&, const Sent&) = default;
};

Sent send(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stops);
  Sent sent;
  for (const std::string& piece : pieces) matcher.push(piece, sent.text);
  matcher.finish(sent.text);
  sent.matched = matcher.matched();
  return sent;
}

// The definition, by brute force: the first end of any stop string; the longest that ends there.
Sent reference_sent(const std::vector<std::string>& stops, const std::string& text) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::size_t longest = 0;
    for (const std::string& stop : stops) {
      if (stop.size() <= end && text.compare(end - stop.size(), stop.size(), stop) == 0) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) return {text.substr(0, end - longest), true};
  }
  return {text, false};
}

TEST(StopMatcher, A03AStopStringAcrossTokens) {
  StopMatcher matcher({"own fox"});
  std::string out;
  EXPECT_FALSE(matcher.push("The quick br", out));
  EXPECT_EQ(out, "The quick br");
  EXPECT_FALSE(matcher.push("own", out));
  EXPECT_EQ(out, "The quick br") << "half a stop string was sent";
  EXPECT_TRUE(matcher.push(" fox", out));
  EXPECT_TRUE(matcher.push(" jumps", out));
  matcher.finish(out);
  EXPECT_EQ(out, "The quick br");
}

TEST(StopMatcher, HeldTextGoesOutOnceItCannotMatch) {
  StopMatcher matcher({"own fox"});
  std::string out;
  matcher.push("own f", out);
  EXPECT_EQ(out, "");
  matcher.push("o", out);
  matcher.push("ld", out);
  EXPECT_EQ(out, "own fold");
}

TEST(StopMatcher, HeldTextGoesOutAtTheEnd) {
  EXPECT_EQ(send({"own fox"}, {"br", "own f"}), (Sent{"brown f", false}));
}

TEST(StopMatcher, FirstToEndWinsAndTheLongestOfThose) {
  EXPECT_EQ(send({"abcd", "bc"}, {"xabcd"}), (Sent{"xa", true}));
  EXPECT_EQ(send({"c", "abc"}, {"xabc"}), (Sent{"x", true}));
}

TEST(StopMatcher, OverlappingBeginnings) {
  EXPECT_EQ(send({"aab"}, {"aa", "ab"}), (Sent{"a", true}));
  EXPECT_EQ(send({"\n\nUser:"}, {"hi\n", "\n", "\nUser:", "x"}), (Sent{"hi\n", true}));
}

// All texts of up to nine letters out of two against sets of stop strings out of the same letters;
// each text whole, letter by letter and cut in two everywhere.
TEST(StopMatcher, EveryShortTextAndEveryCut) {
  const std::vector<std::vector<std::string>> sets = {
      {"a"},           {"ab"},        {"aab"},  {"abab"},
      {"aba", "bb"},   {"bab", "ab"}, {"aaaa"}, {"abba", "bbb", "aab"},
      {"abab", "bab"}, {"b", "aab"},  {"abaab"}};
  for (const auto& stops : sets) {
    for (std::uint32_t length = 0; length <= 9; ++length) {
      for (std::uint32_t bits = 0; bits < (1U << length); ++bits) {
        std::string text;
        for (std::uint32_t i = 0; i < length; ++i) text.push_back((bits >> i & 1) != 0 ? 'b' : 'a');
        const Sent want = reference_sent(stops, text);
        ASSERT_EQ(send(stops, {text}), want) << text;
        std::vector<std::string> letters;
        for (const char c : text) letters.emplace_back(1, c);
        ASSERT_EQ(send(stops, letters), want) << text;
        for (std::size_t cut = 1; cut < text.size(); ++cut) {
          ASSERT_EQ(send(stops, {text.substr(0, cut), text.substr(cut)}), want) << text << " cut at " << cut;
        }
      }
    }
  }
}

// What is held back is never longer than needed, and what was sent is never taken back.
TEST(StopMatcher, RandomTextsHoldOnlyWhatCouldMatch) {
  constexpr std::uint64_t seed = 20261;
  SCOPED_TRACE("seed=" + std::to_string(seed));
  Rng rng(seed);
  const auto letters = [&](std::uint64_t most) {
    std::string out;
    const std::uint64_t count = 1 + rng.below(most);
    for (std::uint64_t i = 0; i < count; ++i) out.push_back(static_cast<char>('a' + rng.below(3)));
    return out;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops;
    for (std::uint64_t i = rng.below(stop_strings_max) + 1; i > 0; --i) stops.push_back(letters(8));
    StopMatcher matcher(stops);
    std::string text, sent;
    for (int piece = 0; piece < 6 && !matcher.matched(); ++piece) {
      const std::string more = letters(10);
      text += more;
      const bool matched = matcher.push(more, sent);
      const Sent want = reference_sent(stops, text);
      ASSERT_EQ(matched, want.matched);
      if (matched) {
        ASSERT_EQ(sent, want.text);
        break;
      }
      std::size_t keep = 0;  // the longest end of the text that begins a stop string
      for (const std::string& stop : stops) {
        for (std::size_t n = std::min(stop.size() - 1, text.size()); n > keep; --n) {
          if (text.compare(text.size() - n, n, stop, 0, n) == 0) keep = n;
        }
      }
      ASSERT_EQ(sent, text.substr(0, text.size() - keep));
      ASSERT_EQ(matcher.held_bytes(), keep);
    }
  }
}

TEST(AnswerText, A04NothingAfterTheMatchAndTokensCountedUpToIt) {
  AnswerText answer({.stops = {"three"}, .min_tokens = 0});
  std::string out;
  for (const char* piece : {"one, ", "two, ", "three", " four", " five", " six"}) answer.token(piece, out);
  answer.finish(out);
  EXPECT_EQ(out, "one, two, ");
  EXPECT_TRUE(answer.stopped());
  EXPECT_EQ(answer.tokens(), 3);
}

TEST(AnswerText, A01EveryTokenCountsThoughFewerDeltas) {
  AnswerText answer({.stops = {}, .min_tokens = 0});
  int deltas = 0;
  std::string all;
  for (const char* hex : {"f09f", "a699", "20", "ec82", "bceab2", "b9", "ec82b4"}) {
    std::string delta;
    answer.token(from_hex(hex), delta);
    deltas += delta.empty() ? 0 : 1;
    all += delta;
  }
  EXPECT_EQ(all, "🦙 삼겹살");
  EXPECT_EQ(answer.tokens(), 7);
  EXPECT_EQ(deltas, 5);
}

TEST(AnswerText, A02DeliveredNoLaterThanOneTokenAfter) {
  AnswerText answer({.stops = {"zz"}, .min_tokens = 0});
  std::string out;
  answer.token("a", out);
  answer.token("\xff", out);
  answer.token("b", out);
  EXPECT_EQ(out, "a" + mark + "b");
}

TEST(AnswerText, MatchesAStopStringMadeOfSplitCharacters) {
  AnswerText answer({.stops = {"겹"}, .min_tokens = 0});
  std::string out;
  for (const char* hex : {"ec82", "bceab2", "b9", "ec82b4"}) answer.token(from_hex(hex), out);
  EXPECT_EQ(out, "삼");
  EXPECT_TRUE(answer.stopped());
}

TEST(AnswerText, StopStringsCountOnlyAfterMinTokens) {
  AnswerText answer({.stops = {"x"}, .min_tokens = 2});
  std::string out;
  EXPECT_FALSE(answer.token("ax", out));
  EXPECT_FALSE(answer.token("xb", out));
  EXPECT_FALSE(answer.token("c", out));
  EXPECT_TRUE(answer.token("x", out));
  EXPECT_EQ(out, "axxbc");
}

TEST(AnswerText, FinishGivesHeldTextAndTheMarkOfACutCharacter) {
  AnswerText answer({.stops = {"end"}, .min_tokens = 0});
  std::string out;
  answer.token("the en", out);
  answer.token("\xe2\x82", out);
  EXPECT_EQ(out, "the ");
  answer.finish(out);
  EXPECT_EQ(out, "the en" + mark);
  EXPECT_FALSE(answer.stopped());
}

}  // namespace
}  // namespace di::api
