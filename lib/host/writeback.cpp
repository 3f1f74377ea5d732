#include "host/writeback.h"

#include <algorithm>

namespace di::host {

Writeback::Writeback(const Limits& limits, Pages& pages, ArenaPort& port, DataPort& data, const Peers& peers,
                     Numbers& numbers, Outbox& out)
    : limits_(limits),
      pages_(pages),
      port_(port),
      data_(data),
      peers_(peers),
      numbers_(numbers),
      out_(out),
      linger_(limits.linger) {}

// ---- The queue -------------------------------------------------------------------------------------------

void Writeback::sealed(std::uint32_t slot, std::uint8_t reuse, const Now& now) {
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
  queue(slot, now);
}

void Writeback::sighted(std::uint32_t slot, const Now& now) {
  if (limits_.admit == Admit::second_sighting && !pages_.at(slot).stored) queue(slot, now);
}

void Writeback::queue(std::uint32_t slot, const Now& now) {
  pages_.mark_stored(slot);
  ++counters_.queued;
  const Page& page = pages_.at(slot);
  enqueue(next_age_++, {slot, page.place.generation, page.parent, 0, {}, now.product + linger_});
}

void Writeback::enqueue(std::uint64_t age, const Waiting& waiting) {
  by_parent_.emplace(waiting.parent, age);
  queue_.emplace(age, waiting);
  changed_ = true;
  if (queue_.size() <= limits_.queue_pages) return;
  unqueue(queue_.begin());
  ++counters_.dropped_full;
}

void Writeback::unqueue(Queue::iterator found) {
  auto [child, last] = by_parent_.equal_range(found->second.parent);
  while (child != last && child->second != found->first) ++child;
  DI_ASSERT(child != last);
  by_parent_.erase(child);
  queue_.erase(found);
}

wire::PutPage Writeback::describe(std::uint32_t slot) const {
  const Page& page = pages_.at(slot);
  return {page.parent, page.keys, page.crcs, pages_.layout().page_bytes(page.blocks)};
}

std::vector<std::uint64_t> Writeback::run_from(std::uint64_t age, const Now& now) const {
  std::vector<std::uint64_t> run{age};
  const std::uint64_t tenant = pages_.at(queue_.at(age).slot).tenant;
  while (run.size() < stripe_pages_) {
    const Key& last = pages_.at(queue_.at(run.back()).slot).keys.back();
    const auto [first, end] = by_parent_.equal_range(last);
    const auto child = std::find_if(first, end, [&](const auto& item) {
      const Waiting& waiting = queue_.at(item.second);
      return waiting.due <= now.liveness && !evicted(waiting) && pages_.at(waiting.slot).tenant == tenant &&
             std::count(run.begin(), run.end(), item.second) == 0;
    });
    if (child == end) break;
    run.push_back(child->second);
  }
  return run;
}

void Writeback::pump(const Now& now) {
  if (!peers_.meta_up()) return;
  if (!changed_ && looked_.product > now.product && looked_.liveness > now.liveness) return;
  changed_ = false;
  looked_ = Due{};
  std::set<std::uint64_t> followers;  // of pages that wait for more
  std::uint64_t from = 0;
  while (jobs_.size() < limits_.jobs_max) {
    const auto head = queue_.lower_bound(from);
    if (head == queue_.end()) return;
    from = head->first + 1;
    if (evicted(head->second)) {
      ++counters_.dropped_evicted;
      unqueue(head);
      continue;
    }
    if (followers.contains(head->first)) continue;
    if (head->second.due > now.liveness) {
      looked_.sooner_liveness(head->second.due);
      continue;
    }
    const std::vector<std::uint64_t> run = run_from(head->first, now);
    const bool ends = pages_.at(queue_.at(run.back()).slot).blocks < pages_.layout().page_blocks();
    if (run.size() < stripe_pages_ && !ends && linger_ > Duration(0) && head->second.alone > now.product) {
      looked_.sooner_product(head->second.alone);
      followers.insert(run.begin(), run.end());
      continue;
    }
    Job job;
    job.ages = run;
    wire::meta_put_open open;
    open.fingerprint = pages_.layout().fingerprint();
    open.tenant = pages_.at(head->second.slot).tenant;
    for (const std::uint64_t age : run) {
      const auto waiting = queue_.find(age);
      open.pages.push_back(describe(waiting->second.slot));
      pages_.pin(job.pins, waiting->second.slot);
      job.attempts = std::max(job.attempts, waiting->second.attempts);
      unqueue(waiting);
    }
    job.deadline = now.liveness + limits_.answer_wait;
    const std::uint64_t tag = numbers_.tag++;
    jobs_.emplace(tag, std::move(job));
    to_meta(tag, open);
  }
  changed_ = true;  // there may be more when a job is over
}

// ---- A job -----------------------------------------------------------------------------------------------

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
  if (code == Code::over_quota) {
    const std::size_t known = std::min<std::size_t>(answer.first, job.pins.slots.size());
    for (std::size_t i = 0; i < known; ++i) pages_.written(job.pins.slots[i]);
    counters_.existed += known;
    const std::size_t dropped = job.pins.slots.size() - known;
    counters_.dropped_quota += dropped;
    const std::uint64_t tenant = pages_.at(job.pins.slots.front()).tenant;  // that of all
    if (over_quota_.size() < over_quota_max || over_quota_.contains(tenant)) over_quota_[tenant] += dropped;
    return finish(tag);
  }
  if (code == Code::busy || code == Code::no_space) return retry(tag, now);
  if (code == Code::over_budget) return drop_over_budget(tag);
  if (code != Code::ok) return drop(tag);
  if (stripes_.contains(answer.stripe)) return drop(tag);
  job.stripe = answer.stripe;
  if (!take_columns(job, answer)) {
    abort(job, tag);
    return drop(tag);
  }
  stripe_pages_ = std::min<std::uint32_t>(answer.data_columns, kv::stripe_pages_max);
  job.state = JobState::encoding;
  stripes_.emplace(job.stripe, tag);
  // The commit has to come before the opening lapses, with parity even when a store says nothing.
  const Duration life = std::max<Duration>(milliseconds(answer.ttl_ms), limits_.answer_wait);
  job.deadline = now.liveness + (answer.parity_columns > 0 ? life / 2 : life);
  if (answer.parity_columns > 0 && job.failed.size() <= answer.parity_columns) {
    const std::vector<std::uint32_t> blocks(answer.parity_columns, job.shape->parity_slot_blocks());
    Result<std::vector<std::uint32_t>> slots = pages_.take(blocks, PageState::scratch);
    if (!slots) {
      abort(job, tag);
      return retry(tag, now);
    }
    job.parity = *std::move(slots);
  }
  if (!job.failed.empty()) {
    columns_changed(tag, now);
    if (!jobs_.contains(tag)) return;
  }
  if (job.shape->crcs_count() == 0) start_puts(tag, now);
}

