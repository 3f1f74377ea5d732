#include "host_role.h"

#include <fcntl.h>

#include <algorithm>
#include <set>

#include "base/checksum.h"
#include "base/log.h"
#include "daemon/ready.h"
#include "kv/chain.h"
#include "net/envelope.h"
#include "store/erasure.h"

namespace di::kvd {

using namespace config::literals;

namespace {

// Slots of the index page per byte of payload: pages are seldom smaller (the demo model's tail is 32 KiB).
constexpr std::uint64_t bytes_per_slot = 32_KiB;
constexpr std::uint32_t slots_min = 1024;
// Each running fetch and each seat has one; 64 bytes.
constexpr std::uint32_t entries = 4096;
// A message delayed by a fault is sent so much later.
constexpr Duration fault_delay = seconds(1);
constexpr std::size_t page_rows_a_turn = 256;
constexpr Duration look_again_after = milliseconds(20);
// A loop of the core that waits and does not move for so long hangs: its longest wait is a lease, 120 s.
constexpr Duration host_late_after = seconds(180);
constexpr Duration beat_every = seconds(1);

std::uint32_t slots_of(std::uint64_t arena_bytes) {
  const std::uint64_t slots = std::max<std::uint64_t>(slots_min, arena_bytes / bytes_per_slot);
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(slots, kv::slots_max_limit));
}

}  // namespace

void host_params(config::Params& params, HostConfig& config) {
  params.size(
      "kv.arena_bytes", config.arena_bytes,
      {.def = 256_MiB, .min = 1_MiB, .help = "payload of the arena that the ranks of this host share"});
  params.boolean("kv.prefault", config.prefault,
                 {.help = "touch the whole arena before being ready, on all cores, and lock it in memory"});
  params.choice<kv::HugePages>(
      "kv.hugepages", config.huge_pages,
      {{kv::HugePages::automatic, "auto"}, {kv::HugePages::off, "off"}, {kv::HugePages::on, "on"}},
      {.def = kv::HugePages::automatic,
       .help = "pages of 2 MiB for the arena: when the pool has enough, never, or not "
               "without them"});
  params.choice<Park>(
      "kv.park", config.park,
      {{Park::automatic, "auto"}, {Park::systemd, "systemd"}, {Park::holder, "holder"}, {Park::off, "off"}},
      {.def = Park::automatic,
       .help = "who keeps the arena while di-kvd is restarted: systemd where it can, else a "
               "di-hold process"});
  params.integer("kv.fetch_delay_ms", config.fetch_delay_ms,
                 {.max = 60000, .help = "slows every layer group of a fetch down by so much, for tests"});
  params.choice("kv.admit", config.admit,
                {{host::Admit::always, "always"}, {host::Admit::second_sighting, "second_sighting"}},
                {.def = host::Admit::always,
                 .help = "which sealed pages are written to the store: all, or those that are wanted again"});
  params.integer("kv.writeback_queue_pages", config.writeback_queue_pages,
                 {.def = 256,
                  .min = 1,
                  .max = 1 << 20,
                  .unit = "pages",
                  .help = "sealed pages that wait for the store; above, the oldest is not written"});
  params.integer(
      "kv.stripe_linger_ms", config.stripe_linger_ms,
      {.def = 100,
       .max = 60000,
       .unit = "ms",
       .help = "how long a sealed page waits for those behind it, so that they go into one stripe"});
  params.real(
      "kv.skip_ratio", config.skip_ratio,
      {.def = 3,
       .min = 1,
       .help = "a store that is so many times slower than the others of a stripe is not read from, where "
               "parity does as well"});
  params.real("kv.hedge_ratio", config.hedge_ratio,
              {.def = 2.5,
               .min = 1,
               .help = "a column that takes so many times as long as usual is made of the others meanwhile"});
  params.real(
      "kv.hedge_budget_pct", config.hedge_budget_pct,
      {.def = 5, .max = 100, .unit = "%", .help = "at most so many reads more because of that; 0: none"});
  params.integer("kv.repairs_max", config.repairs_max,
                 {.def = 2, .min = 1, .max = 64, .help = "stripes that are repaired here at a time"});
  params.duration(
      "kv.hold", config.hold,
      {.def = seconds(60),
       .min = seconds(1),
       .help = "how long a hand-over keeps its pages without an answer, and an expected seat its room"});
  params.duration(
      "kv.handover_wait", config.handover_wait,
      {.def = seconds(10),
       .min = milliseconds(100),
       .help = "a hand-over to another host that the link will not have moved within this time, or that "
               "stands still for it, is given up; the prompt is read again near its seat"});
}

