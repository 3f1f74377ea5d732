#include "engine/script.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "kv/chain.h"

namespace di::engine {
namespace {

constexpr std::uint32_t block_tokens = 32;

// Cached pages in memory, with as many groups ready as the test says.
class FakeSource final : public KvSource {
 public:
  struct Page {
    Bytes bytes;
    std::uint32_t page_blocks = 0;
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  FakeSource(kv::Layout layout, std::vector<Page> pages)
      : layout_(std::move(layout)), pages_(std::move(pages)) {
    ready.groups = layout_.groups();
  }

  [[nodiscard]] std::uint32_t blocks() const override {
    std::uint32_t blocks = 0;
    for (const Page& page : pages_) blocks += page.count;
    return blocks;
  }
  [[nodiscard]] Readiness readiness() const override { return ready; }
  void wait(std::uint32_t group, Duration at_most) override {
    waits.push_back({group, at_most});
    if (on_wait) on_wait();
  }
  [[nodiscard]] std::vector<SegmentRun> segments(std::uint32_t group) const override {
    std::vector<SegmentRun> runs;
    for (const Page& page : pages_) {
      const ByteView segment = ByteView(page.bytes)
                                   .subspan(layout_.segment_offset(group, page.page_blocks),
                                            layout_.segment_bytes(group, page.page_blocks));
      runs.push_back({segment, page.page_blocks, page.first, page.count});
    }
    return runs;
  }

  Readiness ready;
  std::vector<std::pair<std::uint32_t, Duration>> waits;
  std::function<void()> on_wait;