bool Writeback::take_columns(Job& job, const wire::meta_put_opened& answer) {
  const std::size_t offered = job.pins.slots.size();
  const std::size_t count = answer.pages;
  if (answer.first > offered || count > offered - answer.first) return false;
  std::vector<std::uint32_t> blocks;
  for (std::size_t i = 0; i < count; ++i)
    blocks.push_back(pages_.at(job.pins.slots[answer.first + i]).blocks);
  Result<kv::StripeShape> shape =
      kv::StripeShape::of(pages_.layout(), answer.data_columns, answer.parity_columns, blocks);
  if (!shape || answer.columns.size() != shape->columns_stored()) return false;
  if (!port_.has_code(answer.data_columns, answer.parity_columns)) return false;
  for (const wire::Column& column : answer.columns) {
    const std::uint16_t number = column.column;
    if (!shape->is_stored(number) || job.columns.contains(number) || job.failed.contains(number))
      return false;
    if (const std::optional<Peer> store = peers_.store_up(column.instance)) {
      job.columns.emplace(number, Job::Column{*store, column.volume, 0});
    } else {
      job.failed.emplace(number, Code::unreachable);
    }
  }
  job.shape = *std::move(shape);
  job.code = {answer.data_columns, answer.parity_columns, {}};
  job.code.crcs.resize(job.shape->crcs_count());
  narrow(job, answer.first, count);
  return true;
}

