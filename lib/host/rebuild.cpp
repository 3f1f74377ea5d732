#include "host/rebuild.h"

#include <algorithm>

namespace di::host {

Result<std::shared_ptr<StripePlan>> StripePlan::of(const kv::Layout& layout,
                                                   const wire::PlannedStripe& planned) {
  Result<kv::StripeShape> shape = kv::StripeShape::of(layout, planned.code.data_columns,
                                                      planned.code.parity_columns, planned.page_blocks);
  if (!shape) return shape.error();
  if (planned.crcs.size() != std::size_t{shape->pages()} * shape->groups() ||
      planned.code.crcs.size() != shape->crcs_count() || planned.columns.size() > shape->columns_stored()) {
    return Error{Code::invalid, 0, "a planned stripe does not fit its shape"};
  }
  std::set<std::uint16_t> seen;
  for (const wire::Column& column : planned.columns) {
    if (!shape->is_stored(column.column) || !seen.insert(column.column).second)
      return Error{Code::invalid, 0, "a planned stripe names a column twice, or none of its own"};
  }
  const std::size_t pages = shape->pages();
  std::vector<Hedge::Source> sources;
  for (const wire::Column& column : planned.columns) sources.emplace_back(column.instance, column.volume);
  return std::make_shared<StripePlan>(StripePlan{planned.stripe, *std::move(shape), planned.crcs,
                                                 planned.code, planned.columns, std::vector<Key>(pages),
                                                 std::move(sources)});
}

std::uint32_t StripePlan::crc(std::uint32_t column, std::uint32_t group) const {
  if (const auto place = shape.crc_index(column, group)) return code.crcs[*place];
  return page_crcs[std::size_t{shape.page_of(column)} * shape.groups() + group];
}

Rebuilds::Rebuilds(const Limits& limits, Pages& pages, ArenaPort& port, const Peers& peers, Reads& reads,
                   Leases& leases, Hedge& hedge)
    : limits_(limits),
      pages_(pages),
      port_(port),
      peers_(peers),
      reads_(reads),
      leases_(leases),
      hedge_(hedge) {}

// ---- What is wanted --------------------------------------------------------------------------------------

Rebuilds::Found Rebuilds::begin(const StripeRef& plan, std::uint8_t priority, std::uint64_t lease) {
  if (rebuilds_.size() >= limits_.rebuilds_max ||
      !port_.has_code(plan->shape.data_columns(), plan->shape.parity_columns())) {
    return rebuilds_.end();
  }
  Rebuild fresh;
  fresh.plan = plan;
  fresh.priority = priority;
  fresh.lease = lease;
  leases_.hold_again(lease);
  return rebuilds_.emplace(next_id_++, std::move(fresh)).first;
}

void Rebuilds::join(Found found, std::uint32_t slot, std::uint32_t index, std::vector<Part> parts,
                    bool late) {
  DI_ASSERT(!by_slot_.contains(slot) && parts.size() == found->second.plan->shape.parts());
  // From now on it is waited for, so nobody may be rebuilt from it: they might wait for each other.
  for (auto& [id, rebuild] : rebuilds_) {
    std::erase_if(rebuild.pages, [&](const auto& page) {
      if (page.second != slot) return false;
      released_.slots.push_back(slot);
      return true;
    });
  }
  Target target;
  target.index = index;
  target.parts = std::move(parts);
  target.late = late;
  found->second.targets.emplace(slot, std::move(target));
  by_slot_.emplace(slot, found->first);
}

void Rebuilds::add(const StripeRef& plan, std::uint32_t slot, std::uint32_t index, std::vector<Part> parts,
                   std::uint8_t priority, std::uint64_t lease) {
  const auto known = by_stripe_.find(plan->stripe);
  Found found = known == by_stripe_.end() ? begin(plan, priority, lease) : rebuilds_.find(known->second);
  if (found == rebuilds_.end()) {
    ++counters_.failed;
    progress_.push_back({Progress::Kind::failed, slot, 0, 0});
    return;
  }
  if (known == by_stripe_.end()) {
    by_stripe_.emplace(plan->stripe, found->first);
    ++counters_.rebuilds;
  }
  // Two plans may know different pages; the reads of both are good.
  join(found, slot, index, std::move(parts), false);
}

bool Rebuilds::hedge(const StripeRef& plan, std::uint32_t slot, std::uint32_t index, std::vector<Part> parts,
                     std::uint8_t priority, std::uint64_t lease) {
  const auto known = by_stripe_.find(plan->stripe);
  Found found = known == by_stripe_.end() ? begin(plan, priority, lease) : rebuilds_.find(known->second);
  if (found == rebuilds_.end()) return false;
  Rebuild& rebuild = found->second;
  const bool serious = std::any_of(rebuild.targets.begin(), rebuild.targets.end(),
                                   [](const auto& item) { return !item.second.late; });
  if (serious) return false;
  if (known == by_stripe_.end()) by_stripe_.emplace(plan->stripe, found->first);
  const Id id = found->first;
  join(found, slot, index, std::move(parts), true);
  if (!gather(id, rebuild) && by_slot_.contains(slot)) erase_target(found, slot);
  return by_slot_.contains(slot);
}

void Rebuilds::part_moved(std::uint32_t slot, std::uint32_t part, std::uint32_t groups) {
  const auto found = by_slot_.find(slot);
  if (found == by_slot_.end()) return;
  Rebuild& rebuild = rebuilds_.at(found->second);
  Target& target = rebuild.targets.at(slot);
  Part& moved = target.parts[part];
  moved.groups = groups;
  if (groups < rebuild.plan->shape.groups() || !std::exchange(moved.late, false)) return;
  moved.missing = false;
  settle_hedge(target);
}

void Rebuilds::part_missing(std::uint32_t slot, std::uint32_t part) {
  const auto found = by_slot_.find(slot);
  if (found == by_slot_.end()) return;
  Target& target = rebuilds_.at(found->second).targets.at(slot);
  target.parts[part].missing = true;
  target.parts[part].late = false;
  settle_hedge(target);
}

void Rebuilds::settle_hedge(Target& target) {
  const auto some = [&](bool Part::*is) {
    return std::any_of(target.parts.begin(), target.parts.end(), [&](const Part& part) { return part.*is; });
  };
  if (!target.late || some(&Part::late) || !some(&Part::missing)) return;
  target.late = false;
  ++counters_.rebuilds;
}

void Rebuilds::call_off(Found found, std::uint32_t slot) {
  Target& target = found->second.targets.at(slot);
  for (Part& part : target.parts) {
    if (std::exchange(part.late, false)) part.missing = false;
  }
  settle_hedge(target);
  if (target.late) erase_target(found, slot);
}

void Rebuilds::drop(std::uint32_t slot) {
  const auto found = by_slot_.find(slot);
  if (found != by_slot_.end()) erase_target(rebuilds_.find(found->second), slot);
}

void Rebuilds::erase_target(Found found, std::uint32_t slot) {
  by_slot_.erase(slot);
  found->second.targets.erase(slot);
  if (found->second.targets.empty()) end(found);
}

void Rebuilds::repair(std::uint64_t repair, const StripeRef& plan,
                      const std::vector<std::pair<std::uint16_t, std::uint32_t>>& columns,
                      std::uint8_t priority, std::uint64_t lease) {
  const Found found = begin(plan, priority, lease);
  if (found == rebuilds_.end()) {
    progress_.push_back({Progress::Kind::failed, 0, 0, repair});
    return;
  }
  ++counters_.rebuilds;
  found->second.repair = repair;
  by_repair_.emplace(repair, found->first);
  for (const auto& [column, slot] : columns) {
    Target target;
    target.column = column;
    found->second.targets.emplace(slot, std::move(target));
  }
}

void Rebuilds::drop_repair(std::uint64_t repair) {
  const auto found = by_repair_.find(repair);
  if (found != by_repair_.end()) end(rebuilds_.find(found->second));
}

void Rebuilds::lease_over(std::uint64_t lease) {
  for (auto next = rebuilds_.begin(); next != rebuilds_.end();) {
    const Found found = next++;
    if (found->second.lease == lease) fail(found);
  }
}

void Rebuilds::end(Found found) {
  Rebuild over = std::move(found->second);
  rebuilds_.erase(found);
  if (over.repair != 0) {
    by_repair_.erase(over.repair);
  } else {
    by_stripe_.erase(over.plan->stripe);
    for (const auto& [slot, target] : over.targets) by_slot_.erase(slot);
  }
  for (const auto& [number, column] : over.columns) {
    if (column.transfer == 0) continue;
    by_transfer_.erase(column.transfer);
    reads_.give_up(column.transfer);
  }
  for (const auto& [name, slot] : over.rooms) pages_.scrap(slot);
  for (const auto& [page, slot] : over.pages) released_.slots.push_back(slot);
  leases_.drop(over.lease);
}

void Rebuilds::fail(Found found) {
  for (const auto& [slot, target] : found->second.targets) {
    if (target.late || !target.index) continue;
    ++counters_.failed;
    progress_.push_back({Progress::Kind::failed, slot, 0, 0});
  }
  if (found->second.repair != 0) progress_.push_back({Progress::Kind::failed, 0, 0, found->second.repair});
  end(found);
}

// ---- Columns ---------------------------------------------------------------------------------------------

std::vector<std::uint16_t> Rebuilds::missing(const Rebuild& rebuild, const Target& target) {
  if (!target.index) return {target.column};
  std::vector<std::uint16_t> columns;
  const std::uint32_t first = *target.index * rebuild.plan->shape.parts();
  for (std::uint32_t part = 0; part < target.parts.size(); ++part) {
    if (target.parts[part].missing) columns.push_back(static_cast<std::uint16_t>(first + part));
  }
  return columns;
}

std::uint32_t Rebuilds::next_group(std::uint32_t slot, const Target& target) const {
  return target.index ? pages_.at(slot).groups : target.group;
}

std::optional<std::uint32_t> Rebuilds::groups_of(const Rebuild& rebuild, std::uint16_t column) const {
  const kv::StripeShape& shape = rebuild.plan->shape;
  if (rebuild.unusable.contains(column)) return std::nullopt;
  const bool parity = shape.is_parity(column);
  for (const auto& [slot, target] : rebuild.targets) {
    if (!target.index) {
      if (target.column == column) return std::nullopt;
    } else if (!parity && *target.index == shape.page_of(column)) {
      const Part& part = target.parts[shape.part_of(column)];
      if (part.missing) return std::nullopt;
      return part.groups;
    }
  }
  if (!parity) {
    const auto page = rebuild.pages.find(shape.page_of(column));
    if (page != rebuild.pages.end()) return pages_.at(page->second).groups;
  }
  const auto known = rebuild.columns.find(column);
  if (known == rebuild.columns.end()) return std::nullopt;
  return known->second.groups;
}

Strip Rebuilds::strip_in(const StripePlan& plan, std::uint32_t slot, std::uint16_t column,
                         std::uint32_t group) const {
  const std::uint64_t at = plan.shape.is_parity(column) ? plan.shape.column_offset(column, group)
                                                        : plan.shape.page_offset(column, group);
  return {pages_.at(slot).place.offset + at, plan.shape.segment_bytes(column, group)};
}

Strip Rebuilds::strip_of(const Rebuild& rebuild, std::uint16_t column, std::uint32_t group) const {
  const kv::StripeShape& shape = rebuild.plan->shape;
  if (shape.is_parity(column)) return strip_in(*rebuild.plan, rebuild.rooms.at(column), column, group);
  const std::uint32_t page = shape.page_of(column);
  for (const auto& [slot, target] : rebuild.targets) {
    if (target.index == page) return strip_in(*rebuild.plan, slot, column, group);
  }
  const auto held = rebuild.pages.find(page);
  const std::uint32_t slot = held != rebuild.pages.end() ? held->second : rebuild.rooms.at(page);
  return strip_in(*rebuild.plan, slot, column, group);
}

bool Rebuilds::sound(const Rebuild& rebuild, std::uint16_t column) const {
  for (std::uint32_t group = 0; group < rebuild.plan->shape.groups(); ++group) {
    const Strip strip = strip_of(rebuild, column, group);
    if (strip.bytes > 0 && port_.segment_crc(strip.offset, strip.bytes) != rebuild.plan->crc(column, group))
      return false;
  }
  return true;
}

bool Rebuilds::parts_sound(const Rebuild& rebuild) const {
  for (const auto& [slot, target] : rebuild.targets) {
    for (std::uint32_t part = 0; part < target.parts.size(); ++part) {
      const auto column = static_cast<std::uint16_t>(*target.index * rebuild.plan->shape.parts() + part);
      const bool came =
          !target.parts[part].missing && target.parts[part].groups == rebuild.plan->shape.groups();
      if (came && !sound(rebuild, column)) return false;
    }
  }
  return true;
}

std::uint32_t Rebuilds::coming(const Rebuild& rebuild) const {
  const kv::StripeShape& shape = rebuild.plan->shape;
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
    if (groups_of(rebuild, static_cast<std::uint16_t>(shape.stored_column(i)))) ++count;
  }
  return count;
}