 private:
  kv::Layout layout_;
  std::vector<Page> pages_;
};

Description description(kv::Layout layout = script_layout()) {
  return {.model = "demo",
          .layout = std::move(layout),
          .revision = Key{},
          .context_tokens_max = 4096,
          .vocab = 1000,
          .pool_blocks = 64,
          .sequences_max = 4,
          .wants_debug_text = false};
}

std::unique_ptr<ScriptEngine> engine(std::string_view script, ScriptEngine::Options options) {
  auto lines = script_parse(script, "test.script");
  EXPECT_TRUE(lines) << (lines.ok() ? "" : lines.error().message);
  options.lines = std::move(*lines);
  auto made = ScriptEngine::create(std::move(options));
  EXPECT_TRUE(made) << (made.ok() ? "" : made.error().message);
  return std::move(*made);
}

std::unique_ptr<ScriptEngine> engine(std::string_view script) {
  return engine(script, {.description = description(), .on_crash = [] {}});
}

std::vector<std::uint32_t> prompt(std::uint32_t count) {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t i = 0; i < count; ++i) tokens.push_back((i * 7 + 3) % 1000);
  return tokens;
}

SequenceSpec spec(std::string_view text, std::uint32_t tokens = 5, wire::Leg leg = wire::Leg::prefill,
                  std::uint32_t first_index = 0) {
  SequenceSpec out;
  out.tokens = prompt(tokens);
  out.first_index = first_index;
  out.known_tokens_max = tokens + 200;
  out.sampling.max_tokens = 1000;
  out.debug_text = text;
  out.leg = leg;
  out.keys = kv::chain_keys(out.root, out.tokens, block_tokens);
  return out;
}

RowResult step_one(ScriptEngine& engine, SequenceId id, std::uint32_t tokens, Instant now = {},
                   Instant* ready = nullptr) {
  StepResult result = engine.step({.rows = {{id, tokens}}, .swap_wait = milliseconds(5)}, now);
  EXPECT_EQ(result.rows.size(), 1U);
  if (ready != nullptr) *ready = result.ready_at;
  return result.rows.front();
}

std::string text_of(const RowResult& row) {
  return std::string(as_text(row.token.bytes));
}

// The pieces from a step with `tokens` prompt tokens until the end, "|" between them.
std::string play(ScriptEngine& engine, SequenceId id, std::uint32_t tokens, Finish& finish) {
  std::string out;
  RowResult row = step_one(engine, id, tokens);
  while (row.state == RowState::computed) {
    EXPECT_TRUE(row.has_token);
    out += text_of(row) + "|";
    finish = row.finish;
    if (row.finish != Finish::none) return out;
    row = step_one(engine, id, 1);
  }
  return out + "...";
}

constexpr std::string_view simple =
    R"({"match":"greet","pieces":[{"text":"He"},{"text":"llo"},{"hex":"f09f"},{"hex":"9880"}],"finish":"stop"}
{"match":"","pieces":[{"text":"any"}],"finish":"length"})";

TEST(Script, PlaysTheFirstLineThatMatches) {
  const auto script = engine(simple);
  EXPECT_TRUE(script->describe().wants_debug_text);
  const auto greet = script->admit(spec("please greet me"));
  ASSERT_TRUE(greet);
  Finish finish = Finish::none;
  EXPECT_EQ(play(*script, *greet, 5, finish), "He|llo|\xf0\x9f|\x98\x80|");
  EXPECT_EQ(finish, Finish::stop);
  const auto other = script->admit(spec("something else"));
  EXPECT_EQ(play(*script, *other, 5, finish), "any|");
  EXPECT_EQ(finish, Finish::length);
}

TEST(Script, TokensCarryIdsOutsideTheVocabularyAndAbsoluteIndexes) {
  const auto script = engine(simple);
  const auto id = script->admit(spec("greet", 5, wire::Leg::decode, 2));
  ASSERT_TRUE(id);
  const RowResult row = step_one(*script, *id, 5);
  EXPECT_EQ(row.index, 2U);
  EXPECT_EQ(row.token.id, wire::script_token_base + 2);
  EXPECT_EQ(text_of(row), "\xf0\x9f");  // resumed behind the two pieces produced before
  EXPECT_EQ(row.computed_tokens, 5U);
}

TEST(Script, ChunksOfAPromptChooseNothing) {
  const auto script = engine(simple);
  const auto id = script->admit(spec("greet", 100));
  RowResult row = step_one(*script, *id, 64);
  EXPECT_EQ(row.state, RowState::computed);
  EXPECT_FALSE(row.has_token);
  EXPECT_EQ(row.computed_tokens, 64U);
  row = step_one(*script, *id, 36);
  EXPECT_TRUE(row.has_token);
  EXPECT_EQ(row.computed_tokens, 100U);
}

TEST(Script, EndsAtMaxTokensAndAtTheContext) {
  const auto script = engine(simple);
  SequenceSpec limited = spec("greet");
  limited.sampling.max_tokens = 2;
  Finish finish = Finish::none;
  EXPECT_EQ(play(*script, *script->admit(limited), 5, finish), "He|llo|");
  EXPECT_EQ(finish, Finish::length);
  Description small = description();
  small.context_tokens_max = 8;
  const auto tight = engine(simple, {.description = small});
  SequenceSpec fits = spec("greet");
  fits.known_tokens_max = 6;  // a prefill rank takes room for one token only: no reason to end there
  EXPECT_EQ(play(*tight, *tight->admit(fits), 5, finish), "He|llo|\xf0\x9f|");
  EXPECT_EQ(finish, Finish::length);
}

TEST(Script, RunsOutOfPiecesOnResume) {
  const auto script = engine(simple);
  Finish finish = Finish::none;
  EXPECT_EQ(play(*script, *script->admit(spec("greet", 5, wire::Leg::decode, 9)), 5, finish), "|");
  EXPECT_EQ(finish, Finish::stop);
}

TEST(Script, AdmitChecksWhatItIsGiven) {
  const auto script = engine(R"({"match":"only this","pieces":[{"text":"x"}]})");
  EXPECT_EQ(script->admit(spec("other")).error().code, Code::invalid);
  SequenceSpec bad = spec("only this");
  bad.tokens[1] = 1000;
  EXPECT_EQ(script->admit(bad).error().code, Code::invalid);
  bad.tokens[1] = wire::script_token_base + 5;  // a piece of an earlier attempt
  EXPECT_TRUE(script->admit(bad));
  bad = spec("only this");
  bad.known_tokens_max = 5000;
  EXPECT_EQ(script->admit(bad).error().code, Code::invalid);
  bad = spec("only this", 64);
  bad.cached_tokens = 64;
  EXPECT_EQ(script->admit(bad).error().code, Code::invalid);
}

TEST(Script, PoolIsAllOrNothingAndComesBack) {
  const auto script = engine(simple);
  SequenceSpec big = spec("greet");
  big.known_tokens_max = 60 * block_tokens;
  const auto first = script->admit(big);
  ASSERT_TRUE(first);
  EXPECT_EQ(script->pool_blocks_used(), 60U);
  const auto second = script->admit(big);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Code::busy);
  EXPECT_EQ(script->pool_blocks_used(), 60U);
  script->release(*first);
  EXPECT_EQ(script->pool_blocks_used(), 0U);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(script->admit(spec("greet")));
  EXPECT_EQ(script->admit(spec("greet")).error().code, Code::busy);
}