void Writeback::narrow(Job& job, std::size_t first, std::size_t count) {
  const std::vector<std::uint32_t> slots = std::exchange(job.pins.slots, {});
  const std::vector<std::uint64_t> ages = std::exchange(job.ages, {});
  PinSet others;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (i >= first && i < first + count) {
      job.pins.slots.push_back(slots[i]);
      job.ages.push_back(ages[i]);
      continue;
    }
    others.slots.push_back(slots[i]);
    if (i < first) {
      ++counters_.existed;
      pages_.written(slots[i]);
      continue;
    }
    const Page& page = pages_.at(slots[i]);
    enqueue(ages[i], {slots[i], page.place.generation, page.parent, job.attempts, {}, {}});
  }
  pages_.unpin(others);
}

bool Writeback::step(const Now& now) {
  const auto found = std::find_if(jobs_.begin(), jobs_.end(),
                                  [](const auto& item) { return item.second.state == JobState::encoding; });
  if (found == jobs_.end()) return false;
  const std::uint64_t tag = found->first;
  if (!encode_group(found->second)) {
    ++counters_.pages_changed;
    abort(found->second, tag);
    drop(tag);
  } else if (found->second.group == pages_.layout().groups()) {
    start_puts(tag, now);
  }
  return true;
}

bool Writeback::encode_group(Job& job) {
  const kv::StripeShape& shape = *job.shape;
  const std::uint32_t group = job.group++;
  std::vector<Strip> data(shape.data_columns());
  for (std::uint32_t column = 0; column < shape.data_stored(); ++column) {
    const Page& page = pages_.at(job.pins.slots[shape.page_of(column)]);
    data[column] = {page.place.offset + shape.page_offset(column, group), shape.segment_bytes(column, group)};
    counters_.encoded_bytes += data[column].bytes;
  }
  std::vector<Strip> parity;
  for (std::uint32_t i = 0; i < shape.parity_columns(); ++i) {
    const std::uint32_t column = shape.data_columns() + i;
    parity.push_back({pages_.at(job.parity[i]).place.offset + shape.column_offset(column, group),
                      shape.segment_bytes(column, group)});
  }
  const std::vector<std::uint32_t> crcs = port_.encode(data, parity);
  DI_ASSERT(crcs.size() == data.size() + parity.size());
  for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
    const std::uint32_t column = shape.stored_column(i);
    if (const auto place = shape.crc_index(column, group)) {
      job.code.crcs[*place] = crcs[column];
    } else if (crcs[column] != pages_.at(job.pins.slots[column]).crcs[group]) {
      return false;
    }
  }
  if (shape.parts() == 1) return true;
  // The checksums of parts are made of what lies there: without this they would vouch for anything.
  for (const std::uint32_t slot : job.pins.slots) {
    const Page& page = pages_.at(slot);
    const std::uint64_t offset = page.place.offset + pages_.layout().segment_offset(group, page.blocks);
    if (port_.segment_crc(offset, pages_.layout().segment_bytes(group, page.blocks)) != page.crcs[group])
      return false;
  }
  return true;
}