// ---- The arena -------------------------------------------------------------------------------------------

class HostRole::Port final : public host::ArenaPort {
 public:
  explicit Port(kv::ArenaOwner& arena) : arena_(arena) {}
  void slot_assign(const kv::ArenaOwner::Slot& slot) override { arena_.slot_assign(slot); }
  void slot_state(std::uint32_t slot, kv::SlotState state) override { arena_.slot_state(slot, state); }
  void slot_crcs(std::uint32_t slot, std::span<const std::uint32_t> crcs) override {
    arena_.slot_crcs(slot, crcs);
  }
  void slot_segments(std::uint32_t slot, std::uint32_t segments) override {
    arena_.slot_segments(slot, segments);
  }
  void slot_record(std::uint32_t slot, const kv::PageRecord& record) override {
    if (!arena_.slot_record(slot, record)) ++unrecorded;
  }
  void slot_stored(std::uint32_t slot) override { arena_.slot_stored(slot); }
  void slot_free(std::uint32_t slot) override { arena_.slot_free(slot); }
  void entry_open(std::uint32_t handle) override { arena_.entry_open(handle); }
  void entry_set(std::uint32_t handle, const kv::Readiness& readiness) override {
    arena_.entry_set(handle, readiness);
  }
  void entry_close(std::uint32_t handle) override { arena_.entry_close(handle); }
  std::uint32_t segment_crc(std::uint64_t offset, std::uint64_t bytes) override {
    return crc32c(arena_.payload(offset, bytes));
  }
  bool has_code(std::uint32_t data_columns, std::uint32_t parity_columns) override {
    return code(data_columns, parity_columns) != nullptr;
  }
  std::vector<std::uint32_t> encode(std::span<const host::Strip> data,
                                    std::span<const host::Strip> parity) override {
    const store::Erasure* erasure =
        code(static_cast<std::uint32_t>(data.size()), static_cast<std::uint32_t>(parity.size()));
    DI_ASSERT(erasure != nullptr);
    std::vector<ByteView> from;
    for (const host::Strip& strip : data) from.push_back(bytes(strip));
    std::vector<MutableByteView> to;
    for (const host::Strip& strip : parity) to.push_back(bytes(strip));
    std::vector<std::uint32_t> crcs(data.size() + parity.size());
    erasure->encode(from, to, crcs);
    return crcs;
  }
  std::uint32_t decode(std::uint32_t data_columns, std::span<const CodeColumn> columns,
                       std::span<const std::uint32_t> wanted) override {
    const store::Erasure* erasure =
        code(data_columns, static_cast<std::uint32_t>(columns.size()) - data_columns);
    DI_ASSERT(erasure != nullptr);
    std::vector<store::Erasure::Present> from;
    for (const CodeColumn& column : columns) {
      from.push_back(
          {column.present, false, column.crc, column.present ? ByteView(bytes(column.strip)) : ByteView()});
    }
    std::vector<store::Erasure::Wanted> to;
    for (const std::uint32_t column : wanted)
      to.push_back({column, columns[column].crc, bytes(columns[column].strip)});
    const Result<std::uint32_t> wrong = erasure->decode(from, to);
    DI_ASSERT(wrong.ok());
    return *wrong;
  }

  bool xor_is_zero(std::span<const host::Strip> columns) override {
    std::vector<ByteView> views;
    for (const host::Strip& strip : columns) views.push_back(bytes(strip));
    return store::xor_is_zero(views);
  }

  std::uint64_t unrecorded = 0;  // sealed pages that the next owner will not find

