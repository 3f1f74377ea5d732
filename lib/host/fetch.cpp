#include "host/fetch.h"

#include <algorithm>
#include <iterator>

namespace di::host {

namespace {

Lost lost_of(std::uint16_t code) {
  switch (static_cast<Code>(code)) {
    case Code::corrupt:
      return Lost::checksum;
    case Code::not_found:
      return Lost::evicted;
    case Code::cancelled:
    case Code::stale:
      return Lost::cancelled;
    case Code::ok:
    case Code::invalid:
    case Code::exists:
    case Code::busy:
    case Code::timeout:
    case Code::unreachable:
    case Code::unsupported:
    case Code::denied:
    case Code::io:
    case Code::no_space:
    case Code::over_quota:
    case Code::over_budget:
      return Lost::timeout;
  }
  return Lost::timeout;  // a code of a later version
}

}  // namespace

Fetches::Fetches(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port, const Peers& peers,
                 Reads& reads, Rebuilds& rebuilds, Leases& leases, Hedge& hedge, Numbers& numbers, Outbox& out)
    : limits_(limits),
      pages_(pages),
      entries_(entries),
      port_(port),
      peers_(peers),
      reads_(reads),
      rebuilds_(rebuilds),
      leases_(leases),
      hedge_(hedge),
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

Fetches::Gap Fetches::extend(FetchId id, Fetch& fetch, const wire::meta_planned* plan, const PlanPages& pages) {
  Stripes stripes;
  if (plan != nullptr) stripes = stripes_of(*plan);
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
    if (const Gap gap = add_filling(id, fetch, *page, parent, *plan, stripes); gap != Gap::none) return gap;
  }
  return fetch.blocks == fetch.keys.size() ? Gap::none : Gap::absent;
}

bool Fetches::add_piece(FetchId id, Fetch& fetch, const Piece& piece) {
  const Page& page = pages_.at(piece.slot);
  if (fetch.kind() == FetchKind::prefetch) {
    if (prefetch_bytes_ + page.place.bytes > pages_.bytes_total() / limits_.prefetch_share) return false;
    prefetch_bytes_ += page.place.bytes;
  }
  pages_.pin(fetch.pins, piece.slot);
  if (page.state == PageState::filling) {
    waiters_[piece.slot].push_back({id, static_cast<std::uint32_t>(fetch.pieces.size())});
    if (fillings_.at(piece.slot).opener != id) fetch.bringing.shared = true;
    // Somebody in more of a hurry joins: its reads move forward in their queues.
    for (const Part& part : fillings_.at(piece.slot).parts) {
      if (part.transfer != 0) reads_.prioritise(part.transfer, fetch.priority);
    }
  }
  fetch.pieces.push_back(piece);
  fetch.blocks = piece.at + piece.count;
  return true;
}

Fetches::Stripes Fetches::stripes_of(const wire::meta_planned& plan) {
  Stripes stripes;
  for (const wire::PlannedStripe& planned : plan.stripes) {
    Result<std::shared_ptr<StripePlan>> made = StripePlan::of(pages_.layout(), planned);
    if (!made) {
      ++counters_.plans_malformed;
      continue;
    }
    for (const wire::PlannedPage& page : plan.pages) {
      const std::uint64_t index = page.page & 0xff;
      if (page.page >> 8 == planned.stripe && index < (*made)->first_keys.size() && !page.keys.empty())
        (*made)->first_keys[index] = page.keys.front();
    }
    const StripePlan& stripe = **made;
    Planned& known = stripes[planned.stripe];
    // To make a column costs no more reads when all the others come anyway.
    const bool all_wanted = std::count(stripe.first_keys.begin(), stripe.first_keys.end(), Key{}) == 0;
    const auto readable = static_cast<std::uint32_t>(
        std::count_if(stripe.columns.begin(), stripe.columns.end(), [&](const wire::Column& column) {
          return peers_.store_up(column.instance).has_value();
        }));
    if (all_wanted && readable > stripe.shape.data_stored())
      known.spare = std::min(readable - stripe.shape.data_stored(), Rebuilds::hedge_reads_max);
    known.stripe = *std::move(made);
  }
  return stripes;
}

