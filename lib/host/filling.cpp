#include "host/filling.h"

#include <algorithm>
#include <string>

namespace di::host {

namespace {

Lost lost_of(Code code) {
  switch (code) {
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

std::uint32_t readable_columns(const StripePlan& stripe, const Peers& peers) {
  return static_cast<std::uint32_t>(
      std::count_if(stripe.columns.begin(), stripe.columns.end(),
                    [&](const wire::Column& column) { return peers.store_up(column.instance).has_value(); }));
}

}  // namespace

Fillings::Fillings(Pages& pages, ArenaPort& port, const Peers& peers, Reads& reads, Rebuilds& rebuilds,
                   Leases& leases, Hedge& hedge)
    : pages_(pages),
      port_(port),
      peers_(peers),
      reads_(reads),
      rebuilds_(rebuilds),
      leases_(leases),
      hedge_(hedge) {}

// ---- From a plan -----------------------------------------------------------------------------------------

Fillings::Stripes Fillings::stripes_of(const wire::meta_planned& plan) {
  Stripes stripes;
  for (const wire::PlannedStripe& planned : plan.stripes) {
    Result<std::shared_ptr<StripePlan>> made = StripePlan::of(pages_.layout(), planned);
    if (!made) {
      ++counters_.malformed;
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
    const std::uint32_t readable = readable_columns(stripe, peers_);
    if (all_wanted && readable > stripe.shape.data_stored())
      known.spare = std::min(readable - stripe.shape.data_stored(), Rebuilds::hedge_reads_max);
    known.stripe = *std::move(made);
  }
  return stripes;
}

std::optional<Fillings::Filling> Fillings::filling_of(const Want& want, const Stripes& stripes) const {
  const wire::PlannedPage& page = want.page;
  const kv::Layout& layout = pages_.layout();
  if (page.page_blocks == 0 || page.page_blocks > layout.page_blocks() ||
      page.keys.size() != page.page_blocks || page.crcs.size() != layout.groups()) {
    return std::nullopt;
  }
  Filling filling;
  filling.opener = want.opener;
  filling.page = page.page;
  filling.lease = want.lease;
  filling.priority = want.priority;
  filling.index = static_cast<std::uint32_t>(page.page & 0xff);
  filling.parts.resize(1);
  filling.parts[0].column = static_cast<std::uint16_t>(filling.index);
  const auto stripe = stripes.find(page.page >> 8);
  if (stripe == stripes.end()) return filling;
  const kv::StripeShape& shape = stripe->second.stripe->shape;
  if (filling.index >= shape.pages() || shape.page_blocks(filling.index) != page.page_blocks)
    return std::nullopt;
  filling.stripe = stripe->second.stripe;
  filling.parts.resize(shape.parts());
  for (std::uint32_t i = 0; i < shape.parts(); ++i)
    filling.parts[i].column = static_cast<std::uint16_t>(filling.index * shape.parts() + i);
  return filling;
}

Gap Fillings::find_sources(const wire::PlannedPage& page, Filling& filling, Sources& sources) const {
  Gap gap = Gap::absent;
  sources.assign(filling.parts.size(), std::nullopt);
  for (const wire::Column& column : page.columns) {
    for (std::size_t i = 0; i < filling.parts.size(); ++i) {
      // A column elsewhere does not help.
      if (filling.parts[i].column != column.column) continue;
      gap = Gap::unreachable;
      if (const std::optional<Peer> store = peers_.store_up(column.instance)) {
        sources[i].emplace();
        sources[i]->source = *store;
        sources[i]->message.volume = column.volume;
        sources[i]->message.column = column.column;
      }
    }
  }
  if (std::count(sources.begin(), sources.end(), std::nullopt) == 0) return Gap::none;
  // Not in the store (yet), or not all of it: out of the arena that has it, or made of other columns.
  for (const std::string& host : page.arenas) {
    const std::optional<Peer> arena = peers_.arena_up(host);
    if (!arena) continue;
    filling.arena = true;
    filling.stripe = nullptr;
    filling.parts.resize(1);
    sources.assign(1, Reads::Want{});
    sources[0]->source = *arena;
    sources[0]->arena = true;
    return Gap::none;
  }
  if (!filling.stripe || filling.stripe->shape.parity_columns() == 0) return gap;
  const bool enough = readable_columns(*filling.stripe, peers_) >= filling.stripe->shape.data_stored();
  return enough ? Gap::none : Gap::unreachable;
}

Fillings::Begun Fillings::begin(const Want& want, Stripes& stripes) {
  const wire::PlannedPage& page = want.page;
  std::optional<Filling> filling = filling_of(want, stripes);
  if (!filling) {
    ++counters_.malformed;
    return {Gap::absent};
  }
  Sources sources;
  if (const Gap gap = find_sources(page, *filling, sources); gap != Gap::none) return {gap};
  if (pages_.room_bytes(page.page_blocks) > want.room_bytes_max) return {Gap::no_room};
  const std::uint32_t blocks[] = {page.page_blocks};
  const Result<std::vector<std::uint32_t>> slots = pages_.take(blocks, PageState::filling);
  if (!slots) return {Gap::no_room};
  const std::uint32_t slot = slots->front();
  pages_.announce(slot, want.parent, page.keys, page.crcs, true);
  const Begun begun{Gap::none, filling->place(), pages_.layout().page_bytes(page.page_blocks)};
  coming_bytes_[static_cast<std::size_t>(begun.place)] += begun.bytes;

  Filling& added = fillings_.emplace(slot, *std::move(filling)).first->second;
  leases_.hold_again(added.lease);
  bool whole = true;
  for (std::uint32_t i = 0; i < added.parts.size(); ++i) {
    Part& part = added.parts[i];
    if (sources[i] && added.stripe) {
      Planned& planned = stripes.at(added.stripe->stripe);
      if (planned.spare > 0 &&
          hedge_.skip({sources[i]->source.instance, sources[i]->message.volume}, added.stripe->sources)) {
        --planned.spare;
        part.skipped = true;
      }
    }
    if (sources[i] && !part.skipped) {
      sources[i]->key = page.keys.back();
      start_read(slot, i, *sources[i]);
      continue;
    }
    part.missing = true;
    whole = false;
  }
  if (!whole) rebuild(slot, added);
  return begun;
}

void Fillings::start_read(std::uint32_t slot, std::uint32_t part, Reads::Want want) {
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
  read.source = {want.source, want.message.volume};
  read.transfer = reads_.start(want);
  by_transfer_.emplace(read.transfer, PartName{slot, part});
}

void Fillings::rebuild(std::uint32_t slot, const Filling& filling) {
  rebuilds_.add(filling.stripe, slot, filling.index, parts_of(filling), filling.priority, filling.lease);
}

std::uint64_t Fillings::column_bytes(const Filling& filling, const Part& part, std::uint32_t blocks) const {
  return filling.stripe ? filling.stripe->shape.column_bytes(part.column)
                        : pages_.layout().page_bytes(blocks);
}

std::vector<Rebuilds::Part> Fillings::parts_of(const Filling& filling) {
  std::vector<Rebuilds::Part> parts;
  for (const Part& part : filling.parts)
    parts.push_back({part.groups, part.missing, part.skipped, false, part.source});
  return parts;
}

// ---- Who wants it ----------------------------------------------------------------------------------------

void Fillings::hurry(std::uint32_t slot, std::uint8_t priority) {
  for (const Part& part : fillings_.at(slot).parts) {
    if (part.transfer != 0) reads_.prioritise(part.transfer, priority);
  }
}

void Fillings::unpin(PinSet& pins) {
  const std::vector<std::uint32_t> slots = pins.slots;
  pages_.unpin(pins);
  for (const std::uint32_t slot : slots) {
    if (!fillings_.contains(slot) || pages_.at(slot).pins > 0) continue;
    end(slot);
    pages_.spoil(slot);
  }
}

// ---- What comes ------------------------------------------------------------------------------------------

void Fillings::read_progress(const Reads::Progress& progress) {
  const auto named = by_transfer_.find(progress.transfer);
  if (named == by_transfer_.end()) return;
  const auto [slot, number] = named->second;
  Filling& filling = fillings_.at(slot);
  Part& part = filling.parts[number];
  if (progress.code != Code::ok) {
    by_transfer_.erase(named);
    part.transfer = 0;
    if (!filling.arena) reads_.report(filling.page, part.column, part.source, progress.code);
    return part_lost(slot, number, lost_of(progress.code));
  }
  part.groups = progress.groups;
  if (rebuilds_.has(slot)) rebuilds_.part_moved(slot, number, progress.groups);
  const bool missing =
      std::any_of(filling.parts.begin(), filling.parts.end(), [](const Part& p) { return p.missing; });
  if (!missing) verify(slot);
  // What was wrong was given up.
  if (!progress.over || !by_transfer_.contains(progress.transfer)) return;
  // Less than a column says nothing of how long one takes.
  if (const auto read = reads_.view(progress.transfer);
      read && !filling.arena && read->message.from_group == 0) {
    hedge_.came({read->source.instance, read->message.volume},
                column_bytes(filling, part, read->message.page_blocks), progress.took);
  }
  by_transfer_.erase(progress.transfer);
  part.transfer = 0;
  reads_.take(progress.transfer);
  if (pages_.at(slot).state != PageState::sealed) return;
  sealed_ = true;
  end(slot);
}

void Fillings::verify(std::uint32_t slot) {
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
    progress_.push_back({slot, group, {}});
  }
  const std::vector<std::uint32_t> wrong = wrong_parts(slot, filling);
  // Every part is what the plan says, and the page is not: the plan contradicts itself.
  if (wrong.empty()) return fail(slot, Lost::checksum);
  for (const std::uint32_t i : wrong) {
    const auto found = fillings_.find(slot);
    if (found == fillings_.end()) return;
    Part& part = found->second.parts[i];
    ++counters_.columns_corrupt;
    if (!found->second.arena) reads_.report(found->second.page, part.column, part.source, Code::corrupt);
    give_up_read(part);
    part_lost(slot, i, Lost::checksum);
  }
}

std::vector<std::uint32_t> Fillings::wrong_parts(std::uint32_t slot, const Filling& filling) {
  if (filling.parts.size() == 1) return {0};
  const Page& page = pages_.at(slot);
  const kv::StripeShape& shape = filling.stripe->shape;
  std::vector<std::uint32_t> wrong;
  for (std::uint32_t i = 0; i < filling.parts.size(); ++i) {
    const std::uint16_t column = filling.parts[i].column;
    const std::uint64_t bytes = shape.segment_bytes(column, page.groups);
    if (bytes == 0) continue;
    const std::uint64_t offset = page.place.offset + shape.page_offset(column, page.groups);
    if (port_.segment_crc(offset, bytes) != filling.stripe->crc(column, page.groups)) wrong.push_back(i);
  }
  return wrong;
}

void Fillings::give_up_read(Part& part) {
  if (part.transfer == 0) return;
  by_transfer_.erase(part.transfer);
  reads_.give_up(std::exchange(part.transfer, 0));
}

void Fillings::part_lost(std::uint32_t slot, std::uint32_t part, Lost why) {
  Filling& filling = fillings_.at(slot);
  if (!rebuilds_.has(slot)) {
    for (Part& other : filling.parts) other.late = false;
  }
  if (std::none_of(filling.parts.begin(), filling.parts.end(),
                   [](const Part& other) { return other.missing; }))
    filling.why = why;
  filling.parts[part].missing = true;
  if (!filling.stripe || filling.stripe->shape.parity_columns() == 0) return fail(slot, why);
  if (rebuilds_.has(slot)) {
    rebuilds_.part_missing(slot, part);
  } else {
    rebuild(slot, filling);
  }
}

void Fillings::rebuild_progress(const Rebuilds::Progress& progress, const Now& now) {
  const std::uint32_t slot = progress.slot;
  const auto found = fillings_.find(slot);
  if (found == fillings_.end()) return;
  switch (progress.kind) {
    case Rebuilds::Progress::Kind::group: {
      const Page& page = pages_.at(slot);
      counters_.read_bytes += pages_.layout().segment_bytes(progress.group, page.blocks);
      progress_.push_back({slot, progress.group, {}});
      if (page.state != PageState::sealed) return;
      ++counters_.pages_rebuilt;
      sealed_ = true;
      return end(slot);
    }
    case Rebuilds::Progress::Kind::failed:
    case Rebuilds::Progress::Kind::wrong:
      return fail(slot, found->second.why);
    case Rebuilds::Progress::Kind::unskip:
      if (!read_skipped(slot)) fail(slot, found->second.why);
      return;
    case Rebuilds::Progress::Kind::decodable:
      ++counters_.hedges_won;
      return give_up_late(slot, now);
  }
}

bool Fillings::read_skipped(std::uint32_t slot) {
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
        // What is shown already is right, and may be read: nobody writes there.
        part.groups = want.message.from_group = pages_.at(slot).groups;
        part.missing = false;
        start_read(slot, i, want);
        some = true;
        continue;
      }
    }
    whole = false;
  }
  rebuilds_.drop(slot);
  if (some && !whole) rebuild(slot, filling);
  return some;
}

