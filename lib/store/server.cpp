#include "store/server.h"

#include <algorithm>
#include <set>

#include "base/log.h"

namespace di::store {

namespace {

// What waits for one host's arena; it is mapped within a turn or not at all.
constexpr std::size_t waiting_max = 1024;

// A stretch of a slot's payload in a host's arena.
struct Strip {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Where the segments of a column lie in the slot that kv_put and kv_read name: those of a data column where
// they are in its page, those of parity one after the other.
Strip strip_of(const kv::StripeShape& shape, std::uint32_t column, std::uint32_t group) {
  const std::uint64_t bytes = shape.segment_bytes(column, group);
  if (shape.is_parity(column)) return {shape.column_offset(column, group), bytes};
  return {shape.page_offset(column, group), bytes};
}

}  // namespace

// The same for a column on the disk, of which only the header knows what it is.  Disk thread.
class Server::Places {
 public:
  Places(const wire::kv_read& want, std::shared_ptr<const Layouts> layouts)
      : want_(want), layouts_(std::move(layouts)) {}

  // Errors: stale (a page of another length), unsupported (a part, and its layout is not known).
  Result<Strip> of(const Shard& shard, std::uint32_t group) {
    if (!known_) DI_TRY(learn(shard));
    return strips_[group];
  }

 private:
  Status learn(const Shard& shard) {
    const auto groups = static_cast<std::uint32_t>(shard.segments.size());
    if (!shard.is_parity()) {
      const wire::PutPage& page = shard.pages[shard.column / shard.parts];
      if (page.keys.size() != want_.page_blocks || want_.slot.page_blocks < want_.page_blocks) {
        return Error{Code::stale, 0, "the column holds a page of another length"};
      }
    }
    std::optional<kv::StripeShape> shape;
    if (!shard.is_parity() && shard.parts > 1) {
      const auto layout = layouts_->find(shard.fingerprint);
      if (layout == layouts_->end())
        return Error{Code::unsupported, 0, "the layout of the column is not known"};
      std::vector<std::uint32_t> blocks;
      for (const wire::PutPage& page : shard.pages)
        blocks.push_back(static_cast<std::uint32_t>(page.keys.size()));
      Result<kv::StripeShape> made =
          kv::StripeShape::of(*layout->second, shard.code.data_columns, shard.code.parity_columns, blocks);
      if (!made || made->parts() != shard.parts || made->groups() != groups) {
        return Error{Code::unsupported, 0, "the column's stripe does not fit its layout"};
      }
      shape = *std::move(made);
    }
    for (std::uint32_t group = 0; group < groups; ++group) {
      strips_[group] = {shard.segment_offset(group), shard.segments[group]};
      if (!shape) continue;
      strips_[group] = strip_of(*shape, shard.column, group);
      if (strips_[group].bytes != shard.segments[group]) {
        return Error{Code::unsupported, 0, "the column's stripe does not fit its layout"};
      }
    }
    known_ = true;
    return {};
  }

