#include "transfer/verbs_fabric.h"

#include <sys/mman.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/assert.h"
#include "base/crypto.h"
#include "base/log.h"
#include "transfer/verbs_state.h"

namespace di::transfer {

namespace verbs {

namespace {

// Looks at deadlines this often while there are any.
constexpr Duration sweep_every = milliseconds(10);

}  // namespace

// ---- memory

Result<Mapping> Mapping::make(std::uint64_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return errno_error("memory to register");
  return Mapping({static_cast<std::byte*>(at), bytes});
}

Mapping::~Mapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

Status Verbs::open_rails() {
  for (const VerbsPort& port : options_.rails) {
    Result<std::unique_ptr<VerbsRail>> verbs = VerbsRail::open(port);
    if (!verbs) return verbs.error();
    auto rail = std::make_unique<Rail>();
    rail->verbs = *std::move(verbs);
    rail->up = rail->verbs->active();
    if (!rail->up) log_warn("fabric", "port down", {{"rail", rail->verbs->name()}});
    Result<Mapping> messages = Mapping::make(connections_max * message_block_bytes);
    if (!messages) return messages.error();
    rail->messages = *std::move(messages);
    Result<VerbsKeys> keys = rail->verbs->add_memory(rail->messages.bytes());
    if (!keys) return keys.error();
    rail->message_keys = *keys;
    for (std::uint32_t i = 0; i < connections_max; ++i) rail->free_blocks.push_back(i);
    rails_.push_back(std::move(rail));
  }
  if (std::none_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->up; })) {
    return Error{Code::io, 0, "verbs: " + rails_.front()->verbs->name() + ": the port is not active"};
  }
  for (const VerbsFabricOptions::Memory& memory : options_.memory) {
    DI_TRY(add_chunks(memory.bytes, memory.dmabuf, memory.dmabuf_offset));
  }
  Result<Mapping> bounce = Mapping::make(options_.bounce_bytes);
  if (!bounce) return bounce.error();
  bounce_ = *std::move(bounce);
  bounce_chunk_ = static_cast<std::uint32_t>(chunks_.size());
  DI_TRY(add_chunks(bounce_.bytes(), -1, 0));
  for (std::uint32_t i = 0; i < options_.bounce_bytes / options_.max_unit_bytes; ++i)
    free_bounce_.push_back(i);
  for (const std::unique_ptr<Rail>& each : rails_) {
    Rail& rail = *each;
    rail.watch = std::make_unique<loop::Watch>(loop_, rail.verbs->fd(), "verbs");
    rail.watch->on_readable([this, &rail] { on_ready(rail); });
    rail.event_watch = std::make_unique<loop::Watch>(loop_, rail.verbs->event_fd(), "verbs-event");
    rail.event_watch->on_readable([this, &rail] { on_rail_event(rail); });
  }
  return {};
}

Status Verbs::add_chunks(MutableByteView bytes, int dmabuf, std::uint64_t dmabuf_offset) {
  while (!bytes.empty()) {
    const MutableByteView part = bytes.first(std::min<std::uint64_t>(bytes.size(), verbs_region_bytes_max));
    if (chunks_.size() >= verbs_memories_max)
      return Error{Code::invalid, 0, "more memory than can be registered"};
    for (const std::unique_ptr<Rail>& rail : rails_) {
      Result<VerbsKeys> keys = rail->verbs->add_memory(part, dmabuf, dmabuf_offset);
      if (!keys) return keys.error();
      rail->keys.push_back(*keys);
    }
    chunk_at_[part.data()] = static_cast<std::uint32_t>(chunks_.size());
    chunks_.push_back({part.data(), part.size()});
    dmabuf_offset += part.size();
    bytes = bytes.subspan(part.size());
  }
  return {};
}

std::optional<Spot> Verbs::find_memory(const std::byte* at) const {
  auto found = chunk_at_.upper_bound(at);
  if (found == chunk_at_.begin()) return std::nullopt;
  --found;
  const Chunk& chunk = chunks_[found->second];
  const auto offset = static_cast<std::uint64_t>(at - chunk.at);
  if (offset >= chunk.bytes) return std::nullopt;
  return Spot{found->second, offset, chunk.bytes - offset};
}

