#include "engine/cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/assert.h"
#include "base/clock.h"
#include "engine/cpu_forward.h"
#include "engine/cpu_pool.h"
#include "engine/cpu_weights.h"
#include "engine/sample.h"
#include "kernels/api.h"
#include "model/shape.h"
#include "model/weights.h"

namespace di::engine {

namespace {

constexpr std::uint32_t step_rows_limit = 1u << 16;
constexpr std::uint32_t sequences_limit = 1u << 16;

struct Sequence {
  bool admitted = false;
  std::vector<std::uint32_t> tokens;
  Sampling sampling;
  std::uint32_t next_index = 0;
  std::uint32_t computed = 0;  // tokens whose KV is there, or will be when all groups are swapped in
  bool stepped = false;        // a token of its own was computed
  bool finished = false;
  std::vector<std::uint32_t> blocks;

  std::shared_ptr<KvSource> source;  // null when nothing (more) is to be swapped in
  std::uint32_t cached_blocks = 0;   // the last one may be partial
  std::uint32_t cached_full = 0;     // of them
  std::uint32_t groups_swapped = 0;
};

// A row of the plan on its way through a step.
struct Active {
  std::size_t row = 0;  // in the plan and the result
  SequenceId sequence = 0;
  std::uint32_t first = 0;  // next position to compute
  std::uint32_t left = 0;   // tokens still to compute in this step
  bool swapping = false;    // had groups to swap in when the step began
  bool out = false;         // late or failed: nothing more in this step
};

class CpuEngine final : public Engine {
 public:
  CpuEngine(CpuOptions options, model::Shape shape, model::Weights files, CpuWeights weights,
            const kernels::Kernels& kernels, Description description, CpuPool pool)
      : options_(std::move(options)),
        shape_(std::move(shape)),
        files_(std::move(files)),
        weights_(std::move(weights)),
        description_(std::move(description)),
        pool_(std::move(pool)),
        forward_(shape_, weights_, kernels, pool_,
                 options_.cache == CpuCache::f32 ? kernels::Format::f32 : kernels::Format::bf16,
                 description_.layout.block_tokens(), options_.step_rows_max),
        sampler_(shape_.vocab, kernels),
        sequences_(options_.sequences_max) {}

  const Description& describe() const override { return description_; }
  Result<SequenceId> admit(SequenceSpec spec) override;
  StepResult step(const StepPlan& plan, Instant now) override;
  void truncate_cached(SequenceId sequence, std::uint32_t blocks) override;
  void export_page(SequenceId sequence, std::uint32_t first, std::uint32_t count,
                   MutableByteView page) override;
  void export_tail(SequenceId sequence, MutableByteView page) override;
  bool cancel(SequenceId sequence) override;
  void release(SequenceId sequence) override;
  std::uint32_t pool_blocks_used() const override { return pool_.blocks_used(); }

 private:
  [[nodiscard]] std::uint32_t blocks_for(std::uint32_t tokens) const {
    const std::uint32_t per_block = description_.layout.block_tokens();
    return (tokens + per_block - 1) / per_block;
  }
  Sequence& sequence(SequenceId id) {
    DI_ASSERT(id < sequences_.size() && sequences_[id].admitted);
    return sequences_[id];
  }

  void pass(std::vector<Active>& actives, const std::vector<std::size_t>& members,
            const std::vector<std::uint32_t>& counts, const StepPlan& plan, StepResult& result);
  // Swaps a layer group in for those members that need it; true for those that may go on.
  std::vector<bool> swap_in(std::uint32_t group, std::vector<Active>& actives,
                            const std::vector<std::size_t>& members, Duration swap_wait, StepResult& result);
  bool swap_in_one(std::uint32_t group, Active& active, RowResult& row);
  void copy_in(Sequence& s, std::uint32_t group);
  void choose(Sequence& s, std::span<const float> logits, RowResult& row);

  [[nodiscard]] std::uint64_t now_us() const { return static_cast<std::uint64_t>(steady_.now().ns / 1000); }
  void note(RowResult& row, wire::SpanKind kind, std::uint32_t group, std::uint64_t start_us) const {
    if (row.spans.size() >= spans_per_row_max) return;
    row.spans.push_back(
        {static_cast<std::uint8_t>(kind), static_cast<std::uint16_t>(group), start_us, now_us() - start_us});
  }