  const wire::kv_read want_;
  const std::shared_ptr<const Layouts> layouts_;
  bool known_ = false;
  std::array<Strip, kv::groups_max> strips_;
};

struct Server::PutWork {
  Peer host;
  wire::kv_put want;
  Put put;
  Instant began;
  std::shared_ptr<kv::ArenaClient> arena;  // null: the page is in `remote`
  std::shared_ptr<const kv::Layout> layout;
  std::vector<Strip> pieces;  // of the slot, in the order of the column
  AlignedBuffer remote;
  std::set<transfer::OpId> moving;  // into `remote`
  Code moved = Code::ok;            // the first thing that went wrong with it
};

// A column on its way to another machine: the disk's thread fills `payload`, the fabric takes it away.
struct Server::RemoteRead {
  TransferId id;
  wire::kv_read want;
  Read read;
  AlignedBuffer payload;
  // Of the slot; set on the disk's thread before the first segment is told.
  std::vector<Strip> strips;
  std::uint32_t begun = 0;  // segments [0, begun) are on their way or there
  std::uint64_t begun_bytes = 0;
  std::uint32_t arrived = 0;  // bitmap
  std::uint32_t told = 0;     // segments [0, told)
  std::set<transfer::OpId> moving;
  bool disk_over = false;
  bool disk_failed = false;  // that was what went wrong first
  bool verified = false;
  Code code = Code::ok;  // the first thing that went wrong
  std::uint64_t bytes = 0;
};

Server::Server(loop::Loop& loop, std::unique_ptr<Disk> disk, std::unique_ptr<Volume> volume,
               std::unique_ptr<IoPool> pool, transfer::Fabric* fabric, Options options, Hooks hooks)
    : loop_(loop),
      options_(std::move(options)),
      hooks_(std::move(hooks)),
      disk_(std::move(disk)),
      volume_(std::move(volume)),
      fabric_(fabric),
      sync_timer_(loop, loop::TimerKind::liveness, "store-sync", [this] { sync_now(); }),
      health_timer_(loop, loop::TimerKind::liveness, "store-health", [this] { health_look(); }),
      inventory_timer_(loop, loop::TimerKind::liveness, "store-inventory",
                       [this] {
                         if (inventory_) inventory_start();
                       }),
      pool_(std::move(pool)) {
  health_timer_.start_every(DiskHealth::interval);
  // An open list left by a kill shrinks without waiting for the first put.
  if (!volume_->clean()) sync_soon();
  scrub_ = std::make_unique<Scrub>(loop_, *volume_, *pool_, options_.scrub,
                                   Scrub::Hooks{[this] { return !transfers_.empty() || puts_ > 0; },
                                                [this](std::uint64_t stripe, std::uint16_t column,
                                                       Code code) { column_bad(stripe, column, code); },
                                                [this] {
                                                  if (hooks_.scrub_beat) hooks_.scrub_beat();
                                                },
                                                [this] { stop_when_idle(); }});
}

Server::~Server() = default;

template <class M>
bool Server::decode(const wire::Envelope& message, M& out) {
  wire::Decoded<M> decoded = message.as<M>();
  if (!decoded) {
    ++counters_.malformed;
    return false;
  }
  out = std::move(*decoded);
  return true;
}

template <class M>
void Server::send(const Peer& to, const M& message, const wire::Scope& scope) {
  hooks_.send(wire::Envelope::make(to.instance, to.generation, scope, message));
}

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
  const Volume::Stats stats = volume_->stats();
  wire::VolumeState state;
  state.volume = volume_number;
  // A volume whose tables cannot be written can be read; a disk that fails should not be.
  state.state = static_cast<std::uint8_t>(health_.state());
  if (volume_->broken()) state.state = std::max<std::uint8_t>(state.state, 1);
  state.bytes_total = stats.bytes_total;
  state.bytes_free = stats.bytes_total - stats.slot_bytes_live;
  send(*meta_, wire::meta_volumes{{state}});
}

void Server::column_bad(std::uint64_t stripe, std::uint16_t column, Code code) {
  if (meta_) send(*meta_, wire::meta_read_failed{stripe << 8, column, static_cast<std::uint16_t>(code)});
  if (code != Code::corrupt) return;
  // Nobody will ever read it: its room is worth more.
  counters_.columns_dropped += volume_->free(stripe, column);
  log_warn("store", "dropped a column that is not what it was", {{"stripe", stripe}, {"column", column}});
  sync_soon();
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
    it->second.cancelled->store(true, std::memory_order_relaxed);
    it->second.answer_cancel = false;
    if (it->second.remote) remote_fail(*it->second.remote, Code::cancelled);
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
             pool_->memory_add(entry.arena->memory());
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
  const MutableByteView memory = host.arena->memory();
  pool_->memory_remove(memory, [arena = std::exchange(host.arena, nullptr)] {});
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
  if (want.volume != volume_number) return refuse(Code::not_found);
  const Result<Read> begun = volume_->read_begin(want.stripe, want.column);
  if (!begun) return refuse(begun.error().code);
  Transfer& transfer = transfers_[id];
  if (transfer.began == Instant{}) transfer.began = loop_.monotonic_now();
  transfer.running = true;
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
  job.done = [this, id, read = *begun](const ColumnEnd& end) { read_ended(id, read, end, true); };
  const Status queued = pool_->read(std::move(job));
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

void Server::read_remote(Host& host, const wire::kv_read& want) {
  const TransferId id{host.peer, want.transfer};
  if (fabric_ == nullptr) return refuse_read(host.peer, want.transfer, Code::unsupported);
  if (transfers_.size() >= options_.transfers_max || remote_ >= options_.remote_max)
    return refuse_read(host.peer, want.transfer, Code::busy);
  if (want.volume != volume_number) return refuse_read(host.peer, want.transfer, Code::not_found);
  const Result<Read> begun = volume_->read_begin(want.stripe, want.column);
  if (!begun) return refuse_read(host.peer, want.transfer, begun.error().code);
  auto read = std::make_shared<RemoteRead>();
  read->id = id;
  read->want = want;
  read->read = *begun;
  ++remote_;
  Transfer& transfer = transfers_[id];
  transfer.began = loop_.monotonic_now();
  transfer.running = true;
  transfer.remote = read;
  read->payload.reserve(begun->payload_bytes);
  const MutableByteView payload = read->payload.first(begun->payload_bytes);
  ColumnRead job = job_of(want, *begun, transfer);
  job.from_group = 0;
  job.whole = [payload] { return payload; };
  job.place = [read, payload, places = std::make_shared<Places>(want, layouts_)](
                  const SlotHeader& header, std::uint32_t group) -> Result<MutableByteView> {
    const Shard& shard = header.shard;
    for (std::uint32_t i = 0; read->strips.size() < shard.segments.size(); ++i) {
      const Result<Strip> strip = places->of(shard, i);
      if (!strip) return strip.error();
      read->strips.push_back(*strip);
    }
    if (payload.size() != shard.payload_bytes()) {
      return Error{Code::corrupt, 0, "a column has another length than its slot's record"};
    }
    return payload.subspan(shard.segment_offset(group), shard.segments[group]);
  };
  job.arrived = [this, read](std::uint32_t group) { remote_read(read, group); };
  job.done = [this, read](const ColumnEnd& end) {
    read->disk_over = true;
    read->verified = end.verified;
    read->disk_failed = !end.status.ok() && read->code == Code::ok;
    if (!end.status.ok()) remote_fail(*read, end.status.error().code);
    remote_settle(read);
  };
  const Status queued = pool_->read(std::move(job));
  DI_ASSERT(queued.ok());
}

void Server::remote_read(const std::shared_ptr<RemoteRead>& read, std::uint32_t group) {
  for (; read->begun <= group; ++read->begun) {
    const Strip strip = read->strips[read->begun];
    // An empty segment is there as soon as those before it are.
    if (strip.bytes == 0) {
      read->arrived |= 1u << read->begun;
    } else {
      remote_segment(read, read->begun);
    }
    read->begun_bytes += strip.bytes;
  }
  remote_tell(*read);
}

void Server::remote_segment(const std::shared_ptr<RemoteRead>& read, std::uint32_t group) {
  const Transfer& transfer = transfers_.at(read->id);
  if (read->code != Code::ok || transfer.cancelled->load(std::memory_order_relaxed)) return;
  const Strip strip = read->strips[group];
  const transfer::Place to{{read->want.slot.slot, read->want.slot.generation}, strip.offset, strip.bytes};
  const Result<transfer::OpId> op =
      fabric_->write(read->id.first, read->id.second, to,
                     read->payload.first(read->begun_bytes + strip.bytes).subspan(read->begun_bytes),
                     transfer::Class::fetch);
  if (!op) return remote_fail(*read, op.error().code);
  read->moving.insert(*op);
  moving_.emplace(*op, [this, read, group, op = *op, bytes = strip.bytes](Code code) {
    read->moving.erase(op);
    if (code == Code::ok) read->bytes += bytes;
    remote_moved(read, group, code);
  });
}

// Segments that arrived in a row and were not told of.
void Server::remote_tell(RemoteRead& read) {
  if (read.code != Code::ok || transfers_.at(read.id).cancelled->load(std::memory_order_relaxed)) return;
  std::uint32_t there = read.told;
  while ((read.arrived >> there & 1u) != 0) ++there;
  if (there == read.told) return;
  read.told = there;
  send(read.id.first, wire::kv_read_done{read.id.second, 0, there - 1});
}

void Server::remote_moved(const std::shared_ptr<RemoteRead>& read, std::uint32_t group, Code code) {
  const bool cancelled = transfers_.at(read->id).cancelled->load(std::memory_order_relaxed);
  if (code != Code::ok) {
    if (!cancelled) remote_fail(*read, code);
  } else {
    read->arrived |= 1u << group;
    remote_tell(*read);
  }
  remote_settle(read);
}

void Server::remote_fail(RemoteRead& read, Code code) {
  if (read.code == Code::ok) read.code = code;
  for (const transfer::OpId op : std::set<transfer::OpId>(read.moving)) fabric_->cancel(op);
}

void Server::remote_settle(const std::shared_ptr<RemoteRead>& read) {
  if (!read->disk_over || !read->moving.empty()) return;
  --remote_;
  ColumnEnd end;
  if (read->code != Code::ok) end.status = Error{read->code, 0, "a transfer to another machine failed"};
  end.bytes = read->bytes;
  end.verified = read->verified;
  read_ended(read->id, read->read, end, read->disk_failed);
}

void Server::moved(transfer::OpId op, Code code) {
  const auto found = moving_.find(op);
  if (found == moving_.end()) return;
  const std::function<void(Code)> done = std::move(found->second);
  moving_.erase(found);
  done(code);
}

void Server::read_ended(const TransferId& id, const Read& read, const ColumnEnd& end, bool by_disk) {
  const Code code = end.status.ok() ? Code::ok : end.status.error().code;
  volume_->read_end(read, end.verified);
  counters_.read_bytes += end.bytes;
  const auto found = transfers_.find(id);
  DI_ASSERT(found != transfers_.end());
  const Transfer transfer = std::move(found->second);
  transfers_.erase(found);
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
    if (by_disk && (code == Code::corrupt || code == Code::io)) column_bad(read.stripe, read.column, code);
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
  found->second.cancelled->store(true, std::memory_order_relaxed);
  found->second.answer_cancel = true;
  if (found->second.remote) remote_fail(*found->second.remote, Code::cancelled);
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
      ++counters_.puts_refused;
  }
  send(host, wire::kv_put_done{stripe, column, static_cast<std::uint16_t>(code)});
}

void Server::put(Host& host, const wire::Envelope& message) {
  wire::kv_put want;
  if (!decode(message, want)) return;
  const auto refuse = [&](Code code) { put_answer(host.peer, want.stripe, want.column, code); };
  if (stopping_ || puts_ >= options_.puts_max) return refuse(Code::busy);
  if (!host.here && fabric_ == nullptr) return refuse(Code::unsupported);
  if (!host.here && remote_ >= options_.remote_max) return refuse(Code::busy);
  if (host.here && !host.arena) {
    if (!host.socket) attach(host);
    if (!host.socket) return refuse(Code::unreachable);
    if (host.waiting.size() >= waiting_max) return refuse(Code::busy);
    host.waiting.push_back(message);
    return;
  }
  if (want.volume != volume_number) return refuse(Code::not_found);
  if (const Code code = put_refusal(); code != Code::ok) return refuse(code);
  const auto layout = layouts_->find(want.fingerprint);
  if (layout == layouts_->end()) return refuse(Code::unsupported);
  Result<Shard> shard =
      shard_make(*layout->second, want.stripe, want.column, std::move(want.pages), std::move(want.code));
  if (!shard) return refuse(shard.error().code);
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
  Result<Put> begun = volume_->put_begin(*shard);
  if (!begun) {
    // A repetition of a put that is done is as good as the first.
    const Result<Read> there = volume_->read_begin(want.stripe, want.column);
    if (there) volume_->read_end(*there);
    return refuse(begun.error().code == Code::exists ? (there ? Code::ok : Code::busy) : begun.error().code);
  }
  auto work = std::make_shared<PutWork>();
  work->host = host.peer;
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
  ++puts_;
  if (host.here) return put_write(work);
  ++remote_;
  put_fetch(work);
}

// Brings the column from its host into the buffer.
void Server::put_fetch(const std::shared_ptr<PutWork>& work) {
  const std::uint64_t bytes = work->put.header.shard.payload_bytes();
  work->remote.reserve(bytes);
  std::uint64_t at = 0;
  for (const Strip& piece : work->pieces) {
    const transfer::Place from{{work->want.slot.slot, work->want.slot.generation}, piece.offset, piece.bytes};
    const Result<transfer::OpId> op =
        fabric_->read(work->host, work->want.transfer, from, work->remote.first(at + piece.bytes).subspan(at),
                      transfer::Class::writeback);
    if (!op) {
      work->moved = op.error().code;
      break;
    }
    at += piece.bytes;
    work->moving.insert(*op);
    moving_.emplace(*op, [this, work, op = *op](Code code) {
      work->moving.erase(op);
      put_fetched(work, code);
    });
  }
  if (work->moved != Code::ok) put_fetched(work, work->moved);
}

void Server::put_fetched(const std::shared_ptr<PutWork>& work, Code code) {
  if (code != Code::ok) {
    if (work->moved == Code::ok) work->moved = code;
    for (const transfer::OpId op : std::set<transfer::OpId>(work->moving)) fabric_->cancel(op);
  }
  if (!work->moving.empty()) return;
  if (work->moved == Code::ok) return put_write(work);
  PutOutcome outcome;
  outcome.status = Error{work->moved, 0, "the column could not be read from its host"};
  put_ended(work, outcome);
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
  const Status queued = pool_->put(std::move(job));
  DI_ASSERT(queued.ok());
}

void Server::put_ended(const std::shared_ptr<PutWork>& work, const PutOutcome& outcome) {
  const bool was_broken = volume_->broken();
  volume_->put_end(work->put, outcome);
  --puts_;
  if (!work->arena) --remote_;
  work->arena.reset();
  if (volume_->broken() && !was_broken) {
    log_error("store", "volume broken: a write of its tables failed", {{"error", outcome.status.error()}});
    volumes_send();
  }
  const Shard& shard = work->put.header.shard;
  const auto answer = [this, work, code = outcome.status.ok() ? Code::ok : outcome.status.error().code] {
    put_us_.record(static_cast<std::uint64_t>(to_us(loop_.monotonic_now() - work->began)));
    put_answer(work->host, work->want.stripe, work->want.column, code);
  };
  if (!outcome.status.ok()) {
    log_warn("store", "put failed",
             {{"stripe", shard.stripe}, {"column", shard.column}, {"error", outcome.status.error()}});
    answer();
  } else {
    ++counters_.puts;
    counters_.put_bytes += shard.payload_bytes();
    if (inventory_ && inventory_->meta) {
      inventory_->fresh.emplace_back(shard.stripe, shard.column);
      if (inventory_->fresh.size() > inventory_fresh_max) inventory_start();
    }
    if (options_.strict) {
      unflushed_.push_back(work);
      if (!syncing_) sync_now();
    } else if (hooks_.put_written) {
      hooks_.put_written(answer);
    } else {
      answer();
    }
  }
  sync_soon();
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
    counters_.columns_freed += volume_->free(message.stripes[i], column);
  }
  sync_soon();
}