 private:
  MutableByteView bytes(const host::Strip& strip) {
    return strip.bytes == 0 ? MutableByteView() : arena_.payload(strip.offset, strip.bytes);
  }
  // Null for a geometry that it does not do.  Few are in use at a time; stripe_columns_max bounds them.
  const store::Erasure* code(std::uint32_t data_columns, std::uint32_t parity_columns) {
    const std::pair geometry{data_columns, parity_columns};
    auto known = codes_.find(geometry);
    if (known == codes_.end()) {
      if (data_columns + parity_columns > kv::stripe_columns_max) return nullptr;
      Result<store::Erasure> made = store::Erasure::create(data_columns, parity_columns);
      if (!made) return nullptr;
      known = codes_.emplace(geometry, *std::move(made)).first;
    }
    return &known->second;
  }

  std::map<std::pair<std::uint32_t, std::uint32_t>, store::Erasure> codes_;
  kv::ArenaOwner& arena_;
};

// ---- The data plane --------------------------------------------------------------------------------------

class HostRole::Data final : public host::DataPort, public transfer::Region {
 public:
  explicit Data(kv::ArenaOwner& arena) : arena_(arena) {}
  void set_fabric(transfer::Fabric* fabric) { fabric_ = fabric; }

  Result<MutableByteView> resolve(const transfer::SlotName& slot) override {
    return arena_.slot_bytes(slot.slot, slot.generation);
  }

  Status expose(const wire::Peer& peer, std::uint64_t transfer, transfer::Access access,
                std::vector<transfer::SlotName> slots) override {
    if (fabric_ == nullptr) return Error{Code::busy, 0, "no data plane: transfer.bind is not set"};
    if (exposed_.insert({peer, transfer}).second) {
      const Status opened = fabric_->expose(peer, transfer, access, std::move(slots));
      if (!opened.ok()) exposed_.erase({peer, transfer});
      return opened;
    }
    return fabric_->extend(peer, transfer, std::move(slots));
  }
  void conceal(const wire::Peer& peer, std::uint64_t transfer) override {
    exposed_.erase({peer, transfer});
    if (fabric_ != nullptr) fabric_->conceal(peer, transfer);
  }
  Status push(std::uint64_t push, const wire::Peer& peer, std::uint64_t transfer, const transfer::Place& to,
              std::uint64_t offset, transfer::Class cls) override {
    if (fabric_ == nullptr) return Error{Code::unreachable, 0, "no data plane: transfer.bind is not set"};
    const Result<transfer::OpId> op =
        fabric_->write(peer, transfer, to, arena_.payload(offset, to.bytes), cls);
    if (!op) return op.error();
    ops_.emplace(push, *op);
    pushes_.emplace(*op, push);
    return {};
  }
  void cancel(std::uint64_t push) override {
    if (const auto found = ops_.find(push); found != ops_.end()) fabric_->cancel(found->second);
  }
  void see_arrivals() const override {
    if (fabric_ != nullptr) fabric_->see_arrivals();
  }
  double rate(const wire::Peer& peer) const override {
    return fabric_ == nullptr ? 0 : fabric_->link(peer).bytes_per_s;
  }
  // The push that an operation was for.
  std::uint64_t done(transfer::OpId op) {
    const auto found = pushes_.find(op);
    if (found == pushes_.end()) return 0;
    const std::uint64_t push = found->second;
    pushes_.erase(found);
    ops_.erase(push);
    return push;
  }
  void peer_lost(const wire::Peer& peer) {
    std::erase_if(exposed_, [&](const auto& item) { return item.first == peer; });
  }

 private:
  kv::ArenaOwner& arena_;
  transfer::Fabric* fabric_ = nullptr;
  std::set<std::pair<wire::Peer, std::uint64_t>> exposed_;
  std::map<std::uint64_t, transfer::OpId> ops_;  // by push
  std::map<transfer::OpId, std::uint64_t> pushes_;
};

HostRole::HostRole(const HostConfig& config, const DataConfig& data) : config_(config), data_config_(data) {}
HostRole::~HostRole() = default;