void Writeback::start_puts(std::uint64_t tag, const Now& now) {
  Job& job = jobs_.at(tag);
  const kv::StripeShape& shape = *job.shape;
  job.state = JobState::putting;
  wire::kv_put put;
  put.stripe = job.stripe;
  put.fingerprint = pages_.layout().fingerprint();
  put.tenant = pages_.at(job.pins.slots.front()).tenant;
  for (const std::uint32_t slot : job.pins.slots) put.pages.push_back(describe(slot));
  put.code = job.code;
  for (auto& [number, column] : job.columns) {
    const std::uint32_t slot = shape.is_parity(number) ? job.parity[number - shape.data_columns()]
                                                       : job.pins.slots[shape.page_of(number)];
    put.volume = column.volume;
    put.column = number;
    put.slot = pages_.ref({slot, 0, pages_.at(slot).blocks, 0});
    put.transfer = 0;
    if (peers_.remote(column.store)) {
      const std::uint64_t transfer = numbers_.transfer++;
      if (!data_.expose(column.store, transfer, transfer::Access::read,
                        {{put.slot.slot, put.slot.generation}})) {
        abort(job, tag);
        return retry(tag, now);
      }
      put.transfer = column.transfer = transfer;
    }
    out_.push_back(wire::Envelope::make(column.store.instance, column.store.generation, {}, put));
  }
}

void Writeback::put_done(const Peer& store, const wire::kv_put_done& done, const Now& now) {
  const auto named = stripes_.find(done.stripe);
  if (named == stripes_.end()) return;
  const std::uint64_t tag = named->second;
  Job& job = jobs_.at(tag);
  const auto column = job.columns.find(done.column);
  if (job.state != JobState::putting || column == job.columns.end() || column->second.store != store) return;
  conceal(column->second);
  job.columns.erase(column);
  const Code code = static_cast<Code>(done.code);
  if (code == Code::ok) {
    ++counters_.columns;
  } else {
    job.failed.emplace(done.column, code);
    job.no_space = job.no_space || code == Code::no_space;
    job.over_budget = job.over_budget || code == Code::over_budget;
    job.refused = job.refused || code == Code::corrupt || code == Code::stale;
  }
  columns_changed(tag, now);
}

void Writeback::commit(const Job& job, std::uint64_t tag) {
  wire::meta_put_commit message{job.stripe, {}, job.code};
  for (const auto& [column, code] : job.failed)
    message.failed_columns.push_back({column, static_cast<std::uint16_t>(code)});
  to_meta(tag, message);
}

void Writeback::columns_changed(std::uint64_t tag, const Now& now) {
  Job& job = jobs_.at(tag);
  if (job.failed.size() > job.shape->parity_columns()) {
    counters_.columns_failed += job.failed.size();
    if (job.no_space) {
      // A commit that names the columns: di-meta makes room on those stores.  Its answer finds no job.
      commit(job, tag);
    } else {
      abort(job, tag);
    }
    if (job.refused) return drop(tag);
    // To ask again would find the budget as it is, for hours.
    if (job.over_budget) return drop_over_budget(tag);
    retry(tag, now);
    return;
  }
  if (job.state != JobState::putting || !job.columns.empty()) return;
  for (const std::uint32_t slot : std::exchange(job.parity, {})) pages_.scrap(slot);
  job.state = JobState::committing;
  job.deadline = now.liveness + limits_.answer_wait;
  counters_.columns_failed += job.failed.size();
  commit(job, tag);
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
    ++counters_.stripes;
    if (!found->second.failed.empty()) ++counters_.degraded;
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
  changed_ = true;
  if (job.state != JobState::opening) stripes_.erase(job.stripe);
  for (const auto& [number, column] : job.columns) conceal(column);
  for (const std::uint32_t slot : job.parity) pages_.scrap(slot);
  pages_.unpin(job.pins);
}

void Writeback::conceal(const Job::Column& column) {
  if (column.transfer != 0) data_.conceal(column.store, column.transfer);
}

void Writeback::drop(std::uint64_t tag) {
  counters_.dropped_failed += jobs_.at(tag).pins.slots.size();
  finish(tag);
}