// ---- Late columns ----------------------------------------------------------------------------------------

Instant Fillings::late_at(const Filling& filling) const {
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

void Fillings::hedge(std::uint32_t slot, const Now& now) {
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
    parts[i].late = true;
    late.push_back(i);
  }
  const auto count = static_cast<std::uint32_t>(late.size());
  if (count == 0 || !hedge_.hedge(count)) return;
  if (!rebuilds_.hedge(filling.stripe, slot, filling.index, std::move(parts), filling.priority,
                       filling.lease)) {
    return hedge_.refund(count);
  }
  for (const std::uint32_t i : late) filling.parts[i].late = true;
  ++counters_.hedges;
}

void Fillings::give_up_late(std::uint32_t slot, const Now& now) {
  Filling& filling = fillings_.at(slot);
  for (std::uint32_t i = 0; i < filling.parts.size(); ++i) {
    Part& part = filling.parts[i];
    if (!part.late || part.missing || part.transfer == 0) continue;
    if (const auto read = reads_.view(part.transfer); read && read->message.from_group == 0) {
      hedge_.gave_up({read->source.instance, read->message.volume},
                     column_bytes(filling, part, read->message.page_blocks), now.liveness - read->since);
    }
    give_up_read(part);
    part.missing = true;
    rebuilds_.part_missing(slot, i);
  }
}

