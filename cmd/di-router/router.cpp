#include "router.h"

#include <sys/stat.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "base/file.h"
#include "base/log.h"
#include "kv/chain.h"
#include "net/envelope.h"

namespace di::router {

Router::Router(const Config& config) : config_(config) {}
Router::~Router() {
  withdraw_address();
}

void Router::withdraw_address() {
  if (!address_file_.empty()) ::unlink(std::exchange(address_file_, {}).c_str());
}

Result<account::KeyTable> Router::load_keys(const Config& config) const {
  account::KeyTable keys;
  for (const KeyConfig& key : config.auth_keys) DI_TRY(keys.add(key.key, key.tenant));
  const bool named = !config.auth_key_file.empty();
  const std::string path = named ? config.auth_key_file : config.common.run_dir + "/key";
  struct stat info {};
  if (named || ::stat(path.c_str(), &info) == 0) DI_TRY(keys.add_file(path, "default"));
  if (keys.count() == 0 && config.auth_required) {
    return Error{
        Code::invalid, 0,
        "no API key is configured: set auth.keys or auth.key_file, or auth.required = false on loopback"};
  }
  return keys;
}

Status Router::on_prepare(daemon::Daemon& daemon) {
  daemon_ = &daemon;
  auto model = served_model_load(config_);
  if (!model) return model.error();
  auto keys = load_keys(config_);
  if (!keys) return keys.error();
  front_ = std::make_unique<Frontend>(config_, *std::move(model), *std::move(keys), *this, daemon.metrics());
  DI_TRY(front_->open_journal(config_.journal_dir.empty() ? config_.common.run_dir + "/journal"
                                                          : config_.journal_dir));
  auto address = front_->listen(daemon.loop());
  if (!address) return address.error();
  // Where scripts find the address when the port was picked.
  address_file_ = daemon.path("listen");
  return file_write(address_file_, *address + "\n");
}

Status Router::on_start(daemon::Daemon& daemon) {
  loop::Loop& loop = daemon.loop();
  due_timer_ = std::make_unique<loop::Timer>(loop, loop::TimerKind::product, "request timer", [this] {
    if (core_ != nullptr) core_->on_time(daemon_->loop().now());
    turn();
  });
  second_timer_ = std::make_unique<loop::Timer>(loop, loop::TimerKind::product, "keep-alive", [this] {
    front_->on_time();
    const std::string& why = front_->journal_refuses();
    daemon_->degraded(why.empty() ? "" : "charge records wait, the journal takes none: " + why);
    if (stopping_) turn();
  });
  second_timer_->start_every(seconds(1));

  net::Endpoint& endpoint = daemon.endpoint();
  net::take_messages<wire::meta_matched, wire::rank_credit, wire::prefill_refused, wire::prefill_progress,
                     wire::seat_granted, wire::seat_refused, wire::decode_started, wire::token_batch,
                     wire::request_done>(endpoint, [this](const net::Incoming& in) { deliver(in); });
  endpoint.on_peer_up([this](const net::Member& member) { peer_up(member); });
  endpoint.on_peer_lost([this](net::PeerId id, std::uint32_t) { peer_lost(id); });
  if (auto bound = daemon.listen(); !bound) return bound.error();

  daemon::Metrics& metrics = daemon.metrics();
  metrics.held_from("requests", [this] {
    return core_ == nullptr ? 0 : static_cast<std::int64_t>(core_->flights().size());
  });
  metrics.held_from("answers", [this] { return static_cast<std::int64_t>(front_->open()); });
  metrics.held_from("tickets", [this] { return static_cast<std::int64_t>(front_->concurrency().held()); });
  metrics.held_from("rank_reservations", [this] {
    return core_ == nullptr ? 0 : static_cast<std::int64_t>(core_->ranks().outstanding());
  });
  metrics.gauge_from("di_queue_requests", "Requests that wait for credit",
                     [this] { return core_ == nullptr ? 0 : static_cast<std::int64_t>(core_->queued()); });
  metrics.counter_from("di_reentries_total", "Attempts after the first",
                       [this] { return core_ == nullptr ? std::uint64_t{0} : core_->reentries(); });
  metrics.counter_from("di_matched_blocks_total", "Blocks that the directory matched",
                       [this] { return core_ == nullptr ? std::uint64_t{0} : core_->matched_blocks(); });

  net::MetaClient::Events events;
  events.registered = [this](const wire::meta_registered& registered) {
    secret_ = registered.secret;
    // The API answers from here on; /health says whether workers are there.
    daemon_->ready();
  };
  daemon.enroll(daemon.self_member(), std::move(events));
  return {};
}

Status Router::on_reload(const Config& fresh) {
  auto keys = load_keys(fresh);
  if (!keys) return keys.error();
  front_->set_keys(*std::move(keys));
  return {};
}

void Router::peer_up(const net::Member& member) {
  const bool rank = member.program == "di-prefill" || member.program == "di-decode";
  if (rank && member.model != config_.model_name) {
    log_warn("fleet", "rank of another model is not used",
             {{"peer", member.instance}, {"model", member.model}, {"served", config_.model_name}});
    return;
  }
  if (rank && !rank_up(member)) return;
  peers_[member.id] = member;
  if (core_ == nullptr) return;
  core_->on_peer_up(member, daemon_->loop().now());
  turn();
}

bool Router::rank_up(const net::Member& member) {
  const auto joined = identity_.join(member);
  if (!joined) {
    if (joined.error().code == Code::exists) {
      log_error("fleet", "rank of another model is refused",
                {{"peer", member.instance}, {"error", joined.error()}});
    } else {
      log_error("fleet", "unreadable layout", {{"peer", member.instance}, {"error", joined.error()}});
    }
    return false;
  }
  if (core_ == nullptr) {
    request::RouterCore::Options options;
    options.flights_max = config_.requests_max;
    options.attempts_max = config_.attempts_max;
    options.block_tokens = identity_.layout().block_tokens();
    options.match_wait = config_.match_wait;
    options.first_token_wait = config_.first_token_wait;
    options.next_token_wait = config_.next_token_wait;
    options.total_wait = config_.total_wait;
    options.seat_ahead_us = static_cast<double>(to_us(config_.seat_ahead));
    core_ = std::make_unique<request::RouterCore>(options);
    for (const auto& [id, known] : peers_) core_->on_peer_up(known, daemon_->loop().now());
  } else if (*joined == request::Identity::Joined::other) {
    log_info("fleet", "the ranks that come have another model: nothing cached with the old one is used",
             {{"peer", member.instance}, {"revision", identity_.revision().text()}});
    core_->start_over(identity_.layout().block_tokens(), "the model was replaced", daemon_->loop().now());
  }
  return true;
}

void Router::peer_lost(net::PeerId id) {
  const std::vector<net::PeerId> may_come = identity_.leave(id);
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  const std::string instance = found->second.instance;
  peers_.erase(found);
  if (core_ != nullptr) core_->on_peer_lost(instance, daemon_->loop().now());
  turn();
  // Who was refused for the sake of those that are gone comes up anew: its rank has said its credit, which was
  // dropped, and says none again before that changes.  A later turn: the endpoint is in the middle of a loss.
  for (const net::PeerId waiting : may_come) {
    daemon_->loop().post("refused rank again", [this, waiting] {
      if (identity_.waits(waiting))
        daemon_->endpoint().lose(waiting, "was refused for the sake of ranks that are gone");
    });
  }
}

void Router::deliver(const net::Incoming& in) {
  const auto peer = peers_.find(in.from.id);
  if (peer == peers_.end() || core_ == nullptr) return;
  core_->on_message(net::envelope_of(in, peer->second.instance), daemon_->loop().now());
  turn();
}

void Router::turn() {
  if (core_ == nullptr) {
    if (stopping_ && front_->drained()) daemon_->stopped();
    return;
  }
  // A stop string found in emitted() cancels, which moves the core again: one loop instead of recursion.
  turn_again_ = true;
  if (turning_) return;
  turning_ = true;
  while (turn_again_) {
    turn_again_ = false;
    for (wire::Envelope& message : core_->take_outgoing()) {
      const Status sent = net::envelope_send(daemon_->endpoint(), message);
      if (sent.ok() && message.number == wire::prefill_bind::number)
        daemon::fault(daemon::FaultPoint::router_after_bind);
    }
    const auto emissions = core_->take_emissions();
    if (!emissions.empty()) front_->emitted(emissions);
    for (const request::Ending& ending : core_->take_endings()) front_->ended(ending);
  }
  turning_ = false;
  due_timer_->start_at(core_->next_due());
  const bool done = (core_->flights().empty() && front_->drained()) || drain_over_;
  if (stopping_ && done && front_->open() == 0) daemon_->stopped();
}

Status Router::submit(request::NewRequest request, const std::string& tenant, const std::string& user_id,
                      const std::string& cache_salt) {
  if (core_ == nullptr || secret_.empty()) return Error{Code::unreachable, 0, "no rank is up"};
  kv::ChainOrigin origin;
  origin.fingerprint = identity_.layout().fingerprint();
  origin.revision = identity_.revision();
  origin.salt = kv::namespace_salt(secret_, {tenant, user_id, cache_salt});
  request.root = kv::chain_root(origin);
  request.tenant = kv::tenant_number(tenant);
  request.keys = kv::chain_keys(request.root, request.prompt, identity_.layout().block_tokens());
  if (!identity_.script()) request.debug.clear();
  const Status submitted = core_->submit(std::move(request), daemon_->loop().now());
  // The answer is registered by the caller before tokens can come: the turn follows in a post.
  daemon_->loop().post("submitted", [this] { turn(); });
  return submitted;
}

void Router::cancel(const RequestId& id, Code reason) {
  if (core_ == nullptr) return;
  core_->cancel(id, reason, daemon_->loop().now());
  turn();
}

bool Router::serves() const {
  return core_ != nullptr && core_->serves(config_.model_name);
}

void Router::on_stop(daemon::Daemon& daemon) {
  // Streams finish; nothing new is taken.  drain.timeout bounds it.
  stopping_ = true;
  withdraw_address();
  if (net::MetaClient* meta = daemon.meta()) meta->set_state(1);
  front_->drain([this] { turn(); });
  turn();
}

void Router::on_drain_over(daemon::Daemon& daemon) {
  // Each hears of it, and is charged with what it got.
  drain_over_ = true;
  if (core_ == nullptr) return daemon.stopped();
  core_->end_all(Code::busy, "the service stops", daemon.loop().now());
  turn();
}

bool Router::on_ctl(const daemon::Words& words, daemon::Reply reply) {
  using daemon::Reply;
  using daemon::Words;
  const daemon::Command commands[] = {
      {"show requests", [this](const Words&, Reply& to) { show_requests(to); }},
      {"show ranks", [this](const Words&, Reply& to) { show_fleet(to); }},
      {"explain", [this](const Words& more, Reply& to) { explain(more[0], to); }, 1, 1},
  };
  return daemon::answer_by(commands, words, std::move(reply));
}

void Router::show_requests(daemon::Reply& reply) const {
  if (core_ != nullptr) {
    const Instant now = daemon_->loop().now();
    for (const auto& [id, flight] : core_->flights()) {
      daemon::Row row;
      row.text("request", id.text())
          .text("state", request::flight_state_name(flight.state))
          .number("attempt", flight.attempt)
          .number("prompt_tokens", flight.request.prompt.size())
          .number("hit_blocks", flight.hit_blocks)
          .number("output_tokens", flight.produced.size())
          .text("prefill", flight.prefill.open ? flight.prefill.rank.text() : "-")
          .text("decode", flight.decode.open ? flight.decode.rank.text() : "-")
          .number("age_ms", to_ms(now - flight.submitted));
      reply.row(row);
    }
  }
  reply.end();
}

void Router::show_fleet(daemon::Reply& reply) const {
  if (core_ != nullptr) {
    for (const auto& [name, info] : core_->ranks().all()) {
      daemon::Row row;
      row.text("rank", name.text())
          .text("kind", info.decode ? "decode" : "prefill")
          .text("state", info.credit.draining ? "draining" : "up")
          .text("host", info.credit.host.empty() ? "-" : info.credit.host)
          .number("outstanding_requests", info.outstanding)
          .number("outstanding_us", info.outstanding_us)
          .number("credit_requests",
                  info.credit.granted_requests - std::min(info.credit.granted_requests, info.sent_requests))
          .number("running", info.credit.running)
          .number("kv_tokens", info.credit.kv_tokens)
          .number("kv_tokens_max", info.credit.kv_tokens_max);
      reply.row(row);
    }
  }
  reply.end();
}

void Router::explain(const std::string& text, daemon::Reply& reply) const {
  const auto id = front_->find_id(text);
  const request::Flight* flight = id.has_value() && core_ != nullptr ? core_->find(*id) : nullptr;
  if (flight == nullptr)
    return reply.fail(Error{Code::not_found, 0, "no request '" + text + "' is remembered here"});
  const auto show = [&reply](std::uint64_t at_us, std::uint16_t attempt, std::string_view event,
                             std::string_view where, const wire::Span& span, std::string_view detail) {
    daemon::Row out;
    out.number("at_us", at_us)
        .number("attempt", attempt)
        .text("event", event)
        .text("where", where)
        .number("group", span.group)
        .number("length_us", span.length_us)
        .text("detail", detail);
    reply.row(out);
  };
  const auto show_all = [](const auto& rows, const auto& show_row, const auto& show_gap) {
    for (const auto& row : rows.first()) show_row(row);
    if (rows.missing() > 0) show_gap(rows.first().back(), "rows=" + std::to_string(rows.missing()));
    for (const auto& row : rows.last()) show_row(row);
  };
  const auto since = [flight](const request::TimelineRow& row) { return to_us(row.at - flight->submitted); };
  show_all(
      flight->timeline,
      [&](const request::TimelineRow& row) {
        show(since(row), row.attempt, row.event, "di-router", {}, row.detail);
      },
      [&](const request::TimelineRow& before, const std::string& detail) {
        show(since(before), before.attempt, "missing", "di-router", {}, detail);
      });
  // Spans are on their rank's clock: relative to that rank's first span of the request.
  std::map<std::string, std::uint64_t> origin;
  const auto begin = [&](const request::SpanRow& row) {
    const auto first = origin.emplace(row.rank, row.span.start_us).first;
    first->second = std::min(first->second, row.span.start_us);
  };
  std::ranges::for_each(flight->spans.first(), begin);
  std::ranges::for_each(flight->spans.last(), begin);
  show_all(
      flight->spans,
      [&](const request::SpanRow& row) {
        static constexpr std::string_view kinds[] = {"wait", "swap_in", "compute", "cut"};
        show(row.span.start_us - origin.at(row.rank), row.attempt,
             row.span.kind < std::size(kinds) ? kinds[row.span.kind] : "span", row.rank, row.span, "");
      },
      [&](const request::SpanRow& before, const std::string& detail) {
        show(before.span.start_us - origin.at(before.rank), before.attempt, "missing", before.rank, {},
             detail);
      });
  reply.end();
}

}  // namespace di::router
