// request/rank_table.h: what a router knows of the ranks it may use, and which one it takes.
//
// Owner: the router's core.  Credits are totals (rank/credit.h); what this router sent
// counts against them at once, so two requests never share one credit.  The choice is the rank with
// the least outstanding predicted work of this router's own requests, then the fewest of them; location
// comes after that (design.md, decision 15: it breaks ties and never beats the queue): what the rank's
// host holds of the prefix, how far a seat is from the pages; then what ranks report of their load, which
// lags; then the name.  Only a request whose hand-over was given up because its link is too slow asks for
// a host first (Wish).  Bound: ranks_max.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "base/assert.h"
#include "wire/messages.h"

namespace di::request {

inline constexpr std::size_t ranks_max = 65536;

struct RankName {
  std::string instance;
  std::uint16_t rank = 0;

  friend auto operator<=>(const RankName&, const RankName&) = default;
  // "di-decode.0/3"
  [[nodiscard]] std::string text() const { return instance + "/" + std::to_string(rank); }
};

// Labels of a Member.
struct Place {
  std::string host;
  std::string rack;
  std::string zone;
};
// 0 the same host, 1 the same rack, 2 the same zone, 3 another zone.
[[nodiscard]] std::uint32_t distance(const Place& a, const Place& b);

struct RankInfo;

// What one request would rather have, and whom it need not ask.
struct Wish {
  std::map<std::string, std::uint32_t> held;  // blocks of its prefix, by the di-kvd whose arena has them
  std::string near_host;                      // label; set when a link to there was too slow
  std::map<RankName, std::uint32_t> never;    // said that they can never take it, and in which generation

  [[nodiscard]] bool leaves_out(const RankName& name, const RankInfo& info) const;
};

struct RankInfo {
  std::uint32_t generation = 0;
  bool decode = false;
  std::string model;
  Place place;
  wire::rank_credit credit;
  std::uint64_t sent_requests = 0;  // binds or seat requests since both generations began
  std::uint64_t sent_us = 0;
  std::uint64_t outstanding_us = 0;  // predicted work of this router's requests that are there now
  std::uint32_t outstanding = 0;     // and their number
  std::uint64_t outstanding_tokens = 0;

  // By its newest credit it takes one more bind.
  [[nodiscard]] bool takes_bind() const {
    return !credit.draining && sent_requests < credit.granted_requests && sent_us < credit.granted_us;
  }
  // It takes one more question for a seat, if its tokens fit.
  [[nodiscard]] bool takes_seat() const {
    return !credit.draining && sent_requests < credit.granted_requests;
  }
  [[nodiscard]] std::uint64_t room_tokens() const {
    return credit.kv_tokens_max - std::min(outstanding_tokens, credit.kv_tokens_max);
  }
};

class RankTable {
 public:
  // An instance with `ranks` ranks came up; its accounts start over.
  void add(const std::string& instance, std::uint32_t generation, std::uint16_t ranks, bool decode,
           const std::string& model, const Place& place);
  void remove(const std::string& instance);
  // False when the credit is old or from an unknown rank.
  bool credit(const RankName& name, std::uint32_t generation, const wire::rank_credit& credit);

  // The prefill rank to bind to, if any has credit.
  [[nodiscard]] std::optional<RankName> choose_prefill(const std::string& model, const Wish& wish) const;
  // The decode rank to ask for a seat of `tokens` known tokens, whose pages are at `from`; `avoid` is tried
  // last.  What is larger than every rank is asked of one all the same: its refusal ends the request,
  // waiting would not.  Walks over the ranks only when one of them has a seat for it: those that wait ask often.
  [[nodiscard]] std::optional<RankName> choose_decode(const std::string& model, std::uint64_t tokens,
                                                      const Place& from, const Wish& wish,
                                                      const std::optional<RankName>& avoid);
  [[nodiscard]] bool has_seat(const std::string& model, std::uint64_t tokens) const;
  // The di-kvd whose ranks will most likely take a request that waits: for a prefetch.  Empty: none.
  [[nodiscard]] std::string choose_host(const std::string& model, const Wish& wish) const;
  // Counts a bind or seat request; returns its number.
  std::uint64_t sent(const RankName& name, std::uint64_t cost_us, std::uint64_t tokens);
  // The request is no longer there.
  void returned(const RankName& name, std::uint32_t generation, std::uint64_t cost_us, std::uint64_t tokens);

  [[nodiscard]] const RankInfo* find(const RankName& name) const;
  [[nodiscard]] const std::map<RankName, RankInfo>& all() const { return ranks_; }
  // At least one rank of the kind is up and not draining.  Asked with every message: no walk over the ranks.
  [[nodiscard]] bool serves(const std::string& model, bool decode) const;
  // One of prefill is, on this host.
  [[nodiscard]] bool reads_at(const std::string& model, const std::string& host) const;
  // Of the ranks of the kind that take work one has said that it can never take this request (Wish), and so have
  // all others whose pool has room for `tokens` known tokens; those of prefill say so themselves.
  [[nodiscard]] bool never_taken(const std::string& model, bool decode, std::uint64_t tokens,
                                 const Wish& wish) const;
  [[nodiscard]] std::uint64_t outstanding() const;
  // Walks over the ranks for a seat.
  [[nodiscard]] std::uint64_t seat_walks() const { return seat_walks_; }

 private:
  // What is asked of all ranks of a model without a walk over them.
  struct Sum {
    std::array<std::uint32_t, 2> open{};      // prefill and decode ranks that take work
    std::multiset<std::uint64_t> capacities;  // kv_tokens_max of the decode ranks
    std::multiset<std::uint64_t> rooms;       // room_tokens of those that take a seat
  };
  // Out before a change of the rank, and in after it.
  void count_in(const RankInfo& info);
  void count_out(const RankInfo& info);

  std::map<RankName, RankInfo> ranks_;
  std::map<std::string, Sum> sums_;  // by model
  std::uint64_t seat_walks_ = 0;
};

}  // namespace di::request
