#include "data_plane.h"

#include <netinet/in.h>

#include <algorithm>
#include <charconv>

#include "base/log.h"
#include "net/zmq.h"
#include "transfer/address.h"
#include "transfer/tcp.h"
#include "transfer/verbs_fabric.h"

namespace di::kvd {

namespace {

// DEVICE[/PORT[/GID]].
Result<transfer::VerbsPort> rail_parse(const std::string& text) {
  transfer::VerbsPort rail;
  const Error wrong{Code::invalid, 0,
                    "transfer.rails: \"" + text + "\": want DEVICE, DEVICE/PORT or DEVICE/PORT/GID"};
  const std::size_t port_at = text.find('/');
  rail.device = text.substr(0, port_at);
  if (rail.device.empty()) return wrong;
  if (port_at == std::string::npos) return rail;
  const char* end = text.data() + text.size();
  const auto port = std::from_chars(text.data() + port_at + 1, end, rail.port);
  if (port.ec != std::errc() || rail.port == 0) return wrong;
  if (port.ptr == end) return rail;
  if (*port.ptr != '/') return wrong;
  const auto gid = std::from_chars(port.ptr + 1, end, rail.gid_index);
  if (gid.ec != std::errc() || gid.ptr != end) return wrong;
  return rail;
}

std::uint16_t port_of(const transfer::Address& address) {
  return ntohs(address.family() == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

// Every address of this machine: nothing that another one could connect to.
bool is_wildcard(const transfer::Address& address) {
  if (address.family() == AF_INET6)
    return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr) != 0;
  return reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr == INADDR_ANY;
}

// What nobody can connect to is told to nobody.
Status advertise_check(const std::string& given) {
  if (given.empty()) return {};
  const Result<transfer::Address> address = transfer::address_parse(given);
  if (!address) return address.error();
  if (is_wildcard(*address))
    return Error{Code::invalid, 0, given + ": every address of this machine says nothing to others"};
  return {};
}

}  // namespace

std::string data_advertised(const std::string& given, const std::string& bound) {
  if (given.empty()) return bound;
  const Result<transfer::Address> address = transfer::address_parse(given);
  if (!address || port_of(*address) != 0) return given;
  return given.substr(0, given.rfind(':')) + bound.substr(bound.rfind(':'));
}

void data_params(config::Params& params, DataConfig& config) {
  params.choice("transfer.kind", config.kind, {{DataKind::tcp, "tcp"}, {DataKind::verbs, "verbs"}},
                {.help = "what data connections are made of; the same in all of a fleet"});
  params.list(
      "transfer.rails", config.rails,
      {.help = "of verbs: ports as DEVICE/PORT/GID, as in [\"mlx5_0/1/3\"]; none: the first that is up"});
  params.string("transfer.bind", config.bind,
                {.help = "address for data connections of other machines, as in \"10.0.0.5:0\"; none: off"});
  params.string(
      "transfer.advertise", config.advertise,
      {.check = advertise_check,
       .help = "data endpoint told to others, as in \"tcp://10.0.0.5:7400\"; port 0: the one that was bound; "
               "none: what was bound"});
  params.boolean("transfer.seal", config.seal,
                 {.help = "encrypt data connections (AES-256-GCM); between zones they always are"});
  params.size("transfer.link_bytes_per_s", config.link_bytes_per_s,
              {.help = "what this side sends and asks for at most, in all; 0: as fast as the link is"});
}

Status DataPlane::open_tcp(transfer::Region* region) {
  transfer::TcpOptions options;
  options.self.instance = std::string(daemon_.instance());
  options.listen = config_.bind;
  options.region = region;
  options.budget.bytes_per_s = config_.link_bytes_per_s;
  Result<std::unique_ptr<transfer::TcpFabric>> fabric = transfer::make_tcp_fabric(daemon_.loop(), options);
  if (!fabric) return fabric.error().in("transfer.bind");
  endpoint_ = (*fabric)->endpoint();
  set_self_ = [tcp = fabric->get()](const wire::Peer& self) { tcp->set_self(self); };
  fabric_ = *std::move(fabric);
  return {};
}

Status DataPlane::open_verbs(const Shared& shared) {
  if (config_.seal)
    return Error{Code::invalid, 0, "transfer.kind = \"verbs\" cannot seal: transfer.seal is for tcp"};
  transfer::VerbsFabricOptions options;
  options.self.instance = std::string(daemon_.instance());
  options.listen = config_.bind;
  options.region = shared.region;
  if (!shared.memory.empty()) options.memory.push_back({shared.memory, -1, 0});
  for (const std::string& text : config_.rails) {
    const Result<transfer::VerbsPort> rail = rail_parse(text);
    if (!rail) return rail.error();
    options.rails.push_back(*rail);
  }
  if (options.rails.empty()) options.rails.emplace_back();
  options.budget.bytes_per_s = config_.link_bytes_per_s;
  Result<std::unique_ptr<transfer::VerbsFabric>> fabric =
      transfer::make_verbs_fabric(daemon_.loop(), options);
  if (!fabric) return fabric.error().in("transfer.kind");
  endpoint_ = (*fabric)->endpoint();
  set_self_ = [verbs = fabric->get()](const wire::Peer& self) { verbs->set_self(self); };
  fabric_ = *std::move(fabric);
  return {};
}

Result<std::unique_ptr<DataPlane>> DataPlane::start(daemon::Daemon& daemon, const DataConfig& config,
                                                    Shared shared, Events events) {
  std::unique_ptr<DataPlane> plane(new DataPlane(daemon, config));
  DataPlane* self = plane.get();
  if (!config.bind.empty()) {
    const Status opened =
        config.kind == DataKind::tcp ? plane->open_tcp(shared.region) : plane->open_verbs(shared);
    if (!opened.ok()) return opened.error();
    plane->endpoint_ = data_advertised(config.advertise, plane->endpoint_);
    if (const auto told = transfer::address_parse(plane->endpoint_); told && is_wildcard(*told)) {
      return Error{Code::invalid, 0,
                   "transfer.bind = \"" + config.bind + "\" says nothing to others: set transfer.advertise"};
    }
    plane->fabric_->set_events({.want_ticket = [self](const wire::Peer& peer) { self->want_ticket(peer); },
                                .done = std::move(events.done),
                                .concealed = std::move(events.concealed)});
    plane->register_metrics(daemon.metrics());
    log_info("data", "listening",
             {{"endpoint", plane->endpoint_},
              {"kind", config.kind == DataKind::tcp ? "tcp" : "verbs"},
              {"seal", config.seal}});
  } else if (const std::string& control = daemon.config().net_bind;
             !control.empty() && !net::is_local(control)) {
    log_warn("data", "nothing is moved to or from other machines: transfer.bind is not set",
             {{"listen", control}});
  }
  daemon.endpoint().on<wire::data_open>(
      [self](const net::Incoming& in, const wire::data_open& message) { self->asked(in, message); });
  daemon.endpoint().on<wire::data_opened>(
      [self](const net::Incoming& in, const wire::data_opened& message) { self->answered(in, message); });
  return plane;
}

void DataPlane::registered(const wire::Peer& self) {
  if (fabric_) set_self_(self);
}

void DataPlane::peer_up(const net::Member& member) {
  if (member.program == "di-kvd") peers_.insert_or_assign(member.instance, member);
}

void DataPlane::peer_lost(const wire::Peer& peer) {
  const auto found = peers_.find(peer.instance);
  if (found == peers_.end() || found->second.generation != peer.generation) return;
  peers_.erase(found);
  if (fabric_) fabric_->peer_lost(peer);
}

const net::Member* DataPlane::sender(const net::Incoming& in) const {
  const auto found = std::find_if(peers_.begin(), peers_.end(), [&](const auto& item) {
    return item.second.id == in.from.id && item.second.generation == in.from.generation;
  });
  return found == peers_.end() ? nullptr : &found->second;
}

bool DataPlane::must_seal(const net::Member& other) const {
  return config_.seal || other.zone != daemon_.endpoint().self().zone;
}

void DataPlane::want_ticket(const wire::Peer& peer) {
  const auto found = peers_.find(peer.instance);
  if (found == peers_.end() || found->second.generation != peer.generation || found->second.data.empty()) {
    return fabric_->ticket_refused(peer);
  }
  const Status sent = daemon_.endpoint().send(found->second.id, wire::data_open{must_seal(found->second)});
  if (!sent.ok()) fabric_->ticket_refused(peer);
}

void DataPlane::asked(const net::Incoming& in, const wire::data_open& message) {
  const net::Member* member = sender(in);
  if (member == nullptr) return;
  const auto answer = [&](const wire::data_opened& opened) {
    static_cast<void>(daemon_.endpoint().send(in.from.id, opened));
  };
  wire::data_opened opened;
  if (!fabric_) {
    opened.code = static_cast<std::uint16_t>(Code::unsupported);
    return answer(opened);
  }
  const bool seal = message.seal || must_seal(*member);
  const Result<transfer::Ticket> ticket = fabric_->grant({member->instance, member->generation}, seal);
  if (!ticket) {
    opened.code = static_cast<std::uint16_t>(ticket.error().code);
    return answer(opened);
  }
  const auto bytes = [](const auto& array) {
    Bytes copy(array.size());
    std::transform(array.begin(), array.end(), copy.begin(),
                   [](std::uint8_t byte) { return std::byte{byte}; });
    return copy;
  };
  opened.ticket = bytes(ticket->secret);
  opened.ttl_ms = static_cast<std::uint32_t>(to_ms(transfer::ticket_life));
  opened.seal = seal;
  if (seal) opened.key = bytes(ticket->key);
  answer(opened);
}

void DataPlane::answered(const net::Incoming& in, const wire::data_opened& message) {
  const net::Member* member = sender(in);
  if (member == nullptr || !fabric_) return;
  const wire::Peer peer{member->instance, member->generation};
  transfer::Ticket ticket;
  const bool fits = message.ticket.size() == ticket.secret.size() &&
                    message.key.size() == (message.seal ? ticket.key.size() : 0);
  if (message.code != 0 || !fits || (must_seal(*member) && !message.seal)) {
    log_warn("data", "no ticket",
             {{"peer", peer.instance},
              {"code", code_name(static_cast<Code>(message.code))},
              {"sealed", message.seal}});
    return fabric_->ticket_refused(peer);
  }
  const auto copy = [](const Bytes& from, auto& to) {
    std::transform(from.begin(), from.end(), to.begin(),
                   [](std::byte byte) { return static_cast<std::uint8_t>(byte); });
  };
  copy(message.ticket, ticket.secret);
  copy(message.key, ticket.key);
  ticket.seal = message.seal;
  fabric_->ticket(peer, member->data, ticket);
}

void DataPlane::register_metrics(daemon::Metrics& metrics) {
  using Counters = transfer::FabricCounters;
  using Gauges = transfer::FabricGauges;
  const auto counter = [&](std::string_view name, std::string_view help, std::uint64_t Counters::*cell,
                           daemon::Metrics::Labels labels = {}) {
    metrics.counter_from(
        name, help, [this, cell] { return fabric_->counters().*cell; }, std::move(labels));
  };
  counter("di_transfer_written_bytes_total", "Bytes written into arenas of other machines",
          &Counters::written_bytes);
  counter("di_transfer_read_bytes_total", "Bytes read out of arenas of other machines",
          &Counters::read_bytes);
  counter("di_transfer_received_bytes_total", "Bytes that others wrote here", &Counters::received_bytes);
  counter("di_transfer_served_bytes_total", "Bytes that others read here", &Counters::served_bytes);
  counter("di_transfer_failed_total", "Operations that ended with an error", &Counters::ops_failed);
  counter("di_transfer_cancelled_total", "Operations that were cancelled", &Counters::ops_cancelled);
  counter("di_transfer_dials_total", "Data connections tried", &Counters::dials);
  counter("di_transfer_dials_failed_total", "Data connections that did not come about",
          &Counters::dials_failed);
  const std::string_view refused = "Accesses and connections refused here";
  counter("di_transfer_refused_total", refused, &Counters::refused_ticket, {{"why", "ticket"}});
  counter("di_transfer_refused_total", refused, &Counters::refused_transfer, {{"why", "transfer"}});
  counter("di_transfer_refused_total", refused, &Counters::refused_late, {{"why", "late"}});
  counter("di_transfer_refused_total", refused, &Counters::refused_stale, {{"why", "generation"}});
  counter("di_transfer_refused_total", refused, &Counters::refused_bounds, {{"why", "bounds"}});
  counter("di_transfer_refused_total", refused, &Counters::refused_seal, {{"why", "seal"}});
  counter("di_transfer_refused_total", refused, &Counters::malformed, {{"why", "malformed"}});
  counter("di_transfer_refused_total", refused, &Counters::refused_connections, {{"why", "too_many"}});
  metrics.gauge_from("di_transfer_connections", "Data connections, both directions",
                     [this] { return static_cast<std::int64_t>(fabric_->gauges().connections); });
  const auto held = [&](std::string_view what, std::size_t Gauges::*cell) {
    metrics.held_from(what, [this, cell] { return static_cast<std::int64_t>(fabric_->gauges().*cell); });
  };
  held("transfers", &Gauges::ops);
  held("exposures", &Gauges::exposures);
  held("tickets", &Gauges::tickets);
}

}  // namespace di::kvd
