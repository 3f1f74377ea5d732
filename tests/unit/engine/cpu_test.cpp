// The built-in engine against the reference in scripts/v3_reference.py (tests/golden/logits), and against
// itself: however a prompt is cut, batched, cached or vectorised, the bits are the same.
#include "engine/cpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/crypto.h"
#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "model/weights.h"

namespace di::engine {
namespace {

const std::string golden_folder = DI_SOURCE_DIR "/tests/golden/logits/";
constexpr double error_max = 1e-4;

std::vector<std::string> golden_cases() {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(golden_folder)) {
    if (entry.is_directory()) out.push_back(entry.path().filename());
  }
  std::ranges::sort(out);
  return out;
}

std::string must_read(const std::string& path) {
  auto text = file_read(path, std::size_t{64} << 20);
  EXPECT_TRUE(text.ok()) << (text.ok() ? "" : text.error().message);
  return text.ok() ? *text : "";
}

std::vector<std::uint32_t> golden_tokens(const std::string& name) {
  const auto root = Json::parse(must_read(golden_folder + name + "/input.json"));
  std::vector<std::uint32_t> out;
  for (const Json& id : root->find("token_ids")->as_array())
    out.push_back(static_cast<std::uint32_t>(id.as_i64()));
  return out;
}

// Name → [rows, columns] of F32 tensors.
struct Table {
  std::size_t columns = 0;
  std::vector<float> values;
};
std::map<std::string, Table> golden_expected(const std::string& name) {
  const std::string file = must_read(golden_folder + name + "/expected.safetensors");
  const auto header = model::safetensors_parse(as_bytes(file));
  EXPECT_TRUE(header.ok());
  std::map<std::string, Table> out;
  for (const auto& entry : header->entries) {
    Table table{entry.dims.back(), std::vector<float>((entry.end - entry.begin) / sizeof(float))};
    std::memcpy(table.values.data(), file.data() + header->header_bytes + entry.begin,
                entry.end - entry.begin);
    out.emplace(entry.name, std::move(table));
  }
  return out;
}

using Logits = std::map<std::pair<SequenceId, std::uint32_t>, std::vector<float>>;

struct Rig {
  std::shared_ptr<Logits> logits = std::make_shared<Logits>();
  std::unique_ptr<Engine> engine;

  explicit Rig(const std::string& name, CpuCache cache = CpuCache::bf16, CpuPath path = CpuPath::best,
               const std::function<void(CpuOptions&)>& change = {}) {
    CpuOptions options;
    options.folder = golden_folder + name;
    options.cache = cache;
    options.path = path;
    options.pool_blocks = 400;
    options.sequences_max = 100;
    options.test_logits = [seen = logits](SequenceId id, std::uint32_t position, std::span<const float> row) {
      seen->insert_or_assign({id, position}, std::vector<float>(row.begin(), row.end()));
    };
    if (change) change(options);
    auto created = cpu_engine_create(std::move(options));
    EXPECT_TRUE(created.ok()) << created.error().message;
    engine = std::move(*created);
  }

