#include "worker/worker.h"

#include <algorithm>

#include "base/log.h"
#include "net/envelope.h"

namespace di::worker {

namespace {

// Between two tries to reach the arena socket of a host daemon that is up.
constexpr Duration attach_retry = milliseconds(50);
// While there is no arena, the mapping of the last one is looked at so often and kept for so long.  A host
// daemon that finds its arena again has it within seconds; later it costs a new mapping.
constexpr Duration mapping_look_every = milliseconds(100);
constexpr Duration mapping_kept = seconds(10);

}  // namespace

Worker::Worker(const Config& config, MakeCore make_core, FaultPlaces faults)
    : config_(config), make_core_(std::move(make_core)), faults_(std::move(faults)) {}

Worker::~Worker() = default;

Status Worker::prepare(daemon::Daemon& daemon) {
  daemon_ = &daemon;
  for (std::uint16_t rank = 0; rank < config_.ranks; ++rank) {
    auto engine = make_engine(config_.engine, config_.common.run_dir, config_.requests_max,
                              std::max(config_.chunk_tokens, 1u), daemon.loop().clock());
    if (!engine) return engine.error();
    Rank made;
    made.core = make_core_(rank, (*engine)->describe());
    RankCore& core = *made.core;
    made.costs = std::make_unique<daemon::Kept>(
        daemon, std::to_string(rank) + ".cost", [&core] { return core.costs(); },
        [&core](std::string_view text) { return core.restore_costs(text); });
    made.engine = std::make_unique<EngineThread>(
        daemon.loop(), *std::move(engine), "engine", [this, rank](rank::BatchDone&& done) {
          ranks_[rank].busy = false;
          for (Closing& closing : closing_) closing.ranks.erase(rank);
          close_unused();
          if (faults_.step_done && !done.step.rows.empty()) faults_.step_done(done);
          ranks_[rank].core->on_batch_done(std::move(done), daemon_->loop().now());
          turn();
          settle_clock();
        });
    ranks_.push_back(std::move(made));
  }
  return {};
}

Status Worker::start(daemon::Daemon& daemon) {
  loop::Loop& loop = daemon.loop();
  due_timer_ = std::make_unique<loop::Timer>(loop, loop::TimerKind::product, "rank timer", [this] {
    for (Rank& rank : ranks_) rank.core->on_time(daemon_->loop().now());
    turn();
  });
  attach_timer_ =
      std::make_unique<loop::Timer>(loop, loop::TimerKind::liveness, "arena attach", [this] { attach(); });
  mapping_timer_ = std::make_unique<loop::Timer>(loop, loop::TimerKind::liveness, "arena mapping",
                                                 [this] { mapping_look(); });

  net::Endpoint& endpoint = daemon.endpoint();
  net::take_messages<wire::prefill_bind, wire::prefill_target, wire::decode_seat, wire::seat_release,
                     wire::done_ack, wire::request_stop, wire::request_kill, wire::kv_fetching,
                     wire::kv_ready, wire::kv_opened, wire::kv_handed, wire::kv_expected, wire::kv_seated>(
      endpoint, [this](const net::Incoming& in) { deliver(in); });
  endpoint.on_peer_up([this](const net::Member& member) { peer_up(member); });
  endpoint.on_peer_lost([this](net::PeerId id, std::uint32_t) { peer_lost(id); });
  if (auto bound = daemon.listen(); !bound) return bound.error();

  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankCore* core = ranks_[rank].core.get();
    const std::string prefix = ranks_.size() == 1 ? "" : "rank" + std::to_string(rank) + "_";
    const std::vector<rank::Gauge> gauges = core->gauges();
    for (std::size_t i = 0; i < gauges.size(); ++i) {
      daemon.metrics().held_from(prefix + gauges[i].name,
                                 [core, i] { return static_cast<std::int64_t>(core->gauges()[i].count); });
    }
  }

