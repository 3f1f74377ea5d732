// host/writeback.h: sealed pages on their way to the store.
//
// A job, one per stripe that is being written:
//   state       event                                         next
//   (none)      a page is due and the window has room         opening; meta_put_open, pages pinned
//   opening     meta_put_opened: ok                           putting; kv_put per column
//   opening     exists                                        (none), done
//   opening     busy, no answer in answer_wait                (none), pages queued again after a back-off
//   opening     anything else                                 (none), dropped
//   putting     kv_put_done of the last column                committing; meta_put_commit
//   putting     no room for a column                          (none), meta_put_commit naming it, queued again
//   putting     a column failed, its store lost, ttl over     (none), meta_put_abort, queued again
//   putting     the column says corrupt or stale              (none), meta_put_abort, dropped
//   committing  meta_put_committed: ok or exists              (none), done
//   committing  anything else, no answer in answer_wait       (none), queued again (exists tells, if it was)
//   any         di-meta lost                                  (none), queued again; waits until it is back
//
// A queued page is not pinned: it may be evicted and is then dropped.  Above queue_pages the oldest is
// dropped.  Geometry k+0: page i of a stripe is its column i; with parity the put is given up.
//
// A store on another machine reads its column out of the arena through the data plane: the slot is
// exposed to it with its kv_put and concealed when the column is written or the job is over.  A store
// that reads on is refused; nothing waits for it, because a page that changed under a reader fails its
// checksum there.
//
// Owner: the core of a di-kvd host.  Bounds: queue_pages, jobs_max, sightings_max.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "host/fetch.h"
#include "host/pages.h"
#include "host/port.h"
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
  std::uint64_t written_bytes = 0;
};

class Writeback {
 public:
  struct Limits {
    Admit admit = Admit::always;
    std::size_t queue_pages = 256;      // kv.writeback_queue_pages
    std::size_t jobs_max = 4;           // two in the store, two on their way to or from it
    std::size_t sightings_max = 65536;  // remembered keys, 32 bytes each and as much again
    std::uint32_t attempts_max = 20;    // about a minute and a half of back-off
    Duration backoff_min = milliseconds(100);
    Duration backoff_max = seconds(5);
    Duration answer_wait = seconds(5);
  };

  Writeback(const Limits& limits, Pages& pages, DataPort& data, const Fetches::Peers& peers, Numbers& numbers,
            Outbox& out);

  // A rank sealed this page, which owns a key.  `reuse`: as in kv_sealed.
  void sealed(std::uint32_t slot, std::uint8_t reuse);
  // A request found this page in the arena.
  void sighted(std::uint32_t slot);

  void put_opened(std::uint64_t tag, const wire::meta_put_opened& answer, const Now& now);
  void put_done(const Peer& store, const wire::kv_put_done& done, const Now& now);
  void put_committed(std::uint64_t tag, const wire::meta_put_committed& answer, const Now& now);
  void meta_lost(const Now& now);
  void store_lost(const Peer& store, const Now& now);

  void on_time(const Now& now);
  // Starts the jobs that are due.  After every event.
  void pump(const Now& now);
  [[nodiscard]] Due next_due() const;

  // Pages queued or being written.
  [[nodiscard]] std::size_t pending() const;
  [[nodiscard]] std::size_t jobs() const { return jobs_.size(); }
  [[nodiscard]] const WritebackCounters& counters() const { return counters_; }

  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins) const;

 private:
  enum class JobState : std::uint8_t { opening, putting, committing };
  struct Waiting {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    std::uint32_t attempts = 0;
    Instant due{};  // liveness time
  };
  struct Job {
    JobState state = JobState::opening;
    PinSet pins;  // one slot per page, in chain order
    std::uint32_t attempts = 0;
    std::uint64_t stripe = 0;
    struct Column {
      Peer store;
      std::uint64_t transfer = 0;  // exposed to a store on another machine; 0: it maps the arena
    };
    std::map<std::uint16_t, Column> columns;  // not yet written
    Instant deadline;
  };

  void queue(std::uint32_t slot);
  // The job is over; its pages try again later.
  void retry(std::uint64_t tag, const Now& now);
  void finish(std::uint64_t tag);
  void drop(std::uint64_t tag);
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
  DataPort& data_;
  const Fetches::Peers& peers_;
  Numbers& numbers_;
  Outbox& out_;
  std::deque<Waiting> queue_;
  std::map<std::uint64_t, Job> jobs_;               // by tag
  std::map<std::uint64_t, std::uint64_t> stripes_;  // stripe -> tag, while putting or committing
  std::uint32_t stripe_pages_ = 1;                  // k of the geometry, as the last answer gave it
  std::set<Key> seen_;                              // keys sealed once
  std::deque<Key> seen_order_;
  WritebackCounters counters_;
};

}  // namespace di::host