std::uint32_t Rebuilds::there(const Rebuild& rebuild, std::uint32_t group) const {
  const kv::StripeShape& shape = rebuild.plan->shape;
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
    const auto groups = groups_of(rebuild, static_cast<std::uint16_t>(shape.stored_column(i)));
    if (groups && *groups > group) ++count;
  }
  return count;
}

void Rebuilds::find_pages(Rebuild& rebuild) {
  const StripePlan& plan = *rebuild.plan;
  for (std::uint32_t page = 0; page < plan.shape.pages(); ++page) {
    const Key& key = plan.first_keys[page];
    if (key == Key{} || rebuild.pages.contains(page)) continue;
    const bool target = std::any_of(rebuild.targets.begin(), rebuild.targets.end(),
                                    [&](const auto& item) { return item.second.index == page; });
    bool usable = !target;
    for (std::uint32_t part = 0; part < plan.shape.parts(); ++part) {
      // What is in scratch is not given up for it.
      const auto column = static_cast<std::uint16_t>(page * plan.shape.parts() + part);
      usable = usable && !rebuild.unusable.contains(column) && !rebuild.columns.contains(column);
    }
    if (!usable) continue;
    const Key keys[] = {key};
    const std::vector<Piece> pieces = pages_.cover(keys, 0, true);
    if (pieces.empty() || pieces.front().first != 0) continue;
    const std::uint32_t slot = pieces.front().slot;
    const Page& held = pages_.at(slot);
    const auto crcs = plan.page_crcs.begin() + static_cast<std::ptrdiff_t>(page * plan.shape.groups());
    if (held.blocks != plan.shape.page_blocks(page) || by_slot_.contains(slot) ||
        !std::equal(held.crcs.begin(), held.crcs.end(), crcs, crcs + plan.shape.groups())) {
      continue;
    }
    PinSet pin;
    pages_.pin(pin, slot);
    rebuild.pages.emplace(page, slot);
  }
}

