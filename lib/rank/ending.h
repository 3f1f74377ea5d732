// rank/ending.h: final counts of finished legs, kept until their router has acknowledged them, and said
// again every `ending_again` until then.
//
// Owner: the rank's core.  Bound: endings_max; above it the oldest is dropped and counted (a router
// that never acknowledges is broken).  A router that is lost takes its endings with it: it re-enters
// or has ended the request on its own account.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "base/time.h"
#include "wire/envelope.h"

namespace di::rank {

inline constexpr std::size_t endings_max = 65536;
// Far above any round trip: only a message that was dropped is repeated.
inline constexpr Duration ending_again = seconds(5);

// The answer to request_stop for a request that the rank does not have (any more): the router need not
// wait for its kill timer.  Not kept.
[[nodiscard]] wire::Envelope ending_of_unknown(const wire::Envelope& stop, wire::Leg leg);

class Endings {
 public:
  // Records the ending and returns the message to send now.
  wire::Envelope add(const std::string& router, std::uint32_t generation, const wire::Scope& scope,
                     const wire::request_done& done, Instant now);
  void acknowledge(const std::string& router, const wire::Scope& scope);
  void forget(const std::string& router);
  // Everything still unacknowledged by `router`, to be sent again after a reconnect.
  [[nodiscard]] std::vector<wire::Envelope> of(const std::string& router) const;
  // What has waited for ending_again, to be sent again now.
  [[nodiscard]] std::vector<wire::Envelope> due(Instant now);
  [[nodiscard]] Instant next_due() const {
    return again_.empty() ? instant_never : again_.begin()->first.first;
  }
  [[nodiscard]] std::size_t count() const { return kept_.size(); }
  [[nodiscard]] std::uint64_t dropped() const { return dropped_; }

 private:
  using Name = std::tuple<std::string, RequestId, std::uint16_t>;
  struct Kept {
    wire::Envelope message;
    std::uint64_t age = 0;
    Instant again;
  };
  std::map<Name, Kept> kept_;
  std::map<std::uint64_t, Name> by_age_;
  std::map<std::pair<Instant, std::uint64_t>, Name> again_;
  std::uint64_t next_age_ = 0;
  std::uint64_t dropped_ = 0;

  void erase(const Name& name);
};

}  // namespace di::rank
