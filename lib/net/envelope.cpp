#include "net/envelope.h"

namespace di::net {

wire::Envelope envelope_of(const Incoming& in, std::string instance) {
  wire::Envelope envelope;
  envelope.peer = std::move(instance);
  envelope.peer_generation = in.from.generation;
  envelope.scope = {in.header.request, in.header.attempt, in.header.rank, in.header.deadline_ms};
  envelope.number = in.header.number;
  envelope.body.assign(in.body.begin(), in.body.end());
  return envelope;
}

Status envelope_send(Endpoint& endpoint, const wire::Envelope& envelope) {
  const Member* peer = endpoint.peer_by_name(envelope.peer);
  if (peer == nullptr || (envelope.peer_generation != 0 && peer->generation != envelope.peer_generation)) {
    return Error{Code::unreachable, 0, envelope.peer + " is not up"};
  }
  SendOptions options;
  options.request = envelope.scope.request;
  options.attempt = envelope.scope.attempt;
  options.rank = envelope.scope.rank;
  options.deadline_ms = envelope.scope.deadline_ms;
  return endpoint.send_body(peer->id, envelope.number, envelope.body, options);
}

}  // namespace di::net