  SequenceId admit(std::vector<std::uint32_t> tokens, std::uint32_t more = 1) const {
    SequenceSpec spec;
    spec.known_tokens_max = static_cast<std::uint32_t>(tokens.size()) + more;
    spec.tokens = std::move(tokens);
    spec.sampling.top_p = 1.0f;
    spec.sampling.max_tokens = 1000;
    auto id = engine->admit(std::move(spec));
    EXPECT_TRUE(id.ok()) << id.error().message;
    return *id;
  }
  RowResult step(SequenceId id, std::uint32_t tokens) const {
    StepResult result = engine->step({{{id, tokens}}, Duration{}}, Instant{});
    EXPECT_EQ(result.rows.size(), 1u);
    return result.rows[0];
  }
  // All positions of one sequence, one after the other.
  [[nodiscard]] std::vector<float> rows(SequenceId id, std::uint32_t first, std::uint32_t last) const {
    std::vector<float> out;
    for (std::uint32_t position = first; position < last; ++position) {
      const auto at = logits->find({id, position});
      EXPECT_NE(at, logits->end()) << "no logits at " << position;
      if (at != logits->end()) out.insert(out.end(), at->second.begin(), at->second.end());
    }
    return out;
  }
};

// Every cache row of a computed sequence: per layer [tokens, width], as bytes of the cache's format.
std::vector<Bytes> cache_rows(Engine& engine, SequenceId id, std::uint32_t tokens) {
  const kv::Layout& layout = engine.describe().layout;
  const std::uint32_t full = tokens / layout.block_tokens();
  std::vector<Bytes> out(layout.planes().size());
  const auto append = [&](const Bytes& page, std::uint32_t blocks, std::uint32_t rows) {
    for (std::uint32_t plane = 0; plane < layout.planes().size(); ++plane) {
      std::uint32_t group = 0;
      while (plane >= layout.group_last_plane(group)) ++group;
      const auto* from =
          page.data() + layout.segment_offset(group, blocks) + layout.plane_offset(plane, blocks);
      out[plane].insert(out[plane].end(), from, from + rows * layout.planes()[plane].bytes_per_entry);
    }
  };
  if (full > 0) {
    Bytes page(layout.page_bytes(full), std::byte{0xaa});
    engine.export_page(id, 0, full, page);
    append(page, full, full * layout.block_tokens());
  }
  if (tokens % layout.block_tokens() != 0) {
    Bytes page(layout.page_bytes(1), std::byte{0xaa});
    engine.export_tail(id, page);
    append(page, 1, tokens % layout.block_tokens());
  }
  return out;
}

std::vector<float> floats(const Bytes& bytes) {
  std::vector<float> out(bytes.size() / sizeof(float));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

double worst_row_error(const std::vector<float>& got, const Table& want) {
  EXPECT_EQ(got.size(), want.values.size());
  if (got.size() != want.values.size()) return INFINITY;
  double worst = 0;
  for (std::size_t row = 0; row * want.columns < got.size(); ++row) {
    double difference = 0, size = 0;
    for (std::size_t i = row * want.columns; i < (row + 1) * want.columns; ++i) {
      difference =
          std::max(difference, std::abs(static_cast<double>(got[i]) - static_cast<double>(want.values[i])));
      size = std::max(size, std::abs(static_cast<double>(want.values[i])));
    }
    if (!(difference / size <= worst)) worst = difference / size;
  }
  return worst;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

class Golden : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cases, Golden, ::testing::ValuesIn(golden_cases()), [](const auto& test) {
  std::string name = test.param;
  std::ranges::replace(name, '-', '_');
  return name;
});

TEST_P(Golden, logits_and_cache_are_the_references) {
  const auto expected = golden_expected(GetParam());
  const auto tokens = golden_tokens(GetParam());
  const auto count = static_cast<std::uint32_t>(tokens.size());
  double worst_logits = 0, worst_cache = 0;
  std::vector<float> whole;
  std::vector<Bytes> whole_cache;
  // In one step, then in odd chunks; 1 is what decoding does.
  for (const std::uint32_t chunk : {count, 1u, 7u, 31u, 64u}) {
    const Rig rig(GetParam(), CpuCache::f32);
    const SequenceId id = rig.admit(tokens);
    for (std::uint32_t done = 0; done < count; done += chunk) {
      const RowResult row = rig.step(id, std::min(chunk, count - done));
      ASSERT_EQ(row.state, RowState::computed);
      ASSERT_EQ(row.computed_tokens, std::min(done + chunk, count));
      ASSERT_EQ(row.has_token, row.computed_tokens == count);
    }
    const auto logits = rig.rows(id, 0, count);
    const auto cache = cache_rows(*rig.engine, id, count);
    if (chunk == count) {
      whole = logits;
      whole_cache = cache;
      worst_logits = worst_row_error(logits, expected.at("logits"));
      for (std::size_t layer = 0; layer < cache.size(); ++layer) {
        worst_cache = std::max(
            worst_cache, worst_row_error(floats(cache[layer]), expected.at("kv." + std::to_string(layer))));
      }
    } else {
      EXPECT_TRUE(same_bits(logits, whole)) << "chunks of " << chunk;
      EXPECT_EQ(cache, whole_cache) << "chunks of " << chunk;
    }
  }
  std::printf("largest error per row: logits %.2e, cache %.2e\n", worst_logits, worst_cache);
  EXPECT_LE(worst_logits, error_max);
  EXPECT_LE(worst_cache, error_max);
}

TEST_P(Golden, every_vector_path_gives_the_same_bits) {
  const auto tokens = golden_tokens(GetParam());
  std::map<std::string, std::string> hashes;
  for (const auto& [name, path] :
       {std::pair{"scalar", CpuPath::scalar}, {"avx2", CpuPath::avx2}, {"avx512", CpuPath::avx512}}) {
    CpuOptions probe;
    probe.folder = golden_folder + GetParam();
    probe.path = path;
    if (const auto engine = cpu_engine_create(probe); !engine) {
      ASSERT_EQ(engine.error().code, Code::unsupported);
      std::printf("skipped: this processor has no %s\n", name);
      continue;
    }
    const Rig rig(GetParam(), CpuCache::bf16, path);
    const SequenceId id = rig.admit(tokens);
    (void)rig.step(id, static_cast<std::uint32_t>(tokens.size()));
    const auto logits = rig.rows(id, 0, static_cast<std::uint32_t>(tokens.size()));
    hashes[to_hex(
        sha256({reinterpret_cast<const std::byte*>(logits.data()), logits.size() * sizeof(float)}))] = name;
  }
  EXPECT_EQ(hashes.size(), 1u);
}

// Greedy answers with their logits, made one token at a time.
TEST_P(Golden, a_decoded_answer_equals_the_same_tokens_as_a_prompt) {
  const auto prompt = golden_tokens(GetParam());
  const auto count = static_cast<std::uint32_t>(prompt.size());
  constexpr std::uint32_t answer = 12;
  const Rig rig(GetParam());
  const SequenceId id = rig.admit(prompt, answer);
  std::vector<std::uint32_t> all = prompt;
  for (std::uint32_t i = 0; i < answer; ++i) {
    const RowResult row = rig.step(id, i == 0 ? count : 1);
    ASSERT_TRUE(row.has_token);
    EXPECT_EQ(row.index, i);
    all.push_back(row.token.id);
  }
  all.pop_back();  // the last one chosen was not computed
  const auto total = static_cast<std::uint32_t>(all.size());
  const SequenceId again = rig.admit(all);
  (void)rig.step(again, total);
  EXPECT_TRUE(same_bits(rig.rows(id, 0, total), rig.rows(again, 0, total)));
  EXPECT_EQ(cache_rows(*rig.engine, id, total), cache_rows(*rig.engine, again, total));
}

// A source whose pages were exported by another sequence; groups appear when the test says so.
class PageSource final : public KvSource {
 public:
  PageSource(Engine& engine, SequenceId from, std::uint32_t tokens, std::vector<std::uint32_t> page_blocks)
      : layout_(engine.describe().layout) {
    std::uint32_t first = 0;
    for (const std::uint32_t count : page_blocks) {
      pages_.push_back({Bytes(layout_.page_bytes(count), std::byte{0xbb}), count});
      engine.export_page(from, first, count, pages_.back().bytes);
      first += count;
    }
    if (tokens % layout_.block_tokens() != 0) {
      pages_.push_back({Bytes(layout_.page_bytes(1), std::byte{0xbb}), 1});
      engine.export_tail(from, pages_.back().bytes);
      ++first;
    }
    blocks_ = first;
    ready_.groups = layout_.groups();
  }

  std::uint32_t blocks() const override { return blocks_; }
  Readiness readiness() const override { return ready_; }
  void wait(std::uint32_t group, Duration) override {
    waited_.push_back(group);
    if (on_wait_) on_wait_(group);
  }
  std::vector<SegmentRun> segments(std::uint32_t group) const override {
    EXPECT_LT(group, ready_.groups);
    std::vector<SegmentRun> out;
    for (const Page& page : pages_) {
      out.push_back({ByteView(page.bytes)
                         .subspan(layout_.segment_offset(group, page.blocks),
                                  layout_.segment_bytes(group, page.blocks)),
                     page.blocks, 0, page.blocks});
    }
    return out;
  }

  Readiness ready_;
  std::vector<std::uint32_t> waited_;
  std::function<void(std::uint32_t)> on_wait_;

 private:
  struct Page {
    Bytes bytes;
    std::uint32_t blocks;
  };
  const kv::Layout& layout_;
  std::vector<Page> pages_;
  std::uint32_t blocks_ = 0;
};

SequenceSpec cached_spec(std::vector<std::uint32_t> tokens, std::uint32_t cached,
                         std::shared_ptr<KvSource> source) {
  SequenceSpec spec;
  spec.known_tokens_max = static_cast<std::uint32_t>(tokens.size()) + 1;
  spec.tokens = std::move(tokens);
  spec.cached_tokens = cached;
  spec.source = std::move(source);
  spec.sampling.top_p = 1.0f;
  spec.sampling.max_tokens = 1000;
  return spec;
}

// 70 tokens, 3 layers, so 3 groups; blocks of 8.
struct Cached {
  std::vector<std::uint32_t> tokens = golden_tokens("q-lora-groups");
  std::uint32_t count = static_cast<std::uint32_t>(tokens.size());
  Rig rig{"q-lora-groups", CpuCache::bf16, CpuPath::best, [](CpuOptions& o) { o.block_tokens = 8; }};
  SequenceId cold;

  Cached() {
    cold = rig.admit(tokens);
    (void)rig.step(cold, count);
  }
  [[nodiscard]] SequenceId admit(std::uint32_t cached, const std::shared_ptr<PageSource>& source) const {
    auto id = rig.engine->admit(cached_spec(tokens, cached, source));
    EXPECT_TRUE(id.ok());
    return *id;
  }
  [[nodiscard]] std::shared_ptr<PageSource> source(std::vector<std::uint32_t> page_blocks) const {
    return std::make_shared<PageSource>(*rig.engine, cold, 0, std::move(page_blocks));
  }
  void expect_equal_from(SequenceId id, std::uint32_t first) const {
    EXPECT_TRUE(same_bits(rig.rows(id, first, count), rig.rows(cold, first, count)));
    EXPECT_EQ(cache_rows(*rig.engine, id, count), cache_rows(*rig.engine, cold, count));
  }
};

TEST(CpuCached, a_cached_prefix_changes_no_bit) {
  const Cached c;
  for (const auto& pages : std::vector<std::vector<std::uint32_t>>{{1}, {8}, {4, 2, 1}, {1, 1, 4}}) {
    const auto source = c.source(pages);
    const std::uint32_t cached = source->blocks() * 8;
    const SequenceId id = c.admit(cached, source);
    const RowResult row = c.rig.step(id, c.count - cached);
    EXPECT_EQ(row.state, RowState::computed);
    EXPECT_EQ(row.swapped_blocks, source->blocks());
    EXPECT_EQ(row.computed_tokens, c.count);
    c.expect_equal_from(id, cached);
    c.rig.engine->release(id);
  }
}

TEST(CpuCached, a_tail_is_taken_over_and_continued) {
  const Cached c;
  // 70 tokens = 8 blocks and a tail of 6: a hand-over of the whole prompt but its first answer token.
  const auto source = std::make_shared<PageSource>(*c.rig.engine, c.cold, 70, std::vector<std::uint32_t>{8});
  ASSERT_EQ(source->blocks(), 9u);
  auto tokens = c.tokens;
  tokens.push_back(5);
  const auto id = c.rig.engine->admit(cached_spec(tokens, 70, source));
  ASSERT_TRUE(id.ok());
  const RowResult row = c.rig.step(*id, 1);
  EXPECT_EQ(row.state, RowState::computed);
  EXPECT_EQ(row.swapped_blocks, 8u);  // a tail counted as a block: a prompt of four tokens hit
  const SequenceId whole = c.rig.admit(tokens);
  (void)c.rig.step(whole, 71);
  EXPECT_TRUE(same_bits(c.rig.rows(*id, 70, 71), c.rig.rows(whole, 70, 71)));
  EXPECT_EQ(cache_rows(*c.rig.engine, *id, 71), cache_rows(*c.rig.engine, whole, 71));
}

TEST(CpuCached, groups_that_arrive_during_the_pass_are_waited_for) {
  const Cached c;
  const auto source = c.source({8});
  source->ready_.groups = 1;
  source->on_wait_ = [&source](std::uint32_t group) { source->ready_.groups = group + 1; };
  const SequenceId id = c.admit(64, source);
  const StepResult result = c.rig.engine->step({{{id, 6}}, seconds(5)}, Instant{});
  EXPECT_EQ(result.rows[0].state, RowState::computed);
  EXPECT_EQ(source->waited_, (std::vector<std::uint32_t>{1, 2}));
  c.expect_equal_from(id, 64);

  // The spans tell that group 0 was computed before group 2 had arrived.
  std::vector<std::pair<wire::SpanKind, int>> spans;
  std::uint64_t group_0_end = 0, group_2_swap = 0;
  for (const Span& span : result.rows[0].spans) {
    spans.emplace_back(static_cast<wire::SpanKind>(span.kind), span.group);
    if (spans.back() == std::pair{wire::SpanKind::compute, 0}) group_0_end = span.start_us + span.length_us;
    if (spans.back() == std::pair{wire::SpanKind::swap_in, 2}) group_2_swap = span.start_us;
  }
  using enum wire::SpanKind;
  EXPECT_EQ(spans, (std::vector<std::pair<wire::SpanKind, int>>{{swap_in, 0},
                                                                {compute, 0},
                                                                {wait, 1},
                                                                {swap_in, 1},
                                                                {compute, 1},
                                                                {wait, 2},
                                                                {swap_in, 2},
                                                                {compute, 2}}));
  EXPECT_LE(group_0_end, group_2_swap);
}

TEST(CpuCached, a_late_row_is_dropped_from_the_step_and_the_others_are_not_touched) {
  const Cached c;
  const auto late_source = c.source({8});
  const auto other_source = c.source({4});
  late_source->ready_.groups = 1;
  const SequenceId before = c.admit(32, other_source);
  const SequenceId late = c.admit(64, late_source);
  const SequenceId after = c.rig.admit(c.tokens);
  const StepResult result =
      c.rig.engine->step({{{before, 38}, {late, 6}, {after, c.count}}, Duration{}}, Instant{});
  EXPECT_EQ(result.rows[0].state, RowState::computed);
  EXPECT_EQ(result.rows[1].state, RowState::late);
  EXPECT_EQ(result.rows[1].late_group, 1u);
  EXPECT_EQ(result.rows[1].computed_tokens, 0u);
  EXPECT_EQ(result.rows[1].swapped_blocks, 0u);
  EXPECT_FALSE(result.rows[1].has_token);
  EXPECT_EQ(result.rows[2].state, RowState::computed);
  EXPECT_FALSE(c.rig.logits->contains({late, 64}));
  c.expect_equal_from(before, 32);
  c.expect_equal_from(after, 0);

  late_source->ready_.groups = 3;
  EXPECT_EQ(c.rig.step(late, 6).state, RowState::computed);
  c.expect_equal_from(late, 64);
}

TEST(CpuCached, a_failed_block_is_reported_and_the_rest_recomputed) {
  const Cached c;
  const auto source = c.source({8});
  source->ready_ = {3, 5};  // all groups, of the five blocks before the failed one
  const SequenceId id = c.admit(64, source);
  RowResult row = c.rig.step(id, 6);
  EXPECT_EQ(row.state, RowState::kv_failed);
  EXPECT_EQ(row.failed_block, 5u);
  c.rig.engine->truncate_cached(id, 5);
  row = c.rig.step(id, 30);
  EXPECT_EQ(row.state, RowState::computed);
  EXPECT_EQ(row.swapped_blocks, 5u);
  c.expect_equal_from(id, 40);

  const auto gone = c.source({8});
  gone->ready_ = {0, 0};
  const SequenceId cold = c.admit(64, gone);
  EXPECT_EQ(c.rig.step(cold, 6).state, RowState::kv_failed);
  c.rig.engine->truncate_cached(cold, 0);
  EXPECT_EQ(c.rig.step(cold, c.count).swapped_blocks, 0u);
  c.expect_equal_from(cold, 0);
}

TEST(CpuCached, exported_pages_are_padded_with_zeros) {
  const Cached c;
  const kv::Layout& layout = c.rig.engine->describe().layout;
  Bytes page(layout.page_bytes(2), std::byte{0xcc});
  c.rig.engine->export_page(c.cold, 3, 2, page);
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    const std::uint64_t used = layout.plane_block_bytes(group) * 2;  // one plane a group
    for (std::uint64_t i = used; i < layout.segment_bytes(group, 2); ++i) {
      ASSERT_EQ(page[layout.segment_offset(group, 2) + i], std::byte{0}) << group << " " << i;
    }
  }
  Bytes tail(layout.page_bytes(1), std::byte{0xcc});
  c.rig.engine->export_tail(c.cold, tail);
  const std::uint64_t used = layout.plane_block_bytes(0) / 8 * 6;
  for (std::uint64_t i = used; i < layout.segment_bytes(0, 1); ++i) ASSERT_EQ(tail[i], std::byte{0}) << i;
}

TEST(Cpu, a_row_does_not_depend_on_its_batch) {
  constexpr std::uint64_t seed = 99;
  std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  for (const std::string name : {"bf16-sharded", "q-lora-groups"}) {
    const Rig together(name, CpuCache::bf16, CpuPath::best, [](CpuOptions& o) { o.block_tokens = 16; });
    const Rig alone(name, CpuCache::bf16, CpuPath::best, [](CpuOptions& o) { o.block_tokens = 32; });
    const auto base = golden_tokens(name);
    // 64 sequences: some only prefill, some decode beside them, in steps of unlike sizes.
    struct Progress {
      SequenceId id;
      std::uint32_t known, computed;
    };
    std::vector<std::vector<std::uint32_t>> prompts;
    std::vector<Progress> progress;
    for (int i = 0; i < 64; ++i) {
      std::vector<std::uint32_t> prompt;
      const std::uint64_t length = 1 + rng.below(70);
      for (std::uint64_t t = 0; t < length; ++t) prompt.push_back(base[rng.below(base.size())]);
      prompts.push_back(prompt);
      progress.push_back({together.admit(prompt, 10), static_cast<std::uint32_t>(length), 0});
    }
    std::map<SequenceId, std::vector<std::uint32_t>> answers;
    for (int round = 0; round < 8; ++round) {
      StepPlan plan;
      for (Progress& p : progress) {
        const std::uint32_t left = p.known - p.computed;
        plan.rows.push_back(
            {p.id, round == 7 ? left : 1 + static_cast<std::uint32_t>(rng.below(std::min(left, 30u)))});
      }
      const StepResult result = together.engine->step(plan, Instant{});
      for (std::size_t i = 0; i < progress.size(); ++i) {
        ASSERT_EQ(result.rows[i].sequence, progress[i].id);
        progress[i].computed = result.rows[i].computed_tokens;
        if (result.rows[i].has_token) {
          answers[progress[i].id].push_back(result.rows[i].token.id);
          ++progress[i].known;
        }
      }
    }
    std::size_t decoded = 0;
    for (std::size_t i = 0; i < progress.size(); ++i) {
      const SequenceId id = alone.admit(prompts[i], 10);
      std::vector<std::uint32_t> answer;
      std::uint32_t computed = 0;
      while (answer.size() < answers[progress[i].id].size()) {
        const RowResult row =
            alone.step(id, computed == 0 ? static_cast<std::uint32_t>(prompts[i].size()) : 1);
        computed = row.computed_tokens;
        answer.push_back(row.token.id);
      }
      EXPECT_EQ(answer, answers[progress[i].id]);
      EXPECT_TRUE(same_bits(alone.rows(id, 0, computed), together.rows(progress[i].id, 0, computed)))
          << name << " " << i;
      decoded += answer.size();
      alone.engine->release(id);
    }
    EXPECT_GT(decoded, 64u);
  }
}

TEST(Cpu, a_step_wider_than_one_pass_is_cut) {
  const auto tokens = golden_tokens("yarn-v3");
  const auto count = static_cast<std::uint32_t>(tokens.size());
  const Rig wide("yarn-v3");
  const SequenceId whole = wide.admit(tokens);
  (void)wide.step(whole, count);
  const Rig narrow("yarn-v3", CpuCache::bf16, CpuPath::best, [](CpuOptions& o) { o.step_rows_max = 13; });
  const SequenceId a = narrow.admit(tokens);
  const SequenceId b = narrow.admit(tokens);
  const StepResult result = narrow.engine->step({{{a, count}, {b, 40}}, Duration{}}, Instant{});
  EXPECT_EQ(result.rows[0].computed_tokens, count);
  EXPECT_TRUE(result.rows[0].has_token);
  EXPECT_EQ(result.rows[1].computed_tokens, 40u);
  EXPECT_FALSE(result.rows[1].has_token);
  EXPECT_TRUE(same_bits(narrow.rows(a, 0, count), wide.rows(whole, 0, count)));
  EXPECT_TRUE(same_bits(narrow.rows(b, 0, 40), wide.rows(whole, 0, 40)));
}

TEST(Cpu, answers_end_at_stop_ids_and_limits) {
  const Rig rig("plain");
  const auto run = [&](const std::function<void(SequenceSpec&)>& change) {
    SequenceSpec spec;
    spec.tokens = golden_tokens("plain");
    spec.known_tokens_max = static_cast<std::uint32_t>(spec.tokens.size()) + 20;
    spec.sampling.top_p = 1.0f;
    spec.sampling.max_tokens = 5;
    change(spec);
    auto computed = static_cast<std::uint32_t>(spec.tokens.size());
    const auto id = rig.engine->admit(std::move(spec));
    std::vector<RowResult> out;
    do {
      out.push_back(rig.step(*id, computed));
      computed = 1;
    } while (out.back().finish == Finish::none);
    rig.engine->release(*id);
    return out;
  };
  const auto plain = run([](SequenceSpec&) {});
  ASSERT_EQ(plain.size(), 5u);
  EXPECT_EQ(plain.back().finish, Finish::length);
  EXPECT_EQ(plain.back().index, 4u);

  const std::uint32_t third = plain[2].token.id;
  const auto stop = run([&](SequenceSpec& spec) { spec.sampling.stop_ids = {third}; });
  EXPECT_EQ(stop.back().finish, Finish::stop);
  EXPECT_EQ(stop.back().token.id, third);
  EXPECT_LE(stop.size(), 3u);
  const auto masked = run([&](SequenceSpec& spec) {
    spec.sampling.stop_ids = {third};
    spec.sampling.min_tokens = 5;
  });
  EXPECT_EQ(masked.size(), 5u);
  for (const RowResult& row : masked) EXPECT_NE(row.token.id, third);

  // A request that goes on after three tokens: indexes and limits are absolute.
  const auto resumed = run([&](SequenceSpec& spec) {
    for (int i = 0; i < 3; ++i) spec.tokens.push_back(plain[static_cast<std::size_t>(i)].token.id);
    spec.first_index = 3;
  });
  ASSERT_EQ(resumed.size(), 2u);
  EXPECT_EQ(resumed[0].index, 3u);
  EXPECT_EQ(resumed[0].token.id, plain[3].token.id);
  EXPECT_EQ(resumed[1].token.id, plain[4].token.id);
}

TEST(Cpu, a_seeded_answer_does_not_depend_on_where_it_went_on) {
  const Rig rig("plain");
  const auto prompt = golden_tokens("plain");
  SequenceSpec spec;
  spec.sampling.temperature = 1.0f;
  spec.sampling.top_p = 0.9f;
  spec.sampling.seed = 17;
  spec.sampling.max_tokens = 30;
  const auto generate = [&](std::vector<std::uint32_t> tokens, std::uint32_t first) {
    SequenceSpec s = spec;
    s.tokens = tokens;
    s.first_index = first;
    s.known_tokens_max = static_cast<std::uint32_t>(prompt.size()) + 30;
    const auto id = rig.engine->admit(s);
    auto next = static_cast<std::uint32_t>(tokens.size());
    for (;;) {
      const RowResult row = rig.step(*id, next);
      tokens.push_back(row.token.id);
      if (row.finish != Finish::none) break;
      next = 1;
    }
    rig.engine->release(*id);
    return tokens;
  };
  const auto whole = generate(prompt, 0);
  ASSERT_EQ(whole.size(), prompt.size() + 30);
  for (const std::uint32_t cut : {1u, 13u, 29u}) {
    EXPECT_EQ(
        generate({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(prompt.size() + cut)}, cut),
        whole);
  }
}

TEST(Cpu, admission_is_bounded_and_all_or_nothing) {
  const Rig rig("plain", CpuCache::bf16, CpuPath::best, [](CpuOptions& o) {
    o.pool_blocks = 4;
    o.sequences_max = 3;
    o.block_tokens = 16;
  });
  EXPECT_EQ(rig.engine->describe().context_tokens_max, 64u) << "the model allows 256, the pool holds 64";
  const auto admit = [&](std::vector<std::uint32_t> tokens, std::uint32_t room) {
    SequenceSpec spec;
    spec.tokens = std::move(tokens);
    spec.known_tokens_max = room;
    return rig.engine->admit(spec);
  };
  EXPECT_EQ(admit({}, 5).error().code, Code::invalid);
  EXPECT_EQ(admit({1, 2}, 1).error().code, Code::invalid);
  EXPECT_EQ(admit({1, 61}, 2).error().code, Code::invalid);
  EXPECT_EQ(admit({1, 2}, 65).error().code, Code::invalid);
  EXPECT_EQ(rig.engine->pool_blocks_used(), 0u);
  const auto a = admit({1, 2}, 33);
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(rig.engine->pool_blocks_used(), 3u);
  EXPECT_EQ(admit({1, 2}, 17).error().code, Code::busy);
  const auto b = admit({1, 2}, 16);
  ASSERT_TRUE(b.ok());
  EXPECT_EQ(rig.engine->pool_blocks_used(), 4u);
  EXPECT_TRUE(rig.engine->cancel(*a));
  rig.engine->release(*a);
  rig.engine->release(*b);
  EXPECT_EQ(rig.engine->pool_blocks_used(), 0u);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(admit({1}, 1).ok());
  EXPECT_EQ(admit({1}, 1).error().code, Code::busy) << "no sequence left";
}

TEST(Cpu, describe_and_step_delay) {
  const Rig rig("plain", CpuCache::bf16, CpuPath::best,
                [](CpuOptions& o) { o.step_delay = milliseconds(50); });
  EXPECT_EQ(rig.engine->describe().model, "plain");
  EXPECT_EQ(rig.engine->describe().context_tokens_max, 256u);
  EXPECT_EQ(rig.engine->describe().layout.format(), "mla-bf16-1");
  EXPECT_EQ(rig.engine->describe().layout.block_tokens(), 32u);
  EXPECT_EQ(rig.engine->describe().layout.planes()[0].bytes_per_entry, 52u);
  EXPECT_FALSE(rig.engine->describe().revision.is_zero());
  const SequenceId id = rig.admit({3, 4});
  EXPECT_EQ(rig.engine->step({{{id, 2}}, Duration{}}, Instant{1000}).ready_at, Instant{50'001'000});
  EXPECT_TRUE(rig.engine->step({}, Instant{}).rows.empty());
}

TEST(Cpu, a_folder_that_does_not_fit_its_config_is_one_clear_error) {
  std::string folder = ::testing::TempDir() + "di-engine-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const auto error = [&] {
    CpuOptions options;
    options.folder = folder;
    const auto engine = cpu_engine_create(options);
    EXPECT_FALSE(engine.ok());
    return engine.ok() ? Error{Code::ok, 0, ""} : engine.error();
  };
  EXPECT_EQ(error().message, folder + "/config.json: No such file or directory");
  std::string config = must_read(golden_folder + "plain/config.json");
  std::ofstream(folder + "/config.json") << config;
  EXPECT_EQ(error().message, folder + "/model.safetensors: No such file or directory");
  std::filesystem::copy_file(golden_folder + "plain/model.safetensors", folder + "/model.safetensors");
  config.replace(config.find("\"kv_lora_rank\": 20"), 18, "\"kv_lora_rank\": 21");
  std::ofstream(folder + "/config.json") << config;
  EXPECT_EQ(error().message,
            folder +
                "/model.safetensors: model.layers.0.self_attn.kv_a_proj_with_mqa.weight: shape [26, 28], "
                "config.json asks for [27, 28]");
  config.replace(config.find("\"num_hidden_layers\": 3"), 22, "\"num_hidden_layers\": 4");
  config.replace(config.find("\"kv_lora_rank\": 21"), 18, "\"kv_lora_rank\": 20");
  std::ofstream(folder + "/config.json") << config;
  EXPECT_EQ(error().message, folder + ": no tensor model.layers.3.input_layernorm.weight");
  std::filesystem::resize_file(folder + "/model.safetensors", 50000);
  EXPECT_EQ(error().code, Code::corrupt);
  EXPECT_NE(error().message.find("truncated"), std::string::npos) << error().message;
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace di::engine
