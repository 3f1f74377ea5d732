#include "directory/placement.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "base/assert.h"
#include "base/rng.h"

namespace di::directory {

namespace {

// Above every stripe id (stripe_id_max): what is drawn for one thing says nothing about the others.
constexpr std::uint64_t record_draw = std::uint64_t{1} << 62;
constexpr std::uint64_t substitute_draw = std::uint64_t{1} << 63;

}  // namespace

bool Placements::set(Target target, const State& state) {
  const auto at = targets_.find(target);
  if (at == targets_.end()) {
    if (targets_.size() >= targets_max) return false;
    targets_.emplace(target, Known{state, 0, 0, false, std::nullopt});
    if (state.usable) fresh_.insert(target);
    stale_ = true;
    return true;
  }
  Known& known = at->second;
  if (known.state.labels != state.labels) stale_ = true;
  if (known.replaced && state.usable) {
    known.replaced = false;  // it is back: like a new one
    known.began.reset();
    stale_ = true;
  }
  known.state = state;
  if (state.usable && !known.began) fresh_.insert(target);
  return true;
}

// ---- slow start

void Placements::start_clocks(Instant now) {
  if (fresh_.empty()) return;
  for (const Target target : fresh_) targets_.at(target).began = now;
  fresh_.clear();
  first_began_ = instant_never;
  for (const auto& [target, known] : targets_) {
    if (known.began && !known.replaced) first_began_ = std::min(first_began_, *known.began);
  }
  // When all began at the same time there is nothing to wait for.
  slow_until_ = first_began_ == now ? now : now + options_.slow_start;
}

std::uint32_t Placements::share(Target target, Instant now) const {
  constexpr std::int64_t whole = 1000;
  const auto at = targets_.find(target);
  if (at == targets_.end() || !at->second.began || now >= slow_until_) return whole;
  const auto grown = [&](Instant began) {
    const std::int64_t age = std::min((now - began).count(), options_.slow_start.count());
    return slow_start_first + (whole - slow_start_first) * age / options_.slow_start.count();
  };
  return static_cast<std::uint32_t>(whole * grown(*at->second.began) / grown(first_began_));
}

bool Placements::passes_over(std::uint64_t stripe, Target target, Instant now) const {
  const std::uint32_t part = share(target, now);
  return part < 1000 &&
         Rng(stripe ^ std::uint64_t{target.store} << 40 ^ std::uint64_t{target.volume} << 24).below(1000) >=
             part;
}

void Placements::slow_start(std::uint64_t stripe, std::vector<Target>& targets, Instant now) {
  if (now >= slow_until_) return;
  for (Target& target : targets) {
    if (!usable(target) || !passes_over(stripe, target, now)) continue;
    std::vector<Target> others;
    for (const Target& other : targets) {
      if (&other != &target) others.push_back(other);
    }
    // Of equals another one for each stripe.
    Rng rng(stripe);
    const Crowd here = crowd(target, others);
    std::optional<std::tuple<Crowd, std::uint64_t, Target>> best;
    for (const auto& [candidate, known] : targets_) {
      const std::uint64_t lot = rng.next();
      if (!known.state.usable || passes_over(stripe, candidate, now)) continue;
      if (std::find(others.begin(), others.end(), candidate) != others.end()) continue;
      const Crowd there = crowd(candidate, others);
      if (there > here) continue;
      const std::tuple rank{there, lot, candidate};
      if (!best || rank < *best) best = rank;
    }
    if (!best) continue;
    target = std::get<Target>(*best);
    ++passed_over_;
  }
}

void Placements::add_bytes(Target target, std::uint64_t bytes) {
  targets_.at(target).bytes += bytes;
}

void Placements::remove_bytes(Target target, std::uint64_t bytes) {
  Known& known = targets_.at(target);
  DI_ASSERT(known.bytes >= bytes);
  known.bytes -= bytes;
}

bool Placements::usable(Target target) const {
  const auto at = targets_.find(target);
  return at != targets_.end() && at->second.state.usable;
}

std::uint64_t Placements::bytes_total(Target target) const {
  const auto at = targets_.find(target);
  return at == targets_.end() ? 0 : at->second.state.bytes_total;
}

std::uint64_t Placements::bytes(Target target) const {
  const auto at = targets_.find(target);
  return at == targets_.end() ? 0 : at->second.bytes;
}

std::size_t Placements::nodes() const {
  std::set<std::uint32_t> nodes;
  for (const auto& [target, known] : targets_) {
    if (!known.replaced) nodes.insert(target.store);
  }
  return nodes.size();
}

// In thousandths of what it holds at most; without a size in MiB, so that the emptier one is still known.
std::uint64_t Placements::fill(const Known& known) const {
  if (known.state.bytes_total == 0) return known.bytes >> 20;
  return known.bytes / (known.state.bytes_total / 1000 + 1);
}

std::uint32_t Placements::shared(Target a, Target b) const {
  const auto at = pairs_.find(a < b ? std::pair{a, b} : std::pair{b, a});
  return at == pairs_.end() ? 0 : at->second;
}

Placements::Crowd Placements::crowd(Target candidate, std::span<const Target> members) const {
  const std::uint32_t domain_max = std::max<std::uint32_t>(options_.geometry.parity_columns, 1);
  const Labels& labels = targets_.at(candidate).state.labels;
  std::uint32_t on_target = 0;
  std::uint32_t on_node = 0;
  std::uint32_t in_rack = 0;
  std::uint32_t on_host = 0;
  for (const Target member : members) {
    const Labels& other = targets_.at(member).state.labels;
    on_target += member == candidate ? 1 : 0;
    on_node += member.store == candidate.store ? 1 : 0;
    in_rack += !labels.rack.empty() && labels.rack == other.rack ? 1 : 0;
    on_host += !labels.host.empty() && labels.host == other.host ? 1 : 0;
  }
  // Up to m columns of a domain may go with it; above that each one more is worse.
  const auto above = [&](std::uint32_t there) { return there < domain_max ? 0 : there - domain_max + 1; };
  return {on_node * 64 + on_target, above(in_rack), above(on_host)};
}

std::optional<Target> Placements::best(std::span<const Target> candidates,
                                       std::span<const Target> members) const {
  // Smaller is better; the last two break ties in a fixed way.
  using Rank = std::tuple<Crowd, bool, std::uint64_t, std::uint32_t, Target>;
  std::optional<Rank> found;
  for (const Target candidate : candidates) {
    const Crowd there = crowd(candidate, members);
    if (std::get<0>(there) > 0 && !options_.lab) continue;
    std::uint64_t together = 0;
    for (const Target member : members) together += shared(member, candidate);
    const Known& known = targets_.at(candidate);
    const Rank rank{there, known.state.spent, together, known.records, candidate};
    if (!found || rank < *found) found = rank;
  }
  if (!found) return std::nullopt;
  return std::get<Target>(*found);
}

Placements::Record Placements::build_one(Target seed) {
  // Those in the fewest records first.
  std::vector<Target> candidates;
  for (const auto& [target, known] : targets_) {
    if (!known.replaced) candidates.push_back(target);
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](Target a, Target b) { return targets_.at(a).records < targets_.at(b).records; });
  Record record;
  record.id = next_record_++;
  record.members.push_back(seed);
  std::size_t looked_at = std::max<std::size_t>(candidates_max, 2 * options_.geometry.columns());
  while (record.members.size() < options_.geometry.columns()) {
    looked_at = std::min(looked_at, candidates.size());
    auto next = best(std::span(candidates).first(looked_at), record.members);
    if (!next && looked_at < candidates.size()) {
      looked_at = candidates.size();
      continue;
    }
    DI_ASSERT(next.has_value());  // build() counted the nodes
    record.members.push_back(*next);
  }
  for (std::size_t a = 0; a < record.members.size(); ++a) {
    ++targets_.at(record.members[a]).records;
    for (std::size_t b = a + 1; b < record.members.size(); ++b) {
      const Target x = record.members[a];
      const Target y = record.members[b];
      ++pairs_[x < y ? std::pair{x, y} : std::pair{y, x}];
    }
  }
  return record;
}

