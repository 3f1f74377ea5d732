#include "store/server.h"

#include <algorithm>

#include "base/log.h"
#include "store/server_work.h"

namespace di::store {

namespace {

// What waits for one host's arena; it is mapped within a turn or not at all.
constexpr std::size_t waiting_max = 1024;

}  // namespace

Server::Server(loop::Loop& loop, std::vector<Mount::Backing> volumes, transfer::Fabric* fabric,
               Options options, Hooks hooks)
    : loop_(loop),
      options_(std::move(options)),
      hooks_(std::move(hooks)),
      fabric_(fabric),
      buffers_(BufferPool::create(options_.remote_kept_bytes)),
      inventory_timer_(loop, loop::TimerKind::liveness, "store-inventory", [this] {
        if (inventory_) inventory_start();
      }) {
  DI_ASSERT(!volumes.empty() && volumes.size() <= volumes_max);
  held_by_.resize(volumes.size());
  for (Mount::Backing& backing : volumes) {
    const auto number = static_cast<std::uint16_t>(mounts_.size());
    Mount::Hooks of_mount;
    of_mount.changed = [this] {
      volumes_send();
      if (hooks_.volumes_changed) hooks_.volumes_changed();
    };
    of_mount.bad = [this, number](std::uint64_t stripe, std::uint16_t column, Code code) {
      if (!meta_) return;
      send(*meta_, wire::meta_read_failed{stripe << 8, column, static_cast<std::uint16_t>(code),
                                          options_.self.instance, options_.self.generation, number});
    };
    of_mount.dropped = [this](std::uint32_t columns) { counters_.columns_dropped += columns; };
    of_mount.looked = [this] {
      if (hooks_.disk_beat) hooks_.disk_beat();
    };
    of_mount.scrub_beat = [this] {
      if (hooks_.scrub_beat) hooks_.scrub_beat();
    };
    of_mount.ended = [this] { stop_when_idle(); };
    mounts_.push_back(std::make_unique<Mount>(
        loop, number, std::move(backing),
        Mount::Options{options_.flush_every, options_.scrub, options_.budget}, of_mount));
  }
}

Server::~Server() = default;

void Server::learn_layout(const kv::Layout& layout) {
  if (layouts_->contains(layout.fingerprint()) || layouts_->size() >= layouts_max) return;
  Layouts more = *layouts_;
  more.emplace(layout.fingerprint(), std::make_shared<const kv::Layout>(layout));
  layouts_ = std::make_shared<const Layouts>(std::move(more));
}

std::size_t Server::arenas() const {
  std::size_t count = 0;
  for (const auto& [instance, host] : hosts_) count += host.arena ? 1 : 0;
  return count;
}

Mount* Server::mount_of(std::uint16_t volume) const {
  return volume < mounts_.size() ? mounts_[volume].get() : nullptr;
}

bool Server::has_place(std::size_t own, std::size_t used, std::size_t max) const {
  return used < max && (mounts_.size() == 1 || own < share_of_left * (max - used));
}

std::size_t Server::io_pending() const {
  std::size_t sum = 0;
  for (const auto& mount : mounts_) sum += mount->is_open() ? mount->pool().pending() : 0;
  return sum;
}

std::uint64_t Server::slots_reading() const {
  std::uint64_t sum = 0;
  // The scrub's is not somebody's.
  for (const auto& mount : mounts_) {
    if (mount->is_open()) sum += mount->stats().reading - (mount->scrub().reading() ? 1 : 0);
  }
  return sum;
}

// ---- peers and arenas

void Server::meta_up(const Peer& meta) {
  meta_ = meta;
  volumes_send();
  inventory_start();
}

void Server::meta_lost(const Peer& meta) {
  if (meta_ != meta) return;
  meta_.reset();
  if (!inventory_) return;
  // Whoever waits for what it finds gets that much without di-meta.
  if (!inventory_->waiting.empty()) return inventory_start();
  inventory_.reset();
  inventory_timer_.cancel();
}

void Server::volumes_send() {
  if (!meta_) return;
  wire::meta_volumes message;
  for (const auto& mount : mounts_) {
    const Volume::Stats stats = mount->stats();
    wire::VolumeState state;
    state.volume = mount->number();
    state.state = static_cast<std::uint8_t>(mount->state_told());
    state.bytes_total = stats.bytes_total;
    state.bytes_free = stats.bytes_total - std::min(stats.bytes_total, stats.slot_bytes_live);
    state.spent = mount->spent();
    message.volumes.push_back(state);
  }
  send(*meta_, message);
}

void Server::host_up(const Peer& host, bool here) {
  Host& entry = hosts_[host.instance];
  if (entry.peer != host) {
    // Another start of it: its arena is another one.
    unmap(entry);
    entry = Host{};
    entry.peer = host;
  }
  entry.here = here;
  if (here && !entry.socket) attach(entry);
}

// Its transfers end without answers.  The mapping stays as long as its socket: a host that is only out of
// reach keeps the slots in quarantine until its cancels are answered.
void Server::host_lost(const Peer& host) {
  const auto found = hosts_.find(host.instance);
  if (found == hosts_.end() || found->second.peer != host) return;
  found->second.waiting.clear();
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    if (it->first.first != host) {
      ++it;
      continue;
    }
    cancel(it->second);
    it->second.answer_cancel = false;
    it = it->second.running ? std::next(it) : transfers_.erase(it);
  }
}