// At most two, because a unit is smaller than a chunk that has another behind it; none when some of it is not
// registered.
std::vector<VerbsPiece> Verbs::pieces_of(MutableByteView bytes, std::size_t rail) const {
  std::vector<VerbsPiece> pieces;
  while (!bytes.empty()) {
    const std::optional<Spot> spot = find_memory(bytes.data());
    if (!spot || pieces.size() == 2) return {};
    const std::uint64_t part = std::min<std::uint64_t>(bytes.size(), spot->left);
    pieces.push_back({bytes.data(), static_cast<std::uint32_t>(part), rails_[rail]->keys[spot->chunk].local});
    bytes = bytes.subspan(part);
  }
  return pieces;
}

// ---- owner

Status Verbs::expose(const Peer& to, TransferId transfer, Access access, std::vector<SlotName> slots) {
  if (options_.region == nullptr) return Error{Code::invalid, 0, "no memory to open to a peer"};
  if (exposed_.contains({to, transfer})) return Error{Code::exists, 0, "the transfer is open already"};
  if (exposed_.size() >= exposures_max || exposed_slots_ + slots.size() > exposed_slots_max) {
    return Error{Code::busy, 0, "too much is open to peers"};
  }
  exposed_.emplace(std::pair{to, transfer}, Exposed{slots.size(), false});
  exposed_slots_ += slots.size();
  DI_ASSERT(exposures_.open(to, transfer, access, slots));
  return {};
}

Status Verbs::extend(const Peer& to, TransferId transfer, std::vector<SlotName> slots) {
  const auto at = exposed_.find({to, transfer});
  if (at == exposed_.end() || at->second.concealing) return Error{Code::not_found, 0, "no such transfer"};
  if (exposed_slots_ + slots.size() > exposed_slots_max)
    return Error{Code::busy, 0, "too much is open to peers"};
  at->second.slots += slots.size();
  exposed_slots_ += slots.size();
  exposures_.extend(to, transfer, slots);
  return {};
}

void Verbs::conceal(const Peer& to, TransferId transfer) {
  const auto at = exposed_.find({to, transfer});
  if (at != exposed_.end() && std::exchange(at->second.concealing, true)) return;
  exposures_.close(to, transfer, now());
  if (moving(to, transfer)) {
    concealing_.emplace(std::pair{to, transfer}, now());
    arm_sweep();
  } else {
    conceal_now(to, transfer);
  }
}

bool Verbs::moving(const Peer& to, TransferId transfer) const {
  for (const auto& [id, connection] : connections_) {
    if (connection->dialled || connection->peer != to) continue;
    for (const std::unique_ptr<Lane>& lane : connection->lanes) {
      for (const Ask& ask : lane->asks) {
        if (ask.used && ask.transfer == transfer) return true;
      }
    }
  }
  return false;
}

void Verbs::conceal_now(const Peer& to, TransferId transfer) {
  later([this, to, transfer] {
    if (const auto at = exposed_.find({to, transfer}); at != exposed_.end()) {
      exposed_slots_ -= at->second.slots;
      exposed_.erase(at);
    }
    if (events_.concealed) events_.concealed(to, transfer);
  });
}

void Verbs::look_at_concealing() {
  for (auto at = concealing_.begin(); at != concealing_.end();) {
    if (moving(at->first.first, at->first.second)) {
      ++at;
      continue;
    }
    conceal_now(at->first.first, at->first.second);
    at = concealing_.erase(at);
  }
}

Result<Ticket> Verbs::grant(const Peer& to, bool seal) {
  if (seal) return Error{Code::unsupported, 0, "verbs cannot seal"};
  if (tickets_.count() >= tickets_max) return Error{Code::busy, 0, "too many tickets are out"};
  Ticket ticket;
  random_bytes(std::as_writable_bytes(std::span(ticket.secret)));
  tickets_.add(to, ticket, now() + options_.ticket_life);
  arm_sweep();
  return ticket;
}

