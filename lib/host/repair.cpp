#include "host/repair.h"

#include <algorithm>

namespace di::host {

Repairs::Repairs(const Limits& limits, Pages& pages, ArenaPort& port, DataPort& data, const Peers& peers,
                 Reads& reads, Rebuilds& rebuilds, Leases& leases, Numbers& numbers, Outbox& out)
    : limits_(limits),
      pages_(pages),
      port_(port),
      data_(data),
      peers_(peers),
      reads_(reads),
      rebuilds_(rebuilds),
      leases_(leases),
      numbers_(numbers),
      out_(out) {}

void Repairs::answer(const wire::Scope& scope, const wire::meta_repaired& message) {
  const std::optional<Peer> meta = peers_.meta_up();
  if (!meta) return;
  out_.push_back(
      wire::Envelope::make(meta->instance, meta->generation, {scope.request, scope.attempt, 0, 0}, message));
}

const wire::Column* Repairs::source_of(const StripePlan& plan, std::uint16_t column) const {
  for (const wire::Column& known : plan.columns) {
    if (known.column == column && peers_.store_up(known.instance)) return &known;
  }
  return nullptr;
}

void Repairs::begin(const wire::Scope& scope, const wire::meta_repair& message, const Now& now) {
  const std::uint64_t stripe = message.stripe.stripe;
  // The repair keeps it, or it is given back at once.
  leases_.hold(message.lease, message.ttl_ms, now);
  const auto refuse = [&](Code code) {
    ++counters_.refused;
    answer(scope, {stripe, static_cast<std::uint16_t>(code), {}, {}});
    leases_.drop(message.lease);
  };
  if (by_stripe_.contains(stripe)) return leases_.drop(message.lease);  // said twice: one answer is enough
  if (repairs_.size() >= limits_.repairs_max || !pages_.has_layout()) return refuse(Code::busy);
  if (message.fingerprint != pages_.layout().fingerprint()) return refuse(Code::unsupported);
  Result<std::shared_ptr<StripePlan>> plan = StripePlan::of(pages_.layout(), message.stripe);
  if (!plan) return refuse(Code::invalid);
  const kv::StripeShape& shape = (*plan)->shape;
  const bool cross_check = message.targets.empty();
  if (cross_check && shape.parity_columns() == 0) return refuse(Code::invalid);
  if (message.pages.size() != shape.pages()) return refuse(Code::invalid);
  for (std::uint32_t page = 0; page < shape.pages(); ++page) {
    const wire::PutPage& described = message.pages[page];
    if (described.keys.size() != shape.page_blocks(page)) return refuse(Code::invalid);
    (*plan)->first_keys[page] = described.keys.front();
  }
  Repair repair;
  std::vector<std::uint32_t> blocks;
  for (const wire::Column& column : message.targets) {
    if (!shape.is_stored(column.column) || repair.targets.contains(column.column))
      return refuse(Code::invalid);
    Target& target = repair.targets[column.column];
    target.instance = column.instance;
    target.volume = column.volume;
  }
  if (cross_check) {
    for (std::uint32_t i = 0; i <= shape.data_stored(); ++i)
      repair.targets[static_cast<std::uint16_t>(shape.stored_column(i))];
  }
  std::uint32_t to_make = 0;
  for (const auto& [number, target] : repair.targets) to_make += source_of(**plan, number) == nullptr ? 1 : 0;
  // Asked for what no code gives, or what it was to be copied from has just gone.
  if (to_make > (cross_check ? 0 : shape.parity_columns())) return refuse(Code::unreachable);
  // what is only looked at lies as in its page: one slot for all its parts
  std::map<std::uint32_t, std::size_t> rooms;
  const auto room_of = [&](std::uint16_t column) {
    return cross_check && !shape.is_parity(column) ? shape.page_of(column) : shape.pages() + column;
  };
  for (const auto& [number, target] : repair.targets) {
    if (!rooms.emplace(room_of(number), blocks.size()).second) continue;
    blocks.push_back(shape.is_parity(number) ? shape.parity_slot_blocks()
                                             : shape.page_blocks(shape.page_of(number)));
  }
  Result<std::vector<std::uint32_t>> slots = pages_.take(blocks, PageState::scratch);
  if (!slots) return refuse(Code::busy);
  repair.scratch = *std::move(slots);
  for (auto& [column, target] : repair.targets) target.slot = repair.scratch[rooms.at(room_of(column))];
  repair.scope = scope;
  repair.lease = message.lease;
  repair.stripe = stripe;
  repair.plan = *std::move(plan);
  repair.pages = message.pages;
  repair.tenant = message.tenant;
  repair.cross_check = cross_check;
  repair.deadline = now.liveness + limits_.repair_wait;
  ++(cross_check ? counters_.checks : counters_.repairs);
  const std::uint64_t number = next_++;
  const Found found = repairs_.emplace(number, std::move(repair)).first;
  Repair& begun = found->second;
  by_stripe_.emplace(stripe, number);
  for (auto& [column, target] : begun.targets) {
    const wire::Column* source = source_of(*begun.plan, column);
    if (source == nullptr) continue;
    Reads::Want want;
    want.purpose = Reads::For::repair;
    want.source = *peers_.store_up(source->instance);
    want.lease = begun.lease;
    want.message.stripe = stripe;
    want.message.volume = source->volume;
    want.message.column = column;
    want.message.page_blocks = pages_.at(target.slot).blocks;
    want.message.slot = pages_.ref({target.slot, 0, want.message.page_blocks, 0});
    want.message.priority = 2;
    target.source = {want.source, source->volume};
    target.read = reads_.start(want);
    by_transfer_.emplace(target.read, std::pair{number, column});
  }
  go_on(found);
}

Strip Repairs::strip(const Repair& repair, std::uint16_t column, std::uint32_t group) const {
  const kv::StripeShape& shape = repair.plan->shape;
  const std::uint64_t at =
      shape.is_parity(column) ? shape.column_offset(column, group) : shape.page_offset(column, group);
  return {pages_.at(repair.targets.at(column).slot).place.offset + at, shape.segment_bytes(column, group)};
}

bool Repairs::matches(const Repair& repair, std::uint16_t column) const {
  for (std::uint32_t group = 0; group < repair.plan->shape.groups(); ++group) {
    const Strip segment = strip(repair, column, group);
    if (segment.bytes > 0 &&
        port_.segment_crc(segment.offset, segment.bytes) != repair.plan->crc(column, group))
      return false;
  }
  return true;
}

void Repairs::read_progress(const Reads::Progress& progress) {
  const auto named = by_transfer_.find(progress.transfer);
  if (named == by_transfer_.end() || !progress.over) return;
  const auto [number, column] = named->second;
  by_transfer_.erase(named);
  const Found found = repairs_.find(number);
  Repair& repair = found->second;
  Target& target = repair.targets.at(column);
  target.read = 0;
  Code code = progress.code;
  if (code == Code::ok && matches(repair, column)) {
    reads_.take(progress.transfer);
    target.copied = true;
  } else {
    if (code == Code::ok) {
      reads_.give_up(progress.transfer);
      code = Code::corrupt;
    }
    reads_.report(repair.plan->page_id(column), column, target.source, code);
  }
  go_on(found);
}

void Repairs::go_on(Found found) {
  Repair& repair = found->second;
  if (repair.cross_check) {
    bool all = true;
    for (const auto& [column, target] : repair.targets) {
      // Without one of them nothing can be said.
      if (target.read == 0 && !target.copied) return end(found, Code::unreachable);
      all = all && target.copied;
    }
    if (all) repair.state = State::checking;
    return;
  }
  std::vector<std::pair<std::uint16_t, std::uint32_t>> to_make;
  for (const auto& [column, target] : repair.targets) {
    if (target.read != 0) return;
    if (!target.copied) to_make.emplace_back(column, target.slot);
  }
  if (to_make.empty()) return start_puts(found);
  if (to_make.size() <= repair.plan->shape.parity_columns()) {
    repair.state = State::making;
    return rebuilds_.repair(found->first, repair.plan, to_make, 2, repair.lease);
  }
  // No code makes them all; what was copied is as good as before.
  for (const auto& [column, slot] : to_make) {
    const bool last = repair.targets.size() == 1;
    target_over(found, column, Code::unreachable);
    if (last) return;
  }
  start_puts(found);
}

bool Repairs::has_step() const {
  return std::any_of(repairs_.begin(), repairs_.end(),
                     [](const auto& item) { return item.second.state == State::checking; });
}

bool Repairs::step() {
  const auto found = std::find_if(repairs_.begin(), repairs_.end(),
                                  [](const auto& item) { return item.second.state == State::checking; });
  if (found == repairs_.end()) return false;
  Repair& repair = found->second;
  ++counters_.groups_checked;
  std::vector<Strip> strips;
  for (const auto& [column, target] : repair.targets) strips.push_back(strip(repair, column, repair.group));
  if (!port_.xor_is_zero(strips)) {
    // The verdict takes the stripe away: only about bytes that are still what they were.
    const bool sound = std::all_of(repair.targets.begin(), repair.targets.end(),
                                   [&](const auto& item) { return matches(repair, item.first); });
    end(found, sound ? Code::corrupt : Code::unreachable);
    return true;
  }
  if (++repair.group == repair.plan->shape.groups()) end(found, Code::ok);
  return true;
}

void Repairs::rebuild_progress(const Rebuilds::Progress& progress) {
  const Found found = repairs_.find(progress.repair);
  if (found == repairs_.end() || found->second.state != State::making) return;
  if (progress.kind == Rebuilds::Progress::Kind::failed) return end(found, Code::unreachable);
  if (progress.kind == Rebuilds::Progress::Kind::wrong) return end(found, Code::corrupt);
  rebuilds_.drop_repair(progress.repair);
  start_puts(found);
}

void Repairs::start_puts(Found found) {
  Repair& repair = found->second;
  repair.state = State::putting;
  wire::kv_put put;
  put.stripe = repair.stripe;
  put.fingerprint = pages_.layout().fingerprint();
  put.pages = repair.pages;
  put.tenant = repair.tenant;
  put.code = repair.plan->code;
  put.repair = true;
  std::vector<std::uint16_t> unreachable;
  for (auto& [number, target] : repair.targets) {
    const std::optional<Peer> store = peers_.store_up(target.instance);
    put.volume = target.volume;
    put.column = number;
    put.slot = pages_.ref({target.slot, 0, pages_.at(target.slot).blocks, 0});
    put.transfer = 0;
    if (store && peers_.remote(*store)) {
      const std::uint64_t transfer = numbers_.transfer++;
      if (data_.expose(*store, transfer, transfer::Access::read, {{put.slot.slot, put.slot.generation}}))
        put.transfer = target.transfer = transfer;
    }
    if (!store || (peers_.remote(*store) && put.transfer == 0)) {
      unreachable.push_back(number);
      continue;
    }
    target.store = *store;
    out_.push_back(wire::Envelope::make(store->instance, store->generation, {}, put));
  }
  for (const std::uint16_t number : unreachable) {
    const bool last = repair.targets.size() == 1;
    target_over(found, number, Code::unreachable);
    if (last) return;
  }
}

void Repairs::target_over(Found found, std::uint16_t column, Code code) {
  Repair& repair = found->second;
  const auto target = repair.targets.find(column);
  if (target->second.transfer != 0) data_.conceal(target->second.store, target->second.transfer);
  const bool copied = target->second.copied;
  repair.targets.erase(target);
  if (code == Code::ok) {
    repair.written.push_back(column);
    if (copied) ++counters_.copied;
    ++counters_.columns;
    counters_.bytes += repair.plan->shape.column_bytes(column);
  } else if (repair.code == Code::ok) {
    repair.code = code;
  }
  if (repair.targets.empty()) end(found, repair.code);
}

bool Repairs::put_done(const Peer& store, const wire::kv_put_done& done) {
  const auto named = by_stripe_.find(done.stripe);
  if (named == by_stripe_.end()) return false;
  const Found found = repairs_.find(named->second);
  const auto target = found->second.targets.find(done.column);
  if (found->second.state != State::putting || target == found->second.targets.end() ||
      target->second.store != store)
    return true;
  // That a store got other bytes than the plan's says nothing of the stripe.
  const Code code = static_cast<Code>(done.code);
  target_over(found, done.column, code == Code::corrupt ? Code::io : code);
  return true;
}

void Repairs::store_lost(const Peer& store) {
  for (auto next = repairs_.begin(); next != repairs_.end();) {
    const Found found = next++;
    std::vector<std::uint16_t> lost;
    for (const auto& [number, target] : found->second.targets) {
      if (target.store == store) lost.push_back(number);
    }
    for (const std::uint16_t number : lost) {
      found->second.unanswered.push_back(number);
      const bool last = found->second.targets.size() == 1;
      target_over(found, number, Code::unreachable);
      if (last) break;
    }
  }
}

void Repairs::end(Found found, Code code) {
  const std::uint64_t number = found->first;
  const Repair over = std::move(found->second);
  repairs_.erase(found);
  by_stripe_.erase(over.stripe);
  rebuilds_.drop_repair(number);
  std::vector<std::uint32_t> unanswered = over.unanswered;
  for (const auto& [column, target] : over.targets) {
    if (!target.store.instance.empty()) unanswered.push_back(column);
    if (target.transfer != 0) data_.conceal(target.store, target.transfer);
    if (target.read == 0) continue;
    by_transfer_.erase(target.read);
    reads_.give_up(target.read);
  }
  for (const std::uint32_t slot : over.scratch) pages_.scrap(slot);
  if (code != Code::ok && !over.cross_check) ++counters_.failed;
  answer(over.scope, {over.stripe, static_cast<std::uint16_t>(code), over.written, unanswered});
  leases_.drop(over.lease);
}

void Repairs::meta_lost() {
  while (!repairs_.empty()) end(repairs_.begin(), Code::unreachable);
}

void Repairs::lease_over(std::uint64_t lease) {
  for (auto next = repairs_.begin(); next != repairs_.end();) {
    const Found found = next++;
    if (found->second.lease == lease) end(found, Code::timeout);
  }
}

void Repairs::on_time(const Now& now) {
  for (auto next = repairs_.begin(); next != repairs_.end();) {
    const Found found = next++;
    if (found->second.deadline <= now.liveness) end(found, Code::timeout);
  }
}

Due Repairs::next_due() const {
  Due due;
  for (const auto& [number, repair] : repairs_) due.sooner_liveness(repair.deadline);
  return due;
}

Status Repairs::check(std::set<std::uint32_t>& scratch, std::set<std::uint64_t>& reads,
                      std::map<std::uint64_t, std::size_t>& leases) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  if (repairs_.size() > limits_.repairs_max || by_stripe_.size() != repairs_.size())
    return broken("more repairs than there may be, or two of one stripe");
  std::size_t transfers = 0;
  for (const auto& [number, repair] : repairs_) {
    if (repair.targets.empty()) return broken("a repair of nothing");
    std::size_t reading = 0;
    for (const auto& [column, target] : repair.targets) {
      if (target.read == 0) continue;
      ++reading;
      reads.insert(target.read);
    }
    if ((reading > 0) != (repair.state == State::copying)) return broken("a repair waits for nothing");
    transfers += reading;
    if (repair.lease != 0) ++leases[repair.lease];
    for (const std::uint32_t slot : repair.scratch) {
      if (!scratch.insert(slot).second) return broken("a repair uses what is somebody else's");
    }
  }
  if (transfers != by_transfer_.size()) return broken("a repair has lost a read");
  return {};
}

}  // namespace di::host
