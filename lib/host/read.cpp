#include "host/read.h"

#include <algorithm>

namespace di::host {

Reads::Reads(const Limits& limits, Pages& pages, DataPort& data, const Peers& peers, Leases& leases,
             Numbers& numbers, Outbox& out)
    : limits_(limits),
      pages_(pages),
      data_(data),
      peers_(peers),
      leases_(leases),
      numbers_(numbers),
      out_(out) {}

std::uint64_t Reads::start(const Want& want) {
  const std::uint64_t transfer = numbers_.transfer++;
  Read read;
  read.want = want;
  read.want.message.transfer = transfer;
  read.remote = peers_.remote(want.source);
  read.groups = want.message.from_group;
  leases_.hold_again(want.lease);
  windows_[want.source.instance].waiting.insert({want.message.priority, transfer});
  reads_.emplace(transfer, std::move(read));
  return transfer;
}

void Reads::prioritise(std::uint64_t transfer, std::uint8_t priority) {
  Read& read = reads_.at(transfer);
  wire::kv_read& message = read.want.message;
  if (read.state != State::waiting || priority >= message.priority) return;
  Window& window = windows_.at(read.want.source.instance);
  window.waiting.erase({message.priority, transfer});
  message.priority = priority;
  window.waiting.insert({message.priority, transfer});
}

void Reads::take(std::uint64_t transfer) {
  const auto found = reads_.find(transfer);
  DI_ASSERT(found != reads_.end() && found->second.state == State::arrived);
  const bool remote = found->second.remote;
  const Peer source = found->second.want.source;
  finish(found);
  if (remote) data_.conceal(source, transfer);
}

void Reads::give_up(std::uint64_t transfer) {
  const auto found = reads_.find(transfer);
  if (found == reads_.end()) return;
  switch (found->second.state) {
    case State::waiting:
      ++counters_.cancelled;
      return finish(found);
    case State::reading:
      ++counters_.cancelled;
      return cancel(found);
    case State::arrived:
      return end(found);
    case State::cancelling:
      return;
  }
}

void Reads::report(std::uint64_t page, std::uint16_t column, const Source& source, Code code) {
  if (code != Code::corrupt && code != Code::not_found && code != Code::io) return;
  if (const std::optional<Peer> meta = peers_.meta_up()) {
    out_.push_back(wire::Envelope::make(
        meta->instance, meta->generation, {},
        wire::meta_read_failed{page, column, static_cast<std::uint16_t>(code), source.store.instance,
                               source.store.generation, source.volume}));
  }
}

void Reads::read_done(const Peer& source, const wire::kv_read_done& done, const Now& now) {
  const auto found = reads_.find(done.transfer);
  if (found == reads_.end()) return;
  Read& read = found->second;
  if (read.want.source != source || read.state == State::waiting || read.state == State::arrived) return;
  const std::uint32_t groups = pages_.layout().groups();
  const bool last = done.code != 0 || done.group + 1 == groups;
  if (read.state == State::cancelling) {
    if (last && !read.remote) finish(found);
    return;
  }
  read.deadline = now.liveness + limits_.read_wait;
  if (done.code != 0) {
    fail(found, static_cast<Code>(done.code));
    return end(found);
  }
  if (done.group >= groups) {
    fail(found, Code::invalid);
    return cancel(found);
  }
  if (read.remote) data_.see_arrivals();
  if (done.group < read.groups) return;
  counters_.groups += done.group + 1 - read.groups;
  read.groups = done.group + 1;
  if (last) {
    read.state = State::arrived;
    read.deadline = instant_never;
  }
  progress_.push_back(
      {read.want.purpose, done.transfer, Code::ok, read.groups, last, now.liveness - read.since});
}

void Reads::fail(Found read, Code code) {
  ++counters_.failed;
  progress_.push_back({read->second.want.purpose, read->first, code, read->second.groups, true, {}});
}

void Reads::read_cancelled(const Peer& source, const wire::kv_read_cancelled& cancelled) {
  const auto found = reads_.find(cancelled.transfer);
  if (found == reads_.end() || found->second.want.source != source ||
      found->second.state != State::cancelling || found->second.remote) {
    return;
  }
  finish(found);
}

bool Reads::concealed(const Peer& source, std::uint64_t transfer) {
  const auto found = reads_.find(transfer);
  if (found == reads_.end() || found->second.want.source != source) return false;
  // One that is still under way hears of its end from its source, or from read_wait.
  if (found->second.state == State::cancelling && found->second.remote) finish(found);
  return true;
}

void Reads::source_lost(const Peer& source) {
  const bool maps = peers_.attached(source);
  for (auto next = reads_.begin(); next != reads_.end();) {
    const auto read = next++;
    Read& lost = read->second;
    if (lost.want.source != source || lost.state == State::arrived) continue;
    if (lost.state != State::cancelling) fail(read, Code::unreachable);
    if (lost.state == State::waiting || !maps || lost.remote) {
      end(read);
      continue;
    }
    // It may be frozen in the middle of a write: the slot waits until the process lets go.
    if (lost.counted) --windows_.at(source.instance).outstanding;
    lost.counted = false;
    lost.state = State::cancelling;
    lost.deadline = instant_never;
  }
}

void Reads::source_returned(const Peer& source) {
  for (const auto& [transfer, read] : reads_) {
    if (read.want.source == source && read.state == State::cancelling && !read.remote)
      to_source(read, wire::kv_read_cancel{transfer});
  }
}

void Reads::source_detached(const Peer& source) {
  for (auto next = reads_.begin(); next != reads_.end();) {
    const auto read = next++;
    const State state = read->second.state;
    if (read->second.want.source != source || read->second.remote) continue;
    if (state == State::waiting || state == State::arrived) continue;
    if (state == State::reading) fail(read, Code::unreachable);
    finish(read);
  }
}

void Reads::end(Found read) {
  Read& over = read->second;
  if (!over.remote || over.state == State::waiting) return finish(read);
  if (over.state == State::cancelling) return;  // concealed is on its way
  over.state = State::cancelling;
  over.deadline = instant_never;
  data_.conceal(over.want.source, read->first);
}

void Reads::cancel(Found read) {
  Read& unwanted = read->second;
  unwanted.state = State::cancelling;
  unwanted.deadline = instant_never;
  to_source(unwanted, wire::kv_read_cancel{read->first});
  if (unwanted.remote) data_.conceal(unwanted.want.source, read->first);
}

void Reads::finish(Found found) {
  const std::uint64_t transfer = found->first;
  const Read read = std::move(found->second);
  reads_.erase(found);
  const std::string& source = read.want.source.instance;
  // A cancelled read of a lost source is in no window any more.
  if (read.state == State::waiting || read.counted) {
    Window& window = windows_.at(source);
    if (read.state == State::waiting) window.waiting.erase({read.want.message.priority, transfer});
    if (read.counted) --window.outstanding;
    if (window.waiting.empty() && window.outstanding == 0) windows_.erase(source);
  }
  leases_.drop(read.want.lease);
  if (read.state == State::waiting) return;
  const wire::SlotRef& ref = read.want.message.slot;
  const auto place = places_.find({ref.slot, read.want.message.column});
  if (--place->second == 0) places_.erase(place);
  const Page* page = pages_.find(ref.slot, ref.generation);
  if (page != nullptr && page->state != PageState::sealed) pages_.peer_writes(ref.slot, false);
}

bool Reads::writes(std::uint32_t slot, std::uint16_t column) const {
  return places_.contains({slot, column});
}

bool Reads::waits() const {
  return std::any_of(reads_.begin(), reads_.end(), [](const auto& item) {
    return item.second.state == State::waiting || item.second.state == State::reading;
  });
}

std::optional<Reads::View> Reads::view(std::uint64_t transfer) const {
  const auto found = reads_.find(transfer);
  if (found == reads_.end()) return std::nullopt;
  const Read& read = found->second;
  return View{read.want.source, read.want.message, read.state != State::waiting, read.since};
}

void Reads::pump(const Now& now) {
  std::vector<std::uint64_t> refused;
  for (auto& [instance, window] : windows_) {
    while (window.outstanding < limits_.per_source && !window.waiting.empty()) {
      const std::uint64_t transfer = window.waiting.begin()->second;
      Read& read = reads_.at(transfer);
      const wire::SlotRef& slot = read.want.message.slot;
      if (read.remote && !data_.expose(read.want.source, transfer, transfer::Access::write,
                                       {{slot.slot, slot.generation}})) {
        refused.push_back(transfer);
        break;  // of this source: the table of exposures is full
      }
      window.waiting.erase(window.waiting.begin());
      read.state = State::reading;
      read.counted = true;
      read.since = now.liveness;
      read.deadline = now.liveness + limits_.read_wait;
      ++window.outstanding;
      ++counters_.reads;
      ++places_[{slot.slot, read.want.message.column}];
      pages_.peer_writes(slot.slot, true);
      if (!read.want.arena) {
        to_source(read, read.want.message);
        continue;
      }
      ++counters_.arena_reads;
      to_source(read, wire::arena_read{transfer, read.want.key, slot.page_blocks, slot,
                                       read.want.message.priority});
    }
  }
  for (const std::uint64_t transfer : refused) {
    const auto found = reads_.find(transfer);
    fail(found, Code::busy);
    finish(found);
  }
}

void Reads::on_time(const Now& now) {
  for (auto next = reads_.begin(); next != reads_.end();) {
    const auto read = next++;
    if (read->second.deadline > now.liveness) continue;
    fail(read, Code::timeout);
    cancel(read);
  }
}

Due Reads::next_due() const {
  Due due;
  for (const auto& [transfer, read] : reads_) due.sooner_liveness(read.deadline);
  return due;
}

Status Reads::check(const std::set<std::uint64_t>& theirs,
                    std::map<std::uint64_t, std::size_t>& leases) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  std::map<std::string, std::uint32_t> outstanding;
  std::map<std::uint32_t, std::uint32_t> writers;
  std::size_t wanted = 0;
  for (const auto& [transfer, read] : reads_) {
    const wire::SlotRef& ref = read.want.message.slot;
    const Page* page = pages_.find(ref.slot, ref.generation);
    if (page == nullptr) return broken("a slot was reused while somebody may write into it");
    if (read.state == State::arrived) return broken("a read that is there was not taken");
    if (page->state == PageState::granted || page->state == PageState::sealed)
      return broken("a page is read that is somebody else's");
    if (read.state != State::cancelling) {
      ++wanted;
      if (!theirs.contains(transfer)) return broken("a page is read for nobody");
      if (page->state == PageState::quarantined) return broken("state of a page and its read disagree");
    }
    if (read.state != State::waiting) ++writers[ref.slot];
    if (read.counted) ++outstanding[read.want.source.instance];
    if (read.want.lease != 0) ++leases[read.want.lease];
  }
  if (wanted != theirs.size()) return broken("a reader waits for a read that is over");
  for (const auto& [slot, count] : writers) {
    if (pages_.at(slot).peer_writes < count) return broken("who writes a page is wrong");
  }
  std::size_t places = 0;
  for (const auto& [place, count] : places_) places += count;
  std::size_t begun = 0;
  for (const auto& [slot, count] : writers) begun += count;
  if (places != begun) return broken("places of reads are miscounted");
  for (const auto& [instance, window] : windows_) {
    if (window.outstanding != outstanding[instance] || window.outstanding > limits_.per_source)
      return broken("the window of a source is miscounted");
  }
  return {};
}

}  // namespace di::host