  net::Member self = daemon.self_member();
  const engine::Description& description = ranks_.front().engine->describe();
  self.ranks = config_.ranks;
  self.role = description.wants_debug_text ? "script" : "";
  self.model = description.model;
  self.layout = description.layout.descriptor();
  self.fingerprint = description.layout.fingerprint();
  self.revision = description.revision;
  net::MetaClient::Events events;
  // Ready means: registered, and the arena of this host is mapped.
  events.registered = [this](const wire::meta_registered&) { attach(); };
  daemon.enroll(std::move(self), std::move(events));
  return {};
}

void Worker::deliver(const net::Incoming& in) {
  const auto peer = peers_.find(in.from.id);
  if (peer == peers_.end()) return;
  const wire::Envelope envelope = net::envelope_of(in, peer->second.instance);
  const std::uint16_t rank = in.header.rank;
  if (rank >= ranks_.size()) return;
  ranks_[rank].core->on_message(envelope, daemon_->loop().now());
  flush(ranks_[rank]);
  if (faults_.after_receive) faults_.after_receive(envelope);
  turn();
}

void Worker::flush(Rank& rank) {
  for (wire::Envelope& message : rank.core->take_outgoing()) {
    if (faults_.before_send && faults_.before_send(message) == daemon::FaultAction::drop) continue;
    const Status sent = net::envelope_send(daemon_->endpoint(), message);
    if (sent.ok() && faults_.after_send) faults_.after_send(message);
  }
}

void Worker::turn() {
  const Instant now = daemon_->loop().now();
  Instant due = instant_never;
  bool idle = true;
  for (Rank& rank : ranks_) {
    if (!rank.busy) {
      if (auto batch = rank.core->next_batch(now)) {
        rank.busy = true;
        rank.engine->submit({*std::move(batch), arena_});
      }
    }
    flush(rank);
    due = std::min(due, rank.core->next_due());
    idle = idle && rank.core->idle();
  }
  due_timer_->start_at(due);
  if (stopping_ && idle) {
    for (const Rank& rank : ranks_) rank.costs->save();
    daemon_->stopped();
  }
}

void Worker::peer_up(const net::Member& member) {
  peers_[member.id] = member;
  if (member.program == "di-router") {
    for (Rank& rank : ranks_) rank.core->on_router_up(member.instance, member.generation);
  }
  if (member.program == "di-kvd" && member.role == "host" && member.host == daemon_->self_member().host) {
    kvd_ = member;
    attach();
  }
  turn();
}

void Worker::peer_lost(net::PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  const net::Member member = std::move(found->second);
  peers_.erase(found);
  if (member.program == "di-router") {
    for (Rank& rank : ranks_) rank.core->on_router_lost(member.instance);
  }
  if (member.id == kvd_.id) {
    detach("the connection to di-kvd ended");
    kvd_ = {};
  }
  turn();
}

void Worker::attach() {
  // Both the messages and the mapping are needed; whichever comes last completes the attachment.
  if (kvd_.id == 0 || arena_ != nullptr || daemon_->endpoint().self().generation == 0) return;
  wire::arena_hello hello;
  hello.instance = std::string(daemon_->instance());
  hello.generation = daemon_->endpoint().self().generation;
  transfer::ShmClient::Events events;
  const std::uint64_t attachment = ++attachment_;
  events.attached = [this, attachment](const wire::arena_region& region, Fd fd) {
    if (attachment != attachment_) return;
    if (region.generation != kvd_.generation) {
      // The socket is a newer daemon's than the one whose messages we get: its peer_up is on the way.
      detach("another generation of di-kvd");
      return;
    }
    auto arena = kv::ArenaClient::map(fd.get(), region.bytes, mapping_);
    if (!arena) {
      log_error("arena", "cannot map", {{"error", arena.error()}});
      attach_timer_->start_after(seconds(1));
      return;
    }
    arena_ = *std::move(arena);
    const bool kept = arena_->mapping() == mapping_;
    mapping_ = arena_->mapping();
    mapping_timer_->cancel();
    log_info("arena", "attached",
             {{"host", kvd_.instance},
              {"generation", kvd_.generation},
              {"bytes", region.bytes},
              {"mapping_kept", kept}});
    for (Rank& rank : ranks_) rank.core->on_arena(kvd_.instance, kvd_.generation, daemon_->loop().now());
    daemon_->ready();
    turn();
  };
  events.detached = [this, attachment](const Error& why) {
    if (attachment == attachment_) detach(why.message);
  };
  auto client = transfer::ShmClient::connect(
      daemon_->loop(), config_.common.run_dir + "/" + kvd_.instance + ".arena", hello, std::move(events));
  if (!client) {
    attach_timer_->start_after(attach_retry);
    return;
  }
  shm_ = *std::move(client);
}

