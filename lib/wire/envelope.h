// wire/envelope.h: a message together with whom it comes from or goes to, as the pure cores and the
// simulator handle it.  Shells fill in the rest of the header (net/peer).
#pragma once

#include <compare>
#include <string>

#include "wire/codec.h"

namespace di::wire {

// The request-scoped part of the header.
struct Scope {
  RequestId request;
  U16 attempt = 0;
  U16 rank = 0;
  U32 deadline_ms = 0;  // remaining; 0 = none

  bool operator==(const Scope&) const = default;
};

// One start of an instance.
struct Peer {
  std::string instance;
  U32 generation = 0;

  friend auto operator<=>(const Peer&, const Peer&) = default;
};

struct Envelope {
  std::string peer;         // the other side's instance: sender of an incoming, receiver of an outgoing one
  U32 peer_generation = 0;  // its generation; 0 on an outgoing message = whichever is up
  Scope scope;
  U16 number = 0;
  Bytes body;

  template <class M>
  static Envelope make(std::string peer, U32 peer_generation, const Scope& scope, const M& message) {
    return Envelope{std::move(peer), peer_generation, scope, M::number, body_encode(message)};
  }
  // Decodes the body as M; the caller has compared `number`.
  template <class M>
  [[nodiscard]] Decoded<M> as() const {
    DI_ASSERT(number == M::number);
    return body_decode<M>(body);
  }
};

}  // namespace di::wire