// ---- write behind

void Server::sync_soon() {
  if (!syncing_ && !sync_timer_.armed() && !volume_->clean() && !volume_->broken()) {
    sync_timer_.start_after(options_.flush_every);
  }
}

void Server::sync_now() {
  if (syncing_) return;
  sync_timer_.cancel();
  std::optional<Sync> sync = volume_->sync_begin();
  if (!sync) {
    sync_soon();
    stop_when_idle();
    return;
  }
  syncing_ = true;
  flushing_ = std::exchange(unflushed_, {});
  const auto ended = [this](const Status& status) {
    syncing_ = false;
    volume_->sync_end(status);
    ++counters_.syncs;
    if (!status.ok()) {
      log_error("store", "volume broken: a write of its tables failed", {{"error", status.error()}});
      volumes_send();
    }
    for (const std::shared_ptr<PutWork>& work : std::exchange(flushing_, {})) {
      const auto answer = [this, work, code = status.ok() ? Code::ok : Code::io] {
        put_us_.record(static_cast<std::uint64_t>(to_us(loop_.monotonic_now() - work->began)));
        put_answer(work->host, work->want.stripe, work->want.column, code);
      };
      if (hooks_.put_written) {
        hooks_.put_written(answer);
      } else {
        answer();
      }
    }
    if (!unflushed_.empty() || stopping_) {
      sync_now();
    } else {
      sync_soon();
    }
    stop_when_idle();
  };
  const Status queued = pool_->sync(*std::move(sync), ended);
  DI_ASSERT(queued.ok());
}