Status HostRole::on_prepare(daemon::Daemon& daemon) {
  daemon_ = &daemon;
  kv::ArenaOwner::Options arena;
  arena.name = std::string(daemon.instance());
  arena.payload_bytes = config_.arena_bytes;
  arena.slots_max = slots_of(config_.arena_bytes);
  arena.entries_max = entries;
  arena.huge_pages = config_.huge_pages;
  arena.prefault = config_.prefault;
  arena.progress = [](std::uint64_t done_bytes, std::uint64_t bytes) {
    log_info("arena", "prefault", {{"done_bytes", done_bytes}, {"bytes", bytes}});
    // systemd waits as long as this goes on.
    daemon::notify_supervisor("EXTEND_TIMEOUT_USEC=30000000");
  };
  arena.stopped = [&daemon] { return daemon.stop_asked(); };

  host::Core::Options options;
  options.self.instance = std::string(daemon.instance());
  options.arena = {.payload_bytes = config_.arena_bytes, .slots_max = arena.slots_max};
  options.entries_max = entries;
  options.fetch.fetch_delay = milliseconds(config_.fetch_delay_ms);
  options.fetch.prefetch_hold = config_.hold;
  options.hedge.skip_ratio = config_.skip_ratio;
  options.hedge.hedge_ratio = config_.hedge_ratio;
  options.hedge.budget = config_.hedge_budget_pct / 100;
  if (config_.hedge_budget_pct <= 0) options.hedge.burst = 0;
  options.repair.repairs_max = config_.repairs_max;
  options.writeback.admit = config_.admit;
  options.writeback.queue_pages = config_.writeback_queue_pages;
  options.writeback.linger = milliseconds(config_.stripe_linger_ms);
  options.handover.hold = config_.hold;
  options.handover.push_wait = config_.handover_wait;
  return open_arena(options, arena);
}

void HostRole::make_core(const host::Core::Options& options) {
  core_.reset();
  port_ = std::make_unique<Port>(*arena_);
  data_ = std::make_unique<Data>(*arena_);
  core_ = std::make_unique<host::Core>(options, *port_, *data_);
}

Status HostRole::open_arena(const host::Core::Options& options, const kv::ArenaOwner::Options& arena) {
  parking_ = std::make_unique<Parking>(config_.park, daemon_->config().run_dir, options.self.instance);
  auto opened = arena_open(*parking_, arena);
  if (!opened) return opened.error();
  arena_ = std::move(opened->arena);
  make_core(options);
  const std::size_t slots = opened->former ? opened->former->slots.size() : 0;
  if (opened->former) {
    if (const Status restored = core_->restore(*std::move(opened->former)); !restored.ok()) {
      log_warn("arena", "the parked arena is of no use", {{"error", restored.error()}});
      Fd former(::fcntl(arena_->fd(), F_DUPFD_CLOEXEC, 0));
      core_.reset();
      arena_.reset();
      opened = arena_make(*parking_, arena, std::move(former));
      if (!opened) return opened.error();
      arena_ = std::move(opened->arena);
      make_core(options);
    }
  }
  const bool recovered = arena_->epoch() > 1;
  log_info("host", recovered ? "arena taken over" : "arena made",
           {{"bytes", arena_->bytes()},
            {"slots", arena.slots_max},
            {"taken_slots", recovered ? slots : 0},
            {"epoch", arena_->epoch()},
            {"parked_with", parking_->keeper()},
            {"prefault", config_.prefault},
            {"hugepages", arena_->huge_pages()},
            {"locked", arena_->locked()}});
  return {};
}