Fetches::Gap Fetches::add_filling(FetchId id, Fetch& fetch, const wire::PlannedPage& page, const Key& parent,
                                  const wire::meta_planned& plan, Stripes& stripes) {
  const kv::Layout& layout = pages_.layout();
  const auto malformed = [&] {
    ++counters_.plans_malformed;
    return Gap::absent;
  };
  if (page.page_blocks == 0 || page.page_blocks > layout.page_blocks() ||
      page.keys.size() != page.page_blocks || page.crcs.size() != layout.groups()) {
    return malformed();
  }
  Filling filling;
  filling.opener = id;
  filling.page = page.page;
  filling.lease = plan.lease;
  filling.priority = fetch.priority;
  filling.index = static_cast<std::uint32_t>(page.page & 0xff);
  filling.parts.resize(1);
  filling.parts[0].column = static_cast<std::uint16_t>(filling.index);
  const auto stripe = stripes.find(page.page >> 8);
  if (stripe != stripes.end()) {
    const kv::StripeShape& shape = stripe->second.stripe->shape;
    if (filling.index >= shape.pages() || shape.page_blocks(filling.index) != page.page_blocks) return malformed();
    filling.stripe = stripe->second.stripe;
    filling.parts.resize(shape.parts());
    for (std::uint32_t i = 0; i < shape.parts(); ++i)
      filling.parts[i].column = static_cast<std::uint16_t>(filling.index * shape.parts() + i);
  }
  Gap gap = Gap::absent;
  std::vector<std::optional<Reads::Want>> wants(filling.parts.size());
  for (const wire::Column& column : page.columns) {
    for (std::size_t i = 0; i < filling.parts.size(); ++i) {
      // A column elsewhere does not help.
      if (filling.parts[i].column != column.column) continue;
      gap = Gap::unreachable;
      if (const std::optional<Peer> store = peers_.store_up(column.instance)) {
        wants[i].emplace();
        wants[i]->source = *store;
        wants[i]->message.volume = column.volume;
        wants[i]->message.column = column.column;
      }
    }
  }
  if (std::count(wants.begin(), wants.end(), std::nullopt) > 0) {
    // Not in the store (yet), or not all of it: out of the arena that has it, or made of other columns.
    std::optional<Peer> arena;
    for (const std::string& host : page.arenas) {
      if (!arena) arena = peers_.arena_up(host);
    }
    if (arena) {
      filling.arena = true;
      filling.stripe = nullptr;
      filling.parts.resize(1);
      wants.assign(1, Reads::Want{});
      wants[0]->source = *arena;
      wants[0]->arena = true;
    } else if (!filling.stripe || filling.stripe->shape.parity_columns() == 0) {
      return gap;
    } else {
      const auto& columns = filling.stripe->columns;
      const auto readable = std::count_if(columns.begin(), columns.end(), [&](const wire::Column& column) {
        return peers_.store_up(column.instance).has_value();
      });
      if (readable < filling.stripe->shape.data_stored()) return Gap::unreachable;
    }
  }
  if (fetch.kind() == FetchKind::prefetch &&
      prefetch_bytes_ + pages_.room_bytes(page.page_blocks) > pages_.bytes_total() / limits_.prefetch_share) {
    return Gap::no_room;
  }
  const std::uint32_t blocks[] = {page.page_blocks};
  const Result<std::vector<std::uint32_t>> slots = pages_.take(blocks, PageState::filling);
  if (!slots) return Gap::no_room;
  const std::uint32_t slot = slots->front();
  pages_.announce(slot, parent, page.keys, page.crcs, true);
  const std::uint64_t bytes = layout.page_bytes(page.page_blocks);
  const std::size_t place = filling.place();
  fetch.bringing.bytes[place] += bytes;
  coming_bytes_[place] += bytes;

  Filling& added = fillings_.emplace(slot, std::move(filling)).first->second;
  bool whole = true;
  for (std::uint32_t i = 0; i < added.parts.size(); ++i) {
    Part& part = added.parts[i];
    if (wants[i] && added.stripe && stripe->second.spare > 0 &&
        hedge_.skip({wants[i]->source.instance, wants[i]->message.volume}, added.stripe->sources)) {
      --stripe->second.spare;
      part.skipped = true;
    } else if (wants[i]) {
      wants[i]->key = page.keys.front();
      start_read(slot, i, *wants[i]);
      continue;
    }
    part.missing = true;
    whole = false;
  }
  if (!whole) rebuilds_.add(added.stripe, slot, added.index, parts_of(added), added.priority, added.lease);
  if (fetch.kind() == FetchKind::prefetch) counters_.prefetched_blocks += page.page_blocks;
  return Gap::none;
}

