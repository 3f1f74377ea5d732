#include "host/fetch.h"

#include <algorithm>
#include <iterator>

namespace di::host {

Fetches::Fetches(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port,
                 const Peers& peers, Fillings& fillings, Leases& leases, Numbers& numbers, Outbox& out)
    : limits_(limits),
      pages_(pages),
      entries_(entries),
      port_(port),
      peers_(peers),
      fillings_(fillings),
      leases_(leases),
      numbers_(numbers),
      out_(out) {}

void Fetches::begin(const Holder& holder, const wire::Scope& scope, Want want, const Now& now) {
  const FetchKind kind = want.kind;
  const Name name{holder, kind};
  if (const auto known = names_.find(name); known != names_.end()) {
    // Asked again: the answer is the same, and comes when it is known.
    const Fetch& fetch = fetches_.at(known->second);
    if (fetch.entry != 0) send_fetching(fetch, Code::ok);
    return;
  }
  Fetch fresh;
  fresh.name = name;
  fresh.scope = scope;
  fresh.priority = want.priority;
  fresh.started = now.product;
  if (kind == FetchKind::prefetch) {
    fresh.expires = now.product + limits_.prefetch_hold;
  } else {
    fresh.deadline = now.liveness +
                     (scope.deadline_ms > 0 ? Duration(milliseconds(scope.deadline_ms)) : limits_.fetch_wait);
  }
  if (fetches_.size() >= limits_.fetches_max || want.keys.size() > limits_.keys_max || !pages_.has_layout()) {
    if (kind == FetchKind::fetch) send_fetching(fresh, Code::busy);
    return;
  }
  fresh.keys = std::move(want.keys);
  if (!want.compute.empty() && makes_sense(want.compute[0], fresh.keys.size()))
    fresh.compute = want.compute[0];
  const FetchId id = next_fetch_++;
  Fetch& fetch = fetches_.emplace(id, std::move(fresh)).first->second;
  names_.emplace(name, id);
  if (kind == FetchKind::prefetch) {
    ++counters_.prefetches;
    prefetches_.emplace(scope.request, scope.attempt, id);
  }
  if (kind == FetchKind::fetch) books_.matched += fetch.keys.size();

  const Gap gap = extend(id, fetch, nullptr, PlanPages(nullptr));
  if (kind == FetchKind::fetch) {
    counters_.arena_blocks += fetch.blocks;
    for (const Piece& piece : fetch.pieces) {
      const Page& page = pages_.at(piece.slot);
      if (page.state == PageState::sealed && !page.stored) sighted_.push_back(piece.slot);
    }
  }
  if (gap != Gap::absent) {
    settle_plan(id, nullptr, gap, now);
    return;
  }
  if (!peers_.meta_up()) {
    ++counters_.plans_failed;
    settle_plan(id, nullptr, Gap::unreachable, now);
    return;
  }
  const std::uint64_t tag = numbers_.tag++;
  fetch.plan = tag;
  plans_.emplace(tag, Plan{id, now.liveness + limits_.plan_wait});
  ++counters_.plans;
  wire::meta_plan question;
  question.keys.assign(fetch.keys.begin() + fetch.blocks, fetch.keys.end());
  to_meta(tag_request(tag), question);
}

Fetches::PlanPages::PlanPages(const wire::meta_planned* plan) {
  if (plan == nullptr) return;
  for (const wire::PlannedPage& page : plan->pages) {
    for (const Key& key : page.keys) by_key.try_emplace(key, &page);
  }
}

const wire::PlannedPage* Fetches::PlanPages::find(const Key& key) const {
  const auto found = by_key.find(key);
  return found == by_key.end() ? nullptr : found->second;
}

Gap Fetches::extend(FetchId id, Fetch& fetch, const wire::meta_planned* plan, const PlanPages& pages) {
  Fillings::Stripes stripes;
  if (plan != nullptr) stripes = fillings_.stripes_of(*plan);
  while (fetch.blocks < fetch.keys.size()) {
    const std::vector<Piece> pieces = pages_.cover(fetch.keys, fetch.blocks, true);
    for (const Piece& piece : pieces) {
      if (!add_piece(id, fetch, piece)) return Gap::no_room;
    }
    if (!pieces.empty()) continue;
    const wire::PlannedPage* page = pages.find(fetch.keys[fetch.blocks]);
    if (page == nullptr) break;
    const bool whole = page->keys.front() == fetch.keys[fetch.blocks];
    const Key parent = whole && fetch.blocks > 0 ? fetch.keys[fetch.blocks - 1] : Key{};
    if (const Gap gap = add_filling(id, fetch, *page, parent, plan->lease, stripes); gap != Gap::none)
      return gap;
  }
  return fetch.blocks == fetch.keys.size() ? Gap::none : Gap::absent;
}

bool Fetches::add_piece(FetchId id, Fetch& fetch, const Piece& piece) {
  const Page& page = pages_.at(piece.slot);
  if (fetch.kind() == FetchKind::prefetch) {
    if (prefetch_bytes_ + page.place.bytes > prefetch_bytes_max()) return false;
    prefetch_bytes_ += page.place.bytes;
  }
  pages_.pin(fetch.pins, piece.slot);
  if (page.state == PageState::filling) {
    waiters_[piece.slot].push_back({id, static_cast<std::uint32_t>(fetch.pieces.size())});
    if (fillings_.opener(piece.slot) != id) fetch.bringing.shared = true;
    fillings_.hurry(piece.slot, fetch.priority);
  }
  fetch.pieces.push_back(piece);
  fetch.blocks = piece.at + piece.count;
  return true;
}

Gap Fetches::add_filling(FetchId id, Fetch& fetch, const wire::PlannedPage& page, const Key& parent,
                         std::uint64_t lease, Fillings::Stripes& stripes) {
  Fillings::Want want{
      .page = page, .parent = parent, .lease = lease, .opener = id, .priority = fetch.priority};
  if (fetch.kind() == FetchKind::prefetch)
    want.room_bytes_max = prefetch_bytes_max() - std::min(prefetch_bytes_max(), prefetch_bytes_);
  const Fillings::Begun begun = fillings_.begin(want, stripes);
  if (begun.gap != Gap::none) return begun.gap;
  fetch.bringing.bytes[static_cast<std::size_t>(begun.place)] += begun.bytes;
  if (fetch.kind() == FetchKind::prefetch) counters_.prefetched_blocks += page.page_blocks;
  return Gap::none;
}

void Fetches::planned(std::uint64_t tag, const wire::meta_planned& plan, const Now& now) {
  leases_.hold(plan.lease, plan.ttl_ms, now);
  const auto found = plans_.find(tag);
  if (found != plans_.end()) {
    const FetchId id = found->second.fetch;
    plans_.erase(found);
    settle_plan(id, &plan, Gap::none, now);
  }
  // Given back when nothing is read under it: the fetch is gone, or needs only what the arena has.
  leases_.drop(plan.lease);
}

void Fetches::settle_plan(FetchId id, const wire::meta_planned* plan, Gap missing, const Now& now) {
  Fetch& fetch = fetches_.at(id);
  DI_ASSERT(fetch.state == FetchState::planning);
  fetch.plan = 0;
  const PlanPages pages(plan);
  cut(id, fetch, pages, missing == Gap::unreachable ? Lost::timeout : Lost::evicted, now);
  fetch.bringing.since = now.liveness;
  fetch.bringing.queued = fillings_.coming_bytes();
  const Gap gap = extend(id, fetch, plan, pages);
  if (plan != nullptr) missing = gap;
  fetch.state = FetchState::filling;
  fetch.active = static_cast<std::uint32_t>(fetch.pieces.size());
  while (fetch.active > 0 && fetch.pieces[fetch.active - 1].at >= fetch.failed_block) --fetch.active;
  count_ready(fetch);
  if (fetch.kind() == FetchKind::fetch) {
    const Lost why = missing == Gap::unreachable ? Lost::timeout : Lost::evicted;
    books_.lost[static_cast<std::size_t>(why)] += fetch.keys.size() - fetch.blocks;
    if (!answer(fetch, missing == Gap::no_room)) {
      books_.lost[static_cast<std::size_t>(Lost::evicted)] += fetch.blocks;
      fetch.failed_block = 0;  // nothing is left that forget() would count
      forget(id, false, now);
      return;
    }
    if (fetch.failed_block != wire::block_none) {
      books_.lost[static_cast<std::size_t>(fetch.failed_why)] += fetch.blocks - fetch.end();
    }
  } else if (fetch.kind() == FetchKind::prefetch && fetch.blocks == 0) {
    forget(id, false, now);
    return;
  }
  advance(fetch, now);
}

bool Fetches::answer(Fetch& fetch, bool no_room) {
  if (fetch.blocks == 0) {
    send_fetching(fetch, no_room ? Code::busy : Code::ok);
    return false;
  }
  const Result<std::uint32_t> entry = entries_.take();
  if (!entry) {
    send_fetching(fetch, Code::busy);
    return false;
  }
  fetch.entry = *entry;
  port_.entry_open(fetch.entry);
  send_fetching(fetch, Code::ok);
  return true;
}

void Fetches::send_fetching(const Fetch& fetch, Code code) {
  wire::kv_fetching answer;
  answer.code = static_cast<std::uint16_t>(code);
  answer.computed_blocks = fetch.computed_blocks;
  if (fetch.entry != 0) {
    answer.entry = fetch.entry;
    answer.blocks = fetch.blocks;
    for (const Piece& piece : fetch.pieces) answer.slots.push_back(pages_.ref(piece));
  }
  to_client(fetch, answer);
}

void Fetches::count_ready(Fetch& fetch) const {
  fetch.ready.fill(0);
  for (std::uint32_t i = 0; i < fetch.active; ++i) {
    const std::uint32_t groups = pages_.at(fetch.pieces[i].slot).groups;
    for (std::uint32_t g = 0; g < groups; ++g) ++fetch.ready[g];
  }
}

std::uint32_t Fetches::groups_verified(const Fetch& fetch) const {
  const std::uint32_t all = pages_.layout().groups();
  std::uint32_t groups = 0;
  while (groups < all && fetch.ready[groups] == fetch.active) ++groups;
  return groups;
}

std::uint32_t Fetches::groups_allowed(const Fetch& fetch, const Now& now) const {
  const std::uint32_t all = pages_.layout().groups();
  if (limits_.fetch_delay <= Duration(0)) return all;
  const std::int64_t passed = (now.product - fetch.started) / limits_.fetch_delay;
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(passed, 0, all));
}