Status HostRole::on_start(daemon::Daemon& daemon) {
  loop::Loop& loop = daemon.loop();
  product_timer_ = std::make_unique<loop::Timer>(loop, loop::TimerKind::product, "host holds", [this] {
    core_->on_time(now());
    touched_ = true;
  });
  liveness_timer_ = std::make_unique<loop::Timer>(loop, loop::TimerKind::liveness, "host leases", [this] {
    core_->on_time(now());
    look_at_refused();
    touched_ = true;
  });
  for (const host::Core::Work& work : core_->background())
    pulses_.push_back({&daemon.heartbeat(work.name, host_late_after), work.moves});
  beat_timer_ = std::make_unique<loop::Timer>(loop, loop::TimerKind::product, "host beat", [this] {
    beat();
    tell_drops();
  });
  beat_timer_->start_every(beat_every);
  loop.on_turn_end([this] {
    if (touched_) turn();
  });
  costs_ = std::make_unique<daemon::Kept>(
      daemon, "cost", [this] { return core_->fetches().cost().to_text(); },
      [this](std::string_view text) { return core_->restore_costs(text); });
  parking_->watch(loop, arena_->fd());
  if (core_->recovering()) {
    recovery_ = std::make_unique<Recovery>(loop, *arena_, *core_, [this] { touched_ = true; });
  }

  auto plane = DataPlane::start(daemon, data_config_, {data_.get(), arena_->payload(0, config_.arena_bytes)},
                                {.done =
                                     [this](transfer::OpId op, Code code) {
                                       const std::uint64_t push = data_->done(op);
                                       if (push == 0) return;
                                       core_->on_pushed(push, code, now());
                                       touched_ = true;
                                     },
                                 .concealed =
                                     [this](const wire::Peer& peer, transfer::TransferId transfer) {
                                       core_->on_concealed(peer, transfer, now());
                                       touched_ = true;
                                     }});
  if (!plane) return plane.error();
  plane_ = *std::move(plane);
  data_->set_fabric(plane_->fabric());

  net::take_messages<wire::kv_prefetch, wire::kv_release, wire::kv_fetch, wire::kv_open, wire::kv_sealed,
                     wire::kv_expect, wire::kv_push, wire::kv_handover, wire::handover_open,
                     wire::handover_opened, wire::handover_pages, wire::handover_slots, wire::handover_pushed,
                     wire::handover_sealed, wire::handover_ack, wire::arena_read, wire::kv_read_done,
                     wire::kv_read_cancel, wire::kv_read_cancelled, wire::kv_put_done, wire::meta_planned,
                     wire::meta_put_opened, wire::meta_put_committed, wire::meta_arena_resync,
                     wire::meta_repair>(daemon_->endpoint(),
                                        [this](const net::Incoming& in) { deliver(in); });
  net::Endpoint& endpoint = daemon.endpoint();
  endpoint.on_peer_up([this](const net::Member& member) { peer_up(member); });
  endpoint.on_peer_lost([this](net::PeerId id, std::uint32_t generation) { peer_lost(id, generation); });
  const auto address = daemon.listen();
  if (!address) return address.error();
  register_metrics(daemon.metrics());

  net::Member self = daemon.self_member();
  self.role = "host";
  self.control = *address;
  self.data = plane_->endpoint();
  net::MetaClient::Events events;
  events.registered = [this](const wire::meta_registered& registered) {
    plane_->registered({std::string(daemon_->instance()), registered.generation});
    core_->set_self({std::string(daemon_->instance()), registered.generation});
    arena_->set_generation(registered.generation);
    listen_arena();
  };
  daemon.enroll(std::move(self), std::move(events));
  return {};
}

void HostRole::listen_arena() {
  transfer::ShmServer::Region region;
  region.fd = arena_->fd();
  region.bytes = arena_->bytes();
  region.generation = arena_->generation();
  region.instance = std::string(daemon_->instance());
  transfer::ShmServer::Events events;
  events.attached = [this](const wire::arena_hello& client) {
    log_info("arena", "client attached", {{"peer", client.instance}, {"generation", client.generation}});
    core_->on_attached({client.instance, client.generation});
    touched_ = true;
  };
  events.detached = [this](const wire::arena_hello& client) {
    log_info("arena", "client gone", {{"peer", client.instance}, {"generation", client.generation}});
    core_->on_detached({client.instance, client.generation}, now());
    touched_ = true;
  };
  auto socket =
      transfer::ShmServer::listen(daemon_->loop(), daemon_->path("arena"), region, std::move(events));
  if (!socket) return daemon_->fail(socket.error());
  socket_ = *std::move(socket);
  daemon_->ready();
}

// ---- Messages --------------------------------------------------------------------------------------------