void Fetches::start_read(std::uint32_t slot, std::uint32_t part, Reads::Want want) {
  Filling& filling = fillings_.at(slot);
  Part& read = filling.parts[part];
  const std::uint32_t blocks = pages_.at(slot).blocks;
  want.lease = filling.lease;
  want.message.stripe = filling.page >> 8;
  want.message.page_blocks = blocks;
  want.message.slot = pages_.ref({slot, 0, blocks, 0});
  want.message.priority = filling.priority;
  if (!filling.arena) {
    hedge_.asked({want.source.instance, want.message.volume});
    if (filling.stripe && filling.stripe->shape.parity_columns() > 0)
      read.late_after = hedge_.late_after(column_bytes(filling, read, blocks), filling.stripe->sources);
  }
  read.transfer = reads_.start(want);
  by_transfer_.emplace(read.transfer, PartName{slot, part});
}

std::uint64_t Fetches::column_bytes(const Filling& filling, const Part& part, std::uint32_t blocks) const {
  return filling.stripe ? filling.stripe->shape.column_bytes(part.column) : pages_.layout().page_bytes(blocks);
}

std::vector<Rebuilds::Part> Fetches::parts_of(const Filling& filling) const {
  std::vector<Rebuilds::Part> parts;
  for (const Part& part : filling.parts) parts.push_back({part.groups, part.missing, part.skipped});
  return parts;
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
  fetch.bringing.queued = coming_bytes_;
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
  if (const auto found = names_.find({holder, kind}); found != names_.end()) forget(found->second, by_client, now);
}

const PinSet* Fetches::pins_of(const Holder& holder) const {
  const auto found = names_.find({holder, FetchKind::fetch});
  return found == names_.end() ? nullptr : &fetches_.at(found->second).pins;
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
  unpin(fetch.pins);
}

void Fetches::stop_waiting(FetchId id, std::uint32_t slot) {
  const auto waiting = waiters_.find(slot);
  if (waiting == waiters_.end()) return;
  std::erase_if(waiting->second, [&](const Waiter& waiter) { return waiter.fetch == id; });
  if (waiting->second.empty()) waiters_.erase(waiting);
}

void Fetches::unpin(PinSet& pins) {
  const std::vector<std::uint32_t> slots = pins.slots;
  pages_.unpin(pins);
  for (const std::uint32_t slot : slots) {
    if (!fillings_.contains(slot) || pages_.at(slot).pins > 0) continue;
    end_filling(slot);
    pages_.spoil(slot);
  }
}

void Fetches::meta_lost(const Now& now) {
  const std::map<std::uint64_t, Plan> plans = std::exchange(plans_, {});
  for (const auto& [tag, plan] : plans) {
    ++counters_.plans_failed;
    settle_plan(plan.fetch, nullptr, Gap::unreachable, now);
  }
}

// ---- Pages that come -------------------------------------------------------------------------------------

void Fetches::read_progress(const Reads::Progress& progress, const Now& now) {
  const auto named = by_transfer_.find(progress.transfer);
  if (named == by_transfer_.end()) return;
  const auto [slot, number] = named->second;
  Filling& filling = fillings_.at(slot);
  Part& part = filling.parts[number];
  if (progress.code != Code::ok) {
    by_transfer_.erase(named);
    part.transfer = 0;
    if (!filling.arena) reads_.report(filling.page, part.column, progress.code);
    return part_lost(slot, number, lost_of(static_cast<std::uint16_t>(progress.code)), now);
  }
  part.groups = progress.groups;
  if (rebuilds_.has(slot)) rebuilds_.part_moved(slot, number, progress.groups);
  const bool missing = std::any_of(filling.parts.begin(), filling.parts.end(), [](const Part& p) { return p.missing; });
  if (!missing) verify(slot, now);
  // What was wrong was given up.
  if (!progress.over || !by_transfer_.contains(progress.transfer)) return;
  if (const auto read = reads_.view(progress.transfer); read && !filling.arena) {
    hedge_.came({read->source.instance, read->message.volume},
                column_bytes(filling, part, read->message.page_blocks), progress.took);
  }
  by_transfer_.erase(progress.transfer);
  part.transfer = 0;
  reads_.take(progress.transfer);
  if (pages_.at(slot).state != PageState::sealed) return;
  sealed_ = true;
  end_filling(slot);
}