TEST(Script, DelaysAreToldAndNeverSlept) {
  const auto script =
      engine(R"({"match":"","pieces":[{"text":"a","delay_ms":100},{"text":"b"},{"text":"c","delay_ms":50}]})",
             {.description = description(), .step_delay = milliseconds(10)});
  const auto id = script->admit(spec("x"));
  const Instant start{1'000'000'000};
  RowResult row = step_one(*script, *id, 5, start);
  EXPECT_EQ(row.state, RowState::not_before);
  EXPECT_EQ(row.not_before, start + milliseconds(100));
  EXPECT_EQ(row.computed_tokens, 0U);
  row = step_one(*script, *id, 5, start + milliseconds(99));
  EXPECT_EQ(row.not_before, start + milliseconds(100));  // asking again does not move it
  Instant ready;
  row = step_one(*script, *id, 5, start + milliseconds(100), &ready);
  EXPECT_EQ(text_of(row), "a");
  EXPECT_EQ(ready, start + milliseconds(110));
  row = step_one(*script, *id, 1, ready, &ready);
  EXPECT_EQ(text_of(row), "b");
  EXPECT_EQ(ready, start + milliseconds(120));
  row = step_one(*script, *id, 1, start + milliseconds(130), &ready);
  EXPECT_EQ(row.not_before, start + milliseconds(170));  // 50 ms behind b, not behind the question
  EXPECT_EQ(ready, start + milliseconds(130));           // nothing was computed, so the step takes no time
}

TEST(Script, PiecesOfOneStepFollowWithoutStepDelay) {
  const auto script =
      engine(R"({"match":"","pieces":[{"text":"a","step":1},{"text":"b","step":1},{"text":"c","step":2}]})",
             {.description = description(), .step_delay = milliseconds(10)});
  const auto id = script->admit(spec("x"));
  Instant ready;
  step_one(*script, *id, 5, Instant{}, &ready);
  EXPECT_EQ(ready, Instant{} + milliseconds(10));
  step_one(*script, *id, 1, ready, &ready);
  EXPECT_EQ(ready, Instant{} + milliseconds(10));
  step_one(*script, *id, 1, ready, &ready);
  EXPECT_EQ(ready, Instant{} + milliseconds(20));
}

TEST(Script, StallsOnceThenTheNextLineAnswers) {
  const auto script =
      engine(R"({"match":"","leg":"decode","pieces":[{"text":"a"},{"text":"b"}],"finish":"stall"}
{"match":"","pieces":[{"text":"a"},{"text":"b"},{"text":"c"}]})");
  const auto first = script->admit(spec("x", 5, wire::Leg::decode, 1));
  EXPECT_EQ(text_of(step_one(*script, *first, 5)), "b");
  const RowResult row = step_one(*script, *first, 1);
  EXPECT_EQ(row.state, RowState::not_before);
  EXPECT_EQ(row.not_before, instant_never);
  EXPECT_TRUE(script->cancel(*first));
  script->release(*first);
  const auto second = script->admit(spec("x", 5, wire::Leg::decode, 2));
  EXPECT_EQ(text_of(step_one(*script, *second, 5)), "c");
}

TEST(Script, TwoRequestsShareOneStall) {
  // Both are admitted while the line still has its use; the later one goes on with the next line.
  const auto script = engine(R"({"match":"","pieces":[{"text":"a"}],"finish":"stall"}
{"match":"","pieces":[{"text":"a"},{"text":"b"}]})");
  const auto first = script->admit(spec("x"));
  const auto second = script->admit(spec("x"));
  step_one(*script, *first, 5);
  step_one(*script, *second, 5);
  EXPECT_EQ(step_one(*script, *first, 1).state, RowState::not_before);
  EXPECT_EQ(text_of(step_one(*script, *second, 1)), "b");
}

TEST(Script, RefusesAsOftenAsItSays) {
  const auto script = engine(R"({"match":"x","finish":"refuse","times":2,"leg":"prefill"}
{"match":"","pieces":[{"text":"a"}]})");
  EXPECT_TRUE(script->admit(spec("x", 5, wire::Leg::decode)));
  EXPECT_EQ(script->admit(spec("x")).error().code, Code::busy);
  EXPECT_EQ(script->admit(spec("x")).error().code, Code::busy);
  EXPECT_TRUE(script->admit(spec("x")));
}

TEST(Script, LagGoesOnAfterACancel) {
  const auto script = engine(
      R"({"match":"","lag":2,"pieces":[{"text":"a"},{"text":"b"},{"text":"c"},{"text":"d"},{"text":"e"}]})");
  const auto id = script->admit(spec("x"));
  step_one(*script, *id, 5);
  EXPECT_FALSE(script->cancel(*id));
  EXPECT_FALSE(script->cancel(*id));
  EXPECT_EQ(step_one(*script, *id, 1).finish, Finish::none);
  const RowResult last = step_one(*script, *id, 1);
  EXPECT_EQ(text_of(last), "c");
  EXPECT_EQ(last.finish, Finish::cancelled);
  EXPECT_TRUE(script->cancel(*id));
  const auto plain = engine(simple);
  EXPECT_TRUE(plain->cancel(*plain->admit(spec("greet"))));
}

TEST(Script, CrashStrikesAfterItsPieces) {
  int crashes = 0;
  const auto script = engine(R"({"match":"","pieces":[{"text":"a"}],"finish":"crash"}
{"match":"","pieces":[{"text":"a"},{"text":"b"}]})",
                             {.description = description(), .on_crash = [&] { ++crashes; }});
  const auto id = script->admit(spec("x"));
  const RowResult row = step_one(*script, *id, 5);
  EXPECT_EQ(text_of(row), "a");
  EXPECT_EQ(row.finish, Finish::none);
  EXPECT_EQ(crashes, 0);  // the piece gets out first
  Bytes tail(script->describe().layout.page_bytes(1));
  script->export_tail(*id, tail);
  EXPECT_EQ(crashes, 1);
  script->release(*id);
  EXPECT_EQ(crashes, 1);
  const auto again = script->admit(spec("x", 5, wire::Leg::prefill, 1));
  EXPECT_EQ(text_of(step_one(*script, *again, 5)), "b");
}

