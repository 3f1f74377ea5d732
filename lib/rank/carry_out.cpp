#include "rank/carry_out.h"

#include "base/checksum.h"

namespace di::rank {

ArenaSource::ArenaSource(std::shared_ptr<kv::ArenaClient> arena, kv::Layout layout,
                         std::vector<wire::SlotRef> slots, std::uint32_t entry, bool sealed)
    : arena_(std::move(arena)),
      layout_(std::move(layout)),
      slots_(std::move(slots)),
      entry_(entry),
      sealed_(sealed) {
  for (const wire::SlotRef& slot : slots_) blocks_ += slot.count;
}

engine::KvSource::Readiness ArenaSource::readiness() const {
  // Sealed pages stay readable in this mapping even when their owner is gone: nobody writes them.
  if (sealed_) return {layout_.groups(), wire::block_none};
  const kv::Readiness now = arena_->readiness(entry_);
  return {now.groups, now.failed_block};
}

void ArenaSource::wait(std::uint32_t group, Duration at_most) {
  if (!sealed_) arena_->wait(entry_, group, at_most);
}

std::vector<engine::SegmentRun> ArenaSource::segments(std::uint32_t group) const {
  std::vector<engine::SegmentRun> runs;
  runs.reserve(slots_.size());
  std::uint32_t block = 0;
  for (const wire::SlotRef& slot : slots_) {
    const auto segment = arena_->segment(layout_, slot, group);
    if (!segment) {
      // Behind a block that failed nothing needs to be there, and the engine has cut its prefix.
      if (block >= readiness().failed_block) break;
      // Ready and pinned, and yet not readable: the host daemon broke its word.
      DI_PANIC("arena: " + segment.error().message);
    }
    runs.push_back({*segment, slot.page_blocks, slot.first, slot.count});
    block += slot.count;
  }
  return runs;
}

namespace {

Exported export_to(const ExportCommand& page, const std::shared_ptr<kv::ArenaClient>& arena,
                   engine::Engine& engine) {
  Exported exported{page.handle, page.first, page.tail, Error{Code::unreachable, 0, "the arena is away"}};
  if (arena == nullptr) return exported;
  const kv::Layout& layout = engine.describe().layout;
  auto bytes = arena->page_to_write(layout, page.slot);
  if (!bytes) {
    exported.crcs = bytes.error();
    return exported;
  }
  if (page.tail) {
    engine.export_tail(page.sequence, *bytes);
  } else {
    engine.export_page(page.sequence, page.first, page.count, *bytes);
  }
  std::vector<std::uint32_t> crcs;
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    crcs.push_back(crc32c(ByteView(*bytes).subspan(layout.segment_offset(group, page.count),
                                                   layout.segment_bytes(group, page.count))));
  }
  exported.crcs = std::move(crcs);
  return exported;
}

}  // namespace

BatchDone carry_out(Batch batch, const std::shared_ptr<kv::ArenaClient>& arena, engine::Engine& engine,
                    const Clock& clock) {
  BatchDone done;
  for (const engine::SequenceId sequence : batch.releases) engine.release(sequence);
  for (const auto& [handle, sequence] : batch.cancels)
    done.cancelled.emplace_back(handle, engine.cancel(sequence));
  for (const auto& [sequence, blocks] : batch.truncations) engine.truncate_cached(sequence, blocks);
  for (AdmitCommand& admit : batch.admissions) {
    if (admit.spec.cached_tokens > 0) {
      const bool sealed = admit.spec.leg == wire::Leg::decode;
      admit.spec.source = std::make_shared<ArenaSource>(arena, engine.describe().layout,
                                                        std::move(admit.slots), admit.entry, sealed);
    }
    done.admitted.push_back({admit.handle, engine.admit(std::move(admit.spec))});
  }
  for (const ExportCommand& page : batch.exports) done.exported.push_back(export_to(page, arena, engine));
  const MonotonicClock monotonic;
  const Instant start = monotonic.now();
  if (batch.plan.rows.empty()) {
    done.step.ready_at = clock.now();
  } else {
    done.step = engine.step(batch.plan, clock.now());
  }
  done.step_took = monotonic.now() - start;
  return done;
}

}  // namespace di::rank