void Fetches::verify(std::uint32_t slot, const Now& now) {
  const Filling& filling = fillings_.at(slot);
  while (true) {
    const Page& page = pages_.at(slot);
    const std::uint32_t group = page.groups;
    if (page.state == PageState::sealed) return;
    for (const Part& part : filling.parts) {
      if (part.groups <= group) return;
    }
    if (!pages_.verify_next(slot)) break;
    counters_.read_bytes += pages_.layout().segment_bytes(group, page.blocks);
    page_moved(slot, group, now);
  }
  const Page& page = pages_.at(slot);
  std::vector<std::uint32_t> wrong;
  for (std::uint32_t i = 0; i < filling.parts.size(); ++i) {
    if (filling.parts.size() == 1) {
      wrong.push_back(i);
      continue;
    }
    const std::uint16_t column = filling.parts[i].column;
    const kv::StripeShape& shape = filling.stripe->shape;
    const std::uint64_t bytes = shape.segment_bytes(column, page.groups);
    if (bytes == 0) continue;
    const std::uint64_t offset = page.place.offset + shape.page_offset(column, page.groups);
    if (port_.segment_crc(offset, bytes) != filling.stripe->crc(column, page.groups)) wrong.push_back(i);
  }
  // Every part is what the plan says, and the page is not: the plan contradicts itself.
  if (wrong.empty()) return page_failed(slot, Lost::checksum, now);
  for (const std::uint32_t i : wrong) {
    const auto found = fillings_.find(slot);
    if (found == fillings_.end()) return;
    Part& part = found->second.parts[i];
    ++counters_.columns_corrupt;
    if (!found->second.arena) reads_.report(found->second.page, part.column, Code::corrupt);
    if (part.transfer != 0) {
      by_transfer_.erase(part.transfer);
      reads_.give_up(std::exchange(part.transfer, 0));
    }
    part_lost(slot, i, Lost::checksum, now);
  }
}

void Fetches::part_lost(std::uint32_t slot, std::uint32_t part, Lost why, const Now& now) {
  Filling& filling = fillings_.at(slot);
  if (rebuilds_.has(slot)) {
    give_up_late(slot, now);
  } else {
    filling.why = why;
    for (Part& other : filling.parts) other.late = false;
  }
  filling.parts[part].missing = true;
  if (!filling.stripe || filling.stripe->shape.parity_columns() == 0) return page_failed(slot, why, now);
  if (rebuilds_.has(slot)) {
    rebuilds_.part_missing(slot, part);
  } else {
    rebuilds_.add(filling.stripe, slot, filling.index, parts_of(filling), filling.priority, filling.lease);
  }
}

void Fetches::rebuild_progress(const Rebuilds::Progress& progress, const Now& now) {
  const std::uint32_t slot = progress.slot;
  const auto found = fillings_.find(slot);
  if (found == fillings_.end()) return;
  switch (progress.kind) {
    case Rebuilds::Progress::Kind::group: {
      const Page& page = pages_.at(slot);
      counters_.read_bytes += pages_.layout().segment_bytes(progress.group, page.blocks);
      page_moved(slot, progress.group, now);
      if (page.state != PageState::sealed) return;
      ++counters_.pages_rebuilt;
      sealed_ = true;
      return end_filling(slot);
    }
    case Rebuilds::Progress::Kind::failed:
      return page_failed(slot, found->second.why, now);
    case Rebuilds::Progress::Kind::unskip:
      if (!read_skipped(slot)) page_failed(slot, found->second.why, now);
      return;
    case Rebuilds::Progress::Kind::decodable:
      ++counters_.hedges_won;
      return give_up_late(slot, now);
  }
}

bool Fetches::read_skipped(std::uint32_t slot) {
  Filling& filling = fillings_.at(slot);
  bool some = false;
  bool whole = true;
  for (std::uint32_t i = 0; i < filling.parts.size(); ++i) {
    Part& part = filling.parts[i];
    if (!part.missing) continue;
    if (std::exchange(part.skipped, false)) {
      const auto& columns = filling.stripe->columns;
      const auto column = std::find_if(columns.begin(), columns.end(),
                                       [&](const wire::Column& c) { return c.column == part.column; });
      const std::optional<Peer> store =
          column == columns.end() ? std::nullopt : peers_.store_up(column->instance);
      if (store) {
        Reads::Want want;
        want.source = *store;
        want.message.volume = column->volume;
        want.message.column = column->column;
        part.missing = false;
        start_read(slot, i, want);
        some = true;
        continue;
      }
    }
    whole = false;
  }
  if (some && !whole)
    rebuilds_.add(filling.stripe, slot, filling.index, parts_of(filling), filling.priority, filling.lease);
  return some;
}

// ---- Late columns ----------------------------------------------------------------------------------------

Instant Fetches::late_at(const Filling& filling) const {
  Instant at = instant_never;
  if (filling.hedged || !filling.stripe) return at;
  for (const Part& part : filling.parts) {
    if (part.missing) return instant_never;  // it is being rebuilt
    if (part.transfer == 0 || part.late_after == Hedge::duration_never) continue;
    const auto read = reads_.view(part.transfer);
    if (read && read->begun) at = std::min(at, read->since + part.late_after);
  }
  return at;
}