TEST(ScriptDeathTest, CrashKillsTheProcess) {
  const auto script = engine(R"({"match":"","pieces":[],"finish":"crash"})", {.description = description()});
  const auto id = script->admit(spec("x"));
  EXPECT_EXIT(step_one(*script, *id, 5), testing::KilledBySignal(SIGKILL), "");
}

TEST(Script, UsesAreRememberedAcrossRestarts) {
  const std::string dir = testing::TempDir() + "script_uses";
  std::filesystem::remove_all(dir);
  constexpr std::string_view text = R"({"match":"","finish":"refuse","times":2}
{"match":"","pieces":[{"text":"a"}]})";
  const auto make = [&](std::string_view script) {
    return engine(script, {.description = description(), .state_dir = dir});
  };
  EXPECT_EQ(make(text)->admit(spec("x")).error().code, Code::busy);
  EXPECT_EQ(make(text)->admit(spec("x")).error().code, Code::busy);
  EXPECT_TRUE(make(text)->admit(spec("x")));
  // Another text is another line, although the file of the first is still counted there.
  EXPECT_FALSE(make(R"({"match":"x","finish":"refuse"})")->admit(spec("x")));
  std::filesystem::remove_all(dir);
  std::ofstream(dir) << "not a directory";
  auto lines = script_parse(text, "t");
  const auto made =
      ScriptEngine::create({.description = description(), .lines = std::move(*lines), .state_dir = dir});
  ASSERT_FALSE(made);
  EXPECT_NE(made.error().message.find(dir), std::string::npos);
  std::filesystem::remove_all(dir);
}

