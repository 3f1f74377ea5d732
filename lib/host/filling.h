// host/filling.h: pages on their way into the arena, from the store or from another host's arena.
//
// A filling, one per page; every fetch of its keys shares it.  From the store it is read as one column or as its
// parts (kv/stripe.h), each by a read (host/read.h):
//   state       event                                            next
//   (none)      a plan says where every column is                coming; a read per column
//   (none)      some columns cannot be read, others make them    rebuilding; a read per column that can
//   coming      a group of every column came and is right        coming; told
//   coming      the last one                                     (none), sealed
//   coming      a column fails, has wrong bytes, its store is    rebuilding (host/rebuild.h), where parity is;
//               lost                                             else (none), failed
//   rebuilding  a group is made and right                        rebuilding; told
//   rebuilding  the last one                                     (none), sealed
//   rebuilding  more columns are missing than can be made        rebuilding, with those that were skipped read;
//                                                                else (none), failed
//   coming      a column is late, and a hedge could make it      rebuilding; the late read is given up
//   any         nobody wants the page, its lease is over         (none), failed
// It holds the lease of its plan from the first of its reads to its end: between two of them nobody else may.
// A page that failed is in quarantine while somebody may write into it.  A column on a slow store is skipped,
// which is to say that it counts as one that cannot be read, where others make it at no more reads; one that is
// late is hedged (host/hedge.h), once.
//
// What happens is told as Progress, in order; what a rank or a fetch hears of it is the fetches' (host/fetch.h).
//
// Owner: the core of a di-kvd host.  Bounds: the arena, a filling has a slot; what is told is taken after every
// event.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "balance/arbiter.h"
#include "host/hedge.h"
#include "host/lease.h"
#include "host/pages.h"
#include "host/port.h"
#include "host/read.h"
#include "host/rebuild.h"
#include "wire/messages.h"

namespace di::host {

// Why a matched block was not there for its request.
enum class Lost : std::uint8_t { evicted, timeout, checksum, cancelled, computed };

// Why there is no page for a block.
enum class Gap : std::uint8_t { none, absent, no_room, unreachable };

struct FillingCounters {
  std::uint64_t malformed = 0;        // pages and stripes of plans that make no sense
  std::uint64_t columns_corrupt = 0;  // wrong checksum here
  std::uint64_t read_bytes = 0;       // of pages, verified
  std::uint64_t pages_failed = 0;
  std::uint64_t pages_rebuilt = 0;  // that were not complete without a rebuild
  std::uint64_t hedges = 0;         // rebuilds of what was only late
  std::uint64_t hedges_won = 0;     // that were sooner than what was late
};

class Fillings {
 public:
  // A page of a plan, and who wants it.
  struct Want {
    const wire::PlannedPage& page;
    Key parent;                // of its first block; zero when not known
    std::uint64_t lease = 0;   // of the plan
    std::uint64_t opener = 0;  // the caller's number
    std::uint8_t priority = 1;
    std::uint64_t room_bytes_max = UINT64_MAX;  // more than that is no room
  };
  // What a plan says of stripes, as far as it makes sense.
  struct Planned {
    StripeRef stripe;
    std::uint32_t spare = 0;  // columns that can be read and are not needed
  };
  using Stripes = std::map<std::uint64_t, Planned>;
  struct Begun {
    Gap gap = Gap::none;  // none: it is coming
    balance::Place place = balance::Place::store;
    std::uint64_t bytes = 0;  // of the page
  };
  struct Progress {
    std::uint32_t slot = 0;
    std::uint32_t group = 0;     // of the page: it is there, verified
    std::optional<Lost> failed;  // instead: the page will not come
  };

  Fillings(Pages& pages, ArenaPort& port, const Peers& peers, Reads& reads, Rebuilds& rebuilds,
           Leases& leases, Hedge& hedge);

  [[nodiscard]] Stripes stripes_of(const wire::meta_planned& plan);
  // Takes a slot and begins to fill it; `stripes` of the same plan lose what is spare and used.  The caller
  // pins it, or it ends with the next unpin().
  Begun begin(const Want& want, Stripes& stripes);
  // Somebody in more of a hurry wants it too: its reads move forward in their queues.
  void hurry(std::uint32_t slot, std::uint8_t priority);
  // Unpins pages, some of which may be filling: what nobody pins any more ends.
  void unpin(PinSet& pins);

  // Of reads for pages.
  void read_progress(const Reads::Progress& progress);
  // Of rebuilds of pages.
  void rebuild_progress(const Rebuilds::Progress& progress, const Now& now);
  // Nothing may be read under it any more.
  void lease_over(std::uint64_t lease);
  void on_time(const Now& now);
  [[nodiscard]] Due next_due() const;