void Server::attach(Host& host) {
  const std::string path = options_.run_dir + "/" + host.peer.instance + ".arena";
  auto socket = transfer::ShmClient::connect(
      loop_, path, {options_.self.instance, options_.self.generation},
      {.attached =
           [this, peer = host.peer](const wire::arena_region& region, Fd fd) {
             Host& entry = hosts_.at(peer.instance);
             Result<std::shared_ptr<kv::ArenaClient>> arena = kv::ArenaClient::map(fd.get(), region.bytes);
             if (!arena || region.generation != peer.generation) {
               log_warn("store", "arena refused",
                        {{"host", peer.instance},
                         {"error", arena ? "another generation" : arena.error().message}});
               return loop_.post("store-detach", [this, peer] { detach(peer); });
             }
             entry.arena = *std::move(arena);
             for (const auto& mount : mounts_) {
               if (mount->is_open()) mount->pool().memory_add(entry.arena->memory());
             }
             log_info("store", "arena mapped", {{"host", peer.instance}, {"bytes", region.bytes}});
             for (const wire::Envelope& message : std::exchange(entry.waiting, {})) on_message(message);
           },
       .detached = [this, peer = host.peer](const Error&) { detach(peer); }});
  if (!socket) {
    log_warn("store", "arena not reachable", {{"host", host.peer.instance}, {"error", socket.error()}});
    return;
  }
  host.socket = *std::move(socket);
}

void Server::unmap(Host& host) {
  if (!host.arena) return;
  host.arena->fail();
  const std::shared_ptr<kv::ArenaClient> arena = std::exchange(host.arena, nullptr);
  for (const auto& mount : mounts_) {
    if (mount->is_open()) mount->pool().memory_remove(arena->memory(), [arena] {});
  }
}

void Server::detach(const Peer& peer) {
  const auto found = hosts_.find(peer.instance);
  if (found == hosts_.end() || found->second.peer != peer) return;
  Host& host = found->second;
  // Tasks that still write into the mapping keep it; nobody reads it any more.
  unmap(host);
  host.socket.reset();
  for (const wire::Envelope& message : std::exchange(host.waiting, {})) {
    if (message.number == wire::kv_read::number) {
      wire::kv_read want;
      if (!decode(message, want)) continue;
      transfers_.erase({peer, want.transfer});
      refuse_read(peer, want.transfer, Code::unreachable);
    } else if (message.number == wire::kv_put::number) {
      wire::kv_put want;
      if (decode(message, want)) put_answer(peer, want.stripe, want.column, Code::unreachable);
    }
  }
}

Server::Host* Server::host_of(const wire::Envelope& message) {
  const auto found = hosts_.find(message.peer);
  if (found == hosts_.end() || found->second.peer.generation != message.peer_generation) return nullptr;
  return &found->second;
}

void Server::on_message(const wire::Envelope& message) {
  switch (message.number) {
    case wire::kv_read::number:
      if (Host* host = host_of(message)) read(*host, message);
      break;
    case wire::kv_read_cancel::number: {
      wire::kv_read_cancel want;
      if (decode(message, want)) cancel({message.peer, message.peer_generation}, want.transfer);
      break;
    }
    case wire::kv_put::number:
      if (Host* host = host_of(message)) put(*host, message);
      break;
    case wire::kv_free::number: {
      wire::kv_free want;
      if (decode(message, want)) free(want);
      break;
    }
    case wire::meta_inventory_ack::number: {
      wire::meta_inventory_ack ack;
      if (decode(message, ack)) inventory_acked({message.peer, message.peer_generation}, ack);
      break;
    }
    case wire::meta_inventory_want::number: {
      wire::meta_inventory_want want;
      if (!decode(message, want) || stopping_ || meta_ != Peer{message.peer, message.peer_generation}) break;
      // One under way began before the question.
      inventory_start();
      inventory_->asked = want.asked;
      break;
    }
    default:
      ++counters_.malformed;
  }
}

