// host/pages.h: the pages of this host's arena: who may use which slot, which page holds which block,
// and what is thrown out when room is needed.
//
// A page passes through these states; any other pair of state and event is a bug and panics:
//   state        event                                       next
//   (free)       take for a rank                             granted
//   (free)       take for a store read                       filling
//   granted      sealed by its rank                          sealed, its keys indexed
//   granted      given back (release, wrong checksum)        (free)
//   granted      its rank is lost and still maps the arena   quarantined, written by that rank
//   filling      every segment verified                      sealed, its keys indexed
//   filling      read failed, or nobody wants it             quarantined; (free) when nobody writes
//   sealed       last unpin, owns a key                      sealed, evictable
//   sealed       last unpin, owns none (duplicate, tail)     (free)
//   sealed       evicted                                     (free)
//   quarantined  nobody writes and nobody pins any more      (free)
//   (free)       take for a column (parity, a rebuild)       scratch
//   scratch      scrapped                                    quarantined; (free) when nobody writes
//   (start)      taken when the last owner ended             quarantined, used by processes of that time
//   quarantined  its record and its bytes are found right    sealed, pinned while those processes are there
//
// Identity is per block, storage per page: a key belongs to the first sealed page that brought it; when
// that page goes, to the next one.  A page that owns a key is told to di-meta (take_changes).
//
// Owner: the core of a di-kvd host.  Bounds: the payload, slots_max.  Eviction is least recently used among the
// pages that no other continues: without its beginning nobody finds the rest of a chain.  What such a page continued
// is as recent as it was.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/result.h"
#include "host/port.h"
#include "kv/layout.h"
#include "kv/slots.h"

namespace di::host {

enum class PageState : std::uint8_t { granted, filling, sealed, quarantined, scratch };
inline constexpr std::size_t page_states = 5;
[[nodiscard]] std::string_view page_state_name(PageState state);

struct Page {
  kv::SlotPlace place;
  PageState state = PageState::granted;
  std::uint64_t number = 0;  // unique within the host's generation; what di-meta calls it
  // who had it made; nobody for what came from elsewhere, which is written back there
  std::uint64_t tenant = 0;
  std::uint32_t blocks = 0;
  Key parent;                       // zero when not known
  std::vector<Key> keys;            // empty: granted, or a tail
  std::vector<std::uint32_t> crcs;  // filling: expected ones, from the plan
  std::uint32_t groups = 0;         // segments [0, groups) are there and verified
  std::uint32_t owned = 0;          // keys of which this is the first sealed page
  std::uint32_t pins = 0;
  std::uint32_t peer_writes = 0;    // stores and other hosts that may write into it
  std::optional<Peer> rank_writes;  // quarantined: a lost rank that still maps the arena
  bool former = false;              // quarantined: a process of an earlier owner may use it
  bool checking = false;            // quarantined: its bytes are being compared with its record
  bool stored = false;              // it came from elsewhere or was offered to the store
  bool indexed = false;             // its keys are in the index (filling or sealed)
  bool published = false;           // told to di-meta, or about to be
  std::uint64_t use = 0;            // last use, when evictable
  std::uint32_t continued = 0;      // sealed: by so many others
};

// Slots pinned by one holder, in chain order; a slot may be in it twice.
struct PinSet {
  std::vector<std::uint32_t> slots;
};

// A run of blocks inside one page.
struct Piece {
  std::uint32_t slot = 0;
  std::uint32_t first = 0;  // block of the page
  std::uint32_t count = 0;
  std::uint32_t at = 0;  // block of the chain
};

struct PageCounters {
  std::uint64_t sealed = 0;      // by ranks
  std::uint64_t filled = 0;      // from the store or another arena
  std::uint64_t duplicates = 0;  // sealed and owning no key
  std::uint64_t evicted = 0;
  std::uint64_t dropped = 0;    // by order
  std::uint64_t recovered = 0;  // of an earlier owner of the arena
  std::uint64_t quarantined = 0;
  std::uint64_t room_refused = 0;
};

class Pages {
 public:
  struct Options {
    std::uint64_t payload_bytes = 0;
    std::uint32_t slots_max = 0;
  };
  Pages(const Options& options, ArenaPort& port);