  const CpuOptions options_;
  const model::Shape shape_;
  const model::Weights files_;
  const CpuWeights weights_;
  const Description description_;
  CpuPool pool_;
  CpuForward forward_;
  Sampler sampler_;
  MonotonicClock steady_;
  std::vector<Sequence> sequences_;
};

Result<SequenceId> CpuEngine::admit(SequenceSpec spec) {
  const auto invalid = [](std::string what) { return Error{Code::invalid, 0, std::move(what)}; };
  if (spec.tokens.empty()) return invalid("no tokens");
  if (spec.known_tokens_max < spec.tokens.size())
    return invalid("known_tokens_max is less than the tokens given");
  if (spec.tokens.size() > description_.context_tokens_max ||
      spec.known_tokens_max > description_.context_tokens_max) {
    return invalid("longer than the context of " + std::to_string(description_.context_tokens_max) +
                   " tokens");
  }
  for (const std::uint32_t token : spec.tokens) {
    if (token >= shape_.vocab)
      return invalid("token id " + std::to_string(token) + " is not in the vocabulary");
  }
  if (spec.cached_tokens >= spec.tokens.size()) return invalid("nothing is left to compute");
  const std::uint32_t cached_blocks = blocks_for(spec.cached_tokens);
  DI_ASSERT(cached_blocks == 0 || (spec.source != nullptr && spec.source->blocks() >= cached_blocks));

  const auto free = std::ranges::find_if(sequences_, [](const Sequence& s) { return !s.admitted; });
  if (free == sequences_.end()) return Error{Code::busy, 0, "all sequences are taken"};
  auto blocks = pool_.take(blocks_for(spec.known_tokens_max));
  if (!blocks) return blocks.error();

  Sequence& s = *free;
  s = Sequence{};
  s.admitted = true;
  s.tokens = std::move(spec.tokens);
  s.sampling = std::move(spec.sampling);
  s.next_index = spec.first_index;
  s.computed = spec.cached_tokens;
  s.blocks = *std::move(blocks);
  if (cached_blocks > 0) s.source = std::move(spec.source);
  s.cached_blocks = cached_blocks;
  s.cached_full = spec.cached_tokens / description_.layout.block_tokens();
  return static_cast<SequenceId>(free - sequences_.begin());
}

StepResult CpuEngine::step(const StepPlan& plan, Instant now) {
  StepResult result;
  result.rows.resize(plan.rows.size());
  std::vector<Active> actives;
  for (std::size_t i = 0; i < plan.rows.size(); ++i) {
    const StepRow& row = plan.rows[i];
    const Sequence& s = sequence(row.sequence);
    DI_ASSERT(!s.finished && row.tokens > 0);
    DI_ASSERT(s.computed + std::uint64_t{row.tokens} <= s.tokens.size());
    DI_ASSERT(s.computed + row.tokens <= s.blocks.size() * description_.layout.block_tokens());
    result.rows[i].sequence = row.sequence;
    actives.push_back({i, row.sequence, s.computed, row.tokens, s.source != nullptr, false});
  }

  // Passes of at most step_rows_max rows.  A sequence is once in a pass, so its chunk may take several.
  for (;;) {
    std::vector<std::size_t> members;
    std::vector<std::uint32_t> counts;
    std::uint32_t room = options_.step_rows_max;
    for (std::size_t i = 0; i < actives.size() && room > 0; ++i) {
      if (actives[i].out || actives[i].left == 0) continue;
      members.push_back(i);
      counts.push_back(std::min(room, actives[i].left));
      room -= counts.back();
    }
    if (members.empty()) break;
    pass(actives, members, counts, plan, result);
  }

  for (const Active& active : actives) {
    const Sequence& s = sequences_[active.sequence];
    RowResult& row = result.rows[active.row];
    row.computed_tokens = s.source == nullptr ? s.computed : 0;
    row.swapped_blocks = s.source == nullptr ? s.cached_full : 0;
  }
  result.ready_at = now + options_.step_delay;
  return result;
}

void CpuEngine::pass(std::vector<Active>& actives, const std::vector<std::size_t>& members,
                     const std::vector<std::uint32_t>& counts, const StepPlan& plan, StepResult& result) {
  std::vector<ForwardPart> parts;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Active& active = actives[members[i]];
    const Sequence& s = sequences_[active.sequence];
    parts.push_back({std::span(s.tokens).subspan(active.first, counts[i]), active.first, s.blocks});
  }
  const std::uint64_t start_us = now_us();
  forward_.begin(std::move(parts));