// The directory went, and with it what counts: the request was tried anew for ever.
TEST(Script, ARefusalThatCannotBeCountedIsOneAllTheSame) {
  const std::string dir = testing::TempDir() + "script_no_uses";
  std::filesystem::remove_all(dir);
  const auto script = engine(R"({"match":"","finish":"refuse","times":2}
{"match":"","pieces":[{"text":"a"}]})",
                             {.description = description(), .state_dir = dir});
  std::filesystem::remove_all(dir);
  const auto refused = script->admit(spec("x"));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::not_found);
  EXPECT_EQ(script->pool_blocks_used(), 0U);
}

// Prefill of `tokens` tokens: pages of full blocks, cut as given, and the tail.
std::vector<FakeSource::Page> prefilled(ScriptEngine& script, SequenceId id, std::uint32_t tokens,
                                        const std::vector<std::uint32_t>& cuts) {
  const kv::Layout& layout = script.describe().layout;
  std::vector<FakeSource::Page> pages;
  std::uint32_t first = 0;
  for (const std::uint32_t count : cuts) {
    Bytes bytes(layout.page_bytes(count), std::byte{0xaa});
    script.export_page(id, first, count, bytes);
    pages.push_back({std::move(bytes), count, 0, count});
    first += count;
  }
  if (tokens % layout.block_tokens() != 0) {
    Bytes bytes(layout.page_bytes(1), std::byte{0xaa});
    script.export_tail(id, bytes);
    pages.push_back({std::move(bytes), 1, 0, 1});
  }
  return pages;
}

class ScriptKv : public testing::TestWithParam<std::string> {
 protected:
  static kv::Layout layout() { return GetParam() == "v41" ? kv::layout_v41() : script_layout(); }
  // 3 full blocks and a half one.
  const std::uint32_t tokens_ = layout().block_tokens() * 7 / 2;
  std::unique_ptr<ScriptEngine> script_ = engine(simple, {.description = description(layout())});

  SequenceSpec spec_of(std::uint32_t tokens) {
    SequenceSpec out = spec("greet", tokens);
    out.keys = kv::chain_keys(out.root, out.tokens, layout().block_tokens());
    return out;
  }
  std::vector<FakeSource::Page> prefill(const std::vector<std::uint32_t>& cuts) {
    const auto id = script_->admit(spec_of(tokens_));
    step_one(*script_, *id, tokens_);
    auto pages = prefilled(*script_, *id, tokens_, cuts);
    script_->release(*id);
    return pages;
  }
  SequenceSpec decode_spec(std::shared_ptr<FakeSource> source) {
    SequenceSpec out = spec_of(tokens_);
    out.cached_tokens = tokens_;
    out.tokens.push_back(wire::script_token_base);
    out.first_index = 1;
    out.leg = wire::Leg::decode;
    out.source = std::move(source);
    return out;
  }
};

TEST_P(ScriptKv, HandOverIsVerifiedAndPagesMayBeCutAnyhow) {
  for (const auto& cuts : std::vector<std::vector<std::uint32_t>>{{3}, {1, 2}, {2, 1}, {1, 1, 1}}) {
    const auto id = script_->admit(decode_spec(std::make_shared<FakeSource>(layout(), prefill(cuts))));
    ASSERT_TRUE(id);
    const RowResult row = step_one(*script_, *id, 1);
    EXPECT_EQ(row.state, RowState::computed);
    EXPECT_EQ(row.swapped_blocks, 3U);
    EXPECT_EQ(row.computed_tokens, tokens_ + 1);
    EXPECT_EQ(text_of(row), "llo");
    script_->release(*id);
  }
}

