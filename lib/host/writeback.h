// host/writeback.h: sealed pages on their way to the store.
//
// Pages that follow each other in a chain go together, as many as the geometry has data columns, as one
// stripe (kv/stripe.h).  A page waits for those behind it for at most `linger`, and not at all when the
// stripe is full or the page is a short one, which ends a chain for its writer.
//
// A job, one per stripe that is being written:
//   state       event                                         next
//   (none)      a run of pages is due and the window has room opening; meta_put_open, pages pinned
//   opening     meta_put_opened: ok, there is a code to make  encoding; scratch taken for the parity
//   opening     meta_put_opened: ok, whole pages only         putting; kv_put per column
//   opening     exists                                        (none), done
//   opening     over_quota                                    (none), dropped; the pages stay in the arena
//   opening     busy, no answer in answer_wait                (none), pages queued again after a back-off
//   opening     over_budget                                   (none), dropped: it is not stored, and nobody asks again
//   opening     anything else                                 (none), dropped
//   encoding    a step, more groups to come                   encoding
//   encoding    the last step                                 putting; kv_put per column
//   encoding    a page is not what it was                     (none), meta_put_abort, dropped
//   putting     every column is written or failed             committing; meta_put_commit, scratch given back
//   encoding, putting  more columns failed than there are parity columns:
//     one for want of room                                    (none), meta_put_commit naming them, queued again
//     one says corrupt, stale or over_budget                  (none), meta_put_abort, dropped
//     else                                                    (none), meta_put_abort, queued again
//   encoding, putting  the time is over                       as if all columns that are out had failed
//   committing  meta_put_committed: ok or exists              (none), done
//   committing  anything else, no answer in answer_wait       (none), queued again (exists tells, if it was)
//   any         di-meta lost                                  (none), queued again; waits until it is back
// A column fails when its store says so, is lost, or was not up to begin with.  Up to as many as there are
// parity columns may: the commit names them, and the stripe is published degraded.
//
// Of the pages that are offered the answer takes a run: those before it are known to the store, those
// behind it are queued again.  A queued page is not pinned: it may be evicted and is then dropped.  Above
// queue_pages the oldest is dropped.
//
// A store on another machine reads its column out of the arena through the data plane: the slot is
// exposed to it with its kv_put and concealed when the column is written or the job is over.  A store
// that reads on is refused; nothing waits for it, because a page that changed under a reader fails its
// checksum there.
//
// Owner: the core of a di-kvd host.  Bounds: queue_pages, jobs_max (each with the scratch of one stripe's
// parity), sightings_max, over_quota_max tenants; one layer group of one stripe a step.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "host/pages.h"
#include "host/port.h"
#include "kv/stripe.h"
#include "wire/messages.h"

namespace di::host {

// kv.admit.  second_sighting: a page is written when a later request needs one of its keys again.
enum class Admit : std::uint8_t { always, second_sighting };

struct WritebackCounters {
  std::uint64_t queued = 0;
  std::uint64_t written = 0;  // pages published
  std::uint64_t existed = 0;  // pages that the store had
  std::uint64_t retried = 0;
  std::uint64_t dropped_full = 0;  // queue_pages
  std::uint64_t dropped_evicted = 0;
  std::uint64_t dropped_failed = 0;  // refused, or attempts_max
  std::uint64_t dropped_quota = 0;   // their tenant may not have more in the store
  std::uint64_t dropped_over_budget = 0;
  std::uint64_t written_bytes = 0;  // without parity
  std::uint64_t stripes = 0;        // published
  std::uint64_t degraded = 0;       // of them, with fewer columns than they should have
  std::uint64_t columns = 0;        // written
  std::uint64_t columns_failed = 0;
  std::uint64_t encoded_bytes = 0;  // of pages
  std::uint64_t pages_changed = 0;  // a page did not match its checksums when it was encoded
};

class Writeback {
 public:
  struct Limits {
    Admit admit = Admit::always;
    std::size_t queue_pages = 256;        // kv.writeback_queue_pages
    Duration linger = milliseconds(100);  // kv.stripe_linger; product time
    std::size_t jobs_max = 4;             // two in the store, two on their way to or from it
    std::size_t sightings_max = 65536;    // remembered keys, 32 bytes each and as much again
    std::uint32_t attempts_max = 20;      // about a minute and a half of back-off
    Duration backoff_min = milliseconds(100);
    Duration backoff_max = seconds(5);
    Duration answer_wait = seconds(5);
  };

  Writeback(const Limits& limits, Pages& pages, ArenaPort& port, DataPort& data, const Peers& peers,
            Numbers& numbers, Outbox& out);

  // A rank sealed this page, which owns a key.  `reuse`: as in kv_sealed.
  void sealed(std::uint32_t slot, std::uint8_t reuse, const Now& now);
  // A request found this page in the arena.
  void sighted(std::uint32_t slot, const Now& now);
  // From now on no page waits for others.
  void hurry() { linger_ = Duration(0); }

  void put_opened(std::uint64_t tag, const wire::meta_put_opened& answer, const Now& now);
  void put_done(const Peer& store, const wire::kv_put_done& done, const Now& now);
  void put_committed(std::uint64_t tag, const wire::meta_put_committed& answer, const Now& now);
  void meta_lost(const Now& now);
  void store_lost(const Peer& store, const Now& now);

