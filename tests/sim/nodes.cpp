#include "tests/sim/nodes.h"

#include <unistd.h>

#include <algorithm>

#include "base/checksum.h"

namespace di::sim {

namespace {

template <class Gauges>
std::string not_zero(const Gauges& gauges) {
  std::string text;
  for (const auto& gauge : gauges) {
    if (gauge.count != 0) text += " " + gauge.name + "=" + std::to_string(gauge.count);
  }
  return text;
}

}  // namespace

// ---- di-meta ---------------------------------------------------------------------------------------------

namespace {

std::vector<directory::InstanceRow> rows_of(const MetaDisk& disk) {
  std::vector<directory::InstanceRow> rows;
  for (const auto& [instance, row] : disk.rows) rows.push_back(row);
  return rows;
}

directory::Index::Options index_options(std::uint64_t run, const Settings& settings) {
  directory::Index::Options options;
  options.run = run;
  options.placement.geometry = settings.geometry;
  options.placement.lab = true;
  options.repair_after = seconds(3);
  options.reconcile = settings.reconcile;
  options.cross_check = settings.cross_check;
  options.repairs.bytes_per_s = std::uint64_t{1} << 30;
  return options;
}

}  // namespace

MetaNode::MetaNode(World& world, std::size_t process, MetaDisk& disk, const Settings& settings)
    : world_(world),
      process_(process),
      disk_(disk),
      encodes_wrong_(settings.encodes_wrong),
      membership_(rows_of(disk), ++disk.run),
      index_(index_options(disk.run, settings), world.now()) {}

Member MetaNode::admit(const Member& self, std::uint64_t boot, bool is_self) {
  auto admission = membership_.judge({self, boot});
  if (!admission && admission.error().code == Code::busy) {
    // It was started because the process before it has ended: it asks until its connection broke here, too.
    for (const Member& member : membership_.members()) {
      if (member.instance == self.instance) apply(membership_.lost(member.id, member.generation));
    }
    admission = membership_.judge({self, boot});
  }
  if (!admission) {
    world_.fail("registration of " + self.instance + " refused: " + admission.error().message);
    return {};
  }
  disk_.rows[self.instance] = admission->row;
  if (is_self) {
    membership_.admit_self(*admission);
  } else {
    apply(membership_.admit(*admission, world_.now()));
  }
  return admission->member;
}

void MetaNode::on_peer_up(const Member& peer) {
  const Member* present = membership_.find(peer.id, peer.generation);
  if (present == nullptr) {
    apply(membership_.rejoin(peer, world_.now()));
    present = membership_.find(peer.id, peer.generation);
    if (present == nullptr) return;
  }
  connected_[peer.instance] = peer.generation;
  const directory::Holder holder{peer.instance, peer.generation};
  if (peer.role == "host") index_.host_up(holder);
  if (peer.role == "store") index_.store_up(holder, world_.now());
}

void MetaNode::on_peer_lost(const Member& peer) {
  connected_.erase(peer.instance);
  apply(membership_.lost(peer.id, peer.generation));
}

void MetaNode::apply(const directory::Membership::Change& change) {
  for (const directory::Holder& holder : change.lost) index_.lost(holder, world_.now());
}

void MetaNode::on_message(const wire::Envelope& message) {
  const auto connected = connected_.find(message.peer);
  if (connected == connected_.end() || connected->second != message.peer_generation) return;
  const directory::Holder holder{message.peer, message.peer_generation};
  const Instant now = world_.now();
  switch (message.number) {
    case wire::meta_match::number:
      answer(message, index_.match(*message.as<wire::meta_match>()));
      break;
    case wire::meta_plan::number:
      answer(message, index_.plan(holder, message.scope.request, *message.as<wire::meta_plan>(), now));
      break;
    case wire::meta_renew::number:
      index_.renew(holder, *message.as<wire::meta_renew>(), now);
      break;
    case wire::meta_release::number:
      index_.release(holder, *message.as<wire::meta_release>());
      break;
    case wire::meta_arena_delta::number:
      if (index_.arena_delta(holder, *message.as<wire::meta_arena_delta>()))
        answer(message, wire::meta_arena_resync{});
      break;
    case wire::meta_put_open::number:
      answer(message, index_.put_open(holder, *message.as<wire::meta_put_open>(), now));
      break;
    case wire::meta_put_commit::number:
      answer(message, index_.put_commit(holder, *message.as<wire::meta_put_commit>(), now));
      break;
    case wire::meta_put_abort::number:
      index_.put_abort(holder, *message.as<wire::meta_put_abort>(), now);
      break;
    case wire::meta_inventory::number:
      if (const auto ack = index_.inventory(holder, *message.as<wire::meta_inventory>(), now))
        answer(message, *ack);
      break;
    case wire::meta_volumes::number:
      index_.volumes(holder, *message.as<wire::meta_volumes>(), now);
      break;
    case wire::meta_repaired::number:
      if (index_.repaired(holder, *message.as<wire::meta_repaired>(), now) ==
              directory::Index::RepairEnd::wrong &&
          !encodes_wrong_)
        world_.fail("a stripe that was encoded right was found to be wrong");
      break;
    case wire::meta_read_failed::number:
      index_.read_failed(*message.as<wire::meta_read_failed>(), now);
      break;
    default:
      world_.fail("di-meta got " + std::string(wire::message_name(message.number)));
  }
}

void MetaNode::on_time() {
  for (const directory::Index::Free& free : index_.step(world_.now())) {
    world_.send(process_, wire::Envelope::make(free.store, 0, {}, free.message));
  }
  for (const directory::Index::Repair& repair : index_.repairs(world_.now())) {
    world_.send(process_,
                wire::Envelope::make(repair.host.instance, repair.host.generation, {}, repair.message));
  }
  if (const auto asked = index_.reconcile(world_.now()))
    world_.send(process_,
                wire::Envelope::make(asked->store.instance, asked->store.generation, {}, asked->message));
}

Instant MetaNode::turn() {
  if (++turns_ % 16 == 0) index_.test_check();
  for (const kv::Evictor::TenantRow& row : index_.evictor().tenants()) {
    if (row.items > 0 && row.tenant != sim_tenant) world_.fail("a stripe has lost its tenant on the way");
  }
  return index_.next_due();
}

std::string MetaNode::held() const {
  std::string text;
  if (index_.leases() > 0) text += " leases=" + std::to_string(index_.leases());
  if (index_.open_puts() > 0) text += " open_puts=" + std::to_string(index_.open_puts());
  return text;
}

// ---- di-kvd store ----------------------------------------------------------------------------------------

namespace {

kv::StripeShape shape_of(const kv::Layout& layout, const std::vector<wire::PutPage>& pages,
                         const wire::StripeCode& code) {
  std::vector<std::uint32_t> blocks;
  for (const wire::PutPage& page : pages) blocks.push_back(static_cast<std::uint32_t>(page.keys.size()));
  Result<kv::StripeShape> shape = kv::StripeShape::of(layout, code.data_columns, code.parity_columns, blocks);
  DI_ASSERT(shape.ok());
  return *std::move(shape);
}

}  // namespace

void StoreNode::on_peer_up(const Member& peer) {
  if (peer.program == "di-meta") {
    meta_ = host::Peer{peer.instance, peer.generation};
    send(*meta_, wire::meta_volumes{{{0, 0, std::uint64_t{1} << 40, std::uint64_t{1} << 40}}});
    list(0);
    return;
  }
  Host& host = hosts_[peer.instance];
  if (host.generation != peer.generation) {
    if (host.arena) host.arena->fail();
    host = Host{};
    host.generation = peer.generation;
  }
  host.here = peer.host == world_.member(process_).host;
  if (host.here && host.socket == 0) host.socket = world_.attach(process_, world_.find(peer.instance));
}

void StoreNode::on_peer_lost(const Member& peer) {
  if (peer.program == "di-meta") {
    meta_.reset();
    return;
  }
  const auto found = hosts_.find(peer.instance);
  if (found == hosts_.end()) return;
  found->second.waiting.clear();
  // Their answers would go to nobody; the mapping stays as long as its socket.
  for (auto& [id, transfer] : transfers_) {
    if (id.first == host::Peer{peer.instance, peer.generation}) transfer.cancelled = true;
  }
  data_.peer_lost(process_, {peer.instance, peer.generation});
}

void StoreNode::on_arena(std::uint64_t socket, std::uint32_t generation,
                         std::shared_ptr<kv::ArenaClient> arena) {
  for (auto& [instance, host] : hosts_) {
    if (host.socket != socket) continue;
    if (arena == nullptr || generation != host.generation) {
      if (arena != nullptr) world_.detach(socket);
      if (host.arena) host.arena->fail();
      host.arena.reset();
      host.socket = 0;
      const host::Peer peer{instance, host.generation};
      for (const wire::Envelope& message : std::exchange(host.waiting, {})) {
        if (message.number == wire::kv_read::number) {
          const auto want = *message.as<wire::kv_read>();
          send(peer, wire::kv_read_done{want.transfer, static_cast<std::uint16_t>(Code::unreachable), 0});
        } else {
          const auto want = *message.as<wire::kv_put>();
          send(peer,
               wire::kv_put_done{want.stripe, want.column, static_cast<std::uint16_t>(Code::unreachable)});
        }
      }
      return;
    }
    host.arena = std::move(arena);
    for (const wire::Envelope& message : std::exchange(host.waiting, {})) on_message(message);
    return;
  }
}

void StoreNode::on_message(const wire::Envelope& message) {
  const host::Peer from{message.peer, message.peer_generation};
  switch (message.number) {
    case wire::kv_free::number: {
      const auto free = *message.as<wire::kv_free>();
      for (std::size_t i = 0; i < free.stripes.size(); ++i) {
        if (free.columns.empty()) {
          disk_.free(free.stripes[i]);
        } else {
          disk_.columns.erase({free.stripes[i], free.columns.at(i)});
        }
      }
      return;
    }
    case wire::meta_inventory_want::number:
      if (meta_ == from) list(message.as<wire::meta_inventory_want>()->asked);
      return;
    case wire::meta_inventory_ack::number: {
      const auto ack = *message.as<wire::meta_inventory_ack>();
      for (const std::uint64_t stripe : ack.unknown) disk_.free(stripe);
      if ((ack.cursor + 1) * 3 < listed_.size()) inventory(ack.cursor + 1);
      return;
    }
    case wire::kv_read_cancel::number: {
      const auto cancel = *message.as<wire::kv_read_cancel>();
      const auto found = transfers_.find({from, cancel.transfer});
      if (found == transfers_.end()) {
        send(from, wire::kv_read_cancelled{cancel.transfer});
      } else {
        found->second.cancelled = found->second.answer_cancel = true;
      }
      return;
    }
    case wire::kv_read::number:
    case wire::kv_put::number: {
      const auto host = hosts_.find(message.peer);
      if (host == hosts_.end() || host->second.generation != message.peer_generation) return;
      if (host->second.here && !host->second.arena) {
        if (host->second.socket == 0)
          host->second.socket = world_.attach(process_, world_.find(message.peer));
        host->second.waiting.push_back(message);
      } else if (message.number == wire::kv_read::number) {
        read(host->second, message);
      } else {
        put(host->second, message);
      }
      return;
    }
    default:
      world_.fail("the store got " + std::string(wire::message_name(message.number)));
  }
}

void StoreNode::list(std::uint32_t asked) {
  asked_ = asked;
  listed_.clear();
  for (const auto& [name, column] : disk_.columns) listed_.push_back(name);
  inventory(0);
}

void StoreNode::inventory(std::uint64_t cursor) {
  if (!meta_) return;
  wire::meta_inventory part;
  part.cursor = cursor;
  part.asked = asked_;
  for (std::size_t i = cursor * 3; i < std::min<std::size_t>(listed_.size(), cursor * 3 + 3); ++i) {
    const auto found = disk_.columns.find(listed_[i]);
    if (found != disk_.columns.end()) part.shards.push_back(found->second.record);
  }
  part.last = (cursor + 1) * 3 >= listed_.size();
  send(*meta_, part);
}

void StoreNode::read(Host& host, const wire::Envelope& message) {
  const auto want = *message.as<wire::kv_read>();
  const TransferId id{{message.peer, message.peer_generation}, want.transfer};
  if (!transfers_.emplace(id, Transfer{}).second) return;
  read_group(id, want, host.arena, 0);
}

void StoreNode::read_finish(const TransferId& id, Code code, std::uint32_t last) {
  const auto found = transfers_.find(id);
  const Transfer over = found->second;
  transfers_.erase(found);
  if (!over.cancelled) {
    send(id.first, wire::kv_read_done{id.second, static_cast<std::uint16_t>(code), last});
  } else if (over.answer_cancel) {
    send(id.first, wire::kv_read_cancelled{id.second});
  }
}

void StoreNode::read_group(const TransferId& id, const wire::kv_read& want,
                           std::shared_ptr<kv::ArenaClient> arena, std::uint32_t group) {
  world_.after(
      process_, world_.random_time(microseconds(100), milliseconds(3)), [this, id, want, arena, group] {
        if (transfers_.at(id).cancelled) return read_finish(id, Code::cancelled, 0);
        const auto column = disk_.columns.find({want.stripe, want.column});
        if (column == disk_.columns.end()) return read_finish(id, Code::not_found, 0);
        if (world_.rng.chance(settings_.store_fails))
          return read_finish(id, world_.rng.chance(0.5) ? Code::io : Code::corrupt, 0);
        const kv::StripeShape shape =
            shape_of(*settings_.layout, column->second.record.pages, column->second.record.code);
        const std::uint64_t offset = shape.is_parity(want.column) ? shape.column_offset(want.column, group)
                                                                  : shape.page_offset(want.column, group);
        const auto from =
            ByteView(column->second.payload)
                .subspan(shape.column_offset(want.column, group), shape.segment_bytes(want.column, group));
        const auto there = [this, id, want, arena, group](Code code) {
          if (code != Code::ok) return read_finish(id, code, 0);
          if (group + 1 == settings_.layout->groups()) return read_finish(id, Code::ok, group);
          if (!transfers_.at(id).cancelled) send(id.first, wire::kv_read_done{want.transfer, 0, group});
          read_group(id, want, arena, group + 1);
        };
        if (from.empty()) return there(Code::ok);
        if (arena == nullptr) {
          const auto bytes = std::make_shared<Bytes>(from.begin(), from.end());
          data_.write(process_, id.first, want.transfer,
                      {{want.slot.slot, want.slot.generation}, offset, bytes->size()}, *bytes,
                      [bytes, there](Code code) { there(code); });
          return;
        }
        auto slot = arena->slot_to_write(want.slot, offset + from.size());
        if (!slot) return read_finish(id, Code::stale, 0);
        const MutableByteView to = slot->subspan(offset, from.size());
        std::copy(from.begin(), from.end(), to.begin());
        // Bits that flip on the way: the host's checksum finds them.
        if (world_.rng.chance(settings_.store_fails)) to[0] ^= std::byte{1};
        there(Code::ok);
      });
}

void StoreNode::put(Host& host, const wire::Envelope& message) {
  const host::Peer from{message.peer, message.peer_generation};
  const auto want = *message.as<wire::kv_put>();
  world_.after(process_, world_.random_time(microseconds(200), milliseconds(5)),
               [this, from, want, here = host.here, arena = host.arena] {
                 const auto answer = [this, from, want](Code code) {
                   send(from, wire::kv_put_done{want.stripe, want.column, static_cast<std::uint16_t>(code)});
                 };
                 if (world_.rng.chance(settings_.store_fails))
                   return answer(world_.rng.chance(0.5) ? Code::io : Code::no_space);
                 const kv::Layout& layout = *settings_.layout;
                 if (!here) {
                   const auto bytes = std::make_shared<Bytes>(layout.page_bytes(want.slot.page_blocks));
                   data_.read(process_, from, want.transfer,
                              {{want.slot.slot, want.slot.generation}, 0, bytes->size()}, *bytes,
                              [this, from, want, bytes, answer](Code code) {
                                code == Code::ok ? put_finish(from, want, *bytes) : answer(code);
                              });
                   return;
                 }
                 const auto page = arena->page(layout, want.slot);
                 if (!page) return answer(Code::stale);
                 put_finish(from, want, Bytes(page->begin(), page->end()));
               });
}

void StoreNode::put_finish(const host::Peer& from, const wire::kv_put& want, Bytes payload) {
  const auto answer = [&](Code code) {
    send(from, wire::kv_put_done{want.stripe, want.column, static_cast<std::uint16_t>(code)});
  };
  const kv::StripeShape shape = shape_of(*settings_.layout, want.pages, want.code);
  StoreDisk::Column column;
  for (std::uint32_t group = 0; group < shape.groups(); ++group) {
    const std::uint64_t offset = shape.is_parity(want.column) ? shape.column_offset(want.column, group)
                                                              : shape.page_offset(want.column, group);
    const auto segment = ByteView(payload).subspan(offset, shape.segment_bytes(want.column, group));
    const auto place = shape.crc_index(want.column, group);
    const std::uint32_t crc =
        place ? want.code.crcs.at(*place) : want.pages.at(shape.page_of(want.column)).crcs.at(group);
    if (crc32c(segment) != crc) return answer(Code::corrupt);
    column.payload.insert(column.payload.end(), segment.begin(), segment.end());
  }
  column.record = {want.stripe,      want.volume, want.column, disk_.next_generation++,
                   want.fingerprint, want.pages,  want.code,   want.tenant};
  disk_.columns.insert_or_assign({want.stripe, want.column}, std::move(column));
  answer(Code::ok);
}

std::string StoreNode::held() const {
  return transfers_.empty() ? "" : " transfers=" + std::to_string(transfers_.size());
}

// ---- di-kvd host -----------------------------------------------------------------------------------------

HostNode::HostNode(World& world, std::size_t process, DataPlane& data, const Member& self,
                   const Settings& settings, Fd* parked)
    : world_(world), process_(process), data_(data), encodes_wrong_(settings.encodes_wrong) {
  constexpr std::uint32_t slots = 512;
  kv::ArenaOwner::Options arena;
  arena.name = self.instance;
  arena.payload_bytes = settings.arena_units * settings.layout->page_bytes(1);
  arena.slots_max = slots;
  arena.entries_max = settings.entries;
  kv::Former former;
  const bool was_parked = parked != nullptr && parked->valid();
  auto made = was_parked ? kv::ArenaOwner::take_over(Fd(::dup(parked->get())), arena, former)
                         : kv::ArenaOwner::create(arena);
  DI_ASSERT(made.ok());
  arena_ = *std::move(made);
  if (parked != nullptr && !was_parked) *parked = Fd(::dup(arena_->fd()));
  arena_->set_generation(self.generation);
  host::Core::Options options;
  options.self = {self.instance, self.generation};
  options.arena = {.payload_bytes = arena.payload_bytes, .slots_max = slots};
  options.entries_max = settings.entries;
  options.fetch.fetch_delay = settings.fetch_delay;
  options.fetch.prefetch_hold = settings.hold;
  options.handover.hold = settings.hold;
  options.writeback.admit = settings.admit;
  core_ = std::make_unique<host::Core>(options, static_cast<host::ArenaPort&>(*this),
                                       static_cast<host::DataPort&>(*this));
  if (!was_parked) return;
  if (const Status restored = core_->restore(std::move(former)); !restored.ok())
    world_.fail("di-kvd: " + restored.error().message);
  checks_ = core_->take_checks();
}

bool HostNode::recover() {
  if (!core_->recovering()) return false;
  if (!checks_.empty()) {
    const host::Recovery::Check check = std::move(checks_.back());
    checks_.pop_back();
    bool good = true;
    for (const host::Recovery::Segment& segment : check.segments)
      good = good && segment_crc(segment.offset, segment.bytes) == segment.crc;
    if (!good) world_.fail("di-kvd: a sealed page has other bytes after a restart");
    core_->on_checked(check.slot, good, now());
  }
  if (!arena_->former_users()) core_->on_former_gone(now());
  return core_->recovering();
}

std::uint32_t HostNode::segment_crc(std::uint64_t offset, std::uint64_t bytes) {
  return crc32c(arena_->payload(offset, bytes));
}

std::vector<std::uint32_t> HostNode::encode(std::span<const host::Strip> data,
                                            std::span<const host::Strip> parity) {
  const auto code = store::Erasure::create(static_cast<std::uint32_t>(data.size()),
                                           static_cast<std::uint32_t>(parity.size()));
  std::vector<ByteView> from;
  for (const host::Strip& strip : data) from.push_back(arena_->payload(strip.offset, strip.bytes));
  std::vector<MutableByteView> to;
  for (const host::Strip& strip : parity) to.push_back(arena_->payload(strip.offset, strip.bytes));
  std::vector<std::uint32_t> crcs(data.size() + parity.size());
  code->encode(from, to, crcs);
  if (encodes_wrong_ && !to.empty() && world_.rng.chance(0.1)) {
    to[0][world_.rng.below(to[0].size())] ^= std::byte{1};
    crcs[data.size()] = crc32c(to[0]);
  }
  return crcs;
}

std::uint32_t HostNode::decode(std::uint32_t data_columns, std::span<const CodeColumn> columns,
                               std::span<const std::uint32_t> wanted) {
  const auto code =
      store::Erasure::create(data_columns, static_cast<std::uint32_t>(columns.size()) - data_columns);
  std::vector<store::Erasure::Present> from;
  for (const CodeColumn& column : columns) {
    from.push_back(
        {column.present, false, column.crc, arena_->payload(column.strip.offset, column.strip.bytes)});
  }
  std::vector<store::Erasure::Wanted> to;
  for (const std::uint32_t column : wanted) {
    const CodeColumn& made = columns[column];
    to.push_back({column, made.crc, arena_->payload(made.strip.offset, made.strip.bytes)});
  }
  const Result<std::uint32_t> wrong = code->decode(from, to);
  DI_ASSERT(wrong.ok());
  return *wrong;
}

bool HostNode::xor_is_zero(std::span<const host::Strip> columns) {
  std::vector<ByteView> views;
  for (const host::Strip& strip : columns) views.push_back(arena_->payload(strip.offset, strip.bytes));
  return store::xor_is_zero(views);
}

Status HostNode::expose(const wire::Peer& peer, std::uint64_t transfer, transfer::Access access,
                        std::vector<transfer::SlotName> slots) {
  if (world_.rng.chance(0.01)) return Error{Code::busy, 0, "no room for exposures"};
  data_.expose(process_, peer, transfer, access, slots);
  return {};
}

void HostNode::conceal(const wire::Peer& peer, std::uint64_t transfer) {
  data_.conceal(process_, peer, transfer,
                [this, peer, transfer] { core_->on_concealed(peer, transfer, now()); });
}

Status HostNode::push(std::uint64_t push, const wire::Peer& peer, std::uint64_t transfer,
                      const transfer::Place& to, std::uint64_t offset, transfer::Class) {
  if (world_.rng.chance(0.01)) return Error{Code::busy, 0, "the queue is full"};
  const std::uint64_t op =
      data_.write(process_, peer, transfer, to, arena_->payload(offset, to.bytes), [this, push](Code code) {
        pushes_.erase(push);
        core_->on_pushed(push, code, now());
      });
  pushes_.emplace(push, op);
  return {};
}

void HostNode::cancel(std::uint64_t push) {
  if (const auto found = pushes_.find(push); found != pushes_.end()) data_.cancel(found->second);
}

void HostNode::on_peer_up(const Member& peer) {
  const host::PeerKind kind = host::peer_kind(peer.program, peer.role);
  if (kind == host::PeerKind::rank) {
    const auto layout = kv::Layout::decode(peer.layout);
    DI_ASSERT(layout.ok() && core_->set_layout(*layout).ok() && arena_->set_layout(*layout));
  }
  core_->on_peer_up({peer.instance, peer.generation}, kind, peer.host != world_.member(process_).host, now());
}

void HostNode::on_peer_lost(const Member& peer) {
  core_->on_peer_lost({peer.instance, peer.generation}, now());
  data_.peer_lost(process_, {peer.instance, peer.generation});
}

void HostNode::on_client(const Member& client, bool attached) {
  if (attached) {
    core_->on_attached({client.instance, client.generation});
  } else {
    core_->on_detached({client.instance, client.generation}, now());
  }
}

Instant HostNode::turn() {
  const bool again = recover();
  core_->flush(now());
  for (host::Outbox sent = core_->take_outgoing(); !sent.empty(); sent = core_->take_outgoing()) {
    for (wire::Envelope& message : sent) {
      if (message.peer == core_->self().instance) {
        core_->on_message(message, now());
      } else {
        world_.send(process_, message);
      }
    }
    core_->flush(now());
  }
  if (const Status status = core_->check(); !status.ok()) world_.fail("di-kvd: " + status.error().message);
  const host::Due due = core_->next_due();
  const Instant next = std::min(due.product, due.liveness);
  return again ? std::min(next, world_.now() + milliseconds(1)) : next;
}

std::string HostNode::held() const {
  return not_zero(core_->gauges());
}

// ---- ranks -----------------------------------------------------------------------------------------------

namespace {

template <class Core>
typename Core::Options rank_options(const Settings& settings, std::uint16_t rank, std::uint32_t generation) {
  typename Core::Options options;
  options.rank = rank;
  options.requests_max = settings.requests_max;
  options.swap_wait = Duration(0);  // the thread of the simulation must not wait
  if constexpr (std::is_same_v<Core, rank::PrefillCore>) {
    options.chunk_tokens = settings.chunk_tokens;
    options.overlap = settings.overlap;
    options.arbiter = settings.arbiter;
    options.hold = settings.hold;
  } else {
    options.seat_ttl = settings.seat_ttl;
    options.first_seat = (std::uint64_t{generation} << 32) + 1;
  }
  return options;
}

}  // namespace

template <class Core>
RankNode<Core>::RankNode(World& world, std::size_t process, const Member& self, const Settings& settings)
    : world_(world), process_(process), self_(self) {
  const bool prefill = std::is_same_v<Core, rank::PrefillCore>;
  for (std::uint16_t number = 0; number < settings.ranks; ++number) {
    engine::ScriptEngine::Options options{
        .description = {.model = self.model,
                        .layout = *settings.layout,
                        .revision = self.revision,
                        .context_tokens_max = settings.context_tokens,
                        .vocab = 1000,
                        .pool_blocks = prefill ? settings.prefill_pool_blocks : settings.decode_pool_blocks,
                        .sequences_max = settings.requests_max,
                        .wants_debug_text = true},
        .lines = settings.lines,
        .step_delay = settings.step_delay,
        .on_crash = [this] { world_.fail("the script crashed " + self_.instance); }};
    auto made = engine::ScriptEngine::create(std::move(options));
    DI_ASSERT(made.ok());
    Rank& rank = ranks_.emplace_back();
    rank.engine = *std::move(made);
    rank.core.emplace(rank_options<Core>(settings, number, self_.generation), rank.engine->describe());
  }
}

template <class Core>
void RankNode<Core>::on_peer_up(const Member& peer) {
  if (peer.program == "di-router") {
    for (Rank& rank : ranks_) rank.core->on_router_up(peer.instance, peer.generation);
  }
  if (peer.role == "host") {
    kvd_ = peer;
    attach();
  }
}

template <class Core>
void RankNode<Core>::on_peer_lost(const Member& peer) {
  if (peer.program == "di-router") {
    for (Rank& rank : ranks_) rank.core->on_router_lost(peer.instance);
  }
  if (kvd_ && kvd_->instance == peer.instance) {
    kvd_.reset();
    detach();
  }
}

template <class Core>
void RankNode<Core>::on_time() {
  for (Rank& rank : ranks_) rank.core->on_time(world_.now());
}

template <class Core>
void RankNode<Core>::drain(bool on) {
  for (Rank& rank : ranks_) rank.core->set_draining(on);
}

template <class Core>
void RankNode<Core>::attach() {
  if (!kvd_ || socket_ != 0) return;
  socket_ = world_.attach(process_, world_.find(kvd_->instance));
  if (socket_ == 0 && !attach_pending_) {
    attach_pending_ = true;
    world_.after(process_, milliseconds(50), [this] {
      attach_pending_ = false;
      attach();
    });
  }
}

template <class Core>
void RankNode<Core>::on_arena(std::uint64_t socket, std::uint32_t generation,
                              std::shared_ptr<kv::ArenaClient> arena) {
  if (socket != socket_) return;
  // The end, or another daemon's than the one whose messages we get.
  if (arena == nullptr || !kvd_ || generation != kvd_->generation) return detach();
  arena_ = std::move(arena);
  for (Rank& rank : ranks_) rank.core->on_arena(kvd_->instance, kvd_->generation, world_.now());
}

template <class Core>
void RankNode<Core>::detach() {
  if (socket_ != 0) {
    // The engines may be reading or writing: the host learns when they are done.
    Closing closing{std::exchange(socket_, 0), {}};
    for (std::size_t number = 0; number < ranks_.size(); ++number) {
      if (ranks_[number].busy) closing.ranks.insert(number);
    }
    if (closing.ranks.empty()) {
      world_.detach(closing.socket);
    } else {
      closing_.push_back(std::move(closing));
    }
  }
  if (arena_ != nullptr) {
    arena_->fail();
    arena_.reset();
    for (Rank& rank : ranks_) rank.core->on_arena("", 0, world_.now());
  }
  if (!attach_pending_) {
    attach_pending_ = true;
    world_.after(process_, milliseconds(50), [this] {
      attach_pending_ = false;
      attach();
    });
  }
}

template <class Core>
Instant RankNode<Core>::turn() {
  Instant due = instant_never;
  for (std::size_t number = 0; number < ranks_.size(); ++number) {
    Rank& rank = ranks_[number];
    if (!rank.busy) {
      if (auto next = rank.core->next_batch(world_.now())) start(number, *std::move(next));
    }
    for (const wire::Envelope& message : rank.core->take_outgoing()) world_.send(process_, message);
    due = std::min(due, rank.core->next_due());
  }
  return due;
}

template <class Core>
void RankNode<Core>::start(std::size_t number, rank::Batch next) {
  ranks_[number].busy = true;
  const auto batch = std::make_shared<rank::Batch>(std::move(next));
  // Now and then long enough for everybody else to lose this rank, its router or its patience.
  const Duration took = world_.rng.chance(0.04) ? world_.random_time(milliseconds(50), milliseconds(900))
                                                : world_.random_time(microseconds(200), milliseconds(6));
  world_.after(process_, took, [this, number, batch, arena = arena_, took] {
    const auto done = std::make_shared<rank::BatchDone>(
        rank::carry_out(std::move(*batch), arena, *ranks_[number].engine, world_.clock));
    done->step_took = took;
    world_.after(process_, world_.random_time(microseconds(10), milliseconds(1)), [this, number, done] {
      ranks_[number].busy = false;
      std::erase_if(closing_, [&](Closing& closing) {
        closing.ranks.erase(number);
        if (!closing.ranks.empty()) return false;
        world_.detach(closing.socket);
        return true;
      });
      ranks_[number].core->on_batch_done(std::move(*done), world_.now());
    });
  });
}

template <class Core>
std::string RankNode<Core>::held() const {
  std::string text;
  for (const Rank& rank : ranks_) {
    text += not_zero(rank.core->gauges());
    if (rank.engine->pool_blocks_used() != 0)
      text += " engine_blocks=" + std::to_string(rank.engine->pool_blocks_used());
  }
  return text;
}

template class RankNode<rank::PrefillCore>;
template class RankNode<rank::DecodeCore>;

// ---- di-router -------------------------------------------------------------------------------------------

namespace {

request::RouterCore::Options router_options(const Settings& settings) {
  request::RouterCore::Options options;
  options.attempts_max = settings.attempts_max;
  options.block_tokens = settings.layout->block_tokens();
  options.chunk_tokens = settings.chunk_tokens;
  options.first_token_wait = seconds(200);
  options.next_token_wait = seconds(20);
  options.total_wait = seconds(400);
  return options;
}

}  // namespace

RouterNode::RouterNode(World& world, std::size_t process, const Settings& settings, Events events)
    : core(router_options(settings)), world_(world), process_(process), events_(std::move(events)) {}

Instant RouterNode::turn() {
  for (const wire::Envelope& message : core.take_outgoing()) world_.send(process_, message);
  for (const request::Emission& emission : core.take_emissions()) events_.emitted(emission);
  for (const request::Ending& ending : core.take_endings()) events_.ended(ending);
  return core.next_due();
}

std::string RouterNode::held() const {
  std::string text;
  if (!core.flights().empty()) text += " flights=" + std::to_string(core.flights().size());
  if (core.ranks().outstanding() != 0) text += " outstanding=" + std::to_string(core.ranks().outstanding());
  if (core.queued() != 0) text += " queued=" + std::to_string(core.queued());
  return text;
}

}  // namespace di::sim
