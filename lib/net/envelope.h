// net/envelope.h: between the messages of an Endpoint and the wire::Envelope that pure cores take and give.
//
// Owner: loop thread.
#pragma once

#include <functional>
#include <string>

#include "net/peer.h"
#include "wire/envelope.h"

namespace di::net {

// `instance` is the sender's name, which the caller knows from its peer_up.
[[nodiscard]] wire::Envelope envelope_of(const Incoming& in, std::string instance);

// Sends to the instance the envelope names, if it is up in the generation meant (0: whichever is up).
// Errors: unreachable, as Endpoint::send; the peer's loss is an event of its own and releases what the
// message was about, so cores need not hear of it twice.
Status envelope_send(Endpoint& endpoint, const wire::Envelope& envelope);

// Lets `handler` have every message of the types Ms, undecoded.
template <class... Ms>
void take_messages(Endpoint& endpoint, const std::function<void(const Incoming&)>& handler) {
  (endpoint.on<Ms>([handler](const Incoming& in, const Ms&) { handler(in); }), ...);
}

}  // namespace di::net
