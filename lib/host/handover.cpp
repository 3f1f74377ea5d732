#include "host/handover.h"

#include <algorithm>

namespace di::host {

namespace {

// How often the rule of slow links is looked at.
constexpr Duration watch_every = milliseconds(250);

}  // namespace

Handovers::Handovers(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port,
                     DataPort& data, Pushes& pushes, const Peers& peers, Numbers& numbers, Outbox& out)
    : limits_(limits),
      pages_(pages),
      entries_(entries),
      port_(port),
      data_(data),
      pushes_(pushes),
      peers_(peers),
      numbers_(numbers),
      out_(out) {}

// ---- A ---------------------------------------------------------------------------------------------------

Handovers::Source* Handovers::begin(const Holder& holder, const wire::Scope& scope, std::uint64_t seat,
                                    const std::string& decode, const std::string& host,
                                    const std::vector<Key>& keys, bool tail, const Now& now) {
  if (const auto known = sources_.find({scope.request, scope.attempt}); known != sources_.end()) {
    ++counters_.replaced;
    drop_source(known);
  }
  ++counters_.sources;
  const auto refuse = [&](Code code) {
    ++counters_.failed;
    send(holder.client, scope, wire::kv_handed{seat, static_cast<std::uint16_t>(code), decode});
    return nullptr;
  };
  if (sources_.size() >= limits_.sources_max) return refuse(Code::busy);
  if (keys.size() > limits_.keys_max || !pages_.has_layout()) return refuse(Code::invalid);
  const std::optional<Peer> b = peers_.host_up(host);
  if (!b) return refuse(Code::unreachable);
  Source source;
  source.holder = holder;
  source.scope = scope;
  source.b = *b;
  source.decode = decode;
  source.keys = keys;
  source.has_tail = tail;
  source.message.seat = seat;
  source.hold_until = now.product + limits_.hold;
  send(source.b, scope, wire::handover_open{seat, decode, keys, tail});
  return &sources_.emplace(Name{scope.request, scope.attempt}, std::move(source)).first->second;
}

void Handovers::push(const Holder& holder, const wire::Scope& scope, const wire::kv_push& message,
                     const Now& now) {
  if (const auto known = sources_.find({scope.request, scope.attempt}); known != sources_.end()) {
    const Source& source = known->second;
    if (source.holder == holder && source.message.seat == message.seat && source.decode == message.decode)
      return;  // said twice
  }
  begin(holder, scope, message.seat, message.decode, message.host, message.keys, message.tail, now);
}

void Handovers::hand_over(const Holder& holder, const wire::Scope& scope, const wire::kv_handover& message,
                          const Now& now) {
  const Name name{scope.request, scope.attempt};
  const bool has_tail = message.tail.count != 0;
  Source* source = nullptr;
  if (const auto known = sources_.find(name); known != sources_.end()) {
    Source& begun = known->second;
    if (begun.holder == holder && begun.message.seat == message.seat && begun.decode == message.decode) {
      if (begun.final) return;  // said twice
      if (begun.keys == message.keys && begun.has_tail == has_tail) source = &begun;
    }
  }
  // It has ended, and the rank did not hear that.
  if (handed_.known.contains({holder, message.decode, message.seat})) {
    return send(holder.client, scope, wire::kv_handed{message.seat, 0, message.decode});
  }
  const auto refuse = [&] {
    if (const auto begun = sources_.find(name); begun != sources_.end()) drop_source(begun);
    ++counters_.failed;
    send(holder.client, scope,
         wire::kv_handed{message.seat, static_cast<std::uint16_t>(Code::invalid), message.decode});
  };
  if (message.keys.size() > limits_.keys_max || !pages_.has_layout()) return refuse();
  // What is not here now never will be: another seat does not help.
  const std::vector<Piece> pieces = pages_.cover(message.keys, 0, false);
  if ((pieces.empty() ? 0 : pieces.back().at + pieces.back().count) != message.keys.size()) return refuse();
  const Page* tail = nullptr;
  if (has_tail) {
    tail = pages_.find(message.tail.slot, message.tail.generation);
    if (tail == nullptr || tail->state != PageState::sealed || !tail->keys.empty()) return refuse();
  }
  if (source == nullptr) {
    source = begin(holder, scope, message.seat, message.decode, message.host, message.keys, has_tail, now);
    if (source == nullptr) return;
  }
  source->final = true;
  source->hold_until = now.product + limits_.hold;
  PinSet pins;
  for (const Piece& piece : pieces) pages_.pin(pins, piece.slot);
  if (tail != nullptr) {
    pages_.pin(pins, message.tail.slot);
    source->tail_slot = message.tail.slot;
    source->message.tail = pages_.ref({message.tail.slot, 0, 1, 0});
    source->message.tail_crcs = tail->crcs;
  }
  // They may be others than those that hold the chain now, and B is still to answer.
  for (const std::uint32_t slot : source->offered) pages_.pin(pins, slot);
  std::swap(source->pins, pins);
  pages_.unpin(pins);
  source->message.token = message.token;
  source->message.index = message.index;
  source->message.sampler = message.sampler;
  source->moved_at = now.liveness;
  source->check_at = now.liveness + watch_every;
  advance(*source, now);
}

Handovers::Source* Handovers::source_of(const Peer& b, const wire::Scope& scope, std::uint64_t seat) {
  const auto found = sources_.find({scope.request, scope.attempt});
  if (found == sources_.end() || found->second.b != b || found->second.message.seat != seat) return nullptr;
  return &found->second;
}

void Handovers::opened(const Peer& b, const wire::Scope& scope, const wire::handover_opened& message,
                       const Now& now) {
  const Name name{scope.request, scope.attempt};
  Source* source = source_of(b, scope, message.seat);
  if (source == nullptr || source->state != SourceState::opening) return;
  if (message.code != 0) return end_source(name, static_cast<Code>(message.code));
  const bool here = b == peers_.self();
  std::uint32_t last = 0;
  for (const std::uint32_t block : message.missing) {
    if (here || block >= source->keys.size() || (!source->missing.empty() && block <= last))
      return end_source(name, Code::invalid);
    source->missing.push_back(last = block);
  }
  if (here) {
    source->tail_there = true;  // B reads it where it is
  } else if (source->has_tail) {
    if (message.slots.size() != 1 || message.slots[0].page_blocks != 1)
      return end_source(name, Code::invalid);
    source->tail_target = message.slots[0];
  }
  source->state = SourceState::pushing;
  source->message.transfer = message.transfer;
  advance(*source, now);
}

void Handovers::slots(const Peer& b, const wire::Scope& scope, const wire::handover_slots& message,
                      const Now& now) {
  const Name name{scope.request, scope.attempt};
  Source* source = source_of(b, scope, message.seat);
  if (source == nullptr || source->state != SourceState::pushing ||
      source->message.transfer != message.transfer) {
    return;
  }
  if (message.code != 0) return end_source(name, static_cast<Code>(message.code));
  if (message.slots.size() > source->offered.size()) return end_source(name, Code::invalid);
  for (const wire::SlotRef& target : message.slots) {
    const std::uint32_t slot = source->offered.front();
    source->offered.pop_front();
    if (target.count == 0) continue;  // B has it by now
    if (target.page_blocks != pages_.at(slot).blocks) return end_source(name, Code::invalid);
    const Pushes::PushId id =
        pushes_.start(Pushes::For::handover, b, message.transfer, target, slot, transfer::Class::handover);
    source->pages.emplace(id, target);
    by_push_.emplace(id, name);
  }
  advance(*source, now);
}

void Handovers::progressed(const Pushes::Progress& progress, const Now& now) {
  if (!progress.over) return;
  const auto named = by_push_.find(progress.id);
  if (named == by_push_.end()) return;  // of a source that is over
  const Name name = named->second;
  by_push_.erase(named);
  Source& source = sources_.at(name);
  const bool tail = progress.id == source.tail_push;
  if (tail) {
    source.tail_there = progress.code == Code::ok;
  } else {
    const auto page = source.pages.find(progress.id);
    if (progress.code == Code::ok) source.arrived.push_back(page->second);
    source.pages.erase(page);
  }
  if (progress.code != Code::ok) {
    // Whatever the data plane calls it, the bytes did not get there.
    return end_source(name, progress.code == Code::cancelled ? Code::unreachable : progress.code);
  }
  source.moved_at = now.liveness;
  advance(source, now);
}

void Handovers::page_sealed(const Now& now) {
  for (auto& [name, source] : sources_) {
    if (source.state == SourceState::pushing && !source.final) advance(source, now);
  }
}

void Handovers::offer(Source& source) {
  wire::handover_pages batch{source.message.seat, source.message.transfer, {}};
  while (!source.missing.empty() && source.offered.size() + source.pages.size() < limits_.offer_pages_max) {
    const std::vector<Piece> pieces = pages_.cover(source.keys, source.missing.front(), false, 1);
    if (pieces.empty()) break;  // not yet computed
    const Piece& piece = pieces.front();
    const Page& page = pages_.at(piece.slot);
    pages_.pin(source.pins, piece.slot);
    source.offered.push_back(piece.slot);
    batch.pages.push_back({page.parent, page.keys, page.crcs});
    while (!source.missing.empty() && source.missing.front() < piece.at + piece.count)
      source.missing.pop_front();
  }
  if (!batch.pages.empty()) send(source.b, source.scope, batch);
}

void Handovers::advance(Source& source, const Now& now) {
  if (source.state != SourceState::pushing) return;
  offer(source);
  if (!source.arrived.empty()) {
    send(source.b, source.scope,
         wire::handover_pushed{source.message.seat, source.message.transfer,
                               std::exchange(source.arrived, {})});
  }
  if (!source.final) return;
  if (source.tail_target && source.tail_push == 0) {
    source.tail_push = pushes_.start(Pushes::For::handover, source.b, source.message.transfer,
                                     *source.tail_target, source.tail_slot, transfer::Class::handover);
    by_push_.emplace(source.tail_push, Name{source.scope.request, source.scope.attempt});
    source.message.tail = *source.tail_target;
  }
  if (!source.pushes_over()) return;
  source.state = SourceState::sealed;
  source.check_at = instant_never;
  source.again_at = now.liveness + limits_.say_again;
  send(source.b, source.scope, source.message);
}

bool Handovers::too_slow(const Source& source, const Now& now) const {
  if (now.liveness - source.moved_at >= limits_.push_wait) return true;
  const double rate = data_.rate(source.b);
  if (source.state != SourceState::pushing || rate <= 0) return false;
  const std::uint32_t page_blocks = pages_.layout().page_blocks();
  std::uint64_t left = source.missing.size() * pages_.layout().page_bytes(page_blocks) / page_blocks;
  for (const std::uint32_t slot : source.offered) left += pages_.layout().page_bytes(pages_.at(slot).blocks);
  for (const auto& [id, target] : source.pages) left += pages_.layout().page_bytes(target.page_blocks);
  return static_cast<double>(left) / rate > to_s(limits_.push_wait);
}

void Handovers::acknowledged(const Peer& b, const wire::Scope& scope, const wire::handover_ack& message) {
  const Source* source = source_of(b, scope, message.seat);
  // An ack before the end says what went wrong.
  if (source == nullptr || (source->state != SourceState::sealed && message.code == 0)) return;
  end_source({scope.request, scope.attempt}, static_cast<Code>(message.code));
}

void Handovers::release_source(const Holder& holder) {
  const auto found = sources_.find({holder.request, holder.attempt});
  if (found != sources_.end() && found->second.holder == holder && !found->second.final) drop_source(found);
}

void Handovers::end_source(const Name& name, Code code) {
  const auto found = sources_.find(name);
  DI_ASSERT(found != sources_.end());
  const Source& source = found->second;
  ++(code == Code::ok ? counters_.acknowledged : counters_.failed);
  // Before it is final nobody waits: kv_handover will ask again and hear.
  if (source.final) {
    if (code == Code::ok)
      handed_.add({source.holder, source.decode, source.message.seat}, limits_.answers_max);
    send(source.holder.client, source.scope,
         wire::kv_handed{source.message.seat, static_cast<std::uint16_t>(code), source.decode});
  }
  drop_source(found);
}

void Handovers::drop_source(std::map<Name, Source>::iterator found) {
  Source source = std::move(found->second);
  sources_.erase(found);
  for (const auto& [id, target] : source.pages) {
    by_push_.erase(id);
    pushes_.cancel(id);
  }
  if (source.tail_push != 0 && by_push_.erase(source.tail_push) > 0) pushes_.cancel(source.tail_push);
  pages_.unpin(source.pins);
}

// ---- B ---------------------------------------------------------------------------------------------------

bool Handovers::expect(const Holder& holder, const wire::Scope& scope, const wire::kv_expect& message,
                       bool made_here, const Now& now) {
  wire::kv_expected answer;
  answer.seat = message.seat;
  if (const auto known = seats_.find(holder); known != seats_.end()) {
    // Said twice, or another seat for the same attempt, which nobody has.
    answer.code = static_cast<std::uint16_t>(known->second.seat == message.seat ? Code::ok : Code::exists);
    answer.entry = known->second.entry;
    send(holder.client, scope, answer);
    return false;
  }
  const auto refuse = [&](Code code) {
    ++counters_.seats_refused;
    answer.code = static_cast<std::uint16_t>(code);
    send(holder.client, scope, answer);
    return false;
  };
  const std::pair<std::string, std::uint64_t> seat_name{holder.client.instance, message.seat};
  if (message.keys.size() > limits_.keys_max) return refuse(Code::invalid);
  if (seat_names_.contains(seat_name)) return refuse(Code::exists);
  if (!pages_.has_layout()) return refuse(Code::busy);
  const std::uint64_t blocks_need = room_for(message.keys);
  const std::uint64_t need = blocks_need + (message.tail_tokens > 0 ? pages_.room_bytes(1) : 0);
  if (need > pages_.bytes_total()) return refuse(Code::invalid);
  // All of its blocks are here, and so will be its tail if it has one: granted at once, since it is by its end that
  // its pages can go.  What its prefill, or its own fetch of them, still needs is waited for there.
  const bool needs_none = blocks_need == 0 && (made_here || message.tail_tokens == 0);
  if (!needs_none && reserved_bytes_ + need > pages_.bytes_free() + pages_.bytes_evictable())
    return refuse(Code::busy);
  const Result<std::uint32_t> entry = entries_.take();
  if (!entry) return refuse(Code::busy);
  port_.entry_open(*entry);
  Seat seat;
  seat.scope = scope;
  seat.seat = message.seat;
  seat.keys = message.keys;
  seat.tail = message.tail_tokens > 0;
  seat.entry = *entry;
  seat.reserved_bytes = need;
  seat.hold_until = now.product + limits_.hold;
  reserved_bytes_ += need;
  ++counters_.seats;
  answer.entry = *entry;
  seats_.emplace(holder, std::move(seat));
  seat_names_.emplace(seat_name, holder);
  seats_of_.emplace(Name{holder.request, holder.attempt}, holder);
  send(holder.client, scope, answer);
  return true;
}

std::uint64_t Handovers::room_for(const std::vector<Key>& keys) const {
  std::uint32_t missing = 0;
  for (const Key& key : keys) missing += pages_.has(key) ? 0 : 1;
  const std::uint32_t page_blocks = pages_.layout().page_blocks();
  std::uint64_t room = std::uint64_t{missing / page_blocks} * pages_.room_bytes(page_blocks);
  if (missing % page_blocks != 0) room += pages_.room_bytes(missing % page_blocks);
  return room;
}

void Handovers::need_less(Seat& seat, std::uint64_t bytes) {
  const std::uint64_t room = std::min(seat.reserved_bytes, bytes);
  seat.reserved_bytes -= room;
  reserved_bytes_ -= room;
}

void Handovers::page_sealed_for(const Holder& holder, std::uint64_t bytes) {
  const auto [first, last] = seats_of_.equal_range(Name{holder.request, holder.attempt});
  for (auto seat = first; seat != last; ++seat) need_less(seats_.at(seat->second), bytes);
}

std::map<Holder, Handovers::Seat>::iterator Handovers::find_seat(const std::string& decode,
                                                                 std::uint64_t seat,
                                                                 const wire::Scope& scope) {
  const auto named = seat_names_.find({decode, seat});
  if (named == seat_names_.end()) return seats_.end();
  const Holder& holder = named->second;
  if (holder.request != scope.request || holder.attempt != scope.attempt) return seats_.end();
  return seats_.find(holder);
}

std::map<Holder, Handovers::Seat>::iterator Handovers::find_transfer(const Peer& a, std::uint64_t seat,
                                                                     std::uint64_t transfer,
                                                                     const wire::Scope& scope) {
  // These messages do not name the decode instance: the transfer number does.
  return std::find_if(seats_.begin(), seats_.end(), [&](const auto& item) {
    return item.second.seat == seat && item.second.transfer == transfer && item.second.a == a &&
           item.second.state != SeatState::waiting && item.first.request == scope.request &&
           item.first.attempt == scope.attempt;
  });
}

std::optional<Holder> Handovers::open(const Peer& a, const wire::Scope& scope,
                                      const wire::handover_open& message) {
  wire::handover_opened answer;
  answer.seat = message.seat;
  const auto refuse = [&](Code code) {
    answer.code = static_cast<std::uint16_t>(code);
    send(a, scope, answer);
    return std::nullopt;
  };
  const auto found = find_seat(message.decode, message.seat, scope);
  if (found == seats_.end()) return refuse(Code::not_found);
  Seat& seat = found->second;
  if (seat.state == SeatState::seated || message.keys != seat.keys || message.tail != seat.tail) {
    return refuse(Code::invalid);
  }
  if (seat.state == SeatState::opened) reopen(seat);
  for (std::uint32_t at = 0; at < seat.keys.size();) {
    const std::vector<Piece> pieces = pages_.cover(seat.keys, at, false);
    for (const Piece& piece : pieces) pages_.pin(seat.pins, piece.slot);
    if (!pieces.empty()) at = pieces.back().at + pieces.back().count;
    if (at < seat.keys.size()) answer.missing.push_back(at++);
  }
  seat.a = a;
  seat.transfer = numbers_.transfer++;
  seat.state = SeatState::opened;
  answer.transfer = seat.transfer;
  if (a == peers_.self()) {
    if (!answer.missing.empty()) {
      reopen(seat);
      return refuse(Code::not_found);
    }
  } else if (seat.tail) {
    const std::uint32_t blocks[] = {1};
    const Result<std::vector<std::uint32_t>> slots = take(seat, blocks);
    if (!slots) {
      reopen(seat);
      return refuse(Code::busy);
    }
    seat.tail_slot = slots->front();
    answer.slots.push_back(pages_.ref({*seat.tail_slot, 0, 1, 0}));
  }
  send(a, scope, answer);
  return found->first;
}

Result<std::vector<std::uint32_t>> Handovers::take(Seat& seat, std::span<const std::uint32_t> blocks) {
  Result<std::vector<std::uint32_t>> slots = pages_.take(blocks, PageState::filling);
  if (!slots) return slots;
  std::vector<transfer::SlotName> names;
  for (const std::uint32_t slot : *slots) names.push_back({slot, pages_.at(slot).place.generation});
  const Status exposed = data_.expose(seat.a, seat.transfer, transfer::Access::write, std::move(names));
  if (!exposed) {
    for (const std::uint32_t slot : *slots) pages_.spoil(slot);
    return exposed.error();
  }
  seat.exposed = true;
  for (const std::uint32_t slot : *slots) {
    pages_.pin(seat.pins, slot);
    pages_.peer_writes(slot, true);
    need_less(seat, pages_.at(slot).place.bytes);
  }
  return slots;
}

void Handovers::pages(const Peer& a, const wire::Scope& scope, const wire::handover_pages& message) {
  wire::handover_slots answer{message.seat, message.transfer, 0, {}};
  const auto found = find_transfer(a, message.seat, message.transfer, scope);
  const auto refuse = [&](Code code) {
    answer.code = static_cast<std::uint16_t>(code);
    answer.slots.clear();
    send(a, scope, answer);
  };
  if (found == seats_.end() || found->second.state != SeatState::opened || a == peers_.self()) {
    return refuse(Code::stale);
  }
  Seat& seat = found->second;
  const kv::Layout& layout = pages_.layout();
  std::vector<std::uint32_t> blocks;
  std::vector<bool> wanted;
  for (const wire::PushPage& page : message.pages) {
    if (page.keys.empty() || page.keys.size() > layout.page_blocks() || page.crcs.size() != layout.groups()) {
      return refuse(Code::invalid);
    }
    wanted.push_back(
        !std::all_of(page.keys.begin(), page.keys.end(), [&](const Key& key) { return pages_.has(key); }));
    if (wanted.back()) blocks.push_back(static_cast<std::uint32_t>(page.keys.size()));
  }
  Result<std::vector<std::uint32_t>> slots = std::vector<std::uint32_t>{};
  if (!blocks.empty()) slots = take(seat, blocks);
  if (!slots) return refuse(Code::busy);
  std::size_t next = 0;
  for (std::size_t i = 0; i < message.pages.size(); ++i) {
    if (!wanted[i]) {
      answer.slots.emplace_back();
      continue;
    }
    const wire::PushPage& page = message.pages[i];
    const std::uint32_t slot = (*slots)[next++];
    pages_.announce(slot, page.parent, page.keys, page.crcs, false);
    seat.filling.push_back(slot);
    answer.slots.push_back(pages_.ref({slot, 0, pages_.at(slot).blocks, 0}));
    ++counters_.pages_taken;
  }
  send(a, scope, answer);
}

bool Handovers::verify(std::uint32_t slot) {
  data_.see_arrivals();
  while (pages_.at(slot).state == PageState::filling) {
    if (!pages_.verify_next(slot)) return false;
  }
  return true;
}

void Handovers::pushed(const Peer& a, const wire::Scope& scope, const wire::handover_pushed& message) {
  const auto found = find_transfer(a, message.seat, message.transfer, scope);
  if (found == seats_.end() || found->second.state != SeatState::opened) return;
  Seat& seat = found->second;
  for (const wire::SlotRef& ref : message.slots) {
    const auto filling = std::find(seat.filling.begin(), seat.filling.end(), ref.slot);
    if (filling == seat.filling.end() || pages_.find(ref.slot, ref.generation) == nullptr) continue;
    if (!verify(ref.slot)) {
      ++counters_.pages_corrupt;
      reopen(seat);
      return send(a, scope, wire::handover_ack{message.seat, static_cast<std::uint16_t>(Code::corrupt)});
    }
    seat.filling.erase(filling);
  }
}

void Handovers::sealed(const Peer& a, const wire::Scope& scope, const wire::handover_sealed& message) {
  const auto acknowledge = [&](Code code) {
    send(a, scope, wire::handover_ack{message.seat, static_cast<std::uint16_t>(code)});
  };
  const auto found = find_transfer(a, message.seat, message.transfer, scope);
  // A seat that has taken its pages is released soon; its answer may have been lost.
  if (found == seats_.end()) {
    return acknowledge(seated_.known.contains({a, message.transfer}) ? Code::ok : Code::not_found);
  }
  Seat& seat = found->second;
  if (seat.state == SeatState::seated) return acknowledge(Code::ok);
  const auto fail = [&](Code code) {
    if (code == Code::corrupt) ++counters_.pages_corrupt;
    reopen(seat);
    acknowledge(code);
  };
  const std::vector<Piece> pieces = pages_.cover(seat.keys, 0, false);
  if ((pieces.empty() ? 0 : pieces.back().at + pieces.back().count) != seat.keys.size()) {
    return fail(Code::not_found);
  }
  std::optional<std::uint32_t> tail;
  if (seat.tail_slot) {
    if (message.tail_crcs.size() != pages_.layout().groups()) return fail(Code::corrupt);
    pages_.announce(*seat.tail_slot, Key{}, {}, message.tail_crcs, false);
    if (!verify(*seat.tail_slot)) return fail(Code::corrupt);
    tail = seat.tail_slot;
  } else if (seat.tail) {
    // Inside one arena the tail is A's own slot, which A's source pins until our answer.
    const Page* theirs = pages_.find(message.tail.slot, message.tail.generation);
    const bool good = theirs != nullptr && theirs->state == PageState::sealed && theirs->keys.empty() &&
                      theirs->crcs == message.tail_crcs &&
                      pages_.matches(message.tail.slot, message.tail_crcs);
    if (!good) return fail(Code::corrupt);
    tail = message.tail.slot;
  }
  PinSet pins;
  wire::kv_seated seated;
  for (const Piece& piece : pieces) {
    pages_.pin(pins, piece.slot);
    seated.slots.push_back(pages_.ref(piece));
  }
  if (tail) {
    pages_.pin(pins, *tail);
    seated.slots.push_back(pages_.ref({*tail, 0, 1, 0}));
  }
  std::swap(seat.pins, pins);
  // What A offered and did not need in the end: it said that everything is pushed.
  for (const std::uint32_t slot : seat.filling) closing_[{a, seat.transfer}].push_back(slot);
  pages_.unpin(pins);
  for (const std::uint32_t slot : seat.filling) pages_.spoil(slot);
  seat.filling.clear();
  seat.tail_slot.reset();
  if (std::exchange(seat.exposed, false)) data_.conceal(a, seat.transfer);
  seat.state = SeatState::seated;
  seat.hold_until = instant_never;
  reserved_bytes_ -= std::exchange(seat.reserved_bytes, 0);
  ++counters_.seated;
  port_.entry_set(seat.entry, {pages_.layout().groups(), wire::block_none});
  seated.seat = seat.seat;
  seated.token = message.token;
  seated.index = message.index;
  seated.sampler = message.sampler;
  send(found->first.client, seat.scope, seated);
  acknowledge(Code::ok);
}

void Handovers::concealed(const Peer& a, std::uint64_t transfer) {
  const auto found = closing_.find({a, transfer});
  if (found == closing_.end()) return;
  const std::vector<std::uint32_t> slots = std::move(found->second);
  closing_.erase(found);
  for (const std::uint32_t slot : slots) pages_.peer_writes(slot, false);
}

void Handovers::reopen(Seat& seat) {
  if (seat.tail_slot) seat.filling.push_back(*std::exchange(seat.tail_slot, std::nullopt));
  std::erase_if(seat.filling,
                [&](std::uint32_t slot) { return pages_.at(slot).state != PageState::filling; });
  if (!seat.filling.empty()) closing_.emplace(Transfer{seat.a, seat.transfer}, seat.filling);
  pages_.unpin(seat.pins);
  for (const std::uint32_t slot : seat.filling) pages_.spoil(slot);
  seat.filling.clear();
  if (std::exchange(seat.exposed, false)) data_.conceal(seat.a, seat.transfer);
  seat.transfer = 0;
  seat.a = {};
  seat.state = SeatState::waiting;
}

void Handovers::release_seat(const Holder& holder) {
  if (const auto found = seats_.find(holder); found != seats_.end()) drop_seat(found);
}

const PinSet* Handovers::pins_of(const Holder& holder) const {
  const auto found = seats_.find(holder);
  return found == seats_.end() ? nullptr : &found->second.pins;
}

void Handovers::drop_seat(std::map<Holder, Seat>::iterator found) {
  Seat& seat = found->second;
  if (seat.state == SeatState::opened) reopen(seat);
  if (seat.state == SeatState::seated) seated_.add({seat.a, seat.transfer}, limits_.answers_max);
  pages_.unpin(seat.pins);
  port_.entry_close(seat.entry);
  entries_.give_back(seat.entry);
  reserved_bytes_ -= seat.reserved_bytes;
  seat_names_.erase({found->first.client.instance, seat.seat});
  const auto [first, last] = seats_of_.equal_range(Name{found->first.request, found->first.attempt});
  seats_of_.erase(std::find_if(first, last, [&](const auto& of) { return of.second == found->first; }));
  seats_.erase(found);
}

// ---- Both ------------------------------------------------------------------------------------------------

void Handovers::host_lost(const Peer& host) {
  std::vector<Name> over;
  for (const auto& [name, source] : sources_) {
    if (source.b == host) over.push_back(name);
  }
  for (const Name& name : over) end_source(name, Code::unreachable);
  for (auto& [holder, seat] : seats_) {
    if (seat.state == SeatState::opened && seat.a == host) reopen(seat);
  }
}

void Handovers::on_time(const Now& now) {
  std::vector<std::pair<Name, Code>> over;
  for (auto& [name, source] : sources_) {
    if (source.hold_until <= now.product) {
      ++counters_.lapsed;
      over.emplace_back(name, Code::timeout);
    } else if (source.check_at <= now.liveness) {
      source.check_at = now.liveness + watch_every;
      if (!too_slow(source, now)) continue;
      ++counters_.gave_up;
      over.emplace_back(name, Code::timeout);
    } else if (source.again_at <= now.liveness) {
      source.again_at = now.liveness + limits_.say_again;
      send(source.b, source.scope, source.message);
    }
  }
  for (const auto& [name, code] : over) end_source(name, code);
  for (auto seat = seats_.begin(); seat != seats_.end();) {
    const auto next = std::next(seat);
    if (seat->second.hold_until <= now.product) {
      ++counters_.lapsed;
      drop_seat(seat);
    }
    seat = next;
  }
}

Due Handovers::next_due() const {
  Due due;
  for (const auto& [name, source] : sources_) {
    due.sooner_product(source.hold_until);
    due.sooner_liveness(source.check_at);
    due.sooner_liveness(source.again_at);
  }
  for (const auto& [holder, seat] : seats_) due.sooner_product(seat.hold_until);
  return due;
}

std::size_t Handovers::pins() const {
  std::size_t count = 0;
  for (const auto& [name, source] : sources_) count += source.pins.slots.size();
  for (const auto& [holder, seat] : seats_) count += seat.pins.slots.size();
  return count;
}

std::vector<Holder> Handovers::holders() const {
  std::vector<Holder> all;
  for (const auto& [holder, seat] : seats_) all.push_back(holder);
  for (const auto& [name, source] : sources_) {
    if (!source.final) all.push_back(source.holder);
  }
  return all;
}

Status Handovers::check(std::map<std::uint32_t, std::uint32_t>& pins) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  std::size_t pushes = 0;
  for (const auto& [name, source] : sources_) {
    for (const std::uint32_t slot : source.pins.slots) {
      ++pins[slot];
      if (pages_.at(slot).state != PageState::sealed)
        return broken("a page is handed over that is not sealed");
    }
    if (source.offered.size() + source.pages.size() > limits_.offer_pages_max)
      return broken("more pages are offered than may be");
    pushes += source.pages.size() + (source.tail_push != 0 && !source.tail_there ? 1 : 0);
    if (source.state == SourceState::sealed && (!source.final || !source.pushes_over()))
      return broken("a hand-over is sealed that is not there");
  }
  if (pushes != by_push_.size()) return broken("a push of a hand-over has lost it");
  std::uint64_t reserved = 0;
  std::size_t filling = 0;
  for (const auto& [holder, seat] : seats_) {
    for (const std::uint32_t slot : seat.pins.slots) ++pins[slot];
    for (const std::uint32_t slot : seat.filling) {
      if (pages_.at(slot).state != PageState::filling || !pages_.at(slot).peer_writes)
        return broken("a page comes to a seat and is not awaited");
    }
    filling += seat.filling.size() + (seat.tail_slot ? 1 : 0);
    reserved += seat.reserved_bytes;
    if (!entries_.current(seat.entry)) return broken("a seat's entry is free");
    const auto named = seat_names_.find({holder.client.instance, seat.seat});
    if (named == seat_names_.end() || named->second != holder) return broken("a seat has lost its name");
    if (seat.state == SeatState::waiting && !seat.pins.slots.empty())
      return broken("a seat that waits has pages");
    if (seat.state == SeatState::seated &&
        std::any_of(seat.pins.slots.begin(), seat.pins.slots.end(),
                    [&](std::uint32_t slot) { return pages_.at(slot).state != PageState::sealed; })) {
      return broken("a seat has a page that is not sealed");
    }
    if ((seat.state == SeatState::waiting) != (seat.transfer == 0))
      return broken("transfer of a seat is wrong");
    if (seat.state != SeatState::opened && (seat.exposed || seat.tail_slot || !seat.filling.empty()))
      return broken("a seat is exposed that nobody fills");
  }
  for (const auto& [transfer, slots] : closing_) {
    for (const std::uint32_t slot : slots) {
      if (pages_.at(slot).state != PageState::quarantined || !pages_.at(slot).peer_writes)
        return broken("a slot is out of quarantine too soon");
    }
  }
  std::size_t unindexed = 0;
  for (const auto& [slot, page] : pages_.all()) {
    if (page.state == PageState::filling && !page.indexed) ++unindexed;
  }
  if (unindexed != filling) return broken("a page is filled for no seat");
  if (reserved != reserved_bytes_) return broken("reserved bytes are miscounted");
  if (seat_names_.size() != seats_.size()) return broken("a seat's name is left");
  return {};
}

}  // namespace di::host