void Placements::build() {
  stale_ = false;
  records_.clear();
  pairs_.clear();
  cursor_ = 0;
  std::size_t count = 0;
  for (auto& [target, known] : targets_) {
    known.records = 0;
    if (!known.replaced) ++count;
  }
  const std::uint32_t width = options_.geometry.columns();
  if (count == 0 || (!options_.lab && nodes() < width)) return;
  const std::size_t wanted =
      width == 1 ? count : std::min(records_max, records_per_target * count / width + 1);
  while (records_.size() < wanted) {
    const auto seed = std::min_element(targets_.begin(), targets_.end(), [](const auto& a, const auto& b) {
      return std::pair(a.second.replaced, a.second.records) < std::pair(b.second.replaced, b.second.records);
    });
    records_.push_back(build_one(seed->first));
  }
}

void Placements::replace(Target target) {
  const auto at = targets_.find(target);
  if (at == targets_.end() || at->second.replaced) return;
  std::vector<Target> usable;
  for (const auto& [other, known] : targets_) {
    if (known.state.usable && other != target) usable.push_back(other);
  }
  bool complete = true;
  for (Record& record : records_) {
    for (Target& member : record.members) {
      if (member != target) continue;
      std::vector<Target> others;
      for (const Target& other : record.members) {
        if (&other != &member) others.push_back(other);
      }
      const auto next = best(usable, others);
      if (!next) {
        complete = false;  // it stays, and is stood in for or missed
        continue;
      }
      member = *next;
      ++record.generation;
      ++generations_;
      ++targets_.at(*next).records;
      --at->second.records;
      for (const Target other : others)
        ++pairs_[other < *next ? std::pair{other, *next} : std::pair{*next, other}];
    }
  }
  at->second.replaced = complete;
}

