// transfer/links.h: the peers that the operations of a fabric go to, whatever moves their bytes.
//
// A link, one per peer:
//   state       event                               next
//   idle        an operation                        asked; want_ticket
//   asked       a ticket                            connecting
//   connecting  connected                           greeting; hello
//   greeting    welcome of the right process        up; its operations go
//   up          the connection ends                 idle, or asked when operations wait
//   asked, connecting, greeting
//               refusal, error, dial_wait is over   pause; its operations end as unreachable
//   pause       an operation                        pause; it ends as unreachable
//   pause       the pause is over                   asked when somebody cares (dial_interest), or gone
//   any         the peer is lost                    gone; its operations end as unreachable
// After a failed dial operations end at once until the link is up again.
//
// Pure, but for the line that tells of a failed dial.  Owner: the thread of the fabric.  Bounds: peers_max links.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "base/assert.h"
#include "base/time.h"
#include "transfer/budget.h"
#include "transfer/exposure.h"
#include "transfer/fabric.h"

namespace di::transfer {

enum class LinkPhase : std::uint8_t { idle, asked, connecting, greeting, up, pause };

// Bytes a second of the time in which a link is open and has operations, also while they wait for the total rate or
// for the turns of others: what counts is what they see.
class LinkRate {
 public:
  [[nodiscard]] bool busy() const { return busy_from_.has_value(); }
  void begin(Instant now) {
    if (!busy_from_) busy_from_ = now;
  }
  // After `bytes` have moved; `goes_on`: there are more to move.  The rate, when it is known anew.
  std::optional<double> moved(std::uint64_t bytes, bool goes_on, Instant now);
  // What was measured, of a stall mostly, says nothing of the next connection.
  void forget() { *this = {}; }

 private:
  // Since the last sample.
  std::optional<Instant> busy_from_;
  Duration busy_{0};
  std::uint64_t bytes_ = 0;
  double bytes_per_s_ = 0;
};

struct LinkBase {
  Peer peer;
  LinkPhase phase = LinkPhase::idle;
  Ticket ticket;  // of the dial
  unsigned failures = 0;
  bool told = false;  // at level warn, that dials fail
  Instant until;      // of the dial, or of the pause
  Instant wanted_at;  // last operation
  std::array<std::deque<OpId>, classes> waiting;
  std::uint64_t under_way_bytes = 0;
  Instant moved_at;
  LinkRate rate;

  [[nodiscard]] bool waits() const {
    return std::any_of(waiting.begin(), waiting.end(), [](const auto& ops) { return !ops.empty(); });
  }
  // Operations end at once.
  [[nodiscard]] bool failed() const { return phase != LinkPhase::up && failures > 0; }
  // `why` is empty when it was told elsewhere.
  void dial_failed(Instant now, Duration pause_min, Duration pause_max, std::string_view why);
  // Why a dial that took too long failed.
  [[nodiscard]] std::string_view late() const;
  void connected(Instant now) {
    phase = LinkPhase::up;
    failures = 0;
    told = false;
    if (waits()) rate.begin(now);
  }
};

// `Link` is a LinkBase with a pointer `connection`, null while it has none.
template <class Link>
class Links {
 public:
  [[nodiscard]] Link* find(const Peer& peer) {
    const auto at = links_.find(peer);
    return at == links_.end() ? nullptr : &at->second;
  }
  // A new one; null when there are peers_max that are in use.
  [[nodiscard]] Link* add(const Peer& peer) {
    if (links_.size() >= peers_max && !remove_unused()) return nullptr;
    Link& link = links_[peer];
    link.peer = peer;
    ring_.push_back(&link);
    return &link;
  }
  void remove(Link& link) {
    DI_ASSERT(link.connection == nullptr && !link.waits());
    std::erase(ring_, &link);
    links_.erase(Peer(link.peer));
  }
  [[nodiscard]] const std::vector<Link*>& all() const { return ring_; }
  // Some link waits for a ticket, a connection or the end of a pause.
  [[nodiscard]] bool timed() const {
    return std::any_of(ring_.begin(), ring_.end(), [](const Link* link) {
      return link->phase != LinkPhase::idle && link->phase != LinkPhase::up;
    });
  }

  // Of each class, the link whose turn it is among those that have a unit to move.
  struct Turn {
    Budget::Heads heads{};
    std::array<std::size_t, classes> at{};
  };
  // `bytes_of(link, op)`: of the next unit, the head of the link's queue; 0: none may go now.
  template <class BytesOf>
  [[nodiscard]] Turn turn(const BytesOf& bytes_of) const {
    Turn turn;
    for (std::size_t cls = 0; cls < classes; ++cls) {
      Budget::Head& head = turn.heads[cls];
      for (std::size_t i = 0; i < ring_.size() && head.bytes == 0; ++i) {
        const std::size_t at = (next_[cls] + i) % ring_.size();
        const Link& link = *ring_[at];
        if (link.waiting[cls].empty() || link.phase != LinkPhase::up) continue;
        head.backlog = true;
        head.bytes = bytes_of(link, link.waiting[cls].front());
        turn.at[cls] = at;
      }
    }
    return turn;
  }
  // It has its turn; the next is another's.
  Link& take(const Turn& turn, Class taken) {
    const auto cls = static_cast<std::size_t>(taken);
    next_[cls] = turn.at[cls] + 1;
    return *ring_[turn.at[cls]];
  }

 private:
  bool remove_unused() {
    for (Link* link : ring_) {
      if (link->connection != nullptr || link->waits() || link->phase == LinkPhase::asked) continue;
      remove(*link);
      return true;
    }
    return false;
  }

  std::map<Peer, Link> links_;
  std::vector<Link*> ring_;
  std::array<std::size_t, classes> next_{};
};

}  // namespace di::transfer
