#include "host/push.h"

#include <algorithm>

namespace di::host {

Pushes::Pushes(const Limits& limits, Pages& pages, DataPort& data, Numbers& numbers)
    : limits_(limits), pages_(pages), data_(data), numbers_(numbers) {}

Pushes::PushId Pushes::start(For purpose, const Peer& to, std::uint64_t transfer, const wire::SlotRef& target,
                             std::uint32_t slot, transfer::Class cls) {
  DI_ASSERT(pages_.at(slot).state == PageState::sealed && target.page_blocks == pages_.at(slot).blocks);
  const PushId id = next_id_++;
  Push& push = pushes_[id];
  push.purpose = purpose;
  push.to = to;
  push.transfer = transfer;
  push.target = target;
  push.cls = cls;
  pages_.pin(push.pins, slot);
  windows_[to].queued.push_back(id);
  return id;
}

void Pushes::cancel(PushId id) {
  const auto found = pushes_.find(id);
  if (found == pushes_.end() || found->second.state == State::ending) return;
  Push& push = found->second;
  if (push.state == State::pushing) return fail(push, Code::cancelled);
  push.code = Code::cancelled;
  std::erase(windows_.at(push.to).queued, id);
  over(id);
}

void Pushes::peer_lost(const Peer& peer) {
  const auto window = windows_.find(peer);
  if (window == windows_.end()) return;
  const std::deque<PushId> queued = std::exchange(window->second.queued, {});
  for (const PushId id : queued) {
    pushes_.at(id).code = Code::unreachable;
    over(id);
  }
}

void Pushes::pump() {
  std::vector<PushId> ready;
  for (auto& [peer, window] : windows_) {
    while (window.outstanding < limits_.window && !window.queued.empty()) {
      ready.push_back(window.queued.front());
      window.queued.pop_front();
      ++window.outstanding;
    }
  }
  for (const PushId id : ready) begin(id, pushes_.at(id));
}

bool Pushes::waiting() const {
  return !progress_.empty() || std::any_of(windows_.begin(), windows_.end(), [&](const auto& item) {
    return item.second.outstanding < limits_.window && !item.second.queued.empty();
  });
}

void Pushes::begin(PushId id, Push& push) {
  push.state = State::pushing;
  const Page& page = pages_.at(push.pins.slots.front());
  const kv::Layout& layout = pages_.layout();
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    const std::uint64_t offset = layout.segment_offset(group, page.blocks);
    const transfer::Place to{
        {push.target.slot, push.target.generation}, offset, layout.segment_bytes(group, page.blocks)};
    const std::uint64_t number = numbers_.push++;
    push.segments.emplace(number, group);
    segments_.emplace(number, id);
    const Status status =
        data_.push(number, push.to, push.transfer, to, page.place.offset + offset, push.cls);
    if (status.ok()) continue;
    push.segments.erase(number);
    segments_.erase(number);
    fail(push, status.error().code);
    break;
  }
  if (push.segments.empty()) over(id);
}

void Pushes::fail(Push& push, Code code) {
  push.state = State::ending;
  push.code = code;
  for (const auto& [number, group] : push.segments) data_.cancel(number);
}

void Pushes::pushed(std::uint64_t number, Code code) {
  const auto found = segments_.find(number);
  if (found == segments_.end()) return;
  const PushId id = found->second;
  segments_.erase(found);
  Push& push = pushes_.at(id);
  const std::uint32_t group = push.segments.at(number);
  push.segments.erase(number);
  if (code == Code::ok) {
    push.arrived |= 1u << group;
  } else if (push.state == State::pushing) {
    fail(push, code);
  }
  if (push.segments.empty()) return over(id);
  std::uint32_t groups = push.groups;
  while ((push.arrived >> groups & 1u) != 0) ++groups;
  if (push.state != State::pushing || groups == push.groups) return;
  push.groups = groups;
  progress_.push_back({push.purpose, id, groups, false, Code::ok});
}

void Pushes::over(PushId id) {
  const auto found = pushes_.find(id);
  Push push = std::move(found->second);
  pushes_.erase(found);
  const auto window = windows_.find(push.to);
  if (push.state != State::queued) --window->second.outstanding;
  if (window->second.outstanding == 0 && window->second.queued.empty()) windows_.erase(window);
  if (push.code == Code::ok) {
    ++counters_.pages;
    counters_.bytes += pages_.layout().page_bytes(push.target.page_blocks);
  } else {
    ++(push.code == Code::cancelled ? counters_.cancelled : counters_.failed);
  }
  progress_.push_back(
      {push.purpose, id, push.code == Code::ok ? pages_.layout().groups() : push.groups, true, push.code});
  pages_.unpin(push.pins);
}

Status Pushes::check(std::map<std::uint32_t, std::uint32_t>& pins) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  std::map<Peer, std::size_t> outstanding;
  std::size_t segments = 0;
  for (const auto& [id, push] : pushes_) {
    for (const std::uint32_t slot : push.pins.slots) ++pins[slot];
    if (push.pins.slots.size() != 1) return broken("a push of no page");
    if (pages_.at(push.pins.slots.front()).state != PageState::sealed)
      return broken("a page is pushed that is not sealed");
    if ((push.state == State::queued) != push.segments.empty()) return broken("a push waits for nothing");
    if (push.state != State::queued) ++outstanding[push.to];
    segments += push.segments.size();
  }
  if (segments != segments_.size()) return broken("a pushed segment has lost its push");
  for (const auto& [peer, window] : windows_) {
    if (window.outstanding != outstanding[peer] || window.outstanding > limits_.window)
      return broken("the window of pushes is miscounted");
    for (const PushId id : window.queued) {
      if (!pushes_.contains(id)) return broken("a push is queued that is over");
    }
  }
  return {};
}

}  // namespace di::host
