#include "model/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"

namespace di::model {
namespace {

const std::string model_dir = DI_SOURCE_DIR "/etc/model-demo/";
const std::string golden_dir = DI_SOURCE_DIR "/tests/golden/tokenizer/";

std::string read(const std::string& path) {
  auto text = file_read(path, tokenizer_bytes_max);
  EXPECT_TRUE(text) << (text.ok() ? "" : text.error().message);
  return text.ok() ? std::move(*text) : std::string();
}

Tokenizer load(const std::string& path) {
  auto tokenizer = Tokenizer::load(path);
  if (!tokenizer) {
    ADD_FAILURE() << tokenizer.error().message;
    std::abort();
  }
  return std::move(*tokenizer);
}

std::vector<TokenId> encode(const Tokenizer& tokenizer, std::string_view text, bool allow_special = false) {
  auto ids = tokenizer.encode(text, {.allow_special = allow_special});
  EXPECT_TRUE(ids) << (ids.ok() ? "" : ids.error().message);
  return ids.ok() ? std::move(*ids) : std::vector<TokenId>();
}

std::string words(const std::vector<TokenId>& ids) {
  std::ostringstream out;
  for (const TokenId id : ids) out << id << ' ';
  return out.str();
}

// Every line of NAME.jsonl, computed by the reference implementation, gives the same ids and comes back.
void compare_golden(const Tokenizer& tokenizer, const std::string& path, bool round_trip) {
  std::istringstream lines(read(path));
  std::string line;
  int count = 0;
  for (; std::getline(lines, line); ++count) {
    const auto json = Json::parse(line);
    ASSERT_TRUE(json) << path << ':' << count + 1;
    const std::string& text = json->find("text")->as_string();
    std::vector<TokenId> want;
    for (const Json& id : json->find("ids")->as_array()) want.push_back(static_cast<TokenId>(id.as_i64()));
    const auto ids = encode(tokenizer, text, json->find("allow_special")->as_bool());
    EXPECT_EQ(words(ids), words(want)) << path << ':' << count + 1 << ": " << text;
    if (round_trip) {
      EXPECT_EQ(tokenizer.decode(ids), text) << path << ':' << count + 1;
    }
  }
  EXPECT_GT(count, 100);
}

TEST(Tokenizer, AgreesWithReferenceOnV3Patterns) {
  compare_golden(load(golden_dir + "v3.json"), golden_dir + "v3.jsonl", true);
}

TEST(Tokenizer, AgreesWithReferenceOnGpt2PatternAndIgnoreMerges) {
  compare_golden(load(golden_dir + "gpt2.json"), golden_dir + "gpt2.jsonl", true);
}

TEST(Tokenizer, AgreesWithReferenceOnOtherBehaviors) {
  compare_golden(load(golden_dir + "behaviors.json"), golden_dir + "behaviors.jsonl", false);
}

TEST(Tokenizer, AgreesWithReferenceOnDemoModel) {
  compare_golden(load(model_dir + "tokenizer.json"), golden_dir + "model-demo.jsonl", true);
}

// Questions, wordings and answers as a client would send them: nothing is lost on the way in and out.
TEST(Tokenizer, DemoModelQuestionsComeBack) {
  const Tokenizer tokenizer = load(model_dir + "tokenizer.json");
  std::istringstream lines(read(model_dir + "questions.jsonl"));
  int count = 0;
  const auto comes_back = [&](const Json& text) {
    const auto ids = encode(tokenizer, text.as_string());
    EXPECT_EQ(tokenizer.decode(ids), text.as_string());
    EXPECT_LT(ids.size(), text.as_string().size() / 2 + 4) << "hardly merged: " << text.as_string();
    ++count;
  };
  for (std::string line; std::getline(lines, line);) {
    const auto json = Json::parse(line);
    ASSERT_TRUE(json);
    comes_back(*json->find("question"));
    comes_back(*json->find("answer"));
    for (const Json& text : json->find("wordings")->as_array()) comes_back(text);
    for (const Json& text : json->find("held_out")->as_array()) comes_back(text);
  }
  EXPECT_GT(count, 100);
}

TEST(Tokenizer, UserTextNeverBecomesSpecial) {
  const Tokenizer tokenizer = load(golden_dir + "v3.json");
  for (const char* mark : {"<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>"}) {
    const auto id = tokenizer.added_to_id(mark);
    ASSERT_TRUE(id);
    EXPECT_EQ(tokenizer.token_to_id(mark), id);
    const std::string text = std::string("a") + mark + "b";
    const auto data = encode(tokenizer, text);
    EXPECT_EQ(std::count(data.begin(), data.end(), *id), 0) << mark;
    EXPECT_EQ(tokenizer.decode(data), text);
    const auto trusted = encode(tokenizer, text, true);
    EXPECT_EQ(std::count(trusted.begin(), trusted.end(), *id), 1) << mark;
    EXPECT_EQ(tokenizer.decode(trusted), text);
  }
}

TEST(Tokenizer, WholeWordLookUpDoesNotReachSpecial) {
  // ignore_merges looks a whole word up in the vocabulary, where a special token is listed as well.
  const Tokenizer tokenizer = load(golden_dir + "gpt2.json");
  const auto id = tokenizer.added_to_id("<|endoftext|>");
  ASSERT_TRUE(id);
  const auto ids = encode(tokenizer, "<|endoftext|>");
  EXPECT_EQ(std::count(ids.begin(), ids.end(), *id), 0);
  EXPECT_EQ(encode(tokenizer, "zqzq").size(), 1U);
}

TEST(Tokenizer, DecodesIds) {
  const Tokenizer tokenizer = load(golden_dir + "v3.json");
  const TokenId bos = *tokenizer.added_to_id("<｜begin▁of▁sentence｜>");
  EXPECT_EQ(tokenizer.id_to_bytes(bos), "<｜begin▁of▁sentence｜>");
  EXPECT_TRUE(tokenizer.id_special(bos));
  const TokenId user = *tokenizer.added_to_id("<｜User｜>");
  EXPECT_FALSE(tokenizer.id_special(user));
  const TokenId space = *tokenizer.token_to_id(" ");
  const TokenId half = *tokenizer.token_to_id("\xf0");
  const std::vector<TokenId> ids{bos, space, half, tokenizer.vocab_size(), UINT32_MAX};
  EXPECT_EQ(tokenizer.decode(ids, true), " \xf0");
  EXPECT_EQ(tokenizer.decode(ids), "<｜begin▁of▁sentence｜> \xf0");
  EXPECT_EQ(tokenizer.vocab_size(), 704U);
  EXPECT_FALSE(tokenizer.id_known(tokenizer.vocab_size()));
  EXPECT_FALSE(tokenizer.token_to_id("no such token"));
}

std::string random_utf8(Rng& rng) {
  std::string out;
  for (std::uint64_t left = rng.below(40); left > 0; --left) {
    std::uint32_t c = 0;
    do {
      const std::uint64_t kind = rng.below(4);
      c = static_cast<std::uint32_t>(kind == 0   ? rng.below(0x80)
                                     : kind == 1 ? rng.below(0x800)
                                     : kind == 2 ? rng.below(0x10000)
                                                 : rng.below(0x110000));
    } while (c >= 0xd800 && c < 0xe000);
    const auto tail = [&](int shift) { out.push_back(static_cast<char>(0x80 | ((c >> shift) & 0x3f))); };
    if (c < 0x80) {
      out.push_back(static_cast<char>(c));
    } else if (c < 0x800) {
      out.push_back(static_cast<char>(0xc0 | (c >> 6)));
      tail(0);
    } else if (c < 0x10000) {
      out.push_back(static_cast<char>(0xe0 | (c >> 12)));
      tail(6), tail(0);
    } else {
      out.push_back(static_cast<char>(0xf0 | (c >> 18)));
      tail(12), tail(6), tail(0);
    }
  }
  return out;
}

TEST(Tokenizer, RandomTextAndRandomBytesComeBack) {
  const std::uint64_t seed = 20240607;
  Rng rng(seed);
  for (const char* name : {"v3.json", "gpt2.json"}) {
    const Tokenizer tokenizer = load(golden_dir + name);
    for (int round = 0; round < 3000; ++round) {
      std::string text = random_utf8(rng);
      if (round % 2 == 1) {
        for (std::uint64_t left = rng.below(20); left > 0; --left) {
          text.insert(rng.below(text.size() + 1), 1, static_cast<char>(rng.below(256)));
        }
      }
      for (const bool allow_special : {false, true}) {
        const auto ids = encode(tokenizer, text, allow_special);
        ASSERT_EQ(tokenizer.decode(ids), text) << "seed=" << seed << " round=" << round << ' ' << name;
      }
    }
  }
}

TEST(Tokenizer, InvalidBytesDoNotDisturbTheirNeighbours) {
  const Tokenizer tokenizer = load(golden_dir + "v3.json");
  auto want = encode(tokenizer, "the router");
  want.push_back(*tokenizer.token_to_id("\xff"));
  const auto rest = encode(tokenizer, "你好");
  want.insert(want.end(), rest.begin(), rest.end());
  EXPECT_EQ(encode(tokenizer, "the router\xff你好"), want);
}

// The work per byte does not grow with the text: a quadratic encode would need minutes here (the test's
// limit catches it), ours a fraction of a second.
TEST(Tokenizer, EndlessWordsAndRunsAreNotQuadratic) {
  const Tokenizer tokenizer = load(golden_dir + "v3.json");
  for (const std::string unit :
       {"a", "ab", " ", "\n", "\r\n", "<", "9", "龥", "e\xcc\x81", "\xf0\x9f\x98\x80", "\xff"}) {
    std::string text;
    while (text.size() < 300'000) text += unit;
    text += "x";
    EXPECT_EQ(tokenizer.decode(encode(tokenizer, text, true)), text);
  }
}

// A minimal file whose parts can be replaced: model and the rest.
std::string minimal(std::string_view vocab_more, std::string_view merges, std::string_view model_more,
                    std::string_view root_more, std::string_view pre_tokenizer) {
  std::string out = R"({"model":{"type":"BPE","vocab":{)";
  std::uint32_t next = 0x100;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    const std::uint32_t c = printable ? byte : next++;
    char text[16];
    std::snprintf(text, sizeof text, "\"\\u%04x\":%u,", c, byte);
    out += text;
  }
  out.pop_back();
  out += vocab_more;
  out += R"(},"merges":[)";
  out += merges;
  out += "]";
  out += model_more;
  out += R"(},"decoder":{"type":"ByteLevel"},"pre_tokenizer":)";
  out += pre_tokenizer;
  out += root_more;
  return out + "}";
}

constexpr std::string_view byte_level = R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":true})";

std::string split(std::string_view rest) {
  return R"({"type":"Sequence","pretokenizers":[{"type":"Split",)" + std::string(rest) + "}," +
         std::string(byte_level) + "]}";
}

TEST(Tokenizer, AnEncodeEndsEarly) {
  const Tokenizer tokenizer = load(golden_dir + "v3.json");
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "word " + std::to_string(i) + " ";
  const std::vector<TokenId> whole = encode(tokenizer, text);
  const auto early = tokenizer.encode(text, {.tokens_max = 10});
  ASSERT_TRUE(early);
  EXPECT_GT(early->size(), 10U);
  EXPECT_LT(early->size(), 30U);
  EXPECT_TRUE(std::equal(early->begin(), early->end(), whole.begin()));
  EXPECT_EQ(tokenizer.encode(text, {.tokens_max = whole.size()})->size(), whole.size());
}

TEST(Tokenizer, TheFewestTokensOfATextAreKnownWithoutReadingIt) {
  const Tokenizer tokenizer = load(golden_dir + "v3.json");
  std::size_t longest = 0;
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id)
    longest = std::max(longest, tokenizer.id_to_bytes(id).size());
  EXPECT_EQ(tokenizer.tokens_min(0), 0U);
  EXPECT_EQ(tokenizer.tokens_min(longest), 1U);
  EXPECT_EQ(tokenizer.tokens_min(longest + 1), 2U);
  // A Split that removes may leave nothing of any text.
  EXPECT_EQ(load(golden_dir + "behaviors.json").tokens_min(1000), 0U);
}

TEST(Tokenizer, MinimalFileWorks) {
  const auto tokenizer =
      Tokenizer::parse(minimal(R"(,"ab":300)", R"("a b")", "",
                               R"(,"added_tokens":[{"id":301,"content":"<x>","special":true}])", byte_level),
                       "t.json");
  ASSERT_TRUE(tokenizer) << tokenizer.error().message;
  EXPECT_EQ(words(encode(*tokenizer, "aab<x>", true)), "97 300 301 ");
  EXPECT_EQ(tokenizer->vocab_size(), 302U);
  EXPECT_FALSE(tokenizer->id_known(299));
}

TEST(Tokenizer, RefusesWhatItCannotReadExactly) {
  struct Case {
    std::string json;
    Code code;
    std::string_view message;
  };
  const std::string added = R"(,"added_tokens":[{"id":300,"content":"<x>","special":true)";
  const std::vector<Case> cases{
      {"", Code::invalid, "t.json: "},
      {"[]", Code::invalid, "t.json: is a JSON array, want an object"},
      {"{}", Code::invalid, "t.json: 'model' is missing"},
      {R"({"model":{"type":"Unigram"}})", Code::unsupported, "t.json: model: of type 'Unigram', want BPE"},
      {R"({"model":{"type":"BPE","vocab":{},"merges":[]}})", Code::invalid,
       "t.json: model: vocab has no token for byte 0: not a byte-level vocabulary"},
      {minimal(R"(,"ab":-1)", "", "", "", byte_level), Code::invalid, "vocab entry 'ab': want an id"},
      {minimal(R"(,"ab":7)", "", "", "", byte_level), Code::invalid, "vocab entry 'ab': id 7 is taken"},
      {minimal(R"(,"ab":2000000000)", "", "", "", byte_level), Code::invalid, "want an id from 0 to 1048575"},
      {minimal("", R"("a b")", "", "", byte_level), Code::invalid, "merge 0: 'ab' is not in vocab"},
      {minimal(R"(,"ab":300)", R"("a b","ab")", "", "", byte_level), Code::invalid, "merge 1: want"},
      {minimal(R"(,"ab":300)", R"("a b",["a","b","c"])", "", "", byte_level), Code::invalid, "merge 1: want"},
      {minimal("", "3", "", "", byte_level), Code::invalid, "merge 0: want"},
      {minimal("", "", R"(,"dropout":0.1)", "", byte_level), Code::unsupported, "'dropout' is set"},
      {minimal("", "", R"(,"byte_fallback":true)", "", byte_level), Code::unsupported,
       "'byte_fallback': true"},
      {minimal("", "", R"(,"ignore_merges":1)", "", byte_level), Code::invalid,
       "'ignore_merges' is a integer"},
      {minimal("", "", R"(,"end_of_word_suffix":"</w>")", "", byte_level), Code::unsupported,
       "end_of_word_suffix"},
      {minimal("", "", "", R"(,"normalizer":{"type":"NFC"})", byte_level), Code::unsupported,
       "a normalizer of type 'NFC'"},
      {minimal("", "", "", R"(,"truncation":{"max_length":5})", byte_level), Code::unsupported,
       "'truncation' is set"},
      {minimal("", "", "", added + R"(,"lstrip":true}])", byte_level), Code::unsupported,
       "added_tokens: '<x>': 'lstrip': true"},
      {minimal("", "", "", added + R"(},{"id":300,"content":"<y>"}])", byte_level), Code::invalid,
       "'<y>': id 300 is taken"},
      {minimal("", "", "", R"(,"added_tokens":[{"id":300,"content":""}])", byte_level), Code::invalid,
       "no 'content'"},
      {minimal("", "", "", R"(,"added_tokens":[{"id":97,"content":"a","special":true}])", byte_level),
       Code::invalid, "'a' is special, but plain text can produce it"},
      {minimal(R"(,"ab":300)", R"("a b")", "",
               R"(,"added_tokens":[{"id":300,"content":"ab","special":true}])", byte_level),
       Code::invalid, "'ab' is special, but plain text can produce it"},
      {minimal("", "", "", "", "null"), Code::unsupported, "no pre_tokenizer"},
      {minimal("", "", "", "", R"({"type":"Metaspace"})"), Code::unsupported, "a step of type 'Metaspace'"},
      {minimal("", "", "", "", R"({"type":"ByteLevel"})"), Code::unsupported,
       "ByteLevel with add_prefix_space"},
      {minimal("", "", "", "", R"({"type":"Sequence","pretokenizers":[]})"), Code::unsupported,
       "no ByteLevel step"},
      {minimal("", "", "", "", split(R"("pattern":{"Regex":"("},"behavior":"Isolated")")), Code::invalid,
       "pattern '(': "},
      {minimal("", "", "", "", split(R"("pattern":{"Regex":"a*"},"behavior":"Isolated")")), Code::unsupported,
       "pattern 'a*' can match nothing"},
      {minimal("", "", "", "", split(R"("pattern":{"Regex":"[a[b]]"},"behavior":"Isolated")")),
       Code::unsupported, "a class inside a character class"},
      {minimal("", "", "", "", split(R"("pattern":{"Regex":"[a&&b]"},"behavior":"Isolated")")),
       Code::unsupported, "&&"},
      {minimal("", "", "", "", split(R"("pattern":{"Regex":"\\h"},"behavior":"Isolated")")),
       Code::unsupported, "\\h"},
      {minimal("", "", "", "", split(R"("pattern":{"Regex":"a"},"behavior":"Contiguous")")),
       Code::unsupported, "behavior 'Contiguous'"},
      {minimal("", "", "", "", split(R"("pattern":{"Regex":"a"},"behavior":"Isolated","invert":true)")),
       Code::unsupported, "'invert': true"},
      {minimal("", "", "", "", split(R"("behavior":"Isolated")")), Code::invalid, "no 'pattern'"},
  };
  for (const Case& c : cases) {
    const auto tokenizer = Tokenizer::parse(c.json, "t.json");
    ASSERT_FALSE(tokenizer) << c.message;
    EXPECT_EQ(tokenizer.error().code, c.code) << tokenizer.error().message;
    EXPECT_EQ(tokenizer.error().message.find("t.json: "), 0U) << tokenizer.error().message;
    EXPECT_NE(tokenizer.error().message.find(c.message), std::string::npos) << tokenizer.error().message;
  }
  EXPECT_EQ(Tokenizer::load("/nonexistent/tokenizer.json").error().code, Code::not_found);
}

// Damaged files: an error or a tokenizer that works, never a crash (run with sanitizers as well).
TEST(Tokenizer, DamagedFilesGiveErrors) {
  const std::uint64_t seed = 77;
  Rng rng(seed);
  const std::string whole = read(golden_dir + "v3.json");
  int refused = 0;
  for (int round = 0; round < 250; ++round) {
    std::string text = whole;
    const std::uint64_t kind = rng.below(4);
    if (kind == 0) {
      text.resize(rng.below(text.size()));
    } else {
      for (std::uint64_t left = 1 + rng.below(4); left > 0; --left) {
        const std::size_t at = rng.below(text.size());
        if (kind == 1) {
          text[at] = static_cast<char>(rng.below(256));
        } else if (kind == 2) {
          text.erase(at, 1 + rng.below(60));
        } else {
          const std::size_t from = rng.below(text.size());
          text.insert(at, text.substr(from, 1 + rng.below(60)));
        }
      }
    }
    const auto tokenizer = Tokenizer::parse(text, "t.json");
    if (!tokenizer) {
      ++refused;
      EXPECT_EQ(tokenizer.error().message.find("t.json: "), 0U);
      continue;
    }
    const std::string sample = "The router, 12345 你好 <think>\r\n" + random_utf8(rng);
    const auto ids = tokenizer->encode(sample, {.allow_special = true});
    if (ids) {
      EXPECT_LE(tokenizer->decode(*ids).size(), sample.size() * 100) << "seed=" << seed << " round=" << round;
    }
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace di::model