host::Now HostRole::now() const {
  return {daemon_->loop().now(), daemon_->loop().monotonic_now()};
}

void HostRole::deliver(const net::Incoming& in) {
  const auto peer = peers_.find(in.from.id);
  if (peer == peers_.end()) return;
  wire::Envelope envelope = net::envelope_of(in, peer->second.instance);
  const std::uint16_t number = envelope.number;
  touched_ = true;
  if (number == wire::kv_fetch::number) {
    switch (daemon::fault(daemon::FaultPoint::kvd_before_fetch)) {
      case daemon::FaultAction::none:
        break;
      case daemon::FaultAction::drop:
        return;
      case daemon::FaultAction::delay:
        delayed_.push_back({daemon_->loop().monotonic_now() + fault_delay, true, std::move(envelope)});
        return;
    }
  }
  core_->on_message(envelope, now());
  if (number == wire::kv_sealed::number) daemon::fault(daemon::FaultPoint::kvd_after_sealed);
}

void HostRole::peer_up(const net::Member& member) {
  const host::PeerKind kind = host::peer_kind(member.program, member.role);
  const host::Peer peer{member.instance, member.generation};
  const bool remote = member.host != daemon_->endpoint().self().host;
  peers_[member.id] = peer;
  plane_->peer_up(member);
  touched_ = true;
  if (kind == host::PeerKind::rank && !member.layout.empty()) {
    const auto layout = kv::Layout::decode(member.layout);
    const Status taken = layout ? core_->set_layout(*layout) : Status(layout.error());
    if (taken.ok()) {
      if (!arena_->set_layout(*layout)) log_warn("arena", "layout too long to be parked");
    } else if (taken.error().code == Code::busy) {
      // Pages of another model, of before a restart, are still used or checked: once more when they are not.
      std::erase_if(refused_, [&](const net::Member& other) { return other.id == member.id; });
      refused_.push_back(member);
      return;
    } else {
      // Its pages would have other sizes than everybody else's: it gets no answers, and computes alone.
      log_error("host", "layout refused", {{"peer", member.instance}, {"error", taken.error()}});
      core_->on_peer_up(peer, host::PeerKind::other, remote, now());
      return;
    }
  }
  core_->on_peer_up(peer, kind, remote, now());
}

void HostRole::look_at_refused() {
  for (const net::Member& member : std::exchange(refused_, {})) {
    const auto known = peers_.find(member.id);
    if (known != peers_.end() && known->second.generation == member.generation) peer_up(member);
  }
}

void HostRole::peer_lost(net::PeerId id, std::uint32_t generation) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second.generation != generation) return;
  const host::Peer peer = std::move(found->second);
  peers_.erase(found);
  core_->on_peer_lost(peer, now());
  data_->peer_lost(peer);
  plane_->peer_lost(peer);
  touched_ = true;
}

void HostRole::beat() {
  const auto all = core_->background();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].waits && all[i].moves == pulses_[i].moves) continue;
    pulses_[i].moves = all[i].moves;
    (*pulses_[i].beat)();
  }
}

void HostRole::tell_drops() {
  const auto news = drop_log_.look(core_->writeback(), daemon_->loop().monotonic_now());
  if (!news) return;
  if (news->failed > 0 || news->full > 0) {
    log_warn("host", "pages given up: they are not written to the store",
             {{"failed", news->failed}, {"queue_full", news->full}});
  }
  for (const auto& [tenant, pages] : news->over_quota) {
    log_warn("host", "not written to the store: a tenant is over its quota",
             {{"tenant", kv::tenant_text(tenant)}, {"pages", pages}});
  }
}

