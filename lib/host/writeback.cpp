#include "host/writeback.h"

#include <algorithm>

namespace di::host {

Writeback::Writeback(const Limits& limits, Pages& pages, DataPort& data, const Fetches::Peers& peers,
                     Numbers& numbers, Outbox& out)
    : limits_(limits), pages_(pages), data_(data), peers_(peers), numbers_(numbers), out_(out) {}

void Writeback::sealed(std::uint32_t slot, std::uint8_t reuse) {
  const Page& page = pages_.at(slot);
  if (page.stored) return;
  if (limits_.admit == Admit::second_sighting && reuse == 0) {
    const Key& last = page.keys.back();
    if (!seen_.contains(last)) {
      seen_.insert(last);
      seen_order_.push_back(last);
      if (seen_order_.size() > limits_.sightings_max) {
        seen_.erase(seen_order_.front());
        seen_order_.pop_front();
      }
      return;
    }
  }
  queue(slot);
}

void Writeback::sighted(std::uint32_t slot) {
  if (limits_.admit == Admit::second_sighting && !pages_.at(slot).stored) queue(slot);
}

void Writeback::queue(std::uint32_t slot) {
  pages_.mark_stored(slot);
  ++counters_.queued;
  queue_.push_back({slot, pages_.at(slot).place.generation, 0, {}});
  if (queue_.size() > limits_.queue_pages) {
    queue_.pop_front();
    ++counters_.dropped_full;
  }
}

wire::PutPage Writeback::describe(std::uint32_t slot) const {
  const Page& page = pages_.at(slot);
  return {page.parent, page.keys, page.crcs, pages_.layout().page_bytes(page.blocks)};
}

void Writeback::pump(const Now& now) {
  if (!peers_.meta_up()) return;
  auto next = queue_.begin();
  while (next != queue_.end() && jobs_.size() < limits_.jobs_max) {
    if (pages_.find(next->slot, next->generation) == nullptr) {
      ++counters_.dropped_evicted;
      next = queue_.erase(next);
      continue;
    }
    if (next->due > now.liveness) {
      ++next;
      continue;
    }
    Job job;
    wire::meta_put_open open;
    open.fingerprint = pages_.layout().fingerprint();
    // Pages that follow each other in the queue and in the chain share a stripe.
    while (next != queue_.end() && open.pages.size() < stripe_pages_ && next->due <= now.liveness &&
           pages_.find(next->slot, next->generation) != nullptr &&
           (open.pages.empty() || pages_.at(next->slot).parent == open.pages.back().keys.back())) {
      open.pages.push_back(describe(next->slot));
      pages_.pin(job.pins, next->slot);
      job.attempts = std::max(job.attempts, next->attempts);
      next = queue_.erase(next);
    }
    job.deadline = now.liveness + limits_.answer_wait;
    const std::uint64_t tag = numbers_.tag++;
    jobs_.emplace(tag, std::move(job));
    to_meta(tag, open);
  }
}

void Writeback::put_opened(std::uint64_t tag, const wire::meta_put_opened& answer, const Now& now) {
  const auto found = jobs_.find(tag);
  if (found == jobs_.end() || found->second.state != JobState::opening) {
    // Given up meanwhile: the stripe would stay open until it lapses.
    if (answer.code == 0 && !stripes_.contains(answer.stripe))
      to_meta(tag, wire::meta_put_abort{answer.stripe});
    return;
  }
  Job& job = found->second;
  const Code code = static_cast<Code>(answer.code);
  if (code == Code::exists) {
    counters_.existed += job.pins.slots.size();
    for (const std::uint32_t slot : job.pins.slots) pages_.written(slot);
    return finish(tag);
  }
  if (code == Code::busy || code == Code::no_space) return retry(tag, now);
  if (code != Code::ok) return drop(tag);
  if (answer.data_columns > 0) stripe_pages_ = answer.data_columns;
  const std::size_t count = job.pins.slots.size();
  bool usable = answer.parity_columns == 0 && answer.columns.size() >= count &&
                answer.data_columns >= count && !stripes_.contains(answer.stripe);
  std::vector<std::pair<Peer, wire::Column>> columns;
  bool stores_up = true;
  for (std::size_t i = 0; i < count && usable; ++i) {
    const auto column = std::find_if(answer.columns.begin(), answer.columns.end(),
                                     [&](const wire::Column& c) { return c.column == i; });
    if (column == answer.columns.end()) {
      usable = false;
    } else if (const std::optional<Peer> store = peers_.store_up(column->instance)) {
      columns.emplace_back(*store, *column);
    } else {
      stores_up = false;
    }
  }
  if (!usable || !stores_up) {
    to_meta(tag, wire::meta_put_abort{answer.stripe});
    usable ? retry(tag, now) : drop(tag);
    return;
  }
  job.state = JobState::putting;
  job.stripe = answer.stripe;
  job.deadline = now.liveness + std::max<Duration>(milliseconds(answer.ttl_ms), limits_.answer_wait);
  stripes_.emplace(answer.stripe, tag);
  wire::kv_put put;
  put.stripe = answer.stripe;
  put.fingerprint = pages_.layout().fingerprint();
  put.code.data_columns = static_cast<std::uint16_t>(count);
  for (const std::uint32_t slot : job.pins.slots) put.pages.push_back(describe(slot));
  for (std::size_t i = 0; i < count; ++i) {
    const auto& [store, column] = columns[i];
    const std::uint32_t slot = job.pins.slots[i];
    put.volume = column.volume;
    put.column = column.column;
    put.slot = pages_.ref({slot, 0, pages_.at(slot).blocks, 0});
    put.transfer = 0;
    if (peers_.remote(store)) {
      put.transfer = numbers_.transfer++;
      if (!data_.expose(store, put.transfer, transfer::Access::read, {{put.slot.slot, put.slot.generation}})) {
        to_meta(tag, wire::meta_put_abort{answer.stripe});
        return retry(tag, now);
      }
    }
    job.columns.emplace(column.column, Job::Column{store, put.transfer});
    out_.push_back(wire::Envelope::make(store.instance, store.generation, {}, put));
  }
}

void Writeback::put_done(const Peer& store, const wire::kv_put_done& done, const Now& now) {
  const auto named = stripes_.find(done.stripe);
  if (named == stripes_.end()) return;
  const std::uint64_t tag = named->second;
  Job& job = jobs_.at(tag);
  const auto column = job.columns.find(done.column);
  if (job.state != JobState::putting || column == job.columns.end() || column->second.store != store)
    return;
  if (done.code != 0) {
    const Code code = static_cast<Code>(done.code);
    if (code == Code::no_space) {
      // A commit that names the column: di-meta makes room on that store.  Its answer finds no job.
      to_meta(tag, wire::meta_put_commit{job.stripe, {done.column}});
    } else {
      to_meta(tag, wire::meta_put_abort{job.stripe});
    }
    code == Code::corrupt || code == Code::stale ? drop(tag) : retry(tag, now);
    return;
  }
  conceal(column->second);
  job.columns.erase(column);
  if (!job.columns.empty()) return;
  job.state = JobState::committing;
  job.deadline = now.liveness + limits_.answer_wait;
  to_meta(tag, wire::meta_put_commit{job.stripe, {}});
}

void Writeback::put_committed(std::uint64_t tag, const wire::meta_put_committed& answer, const Now& now) {
  const auto found = jobs_.find(tag);
  if (found == jobs_.end() || found->second.state != JobState::committing ||
      found->second.stripe != answer.stripe) {
    return;
  }
  const Code code = static_cast<Code>(answer.code);
  if (code == Code::ok || code == Code::exists) {
    for (const std::uint32_t slot : found->second.pins.slots) pages_.written(slot);
  }
  if (code == Code::ok) {
    for (const std::uint32_t slot : found->second.pins.slots) {
      ++counters_.written;
      counters_.written_bytes += pages_.layout().page_bytes(pages_.at(slot).blocks);
    }
    finish(tag);
  } else if (code == Code::exists) {
    counters_.existed += found->second.pins.slots.size();
    finish(tag);
  } else {
    retry(tag, now);
  }
}

void Writeback::finish(std::uint64_t tag) {
  const auto found = jobs_.find(tag);
  DI_ASSERT(found != jobs_.end());
  Job job = std::move(found->second);
  jobs_.erase(found);
  if (job.state != JobState::opening) stripes_.erase(job.stripe);
  for (const auto& [number, column] : job.columns) conceal(column);
  pages_.unpin(job.pins);
}

void Writeback::conceal(const Job::Column& column) {
  if (column.transfer != 0) data_.conceal(column.store, column.transfer);
}

void Writeback::drop(std::uint64_t tag) {
  counters_.dropped_failed += jobs_.at(tag).pins.slots.size();
  finish(tag);
}

void Writeback::retry(std::uint64_t tag, const Now& now) {
  const Job& job = jobs_.at(tag);
  const std::uint32_t attempts = job.attempts + 1;
  if (attempts >= limits_.attempts_max) {
    drop(tag);
    return;
  }
  Duration wait = limits_.backoff_min;
  for (std::uint32_t i = 1; i < attempts && wait < limits_.backoff_max; ++i) wait *= 2;
  const Instant due = now.liveness + std::min(wait, limits_.backoff_max);
  // In front: they are the oldest.
  for (auto slot = job.pins.slots.rbegin(); slot != job.pins.slots.rend(); ++slot) {
    ++counters_.retried;
    queue_.push_front({*slot, pages_.at(*slot).place.generation, attempts, due});
  }
  while (queue_.size() > limits_.queue_pages) {
    queue_.pop_front();
    ++counters_.dropped_full;
  }
  finish(tag);
}

void Writeback::meta_lost(const Now& now) {
  std::vector<std::uint64_t> all;
  for (const auto& [tag, job] : jobs_) all.push_back(tag);
  for (const std::uint64_t tag : all) {
    jobs_.at(tag).attempts = 0;  // it was not the page's fault
    retry(tag, now);
  }
}

void Writeback::store_lost(const Peer& store, const Now& now) {
  std::vector<std::uint64_t> mine;
  for (const auto& [tag, job] : jobs_) {
    for (const auto& [number, column] : job.columns) {
      if (column.store == store) {
        mine.push_back(tag);
        break;
      }
    }
  }
  for (const std::uint64_t tag : mine) {
    to_meta(tag, wire::meta_put_abort{jobs_.at(tag).stripe});
    retry(tag, now);
  }
}

void Writeback::on_time(const Now& now) {
  std::vector<std::uint64_t> due;
  for (const auto& [tag, job] : jobs_) {
    if (job.deadline <= now.liveness) due.push_back(tag);
  }
  for (const std::uint64_t tag : due) {
    const Job& job = jobs_.at(tag);
    if (job.state == JobState::putting) to_meta(tag, wire::meta_put_abort{job.stripe});
    retry(tag, now);
  }
}

Due Writeback::next_due() const {
  Due due;
  for (const auto& [tag, job] : jobs_) due.sooner_liveness(job.deadline);
  // What waits for a free job or for di-meta is started by the event that ends the wait.
  if (peers_.meta_up() && jobs_.size() < limits_.jobs_max) {
    for (const Waiting& waiting : queue_) due.sooner_liveness(waiting.due);
  }
  return due;
}

std::size_t Writeback::pending() const {
  std::size_t count = 0;
  for (const Waiting& waiting : queue_) {
    if (pages_.find(waiting.slot, waiting.generation) != nullptr) ++count;
  }
  for (const auto& [tag, job] : jobs_) count += job.pins.slots.size();
  return count;
}

Status Writeback::check(std::map<std::uint32_t, std::uint32_t>& pins) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  if (queue_.size() > limits_.queue_pages) return broken("the write-back queue is longer than its bound");
  if (jobs_.size() > limits_.jobs_max) return broken("more write-backs than there may be");
  std::size_t named = 0;
  for (const auto& [tag, job] : jobs_) {
    if (job.pins.slots.empty()) return broken("a write-back of nothing");
    for (const std::uint32_t slot : job.pins.slots) {
      ++pins[slot];
      if (!pages_.all().contains(slot) || pages_.at(slot).state != PageState::sealed) {
        return broken("a page is written back that is not sealed");
      }
    }
    if (job.state == JobState::opening) continue;
    ++named;
    const auto back = stripes_.find(job.stripe);
    if (back == stripes_.end() || back->second != tag) return broken("a write-back has lost its stripe");
    if (job.columns.empty() != (job.state == JobState::committing))
      return broken("columns of a write-back are wrong");
  }
  if (named != stripes_.size()) return broken("a stripe has no write-back");
  return {};
}

}  // namespace di::host