void Writeback::drop_over_budget(std::uint64_t tag) {
  counters_.dropped_over_budget += jobs_.at(tag).pins.slots.size();
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
  for (std::size_t i = 0; i < job.ages.size(); ++i) {
    const std::uint32_t slot = job.pins.slots[i];
    const Page& page = pages_.at(slot);
    ++counters_.retried;
    enqueue(job.ages[i], {slot, page.place.generation, page.parent, attempts, due, {}});
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
  std::vector<std::uint64_t> touched;
  for (auto& [tag, job] : jobs_) {
    for (auto column = job.columns.begin(); column != job.columns.end();) {
      if (column->second.store != store) {
        ++column;
        continue;
      }
      conceal(column->second);
      job.failed.emplace(column->first, Code::unreachable);
      column = job.columns.erase(column);
      if (touched.empty() || touched.back() != tag) touched.push_back(tag);
    }
  }
  for (const std::uint64_t tag : touched) columns_changed(tag, now);
}

void Writeback::on_time(const Now& now) {
  std::vector<std::uint64_t> due;
  for (const auto& [tag, job] : jobs_) {
    if (job.deadline <= now.liveness) due.push_back(tag);
  }
  for (const std::uint64_t tag : due) {
    Job& job = jobs_.at(tag);
    if (job.state == JobState::opening || job.state == JobState::committing) {
      retry(tag, now);
      continue;
    }
    for (const auto& [number, column] : std::exchange(job.columns, {})) {
      conceal(column);
      job.failed.emplace(number, Code::timeout);
    }
    columns_changed(tag, now);
  }
}

Due Writeback::next_due() const {
  Due due;
  for (const auto& [tag, job] : jobs_) {
    due.sooner_liveness(job.deadline);
    if (job.state == JobState::encoding) due.at_once();
  }
  // What waits for a free job or for di-meta is started by the event that ends the wait.
  if (peers_.meta_up() && jobs_.size() < limits_.jobs_max) {
    due.sooner_product(looked_.product);
    due.sooner_liveness(looked_.liveness);
  }
  return due;
}

std::size_t Writeback::pending() const {
  std::size_t count = 0;
  for (const auto& [age, waiting] : queue_) count += evicted(waiting) ? 0 : 1;
  for (const auto& [tag, job] : jobs_) count += job.pins.slots.size();
  return count;
}

Status Writeback::check(std::map<std::uint32_t, std::uint32_t>& pins,
                        std::set<std::uint32_t>& scratch) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  if (queue_.size() > limits_.queue_pages) return broken("the write-back queue is longer than its bound");
  if (by_parent_.size() != queue_.size()) return broken("a queued page has lost its parent");
  if (jobs_.size() > limits_.jobs_max) return broken("more write-backs than there may be");
  std::size_t named = 0;
  for (const auto& [tag, job] : jobs_) {
    if (job.pins.slots.empty() || job.ages.size() != job.pins.slots.size())
      return broken("a write-back of nothing");
    for (const std::uint32_t slot : job.pins.slots) {
      ++pins[slot];
      if (!pages_.all().contains(slot) || pages_.at(slot).state != PageState::sealed) {
        return broken("a page is written back that is not sealed");
      }
    }
    for (const std::uint32_t slot : job.parity) {
      if (!scratch.insert(slot).second) return broken("parity is somebody else's");
    }
    if (job.state == JobState::opening) continue;
    ++named;
    const auto back = stripes_.find(job.stripe);
    if (back == stripes_.end() || back->second != tag) return broken("a write-back has lost its stripe");
    const bool over = job.state == JobState::committing;
    if (over && (!job.columns.empty() || !job.parity.empty()))
      return broken("a write-back keeps what it has written");
    if (job.state == JobState::putting && job.columns.empty())
      return broken("a write-back waits for nothing");
    if (job.columns.size() + job.failed.size() > job.shape->columns_stored() ||
        job.failed.size() > job.shape->parity_columns()) {
      return broken("columns of a write-back are wrong");
    }
  }
  if (named != stripes_.size()) return broken("a stripe has no write-back");
  return {};
}

}  // namespace di::host