// ---- reads

void Server::refuse_read(const Peer& host, std::uint64_t transfer, Code code) {
  if (code == Code::not_found) {
    ++counters_.reads_not_found;
  } else {
    ++counters_.reads_refused;
  }
  send(host, wire::kv_read_done{transfer, static_cast<std::uint16_t>(code), 0});
}

void Server::read(Host& host, const wire::Envelope& message) {
  wire::kv_read want;
  if (!decode(message, want)) return;
  const Peer& peer = host.peer;
  const TransferId id{peer, want.transfer};
  const auto known = transfers_.find(id);
  if (known != transfers_.end() && known->second.running) return;  // a repetition
  const auto refuse = [&](Code code) {
    transfers_.erase(id);
    refuse_read(peer, want.transfer, code);
  };
  if (stopping_) return refuse(Code::busy);
  if (!host.here) return read_remote(host, want);
  if (known == transfers_.end() && transfers_.size() >= options_.transfers_max) return refuse(Code::busy);
  if (!host.arena) {
    if (!host.socket) attach(host);
    if (!host.socket) return refuse(Code::unreachable);
    if (host.waiting.size() >= waiting_max) return refuse(Code::busy);
    host.waiting.push_back(message);
    transfers_[id].began = loop_.monotonic_now();
    return;
  }
  Mount* mount = mount_of(want.volume);
  if (mount == nullptr) return refuse(Code::not_found);
  Held& held = held_by_[want.volume];
  if (!has_place(held.reads, held_.reads, options_.transfers_max)) return refuse(Code::busy);
  const Result<Read> begun = mount->read_begin(want.stripe, want.column);
  if (!begun) return refuse(begun.error().code);
  Transfer& transfer = transfers_[id];
  if (transfer.began == Instant{}) transfer.began = loop_.monotonic_now();
  transfer.running = true;
  transfer.mount = mount;
  ++held_.reads;
  ++held.reads;
  ColumnRead job = job_of(want, *begun, transfer);
  if (is_page(want.page_blocks, begun->payload_bytes)) {
    job.segments = segments_known(want.page_blocks, job);
    job.whole = [arena = host.arena, ref = want.slot, bytes = begun->payload_bytes] {
      const Result<MutableByteView> page = arena->slot_to_write(ref, bytes);
      return page ? *page : MutableByteView();
    };
  }
  job.place = [arena = host.arena, ref = want.slot, places = std::make_shared<Places>(want, layouts_)](
                  const SlotHeader& header, std::uint32_t group) -> Result<MutableByteView> {
    const Result<Strip> strip = places->of(header.shard, group);
    if (!strip) return strip.error();
    // Asked anew for each access: the slot may have been given up.
    const Result<MutableByteView> to = arena->slot_to_write(ref, strip->offset + strip->bytes);
    if (!to) return Error{Code::stale, 0, to.error().message};
    return to->subspan(strip->offset);
  };
  job.arrived = [this, id](std::uint32_t group) {
    // A cancel that came meanwhile is all that the host still waits for.
    const auto found = transfers_.find(id);
    if (found == transfers_.end() || found->second.cancelled->load(std::memory_order_relaxed)) return;
    send(id.first, wire::kv_read_done{id.second, 0, group});
  };
  job.done = [this, id, mount, read = *begun](const ColumnEnd& end) {
    read_ended(id, *mount, read, end, true);
  };
  const Status queued = mount->pool().read(std::move(job));
  DI_ASSERT(queued.ok());
}

// True when a column of `bytes` can be all of a page, which goes into one piece.
bool Server::is_page(std::uint32_t blocks, std::uint64_t bytes) const {
  return std::any_of(layouts_->begin(), layouts_->end(), [&](const auto& entry) {
    return blocks > 0 && blocks <= entry.second->page_blocks() && entry.second->page_bytes(blocks) == bytes;
  });
}