void Worker::detach(std::string_view why) {
  // Called from inside the client's callback too: it is destroyed in a later turn.
  if (shm_ != nullptr) {
    ++attachment_;
    Closing closing{std::move(shm_), {}};
    for (std::uint16_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].busy) closing.ranks.insert(rank);
    }
    closing_.push_back(std::move(closing));
    close_unused();
  }
  if (arena_ != nullptr) {
    log_warn("arena", "lost", {{"host", kvd_.instance}, {"reason", why}});
    arena_->fail();
    arena_.reset();
    arena_lost_at_ = daemon_->loop().monotonic_now();
    mapping_timer_->start_every(mapping_look_every);
    for (Rank& rank : ranks_) rank.core->on_arena("", 0, daemon_->loop().now());
  }
  attach_timer_->start_after(attach_retry);
  turn();
}

void Worker::close_unused() {
  for (auto it = closing_.begin(); it != closing_.end();) {
    if (!it->ranks.empty()) {
      ++it;
      continue;
    }
    daemon_->loop().post("arena client ends", [gone = std::make_shared<Closing>(std::move(*it))] {});
    it = closing_.erase(it);
  }
}

// A batch that is out has its own share in the mapping, and needs it until it is over.
void Worker::mapping_look() {
  const bool given_up = mapping_->given_up();
  if (!given_up && daemon_->loop().monotonic_now() - arena_lost_at_ < mapping_kept) return;
  log_info("arena", "mapping ended", {{"given_up", given_up}});
  mapping_.reset();
  mapping_timer_->cancel();
}

void Worker::stop(daemon::Daemon& daemon) {
  // Running requests finish; nothing new is taken.  drain.timeout bounds it.
  stopping_ = true;
  if (net::MetaClient* meta = daemon.meta()) meta->set_state(1);
  for (Rank& rank : ranks_) rank.core->set_draining(true);
  turn();
}

bool Worker::control(const std::vector<std::string>& words, daemon::Reply& reply) {
  const auto drains = [this](bool draining) {
    return [this, draining](const daemon::Words&, daemon::Reply& to) {
      if (stopping_ && !draining) return to.fail(Error{Code::busy, 0, "it is stopping"});
      draining_ = draining;
      for (Rank& rank : ranks_) rank.core->set_draining(draining_);
      if (net::MetaClient* meta = daemon_->meta()) meta->set_state(draining_ ? 1 : 0);
      turn();
      to.end();
    };
  };
  const daemon::Command commands[] = {{"drain", drains(true)}, {"resume", drains(false)}};
  return daemon::answer_by(commands, words, reply);
}

void Worker::clock_advanced(loop::Callback done) {
  clock_done_ = std::move(done);
  for (Rank& rank : ranks_) rank.core->on_time(daemon_->loop().now());
  turn();
  settle_clock();
}

void Worker::settle_clock() {
  // Product time has been caught up with when no batch is out and nothing is due.
  if (!clock_done_) return;
  for (Rank& rank : ranks_) {
    if (rank.busy || rank.core->next_due() <= daemon_->loop().now()) return;
  }
  std::exchange(clock_done_, nullptr)();
}

}  // namespace di::worker