  [[nodiscard]] std::vector<Progress> take_progress() { return std::exchange(progress_, {}); }
  // A page was sealed since the last call.
  [[nodiscard]] bool take_sealed() { return std::exchange(sealed_, false); }

  [[nodiscard]] bool has(std::uint32_t slot) const { return fillings_.contains(slot); }
  // Of one that is coming.
  [[nodiscard]] std::uint64_t opener(std::uint32_t slot) const { return fillings_.at(slot).opener; }
  [[nodiscard]] balance::Place place(std::uint32_t slot) const { return fillings_.at(slot).place(); }
  // Of all of them, by balance::Place.
  [[nodiscard]] const std::array<std::uint64_t, balance::places>& coming_bytes() const {
    return coming_bytes_;
  }
  [[nodiscard]] const FillingCounters& counters() const { return counters_; }

  // Adds the reads and users of leases; says what disagrees.
  [[nodiscard]] Status check(std::set<std::uint64_t>& reads,
                             std::map<std::uint64_t, std::size_t>& leases) const;

 private:
  struct Part {
    std::uint64_t transfer = 0;  // 0: no read (any more)
    std::uint16_t column = 0;
    Reads::Source source;      // once it is read from a store
    std::uint32_t groups = 0;  // that came
    bool missing = false;
    bool skipped = false;  // missing because its store is slow
    bool late = false;     // hedged
    Duration late_after = Hedge::duration_never;
  };
  struct Filling {
    std::uint64_t opener = 0;  // who may be gone
    std::uint64_t page = 0;    // of the plan
    std::uint64_t lease = 0;
    std::uint8_t priority = 1;
    bool arena = false;       // of another host; else stores
    StripeRef stripe;         // null: nothing it could be rebuilt from
    std::uint32_t index = 0;  // of the page in the stripe
    std::vector<Part> parts;
    bool hedged = false;       // or it was not worth it
    Lost why = Lost::timeout;  // the first column that went missing

    [[nodiscard]] balance::Place place() const {
      return arena ? balance::Place::remote_arena : balance::Place::store;
    }
  };
  struct PartName {
    std::uint32_t slot = 0;
    std::uint32_t part = 0;
  };
  // Where the parts of a page can be read; nothing for those that cannot.
  using Sources = std::vector<std::optional<Reads::Want>>;

  // The filling of a page as the plan has it, in stores.  None: it makes no sense.
  [[nodiscard]] std::optional<Filling> filling_of(const Want& want, const Stripes& stripes) const;
  // Where it comes from: stores, or else an arena, or else other columns make what is missing.
  Gap find_sources(const wire::PlannedPage& page, Filling& filling, Sources& sources) const;
  void start_read(std::uint32_t slot, std::uint32_t part, Reads::Want want);
  void rebuild(std::uint32_t slot, const Filling& filling);
  [[nodiscard]] std::uint64_t column_bytes(const Filling& filling, const Part& part,
                                           std::uint32_t blocks) const;
  [[nodiscard]] static std::vector<Rebuilds::Part> parts_of(const Filling& filling);

  // Verifies the groups that are there, each once.
  void verify(std::uint32_t slot);
  // Parts whose next group is not what the plan says.
  [[nodiscard]] std::vector<std::uint32_t> wrong_parts(std::uint32_t slot, const Filling& filling);
  void give_up_read(Part& part);
  void part_lost(std::uint32_t slot, std::uint32_t part, Lost why);
  // False when none was, or their stores are away.
  bool read_skipped(std::uint32_t slot);
  // The hedge of a page has what it needs.
  void give_up_late(std::uint32_t slot, const Now& now);
  // When the first of its columns is late.
  [[nodiscard]] Instant late_at(const Filling& filling) const;
  void hedge(std::uint32_t slot, const Now& now);
  // The page will not come: quarantine.
  void fail(std::uint32_t slot, Lost why);
  // Its reads and its rebuild end.
  void end(std::uint32_t slot);

  Pages& pages_;
  ArenaPort& port_;
  const Peers& peers_;
  Reads& reads_;
  Rebuilds& rebuilds_;
  Leases& leases_;
  Hedge& hedge_;
  std::map<std::uint32_t, Filling> fillings_;  // by slot
  std::map<std::uint64_t, PartName> by_transfer_;
  std::array<std::uint64_t, balance::places> coming_bytes_{};
  std::vector<Progress> progress_;
  bool sealed_ = false;
  FillingCounters counters_;
};

}  // namespace di::host