  void on_time(const Now& now);
  // Starts the jobs that are due.  After every event.
  void pump(const Now& now);
  // Encodes one layer group of one stripe; false when there was none.
  bool step(const Now& now);
  [[nodiscard]] Due next_due() const;

  // Pages queued or being written.
  [[nodiscard]] std::size_t pending() const;
  [[nodiscard]] std::size_t jobs() const { return jobs_.size(); }
  [[nodiscard]] const WritebackCounters& counters() const { return counters_; }
  // WritebackCounters::dropped_quota by tenant; those above over_quota_max are in the sum only.
  static constexpr std::size_t over_quota_max = 1024;  // as many as di-meta has quotas for
  [[nodiscard]] const std::map<std::uint64_t, std::uint64_t>& over_quota() const { return over_quota_; }

  // Adds pins and scratch slots held here; says what disagrees.
  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins,
                             std::set<std::uint32_t>& scratch) const;

 private:
  enum class JobState : std::uint8_t { opening, encoding, putting, committing };
  struct Waiting {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    Key parent;  // of the page
    std::uint32_t attempts = 0;
    Instant due{};    // liveness time
    Instant alone{};  // product time: no waiting for other pages from here on
  };
  using Queue = std::map<std::uint64_t, Waiting>;  // by age
  struct Job {
    JobState state = JobState::opening;
    PinSet pins;                      // one slot per page, in chain order
    std::vector<std::uint64_t> ages;  // places of the pages in the queue
    std::uint32_t attempts = 0;
    std::uint64_t stripe = 0;
    std::optional<kv::StripeShape> shape;
    wire::StripeCode code;
    std::vector<std::uint32_t> parity;  // scratch slots
    std::uint32_t group = 0;            // the next to encode
    struct Column {
      Peer store;
      std::uint16_t volume = 0;
      std::uint64_t transfer = 0;  // exposed to a store on another machine; 0: it maps the arena
    };
    std::map<std::uint16_t, Column> columns;  // not yet written
    std::map<std::uint16_t, Code> failed;     // columns, and why
    bool no_space = false;
    bool over_budget = false;
    bool refused = false;  // corrupt or stale
    Instant deadline;
  };
  // By tag.
  using Jobs = std::map<std::uint64_t, Job>;

  void queue(std::uint32_t slot, const Now& now);
  void enqueue(std::uint64_t age, const Waiting& waiting);
  void unqueue(Queue::iterator found);
  [[nodiscard]] bool evicted(const Waiting& waiting) const {
    return pages_.find(waiting.slot, waiting.generation) == nullptr;
  }
  // Ages of the queued pages that follow each other from this one on, at most a stripe of them, all of one tenant.
  [[nodiscard]] std::vector<std::uint64_t> run_from(std::uint64_t age, const Now& now) const;
  // The job has pages [first, first + count) from now on; those before exist, those behind are queued.
  void narrow(Job& job, std::size_t first, std::size_t count);
  // What the answer to meta_put_open says becomes the job's; false when it makes no sense.
  bool take_columns(Job& job, const wire::meta_put_opened& answer);
  // False when a page is not what its checksums say.
  bool encode_group(Job& job);
  void start_puts(std::uint64_t tag, const Now& now);
  // Tells di-meta which columns are written, and why the others are not.
  void commit(const Job& job, std::uint64_t tag);
  // After a column failed or was written.
  void columns_changed(std::uint64_t tag, const Now& now);
  void abort(const Job& job, std::uint64_t tag) { to_meta(tag, wire::meta_put_abort{job.stripe}); }
  // The job is over; its pages try again later.
  void retry(std::uint64_t tag, const Now& now);
  void finish(std::uint64_t tag);
  void drop(std::uint64_t tag);
  void drop_over_budget(std::uint64_t tag);
  void conceal(const Job::Column& column);
  [[nodiscard]] wire::PutPage describe(std::uint32_t slot) const;
  template <class M>
  void to_meta(std::uint64_t tag, const M& message) {
    if (const std::optional<Peer> meta = peers_.meta_up()) {
      out_.push_back(
          wire::Envelope::make(meta->instance, meta->generation, {tag_request(tag), 0, 0, 0}, message));
    }
  }

  const Limits limits_;
  Pages& pages_;
  ArenaPort& port_;
  DataPort& data_;
  const Peers& peers_;
  Numbers& numbers_;
  Outbox& out_;
  Duration linger_;
  Queue queue_;
  std::uint64_t next_age_ = 1;
  std::multimap<Key, std::uint64_t> by_parent_;  // ages of queued pages
  // What pump() waits for, unless something changed since it looked.
  bool changed_ = false;
  Due looked_;
  Jobs jobs_;
  std::map<std::uint64_t, std::uint64_t> stripes_;  // stripe -> tag, from the answer to meta_put_open on
  std::uint32_t stripe_pages_ = 1;                  // k of the geometry, as the last answer gave it
  std::set<Key> seen_;                              // keys sealed once
  std::deque<Key> seen_order_;
  WritebackCounters counters_;
  std::map<std::uint64_t, std::uint64_t> over_quota_;
};

}  // namespace di::host