void Fetches::advance(Fetch& fetch, const Now& now) {
  if (fetch.state == FetchState::planning) return;
  const std::uint32_t all = pages_.layout().groups();
  const std::uint32_t verified = groups_verified(fetch);
  if (fetch.state == FetchState::filling && verified == all) {
    fetch.state = FetchState::complete;
    fetch.deadline = instant_never;
    observe(fetch, now);
    if (fetch.kind() == FetchKind::fetch) books_.fetched += fetch.end();
  }
  if (fetch.entry == 0) return;
  const std::uint32_t groups = std::max(fetch.shown_groups, std::min(verified, groups_allowed(fetch, now)));
  if (groups == fetch.shown_groups && fetch.failed_block == fetch.shown_failed) return;
  fetch.shown_groups = groups;
  fetch.shown_failed = fetch.failed_block;
  port_.entry_set(fetch.entry, {groups, fetch.failed_block});
  wire::kv_ready ready;
  ready.entry = fetch.entry;
  ready.groups = groups;
  ready.failed_block = fetch.failed_block;
  ready.complete = groups == all;
  to_client(fetch, ready);
}

void Fetches::fail_from(Fetch& fetch, std::uint32_t block, Lost why, const Now& now) {
  if (fetch.state != FetchState::filling || block >= fetch.end()) return;
  if (fetch.kind() == FetchKind::fetch) books_.lost[static_cast<std::size_t>(why)] += fetch.end() - block;
  fetch.failed_block = block;
  while (fetch.active > 0 && fetch.pieces[fetch.active - 1].at >= block) --fetch.active;
  count_ready(fetch);
  advance(fetch, now);
}

