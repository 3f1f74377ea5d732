#include "service.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/crypto.h"
#include "base/log.h"
#include "kv/chain.h"
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
// Whoever waits for a name that is taken asks twice a second.
constexpr Duration refused_line_every = seconds(10);
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
  const auto issued = catalogue.issued();
  if (!issued) return issued.error();
  options.index.run = catalogue.run();
  options.index.record_changes = true;
  std::unique_ptr<Service> service(
      new Service(loop, endpoint, catalogue, options, {*std::move(rows), catalogue.run(), *issued}));
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
  auto stripe_writer = catalogue.stripe_writer();
  if (!stripe_writer) return stripe_writer.error();
  auto row_writer = catalogue.row_writer();
  if (!row_writer) return row_writer.error();
  service->persister_ =
      std::make_unique<Persister>(loop, service->index_, *std::move(stripe_writer), *std::move(row_writer));
  auto copier = catalogue.copier();
  if (!copier) return copier.error();
  service->backup_ = std::make_unique<Backup>(loop, *std::move(copier));
  return service;
}

Service::Service(loop::Loop& loop, net::Endpoint& endpoint, directory::Catalogue& catalogue, Options options,
                 directory::Membership membership)
    : loop_(loop),
      endpoint_(endpoint),
      catalogue_(catalogue),
      membership_(std::move(membership)),
      index_(options.index, loop.monotonic_now()),
      tenant_names_(std::move(options.tenant_names)),
      publish_(loop, loop::TimerKind::liveness, "list of members", [this] { publish(); }),
      tick_(loop, loop::TimerKind::liveness, "members", [this] { tick(); }),
      due_(loop, loop::TimerKind::liveness, "directory", [this] { step_index(); }),
      beat_(loop, loop::TimerKind::product, "beat", [this] { beat(); }),
      directory_beat_(std::move(options.directory_beat)),
      catalogue_beat_(std::move(options.catalogue_beat)),
      tell_degraded_(std::move(options.degraded)),
      shortage_after_(options.shortage_after) {
  set_handlers();
}

Status Service::start(net::Member self) {
  const wire::meta_register message{std::move(self), random_u64() | 1};
  const auto admission = membership_.judge(message);
  if (!admission) return admission.error().in("registering itself");
  if (admission->row_changed) {
    auto writer = catalogue_.row_writer();
    if (!writer) return writer.error();
    const directory::RowChange row = admission->row;
    DI_TRY(writer->write({&row, 1}));
  }
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
  publish_.cancel();
  delayed_.clear();
  persister_->finish();
  backup_->stop();  // last: a copy may be on a disk that hangs, and then this does not return
}

bool Service::knows_store(const std::string& instance) const {
  const auto places = index_.places();
  return std::any_of(places.begin(), places.end(),
                     [&](const auto& place) { return place.store && place.instance == instance; });
}

Status Service::store_leaves(const std::string& instance, bool leaves, Done done) {
  if (!knows_store(instance)) return unknown_store(instance);
  persister_->write({directory::StoreLeaves{instance, leaves}},
                    [this, instance, leaves, done = std::move(done)](const Status& status) {
                      if (status) index_.store_leaves(instance, leaves, loop_.monotonic_now());
                      done(status);
                    });
  return {};
}

Error Service::unknown_store(const std::string& instance) const {
  std::string known;
  for (const directory::Index::Place& place : index_.places()) {
    if (place.store) known += (known.empty() ? ": there are " : ", ") + place.instance;
  }
  return Error{Code::not_found, 0, "no store '" + instance + "' is known" + known};
}

Result<directory::Index::Given> Service::store_gone(const std::string& instance, Done done) {
  const auto given = index_.store_gone(instance, loop_.monotonic_now());
  if (!given) {
    if (given.error().code == Code::not_found) return unknown_store(instance);
    return Error{given.error().code, 0,
                 given.error().message + ": stop it first, or empty it with kv drain " + instance};
  }
  log_info("meta", "store given up",
           {{"store", instance}, {"columns", given->columns}, {"stripes_lost", given->stripes}});
  // Another of its name begins anew; told with its row, as a drain before it that waits is.
  Persister::Rows rows{directory::StoreLeaves{instance, false}};
  const auto forgotten = membership_.forget(instance);
  if (forgotten) rows.push_back(directory::RowGone{instance, forgotten->row.id, membership_.issued()});
  persister_->write(std::move(rows),
                    [this, instance, forgotten, done = std::move(done)](const Status& status) {
                      if (status) index_.store_leaves(instance, false, loop_.monotonic_now());
                      if (!status && forgotten) membership_.restore(*forgotten);
                      done(status);
                    });
  return given;
}