  // The layout of every page here; the first one stays.  Errors: unsupported for another one, invalid
  // when the payload does not hold a single page.
  Status set_layout(const kv::Layout& layout);
  [[nodiscard]] bool has_layout() const { return layout_.has_value(); }
  [[nodiscard]] const kv::Layout& layout() const { return *layout_; }

  // Slots for pages of so many blocks each, all or nothing; evicts what it must, and nothing when that
  // would not be enough.  `state` is granted, filling or scratch.  Errors: busy, invalid (a count out of range,
  // or more than the whole arena holds).
  Result<std::vector<std::uint32_t>> take(std::span<const std::uint32_t> blocks, PageState state);
  // Whether the arena could hold pages of so many blocks beside those in `beside`, if nothing else were in it.
  [[nodiscard]] bool fits(std::span<const std::uint32_t> blocks, const std::set<std::uint32_t>& beside) const;

  // granted -> free.
  void give_back(std::uint32_t slot);
  // granted -> quarantined until writer_gone(rank).
  void give_up(std::uint32_t slot, const Peer& rank);
  // granted -> sealed, as its writer says.  The caller has verified the checksums and pins it first.
  void seal(const wire::kv_sealed& message);
  // What a filling page will hold.  With `findable` cover() names it from now on.  No keys: a tail.
  void announce(std::uint32_t slot, const Key& parent, std::vector<Key> keys, std::vector<std::uint32_t> crcs,
                bool findable);
  // True when segment `group` matches the announced checksum; it is shown then, and the page is sealed
  // with its last one.
  [[nodiscard]] bool verify_next(std::uint32_t slot);
  // filling -> quarantined: nobody finds it any more.  Stays while pinned or written.
  void spoil(std::uint32_t slot);
  // A scratch slot is not needed any more.
  void scrap(std::uint32_t slot);
  // One more, or one less, may write into it.
  void peer_writes(std::uint32_t slot, bool writes);
  // That process can write no byte any more.
  void writer_gone(const Peer& rank);

  // What an earlier owner of the arena had given out: every slot is quarantined, and those with a record are
  // checking.  Before anything else is taken.  Errors: corrupt (slots overlap), invalid (layout); nothing
  // may be done with this object then.
  Status restore(const kv::Layout& layout, const kv::Former& former);
  // The last generations alone, when the slots themselves are given up.
  void continue_generations(std::vector<std::uint32_t> generations) { generations_ = std::move(generations); }
  // A slot that is checking.  Good: sealed, with one pin in `pins`.
  void checked(std::uint32_t slot, std::optional<kv::PageRecord> record, PinSet& pins);
  // No process of an earlier owner uses the arena any more.
  void former_gone();
  // Another layout for an arena of which no slot is taken.  Errors: busy, invalid.
  Status replace_layout(const kv::Layout& layout);

  // Throws out every page that could be evicted.
  struct Dropped {
    std::uint64_t pages = 0;
    std::uint64_t blocks = 0;  // that only these pages had
    std::uint64_t bytes = 0;
  };
  Dropped drop_evictable();

  void pin(PinSet& pins, std::uint32_t slot);
  // Every pin of `held` once more, whatever state its page is in.
  void pin_again(PinSet& pins, const PinSet& held);
  void unpin(PinSet& pins);

  // Pieces that hold a prefix of keys [from, ...), sealed ones only, or with those that are filling.
  // No more than the first `pieces_max` of them.
  [[nodiscard]] std::vector<Piece> cover(std::span<const Key> keys, std::uint32_t from, bool filling,
                                         std::size_t pieces_max = SIZE_MAX) const;
  // The sealed page of so many blocks whose last key this is: a key stands for all that comes before it.
  [[nodiscard]] std::optional<std::uint32_t> ending(const Key& last, std::uint32_t blocks) const;
  [[nodiscard]] std::uint64_t count(PageState state) const {
    return counts_[static_cast<std::size_t>(state)];
  }
  [[nodiscard]] bool has(const Key& key) const { return sealed_.contains(key); }
  // Null when `slot` is free or was taken anew.
  [[nodiscard]] const Page* find(std::uint32_t slot, std::uint32_t generation) const;
  // The slot must be taken.
  [[nodiscard]] const Page& at(std::uint32_t slot) const;
  void mark_stored(std::uint32_t slot) { page(slot).stored = true; }
  // The store has it: the next owner of the arena need not offer it.
  void written(std::uint32_t slot) { port_.slot_stored(slot); }
  [[nodiscard]] wire::SlotRef ref(const Piece& piece) const;
  // Checksums of the page's bytes as they are now.
  [[nodiscard]] bool matches(std::uint32_t slot, std::span<const std::uint32_t> crcs) const;
  // Bytes that a page of `blocks` blocks takes.
  [[nodiscard]] std::uint64_t room_bytes(std::uint32_t blocks) const;