void HostRole::turn() {
  const host::Now at = now();
  std::vector<Delayed> later;
  for (Delayed& held : std::exchange(delayed_, {})) {
    if (held.at > at.liveness) {
      later.push_back(std::move(held));
    } else if (held.incoming) {
      core_->on_message(held.message, at);
    } else {
      send_now(held.message);
    }
  }
  delayed_ = std::move(later);
  core_->flush(at);
  for (host::Outbox sent = core_->take_outgoing(); !sent.empty(); sent = core_->take_outgoing()) {
    for (wire::Envelope& message : sent) send(std::move(message));
    core_->flush(at);
  }
  touched_ = false;
  tell_drops();
  host::Due due = core_->next_due();
  for (const Delayed& held : delayed_) due.sooner_liveness(held.at);
  if (!refused_.empty()) due.sooner_liveness(at.liveness + look_again_after);
  const std::size_t pending = core_->writeback().pending();
  if (pending > 0 && daemon::fault(daemon::FaultPoint::kvd_before_wait) == daemon::FaultAction::drop)
    asleep_ = true;
  if (asleep_ && !stopping_) due = {};
  product_timer_->start_at(due.product);
  liveness_timer_->start_at(due.liveness);
  beat();
  const bool done = pending == 0 && core_->handovers().sources() == 0;
  if (stopping_ && (done || !core_->store_reachable())) {
    costs_->save();
    daemon_->stopped();
  }
}

void HostRole::send(wire::Envelope message) {
  daemon::FaultAction action = daemon::FaultAction::none;
  if (message.number == wire::handover_sealed::number) {
    action = daemon::fault(daemon::FaultPoint::kvd_before_handover_sealed);
  } else if (message.number == wire::handover_ack::number) {
    action = daemon::fault(daemon::FaultPoint::kvd_before_handover_ack);
  } else if (message.number == wire::meta_put_commit::number) {
    action = daemon::fault(daemon::FaultPoint::kvd_before_put_commit);
  }
  switch (action) {
    case daemon::FaultAction::none:
      return send_now(message);
    case daemon::FaultAction::drop:
      return;
    case daemon::FaultAction::delay:
      delayed_.push_back({daemon_->loop().monotonic_now() + fault_delay, false, std::move(message)});
      return;
  }
}

void HostRole::send_now(const wire::Envelope& message) {
  if (message.peer == daemon_->instance()) {
    core_->on_message(message, now());
    return;
  }
  // A peer that is not up is lost: its event gives back what this message was about.
  static_cast<void>(net::envelope_send(daemon_->endpoint(), message));
}

// ---- The end ---------------------------------------------------------------------------------------------

void HostRole::on_stop(daemon::Daemon& daemon) {
  // What clients hold ends with us.  Sealed pages still go to the store, and hand-overs to their end,
  // unless there is no store to go to.
  stopping_ = true;
  core_->hurry();
  if (net::MetaClient* meta = daemon.meta()) meta->set_state(1);
  turn();
}

// ---- What is shown ---------------------------------------------------------------------------------------

void HostRole::on_dump() {
  const host::Pages& pages = core_->pages();
  log_info("host", "state",
           {{"pages", pages.all().size()},
            {"free_bytes", pages.bytes_free()},
            {"fetches", core_->fetches().fetches(host::FetchKind::fetch)},
            {"reads", core_->reads().count()},
            {"rebuilds", core_->rebuilds().count()},
            {"pending_writebacks", core_->writeback().pending()},
            {"holds", core_->handovers().sources()},
            {"expectations", core_->handovers().seats()}});
  const Status status = core_->check();
  if (!status.ok()) log_error("host", "books do not balance", {{"error", status.error()}});
}

class HostRole::Listing {
 public:
  Listing(loop::Loop& loop, const host::Pages& pages, daemon::Reply reply)
      : pages_(pages),
        reply_(std::move(reply)),
        timer_(loop, loop::TimerKind::liveness, "show kv pages", [this] { go_on(); }) {
    timer_.start_after(Duration{0});
  }
  [[nodiscard]] bool done() const { return done_; }

 private:
  void go_on() {
    if (!reply_.wanted()) {
      done_ = true;
      return;
    }
    if (!reply_.accepts_more()) return timer_.start_after(look_again_after);
    std::size_t rows = 0;
    for (auto page = pages_.all().lower_bound(next_); page != pages_.all().end(); ++page) {
      if (rows++ == page_rows_a_turn) {
        next_ = page->first;
        return timer_.start_after(Duration{0});
      }
      const host::Page& held = page->second;
      daemon::Row row;
      row.number("slot", page->first)
          .number("page", held.number)
          .text("state", host::page_state_name(held.state))
          .number("blocks", held.blocks)
          .number("bytes", held.place.bytes)
          .number("groups", held.groups)
          .number("pins", held.pins)
          .number("owned_keys", held.owned)
          .boolean("stored", held.stored)
          .text("first_key", held.keys.empty() ? "" : held.keys.front().text())
          .text("parent_key", held.parent.text());
      reply_.row(row);
    }
    reply_.end();
    done_ = true;
  }