std::vector<wire::Column> Rebuilds::candidates(const Rebuild& rebuild, bool parity_first) const {
  const kv::StripeShape& shape = rebuild.plan->shape;
  std::vector<wire::Column> data;
  std::vector<wire::Column> parity;
  for (const wire::Column& column : rebuild.plan->columns) {
    if (rebuild.unusable.contains(column.column) || groups_of(rebuild, column.column)) continue;
    if (!peers_.store_up(column.instance)) continue;
    bool target = false;
    for (const auto& [slot, wanted] : rebuild.targets) {
      target = target || (wanted.index ? !shape.is_parity(column.column) &&
                                             *wanted.index == shape.page_of(column.column)
                                       : wanted.column == column.column);
    }
    if (!target) (shape.is_parity(column.column) ? parity : data).push_back(column);
  }
  std::vector<wire::Column>& first = parity_first ? parity : data;
  const std::vector<wire::Column>& then = parity_first ? data : parity;
  first.insert(first.end(), then.begin(), then.end());
  std::stable_partition(first.begin(), first.end(), [&](const wire::Column& column) {
    return !hedge_.slow({column.instance, column.volume}, rebuild.plan->sources);
  });
  return first;
}

bool Rebuilds::read_column(Id id, Rebuild& rebuild, const wire::Column& column) {
  const StripePlan& plan = *rebuild.plan;
  const bool parity = plan.shape.is_parity(column.column);
  const std::uint32_t name = parity ? column.column : plan.shape.page_of(column.column);
  const std::uint32_t blocks = parity ? plan.shape.parity_slot_blocks() : plan.shape.page_blocks(name);
  if (!rebuild.rooms.contains(name)) {
    const std::uint32_t wanted[] = {blocks};
    const Result<std::vector<std::uint32_t>> slots = pages_.take(wanted, PageState::scratch);
    if (!slots) return false;
    rebuild.rooms.emplace(name, slots->front());
  }
  Reads::Want want;
  want.purpose = Reads::For::rebuild;
  want.source = *peers_.store_up(column.instance);
  want.lease = rebuild.lease;
  want.message.stripe = plan.stripe;
  want.message.volume = column.volume;
  want.message.column = column.column;
  want.message.page_blocks = blocks;
  want.message.slot = pages_.ref({rebuild.rooms.at(name), 0, blocks, 0});
  want.message.priority = rebuild.priority;
  const std::uint64_t transfer = reads_.start(want);
  rebuild.columns[column.column] = {transfer, 0, {want.source, column.volume}};
  by_transfer_.emplace(transfer, std::pair{id, column.column});
  ++counters_.scratch_reads;
  return true;
}