  std::vector<std::size_t> left = members;
  const kv::Layout& layout = description_.layout;
  std::uint32_t layer = 0;
  for (std::uint32_t group = 0; group < layout.groups() && !left.empty(); ++group) {
    const std::vector<bool> ready = swap_in(group, actives, left, plan.swap_wait, result);
    if (!std::ranges::all_of(ready, [](bool is) { return is; })) {
      forward_.keep(ready);
      std::erase_if(left, [&](std::size_t member) { return actives[member].out; });
    }
    const std::uint64_t group_start_us = now_us();
    const std::uint32_t last = layout.group_last_layer(group) + 1;
    forward_.layers(layer, last);
    layer = last;
    for (const std::size_t member : left) {
      if (actives[member].swapping)
        note(result.rows[actives[member].row], wire::SpanKind::compute, group, group_start_us);
    }
  }

  // `left` and the parts of the pass are the same rows in the same order.
  std::vector<CpuForward::Row> wanted;
  for (std::size_t i = 0; i < left.size(); ++i) {
    Active& active = actives[left[i]];
    Sequence& s = sequences_[active.sequence];
    const auto count = static_cast<std::uint32_t>(forward_.parts()[i].tokens.size());
    if (options_.test_logits) {
      for (std::uint32_t row = 0; row + 1 < count; ++row) wanted.push_back({i, row});
    }
    if (options_.test_logits || active.first + count == s.tokens.size()) wanted.push_back({i, count - 1});
  }
  // Choosing appends to a sequence's tokens, which the parts still show: positions are counted first.
  std::vector<std::pair<std::uint32_t, bool>> ends;
  for (std::size_t i = 0; i < left.size(); ++i) {
    Active& active = actives[left[i]];
    Sequence& s = sequences_[active.sequence];
    const auto count = static_cast<std::uint32_t>(forward_.parts()[i].tokens.size());
    active.first += count;
    active.left -= count;
    s.computed = active.first;
    s.stepped = true;
    ends.emplace_back(count, s.computed == s.tokens.size());
  }
  forward_.logits(wanted, [&](const CpuForward::Row& at, std::span<const float> logits) {
    const Active& active = actives[left[at.part]];
    const auto [count, complete] = ends[at.part];
    if (options_.test_logits) {
      options_.test_logits(active.sequence, active.first - count + static_cast<std::uint32_t>(at.row),
                           logits);
    }
    if (complete && at.row + 1 == count) choose(sequences_[active.sequence], logits, result.rows[active.row]);
  });
  for (const std::size_t member : left) {
    const Active& active = actives[member];
    if (!active.swapping) note(result.rows[active.row], wire::SpanKind::compute, 0, start_us);
  }
}

std::vector<bool> CpuEngine::swap_in(std::uint32_t group, std::vector<Active>& actives,
                                     const std::vector<std::size_t>& members, Duration swap_wait,
                                     StepResult& result) {
  std::vector<bool> ready(members.size(), true);
  bool waiting = false;
  for (std::size_t i = 0; i < members.size(); ++i) {
    Active& active = actives[members[i]];
    ready[i] = swap_in_one(group, active, result.rows[active.row]);
    waiting = waiting || (!ready[i] && !active.out);
  }
  if (!waiting) return ready;

  // One limit for all, so that several late requests cost the others no more than one.
  const Instant limit = steady_.now() + swap_wait;
  for (std::size_t i = 0; i < members.size(); ++i) {
    Active& active = actives[members[i]];
    if (ready[i] || active.out) continue;
    RowResult& row = result.rows[active.row];
    const std::uint64_t start_us = now_us();
    const Sequence& s = sequences_[active.sequence];
    const Duration rest = limit - steady_.now();
    if (rest.count() > 0) s.source->wait(group, rest);
    note(row, wire::SpanKind::wait, group, start_us);
    ready[i] = swap_in_one(group, active, row);
    if (!ready[i] && !active.out) {
      active.out = true;
      row.state = RowState::late;
      row.late_group = group;
    }
  }
  return ready;
}

bool CpuEngine::swap_in_one(std::uint32_t group, Active& active, RowResult& row) {
  Sequence& s = sequences_[active.sequence];
  if (s.source == nullptr || s.groups_swapped > group) return true;
  const KvSource::Readiness readiness = s.source->readiness();
  // First, because from the failure on `groups` speaks of the blocks before the failed one alone.
  if (readiness.failed_block < s.cached_blocks) {
    active.out = true;
    row.state = RowState::kv_failed;
    row.failed_block = readiness.failed_block;
    return false;
  }
  if (readiness.groups <= group) return false;
  const std::uint64_t start_us = now_us();
  copy_in(s, group);
  note(row, wire::SpanKind::swap_in, group, start_us);
  if (++s.groups_swapped == description_.layout.groups()) s.source.reset();
  return true;
}

void CpuEngine::copy_in(Sequence& s, std::uint32_t group) {
  const kv::Layout& layout = description_.layout;
  std::uint32_t block = 0;
  for (const SegmentRun& run : s.source->segments(group)) {
    DI_ASSERT(run.segment.size() >= layout.segment_bytes(group, run.page_blocks));
    DI_ASSERT(run.first + std::uint64_t{run.count} <= run.page_blocks);
    for (std::uint32_t i = 0; i < run.count && block < s.cached_blocks; ++i, ++block) {
      for (std::uint32_t plane = layout.group_first_plane(group); plane < layout.group_last_plane(group);
           ++plane) {
        const std::uint64_t bytes = layout.plane_block_bytes(plane);
        const std::uint64_t offset = layout.plane_offset(plane, run.page_blocks) + (run.first + i) * bytes;
        std::memcpy(pool_.at(plane, s.blocks[block]), run.segment.data() + offset, bytes);
      }
    }
  }
  DI_ASSERT(block == s.cached_blocks);
}

void CpuEngine::choose(Sequence& s, std::span<const float> logits, RowResult& row) {
  const std::uint32_t id = sampler_.choose(logits, s.sampling, s.next_index, s.tokens.size());
  s.tokens.push_back(id);
  row.has_token = true;
  row.token.id = id;
  row.index = s.next_index++;
  if (std::ranges::find(s.sampling.stop_ids, id) != s.sampling.stop_ids.end()) {
    row.finish = Finish::stop;
  } else if (s.next_index >= s.sampling.max_tokens || s.tokens.size() >= description_.context_tokens_max) {
    row.finish = Finish::length;
  }
  s.finished = row.finish != Finish::none;
}

void CpuEngine::truncate_cached(SequenceId id, std::uint32_t blocks) {
  Sequence& s = sequence(id);
  DI_ASSERT(!s.stepped && blocks <= s.cached_blocks);
  const std::uint64_t tokens = std::uint64_t{blocks} * description_.layout.block_tokens();
  s.computed = static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, s.computed));
  s.cached_blocks = blocks;
  s.cached_full = std::min(s.cached_full, blocks);
  if (blocks == 0) s.source.reset();
}