TEST_P(ScriptKv, AnyWrongByteAborts) {
  const auto pages = prefill({1, 2});
  for (std::size_t page = 0; page < pages.size(); ++page) {
    auto wrong = pages;
    wrong[page].bytes[wrong[page].bytes.size() / 3] ^= std::byte{1};
    const auto id = script_->admit(decode_spec(std::make_shared<FakeSource>(layout(), wrong)));
    EXPECT_DEATH(step_one(*script_, *id, 1), "swap-in of request .* has wrong bytes in layer group");
    script_->release(*id);
  }
  auto swapped = pages;
  swapped[1].first = 1;  // the second block of the page in place of the first
  swapped[1].count = 1;
  SequenceSpec other = decode_spec(std::make_shared<FakeSource>(layout(), swapped));
  other.cached_tokens = 2 * layout().block_tokens();
  const auto id = script_->admit(other);
  EXPECT_DEATH(step_one(*script_, *id, tokens_ + 1 - other.cached_tokens), "block 1 has wrong bytes");
}

TEST_P(ScriptKv, TailOfOtherTokensAborts) {
  SequenceSpec other = decode_spec(std::make_shared<FakeSource>(layout(), prefill({3})));
  other.tokens[tokens_ - 1] ^= 1;
  const auto id = script_->admit(other);
  EXPECT_DEATH(step_one(*script_, *id, 1), "block 3 has wrong bytes");
}

TEST_P(ScriptKv, PaddingAndUnfilledEntriesAreZero) {
  const auto pages = prefill({3});
  const kv::Layout cut = layout();
  for (std::uint32_t group = 0; group < cut.groups(); ++group) {
    for (const FakeSource::Page& page : pages) {
      std::uint64_t used = 0;
      for (std::uint32_t plane = cut.group_first_plane(group); plane < cut.group_last_plane(group); ++plane) {
        used += cut.plane_block_bytes(plane) * page.page_blocks;
      }
      const ByteView segment = ByteView(page.bytes)
                                   .subspan(cut.segment_offset(group, page.page_blocks),
                                            cut.segment_bytes(group, page.page_blocks));
      for (std::size_t i = used; i < segment.size(); ++i) ASSERT_EQ(segment[i], std::byte{0});
    }
    const std::uint32_t plane = cut.group_first_plane(group);
    const ByteView tail =
        ByteView(pages.back().bytes).subspan(cut.segment_offset(group, 1), cut.plane_block_bytes(plane));
    for (std::size_t i = tail.size() / 2; i < tail.size(); ++i) ASSERT_EQ(tail[i], std::byte{0});
    EXPECT_NE(
        std::count(tail.begin(), tail.begin() + static_cast<std::ptrdiff_t>(tail.size() / 2), std::byte{0}),
        static_cast<std::ptrdiff_t>(tail.size() / 2));
  }
}

TEST_P(ScriptKv, LateGroupsAreAwaitedAndReported) {
  const auto source = std::make_shared<FakeSource>(layout(), prefill({3}));
  source->ready.groups = 1;
  const auto id = script_->admit(decode_spec(source));
  RowResult row = step_one(*script_, *id, 1);
  EXPECT_EQ(row.state, RowState::late);
  EXPECT_EQ(row.late_group, 1U);
  EXPECT_EQ(row.computed_tokens, 0U);
  EXPECT_EQ(row.swapped_blocks, 0U);
  ASSERT_EQ(source->waits.size(), 1U);
  EXPECT_EQ(source->waits[0], std::pair(1U, Duration(milliseconds(5))));
  source->on_wait = [&] { source->ready.groups = layout().groups(); };
  row = step_one(*script_, *id, 1);
  EXPECT_EQ(row.state, RowState::computed);
  EXPECT_EQ(row.swapped_blocks, 3U);
}