bool Rebuilds::gather(Id id, Rebuild& rebuild) {
  const std::uint32_t need = rebuild.plan->shape.data_stored();
  std::uint32_t have = coming(rebuild);
  if (have >= need) return true;
  find_pages(rebuild);
  have = coming(rebuild);
  const bool hedge = std::all_of(rebuild.targets.begin(), rebuild.targets.end(),
                                 [](const auto& item) { return item.second.late; });
  std::vector<wire::Column> columns = candidates(rebuild, hedge);
  if (hedge) {
    std::erase_if(columns, [&](const wire::Column& c) { return !rebuild.plan->shape.is_parity(c.column); });
    const auto parity_asked = static_cast<std::uint32_t>(
        std::count_if(rebuild.columns.begin(), rebuild.columns.end(),
                      [&](const auto& item) { return rebuild.plan->shape.is_parity(item.first); }));
    if (have < need && need - have + parity_asked > hedge_reads_max) return false;
  }
  if (have + columns.size() < need) return false;
  for (const wire::Column& column : columns) {
    if (have >= need) break;
    if (!read_column(id, rebuild, column)) return false;
    ++have;
  }
  return true;
}

void Rebuilds::read_progress(const Reads::Progress& progress) {
  const auto named = by_transfer_.find(progress.transfer);
  if (named == by_transfer_.end()) return;
  const auto [id, number] = named->second;
  Rebuild& rebuild = rebuilds_.at(id);
  if (progress.code != Code::ok) {
    by_transfer_.erase(named);
    rebuild.columns.at(number).transfer = 0;
    return column_bad(rebuild, number, progress.code);
  }
  Column& column = rebuild.columns.at(number);
  column.groups = progress.groups;
  if (!progress.over) return;
  const bool hedge = std::any_of(rebuild.targets.begin(), rebuild.targets.end(),
                                 [](const auto& item) { return item.second.late; });
  if (hedge && !sound(rebuild, number)) {
    ++counters_.columns_corrupt;
    return column_bad(rebuild, number, Code::corrupt);
  }
  by_transfer_.erase(named);
  column.transfer = 0;
  if (const auto read = reads_.view(progress.transfer)) {
    hedge_.came({read->source.instance, read->message.volume}, rebuild.plan->shape.column_bytes(number),
                progress.took);
  }
  reads_.take(progress.transfer);
}