std::optional<Placements::Choice> Placements::choose(std::uint64_t stripe, const StripeForm& form,
                                                     Instant now) {
  if (stale_) build();
  start_clocks(now);
  if (records_.empty()) return std::nullopt;
  const std::uint32_t columns = form.columns_stored();
  struct Look {
    std::uint32_t unusable = 0;
    std::uint32_t spent = 0;
    std::uint64_t fill = 0;
  };
  const auto member_of = [&](const Record& record, std::uint32_t i) {
    return record.members[(form.stored_column(i) + stripe) % record.members.size()];
  };
  const auto look = [&](const Record& record) {
    Look out;
    for (std::uint32_t i = 0; i < columns; ++i) {
      const Known& known = targets_.at(member_of(record, i));
      if (known.state.usable) {
        out.spent += known.state.spent ? 1 : 0;
        out.fill = std::max(out.fill, fill(known));
      } else {
        ++out.unusable;
      }
    }
    return out;
  };
  // Of two records the one with fewer absent members, then with fewer spent ones, then the one whose fullest has more
  // room.  One has its turn, the other is drawn: neighbours are alike, and would always be weighed against each other.
  const std::size_t others = records_.size() - 1;
  const Record& a = records_[cursor_];
  const Record& b =
      records_[others == 0 ? 0 : (cursor_ + 1 + Rng(stripe | record_draw).below(others)) % records_.size()];
  const Look at_a = look(a);
  const Look at_b = look(b);
  const bool second =
      std::tuple(at_b.unusable, at_b.spent, at_b.fill) < std::tuple(at_a.unusable, at_a.spent, at_a.fill);
  cursor_ = (cursor_ + 1) % records_.size();
  const Record& record = second ? b : a;

  Choice choice;
  for (std::uint32_t i = 0; i < columns; ++i) choice.targets.push_back(member_of(record, i));
  for (Target& target : choice.targets) {
    const bool can = usable(target);
    if (can && !spent(target)) continue;
    std::vector<Target> taken;  // by columns that can be written
    for (const Target& other : choice.targets) {
      if (&other != &target && usable(other)) taken.push_back(other);
    }
    const auto other = substitute(stripe, taken, {});
    if (other && (!can || !spent(*other))) target = *other;
    if (!usable(target)) {
      ++choice.unreachable;
    } else if (spent(target)) {
      ++choice.spent;
    }
  }
  if (choice.unreachable > form.parity_columns) return std::nullopt;
  slow_start(stripe, choice.targets, now);
  return choice;
}