// ---- health

DiskState Server::disk_state() const {
  return volume_->broken() ? DiskState::failed : health_.state();
}

std::string_view Server::disk_reason() const {
  return volume_->broken() ? "broken" : health_.reason();
}

Code Server::put_refusal() const {
  switch (disk_state()) {
    case DiskState::good:
      return Code::ok;
    case DiskState::avoid:
      return health_.reason() == "full" ? Code::no_space : Code::busy;
    case DiskState::failed:
      return Code::io;
  }
  return Code::ok;
}

void Server::health_look() {
  const DiskFigures& figures = pool_->figures();
  DiskHealth::Sample sample;
  // Before what has ended, so that what ends in between is not taken for something that never began.
  sample.ended = figures.read_us.count() + figures.write_us.count() + figures.flush_us.count();
  sample.begun = figures.begun.load(std::memory_order_relaxed);
  sample.errors = figures.read_errors.load(std::memory_order_relaxed) +
                  figures.write_errors.load(std::memory_order_relaxed);
  sample.no_space = figures.no_space.load(std::memory_order_relaxed);
  sample.corrupt = figures.corrupt.load(std::memory_order_relaxed);
  sample.p99_us = std::max(read_p99_.p99(figures.read_us), write_p99_.p99(figures.write_us));
  const DiskState before = health_.state();
  const DiskState now = health_.step(sample, loop_.monotonic_now());
  if (now != DiskState::failed && !volume_->broken() && hooks_.disk_beat) hooks_.disk_beat();
  if (now == before) return;
  if (now == DiskState::good) {
    log_info("store", "the disk is in service again", {{"path", disk_->path()}});
  } else {
    log_error("store", "the disk takes no more puts",
              {{"path", disk_->path()},
               {"state", disk_state_name(now)},
               {"reason", health_.reason()},
               {"errors", sample.errors},
               {"corrupt", sample.corrupt},
               {"p99_us", sample.p99_us},
               {"past_p99_us", static_cast<std::uint64_t>(health_.past_p99_us())}});
  }
  volumes_send();
}

