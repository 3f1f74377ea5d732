// host/rebuild.h: columns of a stripe that cannot be read, made out of the others (kv/stripe.h).
//
// A rebuild, one per stripe whose pages are wanted here, and one per repair; it gathers as many columns as
// the stripe has stored data columns, from wherever they cost least: the parts of its own pages that come,
// pages of the stripe that are in the arena or on their way there, and else scratch slots, into which stores
// write data columns, then parity, those of slow stores last.
//   state      event                                             next
//   (none)     a page lacks columns                              gathering; pages pinned, columns read
//   gathering  another page of the stripe lacks columns          gathering, for both
//   gathering  a column fails, its page is gone, its store lost  gathering; the next best column is read
//   gathering  too few are left without those that were skipped  gathering; they are read after all
//   gathering  too few columns are left                          (none); its pages fail
//   gathering  a layer group of enough columns is there          decoding
//   decoding   a step                                            the group is in its slots: gathering for the
//                                                                next; (none) after the last
//   decoding   a column does not match its checksum              gathering without it; di-meta is told
//   any        nobody wants its pages any more, they came        (none)
//   any        the lease is over                                 (none); its pages fail
// With (none) scratch is scrapped, pages are let go of, reads are given up and the lease is dropped.
//
// A missing column is decoded into its page's slot only when no store can write it there any more.  Every
// column that is used is compared with the plan's checksums while it is decoded, and so is what is made; a
// page then compares its own as with any other arrival, group after group.
//
// A hedge is a rebuild of a column that is late: it reads at most hedge_reads_max parity columns, and when it
// could decode everything, out of columns that were compared, it says so; its page then gives the late read up,
// or has it meanwhile.  Late is not lost: when columns are, and there is not enough for both, it waits for the late.
//
// Owner: the core of a di-kvd host.  Bounds: rebuilds_max; scratch of one stripe each; one layer group a step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "host/hedge.h"
#include "host/lease.h"
#include "host/pages.h"
#include "host/port.h"
#include "host/read.h"
#include "kv/stripe.h"
#include "wire/messages.h"

namespace di::host {

// What a plan or a repair says of a stripe.
struct StripePlan {
  std::uint64_t stripe = 0;
  kv::StripeShape shape;
  std::vector<std::uint32_t> page_crcs;  // page after page
  wire::StripeCode code;
  std::vector<wire::Column> columns;   // that can be read
  std::vector<Key> first_keys;         // of each page; zero when the plan does not name it
  std::vector<Hedge::Source> sources;  // of the columns

  // Errors: invalid.
  static Result<std::shared_ptr<StripePlan>> of(const kv::Layout& layout, const wire::PlannedStripe& planned);
  [[nodiscard]] std::uint32_t crc(std::uint32_t column, std::uint32_t group) const;
  [[nodiscard]] std::uint64_t page_id(std::uint32_t column) const {
    return stripe << 8 | (shape.is_parity(column) ? 0 : shape.page_of(column));
  }
};
using StripeRef = std::shared_ptr<const StripePlan>;

struct RebuildCounters {
  std::uint64_t rebuilds = 0;         // begun
  std::uint64_t failed = 0;           // pages for which too few columns were left
  std::uint64_t columns = 0;          // made
  std::uint64_t bytes = 0;            // made
  std::uint64_t scratch_reads = 0;    // columns read for nothing but this
  std::uint64_t columns_corrupt = 0;  // did not match when they were used
};

class Rebuilds {
 public:
  struct Limits {
    std::size_t rebuilds_max = 64;
  };
  static constexpr std::uint32_t hedge_reads_max = 2;

  struct Progress {
    enum class Kind : std::uint8_t {
      group,      // the page's next group is there and verified
      failed,     // it will not come
      decodable,  // of a hedge
      wrong,      // of a repair: every source is what the plan says, and what they make is not
      unskip,     // columns of it that were skipped are needed after all: read them, then drop() it here
    };
    Kind kind = Kind::group;
    std::uint32_t slot = 0;   // of a page
    std::uint32_t group = 0;  // the group
    std::uint64_t repair =
        0;  // of columns, instead of a slot: `group` is the last one, or it failed, or is wrong
  };
  // What there is of a part of a page.
  struct Part {
    std::uint32_t groups = 0;  // that came
    bool missing = false;
    bool skipped = false;  // missing, but it could be read
    bool late = false;     // missing for a hedge, but it comes
    Reads::Source source{};
  };

  Rebuilds(const Limits& limits, Pages& pages, ArenaPort& port, const Peers& peers, Reads& reads,
           Leases& leases, Hedge& hedge);

  // A filling page, page `index` of the stripe, lacks some of its parts.
  void add(const StripeRef& plan, std::uint32_t slot, std::uint32_t index, std::vector<Part> parts,
           std::uint8_t priority, std::uint64_t lease);
  // The same for parts that are only late; false when that is not worth it.
  bool hedge(const StripeRef& plan, std::uint32_t slot, std::uint32_t index, std::vector<Part> parts,
             std::uint8_t priority, std::uint64_t lease);
  // Groups [0, groups) of a part came, or it will not come.
  void part_moved(std::uint32_t slot, std::uint32_t part, std::uint32_t groups);
  void part_missing(std::uint32_t slot, std::uint32_t part);
  // The page is not wanted any more, failed, or came.
  void drop(std::uint32_t slot);
  [[nodiscard]] bool has(std::uint32_t slot) const { return by_slot_.contains(slot); }