// The segments of a column that is a page, when nothing else can be that long and nothing is to be compared:
// its header is not needed then.  Which page it is the host sees, by the checksums of its plan.
std::vector<std::uint32_t> Server::segments_known(std::uint32_t blocks, const ColumnRead& job) const {
  std::vector<std::uint32_t> segments;
  if (job.verify || layouts_->size() != 1) return segments;
  const kv::Layout& layout = *layouts_->begin()->second;
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    segments.push_back(static_cast<std::uint32_t>(layout.segment_bytes(group, blocks)));
  }
  return segments;
}

ColumnRead Server::job_of(const wire::kv_read& want, const Read& read, const Transfer& transfer) const {
  ColumnRead job;
  job.read = read;
  job.priority = want.priority;
  job.from_group = want.from_group;
  // Later ones are compared by the host, which has the checksums of the plan.
  job.verify = read.unverified;
  job.cancelled = transfer.cancelled;
  job.half = hooks_.mid_segment;
  return job;
}

void Server::read_ended(const TransferId& id, Mount& mount, const Read& read, const ColumnEnd& end,
                        bool by_disk) {
  const Code code = end.status.ok() ? Code::ok : end.status.error().code;
  mount.read_end(read, end.verified);
  counters_.read_bytes += end.bytes;
  const auto found = transfers_.find(id);
  DI_ASSERT(found != transfers_.end());
  const Transfer transfer = std::move(found->second);
  transfers_.erase(found);
  --held_.reads;
  --held_by_[mount.number()].reads;
  read_us_.record(static_cast<std::uint64_t>(to_us(loop_.monotonic_now() - transfer.began)));
  const bool cancelled = transfer.cancelled->load(std::memory_order_relaxed);
  if (cancelled) {
    ++counters_.reads_cancelled;
    if (transfer.answer_cancel) send(id.first, wire::kv_read_cancelled{id.second});
  } else if (code == Code::ok) {
    ++counters_.reads;
  } else {
    if (code == Code::corrupt) ++counters_.reads_corrupt;
    if (code == Code::io) ++counters_.reads_io;
    if (code == Code::stale) ++counters_.reads_refused;
    if (code != Code::stale) {
      log_warn("store", "read failed",
               {{"stripe", read.stripe},
                {"column", read.column},
                {"error", end.status.error()},
                {"host", id.first.instance}});
    }
    send(id.first, wire::kv_read_done{id.second, static_cast<std::uint16_t>(code), 0});
    if (by_disk && (code == Code::corrupt || code == Code::io)) {
      mount.column_bad(read, code);
    }
  }
  stop_when_idle();
}

void Server::cancel(const Peer& host, std::uint64_t transfer) {
  const auto found = transfers_.find({host, transfer});
  if (found == transfers_.end() || !found->second.running) {
    if (found != transfers_.end()) {
      transfers_.erase(found);
      std::erase_if(hosts_.at(host.instance).waiting, [&](const wire::Envelope& message) {
        if (message.number != wire::kv_read::number) return false;
        wire::kv_read want;
        return decode(message, want) && want.transfer == transfer;
      });
    }
    send(host, wire::kv_read_cancelled{transfer});
    return;
  }
  cancel(found->second);
  found->second.answer_cancel = true;
}

void Server::cancel(Transfer& transfer) {
  transfer.cancelled->store(true, std::memory_order_relaxed);
  if (transfer.mount != nullptr && transfer.mount->is_open()) transfer.mount->pool().look_at_cancelled();
  if (transfer.remote) remote_fail(*transfer.remote, Code::cancelled);
}

// ---- puts

void Server::put_answer(const Peer& host, std::uint64_t stripe, std::uint16_t column, Code code) {
  switch (code) {
    case Code::ok:
      break;
    case Code::no_space:
      ++counters_.puts_no_space;
      break;
    case Code::io:
      ++counters_.puts_io;
      break;
    case Code::corrupt:
      ++counters_.puts_corrupt;
      break;
    case Code::over_budget:
      ++counters_.puts_over_budget;
      break;
    case Code::invalid:
    case Code::not_found:
    case Code::exists:
    case Code::busy:
    case Code::timeout:
    case Code::cancelled:
    case Code::unreachable:
    case Code::unsupported:
    case Code::denied:
    case Code::stale:
    case Code::over_quota:
      ++counters_.puts_refused;
  }
  send(host, wire::kv_put_done{stripe, column, static_cast<std::uint16_t>(code)});
}