void Fetches::release(FetchKind kind, const Holder& holder, bool by_client, const Now& now) {
  if (const auto found = names_.find({holder, kind}); found != names_.end())
    forget(found->second, by_client, now);
}

const PinSet* Fetches::pins_of(const Holder& holder) const {
  const auto found = names_.find({holder, FetchKind::fetch});
  return found == names_.end() ? nullptr : &fetches_.at(found->second).pins;
}

bool Fetches::another_fetches(const Holder& holder) const {
  return std::any_of(names_.begin(), names_.end(), [&](const auto& named) {
    const auto& [other, kind] = named.first;
    return kind == FetchKind::fetch && other.request == holder.request && other.attempt == holder.attempt &&
           other.client != holder.client;
  });
}

void Fetches::release_prefetch(const RequestId& request, std::uint16_t attempt, const Now& now) {
  auto found = prefetches_.lower_bound({request, attempt, 0});
  while (found != prefetches_.end() && std::get<0>(*found) == request && std::get<1>(*found) == attempt) {
    const FetchId id = std::get<2>(*found);
    ++found;
    forget(id, false, now);
  }
}

void Fetches::forget(FetchId id, bool by_client, const Now& now) {
  const auto found = fetches_.find(id);
  Fetch fetch = std::move(found->second);
  fetches_.erase(found);
  names_.erase(fetch.name);
  if (fetch.plan != 0) plans_.erase(fetch.plan);
  if (fetch.state == FetchState::filling && fetch.failed_block == wire::block_none) observe(fetch, now);
  if (fetch.kind() == FetchKind::fetch) {
    switch (fetch.state) {
      case FetchState::planning:
        books_.lost[static_cast<std::size_t>(Lost::cancelled)] += fetch.keys.size();
        break;
      case FetchState::filling:
        books_.lost[static_cast<std::size_t>(Lost::cancelled)] += fetch.end();
        break;
      case FetchState::complete:
        (by_client && fetch.shown_groups == pages_.layout().groups() ? books_.swapped : books_.unused) +=
            fetch.end();
        break;
    }
  }
  if (fetch.kind() == FetchKind::prefetch) {
    prefetches_.erase({fetch.scope.request, fetch.scope.attempt, id});
    for (const Piece& piece : fetch.pieces) prefetch_bytes_ -= pages_.at(piece.slot).place.bytes;
  }
  if (fetch.entry != 0) {
    port_.entry_close(fetch.entry);
    entries_.give_back(fetch.entry);
  }
  for (const Piece& piece : fetch.pieces) stop_waiting(id, piece.slot);
  fillings_.unpin(fetch.pins);
}