void Fetches::hedge(std::uint32_t slot, const Now& now) {
  Filling& filling = fillings_.at(slot);
  filling.hedged = true;
  std::vector<std::uint32_t> late;
  std::vector<Rebuilds::Part> parts = parts_of(filling);
  for (std::uint32_t i = 0; i < parts.size(); ++i) {
    const Part& part = filling.parts[i];
    if (part.transfer == 0 || part.late_after == Hedge::duration_never) continue;
    const auto read = reads_.view(part.transfer);
    if (!read || !read->begun || read->since + part.late_after > now.liveness) continue;
    parts[i].missing = true;
    late.push_back(i);
  }
  const auto count = static_cast<std::uint32_t>(late.size());
  if (count == 0 || !hedge_.hedge(count)) return;
  if (!rebuilds_.hedge(filling.stripe, slot, filling.index, std::move(parts), filling.priority, filling.lease)) {
    return hedge_.refund(count);
  }
  for (const std::uint32_t i : late) filling.parts[i].late = true;
  ++counters_.hedges;
}

void Fetches::give_up_late(std::uint32_t slot, const Now& now) {
  Filling& filling = fillings_.at(slot);
  for (std::uint32_t i = 0; i < filling.parts.size(); ++i) {
    Part& part = filling.parts[i];
    if (!part.late || part.missing || part.transfer == 0) continue;
    if (const auto read = reads_.view(part.transfer)) {
      hedge_.gave_up({read->source.instance, read->message.volume},
                     column_bytes(filling, part, read->message.page_blocks), now.liveness - read->since);
    }
    by_transfer_.erase(part.transfer);
    reads_.give_up(std::exchange(part.transfer, 0));
    part.missing = true;
    rebuilds_.part_missing(slot, i);
  }
}

void Fetches::end_filling(std::uint32_t slot) {
  const auto found = fillings_.find(slot);
  const Filling over = std::move(found->second);
  fillings_.erase(found);
  coming_bytes_[over.place()] -= pages_.layout().page_bytes(pages_.at(slot).blocks);
  for (const Part& part : over.parts) {
    if (part.transfer == 0) continue;
    by_transfer_.erase(part.transfer);
    reads_.give_up(part.transfer);
  }
  rebuilds_.drop(slot);
}

void Fetches::lease_over(std::uint64_t lease, const Now& now) {
  std::vector<std::uint32_t> over;
  for (const auto& [slot, filling] : fillings_) {
    if (filling.lease == lease) over.push_back(slot);
  }
  // The stripe may be freed under it from now on.
  for (const std::uint32_t slot : over) page_failed(slot, Lost::timeout, now);
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
  ++counters_.pages_failed;
  end_filling(slot);
  pages_.spoil(slot);
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

  std::vector<std::uint32_t> late;
  for (const auto& [slot, filling] : fillings_) {
    if (late_at(filling) <= now.liveness) late.push_back(slot);
  }
  for (const std::uint32_t slot : late) hedge(slot, now);

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
  for (const auto& [slot, filling] : fillings_) due.sooner_liveness(late_at(filling));
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

Status Fetches::check(std::map<std::uint32_t, std::uint32_t>& pins, std::set<std::uint64_t>& reads) const {
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

  std::size_t transfers = 0;
  for (const auto& [slot, filling] : fillings_) {
    const Page& page = pages_.at(slot);
    if (page.state != PageState::filling) return broken("state of a page and its filling disagree");
    if (page.pins == 0) return broken("a page comes for nobody");
    bool missing = false;
    for (const Part& part : filling.parts) {
      missing = missing || part.missing;
      if (part.transfer == 0) continue;
      ++transfers;
      reads.insert(part.transfer);
      if (!by_transfer_.contains(part.transfer)) return broken("a read has lost its page");
    }
    if (missing && !rebuilds_.has(slot)) return broken("a page lacks columns that nobody makes");
  }
  if (transfers != by_transfer_.size()) return broken("a read has no page");
  for (const auto& [slot, page] : pages_.all()) {
    if (page.state == PageState::filling && page.indexed && !fillings_.contains(slot)) {
      return broken("a page is awaited that nobody reads");
    }
  }
  for (const auto& [slot, waiters] : waiters_) {
    if (!fillings_.contains(slot)) return broken("a fetch waits for a page that does not come");
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