  // Columns into the scratch slots of a repair, which are the caller's.
  void repair(std::uint64_t repair, const StripeRef& plan,
              const std::vector<std::pair<std::uint16_t, std::uint32_t>>& columns, std::uint8_t priority,
              std::uint64_t lease);
  void drop_repair(std::uint64_t repair);
  // Nothing may be read under it any more.
  void lease_over(std::uint64_t lease);

  void read_progress(const Reads::Progress& progress);
  // Looks for columns that are missing; true when it asked for some.  After every event.
  bool pump();
  // Decodes one layer group of one stripe; false when there was none.
  bool step();
  [[nodiscard]] bool has_step() const;

  [[nodiscard]] std::vector<Progress> take_progress() { return std::exchange(progress_, {}); }
  // Pages that are not needed any more: the caller unpins them, which may end their reads.
  [[nodiscard]] PinSet take_released() { return std::exchange(released_, {}); }

  [[nodiscard]] std::size_t count() const { return rebuilds_.size(); }
  [[nodiscard]] std::size_t pins() const;
  [[nodiscard]] const RebuildCounters& counters() const { return counters_; }
  // Adds pins, scratch slots, reads and users of leases; says what disagrees.
  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins, std::set<std::uint32_t>& scratch,
                             std::set<std::uint64_t>& reads,
                             std::map<std::uint64_t, std::size_t>& leases) const;

 private:
  struct Target {
    std::optional<std::uint32_t> index;  // page of the stripe; none: one column of a repair
    std::vector<Part> parts;             // of a page
    std::uint16_t column = 0;            // of a repair
    std::uint32_t group = 0;             // of a repair: the next to make
    bool late = false;                   // a hedge: nothing is decoded yet
    bool told = false;                   // that it could be
  };
  struct Column {
    std::uint64_t transfer = 0;  // 0: all there
    std::uint32_t groups = 0;
    Reads::Source source;
  };
  struct Rebuild {
    StripeRef plan;
    std::uint8_t priority = 1;
    std::uint64_t lease = 0;
    std::uint64_t repair = 0;
    std::map<std::uint32_t, Target> targets;       // by slot
    std::map<std::uint32_t, std::uint32_t> pages;  // page of the stripe -> slot in the arena, pinned
    std::map<std::uint32_t, std::uint32_t> rooms;  // page, or k + parity column -> scratch slot
    std::map<std::uint16_t, Column> columns;       // in scratch
    std::set<std::uint16_t> unusable;
  };
  using Id = std::uint64_t;
  using Found = std::map<Id, Rebuild>::iterator;

  Found begin(const StripeRef& plan, std::uint8_t priority, std::uint64_t lease);
  void join(Found found, std::uint32_t slot, std::uint32_t index, std::vector<Part> parts, bool late);
  void erase_target(Found found, std::uint32_t slot);
  // A hedge of which nothing is late any more, and some is missing, is one no more.
  void settle_hedge(Target& target);
  // It waits for what is late after all, and makes only what is lost.
  void call_off(Found found, std::uint32_t slot);
  void end(Found found);
  // Missing columns of a target.
  [[nodiscard]] static std::vector<std::uint16_t> missing(const Rebuild& rebuild, const Target& target);
  [[nodiscard]] std::uint32_t next_group(std::uint32_t slot, const Target& target) const;
  // Groups of a column that are there; nothing when it does not come.
  [[nodiscard]] std::optional<std::uint32_t> groups_of(const Rebuild& rebuild, std::uint16_t column) const;
  [[nodiscard]] Strip strip_of(const Rebuild& rebuild, std::uint16_t column, std::uint32_t group) const;
  [[nodiscard]] Strip strip_in(const StripePlan& plan, std::uint32_t slot, std::uint16_t column,
                               std::uint32_t group) const;
  // Every byte of a column is there and as the plan has it.
  [[nodiscard]] bool sound(const Rebuild& rebuild, std::uint16_t column) const;
  // The same of the parts of its pages that came.
  [[nodiscard]] bool parts_sound(const Rebuild& rebuild) const;
  [[nodiscard]] std::uint32_t coming(const Rebuild& rebuild) const;
  [[nodiscard]] std::uint32_t there(const Rebuild& rebuild, std::uint32_t group) const;
  // Pins pages of the stripe that the arena has or awaits.
  void find_pages(Rebuild& rebuild);
  // The readable columns that nobody has asked for, data first or parity first.
  [[nodiscard]] std::vector<wire::Column> candidates(const Rebuild& rebuild, bool parity_first) const;
  // False when there is no slot for it.
  bool read_column(Id id, Rebuild& rebuild, const wire::Column& column);
  // False when too few columns are left.
  bool gather(Id id, Rebuild& rebuild);
  // Of a target: nothing is missing but the step.
  [[nodiscard]] bool ready(const Rebuild& rebuild, std::uint32_t slot, const Target& target) const;
  void decode(Found found, std::uint32_t group, const std::vector<std::uint32_t>& slots);
  void column_bad(Rebuild& rebuild, std::uint16_t column, Code code);
  void fail(Found found);

  const Limits limits_;
  Pages& pages_;
  ArenaPort& port_;
  const Peers& peers_;
  Reads& reads_;
  Leases& leases_;
  Hedge& hedge_;
  std::map<Id, Rebuild> rebuilds_;
  Id next_id_ = 1;
  std::map<std::uint64_t, Id> by_stripe_;  // of pages
  std::map<std::uint64_t, Id> by_repair_;
  std::map<std::uint32_t, Id> by_slot_;  // targets that are pages
  std::map<std::uint64_t, std::pair<Id, std::uint16_t>> by_transfer_;
  std::vector<Progress> progress_;
  PinSet released_;
  RebuildCounters counters_;
};

}  // namespace di::host
