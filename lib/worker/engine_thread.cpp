#include "worker/engine_thread.h"

#include <pthread.h>

#include <string>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/log.h"

namespace di::worker {

ArenaSource::ArenaSource(std::shared_ptr<kv::ArenaClient> arena, kv::Layout layout, std::vector<wire::SlotRef> slots,
                         std::uint32_t entry, bool sealed)
    : arena_(std::move(arena)), layout_(std::move(layout)), slots_(std::move(slots)), entry_(entry), sealed_(sealed) {
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
  for (const wire::SlotRef& slot : slots_) {
    const auto segment = arena_->segment(layout_, slot, group);
    // Ready and pinned, and yet not readable: the host daemon broke its word.
    if (!segment) DI_PANIC("arena: " + segment.error().message);
    runs.push_back({*segment, slot.page_blocks, slot.first, slot.count});
  }
  return runs;
}

EngineThread::EngineThread(loop::Loop& loop, std::unique_ptr<engine::Engine> engine, std::string_view name,
                           std::function<void(rank::BatchDone&&)> done)
    : loop_(loop), engine_(std::move(engine)), reader_(loop, out_, name, std::move(done)) {
  thread_ = std::thread([this, thread_name = std::string(name)] {
    pthread_setname_np(pthread_self(), thread_name.substr(0, 15).c_str());
    run();
  });
}

EngineThread::~EngineThread() {
  in_.close();
  thread_.join();
}

void EngineThread::submit(Work work) {
  DI_ASSERT(in_.try_push(std::move(work)));
}

void EngineThread::run() {
  while (std::optional<Work> work = in_.pop_wait()) {
    rank::BatchDone done = carry_out(*work);
    work.reset();
    DI_ASSERT(out_.try_push(std::move(done)));
  }
}

rank::BatchDone EngineThread::carry_out(Work& work) {
  rank::Batch& batch = work.batch;
  const kv::Layout& layout = engine_->describe().layout;
  rank::BatchDone done;
  for (const engine::SequenceId sequence : batch.releases) engine_->release(sequence);
  for (const auto& [handle, sequence] : batch.cancels) done.cancelled.emplace_back(handle, engine_->cancel(sequence));
  for (const auto& [sequence, blocks] : batch.truncations) engine_->truncate_cached(sequence, blocks);
  for (rank::AdmitCommand& admit : batch.admissions) {
    if (admit.spec.cached_tokens > 0) {
      const bool sealed = admit.spec.leg == wire::Leg::decode;
      admit.spec.source =
          std::make_shared<ArenaSource>(work.arena, layout, std::move(admit.slots), admit.entry, sealed);
    }
    done.admitted.push_back({admit.handle, engine_->admit(std::move(admit.spec))});
  }
  for (const rank::ExportCommand& page : batch.exports) {
    rank::Exported exported{page.handle, page.first, page.tail, Error{Code::unreachable, 0, "the arena is away"}};
    if (work.arena != nullptr) {
      auto bytes = work.arena->page_to_write(layout, page.slot);
      if (!bytes) {
        exported.crcs = bytes.error();
      } else {
        if (page.tail) {
          engine_->export_tail(page.sequence, *bytes);
        } else {
          engine_->export_page(page.sequence, page.first, page.count, *bytes);
        }
        std::vector<std::uint32_t> crcs;
        for (std::uint32_t group = 0; group < layout.groups(); ++group) {
          crcs.push_back(crc32c(ByteView(*bytes).subspan(layout.segment_offset(group, page.count),
                                                         layout.segment_bytes(group, page.count))));
        }
        exported.crcs = std::move(crcs);
      }
    }
    done.exported.push_back(std::move(exported));
  }
  const MonotonicClock monotonic;
  const Instant start = monotonic.now();
  if (batch.plan.rows.empty()) {
    done.step.ready_at = loop_.now();
  } else {
    done.step = engine_->step(batch.plan, loop_.now());
  }
  done.step_took = monotonic.now() - start;
  return done;
}

}  // namespace di::worker
