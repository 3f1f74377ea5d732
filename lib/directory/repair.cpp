#include "directory/repair.h"

#include <algorithm>

#include "base/assert.h"

namespace di::directory {

bool RepairQueue::want(std::uint64_t stripe, Rank rank) {
  if (running_.contains(stripe)) return true;
  const auto at = waiting_.find(stripe);
  if (at == waiting_.end()) {
    if (full()) return false;
    const std::uint64_t order = next_order_++;
    waiting_.emplace(stripe, Waiting{rank, order, 0, {}, false});
    cross_checks_waiting_ += rank.cross_check ? 1 : 0;
    ready_.emplace(rank, order, stripe);
    return true;
  }
  Waiting& entry = at->second;
  if (entry.rank == rank) return true;
  if (!entry.paused) ready_.erase({entry.rank, entry.order, stripe});
  if (entry.rank.cross_check) --cross_checks_waiting_;
  if (rank.cross_check) ++cross_checks_waiting_;
  entry.rank = rank;
  if (!entry.paused) ready_.emplace(rank, entry.order, stripe);
  return true;
}

void RepairQueue::drop(std::uint64_t stripe) {
  const auto at = waiting_.find(stripe);
  if (at == waiting_.end()) return;
  if (at->second.paused) {
    paused_.erase({at->second.not_before, stripe});
  } else {
    ready_.erase({at->second.rank, at->second.order, stripe});
  }
  if (at->second.rank.cross_check) --cross_checks_waiting_;
  waiting_.erase(at);
}

std::optional<std::uint64_t> RepairQueue::next(Instant now) {
  if (options_.bytes_per_s == 0) return std::nullopt;
  while (!paused_.empty() && paused_.begin()->first <= now) {
    const std::uint64_t stripe = paused_.begin()->second;
    Waiting& entry = waiting_.at(stripe);
    paused_.erase(paused_.begin());
    entry.paused = false;
    ready_.emplace(entry.rank, entry.order, stripe);
  }
  if (ready_.empty() || busy() || budget_at_ > now) return std::nullopt;
  return std::get<2>(*ready_.begin());
}

void RepairQueue::start(std::uint64_t stripe, Running running, std::uint64_t bytes, Instant now) {
  const Waiting entry = waiting_.at(stripe);
  drop(stripe);
  running.rank = entry.rank;
  running.attempts = entry.attempts + 1;
  running.deadline = now + repair_answer_max;
  deadlines_.emplace(running.deadline, stripe);
  running_.emplace(stripe, std::move(running));
  const double cost_s = static_cast<double>(bytes) / static_cast<double>(options_.bytes_per_s);
  budget_at_ =
      std::max(budget_at_, now) + Duration(static_cast<std::int64_t>(std::min(cost_s, 3600.0) * 1e9));
}

void RepairQueue::pause(std::uint64_t stripe, Waiting& entry, Instant now) {
  Duration wait = options_.backoff_min;
  for (std::uint32_t i = 1; i < entry.attempts && wait < options_.backoff_max; ++i) wait *= 2;
  entry.not_before = now + std::min(wait, options_.backoff_max);
  entry.paused = true;
  paused_.emplace(entry.not_before, stripe);
}

bool RepairQueue::put_off(std::uint64_t stripe, Instant now) {
  if (paused_.size() >= options_.waiting_max / 2) {
    drop(stripe);
    return false;
  }
  Waiting& entry = waiting_.at(stripe);
  DI_ASSERT(!entry.paused);
  ready_.erase({entry.rank, entry.order, stripe});
  ++entry.attempts;
  pause(stripe, entry, now);
  return true;
}

RepairQueue::Running RepairQueue::finish(std::uint64_t stripe, bool again, Instant now) {
  const auto at = running_.find(stripe);
  DI_ASSERT(at != running_.end());
  Running done = std::move(at->second);
  running_.erase(at);
  deadlines_.erase({done.deadline, stripe});
  if (again && !full()) {
    Waiting& entry = waiting_[stripe];
    entry = {done.rank, next_order_++, done.attempts, {}, false};
    cross_checks_waiting_ += done.rank.cross_check ? 1 : 0;
    pause(stripe, entry, now);
  }
  return done;
}

const RepairQueue::Running* RepairQueue::running(std::uint64_t stripe) const {
  const auto at = running_.find(stripe);
  return at == running_.end() ? nullptr : &at->second;
}

std::vector<std::uint64_t> RepairQueue::running_of(const Holder& host) const {
  std::vector<std::uint64_t> out;
  for (const auto& [stripe, running] : running_) {
    if (running.host == host) out.push_back(stripe);
  }
  return out;
}

bool RepairQueue::cross_checks(std::uint64_t stripe) const {
  if (const auto at = waiting_.find(stripe); at != waiting_.end()) return at->second.rank.cross_check;
  const Running* now = running(stripe);
  return now != nullptr && now->rank.cross_check;
}

std::optional<std::uint64_t> RepairQueue::overdue(Instant now) const {
  if (deadlines_.empty() || deadlines_.begin()->first > now) return std::nullopt;
  return deadlines_.begin()->second;
}

void RepairQueue::hurry() {
  for (const auto& [at, stripe] : paused_) {
    Waiting& entry = waiting_.at(stripe);
    entry.paused = false;
    entry.attempts = 0;
    ready_.emplace(entry.rank, entry.order, stripe);
  }
  paused_.clear();
}

std::size_t RepairQueue::waiting_at(std::uint32_t redundancy) const {
  return static_cast<std::size_t>(std::count_if(waiting_.begin(), waiting_.end(), [&](const auto& w) {
    return !w.second.rank.cross_check && w.second.rank.redundancy == redundancy;
  }));
}

Instant RepairQueue::next_due() const {
  Instant due = instant_never;
  if (!deadlines_.empty()) due = deadlines_.begin()->first;
  if (options_.bytes_per_s == 0 || busy()) return due;
  if (!ready_.empty()) due = std::min(due, budget_at_);
  if (!paused_.empty()) due = std::min(due, std::max(budget_at_, paused_.begin()->first));
  return due;
}

void RepairQueue::test_check() const {
  DI_ASSERT(ready_.size() + paused_.size() == waiting_.size());
  DI_ASSERT(cross_checks_waiting_ ==
            static_cast<std::size_t>(std::count_if(waiting_.begin(), waiting_.end(),
                                                   [](const auto& w) { return w.second.rank.cross_check; })));
  for (const auto& [stripe, entry] : waiting_) {
    DI_ASSERT(!running_.contains(stripe));
    DI_ASSERT(entry.paused ? paused_.contains({entry.not_before, stripe})
                           : ready_.contains({entry.rank, entry.order, stripe}));
  }
  DI_ASSERT(deadlines_.size() == running_.size());
}

}  // namespace di::directory