void Fetches::stop_waiting(FetchId id, std::uint32_t slot) {
  const auto waiting = waiters_.find(slot);
  if (waiting == waiters_.end()) return;
  std::erase_if(waiting->second, [&](const Waiter& waiter) { return waiter.fetch == id; });
  if (waiting->second.empty()) waiters_.erase(waiting);
}

void Fetches::meta_lost(const Now& now) {
  const std::map<std::uint64_t, Plan> plans = std::exchange(plans_, {});
  for (const auto& [tag, plan] : plans) {
    ++counters_.plans_failed;
    settle_plan(plan.fetch, nullptr, Gap::unreachable, now);
  }
}

// ---- Pages that come -------------------------------------------------------------------------------------

void Fetches::filling_progress(const Fillings::Progress& progress, const Now& now) {
  if (progress.failed) {
    page_failed(progress.slot, *progress.failed, now);
  } else {
    page_moved(progress.slot, progress.group, now);
  }
}

void Fetches::page_moved(std::uint32_t slot, std::uint32_t group, const Now& now) {
  const auto found = waiters_.find(slot);
  if (found == waiters_.end()) return;
  const std::vector<Waiter> waiters = found->second;
  if (group + 1 == pages_.layout().groups()) waiters_.erase(found);
  for (const Waiter& waiter : waiters) {
    Fetch& fetch = fetches_.at(waiter.fetch);
    // A fetch that still plans counts when it is done with that.
    if (fetch.state == FetchState::planning || waiter.piece >= fetch.active) continue;
    ++fetch.ready[group];
    advance(fetch, now);
  }
}