  const host::Pages& pages_;
  daemon::Reply reply_;
  std::uint32_t next_ = 0;
  bool done_ = false;
  loop::Timer timer_;
};

void HostRole::ctl_kv(daemon::Reply& reply) const {
  const host::Pages& pages = core_->pages();
  std::uint64_t counts[5] = {};
  std::uint64_t blocks = 0;
  for (const auto& [slot, page] : pages.all()) {
    ++counts[static_cast<std::size_t>(page.state)];
    blocks += page.owned;
  }
  const std::uint64_t payload = pages.has_layout() ? pages.bytes_total() : config_.arena_bytes;
  const std::uint64_t free = pages.has_layout() ? pages.bytes_free() : config_.arena_bytes;
  // As di-meta counts them: what the blocks are in full pages, not the room that their slots take.
  const std::uint64_t bytes =
      pages.has_layout()
          ? blocks * (pages.layout().page_bytes(pages.layout().page_blocks()) / pages.layout().page_blocks())
          : 0;
  daemon::Row row;
  row.text("place", daemon_->instance())
      .text("tier", "arena")
      .number("pages", counts[static_cast<std::size_t>(host::PageState::sealed)])
      .number("blocks", blocks)
      .number("bytes", bytes)
      .number("used_bytes", payload - free)
      .number("payload_bytes", payload)
      .number("evictable_bytes", pages.bytes_evictable())
      .number("granted_pages", counts[static_cast<std::size_t>(host::PageState::granted)])
      .number("filling_pages", counts[static_cast<std::size_t>(host::PageState::filling)])
      .number("quarantined_pages", counts[static_cast<std::size_t>(host::PageState::quarantined)])
      .number("scratch_pages", counts[static_cast<std::size_t>(host::PageState::scratch)])
      .number("clients", core_->attached_count())
      .number("pending_writebacks", core_->writeback().pending());
  reply.end(row);
}

void HostRole::ctl_holders(daemon::Reply& reply) const {
  for (const host::Core::HolderRow& held : core_->holders()) {
    daemon::Row row;
    row.text("client", held.holder.client.instance)
        .number("generation", held.holder.client.generation)
        .text("request", held.holder.request.text())
        .number("attempt", held.holder.attempt)
        .number("pins", held.pins)
        .number("grants", held.grants);
    reply.row(row);
  }
  reply.end();
}

void HostRole::ctl_drop(daemon::Reply& reply) {
  const host::Pages::Dropped dropped = core_->drop_arena(now());
  touched_ = true;
  daemon::Row row;
  row.number("pages", dropped.pages)
      .number("blocks", dropped.blocks)
      .number("bytes", dropped.bytes)
      .number("kept_pages", core_->pages().all().size());
  reply.end(row);
}

const std::uint64_t& HostRole::pages_unrecorded() const {
  return port_->unrecorded;
}

bool HostRole::on_ctl(const daemon::Words& words, daemon::Reply reply) {
  using daemon::Reply;
  using daemon::Words;
  std::erase_if(listings_, [](const auto& listing) { return listing->done(); });
  const daemon::Command commands[] = {
      {"show kv", [this](const Words&, Reply& to) { ctl_kv(to); }},
      {"show kv holders", [this](const Words&, Reply& to) { ctl_holders(to); }},
      {"show kv pages",
       [this](const Words&, Reply& to) {
         listings_.push_back(std::make_unique<Listing>(daemon_->loop(), core_->pages(), to));
       }},
      {"kv drop arena", [this](const Words&, Reply& to) { ctl_drop(to); }},
  };
  return daemon::answer_by(commands, words, std::move(reply));
}

}  // namespace di::kvd
