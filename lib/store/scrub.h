// store/scrub.h: reads the columns of a volume one after the other, slowly, and compares every byte with its
// checksum: what nobody reads decays unseen otherwise.
//
// A pass takes every live slot once, in the order of the disk.  A pass that begins by itself is spread over
// `interval` and begins somewhere else at each start of the volume, so that a daemon that restarts often
// comes by everywhere; one that was asked for begins at the first slot and goes as fast as `bytes_per_s`
// allows.  Either lets others go first: while `busy` it waits, but no longer than pause_max for a column.
// A column counts as bad when a second reading says the same; towards the health of the disk (store/health.h)
// both readings are one.
//
// States:
//   idle     no pass; the next begins `interval` after the last one began    -> waiting
//   waiting  for its turn: pace, load                                        -> reading
//   reading  one column                                      -> waiting; idle behind the last slot
//
// Owner: loop thread; times are product time.  Bounds: one column at a time, and a buffer of its length.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "base/result.h"
#include "loop/loop.h"
#include "store/io.h"
#include "store/volume.h"

namespace di::store {

class Scrub {
 public:
  struct Options {
    Duration interval = std::chrono::hours(24 * 7);  // 0: no pass begins by itself
    std::uint64_t bytes_per_s = std::uint64_t{32} << 20;
  };
  // It looks around at least so often.
  static constexpr Duration tick_max = seconds(60);
  // Between looks while others use the disk, and how long it lets them go first.
  static constexpr Duration pause = milliseconds(100);
  static constexpr Duration pause_max = seconds(10);
  // Without a sign for so long it does not move.
  static constexpr Duration late_after = std::chrono::minutes(10);

  struct Hooks {
    std::function<bool()> busy;
    // A column does not match its header or its checksums (corrupt), or cannot be read (io).  It is not
    // being read any more.
    std::function<void(const Read& read, Code code)> bad;
    std::function<void()> beat;  // it moves
    std::function<void()> over;  // a column is not being read any more
  };
  struct Pass {
    std::uint64_t number = 0;  // from 1; 0: there was none
    bool running = false;
    bool asked = false;
    std::uint64_t slots = 0;  // live when it began
    std::uint64_t slots_done = 0;
    std::uint64_t bytes_done = 0;
    std::uint64_t corrupt = 0;
    std::uint64_t unreadable = 0;
    Instant began;
  };
  struct Counters {
    std::uint64_t passes = 0;  // to the end
    std::uint64_t columns = 0;
    std::uint64_t bytes = 0;
    std::uint64_t corrupt = 0;
    std::uint64_t unreadable = 0;

    Counters& operator+=(const Counters& other) {
      passes += other.passes;
      columns += other.columns;
      bytes += other.bytes;
      corrupt += other.corrupt;
      unreadable += other.unreadable;
      return *this;
    }
  };

  // `volume` and `pool` outlive it; `pool` has room for one more read.
  Scrub(loop::Loop& loop, Volume& volume, IoPool& pool, const Options& options, Hooks hooks);

  // A pass from the first slot on, now; one under way ends.
  void start();
  // Nothing is read any more; the volume says when the last read is over.
  void stop();

  // The one under way, or the last one.
  [[nodiscard]] const Pass& pass() const { return pass_; }
  [[nodiscard]] const Counters& counters() const { return counters_; }
  [[nodiscard]] bool reading() const { return reading_; }

 private:
  void begin(bool asked);
  void step();
  void sleep_until(Instant at);
  [[nodiscard]] std::optional<Read> next();
  void read(const Read& read, bool again);
  void ended(const Read& read, const ColumnEnd& end, bool again, std::uint64_t pass);

  loop::Loop& loop_;
  Volume& volume_;
  IoPool& pool_;
  const Options options_;
  Hooks hooks_;
  Pass pass_;
  Counters counters_;
  SlotAddress from_;
  std::uint32_t first_segment_ = 0;  // the pass began here; what lies before it comes last
  bool wrapped_ = false;
  Instant next_pass_at_;
  Instant next_read_at_;
  std::optional<Instant> paused_since_;
  bool reading_ = false;
  bool stopped_ = false;
  AlignedBuffer buffer_;
  loop::Timer timer_;
};

}  // namespace di::store