  // Page numbers that entered and left the directory since the last call.  A page that did both is in
  // neither.
  struct Changes {
    std::vector<std::uint32_t> added;    // slots
    std::vector<std::uint64_t> removed;  // page numbers
  };
  [[nodiscard]] Changes take_changes();
  // Every published page, in the order of their numbers.
  [[nodiscard]] std::vector<std::uint32_t> published() const;
  [[nodiscard]] wire::ArenaPage describe(std::uint32_t slot) const;

  [[nodiscard]] std::uint64_t bytes_total() const { return pool_ ? pool_->bytes_total() : 0; }
  [[nodiscard]] std::uint64_t bytes_free() const { return pool_ ? pool_->bytes_free() : 0; }
  [[nodiscard]] std::uint64_t bytes_evictable() const { return evictable_bytes_; }
  [[nodiscard]] const std::map<std::uint32_t, Page>& all() const { return pages_; }
  [[nodiscard]] const PageCounters& counters() const { return counters_; }

  // Pins per slot as the holders count them are given, and the scratch slots that somebody uses; says what
  // disagrees.
  [[nodiscard]] Status check(const std::map<std::uint32_t, std::uint32_t>& pins,
                             const std::set<std::uint32_t>& scratch) const;

 private:
  struct Place {
    std::uint32_t slot = 0;
    std::uint32_t block = 0;
  };
  [[nodiscard]] Page& page(std::uint32_t slot);
  void index_add(Page& page);
  // `use`: its last one, 0 when that does not count.
  void index_remove(Page& gone, std::uint64_t use);
  void publish(Page& page);
  void show(Page& page, kv::SlotState state);
  void record(const Page& page);
  void settle(std::uint32_t slot);
  void become(Page& page, PageState state);
  // For pages of so many bytes, all or none.
  Result<std::vector<kv::SlotPlace>> take_places(std::span<const std::uint64_t> bytes);
  void free(std::uint32_t slot);
  void evictable(Page& page);
  void not_evictable(Page& page);
  // What it continues is not the end of the chain; is again, and as recent as it was.
  void continue_chain(const Page& fresh);
  void end_chain(const Page& gone, std::uint64_t use);
  // The next to be evicted; there is one.
  [[nodiscard]] std::uint32_t victim() const;

  Options options_;
  ArenaPort& port_;
  std::optional<kv::Layout> layout_;
  std::optional<kv::SlotPool> pool_;
  std::vector<std::uint32_t> generations_;  // last ones of an earlier owner or layout, for a fresh pool
  std::map<std::uint32_t, Page> pages_;     // by slot
  std::array<std::uint64_t, page_states> counts_{};
  std::unordered_map<Key, std::vector<Place>> sealed_;  // looked up only; the first place owns the key
  std::unordered_map<Key, Place> filling_;
  std::map<std::uint64_t, std::uint32_t> evictable_;      // use -> slot
  std::map<std::uint64_t, std::uint32_t> leaves_;         // of them, those that no other continues
  std::unordered_map<Key, std::uint32_t> continuations_;  // how many sealed pages continue the block
  std::uint64_t evictable_bytes_ = 0;
  std::uint64_t last_use_ = 0;
  std::uint64_t next_number_ = 1;
  std::set<std::uint32_t> added_;
  std::vector<std::uint64_t> removed_;
  PageCounters counters_;
};

}  // namespace di::host
