// host/read.h: reads into this arena: one column of a stripe from a store, or one page from another host's
// arena, written into a slot here layer group by layer group.
//
// The source is here, and maps this arena, or it is remote, and reaches the slot through the data plane for
// as long as the transfer is exposed:
//   state       event                                            next
//   waiting     the source has room in its window                reading; exposed; kv_read or arena_read
//   waiting     given up, the source is lost, no exposure left   (none)
//   reading     kv_read_done, more groups to come                reading
//   reading     kv_read_done with the last group                 arrived
//   reading     kv_read_done with a failure                      (none) when it is here, else cancelling
//   reading     given up, silent for read_wait                   cancelling; kv_read_cancel
//   reading     the source is lost                               cancelling while it maps the arena or is
//                                                                exposed, else (none)
//   arrived     taken by its reader                              (none); concealed
//   arrived     given up (wrong bytes)                           (none) when it is here, else cancelling
//   cancelling  remote: concealed                                (none)
//   cancelling  here: kv_read_cancelled, kv_read_done as above, or its process let go of the arena: (none);
//               the same store is back: kv_read_cancel again
// Until a read is (none) somebody may write into the slot, and the page knows (Pages::peer_writes): whoever
// gives a read up spoils or scraps the slot, or waits until writes() says no.
//
// What happens is told as Progress, in order, and the reader compares checksums.  A lease is held for each.
//
// Owner: the core of a di-kvd host.  Bounds: reads_per_source under way; those that wait by the slots.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "host/lease.h"
#include "host/pages.h"
#include "host/port.h"
#include "wire/messages.h"

namespace di::host {

struct ReadCounters {
  std::uint64_t reads = 0;
  std::uint64_t arena_reads = 0;  // of them, out of another host's arena
  std::uint64_t groups = 0;       // that came
  std::uint64_t failed = 0;
  std::uint64_t corrupt = 0;  // wrong checksum here
  std::uint64_t cancelled = 0;
};

class Reads {
 public:
  struct Limits {
    std::uint32_t per_source = 8;      // under way; enough for one NVMe device at 1 MiB a page
    Duration read_wait = seconds(10);  // silence of a source
  };
  // Who wants it.
  enum class For : std::uint8_t { page, rebuild, repair };
  struct Want {
    For purpose = For::page;
    Peer source;
    bool arena = false;  // of another host; else a store
    // Without the transfer; of an arena only slot, page_blocks and priority matter.
    wire::kv_read message;
    Key key;                  // of the page's last block, for an arena
    std::uint64_t lease = 0;  // one that is held, or 0
  };
  struct Progress {
    For purpose = For::page;
    std::uint64_t transfer = 0;
    Code code = Code::ok;
    std::uint32_t groups = 0;  // there: [0, groups); all of them: take() or give_up() it
    bool over = false;         // with a code: it will not come, and the number is void for its reader
    Duration took{};           // since it began; liveness time
  };

  Reads(const Limits& limits, Pages& pages, DataPort& data, const Peers& peers, Leases& leases,
        Numbers& numbers, Outbox& out);

  // The number of the transfer.
  std::uint64_t start(const Want& want);
  // Moves it forward in its queue, if it still waits.
  void prioritise(std::uint64_t transfer, std::uint8_t priority);
  // All groups are there and right.
  void take(std::uint64_t transfer);
  // Not wanted any more, or wrong; nothing for one that has ended.
  void give_up(std::uint64_t transfer);
  // Where a column was read.
  struct Source {
    Peer store;
    std::uint16_t volume = 0;
  };
  // Tells di-meta what is wrong with a column there.
  void report(std::uint64_t page, std::uint16_t column, const Source& source, Code code);

  void read_done(const Peer& source, const wire::kv_read_done& done, const Now& now);
  void read_cancelled(const Peer& source, const wire::kv_read_cancelled& cancelled);
  // A store or another host.
  void source_lost(const Peer& source);
  void source_returned(const Peer& source);
  // That process can write no byte any more.
  void source_detached(const Peer& source);
  // The same of one transfer; false when it is not one of these.
  bool concealed(const Peer& source, std::uint64_t transfer);
  void on_time(const Now& now);
  // Starts the reads that windows have room for.
  void pump(const Now& now);
  [[nodiscard]] Due next_due() const;
  [[nodiscard]] std::vector<Progress> take_progress() { return std::exchange(progress_, {}); }

  // Somebody may still write this column into the slot.
  [[nodiscard]] bool writes(std::uint32_t slot, std::uint16_t column) const;
  struct View {
    const Peer& source;
    const wire::kv_read& message;
    bool begun = false;
    Instant since;  // when it began
  };
  // Nothing for one that has ended.
  [[nodiscard]] std::optional<View> view(std::uint64_t transfer) const;
  [[nodiscard]] std::size_t count() const { return reads_.size(); }
  // A read is to come; those that are cancelled may wait for a process that is frozen.
  [[nodiscard]] bool waits() const;
  [[nodiscard]] const ReadCounters& counters() const { return counters_; }

  // Transfers that readers count as theirs are given; adds users of leases; says what disagrees.
  [[nodiscard]] Status check(const std::set<std::uint64_t>& theirs,
                             std::map<std::uint64_t, std::size_t>& leases) const;

 private:
  enum class State : std::uint8_t { waiting, reading, arrived, cancelling };
  struct Read {
    Want want;
    bool remote = false;
    State state = State::waiting;
    bool counted = false;  // in the window of its source
    std::uint32_t groups = 0;
    Instant since{};
    Instant deadline = instant_never;
  };
  using Found = std::map<std::uint64_t, Read>::iterator;
  struct Window {
    std::set<std::pair<std::uint8_t, std::uint64_t>> waiting;  // (priority, transfer)
    std::uint32_t outstanding = 0;
  };

  void fail(Found read, Code code);
  // It can write nothing more.
  void finish(Found read);
  // It says, or its loss says, that it writes nothing more.
  void end(Found read);
  void cancel(Found read);
  template <class M>
  void to_source(const Read& read, const M& message) {
    const Peer& source = read.want.source;
    out_.push_back(wire::Envelope::make(source.instance, source.generation, {}, message));
  }

  const Limits limits_;
  Pages& pages_;
  DataPort& data_;
  const Peers& peers_;
  Leases& leases_;
  Numbers& numbers_;
  Outbox& out_;
  std::map<std::uint64_t, Read> reads_;                                      // by transfer
  std::map<std::pair<std::uint32_t, std::uint16_t>, std::uint32_t> places_;  // (slot, column) -> reads of it
  std::map<std::string, Window> windows_;                                    // by source instance
  std::vector<Progress> progress_;
  ReadCounters counters_;
};

}  // namespace di::host
