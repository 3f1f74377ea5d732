// request/rank_table.h: what a router knows of the ranks it may use, and which one it takes.
//
// Owner: the router's core.  Credits are totals that only grow (rank/credit.h); what this router sent
// counts against them at once, so two requests never share one credit.  The choice is the rank with
// the least outstanding predicted work of this router's own requests, then the fewest of them, then by
// name; reported loads only break ties, because they lag.  Bound: ranks_max.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
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

struct RankInfo {
  std::uint32_t generation = 0;
  bool decode = false;
  std::string model;
  wire::rank_credit credit;
  std::uint64_t sent_requests = 0;   // binds or seat requests since both generations began
  std::uint64_t sent_us = 0;
  std::uint64_t outstanding_us = 0;  // predicted work of this router's requests that are there now
  std::uint32_t outstanding = 0;     // and their number
  std::uint64_t outstanding_tokens = 0;
};

class RankTable {
 public:
  // An instance with `ranks` ranks came up; its accounts start over.
  void add(const std::string& instance, std::uint32_t generation, std::uint16_t ranks, bool decode,
           const std::string& model);
  void remove(const std::string& instance);
  // False when the credit is old or from an unknown rank.
  bool credit(const RankName& name, std::uint32_t generation, const wire::rank_credit& credit);

  // The prefill rank to bind to, if any has credit.
  [[nodiscard]] std::optional<RankName> choose_prefill(const std::string& model) const;
  // The decode rank to ask for a seat of `tokens` known tokens; `avoid` is tried last.  What is larger than
  // every rank is asked of one all the same: its refusal ends the request, waiting would not.
  [[nodiscard]] std::optional<RankName> choose_decode(const std::string& model, std::uint64_t tokens,
                                                      const std::optional<RankName>& avoid) const;
  // Counts a bind or seat request; returns its number.
  std::uint64_t sent(const RankName& name, std::uint64_t cost_us, std::uint64_t tokens);
  // The request is no longer there.
  void returned(const RankName& name, std::uint32_t generation, std::uint64_t cost_us, std::uint64_t tokens);

  [[nodiscard]] const RankInfo* find(const RankName& name) const;
  [[nodiscard]] const std::map<RankName, RankInfo>& all() const { return ranks_; }
  // At least one rank of the kind is up and not draining.
  [[nodiscard]] bool serves(const std::string& model, bool decode) const;
  [[nodiscard]] std::uint64_t outstanding() const;

 private:
  std::map<RankName, RankInfo> ranks_;
};

}  // namespace di::request