std::optional<Target> Placements::substitute(std::uint64_t stripe, std::span<const Target> others,
                                             std::span<const Target> not_these) const {
  using Rank = std::pair<Crowd, bool>;
  std::optional<Rank> best_rank;
  std::vector<Target> best_ones;
  for (const auto& [target, known] : targets_) {
    if (!known.state.usable) continue;
    if (std::find(not_these.begin(), not_these.end(), target) != not_these.end()) continue;
    const Rank rank{crowd(target, others), known.state.spent};
    if (std::get<0>(rank.first) > 0 && !options_.lab) continue;
    if (best_rank && *best_rank < rank) continue;
    if (best_rank != rank) best_ones.clear();
    best_rank = rank;
    best_ones.push_back(target);
  }
  if (best_ones.empty()) return std::nullopt;
  Rng rng(stripe | substitute_draw);
  const std::uint64_t first = rng.below(best_ones.size());
  if (best_ones.size() == 1) return best_ones[first];
  std::uint64_t second = rng.below(best_ones.size() - 1);
  if (second >= first) ++second;
  const auto fill_of = [&](std::uint64_t i) { return fill(targets_.at(best_ones[i])); };
  return best_ones[fill_of(second) < fill_of(first) ? second : first];
}

std::size_t Placements::nodes_usable() const {
  std::set<std::uint32_t> nodes;
  for (const auto& [target, known] : targets_) {
    if (known.state.usable) nodes.insert(target.store);
  }
  return nodes.size();
}

std::string Placements::unwritten() const {
  const std::uint32_t width = options_.geometry.columns();
  const std::size_t known = nodes();
  const std::size_t usable = nodes_usable();
  const bool none = known < width && !options_.lab;  // there are no records
  // What is short of no more than its parity is written without it.
  if (usable < (options_.lab ? 1 : options_.geometry.data_columns)) {
    if (none || usable == 0) return lack() + ": nothing is written to the store";
    return lack() + ": stripes of more than " + std::to_string(usable) +
           " pages are not written to the store";
  }
  if (!none) return {};
  return options_.geometry.text() + " wants " + std::to_string(width) + " store nodes, " +
         std::to_string(known) + " are known: nothing is written to the store";
}

std::string Placements::shortage() const {
  if (std::string text = unwritten(); !text.empty()) return text;
  const std::uint32_t width = options_.geometry.columns();
  const std::size_t known = nodes();
  const std::string text = options_.geometry.text();
  if (known < width) {
    return text + " wants " + std::to_string(width) + " store nodes, " + std::to_string(known) +
           " are known: several columns of a stripe share a node (store.lab)";
  }
  if (options_.geometry.parity_columns == 0) return {};
  std::set<std::string> racks;
  for (const auto& [target, state] : targets_) {
    if (!state.state.labels.rack.empty()) racks.insert(state.state.labels.rack);
  }
  const std::uint32_t parity = options_.geometry.parity_columns;
  const std::uint32_t wanted = (width + parity - 1) / parity;
  if (racks.size() > 1 && racks.size() < wanted) {
    return text + " wants " + std::to_string(wanted) + " racks to survive the loss of one, " +
           std::to_string(racks.size()) + " are known";
  }
  return {};
}

std::string Placements::lack() const {
  const std::size_t usable = nodes_usable();
  const std::uint32_t width = options_.geometry.columns();
  if (usable >= (options_.lab ? 1 : width)) return {};
  return options_.geometry.text() + " wants " + std::to_string(width) + " store nodes, " +
         std::to_string(usable) + " take columns";
}

}  // namespace di::directory