void Server::put(Host& host, const wire::Envelope& message) {
  wire::kv_put want;
  if (!decode(message, want)) return;
  const auto refuse = [&](Code code) { put_answer(host.peer, want.stripe, want.column, code); };
  if (stopping_) return refuse(Code::busy);
  if (!host.here && fabric_ == nullptr) return refuse(Code::unsupported);
  if (host.here && !host.arena) {
    if (!host.socket) attach(host);
    if (!host.socket) return refuse(Code::unreachable);
    if (host.waiting.size() >= waiting_max) return refuse(Code::busy);
    host.waiting.push_back(message);
    return;
  }
  Mount* mount = mount_of(want.volume);
  if (mount == nullptr) return refuse(Code::not_found);
  Held& held = held_by_[want.volume];
  if (!has_place(held.puts, held_.puts, options_.puts_max) ||
      (!host.here && !has_place(held.remote, held_.remote, options_.remote_max))) {
    return refuse(Code::busy);
  }
  if (const Code code = mount->put_refusal(); code != Code::ok) return refuse(code);
  const auto layout = layouts_->find(want.fingerprint);
  if (layout == layouts_->end()) return refuse(Code::unsupported);
  Result<Shard> shard =
      shard_make(*layout->second, want.stripe, want.column, std::move(want.pages), std::move(want.code));
  if (!shard) return refuse(shard.error().code);
  shard->tenant = want.tenant;
  std::vector<std::uint32_t> blocks;
  for (const wire::PutPage& page : shard->pages)
    blocks.push_back(static_cast<std::uint32_t>(page.keys.size()));
  const Result<kv::StripeShape> shape =
      kv::StripeShape::of(*layout->second, shard->code.data_columns, shard->code.parity_columns, blocks);
  DI_ASSERT(shape.ok());  // shard_make made one
  const bool parity = shape->is_parity(want.column);
  const std::uint32_t slot_blocks = want.slot.page_blocks;
  if (slot_blocks == 0 || slot_blocks > layout->second->page_blocks() ||
      (parity ? layout->second->page_bytes(slot_blocks) < shape->column_bytes(want.column)
              : slot_blocks != shape->page_blocks(shape->page_of(want.column)))) {
    return refuse(Code::stale);
  }
  Result<Put> begun = mount->put_begin(*shard, want.repair);
  if (!begun) {
    // A repetition of a put that is done is as good as the first: as durable, too.
    const Result<Read> there = mount->read_begin(want.stripe, want.column);
    if (there) mount->read_end(*there);
    if (begun.error().code != Code::exists) return refuse(begun.error().code);
    if (!there) return refuse(Code::busy);
    if (!options_.strict) return refuse(Code::ok);
    return mount->after_flush(
        [this, mount, to = host.peer, stripe = want.stripe, column = want.column](Code code) {
          if (code != Code::ok) counters_.columns_freed += mount->free(stripe, column);
          put_answer(to, stripe, column, code);
        });
  }
  auto work = std::make_shared<PutWork>();
  work->host = host.peer;
  work->mount = mount;
  work->want = std::move(want);
  work->put = *std::move(begun);
  work->began = loop_.monotonic_now();
  work->arena = host.arena;
  work->layout = layout->second;
  for (std::uint32_t group = 0; group < shape->groups(); ++group) {
    const Strip strip = strip_of(*shape, work->want.column, group);
    if (strip.bytes == 0) continue;
    if (!work->pieces.empty() && work->pieces.back().offset + work->pieces.back().bytes == strip.offset) {
      work->pieces.back().bytes += strip.bytes;
    } else {
      work->pieces.push_back(strip);
    }
  }
  ++held_.puts;
  ++held.puts;
  if (host.here) return put_write(work);
  ++held_.remote;
  ++held.remote;
  put_fetch(work);
}

void Server::put_write(const std::shared_ptr<PutWork>& work) {
  ColumnPut job;
  job.put = work->put;
  job.payload = [work]() -> Result<std::vector<ByteView>> {
    if (!work->arena) {
      return std::vector<ByteView>{work->remote.first(work->put.header.shard.payload_bytes())};
    }
    const Result<ByteView> page = work->arena->page(*work->layout, work->want.slot);
    if (!page) return Error{Code::stale, 0, page.error().message};
    std::vector<ByteView> pieces;
    for (const Strip& piece : work->pieces) pieces.push_back(page->subspan(piece.offset, piece.bytes));
    return pieces;
  };
  if (work->arena) job.current = [work] { return work->arena->current(work->want.slot); };
  job.done = [this, work](const PutOutcome& outcome) { put_ended(work, outcome); };
  const Status queued = work->mount->pool().put(std::move(job));
  DI_ASSERT(queued.ok());
}

