#include "host/fetch.h"

#include <algorithm>
#include <unordered_map>

namespace di::host {

namespace {

constexpr Duration lease_renew_min =
    milliseconds(100);  // a lease shorter than 300 ms is an error of its giver

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
      return Lost::timeout;
  }
  return Lost::timeout;  // a code of a later version
}

}  // namespace

Fetches::Fetches(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port, DataPort& data,
                 const Peers& peers, Numbers& numbers, Outbox& out)
    : limits_(limits),
      pages_(pages),
      entries_(entries),
      port_(port),
      data_(data),
      peers_(peers),
      numbers_(numbers),
      out_(out) {}

void Fetches::begin(FetchKind kind, const Holder& holder, const wire::Scope& scope, std::vector<Key> keys,
                    std::uint8_t priority, const Now& now) {
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
  fresh.priority = priority;
  fresh.started = now.product;
  if (kind == FetchKind::prefetch) {
    fresh.expires = now.product + limits_.prefetch_hold;
  } else {
    fresh.deadline = now.liveness +
                     (scope.deadline_ms > 0 ? Duration(milliseconds(scope.deadline_ms)) : limits_.fetch_wait);
  }
  if (fetches_.size() >= limits_.fetches_max || keys.size() > limits_.keys_max || !pages_.has_layout()) {
    if (kind == FetchKind::fetch) send_fetching(fresh, Code::busy);
    return;
  }
  fresh.keys = std::move(keys);
  const FetchId id = next_fetch_++;
  Fetch& fetch = fetches_.emplace(id, std::move(fresh)).first->second;
  names_.emplace(name, id);
  if (kind == FetchKind::prefetch) {
    ++counters_.prefetches;
    prefetches_.emplace(scope.request, scope.attempt, id);
  }
  if (kind == FetchKind::fetch) books_.matched += fetch.keys.size();

  const Gap gap = extend(id, fetch, nullptr, now);
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

Fetches::Gap Fetches::extend(FetchId id, Fetch& fetch, const wire::meta_planned* plan, const Now& now) {
  std::unordered_map<Key, std::size_t> planned;  // looked up only
  if (plan != nullptr) {
    for (std::size_t i = 0; i < plan->pages.size(); ++i) {
      for (const Key& key : plan->pages[i].keys) planned.try_emplace(key, i);
    }
  }
  while (fetch.blocks < fetch.keys.size()) {
    const std::vector<Piece> pieces = pages_.cover(fetch.keys, fetch.blocks, true);
    for (const Piece& piece : pieces) {
      if (!add_piece(id, fetch, piece)) return Gap::no_room;
    }
    if (!pieces.empty()) continue;
    const auto found = planned.find(fetch.keys[fetch.blocks]);
    if (found == planned.end()) break;
    const wire::PlannedPage& page = plan->pages[found->second];
    const bool whole = !page.keys.empty() && page.keys.front() == fetch.keys[fetch.blocks];
    const Key parent = whole && fetch.blocks > 0 ? fetch.keys[fetch.blocks - 1] : Key{};
    if (const Gap gap = add_read(fetch, page, parent, *plan, now); gap != Gap::none) return gap;
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
    // Somebody in more of a hurry joins: the read moves forward in its queue.
    const std::uint64_t transfer = reading_.at(piece.slot);
    Read& read = reads_.at(transfer);
    if (read.state == ReadState::waiting && fetch.priority < read.message.priority) {
      Window& window = windows_.at(read.source.instance);
      window.waiting.erase({read.message.priority, transfer});
      read.message.priority = fetch.priority;
      window.waiting.insert({read.message.priority, transfer});
    }
  }
  fetch.pieces.push_back(piece);
  fetch.blocks = piece.at + piece.count;
  return true;
}

Fetches::Gap Fetches::add_read(const Fetch& fetch, const wire::PlannedPage& page, const Key& parent,
                               const wire::meta_planned& plan, const Now& now) {
  const kv::Layout& layout = pages_.layout();
  if (page.page_blocks == 0 || page.page_blocks > layout.page_blocks() ||
      page.keys.size() != page.page_blocks || page.crcs.size() != layout.groups()) {
    ++counters_.plans_malformed;
    return Gap::absent;
  }
  // Without parity a page is its own column; a column elsewhere does not help.
  Read read;
  Gap gap = Gap::absent;
  for (const wire::Column& column : page.columns) {
    if (column.column != (page.page & 0xff)) continue;
    gap = Gap::unreachable;
    if (const std::optional<Peer> store = peers_.store_up(column.instance)) {
      read.source = *store;
      read.message.volume = column.volume;
      read.message.column = column.column;
    }
  }
  // Not in the store (yet): out of the arena that has it.
  for (const std::string& host : page.arenas) {
    if (!read.source.instance.empty()) break;
    if (const std::optional<Peer> arena = peers_.arena_up(host)) {
      read.source = *arena;
      read.arena = true;
    }
  }
  if (read.source.instance.empty()) return gap;
  if (fetch.kind() == FetchKind::prefetch &&
      prefetch_bytes_ + pages_.room_bytes(page.page_blocks) > pages_.bytes_total() / limits_.prefetch_share) {
    return Gap::no_room;
  }
  const std::uint32_t blocks[] = {page.page_blocks};
  const Result<std::vector<std::uint32_t>> slots = pages_.take(blocks, PageState::filling);
  if (!slots) return Gap::no_room;
  const std::uint32_t slot = slots->front();
  pages_.announce(slot, parent, page.keys, page.crcs, true);

  const std::uint64_t transfer = numbers_.transfer++;
  read.remote = peers_.remote(read.source);
  read.key = page.keys.front();
  read.page = page.page;
  read.lease = plan.lease;
  read.message.transfer = transfer;
  read.message.stripe = page.page >> 8;
  read.message.page_blocks = page.page_blocks;
  read.message.slot = pages_.ref({slot, 0, page.page_blocks, 0});
  read.message.priority = fetch.priority;
  reading_.emplace(slot, transfer);
  windows_[read.source.instance].waiting.insert({read.message.priority, transfer});
  reads_.emplace(transfer, std::move(read));
  if (plan.lease != 0) {
    Lease& lease = leases_[plan.lease];
    if (lease.reads.empty()) {
      lease.every = std::max<Duration>(Duration(milliseconds(plan.ttl_ms)) / 3, lease_renew_min);
      lease.renew_at = now.liveness + lease.every;
      lease.cap = now.liveness + limits_.lease_cap;
    }
    lease.reads.insert(transfer);
  }
  if (fetch.kind() == FetchKind::prefetch) counters_.prefetched_blocks += page.page_blocks;
  return Gap::none;
}

void Fetches::planned(std::uint64_t tag, const wire::meta_planned& plan, const Now& now) {
  const auto found = plans_.find(tag);
  if (found != plans_.end()) {
    const FetchId id = found->second.fetch;
    plans_.erase(found);
    settle_plan(id, &plan, Gap::none, now);
  }
  // Nothing is read under it: the fetch is gone, or needs only what the arena has.
  if (plan.lease != 0 && !leases_.contains(plan.lease)) release_leases({plan.lease});
}

void Fetches::settle_plan(FetchId id, const wire::meta_planned* plan, Gap missing, const Now& now) {
  Fetch& fetch = fetches_.at(id);
  DI_ASSERT(fetch.state == FetchState::planning);
  fetch.plan = 0;
  const Gap gap = extend(id, fetch, plan, now);
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
      forget(id, false);
      return;
    }
    if (fetch.failed_block != wire::block_none) {
      books_.lost[static_cast<std::size_t>(fetch.failed_why)] += fetch.blocks - fetch.end();
    }
  } else if (fetch.kind() == FetchKind::prefetch && fetch.blocks == 0) {
    forget(id, false);
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

void Fetches::release(FetchKind kind, const Holder& holder, bool by_client) {
  if (const auto found = names_.find({holder, kind}); found != names_.end()) forget(found->second, by_client);
}

const PinSet* Fetches::pins_of(const Holder& holder) const {
  const auto found = names_.find({holder, FetchKind::fetch});
  return found == names_.end() ? nullptr : &fetches_.at(found->second).pins;
}

void Fetches::release_prefetch(const RequestId& request, std::uint16_t attempt) {
  auto found = prefetches_.lower_bound({request, attempt, 0});
  while (found != prefetches_.end() && std::get<0>(*found) == request && std::get<1>(*found) == attempt) {
    const FetchId id = std::get<2>(*found);
    ++found;
    forget(id, false);
  }
}

void Fetches::forget(FetchId id, bool by_client) {
  const auto found = fetches_.find(id);
  Fetch fetch = std::move(found->second);
  fetches_.erase(found);
  names_.erase(fetch.name);
  if (fetch.plan != 0) plans_.erase(fetch.plan);
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
  for (const Piece& piece : fetch.pieces) {
    const auto waiting = waiters_.find(piece.slot);
    if (waiting == waiters_.end()) continue;
    std::erase_if(waiting->second, [&](const Waiter& waiter) { return waiter.fetch == id; });
    if (waiting->second.empty()) waiters_.erase(waiting);
  }
  unpin(fetch.pins);
}

void Fetches::unpin(PinSet& pins) {
  const std::vector<std::uint32_t> slots = pins.slots;
  pages_.unpin(pins);
  for (const std::uint32_t slot : slots) {
    const auto reading = reading_.find(slot);
    if (reading == reading_.end()) continue;
    const std::uint64_t transfer = reading->second;
    Read& read = reads_.at(transfer);
    if (read.state == ReadState::cancelling || pages_.at(slot).pins > 0) continue;
    ++counters_.reads_cancelled;
    if (read.state == ReadState::waiting) {
      end_read(transfer);
    } else {
      cancel_read(transfer, read);
    }
    pages_.spoil(slot);
  }
}

void Fetches::read_done(const Peer& source, const wire::kv_read_done& done, const Now& now) {
  const auto found = reads_.find(done.transfer);
  if (found == reads_.end() || found->second.source != source ||
      found->second.state == ReadState::waiting)
    return;
  Read& read = found->second;
  const std::uint64_t transfer = found->first;
  const std::uint32_t slot = read.message.slot.slot;
  const std::uint32_t groups = pages_.layout().groups();
  const bool last = done.code != 0 || done.group + 1 == groups;
  if (read.state == ReadState::cancelling) {
    if (last && !read.remote) finish_read(transfer);
    return;
  }
  read.deadline = now.liveness + limits_.read_wait;
  if (done.code != 0) {
    ++counters_.reads_failed;
    tell_read_failed(read, static_cast<Code>(done.code));
    end_read(transfer);
    page_failed(slot, lost_of(done.code), now);
    return;
  }
  if (done.group >= groups) {
    ++counters_.reads_failed;
    cancel_read(transfer, read);
    page_failed(slot, Lost::timeout, now);
    return;
  }
  if (read.remote) data_.see_arrivals();
  while (true) {
    const Page& page = pages_.at(slot);
    const std::uint32_t group = page.groups;
    if (page.state == PageState::sealed || group > done.group) break;
    if (!pages_.verify_next(slot)) {
      ++counters_.reads_corrupt;
      tell_read_failed(read, Code::corrupt);
      if (last) {
        end_read(transfer);
      } else {
        cancel_read(transfer, read);
      }
      page_failed(slot, Lost::checksum, now);
      return;
    }
    counters_.read_bytes += pages_.layout().segment_bytes(group, page.blocks);
    page_moved(slot, group, now);
  }
  if (last) end_read(transfer);
}

void Fetches::read_cancelled(const Peer& source, const wire::kv_read_cancelled& cancelled) {
  const auto found = reads_.find(cancelled.transfer);
  if (found == reads_.end() || found->second.source != source ||
      found->second.state != ReadState::cancelling || found->second.remote) {
    return;
  }
  finish_read(found->first);
}

bool Fetches::concealed(const Peer& source, std::uint64_t transfer) {
  const auto found = reads_.find(transfer);
  if (found == reads_.end() || found->second.source != source) return false;
  // One that is still under way hears of its end from its source, or from read_wait.
  if (found->second.state == ReadState::cancelling && found->second.remote) finish_read(transfer);
  return true;
}

void Fetches::meta_lost(const Now& now) {
  // Its successor knows none of these leases; the stores free nothing while no directory tells them to.
  for (auto& [transfer, read] : reads_) read.lease = 0;
  leases_.clear();
  const std::map<std::uint64_t, Plan> plans = std::exchange(plans_, {});
  for (const auto& [tag, plan] : plans) {
    ++counters_.plans_failed;
    settle_plan(plan.fetch, nullptr, Gap::unreachable, now);
  }
}

void Fetches::source_lost(const Peer& source, const Now& now) {
  const bool maps = peers_.attached(source);
  std::vector<std::uint64_t> mine;
  for (const auto& [transfer, read] : reads_) {
    if (read.source == source) mine.push_back(transfer);
  }
  for (const std::uint64_t transfer : mine) {
    Read& read = reads_.at(transfer);
    const std::uint32_t slot = read.message.slot.slot;
    const bool failed = read.state != ReadState::cancelling;
    if (failed) ++counters_.reads_failed;
    if (read.state == ReadState::waiting || !maps || read.remote) {
      end_read(transfer);
    } else {
      // It may be frozen in the middle of a write: the slot waits until the process lets go.
      if (read.counted) --windows_.at(source.instance).outstanding;
      read.counted = false;
      read.state = ReadState::cancelling;
      read.deadline = instant_never;
    }
    if (failed) page_failed(slot, Lost::timeout, now);
  }
}

void Fetches::source_returned(const Peer& source) {
  for (const auto& [transfer, read] : reads_) {
    if (read.source == source && read.state == ReadState::cancelling && !read.remote)
      to_source(read, wire::kv_read_cancel{transfer});
  }
}

void Fetches::source_detached(const Peer& source, const Now& now) {
  std::vector<std::uint64_t> mine;
  for (const auto& [transfer, read] : reads_) {
    if (read.source == source && read.state != ReadState::waiting && !read.remote) mine.push_back(transfer);
  }
  for (const std::uint64_t transfer : mine) {
    const Read& read = reads_.at(transfer);
    const std::uint32_t slot = read.message.slot.slot;
    const bool failed = read.state == ReadState::reading;
    if (failed) ++counters_.reads_failed;
    finish_read(transfer);
    if (failed) page_failed(slot, Lost::timeout, now);
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

void Fetches::end_read(std::uint64_t transfer) {
  const auto found = reads_.find(transfer);
  DI_ASSERT(found != reads_.end());
  Read& read = found->second;
  if (!read.remote || read.state == ReadState::waiting) return finish_read(transfer);
  if (read.state == ReadState::cancelling) return;  // concealed is on its way
  const Peer source = read.source;
  if (pages_.at(read.message.slot.slot).state == PageState::sealed) {
    finish_read(transfer);
  } else {
    read.state = ReadState::cancelling;
    read.deadline = instant_never;
  }
  data_.conceal(source, transfer);
}

void Fetches::finish_read(std::uint64_t transfer) {
  const auto found = reads_.find(transfer);
  DI_ASSERT(found != reads_.end());
  const Read read = std::move(found->second);
  reads_.erase(found);
  const std::uint32_t slot = read.message.slot.slot;
  reading_.erase(slot);
  // A cancelled read of a lost source is in no window any more.
  if (read.state == ReadState::waiting || read.counted) {
    Window& window = windows_.at(read.source.instance);
    if (read.state == ReadState::waiting) window.waiting.erase({read.message.priority, transfer});
    if (read.counted) --window.outstanding;
    if (window.waiting.empty() && window.outstanding == 0) windows_.erase(read.source.instance);
  }
  if (read.lease != 0) {
    const auto lease = leases_.find(read.lease);
    DI_ASSERT(lease != leases_.end());
    lease->second.reads.erase(transfer);
    if (lease->second.reads.empty()) {
      leases_.erase(lease);
      release_leases({read.lease});
    }
  }
  if (pages_.at(slot).state != PageState::sealed) pages_.peer_writes(slot, false);
}

void Fetches::cancel_read(std::uint64_t transfer, Read& read) {
  read.state = ReadState::cancelling;
  read.deadline = instant_never;
  to_source(read, wire::kv_read_cancel{transfer});
  if (read.remote) data_.conceal(read.source, transfer);
}

void Fetches::tell_read_failed(const Read& read, Code code) {
  if (read.arena || (code != Code::corrupt && code != Code::not_found && code != Code::io)) return;
  wire::meta_read_failed failed;
  failed.page = read.page;
  failed.column = read.message.column;
  failed.code = static_cast<std::uint16_t>(code);
  to_meta({}, failed);
}

void Fetches::release_leases(std::vector<std::uint64_t> leases) {
  to_meta({}, wire::meta_release{std::move(leases)});
}

void Fetches::pump(const Now& now) {
  // A read that cannot begin fails, and that may change the windows.
  std::vector<std::uint64_t> refused;
  for (auto& [instance, window] : windows_) {
    while (window.outstanding < limits_.reads_per_source && !window.waiting.empty()) {
      const std::uint64_t transfer = window.waiting.begin()->second;
      Read& read = reads_.at(transfer);
      const wire::SlotRef& slot = read.message.slot;
      if (read.remote && !data_.expose(read.source, transfer, transfer::Access::write,
                                       {{slot.slot, slot.generation}})) {
        refused.push_back(transfer);
        break;  // of this source: the table of exposures is full
      }
      window.waiting.erase(window.waiting.begin());
      read.state = ReadState::reading;
      read.counted = true;
      read.deadline = now.liveness + limits_.read_wait;
      ++window.outstanding;
      ++counters_.reads;
      pages_.peer_writes(slot.slot, true);
      if (!read.arena) {
        to_source(read, read.message);
        continue;
      }
      ++counters_.arena_reads;
      to_source(read, wire::arena_read{transfer, read.key, slot.page_blocks, slot, read.message.priority});
    }
  }
  for (const std::uint64_t transfer : refused) {
    const std::uint32_t slot = reads_.at(transfer).message.slot.slot;
    ++counters_.reads_failed;
    end_read(transfer);
    page_failed(slot, Lost::timeout, now);
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
      forget(id, false);
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

  due.clear();
  for (const auto& [transfer, read] : reads_) {
    if (read.deadline <= now.liveness) due.push_back(transfer);
  }
  for (const std::uint64_t transfer : due) {
    Read& read = reads_.at(transfer);
    ++counters_.reads_failed;
    cancel_read(transfer, read);
    page_failed(read.message.slot.slot, Lost::timeout, now);
  }

  wire::meta_renew renew;
  due.clear();
  for (auto& [number, lease] : leases_) {
    if (lease.cap <= now.liveness) {
      due.insert(due.end(), lease.reads.begin(), lease.reads.end());
    } else if (lease.renew_at <= now.liveness) {
      renew.leases.push_back(number);
      lease.renew_at = now.liveness + lease.every;
    }
  }
  if (!renew.leases.empty()) to_meta({}, renew);
  for (const std::uint64_t transfer : due) {
    // The stripe may be freed under it from now on.
    Read& read = reads_.at(transfer);
    const std::uint32_t slot = read.message.slot.slot;
    const bool failed = read.state != ReadState::cancelling;
    if (failed) ++counters_.reads_failed;
    if (read.state == ReadState::reading) cancel_read(transfer, read);
    if (read.lease != 0) {
      const std::uint64_t number = std::exchange(read.lease, 0);
      Lease& lease = leases_.at(number);
      lease.reads.erase(transfer);
      if (lease.reads.empty()) {
        leases_.erase(number);
        release_leases({number});
      }
    }
    if (read.state == ReadState::waiting) end_read(transfer);
    if (failed) page_failed(slot, Lost::timeout, now);
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
  for (const auto& [transfer, read] : reads_) due.sooner_liveness(read.deadline);
  for (const auto& [number, lease] : leases_) {
    due.sooner_liveness(lease.renew_at);
    due.sooner_liveness(lease.cap);
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

  std::map<std::string, std::uint32_t> outstanding;
  std::map<std::uint64_t, std::size_t> under_lease;
  for (const auto& [transfer, read] : reads_) {
    const std::uint32_t slot = read.message.slot.slot;
    const auto back = reading_.find(slot);
    if (back == reading_.end() || back->second != transfer) return broken("a read has lost its slot");
    const Page* page = pages_.find(slot, read.message.slot.generation);
    if (page == nullptr) return broken("a slot was reused while somebody may write into it");
    const PageState wanted =
        read.state == ReadState::cancelling ? PageState::quarantined : PageState::filling;
    if (page->state != wanted) return broken("state of a page and its read disagree");
    if (page->peer_writes != (read.state != ReadState::waiting)) return broken("who writes a page is wrong");
    if (wanted == PageState::filling && page->pins == 0) return broken("a page is read for nobody");
    if (read.counted) ++outstanding[read.source.instance];
    if (read.lease != 0) ++under_lease[read.lease];
  }
  if (reading_.size() != reads_.size()) return broken("a slot has no read");
  for (const auto& [slot, page] : pages_.all()) {
    if (page.state == PageState::filling && page.indexed && !reading_.contains(slot)) {
      return broken("a page is awaited that nobody reads");
    }
  }
  for (const auto& [instance, window] : windows_) {
    if (window.outstanding != outstanding[instance] || window.outstanding > limits_.reads_per_source) {
      return broken("the window of a source is miscounted");
    }
  }
  for (const auto& [number, lease] : leases_) {
    if (lease.reads.empty() || lease.reads.size() != under_lease[number])
      return broken("a lease outlives its reads");
  }
  for (const auto& [slot, waiters] : waiters_) {
    if (!reading_.contains(slot)) return broken("a fetch waits for a page that does not come");
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
