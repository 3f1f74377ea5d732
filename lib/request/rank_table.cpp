#include "request/rank_table.h"

#include <algorithm>
#include <tuple>

namespace di::request {

namespace {

std::uint32_t held_by(const Wish& wish, const RankInfo& info) {
  const auto found = wish.held.find(info.credit.host);
  return found == wish.held.end() ? 0 : found->second;
}

// For a minimum: more is better.
std::uint32_t lack(std::uint32_t blocks) {
  return UINT32_MAX - blocks;
}

}  // namespace

std::uint32_t distance(const Place& a, const Place& b) {
  if (a.zone != b.zone) return 3;
  if (a.rack != b.rack) return 2;
  return a.host == b.host ? 0 : 1;
}

void RankTable::add(const std::string& instance, std::uint32_t generation, std::uint16_t ranks, bool decode,
                    const std::string& model, const Place& place) {
  remove(instance);
  for (std::uint16_t rank = 0; rank < ranks && ranks_.size() < ranks_max; ++rank) {
    RankInfo info;
    info.generation = generation;
    info.decode = decode;
    info.model = model;
    info.place = place;
    info.credit.draining = true;  // until its first credit says otherwise
    ranks_.emplace(RankName{instance, rank}, std::move(info));
  }
}

void RankTable::remove(const std::string& instance) {
  for (auto it = ranks_.lower_bound(RankName{instance, 0});
       it != ranks_.end() && it->first.instance == instance;) {
    count(it->second, -1);
    it = ranks_.erase(it);
  }
}

bool RankTable::credit(const RankName& name, std::uint32_t generation, const wire::rank_credit& credit) {
  const auto found = ranks_.find(name);
  if (found == ranks_.end() || found->second.generation != generation) return false;
  RankInfo& info = found->second;
  if (credit.seq <= info.credit.seq) return false;
  count(info, -1);
  info.credit = credit;
  count(info, 1);
  return true;
}

void RankTable::count(const RankInfo& info, int by) {
  if (!info.credit.draining) open_[info.model][info.decode ? 1 : 0] += static_cast<std::uint32_t>(by);
}

std::optional<RankName> RankTable::choose_prefill(const std::string& model, const Wish& wish) const {
  std::optional<RankName> best;
  std::tuple<bool, std::uint64_t, std::uint32_t, std::uint32_t, std::uint64_t> best_cost;
  for (const auto& [name, info] : ranks_) {
    if (info.decode || info.model != model || !info.takes_bind()) continue;
    const bool far = !wish.near_host.empty() && info.place.host != wish.near_host;
    const std::tuple cost{far, info.outstanding_us, info.outstanding, lack(held_by(wish, info)),
                          info.credit.queue_us};
    if (!best.has_value() || cost < best_cost) {
      best = name;
      best_cost = cost;
    }
  }
  return best;
}

std::optional<RankName> RankTable::choose_decode(const std::string& model, std::uint64_t tokens,
                                                 const Place& from, const Wish& wish,
                                                 const std::optional<RankName>& avoid) const {
  std::optional<RankName> best;
  std::tuple<bool, bool, std::uint32_t, std::uint32_t, std::uint64_t> best_cost;
  std::uint64_t largest = 0;
  for (const auto& [name, info] : ranks_) {
    if (info.decode && info.model == model) largest = std::max(largest, info.credit.kv_tokens_max);
  }
  for (const auto& [name, info] : ranks_) {
    if (!info.decode || info.model != model || info.credit.draining) continue;
    if (info.sent_requests >= info.credit.granted_requests) continue;
    if (tokens <= largest && info.outstanding_tokens + tokens > info.credit.kv_tokens_max) continue;
    const std::uint32_t away = distance(from, info.place);
    // A link was too slow for this request: no other one is tried while there is a seat without a link.
    const bool far = !wish.near_host.empty() && away > 0;
    const std::tuple cost{far, avoid.has_value() && *avoid == name, info.outstanding, away,
                          info.outstanding_tokens};
    if (!best.has_value() || cost < best_cost) {
      best = name;
      best_cost = cost;
    }
  }
  return best;
}

std::string RankTable::choose_host(const std::string& model, const Wish& wish) const {
  std::string best;
  std::tuple<bool, std::uint64_t, std::uint32_t> best_cost;
  for (const auto& [name, info] : ranks_) {
    if (info.decode || info.model != model || info.credit.draining || info.credit.host.empty()) continue;
    const bool far = !wish.near_host.empty() && info.place.host != wish.near_host;
    const std::tuple cost{far, info.outstanding_us, lack(held_by(wish, info))};
    if (best.empty() || cost < best_cost) {
      best = info.credit.host;
      best_cost = cost;
    }
  }
  return best;
}

std::uint64_t RankTable::sent(const RankName& name, std::uint64_t cost_us, std::uint64_t tokens) {
  RankInfo& info = ranks_.at(name);
  info.sent_us += cost_us;
  info.outstanding_us += cost_us;
  info.outstanding_tokens += tokens;
  ++info.outstanding;
  return ++info.sent_requests;
}

void RankTable::returned(const RankName& name, std::uint32_t generation, std::uint64_t cost_us,
                         std::uint64_t tokens) {
  const auto found = ranks_.find(name);
  if (found == ranks_.end() || found->second.generation != generation) return;
  RankInfo& info = found->second;
  DI_ASSERT(info.outstanding > 0 && info.outstanding_us >= cost_us && info.outstanding_tokens >= tokens);
  info.outstanding_us -= cost_us;
  info.outstanding_tokens -= tokens;
  --info.outstanding;
}

const RankInfo* RankTable::find(const RankName& name) const {
  const auto found = ranks_.find(name);
  return found == ranks_.end() ? nullptr : &found->second;
}

bool RankTable::serves(const std::string& model, bool decode) const {
  const auto found = open_.find(model);
  return found != open_.end() && found->second[decode ? 1 : 0] > 0;
}

bool RankTable::reads_at(const std::string& model, const std::string& host) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& entry) {
    const RankInfo& info = entry.second;
    return !info.decode && info.model == model && info.place.host == host && !info.credit.draining;
  });
}

std::uint64_t RankTable::outstanding() const {
  std::uint64_t total = 0;
  for (const auto& [name, info] : ranks_) total += info.outstanding;
  return total;
}

}  // namespace di::request