// ---- inventory

Status Server::check(std::function<void(const Check&)> done) {
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
  if (inventory_) fresh->waiting = std::move(inventory_->waiting);
  inventory_ = std::move(fresh);
  inventory_->meta = meta_;
  inventory_->number = ++inventories_begun_;
  inventory_next();
}

void Server::inventory_next() {
  std::vector<Read> reads;
  if (!inventory_->listed) inventory_->listed = !volume_->list(inventory_->from, inventory_part_max, reads);
  const std::size_t listed = reads.size();
  auto& fresh = inventory_->fresh;
  while (inventory_->listed && !fresh.empty() && reads.size() < inventory_part_max) {
    if (const Result<Read> read = volume_->read_begin(fresh.front().first, fresh.front().second)) {
      reads.push_back(*read);
    }
    fresh.pop_front();
  }
  inventory_->last = inventory_->listed && fresh.empty();
  const Status queued = pool_->headers(
      {reads, [this, number = inventory_->number, listed, reads](std::vector<Result<SlotHeader>> headers) {
         inventory_read(number, listed, reads, std::move(headers));
       }});
  DI_ASSERT(queued.ok());
  inventory_timer_.start_after(inventory_wait);
}

void Server::inventory_read(std::uint64_t number, std::size_t listed, std::vector<Read> reads,
                            std::vector<Result<SlotHeader>> headers) {
  const bool current = inventory_ && inventory_->number == number;
  Check ignored;
  Check& found = current ? inventory_->found : ignored;
  wire::meta_inventory part;
  for (std::size_t i = 0; i < reads.size(); ++i) {
    const Read& read = reads[i];
    volume_->read_end(read);
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
               {{"stripe", read.stripe}, {"column", read.column}, {"error", headers[i].error()}});
      counters_.slots_dropped += volume_->free(read.stripe, read.column);
      continue;
    }
    if (counts && !read.unverified) ++found.verified;
    wire::ShardRecord record;
    record.stripe = read.stripe;
    record.volume = volume_number;
    record.column = read.column;
    record.generation = static_cast<std::uint32_t>(read.sequence);
    Shard& shard = headers[i]->shard;
    record.fingerprint = shard.fingerprint;
    record.pages = std::move(shard.pages);
    record.code = std::move(shard.code);
    part.shards.push_back(std::move(record));
  }
  stop_when_idle();
  if (!inventory_ || inventory_->number != number) return;
  if (!inventory_->meta) return inventory_go_on();
  inventory_->last = inventory_->last && inventory_->fresh.empty();
  part.cursor = inventory_->cursor;
  part.last = inventory_->last;
  send(*inventory_->meta, part);
}