// ---- The end ---------------------------------------------------------------------------------------------

void Fillings::end(std::uint32_t slot) {
  const auto found = fillings_.find(slot);
  Filling over = std::move(found->second);
  fillings_.erase(found);
  coming_bytes_[static_cast<std::size_t>(over.place())] -= pages_.layout().page_bytes(pages_.at(slot).blocks);
  for (Part& part : over.parts) give_up_read(part);
  rebuilds_.drop(slot);
  leases_.drop(over.lease);
}

void Fillings::fail(std::uint32_t slot, Lost why) {
  ++counters_.pages_failed;
  end(slot);
  pages_.spoil(slot);
  progress_.push_back({slot, 0, why});
}

void Fillings::lease_over(std::uint64_t lease) {
  std::vector<std::uint32_t> over;
  for (const auto& [slot, filling] : fillings_) {
    if (filling.lease == lease) over.push_back(slot);
  }
  // The stripe may be freed under it from now on.
  for (const std::uint32_t slot : over) fail(slot, Lost::timeout);
}

void Fillings::on_time(const Now& now) {
  std::vector<std::uint32_t> late;
  for (const auto& [slot, filling] : fillings_) {
    if (late_at(filling) <= now.liveness) late.push_back(slot);
  }
  for (const std::uint32_t slot : late) hedge(slot, now);
}

Due Fillings::next_due() const {
  Due due;
  for (const auto& [slot, filling] : fillings_) due.sooner_liveness(late_at(filling));
  return due;
}

Status Fillings::check(std::set<std::uint64_t>& reads, std::map<std::uint64_t, std::size_t>& leases) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  if (!progress_.empty()) return broken("what became of a page was not heard");
  std::size_t transfers = 0;
  for (const auto& [slot, filling] : fillings_) {
    const Page& page = pages_.at(slot);
    if (page.state != PageState::filling) return broken("state of a page and its filling disagree");
    if (page.pins == 0) return broken("a page comes for nobody");
    if (filling.lease != 0) ++leases[filling.lease];
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
  return {};
}

}  // namespace di::host