void Rebuilds::column_bad(Rebuild& rebuild, std::uint16_t column, Code code) {
  const kv::StripeShape& shape = rebuild.plan->shape;
  const auto scratch = rebuild.columns.find(column);
  if (scratch != rebuild.columns.end()) {
    if (scratch->second.transfer != 0) {
      by_transfer_.erase(scratch->second.transfer);
      reads_.give_up(scratch->second.transfer);
    }
    const Reads::Source source = scratch->second.source;
    rebuild.columns.erase(scratch);
    rebuild.unusable.insert(column);
    return reads_.report(rebuild.plan->page_id(column), column, source, code);
  }
  for (auto& [slot, target] : rebuild.targets) {
    if (!target.index || shape.is_parity(column) || *target.index != shape.page_of(column)) continue;
    Part& part = target.parts[shape.part_of(column)];
    part.missing = true;
    return reads_.report(rebuild.plan->page_id(column), column, part.source, code);
  }
  // A page of the arena: whatever it is, it is not what the plan says.
  rebuild.unusable.insert(column);
  if (const auto page = rebuild.pages.find(shape.page_of(column)); page != rebuild.pages.end()) {
    released_.slots.push_back(page->second);
    rebuild.pages.erase(page);
  }
}

// ---- Steps -----------------------------------------------------------------------------------------------