void Server::inventory_acked(const Peer& meta, const wire::meta_inventory_ack& ack) {
  if (!inventory_ || inventory_->meta != meta || ack.cursor != inventory_->cursor) return;
  for (const std::uint64_t stripe : ack.unknown) {
    const std::uint32_t freed = volume_->free(stripe);
    counters_.columns_freed += freed;
    inventory_->found.orphans += freed;
  }
  sync_soon();
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
  over->found.told = over->meta.has_value();
  for (const auto& done : over->waiting) done(over->found);
}

// ---- stop

void Server::stop(std::function<void()> done) {
  stopping_ = true;
  stopped_ = std::move(done);
  inventory_.reset();
  inventory_timer_.cancel();
  scrub_->stop();
  health_timer_.cancel();
  for (auto& [id, transfer] : transfers_) {
    transfer.cancelled->store(true, std::memory_order_relaxed);
    if (transfer.remote) remote_fail(*transfer.remote, Code::cancelled);
  }
  std::erase_if(transfers_, [](const auto& entry) { return !entry.second.running; });
  stop_when_idle();
}

void Server::stop_when_idle() {
  if (!stopped_ || !transfers_.empty() || puts_ > 0 || syncing_ || volume_->stats().reading > 0) return;
  if (!volume_->clean() && !volume_->broken()) {
    // Each sync lets idle segments close; a few of them and the open list is empty.
    if (!sync_timer_.armed()) sync_timer_.start_after(Duration{0});
    return;
  }
  const auto done = std::exchange(stopped_, nullptr);
  sync_timer_.cancel();
  loop_.post("store-stopped", done);
}

}  // namespace di::store