TEST_P(ScriptKv, FailedBlocksAreCutOffAndComputed) {
  auto pages = prefill({1, 2});
  for (std::byte& byte : pages[1].bytes) byte = std::byte{0x55};  // never arrived
  const auto source = std::make_shared<FakeSource>(layout(), pages);
  source->ready = {.groups = 0, .failed_block = 1};
  const auto id = script_->admit(decode_spec(source));
  RowResult row = step_one(*script_, *id, 1);
  EXPECT_EQ(row.state, RowState::kv_failed);
  EXPECT_EQ(row.failed_block, 1U);
  script_->truncate_cached(*id, 1);
  source->ready.groups = layout().groups();
  row = step_one(*script_, *id, tokens_ + 1 - layout().block_tokens());
  EXPECT_EQ(row.state, RowState::computed);
  EXPECT_EQ(row.swapped_blocks, 1U);
  EXPECT_EQ(row.computed_tokens, tokens_ + 1);
}

TEST_P(ScriptKv, BlocksThatFillWhileDecodingCarryTheKeyOfTheChain) {
  const std::uint32_t block = layout().block_tokens();
  const auto script = engine(R"({"match":"","pieces":[{"text":"a"},{"text":"b"},{"text":"c"}]})",
                             {.description = description(layout())});
  SequenceSpec start = spec_of(block - 1);
  EXPECT_TRUE(start.keys.empty());
  const auto id = script->admit(start);
  step_one(*script, *id, block - 1);
  step_one(*script, *id, 1);
  Bytes page(layout().page_bytes(1));
  script->export_page(*id, 0, 1, page);
  // Another request with these tokens and the key the router would send accepts the page.
  SequenceSpec reader = spec_of(block - 1);
  reader.tokens.push_back(wire::script_token_base);
  reader.tokens.push_back(wire::script_token_base + 1);
  reader.keys = kv::chain_keys(reader.root, reader.tokens, block);
  reader.cached_tokens = block;
  reader.first_index = 2;
  reader.source = std::make_shared<FakeSource>(layout(), std::vector<FakeSource::Page>{{page, 1, 0, 1}});
  EXPECT_EQ(text_of(step_one(*script, *script->admit(reader), 1)), "c");
}

INSTANTIATE_TEST_SUITE_P(Layouts, ScriptKv, testing::Values("demo", "v41"),
                         [](const auto& param) { return param.param; });

TEST(Script, KvBytesDependOnKeyGroupAndOffset) {
  Key a;
  Key b;
  b.raw[31] = std::byte{1};
  Bytes one(100);
  Bytes two(100);
  script_kv_fill(a, 0, one);
  script_kv_fill(a, 0, two);
  EXPECT_EQ(one, two);
  script_kv_fill(a, 1, two);
  EXPECT_NE(one, two);
  script_kv_fill(b, 0, two);
  EXPECT_NE(one, two);
  Bytes shorter(40);
  script_kv_fill(a, 0, shorter);
  EXPECT_TRUE(std::equal(shorter.begin(), shorter.end(), one.begin()));
  EXPECT_NE(to_hex(ByteView(one).first(8)), to_hex(ByteView(one).subspan(8, 8)));
}

TEST(Script, SpansComeFromTheGivenClock) {
  ManualClock clock;
  const auto script = engine(simple, {.description = description(), .clock = &clock});
  const RowResult row = step_one(*script, *script->admit(spec("greet")), 5);
  ASSERT_EQ(row.spans.size(), 1U);
  EXPECT_EQ(row.spans[0].kind, static_cast<std::uint8_t>(wire::SpanKind::compute));
  EXPECT_EQ(row.spans[0].start_us, 1'000'000U);
}

