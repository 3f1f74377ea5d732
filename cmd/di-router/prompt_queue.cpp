#include "prompt_queue.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace di::router {

bool PromptQueue::push(ReadJob&& job) {
  const std::size_t bytes = job.body.size();
  const auto found = by_tenant_.find(job.key.tenant);
  const Held held = found == by_tenant_.end() ? Held{} : found->second;
  if (held.jobs >= reader_jobs_max - all_.jobs || held.bytes + bytes > reader_bytes_max - all_.bytes)
    return false;
  job.body_bytes = bytes;
  for (Held* sum : {&all_, &by_tenant_[job.key.tenant]}) {
    ++sum->jobs;
    sum->bytes += bytes;
  }
  Lane& lane = lane_of(job);
  std::deque<ReadJob>& own = lane.waiting[job.key.tenant];
  if (own.empty()) lane.turns.push_back(job.key.tenant);
  own.push_back(std::move(job));
  return true;
}

std::optional<ReadJob> PromptQueue::next() {
  static_assert(reader_threads > 1);
  auto& [short_ones, long_ones] = lanes_;
  if (short_ones.running + long_ones.running >= reader_threads) return std::nullopt;
  const bool long_next = !long_ones.turns.empty() && long_ones.running < reader_threads - 1;
  Lane& lane = long_next ? long_ones : short_ones;
  if (lane.turns.empty()) return std::nullopt;
  const std::string tenant = std::move(lane.turns.front());
  lane.turns.pop_front();
  const auto own = lane.waiting.find(tenant);
  DI_ASSERT(own != lane.waiting.end() && !own->second.empty());
  ReadJob job = std::move(own->second.front());
  own->second.pop_front();
  if (own->second.empty()) {
    lane.waiting.erase(own);
  } else {
    lane.turns.push_back(tenant);
  }
  ++lane.running;
  return job;
}

void PromptQueue::done(const ReadJob& job) {
  Lane& lane = lane_of(job);
  DI_ASSERT(lane.running > 0);
  --lane.running;
  give_back(job);
}

void PromptQueue::drop(http::ExchangeId exchange) {
  for (Lane& lane : lanes_) {
    for (auto own = lane.waiting.begin(); own != lane.waiting.end(); ++own) {
      std::deque<ReadJob>& jobs = own->second;
      const auto found =
          std::ranges::find_if(jobs, [&](const ReadJob& job) { return job.exchange == exchange; });
      if (found == jobs.end()) continue;
      give_back(*found);
      jobs.erase(found);
      if (!jobs.empty()) return;
      std::erase(lane.turns, own->first);
      lane.waiting.erase(own);
      return;
    }
  }
}

void PromptQueue::give_back(const ReadJob& job) {
  const auto tenant = by_tenant_.find(job.key.tenant);
  DI_ASSERT(tenant != by_tenant_.end());
  for (Held* sum : {&all_, &tenant->second}) {
    DI_ASSERT(sum->jobs > 0 && sum->bytes >= job.body_bytes);
    --sum->jobs;
    sum->bytes -= job.body_bytes;
  }
  if (tenant->second.jobs == 0) by_tenant_.erase(tenant);
}

}  // namespace di::router
