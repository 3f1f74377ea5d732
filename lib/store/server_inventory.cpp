// The inventory for di-meta, and the look at every slot's header that is the same work.
#include <algorithm>

#include "base/log.h"
#include "store/server.h"

namespace di::store {

Status Server::check(std::function<void(const std::vector<Check>&)> done) {
  if (stopping_) return Error{Code::busy, 0, "the store stops"};
  if (!inventory_) inventory_start();
  // One under way will have counted everything, too.
  if (inventory_->waiting.size() >= checks_max)
    return Error{Code::busy, 0, "others wait for a check already"};
  inventory_->waiting.push_back(std::move(done));
  return {};
}

void Server::inventory_start() {
  auto fresh = std::make_unique<Inventory>();
  if (inventory_) {
    fresh->waiting = std::move(inventory_->waiting);
    if (inventory_->meta == meta_) fresh->asked = inventory_->asked;
  }
  inventory_ = std::move(fresh);
  inventory_->meta = meta_;
  inventory_->number = ++inventories_begun_;
  for (const auto& mount : mounts_) inventory_->found.push_back({.volume = mount->number()});
  inventory_timer_.cancel();
  // One job at a time, however often it starts over: a disk that is slow gets no more to do for it.
  if (!inventory_reading_) inventory_next();
}

// A part has columns of one volume.
void Server::inventory_next() {
  std::vector<Read> reads;
  Inventory& now = *inventory_;
  now.sent = false;
  inventory_reading_ = true;
  std::uint16_t volume = now.volume;
  while (reads.empty() && now.volume < mounts_.size()) {
    Mount& mount = *mounts_[now.volume];
    volume = now.volume;
    if (mount.serves() && mount.volume().list(now.from, inventory_part_max, reads)) continue;
    ++now.volume;
    now.from = {};
  }
  const std::size_t listed = reads.size();
  const bool listed_all = now.volume == mounts_.size();
  while (listed_all && !now.fresh.empty() && reads.size() < inventory_part_max) {
    const Inventory::Fresh& fresh = now.fresh.front();
    if (!reads.empty() && fresh.volume != volume) break;
    volume = fresh.volume;
    if (const Result<Read> read = mounts_[volume]->read_begin(fresh.stripe, fresh.column)) {
      reads.push_back(*read);
    }
    now.fresh.pop_front();
  }
  now.last = listed_all && now.fresh.empty();
  if (!mounts_[volume]->serves()) {
    // Nothing is left, and the last volume has no thread that could be asked for nothing.
    return loop_.post("store-inventory",
                      [this, number = now.number, volume] { inventory_read(number, volume, 0, {}, {}); });
  }
  const Status queued = mounts_[volume]->pool().headers(
      {reads, [this, number = now.number, volume, listed, reads](std::vector<Result<SlotHeader>> headers) {
         inventory_read(number, volume, listed, reads, std::move(headers));
       }});
  DI_ASSERT(queued.ok());
}

void Server::inventory_read(std::uint64_t number, std::uint16_t volume, std::size_t listed,
                            std::vector<Read> reads, std::vector<Result<SlotHeader>> headers) {
  Mount& mount = *mounts_[volume];
  inventory_reading_ = false;
  const bool current = inventory_ && inventory_->number == number;
  Check ignored;
  Check& found = current ? inventory_->found[volume] : ignored;
  wire::meta_inventory part;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const Read& read = reads[i];
    mount.read_end(read);
    // Freed while its header was read.  In the books it would be there again, and di-meta has forgotten the free.
    if (!mount.volume().holds(read)) continue;
    const bool counts = i < listed;  // a fresh one may be in the list, too
    if (counts) ++found.slots;
    if (!headers[i]) {
      // di-meta hears of it by what is missing.
      if (headers[i].error().code != Code::corrupt) {
        ++found.unreadable;
        continue;
      }
      // Nobody will ever read it: its room is worth more.
      ++found.corrupt;
      log_warn("store", "dropped a slot without a good header",
               {{"path", mount.path()},
                {"stripe", read.stripe},
                {"column", read.column},
                {"error", headers[i].error()}});
      counters_.slots_dropped += mount.free(read);
      continue;
    }
    if (counts && !read.unverified) ++found.verified;
    wire::ShardRecord record;
    record.stripe = read.stripe;
    record.volume = volume;
    record.column = read.column;
    record.generation = static_cast<std::uint32_t>(read.sequence);
    Shard& shard = headers[i]->shard;
    record.tenant = shard.tenant;
    record.fingerprint = shard.fingerprint;
    record.pages = std::move(shard.pages);
    record.code = std::move(shard.code);
    part.shards.push_back(std::move(record));
  }
  stop_when_idle();
  if (!inventory_) return;
  if (!current) return inventory_next();  // it has started over meanwhile
  if (!inventory_->meta) return inventory_go_on();
  inventory_->last = inventory_->last && inventory_->fresh.empty();
  part.cursor = inventory_->cursor;
  part.last = inventory_->last;
  part.asked = inventory_->asked;
  inventory_->sent = true;
  inventory_timer_.start_after(inventory_wait);
  send(*inventory_->meta, part);
}

void Server::inventory_acked(const Peer& meta, const wire::meta_inventory_ack& ack) {
  if (!inventory_ || inventory_->meta != meta || !inventory_->sent || ack.cursor != inventory_->cursor)
    return;
  for (const std::uint64_t stripe : ack.unknown) {
    for (const auto& mount : mounts_) {
      const std::uint32_t freed = mount->free(stripe);
      counters_.columns_freed += freed;
      inventory_->found[mount->number()].orphans += freed;
    }
  }
  inventory_go_on();
}

void Server::inventory_go_on() {
  if (!inventory_->last) {
    ++inventory_->cursor;
    return inventory_next();
  }
  const std::unique_ptr<Inventory> over = std::move(inventory_);
  inventory_timer_.cancel();
  if (over->meta) ++counters_.inventories;
  for (Check& found : over->found) found.told = over->meta.has_value();
  for (const auto& done : over->waiting) done(over->found);
}

}  // namespace di::store