bool Rebuilds::pump() {
  const std::uint64_t asked = counters_.scratch_reads;
  bool called_off = false;
  std::vector<Id> all;
  for (const auto& [id, rebuild] : rebuilds_) all.push_back(id);
  for (const Id id : all) {
    const Found found = rebuilds_.find(id);
    Rebuild& rebuild = found->second;
    std::erase_if(rebuild.pages, [&](const auto& page) {
      const PageState state = pages_.at(page.second).state;
      if (state == PageState::sealed || state == PageState::filling) return false;
      released_.slots.push_back(page.second);
      return true;
    });
    bool enough = gather(id, rebuild);
    if (!enough) {
      // What is only late may still come, and be what the others need.
      std::vector<std::uint32_t> late;
      for (const auto& [slot, target] : rebuild.targets) {
        if (target.late) late.push_back(slot);
      }
      for (const std::uint32_t slot : late) call_off(found, slot);
      if (!rebuilds_.contains(id)) continue;
      enough = gather(id, rebuild);
    }
    if (!enough) {
      std::vector<std::uint32_t> skipped;
      for (const auto& [slot, target] : rebuild.targets) {
        if (std::any_of(target.parts.begin(), target.parts.end(),
                        [](const Part& part) { return part.skipped; }))
          skipped.push_back(slot);
      }
      for (const std::uint32_t slot : skipped) progress_.push_back({Progress::Kind::unskip, slot, 0, 0});
      if (skipped.empty()) fail(found);
      continue;
    }
    const std::uint32_t last = rebuild.plan->shape.groups() - 1;
    std::vector<std::uint32_t> unsound;
    for (auto& [slot, target] : rebuild.targets) {
      if (!target.late || target.told || there(rebuild, last) < rebuild.plan->shape.data_stored()) continue;
      const bool own = std::all_of(target.parts.begin(), target.parts.end(),
                                   [&](const Part& part) { return part.missing || part.groups > last; });
      if (!own) continue;
      // What is late must not be given up for what turns out to be wrong; scratch was compared when it came.
      if (!parts_sound(rebuild)) {
        unsound.push_back(slot);
        continue;
      }
      target.told = true;
      progress_.push_back({Progress::Kind::decodable, slot, 0, 0});
    }
    for (const std::uint32_t slot : unsound) call_off(found, slot);
    called_off = called_off || !unsound.empty();
  }
  return called_off || counters_.scratch_reads != asked;
}