void CpuEngine::export_page(SequenceId id, std::uint32_t first, std::uint32_t count, MutableByteView page) {
  const Sequence& s = sequence(id);
  const kv::Layout& layout = description_.layout;
  DI_ASSERT(count > 0 && s.source == nullptr);
  DI_ASSERT((std::uint64_t{first} + count) * layout.block_tokens() <= s.computed);
  DI_ASSERT(page.size() == layout.page_bytes(count));
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    const MutableByteView segment =
        page.subspan(layout.segment_offset(group, count), layout.segment_bytes(group, count));
    std::uint64_t end = 0;
    for (std::uint32_t plane = layout.group_first_plane(group); plane < layout.group_last_plane(group);
         ++plane) {
      const std::uint64_t bytes = layout.plane_block_bytes(plane);
      end = layout.plane_offset(plane, count);
      for (std::uint32_t i = 0; i < count; ++i, end += bytes) {
        std::memcpy(segment.data() + end, pool_.at(plane, s.blocks[first + i]), bytes);
      }
    }
    std::memset(segment.data() + end, 0, segment.size() - end);
  }
}

void CpuEngine::export_tail(SequenceId id, MutableByteView page) {
  const Sequence& s = sequence(id);
  const kv::Layout& layout = description_.layout;
  const std::uint32_t block = s.computed / layout.block_tokens();
  const std::uint32_t tokens = s.computed % layout.block_tokens();
  DI_ASSERT(tokens > 0 && s.source == nullptr);
  DI_ASSERT(page.size() == layout.page_bytes(1));
  std::memset(page.data(), 0, page.size());
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    for (std::uint32_t plane = layout.group_first_plane(group); plane < layout.group_last_plane(group);
         ++plane) {
      const std::uint64_t bytes = layout.plane_block_bytes(plane) / layout.block_tokens() * tokens;
      std::memcpy(page.data() + layout.segment_offset(group, 1) + layout.plane_offset(plane, 1),
                  pool_.at(plane, s.blocks[block]), bytes);
    }
  }
}

