// directory/placement.h: on which volumes the columns of a stripe go.
//
// A target is one volume of one store node.  A placement is a record of as many targets as the geometry has
// columns, made so that every pair of targets is in about equally many records: what a lost node had is then
// read from everybody.  Column i of a stripe goes to member (i + stripe) mod members, so that parity and
// first pages are everywhere.
//
//   node   at most one column, unless the geometry is declared for a laboratory (`lab`); there the columns
//          are spread as evenly as the nodes allow
//   rack, host label
//          at most m columns while there are enough of them; with fewer the loss of one may lose stripes,
//          which shortage() says
//
// A member that cannot take a column, or whose write budget is used up, is stood in for, stripe by stripe, while it
// may come back.  Of those that are as good for nodes, racks and hosts, and for write budgets, each stripe draws two,
// and the one with more room stands in: what a store that is away would have had goes to all others in about equal
// shares (within 5 % of the mean, placement_test), and to none more than twice its share, however empty it is.
// `replace` puts another into its records for good (their generation counts up).  Records are made anew when a target
// comes: it takes part in new stripes only, and nothing moves for it.  A stripe's own list of columns is the
// truth about it; no record is needed to read one.
//
// Slow start: a target that is new, or back after it was replaced, takes a tenth of its columns at first and
// all of them after slow_start; of the others a target that is not new stands in for it, where there is one
// that is no worse for racks and nodes.  Its time counts from the first stripe that it could have had, and
// shares are taken against that of the target that is there for longest: a fleet that starts as a whole has
// no slow start.
//
// Pure: time is given; equal calls give equal answers.  Owner: the directory's thread.  Bounds: targets_max,
// records_max.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/time.h"
#include "directory/stripes.h"

namespace di::directory {

struct Labels {
  std::string host;
  std::string rack;
  std::string zone;
  bool operator==(const Labels&) const = default;
};

struct Target {
  std::uint32_t store = 0;  // number of index.h: the node
  std::uint16_t volume = 0;
  friend auto operator<=>(const Target&, const Target&) = default;
};

class Placements {
 public:
  static constexpr std::size_t targets_max = 65536;
  static constexpr std::size_t records_max = 1024;
  static constexpr std::size_t records_per_target = 100;
  // Of the targets that are in the fewest records, so many are compared for the next place in one.
  static constexpr std::size_t candidates_max = 64;

  // The first share of a new target, in thousandths of its columns.
  static constexpr std::uint32_t slow_start_first = 100;

  struct Options {
    Geometry geometry{};
    bool lab = false;
    Duration slow_start{0};  // 0: the full share at once
  };
  struct State {
    Labels labels;
    bool usable = false;            // takes new columns
    std::uint64_t bytes_total = 0;  // 0: not known
    bool spent = false;             // others are better, for its write budget
  };
  struct Record {
    std::uint32_t id = 0;
    std::uint32_t generation = 1;
    std::vector<Target> members;
  };

  explicit Placements(Options options) : options_(options) {}

  // A new target, or another state of one.  False when targets_max is reached.
  bool set(Target target, const State& state);
  // Bytes of columns that are or will be there.
  void add_bytes(Target target, std::uint64_t bytes);
  void remove_bytes(Target target, std::uint64_t bytes);
  // It will not be back soon: others take its places in the records, where there are any.
  void replace(Target target);

  // Makes the records anew.
  void rebuild() { stale_ = true; }

  struct Choice {
    std::vector<Target> targets;    // one for each stored column, in their order
    std::uint32_t unreachable = 0;  // so many of them cannot take one now
    std::uint32_t spent = 0;        // so many should not, and nobody stands in
  };
  // nullopt: not enough nodes, or more than m columns would have nowhere to go.
  [[nodiscard]] std::optional<Choice> choose(std::uint64_t stripe, const StripeForm& form, Instant now);
  // Another place for one column; `others` has the rest of the stripe, `not_these` what may not be taken.
  [[nodiscard]] std::optional<Target> substitute(std::uint64_t stripe, std::span<const Target> others,
                                                 std::span<const Target> not_these) const;

  // What the nodes cannot give, in words; empty when nothing is missing: unwritten(), or what is not as safe as it
  // should be.
  [[nodiscard]] std::string shortage() const;
  // What is not written at all, for want of nodes that are known or take columns now.
  [[nodiscard]] std::string unwritten() const;
  // What of a whole stripe has no place until other nodes take columns.
  [[nodiscard]] std::string lack() const;
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] bool usable(Target target) const;
  [[nodiscard]] bool spent(Target target) const { return targets_.at(target).state.spent; }
  [[nodiscard]] std::uint64_t bytes_total(Target target) const;
  // Of the columns there.
  [[nodiscard]] std::uint64_t bytes(Target target) const;
  [[nodiscard]] std::size_t nodes() const;                       // known
  [[nodiscard]] bool empty() const { return targets_.empty(); }  // no node was ever known
  [[nodiscard]] const std::vector<Record>& records() const { return records_; }
  [[nodiscard]] std::size_t generations() const { return generations_; }  // substitutions in records
  // Columns that went elsewhere because their target is new.
  [[nodiscard]] const std::uint64_t& passed_over() const { return passed_over_; }
  // What a target takes of the columns that are meant for it, in thousandths.
  [[nodiscard]] std::uint32_t share(Target target, Instant now) const;

 private:
  struct Known {
    State state;
    std::uint64_t bytes = 0;
    std::uint32_t records = 0;
    bool replaced = false;
    std::optional<Instant> began;  // of its slow start
  };
  // How a place beside `members` is: columns of the node, then above what a rack and a host may lose.
  using Crowd = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;
  [[nodiscard]] Crowd crowd(Target candidate, std::span<const Target> members) const;
  // Starts the clocks of those that have become usable.
  void start_clocks(Instant now);
  // The stripe is one of those that a new target does not take.
  [[nodiscard]] bool passes_over(std::uint64_t stripe, Target target, Instant now) const;
  void slow_start(std::uint64_t stripe, std::vector<Target>& targets, Instant now);
  void build();
  [[nodiscard]] Record build_one(Target seed);
  // The best of `candidates` beside `members` in a record; nullopt when none may be there.
  [[nodiscard]] std::optional<Target> best(std::span<const Target> candidates,
                                           std::span<const Target> members) const;
  [[nodiscard]] std::uint32_t shared(Target a, Target b) const;
  [[nodiscard]] std::size_t nodes_usable() const;
  [[nodiscard]] std::uint64_t fill(const Known& known) const;

  Options options_;
  std::map<Target, Known> targets_;
  std::vector<Record> records_;
  std::map<std::pair<Target, Target>, std::uint32_t> pairs_;  // records with both, a < b
  bool stale_ = false;                                        // the records do not know every target
  std::uint32_t next_record_ = 1;
  std::size_t cursor_ = 0;
  std::size_t generations_ = 0;
  std::set<Target> fresh_;               // usable, and their clocks do not run
  Instant first_began_ = instant_never;  // of the clocks of those that are not replaced
  Instant slow_until_{};                 // then every share is full
  std::uint64_t passed_over_ = 0;
};

}  // namespace di::directory