std::size_t Rebuilds::pins() const {
  std::size_t count = 0;
  for (const auto& [id, rebuild] : rebuilds_) count += rebuild.pages.size();
  return count;
}

bool Rebuilds::ready(const Rebuild& rebuild, std::uint32_t slot, const Target& target) const {
  const std::uint32_t group = next_group(slot, target);
  if (target.late || group >= rebuild.plan->shape.groups()) return false;
  for (const Part& part : target.parts) {
    if (!part.missing && part.groups <= group) return false;
  }
  if (target.index) {
    for (const std::uint16_t column : missing(rebuild, target)) {
      if (reads_.writes(slot, column)) return false;
    }
  }
  return there(rebuild, group) >= rebuild.plan->shape.data_stored();
}

bool Rebuilds::has_step() const {
  for (const auto& [id, rebuild] : rebuilds_) {
    for (const auto& [slot, target] : rebuild.targets) {
      if (ready(rebuild, slot, target)) return true;
    }
  }
  return false;
}

bool Rebuilds::step() {
  for (auto found = rebuilds_.begin(); found != rebuilds_.end(); ++found) {
    std::optional<std::uint32_t> group;
    std::vector<std::uint32_t> slots;
    for (const auto& [slot, target] : found->second.targets) {
      const std::uint32_t next = next_group(slot, target);
      if ((group && *group != next) || !ready(found->second, slot, target)) continue;
      group = next;
      slots.push_back(slot);
    }
    if (!group) continue;
    decode(found, *group, slots);
    return true;
  }
  return false;
}

void Rebuilds::decode(Found found, std::uint32_t group, const std::vector<std::uint32_t>& slots) {
  Rebuild& rebuild = found->second;
  const StripePlan& plan = *rebuild.plan;
  const std::uint32_t all = plan.shape.data_columns() + plan.shape.parity_columns();
  std::vector<ArenaPort::CodeColumn> columns(all);
  for (std::uint32_t i = 0; i < all; ++i) {
    const auto number = static_cast<std::uint16_t>(i);
    if (!plan.shape.is_stored(i)) {
      columns[i].present = true;
      continue;
    }
    columns[i].crc = plan.crc(i, group);
    const auto groups = groups_of(rebuild, number);
    if (!groups || *groups <= group) continue;
    columns[i].strip = strip_of(rebuild, number, group);
    columns[i].present = true;
    // An empty segment has no checksum to compare.
    if (columns[i].strip.bytes == 0) columns[i].crc = 0;
  }
  std::set<std::uint32_t> wanted;
  for (const std::uint32_t slot : slots) {
    for (const std::uint16_t number : missing(rebuild, rebuild.targets.at(slot))) {
      const Strip strip = strip_in(plan, slot, number, group);
      if (strip.bytes == 0) continue;
      columns[number].strip = strip;
      wanted.insert(number);
      ++counters_.columns;
      counters_.bytes += strip.bytes;
    }
  }
  const std::vector<std::uint32_t> list(wanted.begin(), wanted.end());
  const auto make = [&] { return port_.decode(plan.shape.data_columns(), columns, list); };
  const std::uint32_t wrong = list.empty() ? 0 : make();
  bool sources_good = true;
  for (std::uint32_t i = 0; i < all; ++i) {
    if ((wrong >> i & 1) == 0 || wanted.contains(i)) continue;
    sources_good = false;
    ++counters_.columns_corrupt;
    column_bad(rebuild, static_cast<std::uint16_t>(i), Code::corrupt);
  }
  if (!sources_good) return;  // the next pump looks for others
  for (const std::uint32_t slot : slots) {
    Target& target = rebuild.targets.at(slot);
    bool good = true;
    for (const std::uint16_t number : missing(rebuild, target)) good = good && (wrong >> number & 1) == 0;
    if (!target.index) {
      if (!good) {
        // The verdict takes the stripe away: only when it comes twice.
        if (make() != wrong) return fail(found);
        progress_.push_back({Progress::Kind::wrong, 0, group, rebuild.repair});
        return end(found);
      }
      ++target.group;
    } else if (!good || !pages_.verify_next(slot)) {
      // Every column is what the plan says, and the page is not: the plan contradicts itself.
      ++counters_.failed;
      progress_.push_back({Progress::Kind::failed, slot, 0, 0});
    } else {
      progress_.push_back({Progress::Kind::group, slot, group, 0});
    }
  }
  std::vector<std::uint32_t> over;
  for (const std::uint32_t slot : slots) {
    const Target& target = rebuild.targets.at(slot);
    const bool failed = std::any_of(progress_.begin(), progress_.end(), [&](const Progress& progress) {
      return target.index && progress.slot == slot && progress.kind == Progress::Kind::failed;
    });
    if (target.index && (failed || pages_.at(slot).state == PageState::sealed)) over.push_back(slot);
  }
  if (rebuild.repair != 0) {
    const bool done = std::all_of(rebuild.targets.begin(), rebuild.targets.end(),
                                  [&](const auto& item) { return item.second.group == plan.shape.groups(); });
    if (done) progress_.push_back({Progress::Kind::group, 0, group, rebuild.repair});
    return;
  }
  for (const std::uint32_t slot : over) {
    const bool last = rebuild.targets.size() == 1;
    erase_target(found, slot);
    if (last) return;
  }
}

