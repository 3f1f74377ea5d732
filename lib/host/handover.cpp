#include "host/handover.h"

#include <algorithm>

namespace di::host {

Handovers::Handovers(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port,
                     const Peers& peers, Outbox& out)
    : limits_(limits), pages_(pages), entries_(entries), port_(port), peers_(peers), out_(out) {}

// ---- A ---------------------------------------------------------------------------------------------------

void Handovers::hand_over(const Holder& holder, const wire::Scope& scope, const wire::kv_handover& message,
                          const Now& now) {
  const Name name{scope.request, scope.attempt};
  if (const auto known = sources_.find(name); known != sources_.end()) {
    Source& source = known->second;
    const bool same_seat = source.message.seat == message.seat && source.decode == message.decode;
    if (source.holder == holder && same_seat) return;  // said twice
    ++counters_.replaced;
    pages_.unpin(source.pins);
    sources_.erase(known);
  }
  ++counters_.sources;
  const auto refuse = [&](Code code) {
    ++counters_.failed;
    send(holder.client, scope, wire::kv_handed{message.seat, static_cast<std::uint16_t>(code)});
  };
  if (sources_.size() >= limits_.sources_max) return refuse(Code::busy);
  if (message.keys.size() > limits_.keys_max || !pages_.has_layout()) return refuse(Code::invalid);
  const std::optional<Peer> b = peers_.host_up(message.host);
  if (!b) return refuse(Code::unreachable);
  // What is not here now never will be: another seat does not help.
  const std::vector<Piece> pieces = pages_.cover(message.keys, 0, false);
  if ((pieces.empty() ? 0 : pieces.back().at + pieces.back().count) != message.keys.size()) {
    return refuse(Code::invalid);
  }
  const Page* tail = nullptr;
  if (message.tail.count != 0) {
    tail = pages_.find(message.tail.slot, message.tail.generation);
    if (tail == nullptr || tail->state != PageState::sealed || !tail->keys.empty())
      return refuse(Code::invalid);
  }
  Source source;
  source.holder = holder;
  source.scope = scope;
  source.b = *b;
  source.hold_until = now.product + limits_.hold;
  for (const Piece& piece : pieces) pages_.pin(source.pins, piece.slot);
  source.decode = message.decode;
  source.message.seat = message.seat;
  if (tail != nullptr) {
    pages_.pin(source.pins, message.tail.slot);
    source.message.tail = pages_.ref({message.tail.slot, 0, 1, 0});
    source.message.tail_crcs = tail->crcs;
  }
  source.message.token = message.token;
  source.message.index = message.index;
  source.message.sampler = message.sampler;
  wire::handover_open open;
  open.seat = message.seat;
  open.decode = message.decode;
  open.keys = message.keys;
  open.tail = tail != nullptr;
  send(source.b, scope, open);
  sources_.emplace(name, std::move(source));
}

void Handovers::opened(const Peer& b, const wire::Scope& scope, const wire::handover_opened& message) {
  const Name name{scope.request, scope.attempt};
  const auto found = sources_.find(name);
  if (found == sources_.end()) return;
  Source& source = found->second;
  if (source.b != b || source.message.seat != message.seat || source.state != SourceState::opening) return;
  if (message.code != 0) return end_source(name, static_cast<Code>(message.code));
  if (!message.missing.empty()) return end_source(name, Code::unsupported);
  source.state = SourceState::sealed;
  source.message.transfer = message.transfer;
  send(source.b, source.scope, source.message);
}

void Handovers::acknowledged(const Peer& b, const wire::Scope& scope, const wire::handover_ack& message) {
  const Name name{scope.request, scope.attempt};
  const auto found = sources_.find(name);
  if (found == sources_.end()) return;
  const Source& source = found->second;
  if (source.b != b || source.message.seat != message.seat || source.state != SourceState::sealed) return;
  end_source(name, static_cast<Code>(message.code));
}

void Handovers::end_source(const Name& name, Code code) {
  const auto found = sources_.find(name);
  DI_ASSERT(found != sources_.end());
  Source source = std::move(found->second);
  sources_.erase(found);
  pages_.unpin(source.pins);
  ++(code == Code::ok ? counters_.acknowledged : counters_.failed);
  send(source.holder.client, source.scope,
       wire::kv_handed{source.message.seat, static_cast<std::uint16_t>(code)});
}

// ---- B ---------------------------------------------------------------------------------------------------

bool Handovers::expect(const Holder& holder, const wire::Scope& scope, const wire::kv_expect& message,
                       const Now& now) {
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
  if (message.keys.size() > limits_.keys_max || seat_names_.contains(seat_name)) return refuse(Code::invalid);
  if (!pages_.has_layout()) return refuse(Code::busy);
  std::uint32_t missing = 0;
  for (const Key& key : message.keys) missing += pages_.has(key) ? 0 : 1;
  const std::uint32_t page_blocks = pages_.layout().page_blocks();
  std::uint64_t need = std::uint64_t{missing / page_blocks} * pages_.room_bytes(page_blocks);
  if (missing % page_blocks != 0) need += pages_.room_bytes(missing % page_blocks);
  if (message.tail_tokens > 0) need += pages_.room_bytes(1);
  if (reserved_bytes_ + need > pages_.bytes_free() + pages_.bytes_evictable()) return refuse(Code::busy);
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
  send(holder.client, scope, answer);
  return true;
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
  if (message.tail && a != peers_.self()) return refuse(Code::unsupported);
  std::vector<Piece> pieces = pages_.cover(seat.keys, 0, false);
  if ((pieces.empty() ? 0 : pieces.back().at + pieces.back().count) != seat.keys.size()) {
    return refuse(Code::unsupported);
  }
  for (const Piece& piece : pieces) pages_.pin(seat.pins, piece.slot);
  seat.pieces = std::move(pieces);
  seat.state = SeatState::opened;
  seat.a = a;
  seat.transfer = next_transfer_++;
  answer.transfer = seat.transfer;
  send(a, scope, answer);
  return found->first;
}

void Handovers::sealed(const Peer& a, const wire::Scope& scope, const wire::handover_sealed& message) {
  const auto acknowledge = [&](Code code) {
    send(a, scope, wire::handover_ack{message.seat, static_cast<std::uint16_t>(code)});
  };
  // The message does not name the decode instance: the transfer number does.
  const auto found = std::find_if(seats_.begin(), seats_.end(), [&](const auto& item) {
    return item.second.seat == message.seat && item.second.transfer == message.transfer &&
           item.second.a == a && item.first.request == scope.request && item.first.attempt == scope.attempt;
  });
  if (found == seats_.end() || found->second.state == SeatState::waiting) return acknowledge(Code::not_found);
  Seat& seat = found->second;
  if (seat.state == SeatState::seated) return acknowledge(Code::ok);
  wire::kv_seated seated;
  if (seat.tail) {
    // Inside one arena the tail is A's own slot, which A's source pins until our answer.
    const Page* tail = pages_.find(message.tail.slot, message.tail.generation);
    const bool good = tail != nullptr && tail->state == PageState::sealed && tail->keys.empty() &&
                      tail->crcs == message.tail_crcs && pages_.matches(message.tail.slot, message.tail_crcs);
    if (!good) {
      ++counters_.tails_corrupt;
      reopen(seat);
      return acknowledge(Code::corrupt);
    }
    pages_.pin(seat.pins, message.tail.slot);
  }
  seat.state = SeatState::seated;
  seat.hold_until = instant_never;
  reserved_bytes_ -= std::exchange(seat.reserved_bytes, 0);
  ++counters_.seated;
  port_.entry_set(seat.entry, {pages_.layout().groups(), wire::block_none});
  seated.seat = seat.seat;
  for (const Piece& piece : seat.pieces) seated.slots.push_back(pages_.ref(piece));
  if (seat.tail) seated.slots.push_back(pages_.ref({message.tail.slot, 0, 1, 0}));
  seated.token = message.token;
  seated.index = message.index;
  seated.sampler = message.sampler;
  send(found->first.client, seat.scope, seated);
  acknowledge(Code::ok);
}

void Handovers::reopen(Seat& seat) {
  pages_.unpin(seat.pins);
  seat.pieces.clear();
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
  pages_.unpin(seat.pins);
  port_.entry_close(seat.entry);
  entries_.give_back(seat.entry);
  reserved_bytes_ -= seat.reserved_bytes;
  seat_names_.erase({found->first.client.instance, seat.seat});
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
  std::vector<Name> over;
  for (const auto& [name, source] : sources_) {
    if (source.hold_until <= now.product) over.push_back(name);
  }
  for (const Name& name : over) {
    ++counters_.lapsed;
    end_source(name, Code::timeout);
  }
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
  for (const auto& [name, source] : sources_) due.sooner_product(source.hold_until);
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
  return all;
}

Status Handovers::check(std::map<std::uint32_t, std::uint32_t>& pins) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  for (const auto& [name, source] : sources_) {
    for (const std::uint32_t slot : source.pins.slots) {
      ++pins[slot];
      if (pages_.at(slot).state != PageState::sealed)
        return broken("a page is handed over that is not sealed");
    }
  }
  std::uint64_t reserved = 0;
  for (const auto& [holder, seat] : seats_) {
    for (const std::uint32_t slot : seat.pins.slots) {
      ++pins[slot];
      if (pages_.at(slot).state != PageState::sealed) return broken("a seat has a page that is not sealed");
    }
    reserved += seat.reserved_bytes;
    if (!entries_.current(seat.entry)) return broken("a seat's entry is free");
    const auto named = seat_names_.find({holder.client.instance, seat.seat});
    if (named == seat_names_.end() || named->second != holder) return broken("a seat has lost its name");
    const std::size_t tail = seat.tail && seat.state == SeatState::seated ? 1 : 0;
    const std::size_t wanted = seat.state == SeatState::waiting ? 0 : seat.pieces.size() + tail;
    if (seat.pins.slots.size() != wanted) return broken("a seat pins other pages than its own");
    if ((seat.state == SeatState::waiting) != (seat.transfer == 0))
      return broken("transfer of a seat is wrong");
  }
  if (reserved != reserved_bytes_) return broken("reserved bytes are miscounted");
  if (seat_names_.size() != seats_.size()) return broken("a seat's name is left");
  return {};
}

}  // namespace di::host