TEST(Script, FileErrorsSayWhere) {
  const std::string ok = R"({"match":"","pieces":[{"text":"a"}]})";
  const std::vector<std::pair<std::string, std::string_view>> cases{
      {"", "s.jsonl: has no line"},
      {"\n \n", "s.jsonl: has no line"},
      {ok + "\n\n{", "s.jsonl:3: "},
      {"[]", "s.jsonl:1: is a JSON array, want an object"},
      {R"({"pieces":[]})", "s.jsonl:1: 'match' is missing"},
      {ok + "\r\n" + R"({"match":1})", "s.jsonl:2: 'match': want a string"},
      {R"({"match":"","peices":[]})", "s.jsonl:1: unknown key 'peices'"},
      {R"({"match":"","pieces":{}})", "s.jsonl:1: 'pieces': want an array"},
      {R"({"match":"","pieces":["a"]})", "a piece is a JSON string"},
      {R"({"match":"","pieces":[{}]})", "a piece needs one of 'text' and 'hex'"},
      {R"({"match":"","pieces":[{"text":"a","hex":"00"}]})", "a piece needs one of"},
      {R"({"match":"","pieces":[{"hex":"0"}]})", "'hex': want an even number"},
      {R"({"match":"","pieces":[{"text":"a","delay_ms":-1}]})", "'delay_ms': want an integer from 0"},
      {R"({"match":"","pieces":[{"text":"a","delay":1}]})", "unknown key 'delay' of a piece"},
      {R"({"match":"","pieces":[{"text":"a","step":1},{"text":"b","step":1,"delay_ms":1}]})",
       "'delay_ms' of a piece that is not the first of its step"},
      {R"({"match":"","finish":"halt"})", "'finish': want one of stop, length, stall, crash, refuse"},
      {R"({"match":"","leg":1})", "'leg': want one of prefill, decode, any"},
      {R"({"match":"","times":0})", "'times': want an integer from 1 to 10000"},
      {R"({"match":"","lag":1.5})", "'lag': want an integer"},
  };
  for (const auto& [text, message] : cases) {
    const auto lines = script_parse(text, "s.jsonl");
    ASSERT_FALSE(lines) << text;
    EXPECT_EQ(lines.error().code, Code::invalid);
    EXPECT_NE(lines.error().message.find(message), std::string::npos) << lines.error().message;
  }
  EXPECT_EQ(script_load("/nonexistent/s.jsonl").error().code, Code::not_found);
}

TEST(Script, ManPageExamplesPlay) {
  std::ifstream page(DI_SOURCE_DIR "/man/di-script.5");
  ASSERT_TRUE(page);
  std::vector<std::string> examples;
  bool inside = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with(".Bd -literal")) examples.emplace_back();
    inside = (inside || line.starts_with(".Bd")) && !line.starts_with(".Ed");
    if (inside && !line.starts_with(".")) examples.back() += line + "\n";
  }
  ASSERT_EQ(examples.size(), 3U);
  Finish finish = Finish::none;
  const auto greeting = engine(examples[0]);
  EXPECT_EQ(play(*greeting, *greeting->admit(spec("oh, hello")), 5, finish), "Hi |\xf0\x9f|\x98\x80|");
  int crashes = 0;
  const auto dying = engine(examples[1], {.description = description(), .on_crash = [&] { ++crashes; }});
  EXPECT_EQ(play(*dying, *dying->admit(spec("x", 5, wire::Leg::decode, 1)), 5, finish), "b|...");
  EXPECT_EQ(crashes, 1);
  EXPECT_EQ(play(*dying, *dying->admit(spec("x", 5, wire::Leg::decode, 2)), 5, finish), "c|d|");
  const auto refusing = engine(examples[2]);
  EXPECT_FALSE(refusing->admit(spec("x")));
  EXPECT_FALSE(refusing->admit(spec("x")));
  EXPECT_TRUE(refusing->admit(spec("x")));
}

TEST(Script, FaultsHappenOnceByDefault) {
  const auto lines = script_parse(R"({"match":"","finish":"crash"}
{"match":"","finish":"stall"}

{"match":"","finish":"refuse","times":3}
{"match":""})",
                                  "s.jsonl");
  ASSERT_TRUE(lines);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> got;
  for (const ScriptLine& line : *lines) got.emplace_back(line.number, line.times);
  EXPECT_EQ(got, (std::vector<std::pair<std::uint32_t, std::uint32_t>>{{1, 1}, {2, 1}, {4, 3}, {5, 0}}));
}

}  // namespace
}  // namespace di::engine
