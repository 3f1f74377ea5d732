#include "directory/arenas.h"

#include "directory/stripes.h"

namespace di::directory {

Arenas::Host* Arenas::find(const Holder& holder, std::uint32_t* number) {
  const auto at = numbers_.find(holder.instance);
  if (at == numbers_.end()) return nullptr;
  Host& host = hosts_.at(at->second);
  if (host.generation != holder.generation) return nullptr;
  *number = at->second;
  return &host;
}

bool Arenas::is_host(const Holder& holder) const {
  const auto at = numbers_.find(holder.instance);
  return at != numbers_.end() && hosts_.at(at->second).generation == holder.generation;
}

bool Arenas::host_up(const Holder& holder) {
  auto at = numbers_.find(holder.instance);
  if (at == numbers_.end()) {
    if (hosts_.size() >= options_.hosts_max) return false;
    at = numbers_.emplace(holder.instance, next_++).first;
  }
  Host& host = hosts_[at->second];
  clear(host);
  host = Host{};
  host.instance = holder.instance;
  host.generation = holder.generation;
  return true;
}

void Arenas::lost(const Holder& holder) {
  std::uint32_t number = 0;
  Host* host = find(holder, &number);
  if (host == nullptr) return;
  clear(*host);
  hosts_.erase(number);
  numbers_.erase(holder.instance);
}

void Arenas::add(std::uint32_t number, Host& host, const wire::ArenaPage& page) {
  if (page.keys.empty() || page.keys.size() > page_keys_max || page.crcs.empty() ||
      page.crcs.size() > page_segments_max) {
    ++counters_.refused;
    return;
  }
  if (const auto known = host.pages.find(page.page); known != host.pages.end()) {
    if (at(known->second).page == page) return;
    remove(host, page.page);
  }
  if (host.pages.size() >= options_.pages_max) {
    ++counters_.refused;
    return;
  }
  std::uint32_t slot = 0;
  if (free_.empty()) {
    slot = static_cast<std::uint32_t>(slots_.size());
    slots_.emplace_back(Page{number, page});
  } else {
    slot = free_.back();
    free_.pop_back();
    slots_[slot] = Page{number, page};
  }
  host.blocks += page.keys.size();
  host.pages.emplace(page.page, slot);
  events_.added(slot, at(slot));
}

void Arenas::remove(Host& host, std::uint64_t page) {
  const auto known = host.pages.find(page);
  if (known == host.pages.end()) return;
  const std::uint32_t slot = known->second;
  events_.removed(slot, at(slot));
  host.blocks -= at(slot).page.keys.size();
  host.pages.erase(known);
  slots_[slot].reset();
  free_.push_back(slot);
}

void Arenas::clear(Host& host) {
  while (!host.pages.empty()) remove(host, host.pages.begin()->first);
}

bool Arenas::delta(const Holder& holder, const wire::meta_arena_delta& message) {
  std::uint32_t number = 0;
  Host* host = find(holder, &number);
  if (host == nullptr) return false;
  ++counters_.deltas;
  if (message.snapshot) {
    clear(*host);
    for (const wire::ArenaPage& page : message.added) add(number, *host, page);
    host->seq = message.seq;
    host->complete = true;
    host->resync_in = 0;
    return false;
  }
  if (message.seq <= host->seq) return false;  // seen already
  const bool next = message.seq == host->seq + 1 && (host->complete || host->seq == 0);
  if (!next) {
    host->complete = false;
    if (host->resync_in > 0) {
      --host->resync_in;
      return false;
    }
    host->resync_in = resync_again;
    ++counters_.gaps;
    return true;
  }
  for (const std::uint64_t page : message.removed) remove(*host, page);
  for (const wire::ArenaPage& page : message.added) add(number, *host, page);
  host->seq = message.seq;
  host->complete = true;
  return false;
}

}  // namespace di::directory
