#include "service.h"

#include <algorithm>
#include <map>

#include "base/crypto.h"
#include "base/log.h"
#include "kv/layout.h"

namespace di::meta {

namespace {

using daemon::FaultAction;
using daemon::FaultPoint;
using directory::Holder;
using directory::Membership;

// Members that were never connected, and what peers hold: looked at this often.
constexpr Duration tick_every = seconds(1);
constexpr Duration beat_every = seconds(1);
// The directory's step comes in the turn after it is due.
constexpr Duration step_slack = seconds(1);
// A tenant that is over its quota has a line so often.
constexpr Duration quota_line_every = seconds(10);
// An answer that a fault point delays: longer than a host waits for a plan (1 s).
constexpr Duration fault_delay = milliseconds(1500);

bool is_host(const net::Member& member) {
  return member.program == "di-kvd" && member.role == "host";
}
bool is_store(const net::Member& member) {
  return member.program == "di-kvd" && member.role == "store";
}

}  // namespace

Result<std::unique_ptr<Service>> Service::create(loop::Loop& loop, net::Endpoint& endpoint,
                                                 directory::Catalogue& catalogue, Options options) {
  auto rows = catalogue.instances();
  if (!rows) return rows.error();
  options.index.run = catalogue.run();
  options.index.record_changes = true;
  std::unique_ptr<Service> service(new Service(loop, endpoint, catalogue, options, *std::move(rows)));
  const Instant now = loop.monotonic_now();
  std::uint64_t passed_over = 0;
  const auto loaded = catalogue.load_stripes([&](const directory::StripeRow& row) {
    if (!service->index_.restore(row, now)) ++passed_over;
  });
  if (!loaded) return loaded.error();
  log_info("meta", "stripes of the catalogue",
           {{"rows", loaded->rows}, {"malformed", loaded->malformed}, {"passed_over", passed_over}});
  const auto leaving = catalogue.leaving();
  if (!leaving) return leaving.error();
  for (const std::string& instance : *leaving) service->index_.restore_leaving(instance, now);
  for (const directory::Index::Place& place : service->index_.places()) {
    if (place.store) service->membership_.expect(place.instance, "store", now);
  }
  auto writer = catalogue.stripe_writer();
  if (!writer) return writer.error();
  service->persister_ = std::make_unique<Persister>(loop, service->index_, *std::move(writer));
  return service;
}

Service::Service(loop::Loop& loop, net::Endpoint& endpoint, directory::Catalogue& catalogue, Options options,
                 std::vector<directory::InstanceRow> rows)
    : loop_(loop),
      endpoint_(endpoint),
      catalogue_(catalogue),
      membership_(std::move(rows), catalogue.run()),
      index_(options.index, loop.monotonic_now()),
      tenant_names_(std::move(options.tenant_names)),
      tick_(loop, loop::TimerKind::liveness, "members", [this] { tick(); }),
      due_(loop, loop::TimerKind::liveness, "directory", [this] { step_index(); }),
      beat_(loop, loop::TimerKind::product, "beat", [this] { beat(); }),
      directory_beat_(std::move(options.directory_beat)),
      catalogue_beat_(std::move(options.catalogue_beat)) {
  set_handlers();
}

Status Service::start(net::Member self) {
  const wire::meta_register message{std::move(self), random_u64() | 1};
  const auto admission = membership_.judge(message);
  if (!admission) return admission.error().in("registering itself");
  if (admission->row_changed) DI_TRY(catalogue_.save(admission->row));
  membership_.admit_self(*admission);
  endpoint_.identify(admission->member, catalogue_.cluster());
  tick_.start_every(tick_every);
  beat_.start_every(beat_every);
  loop_.on_turn_end([this, alive = alive_] {
    if (!*alive) return;
    rearm();
    persister_->poll();
  });
  return {};
}

void Service::stop() {
  *alive_ = false;
  tick_.cancel();
  due_.cancel();
  beat_.cancel();
  delayed_.clear();
  persister_->finish();
}

Status Service::store_leaves(const std::string& instance, bool leaves) {
  if (!index_.store_leaves(instance, leaves, loop_.monotonic_now())) return unknown_store(instance);
  return catalogue_.set_leaving(instance, leaves);
}

Error Service::unknown_store(const std::string& instance) const {
  std::string known;
  for (const directory::Index::Place& place : index_.places()) {
    if (place.store) known += (known.empty() ? ": there are " : ", ") + place.instance;
  }
  return Error{Code::not_found, 0, "no store '" + instance + "' is known" + known};
}

Result<directory::Index::Given> Service::store_gone(const std::string& instance) {
  const auto given = index_.store_gone(instance, loop_.monotonic_now());
  if (!given) {
    if (given.error().code == Code::not_found) return unknown_store(instance);
    return Error{given.error().code, 0,
                 given.error().message + ": stop it first, or empty it with kv drain " + instance};
  }
  log_info("meta", "store given up",
           {{"store", instance}, {"columns", given->columns}, {"stripes_lost", given->stripes}});
  membership_.forget(instance);
  // Another of its name begins anew.
  index_.store_leaves(instance, false, loop_.monotonic_now());
  DI_TRY(catalogue_.set_leaving(instance, false));
  return given;
}

Status Service::forget(const std::string& instance) {
  for (const directory::Index::Place& place : index_.places()) {
    if (!place.store || place.up || place.instance != instance || place.pages == 0) continue;
    return Error{Code::busy, 0,
                 instance + " has " + std::to_string(place.pages) +
                     " columns that may come back: kv drop store " + instance + " gives them up"};
  }
  if (membership_.forget(instance)) return {};
  std::string known;
  for (const auto& [name, away] : membership_.away()) known += (known.empty() ? ": there are " : ", ") + name;
  return Error{Code::not_found, 0, "no instance '" + instance + "' is away" + known};
}

Status Service::drop_stripe(std::uint64_t stripe) {
  if (index_.drop_stripe(stripe, loop_.monotonic_now())) return {};
  return Error{Code::not_found, 0, "no stripe " + std::to_string(stripe)};
}

void Service::log_shortage() {
  if (index_.placements().nodes() == 0) return;
  std::string shortage = index_.placements().shortage();
  if (shortage == shortage_) return;
  shortage_ = std::move(shortage);
  if (shortage_.empty()) {
    log_info("meta", "enough store nodes", {{"nodes", index_.placements().nodes()}});
  } else {
    log_warn("meta", "too few store nodes", {{"geometry", shortage_}});
  }
}

void Service::log_over_quota() {
  const Instant now = loop_.monotonic_now();
  for (const auto& [number, name] : tenant_names_) {
    const kv::Evictor::TenantRow row = index_.evictor().tenant(number);
    ToldOfTenant& told = told_[number];
    if ((row.refused == told.refused && row.evicted == told.evicted) || told.again > now) continue;
    log_warn("meta", "tenant over its quota",
             {{"tenant", name},
              {"refused_stripes", row.refused - told.refused},
              {"evicted_stripes", row.evicted - told.evicted},
              {"bytes", row.bytes},
              {"quota_bytes", row.quota_bytes}});
    told = {row.refused, row.evicted, now + quota_line_every};
  }
}

std::optional<Holder> Service::holder(const net::Incoming& in) const {
  const net::Member* member = membership_.find(in.from.id, in.from.generation);
  if (member == nullptr) return std::nullopt;
  return Holder{member->instance, member->generation};
}

void Service::with_fault(FaultAction action, loop::Callback callback) {
  if (action == FaultAction::drop) return;
  if (action == FaultAction::none || delayed_.size() >= delayed_max) return callback();
  auto timer =
      std::make_unique<loop::Timer>(loop_, loop::TimerKind::liveness, "delayed answer", std::move(callback));
  timer->start_after(fault_delay);
  delayed_.push_back(std::move(timer));
}

void Service::set_handlers() {
  using net::Incoming;
  const auto now = [this] { return loop_.monotonic_now(); };
  endpoint_.on_peer_up([this](const net::Member& member) { peer_up(member); });
  endpoint_.on_peer_lost(
      [this](net::PeerId id, std::uint32_t generation) { apply(membership_.lost(id, generation)); });
  endpoint_.on<wire::meta_register>(
      [this](const Incoming& in, const wire::meta_register& message) { registered(in, message); });
  endpoint_.on<wire::meta_state>([this](const Incoming& in, const wire::meta_state& message) {
    const auto from = holder(in);
    if (!from || message.state > static_cast<std::uint8_t>(directory::MemberState::leaves)) return;
    const auto state = static_cast<directory::MemberState>(message.state);
    index_.store_draining(*from, state == directory::MemberState::draining);
    apply(membership_.set_state(in.from.id, in.from.generation, state));
  });
  // Peers are read in turns, not in the order in which they spoke: a host's news of pages may lie behind the
  // question of somebody who has heard of them.  So everything that has arrived is taken first.
  endpoint_.on<wire::meta_match>([this](const Incoming& in, wire::meta_match message) {
    if (!holder(in)) return;
    loop_.post("match", [this, to = in.from, request = in.header.request, attempt = in.header.attempt,
                         asked = std::move(message)] {
      static_cast<void>(endpoint_.reply(to, index_.match(asked), {.request = request, .attempt = attempt}));
      index_.asked(asked);
    });
  });
  endpoint_.on<wire::meta_plan>([this, now](const Incoming& in, const wire::meta_plan& message) {
    const auto from = holder(in);
    if (!from) return;
    const FaultAction action = daemon::fault(FaultPoint::meta_before_plan);
    if (action == FaultAction::none) return answer(in, index_.plan(*from, in.header.request, message, now()));
    // A late answer: the lease is taken when it is given.
    with_fault(action, [this, now, to = in.from, request = in.header.request, attempt = in.header.attempt,
                        holder = *from, message] {
      const auto planned = index_.plan(holder, request, message, now());
      static_cast<void>(endpoint_.reply(to, planned, {.request = request, .attempt = attempt}));
    });
  });
  endpoint_.on<wire::meta_renew>([this, now](const Incoming& in, const wire::meta_renew& message) {
    if (const auto from = holder(in)) index_.renew(*from, message, now());
  });
  endpoint_.on<wire::meta_release>([this](const Incoming& in, const wire::meta_release& message) {
    if (const auto from = holder(in)) index_.release(*from, message);
  });
  endpoint_.on<wire::meta_arena_delta>([this](const Incoming& in, const wire::meta_arena_delta& message) {
    const auto from = holder(in);
    if (!from || !index_.arena_delta(*from, message)) return;
    log_warn("meta", "gap in arena reports", {{"host", from->instance}, {"seq", message.seq}});
    answer(in, wire::meta_arena_resync{});
  });
  endpoint_.on<wire::meta_put_open>([this, now](const Incoming& in, const wire::meta_put_open& message) {
    if (const auto from = holder(in)) answer(in, index_.put_open(*from, message, now()));
  });
  endpoint_.on<wire::meta_put_commit>([this, now](const Incoming& in, const wire::meta_put_commit& message) {
    const auto from = holder(in);
    if (!from || daemon::fault(FaultPoint::meta_before_commit) == FaultAction::drop) return;
    const auto committed = index_.put_commit(*from, message, now());
    with_fault(daemon::fault(FaultPoint::meta_after_commit),
               [this, committed, to = in.from, request = in.header.request, attempt = in.header.attempt] {
                 static_cast<void>(endpoint_.reply(to, committed, {.request = request, .attempt = attempt}));
               });
  });
  endpoint_.on<wire::meta_put_abort>([this, now](const Incoming& in, const wire::meta_put_abort& message) {
    if (const auto from = holder(in)) index_.put_abort(*from, message, now());
  });
  endpoint_.on<wire::meta_inventory>([this, now](const Incoming& in, const wire::meta_inventory& message) {
    const auto from = holder(in);
    if (!from) return;
    const auto ack = index_.inventory(*from, message, now());
    if (!ack) {
      log_warn("meta", "inventory refused", {{"store", from->instance}, {"cursor", message.cursor}});
      return;
    }
    if (message.last) {
      const directory::Index::Counters& c = index_.counters();
      log_info("meta", "inventory complete",
               {{"store", from->instance}, {"stripes", index_.stripes()}, {"adopted", c.stripes_adopted}});
    }
    answer(in, *ack);
  });
  endpoint_.on<wire::meta_volumes>([this, now](const Incoming& in, const wire::meta_volumes& message) {
    const auto from = holder(in);
    if (!from) return;
    for (const wire::VolumeState& volume : message.volumes) {
      if (volume.state == 0) continue;
      log_warn("meta", "volume not in service",
               {{"store", from->instance},
                {"volume", volume.volume},
                {"state", volume.state == directory::volume_failed ? "failed" : "slow"}});
    }
    index_.volumes(*from, message, now());
  });
  endpoint_.on<wire::meta_repaired>([this, now](const Incoming& in, const wire::meta_repaired& message) {
    const auto from = holder(in);
    if (!from) return;
    switch (index_.repaired(*from, message, now())) {
      case directory::Index::RepairEnd::failed:
        log_warn("meta", "repair failed",
                 {{"stripe", message.stripe},
                  {"code", code_name(static_cast<Code>(message.code))},
                  {"host", from->instance}});
        break;
      case directory::Index::RepairEnd::wrong:
        log_error("meta", "a stripe was encoded wrong, and is dropped",
                  {{"stripe", message.stripe}, {"host", from->instance}});
        break;
      case directory::Index::RepairEnd::unknown:
      case directory::Index::RepairEnd::repaired:
      case directory::Index::RepairEnd::right:
      case directory::Index::RepairEnd::undecided:
        break;
    }
  });
  endpoint_.on<wire::meta_read_failed>(
      [this, now](const Incoming& in, const wire::meta_read_failed& message) {
        const auto from = holder(in);
        if (!from) return;
        log_warn("meta", "read failed",
                 {{"page", message.page},
                  {"column", message.column},
                  {"code", code_name(static_cast<Code>(message.code))},
                  {"store", message.instance},
                  {"volume", message.volume},
                  {"host", from->instance}});
        index_.read_failed(message, now());
      });
}

void Service::registered(const net::Incoming& in, const wire::meta_register& message) {
  wire::meta_registered answered;
  answered.cluster = catalogue_.cluster();
  answered.lost_ms = static_cast<std::uint32_t>(to_ms(directory::member_lost_after));
  const auto refuse = [&](Code code, const std::string& reason) {
    ++counters_.refused;
    log_warn("meta", "registration refused",
             {{"instance", message.self.instance.substr(0, 128)}, {"reason", reason}});
    answered.code = static_cast<std::uint16_t>(code);
    answered.reason = reason;
    answer(in, answered);
  };
  const net::Member* peer = in.from.id == 0 ? nullptr : endpoint_.peer(in.from.id);
  if (peer != nullptr && peer->instance != message.self.instance) {
    return refuse(Code::invalid, "the connection belongs to " + peer->instance);
  }
  if (const Status may = endpoint_.may_register(in.from, message.self); !may) {
    return refuse(may.error().code, may.error().message);
  }
  const auto admission = membership_.judge(message);
  if (!admission) return refuse(admission.error().code, admission.error().message);
  if (admission->row_changed) {
    if (const Status saved = catalogue_.save(admission->row); !saved) {
      log_error("meta", "cannot save a generation", {{"error", saved.error()}});
      return refuse(Code::busy, "the catalogue cannot be written");
    }
  }
  ++counters_.registrations;
  const Membership::Change change = membership_.admit(*admission, loop_.monotonic_now());
  if (change.changed) {
    log_info("meta", "registered",
             {{"instance", admission->row.instance},
              {"id", admission->row.id},
              {"generation", admission->row.generation}});
  }
  if (!admission->member.model.empty()) {
    if (const auto layout = kv::Layout::decode(admission->member.layout)) {
      index_.set_block_bytes(layout->page_bytes(layout->page_blocks()) / layout->page_blocks());
    }
  }
  apply(change);
  answered.id = admission->row.id;
  answered.generation = admission->row.generation;
  if (admission->member.program == "di-router") answered.secret = catalogue_.secret();
  answer(in, answered);
}

void Service::peer_up(const net::Member& member) {
  const Instant now = loop_.monotonic_now();
  const net::Member* present = membership_.find(member.id, member.generation);
  if (present == nullptr) {
    apply(membership_.rejoin(member, now));
    present = membership_.find(member.id, member.generation);
    if (present == nullptr) return;
  }
  membership_.heard(member.id, member.generation, now);
  const Holder holder{present->instance, present->generation};
  bool room = true;
  if (is_host(*present)) room = index_.host_up(holder);
  if (is_store(*present)) {
    room = index_.store_up(holder, now, {present->host, present->rack, present->zone});
    index_.store_draining(holder, present->state != 0);
  }
  if (!room) log_warn("meta", "too many di-kvds", {{"instance", holder.instance}});
  static_cast<void>(endpoint_.send(member.id, membership_.snapshot()));
}

void Service::apply(const Membership::Change& change) {
  const Instant now = loop_.monotonic_now();
  for (const Holder& holder : change.lost) {
    ++counters_.lost;
    log_info("meta", "member gone", {{"instance", holder.instance}, {"generation", holder.generation}});
    index_.lost(holder, now);
  }
  if (change.changed) publish_later();
}

void Service::publish_later() {
  if (publish_pending_) return;
  publish_pending_ = true;
  // Later: the endpoint may be in the middle of the event that changed the list.
  loop_.post("members", [this, alive = alive_] {
    if (*alive) publish();
  });
}

void Service::publish() {
  publish_pending_ = false;
  const wire::meta_members snapshot = membership_.snapshot();
  std::vector<net::PeerId> before;
  for (const net::Member* peer : endpoint_.peers_up()) before.push_back(peer->id);
  endpoint_.set_members(snapshot.members);
  // Those that came up just now have it from peer_up().
  const Bytes body = wire::body_encode(snapshot);
  for (const net::PeerId id : before) {
    if (endpoint_.up(id)) static_cast<void>(endpoint_.send_body(id, wire::meta_members::number, body, {}));
  }
}

void Service::tick() {
  const Instant now = loop_.monotonic_now();
  // The endpoint watches the heartbeats of connections; here it is about members without one.
  for (const net::Member* peer : endpoint_.peers_up()) membership_.heard(peer->id, peer->generation, now);
  apply(membership_.step(now));
  log_shortage();
  log_over_quota();
  std::erase_if(delayed_, [](const auto& timer) { return !timer->armed(); });
}

void Service::beat() {
  if (directory_beat_ && index_.next_due() > loop_.monotonic_now() - step_slack) directory_beat_();
  const std::uint64_t batches = persister_->counters().batches;
  if (catalogue_beat_ && (!persister_->waits() || batches != batches_seen_)) catalogue_beat_();
  batches_seen_ = batches;
}

void Service::step_index() {
  const Instant now = loop_.monotonic_now();
  const auto frees = index_.step(now);
  const auto repairs = index_.repairs(now);
  const auto asked = index_.reconcile(now);
  if (frees.empty() && repairs.empty() && !asked) return;
  std::map<std::string, const net::Member*> peers;
  for (const net::Member* peer : endpoint_.peers_up()) peers.emplace(peer->instance, peer);
  for (const directory::Index::Free& free : frees) {
    const auto peer = peers.find(free.store);
    // One that is just going is asked for its inventory when it returns.
    if (peer != peers.end()) static_cast<void>(endpoint_.send(peer->second->id, free.message));
  }
  if (asked) {
    const auto peer = peers.find(asked->store.instance);
    if (peer != peers.end()) static_cast<void>(endpoint_.send(peer->second->id, asked->message));
  }
  for (const directory::Index::Repair& repair : repairs) {
    const auto peer = peers.find(repair.host.instance);
    if (peer != peers.end() && endpoint_.send(peer->second->id, repair.message)) continue;
    wire::meta_repaired unsent;
    unsent.stripe = repair.message.stripe.stripe;
    unsent.code = static_cast<std::uint16_t>(Code::unreachable);
    index_.repaired(repair.host, unsent, now);
  }
}

void Service::rearm() {
  const Instant due = index_.next_due();
  if (due != due_.at()) due_.start_at(due);
}

}  // namespace di::meta