void Verbs::peer_lost(const Peer& peer) {
  tickets_.forget(peer);
  // The link goes first: the end of its connection must not begin a dial.
  if (Link* link = links_.find(peer)) {
    Connection* connection = link->connection;
    link->connection = nullptr;
    link->phase = LinkPhase::idle;
    if (connection != nullptr) close(*connection);
    fail_ops(*link, false);
    links_.remove(*link);
  }
  std::vector<Connection*> theirs;
  for (const auto& [id, connection] : connections_) {
    const bool greets = connection->granted && connection->granted->to == peer;
    if (greets || connection->peer == peer) theirs.push_back(connection.get());
  }
  for (Connection* connection : theirs) close(*connection);
  for (auto at = exposed_.lower_bound({peer, 0}); at != exposed_.end() && at->first.first == peer; ++at) {
    if (std::exchange(at->second.concealing, true)) continue;
    exposures_.close(peer, at->first.second, now());
    conceal_now(peer, at->first.second);
  }
  if (const auto at = peers_.find(peer); at != peers_.end()) {
    at->second.bytes_per_s = 0;
    if (at->second.ops == 0) peers_.erase(at);
  }
}

// ---- time

bool Verbs::timed() const {
  return !ops_.empty() || tickets_.count() > 0 || greetings_ > 0 || !accepting_ || !concealing_.empty() ||
         links_.timed();
}

void Verbs::arm_sweep() {
  if (!sweep_timer_.armed()) sweep_timer_.start_after(sweep_every);
}

void Verbs::sweep() {
  const Instant at = now();
  tickets_.expire(at);
  if (!accepting_) {
    accepting_ = true;
    listener_watch_->on_readable([this] { accept_all(); });
  }
  std::vector<Connection*> late;
  for (const auto& [id, connection] : connections_) {
    if (!connection->dialled && !connection->greeted && connection->until <= at)
      late.push_back(connection.get());
  }
  for (Connection* connection : late) {
    ++counters_.refused_connections;
    close(*connection);
  }
  // Numbers and deadlines of operations grow together, but for those that are ending.
  std::vector<OpId> overdue;
  std::set<Link*> silent;
  for (auto op = ops_.begin(); op != ops_.end() && (ending_ > 0 || op->second.until <= at); ++op) {
    if (op->second.until > at) continue;
    if (op->second.ending) {
      silent.insert(links_.find(op->second.peer));
    } else {
      overdue.push_back(op->first);
    }
  }
  for (const OpId id : overdue) fail_op(id, Code::timeout);
  for (const auto& [name, since] : std::map(concealing_)) {
    if (since + options_.stall_max > at) continue;
    for (const auto& [id, connection] : connections_) {
      if (connection->dialled || connection->peer != name.first) continue;
      close(*connection);
      break;
    }
  }
  const std::vector<Link*> links = links_.all();
  for (Link* link : links) {
    switch (link->phase) {
      case LinkPhase::idle:
        break;
      case LinkPhase::asked:
      case LinkPhase::connecting:
      case LinkPhase::greeting:
        if (link->until <= at) dial_failed(*link, link->late());
        break;
      case LinkPhase::up:
        if (link->rate.busy()) measure(*link, 0);
        if (silent.contains(link) ||
            (link->under_way_bytes > 0 && link->moved_at + options_.stall_max <= at)) {
          close(*link->connection);
        }
        break;
      case LinkPhase::pause:
        if (link->until > at) break;
        if (link->wanted_at + dial_interest > at) {
          begin_dial(*link);
        } else {
          links_.remove(*link);
        }
        break;
    }
  }
  pump();
  if (timed()) arm_sweep();
}

}  // namespace verbs

Result<std::unique_ptr<VerbsFabric>> make_verbs_fabric(loop::Loop& loop, const VerbsFabricOptions& options) {
  if (options.max_unit_bytes == 0 || options.max_unit_bytes > frame_payload_bytes_max) {
    return Error{Code::invalid, 0, "max_unit_bytes: want 1 to " + std::to_string(frame_payload_bytes_max)};
  }
  if (options.rails.empty() || options.rails.size() > verbs_lanes_max) {
    return Error{Code::invalid, 0, "rails: want 1 to " + std::to_string(verbs_lanes_max)};
  }
  if (options.bounce_bytes < options.max_unit_bytes || options.bounce_bytes > verbs_region_bytes_max) {
    return Error{Code::invalid, 0, "bounce_bytes: want one unit at least, and one region at most"};
  }
  auto fabric = std::make_unique<verbs::Verbs>(loop, options);
  DI_TRY(fabric->open_rails());
  DI_TRY(fabric->open_listener());
  return std::unique_ptr<VerbsFabric>(std::move(fabric));
}

}  // namespace di::transfer