void Fetches::page_failed(std::uint32_t slot, Lost why, const Now& now) {
  const auto found = waiters_.find(slot);
  if (found == waiters_.end()) return;
  const std::vector<Waiter> waiters = std::move(found->second);
  waiters_.erase(found);
  for (const Waiter& waiter : waiters) {
    Fetch& fetch = fetches_.at(waiter.fetch);
    const std::uint32_t block = fetch.pieces[waiter.piece].at;
    if (fetch.state != FetchState::planning) {
      fail_from(fetch, block, why, now);
    } else if (block < fetch.failed_block) {  // counted when the plan is settled
      fetch.failed_block = block;
      fetch.failed_why = why;
    }
  }
}

void Fetches::on_time(const Now& now) {
  std::vector<std::uint64_t> due;
  for (const auto& [tag, plan] : plans_) {
    if (plan.deadline <= now.liveness) due.push_back(tag);
  }
  for (const std::uint64_t tag : due) {
    const FetchId id = plans_.at(tag).fetch;
    plans_.erase(tag);
    ++counters_.plans_failed;
    settle_plan(id, nullptr, Gap::unreachable, now);
  }

  due.clear();
  for (const auto& [id, fetch] : fetches_) {
    if (fetch.deadline <= now.liveness || fetch.expires <= now.product) due.push_back(id);
  }
  for (const FetchId id : due) {
    Fetch& fetch = fetches_.at(id);
    if (fetch.expires <= now.product) {
      forget(id, false, now);
      continue;
    }
    fetch.deadline = instant_never;
    if (fetch.state == FetchState::planning) {
      plans_.erase(fetch.plan);
      ++counters_.plans_failed;
      settle_plan(id, nullptr, Gap::unreachable, now);
      if (!fetches_.contains(id)) continue;
      fetch.deadline = instant_never;
    }
    for (std::uint32_t i = 0; i < fetch.active; ++i) {
      if (pages_.at(fetch.pieces[i].slot).groups == pages_.layout().groups()) continue;
      fail_from(fetch, fetch.pieces[i].at, Lost::timeout, now);
      break;
    }
  }

  if (limits_.fetch_delay > Duration(0)) {
    for (auto& [id, fetch] : fetches_) advance(fetch, now);
  }
}

Due Fetches::next_due() const {
  Due due;
  for (const auto& [tag, plan] : plans_) due.sooner_liveness(plan.deadline);
  for (const auto& [id, fetch] : fetches_) {
    due.sooner_liveness(fetch.deadline);
    due.sooner_product(fetch.expires);
    if (fetch.entry == 0 || limits_.fetch_delay <= Duration(0)) continue;
    if (fetch.shown_groups < groups_verified(fetch)) {
      due.sooner_product(fetch.started + limits_.fetch_delay * (fetch.shown_groups + 1));
    }
  }
  return due;
}

std::size_t Fetches::fetches(FetchKind kind) const {
  return static_cast<std::size_t>(std::count_if(
      fetches_.begin(), fetches_.end(), [&](const auto& item) { return item.second.kind() == kind; }));
}