bool CpuEngine::cancel(SequenceId id) {
  sequence(id).finished = true;
  return true;
}

void CpuEngine::release(SequenceId id) {
  Sequence& s = sequence(id);
  pool_.give_back(s.blocks);
  s = Sequence{};
}

const kernels::Kernels* kernels_of(CpuPath path) {
  switch (path) {
    case CpuPath::best:
      return &kernels::kernels_best();
    case CpuPath::scalar:
      return kernels::kernels_for(kernels::Path::scalar);
    case CpuPath::avx2:
      return kernels::kernels_for(kernels::Path::avx2);
    case CpuPath::avx512:
      return kernels::kernels_for(kernels::Path::avx512);
  }
  return nullptr;
}

std::string folder_name(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

Result<std::unique_ptr<Engine>> cpu_engine_create(CpuOptions options) {
  if (options.sequences_max == 0 || options.sequences_max > sequences_limit) {
    return Error{Code::invalid, 0, "sequences_max must be 1 to " + std::to_string(sequences_limit)};
  }
  if (options.step_rows_max == 0 || options.step_rows_max > step_rows_limit) {
    return Error{Code::invalid, 0, "step_rows_max must be 1 to " + std::to_string(step_rows_limit)};
  }
  const kernels::Kernels* kernels = kernels_of(options.path);
  if (kernels == nullptr)
    return Error{Code::unsupported, 0, "this processor lacks the vector path asked for"};

  Result<model::Shape> shape = model::shape_load(options.folder);
  if (!shape) return shape.error();
  Result<model::Weights> files = model::Weights::open(options.folder);
  if (!files) return files.error();
  Result<CpuWeights> weights = CpuWeights::bind(*files, *shape);
  if (!weights) return weights.error();

  const bool f32 = options.cache == CpuCache::f32;
  const std::uint32_t entry_bytes = shape->cache_width() * (f32 ? 4 : 2);
  if (options.block_tokens == 0)
    options.block_tokens = std::uint64_t{entry_bytes} * shape->layers < 4096 ? 32 : 64;
  auto layout =
      kv::layout_mla(f32 ? "mla-f32-1" : "mla-bf16-1", options.block_tokens, shape->layers, entry_bytes);
  if (!layout) return layout.error().in(options.folder);
  if (options.pool_bytes > 0) {
    const std::uint64_t blocks = options.pool_bytes / layout->block_bytes();
    options.pool_blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(blocks, 1u << 30));
  }
  Result<CpuPool> pool = CpuPool::create(*layout, options.pool_blocks);
  if (!pool) return pool.error();

  // A sequence that the whole pool could not hold would wait for ever: the pool bounds the context too.
  std::uint64_t context_tokens_max = std::uint64_t{options.pool_blocks} * layout->block_tokens();
  context_tokens_max = std::min<std::uint64_t>(context_tokens_max, shape->positions_max);
  if (options.context_tokens_max > 0) {
    context_tokens_max = std::min<std::uint64_t>(context_tokens_max, options.context_tokens_max);
  }
  Description description{
      .model = options.model.empty() ? folder_name(options.folder) : options.model,
      .layout = *std::move(layout),
      .revision = options.revision ? *options.revision : Key{files->revision()},
      .context_tokens_max = static_cast<std::uint32_t>(context_tokens_max),
      .vocab = shape->vocab,
      .pool_blocks = options.pool_blocks,
      .sequences_max = options.sequences_max,
      .wants_debug_text = false,
  };
  return std::unique_ptr<Engine>(std::make_unique<CpuEngine>(std::move(options), *std::move(shape),
                                                             *std::move(files), *std::move(weights), *kernels,
                                                             std::move(description), *std::move(pool)));
}

}  // namespace di::engine