void Server::put_ended(const std::shared_ptr<PutWork>& work, const PutOutcome& outcome) {
  const bool there = work->mount->put_end(work->put, outcome);
  Held& held = held_by_[work->mount->number()];
  --held_.puts;
  --held.puts;
  if (!work->arena) {
    --held_.remote;
    --held.remote;
  }
  work->arena.reset();
  const Shard& shard = work->put.header.shard;
  const auto answer = [this, work](Code code) {
    put_us_.record(static_cast<std::uint64_t>(to_us(loop_.monotonic_now() - work->began)));
    put_answer(work->host, work->want.stripe, work->want.column, code);
  };
  const auto answer_written = [this, answer](Code code) {
    if (!hooks_.put_written) return answer(code);
    hooks_.put_written([answer, code] { answer(code); });
  };
  if (!outcome.status.ok()) {
    log_warn("store", "put failed",
             {{"stripe", shard.stripe}, {"column", shard.column}, {"error", outcome.status.error()}});
    answer(outcome.status.error().code);
  } else if (!there) {
    ++counters_.columns_freed;
    answer(Code::cancelled);
  } else {
    ++counters_.puts;
    counters_.put_bytes += shard.payload_bytes();
    if (inventory_ && inventory_->meta) {
      inventory_->fresh.push_back({work->mount->number(), shard.stripe, shard.column});
      if (inventory_->fresh.size() > inventory_fresh_max) inventory_start();
    }
    if (options_.strict) {
      work->mount->after_flush([this, work, answer_written](Code code) {
        // Whoever is told that it is not there has nobody free it.
        if (code != Code::ok)
          counters_.columns_freed += work->mount->free(work->want.stripe, work->want.column);
        answer_written(code);
      });
    } else {
      answer_written(Code::ok);
    }
  }
  stop_when_idle();
}

void Server::free(const wire::kv_free& message) {
  if (!message.columns.empty() && message.columns.size() != message.stripes.size()) {
    ++counters_.malformed;
    return;
  }
  for (std::size_t i = 0; i < message.stripes.size(); ++i) {
    std::optional<std::uint16_t> column;
    if (!message.columns.empty()) column = message.columns[i];
    // Which volume it is on is not said.
    for (const auto& mount : mounts_) counters_.columns_freed += mount->free(message.stripes[i], column);
  }
}

// ---- a volume that comes back

Status Server::volume_close(std::uint16_t volume, std::function<void()> closed) {
  Mount* mount = mount_of(volume);
  if (mount == nullptr) return Error{Code::not_found, 0, "there is no volume " + std::to_string(volume)};
  if (stopping_) return Error{Code::busy, 0, "the store stops"};
  if (mount->state() == DiskState::good) return Error{Code::busy, 0, mount->path() + " is in service"};
  if (mount->is_open() && !mount->serves()) return Error{Code::busy, 0, mount->path() + " is being closed"};
  mount->close(std::move(closed));
  return {};
}

void Server::volume_open(std::uint16_t volume, Mount::Backing backing) {
  Mount& mount = *mounts_.at(volume);
  mount.open(std::move(backing));
  if (!mount.is_open()) return;
  for (const auto& [instance, host] : hosts_) {
    if (host.arena) mount.pool().memory_add(host.arena->memory());
  }
  if (meta_) inventory_start();
}

// ---- stop

void Server::stop(std::function<void()> done) {
  stopping_ = true;
  stopped_ = std::move(done);
  inventory_.reset();
  inventory_timer_.cancel();
  for (const auto& mount : mounts_) mount->stop();
  for (auto& [id, transfer] : transfers_) cancel(transfer);
  std::erase_if(transfers_, [](const auto& entry) { return !entry.second.running; });
  stop_when_idle();
}

void Server::stop_when_idle() {
  if (!stopped_ || !transfers_.empty() || held_.puts > 0) return;
  bool settled = true;
  for (const auto& mount : mounts_) settled = mount->settled() && settled;
  if (!settled) return;
  const auto done = std::exchange(stopped_, nullptr);
  loop_.post("store-stopped", done);
}

}  // namespace di::store
