#include "host/core.h"

#include <algorithm>

namespace di::host {

PeerKind peer_kind(std::string_view program, std::string_view role) {
  if (program == "di-router") return PeerKind::router;
  if (program == "di-meta") return PeerKind::meta;
  if (program == "di-prefill" || program == "di-decode") return PeerKind::rank;
  if (program == "di-kvd") return role == "store" ? PeerKind::store : PeerKind::host;
  return PeerKind::other;
}

Core::Core(const Options& options, ArenaPort& port, DataPort& data)
    : options_(options),
      entries_(options.entries_max),
      pages_(options.arena, port),
      leases_(options.fetch.lease_cap, *this, out_),
      reads_({options.fetch.reads_per_source, options.fetch.read_wait}, pages_, data, *this, leases_,
             numbers_, out_),
      hedge_(options.hedge),
      rebuilds_(options.rebuild, pages_, port, *this, reads_, leases_, hedge_),
      fillings_(pages_, port, *this, reads_, rebuilds_, leases_, hedge_),
      fetches_(options.fetch, pages_, entries_, port, *this, fillings_, leases_, numbers_, out_),
      repairs_(options.repair, pages_, port, data, *this, reads_, rebuilds_, leases_, numbers_, out_),
      writeback_(options.writeback, pages_, port, data, *this, numbers_, out_),
      pushes_(options.push, pages_, data, numbers_),
      serves_(options.serve, pages_, pushes_, out_),
      handovers_(options.handover, pages_, entries_, port, data, pushes_, *this, numbers_, out_) {}

void Core::set_self(const Peer& self) {
  DI_ASSERT(claims_.empty());
  options_.self = self;
}

Status Core::set_layout(const kv::Layout& layout) {
  if (layout_inherited_ && pages_.layout() != layout) {
    pages_.drop_evictable();
    if (Status replaced = pages_.replace_layout(layout); !replaced.ok()) return replaced;
  }
  layout_inherited_ = false;
  return pages_.set_layout(layout);
}

Status Core::restore(kv::Former former) {
  for (std::uint32_t index = 0; index < former.entry_generations.size(); ++index)
    entries_.restore_generation(index, former.entry_generations[index]);
  if (!former.layout) {
    if (!former.slots.empty()) return Error{Code::corrupt, 0, "arena: slots without a layout"};
    pages_.continue_generations(std::move(former.slot_generations));
    return {};
  }
  layout_inherited_ = true;
  const kv::Layout layout = *former.layout;
  return recovery_.begin(layout, std::move(former));
}

void Core::on_checked(std::uint32_t slot, bool good, const Now& now) {
  recovery_.checked(slot, good);
  // What was not in the store when the last owner died; as much as the queue takes without dropping any.
  const auto page = pages_.all().find(slot);
  if (good && page != pages_.all().end() && page->second.owned > 0 &&
      writeback_.pending() < options_.writeback.queue_pages) {
    writeback_.sealed(slot, 0, now);
  }
  settle(now);
}

void Core::on_former_gone(const Now& now) {
  recovery_.former_gone();
  settle(now);
}

Pages::Dropped Core::drop_arena(const Now& now) {
  const Pages::Dropped dropped = pages_.drop_evictable();
  settle(now);
  return dropped;
}

std::optional<Peer> Core::up(const std::string& instance, PeerKind kind) const {
  const auto found = peers_.find(instance);
  if (found == peers_.end() || found->second.kind != kind) return std::nullopt;
  return Peer{instance, found->second.generation};
}

std::optional<Peer> Core::store_up(const std::string& instance) const {
  return up(instance, PeerKind::store);
}

std::optional<Peer> Core::host_up(const std::string& instance) const {
  if (instance == options_.self.instance) return options_.self;
  return up(instance, PeerKind::host);
}

std::optional<Peer> Core::arena_up(const std::string& instance) const {
  return up(instance, PeerKind::host);
}

bool Core::remote(const Peer& peer) const {
  const auto found = peers_.find(peer.instance);
  return found != peers_.end() && found->second.remote;
}

bool Core::store_reachable() const {
  const auto is_store = [](const auto& peer) { return peer.second.kind == PeerKind::store; };
  return meta_.has_value() && std::any_of(peers_.begin(), peers_.end(), is_store);
}

std::optional<Peer> Core::meta_up() const {
  return meta_;
}

// ---- Peers -----------------------------------------------------------------------------------------------

void Core::on_peer_up(const Peer& peer, PeerKind kind, bool remote, const Now& now) {
  if (const auto known = peers_.find(peer.instance); known != peers_.end()) {
    if (known->second.generation == peer.generation) return;
    on_peer_lost({peer.instance, known->second.generation}, now);
  }
  peers_.emplace(peer.instance, PeerState{peer.generation, kind, remote});
  if (kind == PeerKind::meta) {
    meta_ = peer;
    snapshot_due_ = true;
  }
  if (kind == PeerKind::store) reads_.source_returned(peer);
  settle(now);
}

void Core::on_peer_lost(const Peer& peer, const Now& now) {
  const auto found = peers_.find(peer.instance);
  if (found == peers_.end() || found->second.generation != peer.generation) return;
  const PeerKind kind = found->second.kind;
  peers_.erase(found);
  switch (kind) {
    case PeerKind::rank:
    case PeerKind::router:
      drop_client(peer, now);
      break;
    case PeerKind::meta:
      meta_.reset();
      leases_.meta_lost();
      fetches_.meta_lost(now);
      repairs_.meta_lost();
      writeback_.meta_lost(now);
      break;
    case PeerKind::store:
      reads_.source_lost(peer);
      repairs_.store_lost(peer);
      writeback_.store_lost(peer, now);
      break;
    case PeerKind::host:
      reads_.source_lost(peer);
      serves_.host_lost(peer);
      pushes_.peer_lost(peer);
      handovers_.host_lost(peer);
      break;
    case PeerKind::other:
      break;
  }
  settle(now);
}

void Core::on_attached(const Peer& peer) {
  ++attached_[peer];
}

void Core::on_detached(const Peer& peer, const Now& now) {
  const auto found = attached_.find(peer);
  if (found == attached_.end()) return;
  // A rank closes the mapping of before its loss first, however quickly it is back with a new one.
  pages_.writer_gone(peer);
  if (const auto lingering = lingering_.find(peer); lingering != lingering_.end()) {
    PinSet pins = std::move(lingering->second);
    lingering_.erase(lingering);
    fillings_.unpin(pins);
  }
  if (--found->second > 0) return settle(now);
  attached_.erase(found);
  // A process without the arena holds nothing in it: its pins go now, whatever its connection says.
  if (up(peer.instance, PeerKind::rank) == peer) drop_client(peer, now);
  reads_.source_detached(peer);
  settle(now);
}

void Core::drop_client(const Peer& client, const Now& now) {
  std::set<Holder> mine;
  for (const auto& [holder, claim] : claims_) {
    if (holder.client == client) mine.insert(holder);
  }
  for (const Holder& holder : fetches_.holders()) {
    if (holder.client == client) mine.insert(holder);
  }
  for (const Holder& holder : handovers_.holders()) {
    if (holder.client == client) mine.insert(holder);
  }
  if (!mine.empty()) ++counters_.clients_lost;
  for (const Holder& holder : mine) release(holder, false, now);
}

// ---- Messages --------------------------------------------------------------------------------------------

template <class M>
std::optional<M> Core::decode(const wire::Envelope& message) {
  wire::Decoded<M> decoded = message.as<M>();
  if (decoded) return std::move(*decoded);
  ++counters_.malformed;
  return std::nullopt;
}

void Core::on_message(const wire::Envelope& message, const Now& now) {
  const Peer from{message.peer, message.peer_generation};
  if (from == options_.self) {
    from_host(from, message, now);
    settle(now);
    return;
  }
  const auto known = peers_.find(message.peer);
  if (known == peers_.end() || known->second.generation != message.peer_generation) {
    ++counters_.ignored;
    return;
  }
  switch (known->second.kind) {
    case PeerKind::rank:
      from_rank(from, message, now);
      break;
    case PeerKind::router:
      from_router(from, message, now);
      break;
    case PeerKind::meta:
      from_meta(message, now);
      break;
    case PeerKind::store:
      from_store(from, message, now);
      break;
    case PeerKind::host:
      from_host(from, message, now);
      break;
    case PeerKind::other:
      ++counters_.ignored;
      break;
  }
  settle(now);
}

void Core::from_rank(const Peer& rank, const wire::Envelope& message, const Now& now) {
  const Holder holder{rank, message.scope.request, message.scope.attempt, message.scope.rank};
  switch (message.number) {
    case wire::kv_fetch::number:
      if (auto body = decode<wire::kv_fetch>(message)) {
        fetches_.begin(holder, message.scope,
                       {FetchKind::fetch, std::move(body->keys), 0, std::move(body->compute)}, now);
        // The request is here: the fetch has pins of its own.
        fetches_.release_prefetch(holder.request, holder.attempt, now);
        for (const std::uint32_t slot : fetches_.take_sighted()) writeback_.sighted(slot, now);
      }
      break;
    case wire::kv_release::number:
      if (decode<wire::kv_release>(message)) release(holder, true, now);
      break;
    case wire::kv_open::number:
      if (const auto body = decode<wire::kv_open>(message)) open(holder, message.scope, *body);
      break;
    case wire::kv_sealed::number:
      if (const auto body = decode<wire::kv_sealed>(message)) seal(holder, *body, now);
      break;
    case wire::kv_expect::number:
      if (auto body = decode<wire::kv_expect>(message)) {
        if (handovers_.expect(holder, message.scope, *body, is_made_here(holder), now)) {
          fetches_.begin(holder, message.scope, {FetchKind::expect, std::move(body->keys), 1}, now);
        }
      }
      break;
    case wire::kv_push::number:
      if (const auto body = decode<wire::kv_push>(message))
        handovers_.push(holder, message.scope, *body, now);
      break;
    case wire::kv_handover::number:
      if (const auto body = decode<wire::kv_handover>(message)) {
        const auto claim = claims_.find(holder);
        const bool tail_is_theirs =
            claim != claims_.end() &&
            std::count(claim->second.pins.slots.begin(), claim->second.pins.slots.end(), body->tail.slot) > 0;
        if (body->tail.count != 0 && !tail_is_theirs) {
          out_.push_back(wire::Envelope::make(
              rank.instance, rank.generation,
              {message.scope.request, message.scope.attempt, message.scope.rank, 0},
              wire::kv_handed{body->seat, static_cast<std::uint16_t>(Code::invalid), body->decode}));
        } else {
          handovers_.hand_over(holder, message.scope, *body, now);
        }
      }
      break;
    default:
      ++counters_.ignored;
      break;
  }
}

void Core::from_router(const Peer& router, const wire::Envelope& message, const Now& now) {
  const Holder holder{router, message.scope.request, message.scope.attempt};
  switch (message.number) {
    case wire::kv_prefetch::number:
      if (auto body = decode<wire::kv_prefetch>(message)) {
        const auto priority = static_cast<std::uint8_t>(std::clamp<int>(body->priority, 1, 2));
        fetches_.begin(holder, message.scope, {FetchKind::prefetch, std::move(body->keys), priority}, now);
      }
      break;
    case wire::kv_release::number:
      if (decode<wire::kv_release>(message)) release(holder, true, now);
      break;
    default:
      ++counters_.ignored;
      break;
  }
}

void Core::from_meta(const wire::Envelope& message, const Now& now) {
  const std::uint64_t tag = request_tag(message.scope.request);
  switch (message.number) {
    case wire::meta_planned::number:
      if (const auto body = decode<wire::meta_planned>(message)) fetches_.planned(tag, *body, now);
      break;
    case wire::meta_put_opened::number:
      if (const auto body = decode<wire::meta_put_opened>(message)) writeback_.put_opened(tag, *body, now);
      break;
    case wire::meta_put_committed::number:
      if (const auto body = decode<wire::meta_put_committed>(message))
        writeback_.put_committed(tag, *body, now);
      break;
    case wire::meta_repair::number:
      if (const auto body = decode<wire::meta_repair>(message)) repairs_.begin(message.scope, *body, now);
      break;
    case wire::meta_arena_resync::number:
      if (decode<wire::meta_arena_resync>(message)) snapshot_due_ = true;
      break;
    default:
      ++counters_.ignored;
      break;
  }
}

void Core::from_store(const Peer& store, const wire::Envelope& message, const Now& now) {
  if (message.number != wire::kv_put_done::number) return from_source(store, message, now);
  if (const auto body = decode<wire::kv_put_done>(message)) {
    if (!repairs_.put_done(store, *body)) writeback_.put_done(store, *body, now);
  }
}

void Core::from_source(const Peer& source, const wire::Envelope& message, const Now& now) {
  switch (message.number) {
    case wire::kv_read_done::number:
      if (const auto body = decode<wire::kv_read_done>(message)) {
        reads_.read_done(source, *body, now);
      }
      break;
    case wire::kv_read_cancelled::number:
      if (const auto body = decode<wire::kv_read_cancelled>(message)) reads_.read_cancelled(source, *body);
      break;
    default:
      ++counters_.ignored;
      break;
  }
}

void Core::from_host(const Peer& host, const wire::Envelope& message, const Now& now) {
  const wire::Scope& scope = message.scope;
  switch (message.number) {
    case wire::handover_open::number:
      if (const auto body = decode<wire::handover_open>(message)) {
        // The seat has what is here; the rest comes from A.
        if (const auto seat = handovers_.open(host, scope, *body)) {
          fetches_.release(FetchKind::expect, *seat, true, now);
        }
      }
      break;
    case wire::handover_opened::number:
      if (const auto body = decode<wire::handover_opened>(message))
        handovers_.opened(host, scope, *body, now);
      break;
    case wire::handover_pages::number:
      if (const auto body = decode<wire::handover_pages>(message)) handovers_.pages(host, scope, *body);
      break;
    case wire::handover_slots::number:
      if (const auto body = decode<wire::handover_slots>(message)) handovers_.slots(host, scope, *body, now);
      break;
    case wire::handover_pushed::number:
      if (const auto body = decode<wire::handover_pushed>(message)) handovers_.pushed(host, scope, *body);
      break;
    case wire::handover_sealed::number:
      if (const auto body = decode<wire::handover_sealed>(message)) handovers_.sealed(host, scope, *body);
      break;
    case wire::handover_ack::number:
      if (const auto body = decode<wire::handover_ack>(message)) handovers_.acknowledged(host, scope, *body);
      break;
    case wire::arena_read::number:
      if (const auto body = decode<wire::arena_read>(message)) serves_.read(host, *body);
      break;
    case wire::kv_read_cancel::number:
      if (const auto body = decode<wire::kv_read_cancel>(message)) serves_.cancel(host, *body);
      break;
    default:
      from_source(host, message, now);
      break;
  }
}

void Core::open(const Holder& holder, const wire::Scope& scope, const wire::kv_open& message) {
  if (message.unheard != 0) give_back_since(holder, message.unheard);
  wire::kv_opened answer;
  answer.tag = message.tag;
  if (message.page_blocks.empty()) {
    answer.code = static_cast<std::uint16_t>(Code::invalid);
  } else if (const auto slots = pages_.take(message.page_blocks, PageState::granted); !slots) {
    // What the request holds itself is not evicted while it waits.
    const bool waits_for_itself =
        slots.error().code == Code::busy && !pages_.fits(message.page_blocks, held_by(holder));
    answer.code = static_cast<std::uint16_t>(waits_for_itself ? Code::invalid : slots.error().code);
  } else {
    Claim& claim = claims_[holder];
    for (const std::uint32_t slot : *slots) {
      claim.grants.emplace(slot, message.tag);
      answer.slots.push_back(pages_.ref({slot, 0, pages_.at(slot).blocks, 0}));
    }
  }
  if (answer.code != 0) ++counters_.grants_refused;
  out_.push_back(wire::Envelope::make(holder.client.instance, holder.client.generation,
                                      {scope.request, scope.attempt, scope.rank, 0}, answer));
}

bool Core::is_made_here(const Holder& holder) const {
  if (fetches_.another_fetches(holder)) return true;
  return std::any_of(claims_.begin(), claims_.end(), [&](const auto& claim) {
    return claim.first.request == holder.request && claim.first.attempt == holder.attempt &&
           claim.first.client != holder.client;
  });
}

void Core::give_back_since(const Holder& holder, std::uint64_t tag) {
  const auto found = claims_.find(holder);
  if (found == claims_.end()) return;
  Claim& claim = found->second;
  std::erase_if(claim.grants, [&](const auto& grant) {
    if (grant.second < tag) return false;
    pages_.give_back(grant.first);
    return true;
  });
  if (claim.grants.empty() && claim.pins.slots.empty()) claims_.erase(found);
}

std::set<std::uint32_t> Core::held_by(const Holder& holder) const {
  std::set<std::uint32_t> slots;
  if (const PinSet* fetched = fetches_.pins_of(holder))
    slots.insert(fetched->slots.begin(), fetched->slots.end());
  if (const auto claim = claims_.find(holder); claim != claims_.end()) {
    slots.insert(claim->second.pins.slots.begin(), claim->second.pins.slots.end());
    for (const auto& [slot, tag] : claim->second.grants) slots.insert(slot);
  }
  return slots;
}

void Core::seal(const Holder& holder, const wire::kv_sealed& message, const Now& now) {
  const auto found = claims_.find(holder);
  const std::uint32_t slot = message.slot.slot;
  const Page* page = pages_.find(slot, message.slot.generation);
  if (found == claims_.end() || page == nullptr || !found->second.grants.contains(slot)) {
    ++counters_.ignored;  // released meanwhile, or sealed before
    return;
  }
  Claim& claim = found->second;
  const bool tail = message.keys.empty();
  const bool valid = tail ? page->blocks == 1 : message.keys.size() == page->blocks;
  claim.grants.erase(slot);
  // A page that is not what its writer says is given up; it was only a cache, and a hand-over that
  // needs it hears invalid.
  if (!valid || message.crcs.size() != pages_.layout().groups()) {
    ++counters_.seals_invalid;
    pages_.give_back(slot);
  } else if (!pages_.matches(slot, message.crcs)) {
    ++counters_.seals_corrupt;
    pages_.give_back(slot);
  } else {
    pages_.pin(claim.pins, slot);
    pages_.seal(message);
    if (tail || pages_.at(slot).owned > 0) handovers_.page_sealed_for(holder, pages_.at(slot).place.bytes);
    if (pages_.at(slot).owned > 0) writeback_.sealed(slot, message.reuse, now);
    handovers_.page_sealed(now);
  }
  if (claim.grants.empty() && claim.pins.slots.empty()) claims_.erase(found);
}

void Core::release(const Holder& holder, bool by_client, const Now& now) {
  if (!by_client && attached_.contains(holder.client)) {
    // Lost, and it still maps the arena: it may be frozen in the middle of a copy.
    for (const PinSet* pins : {fetches_.pins_of(holder), handovers_.pins_of(holder)}) {
      if (pins != nullptr && !pins->slots.empty()) pages_.pin_again(lingering_[holder.client], *pins);
    }
  }
  // What it made before what that continues: what is let go of first is evicted first.
  release_claim(holder, by_client);
  fetches_.release(FetchKind::fetch, holder, by_client, now);
  fetches_.release(FetchKind::prefetch, holder, by_client, now);
  fetches_.release(FetchKind::expect, holder, by_client, now);
  handovers_.release_seat(holder);
  handovers_.release_source(holder);
}

void Core::release_claim(const Holder& holder, bool by_client) {
  const auto found = claims_.find(holder);
  if (found == claims_.end()) return;
  Claim claim = std::move(found->second);
  claims_.erase(found);
  for (const auto& [slot, tag] : claim.grants) {
    // A lost rank that still maps the arena may be frozen in the middle of a copy.
    if (!by_client && attached_.contains(holder.client)) {
      pages_.give_up(slot, holder.client);
    } else {
      pages_.give_back(slot);
    }
  }
  pages_.unpin(claim.pins);
}

// ---- Time ------------------------------------------------------------------------------------------------

void Core::settle(const Now& now) {
  settle_reads(now);
  writeback_.pump(now);
  // A push that is over lets its owner start others.
  do {
    pushes_.pump();
    for (const Pushes::Progress& progress : pushes_.take_progress()) {
      if (progress.purpose == Pushes::For::serve) {
        serves_.progressed(progress);
      } else {
        handovers_.progressed(progress, now);
      }
    }
  } while (pushes_.waiting());
}

void Core::settle_reads(const Now& now) {
  bool moved = true;
  while (moved) {
    reads_.pump(now);
    moved = false;
    for (const Reads::Progress& progress : reads_.take_progress()) {
      moved = true;
      switch (progress.purpose) {
        case Reads::For::page:
          fillings_.read_progress(progress);
          hear_fillings(now);
          break;
        case Reads::For::rebuild:
          rebuilds_.read_progress(progress);
          break;
        case Reads::For::repair:
          repairs_.read_progress(progress);
          break;
      }
    }
    moved = rebuilds_.pump() || moved;
    for (const Rebuilds::Progress& progress : rebuilds_.take_progress()) {
      moved = true;
      if (progress.repair != 0) {
        repairs_.rebuild_progress(progress);
      } else {
        fillings_.rebuild_progress(progress, now);
        hear_fillings(now);
      }
    }
    if (PinSet released = rebuilds_.take_released(); !released.slots.empty()) {
      moved = true;
      fillings_.unpin(released);
    }
  }
  if (fillings_.take_sealed()) handovers_.page_sealed(now);
}

void Core::hear_fillings(const Now& now) {
  for (const Fillings::Progress& progress : fillings_.take_progress())
    fetches_.filling_progress(progress, now);
}

void Core::on_pushed(std::uint64_t push, Code code, const Now& now) {
  pushes_.pushed(push, code);
  settle(now);
}

void Core::on_concealed(const Peer& peer, std::uint64_t transfer, const Now& now) {
  if (!reads_.concealed(peer, transfer)) handovers_.concealed(peer, transfer);
  settle(now);
}

void Core::on_time(const Now& now) {
  fetches_.on_time(now);
  fillings_.on_time(now);
  reads_.on_time(now);
  for (const std::uint64_t lease : leases_.on_time(now)) {
    fillings_.lease_over(lease);
    hear_fillings(now);
    rebuilds_.lease_over(lease);
    repairs_.lease_over(lease);
  }
  repairs_.on_time(now);
  writeback_.on_time(now);
  handovers_.on_time(now);
  // One at a time: a rebuild before a write-back, since somebody waits for it.
  if (!rebuilds_.step() && !writeback_.step(now)) static_cast<void>(repairs_.step());
  settle(now);
}

void Core::flush(const Now& now) {
  settle(now);
  Pages::Changes changes = pages_.take_changes();
  const std::optional<Peer> meta = meta_up();
  if (!meta) return;  // a snapshot is due when it comes
  if (snapshot_due_) {
    changes.added = pages_.published();
    changes.removed.clear();
    ++counters_.snapshots;
  } else if (changes.added.empty() && changes.removed.empty()) {
    return;
  }
  // A list that is too long for one message goes on in the next: only the first part says snapshot.
  std::size_t added = 0;
  do {
    wire::meta_arena_delta delta;
    delta.seq = ++delta_seq_;
    delta.snapshot = std::exchange(snapshot_due_, false);
    delta.removed = std::exchange(changes.removed, {});
    while (added < changes.added.size() && delta.added.size() < options_.delta_pages_max) {
      delta.added.push_back(pages_.describe(changes.added[added++]));
    }
    ++counters_.deltas;
    out_.push_back(wire::Envelope::make(meta->instance, meta->generation, {}, delta));
  } while (added < changes.added.size());
}

Due Core::next_due() const {
  Due due = fetches_.next_due();
  if (rebuilds_.has_step() || repairs_.has_step()) due.at_once();
  for (const Due& other : {fillings_.next_due(), reads_.next_due(), leases_.next_due(), repairs_.next_due(),
                           writeback_.next_due(), handovers_.next_due()}) {
    due.sooner_product(other.product);
    due.sooner_liveness(other.liveness);
  }
  return due;
}

std::array<Core::Work, 3> Core::background() const {
  const WritebackCounters& back = writeback_.counters();
  const ReadCounters& read = reads_.counters();
  const RebuildCounters& rebuild = rebuilds_.counters();
  const RepairCounters& repair = repairs_.counters();
  return {{
      // Without a directory or a store pages wait for as long as it takes.
      {"host-writeback", store_reachable() && writeback_.pending() > 0,
       back.written + back.existed + back.retried + back.dropped_evicted + back.dropped_failed +
           back.columns + back.columns_failed + back.encoded_bytes},
      {"host-fetch", reads_.waits() || rebuilds_.count() > 0,
       read.reads + read.groups + read.failed + read.cancelled + rebuild.rebuilds + rebuild.failed +
           rebuild.bytes},
      {"host-repair", repairs_.count() > 0,
       repair.repairs + repair.refused + repair.failed + repair.columns + repair.checks +
           repair.groups_checked},
  }};
}

// ---- What is held ----------------------------------------------------------------------------------------

std::vector<Gauge> Core::gauges() const {
  std::uint64_t claim_pins = 0;
  std::uint64_t grants = 0;
  for (const auto& [holder, claim] : claims_) {
    claim_pins += claim.pins.slots.size();
    grants += claim.grants.size();
  }
  std::uint64_t lingering = recovery_.pins();
  for (const auto& [client, pins] : lingering_) lingering += pins.slots.size();
  return {
      {"pins",
       claim_pins + lingering + fetches_.pins() + rebuilds_.pins() + handovers_.pins() + pushes_.count()},
      {"grants", grants},
      {"entries", entries_.used()},
      {"fetches", fetches_.fetches(FetchKind::fetch) + fetches_.fetches(FetchKind::expect)},
      {"prefetches", fetches_.fetches(FetchKind::prefetch)},
      {"expectations", handovers_.seats()},
      {"reserved_bytes", handovers_.reserved_bytes()},
      {"holds", handovers_.sources()},
      {"plans", fetches_.plans()},
      {"leases", leases_.count()},
      {"reads", reads_.count()},
      {"rebuilds", rebuilds_.count()},
      {"repairs", repairs_.count()},
      {"pushes", pushes_.count()},
      {"serves", serves_.count()},
      {"quarantined_pages", pages_.count(PageState::quarantined)},
      {"scratch_pages", pages_.count(PageState::scratch)},
      {"pending_writebacks", writeback_.pending()},
      {"used_bytes", pages_.bytes_total() - pages_.bytes_free() - pages_.bytes_evictable()},
  };
}

bool Core::idle() const {
  const std::vector<Gauge> all = gauges();
  return std::all_of(all.begin(), all.end(), [](const Gauge& gauge) { return gauge.count == 0; });
}

std::vector<Core::HolderRow> Core::holders() const {
  std::vector<HolderRow> rows;
  for (const auto& [holder, claim] : claims_)
    rows.push_back({holder, claim.pins.slots.size(), claim.grants.size()});
  return rows;
}

Status Core::check() const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  std::map<std::uint32_t, std::uint32_t> pins;
  std::set<std::uint32_t> scratch;
  std::set<std::uint32_t> grants;
  std::vector<Holder> holders = fetches_.holders();
  for (const auto& [holder, claim] : claims_) {
    holders.push_back(holder);
    if (claim.grants.empty() && claim.pins.slots.empty()) return broken("a holder of nothing");
    for (const std::uint32_t slot : claim.pins.slots) ++pins[slot];
    for (const auto& [slot, tag] : claim.grants) {
      if (!grants.insert(slot).second) return broken("a page is granted twice");
      if (!pages_.all().contains(slot) || pages_.at(slot).state != PageState::granted) {
        return broken("a grant of a page that is not granted");
      }
    }
  }
  for (const auto& [client, lingering] : lingering_) {
    if (!attached_.contains(client)) return broken("pages wait for a reader that is gone");
    for (const std::uint32_t slot : lingering.slots) ++pins[slot];
  }
  DI_TRY(recovery_.check(pins));
  for (const Holder& holder : handovers_.holders()) holders.push_back(holder);
  for (const Holder& holder : holders) {
    const auto peer = peers_.find(holder.client.instance);
    if (peer == peers_.end() || peer->second.generation != holder.client.generation) {
      return broken("something is held for a client that is gone: " + holder.client.instance);
    }
  }
  for (const auto& [slot, page] : pages_.all()) {
    if (page.state == PageState::granted && !grants.contains(slot))
      return broken("a page is granted to nobody");
    if (page.rank_writes && !attached_.contains(*page.rank_writes))
      return broken("a page waits for a writer that is gone");
  }
  std::set<std::uint64_t> reads;
  std::map<std::uint64_t, std::size_t> leases;
  DI_TRY(fetches_.check(pins));
  DI_TRY(fillings_.check(reads, leases));
  DI_TRY(rebuilds_.check(pins, scratch, reads, leases));
  DI_TRY(repairs_.check(scratch, reads, leases));
  DI_TRY(reads_.check(reads, leases));
  DI_TRY(leases_.check(leases));
  DI_TRY(writeback_.check(pins, scratch));
  DI_TRY(handovers_.check(pins));
  DI_TRY(pushes_.check(pins));
  DI_TRY(pages_.check(pins, scratch));
  if (entries_.used() != fetches_.entries() + handovers_.seats())
    return broken("readiness entries are miscounted");
  return {};
}

}  // namespace di::host