Status Service::forget(const std::string& instance, Done done) {
  for (const directory::Index::Place& place : index_.places()) {
    if (!place.store || place.up || place.instance != instance || place.pages == 0) continue;
    return Error{Code::busy, 0,
                 instance + " has " + std::to_string(place.pages) +
                     " columns that may come back: kv drop store " + instance + " gives them up"};
  }
  if (const auto forgotten = membership_.forget(instance)) {
    persister_->write({directory::RowGone{instance, forgotten->row.id, membership_.issued()}},
                      [this, instance, forgotten = *forgotten, done = std::move(done)](const Status& status) {
                        if (status) index_.store_forgotten(instance);
                        if (!status) membership_.restore(forgotten);
                        done(status);
                      });
    return {};
  }
  std::string known;
  for (const auto& [name, away] : membership_.away()) known += (known.empty() ? ": there are " : ", ") + name;
  return Error{Code::not_found, 0, "no instance '" + instance + "' is away" + known};
}

Status Service::drop_stripe(std::uint64_t stripe) {
  if (index_.drop_stripe(stripe, loop_.monotonic_now())) return {};
  return Error{Code::not_found, 0, "no stripe " + std::to_string(stripe)};
}

void Service::watch_shortage() {
  if (index_.placements().empty()) return;
  std::string shortage = index_.placements().shortage();
  if (shortage.empty()) {
    short_since_.reset();
  } else {
    const Instant now = loop_.monotonic_now();
    if (!short_since_) short_since_ = now;
    if (now - *short_since_ < shortage_after_) return;
  }
  if (shortage == shortage_) return;
  shortage_ = std::move(shortage);
  unwritten_ = index_.placements().unwritten();
  watch_degraded();
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
              {"number", kv::tenant_text(number)},
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
  endpoint_.on<wire::meta_register>([this](const Incoming& in, wire::meta_register message) {
    registered({in.from, in.header.request, in.header.attempt, in.header.cluster, std::move(message)});
  });
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
      // Whoever has waited for the store to be there looks at once.
      watch_shortage();
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

void Service::answer(const Asked& asked, wire::meta_registered message) {
  message.cluster = catalogue_.cluster();
  message.lost_ms = static_cast<std::uint32_t>(to_ms(directory::member_lost_after));
  static_cast<void>(
      endpoint_.reply(asked.from, message, {.request = asked.request, .attempt = asked.attempt}));
}

void Service::refuse(const Asked& asked, Code code, const std::string& reason) {
  ++counters_.refused;
  std::string instance = asked.message.self.instance.substr(0, 128);
  const Instant now = loop_.monotonic_now();
  if (instance != told_refused_.instance || reason != told_refused_.reason || told_refused_.again <= now) {
    log_warn("meta", "registration refused", {{"instance", instance}, {"reason", reason}});
    told_refused_ = {std::move(instance), reason, now + refused_line_every};
  }
  wire::meta_registered answered;
  answered.code = static_cast<std::uint16_t>(code);
  answered.reason = reason;
  answer(asked, std::move(answered));
}

void Service::registered(Asked asked) {
  const wire::meta_register& message = asked.message;
  const std::string& instance = message.self.instance;
  if (asked.cluster != 0 && asked.cluster != catalogue_.cluster()) {
    return refuse(asked, Code::stale,
                  "it is of another cluster: di-meta has another catalogue since it started");
  }
  const net::Member* peer = asked.from.id == 0 ? nullptr : endpoint_.peer(asked.from.id);
  if (peer != nullptr && peer->instance != instance) {
    return refuse(asked, Code::invalid, "the connection belongs to " + peer->instance);
  }
  if (const Status may = endpoint_.may_register(asked.from, message.self); !may) {
    return refuse(asked, may.error().code, may.error().message);
  }
  const auto waits = waiting_.find(instance);
  if (waits != waiting_.end() && waits->second.row.boot == message.boot) {
    waits->second.asked = std::move(asked);  // answered there when the row is written
    return;
  }
  const auto admission = membership_.judge(message);
  if (!admission) return refuse(asked, admission.error().code, admission.error().message);
  if (admission->row_changed) {
    if (waits == waiting_.end() && waiting_.size() >= waiting_max) {
      return refuse(asked, Code::busy, "too many registrations wait for the catalogue");
    }
    membership_.hold(*admission);
    Waiting next{std::move(asked), admission->row, {}};
    // What the replaced one was to drop may still be there.
    if (waits != waiting_.end()) next.gone = waits->second.gone;
    if (const auto& gone = admission->dropped)
      next.gone.push_back(directory::RowGone{gone->instance, gone->id, membership_.issued()});
    if (waits != waiting_.end()) {
      // Nobody has heard of the generation that was to be its.
      refuse(waits->second.asked, Code::stale, "another process has taken this name since");
      next.writing = waits->second.writing;
      waits->second = std::move(next);
      if (waits->second.writing) return;  // written() sees that the row is another
      return write(waits->second);
    }
    return write(waiting_.emplace(admission->row.instance, std::move(next)).first->second);
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
  wire::meta_registered answered;
  answered.id = admission->row.id;
  answered.generation = admission->row.generation;
  if (admission->member.program == "di-router") answered.secret = catalogue_.secret();
  answer(asked, std::move(answered));
}

void Service::write(Waiting& waiting) {
  waiting.writing = true;
  Persister::Rows rows = waiting.gone;
  rows.push_back(waiting.row);
  persister_->write(std::move(rows),
                    [this, row = waiting.row](const Status& status) { written(row, status); });
}

void Service::written(const directory::InstanceRow& row, const Status& status) {
  if (status && !std::exchange(catalogue_refuses_, {}).empty())
    log_info("meta", "generations are saved again");
  if (!status && std::exchange(catalogue_refuses_, status.error().message).empty())
    log_error("meta", "cannot save a generation", {{"error", status.error()}});
  const auto at = waiting_.find(row.instance);
  if (at == waiting_.end()) return;
  at->second.writing = false;
  if (!status) {  // tick() tries again
    wire::meta_registered later;
    later.code = static_cast<std::uint16_t>(Code::busy);
    later.reason = "its generation cannot be saved: " + status.error().message;
    return answer(at->second.asked, std::move(later));
  }
  // Another process came for the name.
  if (at->second.row != row) return write(at->second);
  membership_.keep(row);
  Asked asked = std::move(at->second.asked);
  waiting_.erase(at);
  registered(std::move(asked));
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
  // Later: the endpoint may be in the middle of the event that changed the list.
  if (!publish_.armed()) publish_.start_at(std::max(publish_again_, loop_.monotonic_now()));
}

void Service::publish() {
  ++counters_.published;
  const wire::meta_members snapshot = membership_.snapshot();
  std::vector<net::PeerId> before;
  for (const net::Member* peer : endpoint_.peers_up()) before.push_back(peer->id);
  endpoint_.set_members(snapshot.members);
  // Those that came up just now have it from peer_up().
  const Bytes body = wire::body_encode(snapshot);
  for (const net::PeerId id : before) {
    if (endpoint_.up(id)) static_cast<void>(endpoint_.send_body(id, wire::meta_members::number, body, {}));
  }
  const Duration pause = milliseconds(body.size() * before.size() / publish_bytes_per_ms);
  publish_again_ = loop_.monotonic_now() + std::clamp(pause, publish_every, publish_every_max);
}

void Service::tick() {
  const Instant now = loop_.monotonic_now();
  // The endpoint watches the heartbeats of connections; here it is about members without one.
  for (const net::Member* peer : endpoint_.peers_up()) membership_.heard(peer->id, peer->generation, now);
  apply(membership_.step(now));
  for (auto& [instance, waiting] : waiting_) {
    if (!waiting.writing) write(waiting);
  }
  watch_shortage();
  watch_degraded();
  log_over_quota();
  std::erase_if(delayed_, [](const auto& timer) { return !timer->armed(); });
}

void Service::watch_degraded() {
  std::string what = unwritten_;
  const auto add = [&what](const std::string& more, const std::string& why) {
    what.append(what.empty() ? "" : "; ").append(more).append(": ").append(why);
  };
  if (!catalogue_refuses_.empty() && !waiting_.empty())
    add("registrations wait, generations cannot be saved", catalogue_refuses_);
  if (!persister_->refused().empty())
    add("stripes cannot be written to the catalogue", persister_->refused());
  if (what == degraded_) return;
  degraded_ = std::move(what);
  if (tell_degraded_) tell_degraded_(degraded_);
}

void Service::beat() {
  if (directory_beat_ && index_.next_due() > loop_.monotonic_now() - step_slack) directory_beat_();
  const std::uint64_t transactions = persister_->counters().transactions;
  if (catalogue_beat_ && (!persister_->waits() || transactions != transactions_seen_)) catalogue_beat_();
  transactions_seen_ = transactions;
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
