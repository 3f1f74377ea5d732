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

bool Wish::leaves_out(const RankName& name, const RankInfo& info) const {
  const auto found = never.find(name);
  return found != never.end() && found->second == info.generation;
}

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
    count_in(ranks_.emplace(RankName{instance, rank}, std::move(info)).first->second);
  }
}

void RankTable::remove(const std::string& instance) {
  for (auto it = ranks_.lower_bound(RankName{instance, 0});
       it != ranks_.end() && it->first.instance == instance;) {
    count_out(it->second);
    it = ranks_.erase(it);
  }
}

bool RankTable::credit(const RankName& name, std::uint32_t generation, const wire::rank_credit& credit) {
  const auto found = ranks_.find(name);
  if (found == ranks_.end() || found->second.generation != generation) return false;
  RankInfo& info = found->second;
  if (credit.seq <= info.credit.seq) return false;
  count_out(info);
  info.credit = credit;
  count_in(info);
  return true;
}

void RankTable::count_in(const RankInfo& info) {
  Sum& sum = sums_[info.model];
  if (!info.credit.draining) ++sum.open[info.decode ? 1 : 0];
  if (!info.decode) return;
  sum.capacities.insert(info.credit.kv_tokens_max);
  if (info.takes_seat()) sum.rooms.insert(info.room_tokens());
}

void RankTable::count_out(const RankInfo& info) {
  Sum& sum = sums_[info.model];
  if (!info.credit.draining) --sum.open[info.decode ? 1 : 0];
  if (!info.decode) return;
  sum.capacities.erase(sum.capacities.find(info.credit.kv_tokens_max));
  if (info.takes_seat()) sum.rooms.erase(sum.rooms.find(info.room_tokens()));
}

std::optional<RankName> RankTable::choose_prefill(const std::string& model, const Wish& wish) const {
  std::optional<RankName> best;
  std::tuple<bool, std::uint64_t, std::uint32_t, std::uint32_t, std::uint64_t> best_cost;
  for (const auto& [name, info] : ranks_) {
    if (info.decode || info.model != model || !info.takes_bind() || wish.leaves_out(name, info)) continue;
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
                                                 const std::optional<RankName>& avoid) {
  if (!has_seat(model, tokens)) return std::nullopt;
  ++seat_walks_;
  std::optional<RankName> best;
  std::tuple<bool, bool, std::uint32_t, std::uint32_t, std::uint64_t> best_cost;
  const std::uint64_t largest = *sums_.at(model).capacities.rbegin();
  for (const auto& [name, info] : ranks_) {
    if (!info.decode || info.model != model || !info.takes_seat() || wish.leaves_out(name, info)) continue;
    if (tokens <= largest && tokens > info.room_tokens()) continue;
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

bool RankTable::has_seat(const std::string& model, std::uint64_t tokens) const {
  const auto found = sums_.find(model);
  if (found == sums_.end() || found->second.rooms.empty()) return false;
  return tokens <= *found->second.rooms.rbegin() || tokens > *found->second.capacities.rbegin();
}

std::string RankTable::choose_host(const std::string& model, const Wish& wish) const {
  std::string best;
  std::tuple<bool, std::uint64_t, std::uint32_t> best_cost;
  for (const auto& [name, info] : ranks_) {
    if (info.decode || info.model != model || info.credit.draining || info.credit.host.empty()) continue;
    if (wish.leaves_out(name, info)) continue;
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
  count_out(info);
  info.sent_us += cost_us;
  info.outstanding_us += cost_us;
  info.outstanding_tokens += tokens;
  ++info.outstanding;
  ++info.sent_requests;
  count_in(info);
  return info.sent_requests;
}

void RankTable::returned(const RankName& name, std::uint32_t generation, std::uint64_t cost_us,
                         std::uint64_t tokens) {
  const auto found = ranks_.find(name);
  if (found == ranks_.end() || found->second.generation != generation) return;
  RankInfo& info = found->second;
  DI_ASSERT(info.outstanding > 0 && info.outstanding_us >= cost_us && info.outstanding_tokens >= tokens);
  count_out(info);
  info.outstanding_us -= cost_us;
  info.outstanding_tokens -= tokens;
  --info.outstanding;
  count_in(info);
}

const RankInfo* RankTable::find(const RankName& name) const {
  const auto found = ranks_.find(name);
  return found == ranks_.end() ? nullptr : &found->second;
}

bool RankTable::serves(const std::string& model, bool decode) const {
  const auto found = sums_.find(model);
  return found != sums_.end() && found->second.open[decode ? 1 : 0] > 0;
}

bool RankTable::reads_at(const std::string& model, const std::string& host) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& entry) {
    const RankInfo& info = entry.second;
    return !info.decode && info.model == model && info.place.host == host && !info.credit.draining;
  });
}

bool RankTable::never_taken(const std::string& model, bool decode, std::uint64_t tokens,
                            const Wish& wish) const {
  bool refused = false;
  for (const auto& [name, info] : ranks_) {
    if (info.decode != decode || info.model != model || info.credit.draining) continue;
    if (wish.leaves_out(name, info)) {
      refused = true;
    } else if (!decode || tokens <= info.credit.kv_tokens_max) {
      return false;
    }
  }
  return refused;
}

std::uint64_t RankTable::outstanding() const {
  std::uint64_t total = 0;
  for (const auto& [name, info] : ranks_) total += info.outstanding;
  return total;
}

}  // namespace di::request