Status Rebuilds::check(std::map<std::uint32_t, std::uint32_t>& pins, std::set<std::uint32_t>& scratch,
                       std::set<std::uint64_t>& reads, std::map<std::uint64_t, std::size_t>& leases) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  if (rebuilds_.size() > limits_.rebuilds_max) return broken("more rebuilds than there may be");
  if (!released_.slots.empty() || !progress_.empty()) return broken("what a rebuild said was not heard");
  std::size_t named = 0;
  std::size_t transfers = 0;
  for (const auto& [id, rebuild] : rebuilds_) {
    if (rebuild.targets.empty()) return broken("a rebuild of nothing");
    if (rebuild.lease != 0) ++leases[rebuild.lease];
    for (const auto& [page, slot] : rebuild.pages) {
      ++pins[slot];
      const PageState state = pages_.at(slot).state;
      if (state != PageState::sealed && state != PageState::filling)
        return broken("a rebuild waits for a page that does not come");
      if (by_slot_.contains(slot)) return broken("a rebuild waits for what is rebuilt");
    }
    for (const auto& [name, slot] : rebuild.rooms) {
      if (!scratch.insert(slot).second) return broken("a rebuild uses what is somebody else's");
    }
    for (const auto& [slot, target] : rebuild.targets) {
      if (!target.index) continue;
      ++named;
      const auto back = by_slot_.find(slot);
      if (back == by_slot_.end() || back->second != id) return broken("a rebuild has lost its page");
      if (pages_.at(slot).state != PageState::filling) return broken("a page is rebuilt that is not awaited");
    }
    for (const auto& [number, column] : rebuild.columns) {
      if (column.transfer == 0) continue;
      ++transfers;
      reads.insert(column.transfer);
      if (!by_transfer_.contains(column.transfer)) return broken("a rebuild has lost a read");
    }
    if (coming(rebuild) < rebuild.plan->shape.data_stored()) return broken("a rebuild has too few columns");
  }
  if (named != by_slot_.size() || transfers != by_transfer_.size() ||
      by_stripe_.size() + by_repair_.size() != rebuilds_.size()) {
    return broken("a rebuild is gone and its names are not");
  }
  return {};
}

}  // namespace di::host