std::size_t Fetches::pins() const {
  std::size_t count = 0;
  for (const auto& [id, fetch] : fetches_) count += fetch.pins.slots.size();
  return count;
}

std::size_t Fetches::entries() const {
  return static_cast<std::size_t>(std::count_if(fetches_.begin(), fetches_.end(),
                                                [](const auto& item) { return item.second.entry != 0; }));
}

std::vector<Holder> Fetches::holders() const {
  std::vector<Holder> all;
  for (const auto& [name, id] : names_) all.push_back(name.first);
  return all;
}

Status Fetches::check(std::map<std::uint32_t, std::uint32_t>& pins) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  std::uint64_t open = 0;
  std::uint64_t held = 0;
  std::uint64_t prefetch_bytes = 0;
  std::size_t prefetches = 0;
  std::size_t planning = 0;
  for (const auto& [id, fetch] : fetches_) {
    if (fetch.pins.slots.size() != fetch.pieces.size())
      return broken("a fetch pins other pages than its pieces");
    std::uint32_t at = 0;
    for (std::uint32_t i = 0; i < fetch.pieces.size(); ++i) {
      const Piece& piece = fetch.pieces[i];
      ++pins[piece.slot];
      if (piece.at != at) return broken("the pieces of a fetch have a gap");
      at += piece.count;
      if (!pages_.all().contains(piece.slot)) return broken("a fetch names a free slot");
      const Page& page = pages_.at(piece.slot);
      if (fetch.kind() == FetchKind::prefetch) prefetch_bytes += page.place.bytes;
      if (page.state == PageState::granted) return broken("a fetch waits for a page that a rank writes");
      if (page.state == PageState::quarantined && piece.at < fetch.failed_block) {
        return broken("a page failed and its fetch does not know");
      }
      if (fetch.state == FetchState::complete && i < fetch.active && page.state != PageState::sealed) {
        return broken("a fetch is complete and a page is not");
      }
    }
    if (at != fetch.blocks || fetch.blocks > fetch.keys.size())
      return broken("the blocks of a fetch are miscounted");
    if (fetch.state == FetchState::planning) {
      ++planning;
      if (!plans_.contains(fetch.plan)) return broken("a fetch waits for a plan that nobody asked for");
    } else {
      Fetch copy = fetch;
      count_ready(copy);
      if (copy.ready != fetch.ready) return broken("ready groups are miscounted");
      if (fetch.shown_groups > groups_verified(fetch))
        return broken("a group is shown before it is verified");
    }
    if (fetch.kind() == FetchKind::prefetch) ++prefetches;
    if (fetch.entry != 0 && !entries_.current(fetch.entry)) return broken("a fetch's entry is free");
    if (fetch.kind() == FetchKind::fetch) {
      if (fetch.state == FetchState::planning) open += fetch.keys.size();
      if (fetch.state == FetchState::filling) open += fetch.end();
      if (fetch.state == FetchState::complete) held += fetch.end();
    }
  }
  if (planning != plans_.size()) return broken("a plan has no fetch");
  if (names_.size() != fetches_.size() || prefetches != prefetches_.size())
    return broken("a fetch has lost its name");
  if (prefetch_bytes != prefetch_bytes_) return broken("prefetched bytes are miscounted");
  std::uint64_t lost = 0;
  for (const std::uint64_t blocks : books_.lost) lost += blocks;
  if (books_.matched != books_.fetched + lost + open) return broken("matched is not fetched plus lost");
  if (books_.fetched != books_.swapped + books_.unused + held)
    return broken("fetched is not swapped plus unused");

  for (const auto& [slot, waiters] : waiters_) {
    if (!fillings_.has(slot)) return broken("a fetch waits for a page that does not come");
    for (const Waiter& waiter : waiters) {
      const auto fetch = fetches_.find(waiter.fetch);
      if (fetch == fetches_.end() || fetch->second.pieces[waiter.piece].slot != slot) {
        return broken("a waiter is gone");
      }
    }
  }
  return {};
}

}  // namespace di::host
