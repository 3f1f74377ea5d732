// store/mount.h: one volume of a store in service: its disk and the disk's thread, what is written behind,
// its scrub and its health.
//
// Owner: loop thread; disk work is on the thread of its IoPool.  A volume that fails, is slow or is full
// (store/health.h) is out of service alone: puts are refused, reads go on as long as they succeed, and the
// others of the node do not notice.  One that could not be opened is out of service from the start and holds
// nothing.  One whose file was cut short fails, and gives up the columns that are not in it any more.
//
//   state    event                                     next
//   open     close(): nothing is begun any more        closing
//   closing  nothing of it runs any more               closed; told; the disk is let go of
//   closed   open() with a volume                      open, as good as new
//   closed   open() with why it is refused             closed
//
// Write budget: what is written counts against what the disk endures (kv/write_budget.h), and the volume
// remembers it.  A put above it is vetoed, a repair is not.  That it is used up, and that there is some again, di-meta
// is told, the latter also when nothing is written any more: the budget is looked at with the disk.
//
// Write behind: the tables are written `flush_every` after something changed; who wants more waits with
// after_flush().
//
// Bounds: those of the volume, its pool and its scrub; one sync at a time; as many waiters for a flush as the
// server has puts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "kv/write_budget.h"
#include "loop/loop.h"
#include "store/health.h"
#include "store/io.h"
#include "store/scrub.h"
#include "store/volume.h"

namespace di::store {

class Mount {
 public:
  // What was opened before the loop ran.
  struct Backing {
    std::string path;
    std::unique_ptr<Disk> disk;
    std::unique_ptr<Volume> volume;
    std::unique_ptr<IoPool> pool;
    // Why it could not be opened; the three above are null then.  A pool of one that is opened again counts
    // in figures().
    std::optional<Error> refused = {};
  };
  struct Options {
    Duration flush_every = milliseconds(100);
    Scrub::Options scrub;
    kv::WriteBudget::Options budget;  // endurance and days; the rest is the volume's
  };
  struct Hooks {
    std::function<void()> changed;  // its state: di-meta should hear of it
    // A column is not what it was, or could not be read.
    std::function<void(std::uint64_t stripe, std::uint16_t column, Code code)> bad;
    std::function<void(std::uint32_t columns)> dropped;
    std::function<void()> looked;      // the disk was looked at, and has not failed
    std::function<void()> scrub_beat;  // the scrub moved
    std::function<void()> ended;       // something of its own ended: who waits for settled() asks again
  };

  Mount(loop::Loop& loop, std::uint16_t number, Backing backing, const Options& options, Hooks hooks);
  ~Mount() { *alive_ = false; }
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;

  [[nodiscard]] std::uint16_t number() const { return number_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  // Why it could not be opened; nothing when it is open, or was.
  [[nodiscard]] const std::optional<Error>& refused() const { return refused_; }
  // False: there are no volume(), pool() and scrub().
  [[nodiscard]] bool is_open() const { return volume_ != nullptr; }
  // Something may be begun; not while it is being closed.
  [[nodiscard]] bool serves() const { return is_open() && !closed_; }
  [[nodiscard]] Volume& volume() { return *volume_; }
  [[nodiscard]] const Volume& volume() const { return *volume_; }
  [[nodiscard]] IoPool& pool() { return *pool_; }
  [[nodiscard]] const IoPool& pool() const { return *pool_; }
  [[nodiscard]] Scrub& scrub() { return *scrub_; }
  [[nodiscard]] const Scrub& scrub() const { return *scrub_; }

  // Errors: as of Volume; not_found when it does not serve.
  Result<Read> read_begin(std::uint64_t stripe, std::uint16_t column);
  void read_end(const Read& read, bool verified = false);
  // What a put is refused with while the volume is let alone; ok when it is not.
  [[nodiscard]] Code put_refusal() const;
  // Errors: as of Volume; over_budget, when it is no repair.  The volume must be open.
  Result<Put> put_begin(const Shard& shard, bool repair);
  bool put_end(const Put& put, const PutOutcome& outcome);
  // `then` is told ok when everything that had ended before is durable, or io.
  void after_flush(std::function<void(Code)> then);
  std::uint32_t free(std::uint64_t stripe, std::optional<std::uint16_t> column = {});
  // Tells that a column is bad, and gives it up when nobody will ever read it.  Nothing when another was
  // written in place of what was read.
  void column_bad(const Read& read, Code code);
  // Frees the column in the slot that was read.
  std::uint32_t free(const Read& read);

  [[nodiscard]] DiskState state() const;
  // Why it is not good.
  [[nodiscard]] std::string_view reason() const;
  // What di-meta is told: what has broken tables can be read, what fails should not be.
  [[nodiscard]] DiskState state_told() const;
  // What the tables say; nothing but zeros when it is not open.
  [[nodiscard]] Volume::Stats stats() const;
  [[nodiscard]] const kv::WriteBudget& budget() const { return budget_; }
  [[nodiscard]] std::uint64_t budget_left_bytes() const {
    return budget_.left_today_bytes(loop_.monotonic_now());
  }
  [[nodiscard]] double days_of_life() const { return budget_.days_of_life(loop_.monotonic_now()); }
  // New columns should go elsewhere.
  [[nodiscard]] bool spent() const { return spent_; }
  [[nodiscard]] const std::uint64_t& syncs() const { return syncs_; }
  // The next two go on over close() and open().
  [[nodiscard]] const std::shared_ptr<DiskFigures>& figures() const { return figures_; }
  [[nodiscard]] Scrub::Counters scrubbed() const;

  // For one that serves or was never open.  `closed` comes in a later turn; what was not written behind is
  // lost, as in a crash.
  void close(std::function<void()> closed);
  // For one that is closed or was never open.
  void open(Backing backing);

  // No scrub and no look any more.
  void stop();
  // True when nothing of it runs and everything is written behind; else it sees to that.
  bool settled();

 private:
  void sync_soon();
  void sync_now();
  void sync_ended(const Status& status);
  void start();
  void close_when_idle();
  void health_look();
  [[nodiscard]] DiskHealth::Sample figures_now() const;
  // Where the disk ends, when that is before the volume does.
  [[nodiscard]] std::optional<std::uint64_t> cut_at() const;
  void give_up_behind(std::uint64_t end);
  void wrote(std::uint64_t bytes);
  void budget_look();
  void tell_broken(const Error& error);

  const std::uint16_t number_;
  const std::string path_;
  const Options options_;
  Hooks hooks_;
  std::unique_ptr<Disk> disk_;
  std::unique_ptr<Volume> volume_;
  std::optional<Error> refused_;
  std::vector<std::function<void(Code)>> unflushed_;
  std::vector<std::function<void(Code)>> flushing_;  // covered by the sync in progress
  bool syncing_ = false;
  bool stopping_ = false;
  bool cut_short_ = false;
  std::function<void()> closed_;  // who waits for the end of a close
  std::uint64_t syncs_ = 0;
  Scrub::Counters scrubbed_;  // by scrubs that are over
  std::shared_ptr<DiskFigures> figures_;
  kv::WriteBudget budget_;  // of the volume that is open; what it vetoed counts since it was opened
  bool spent_ = false;
  std::uint64_t vetoed_bytes_ = 0;  // of the last veto, while spent
  DiskHealth health_;
  LastPercentile read_p99_;
  LastPercentile write_p99_;
  loop::Loop& loop_;
  loop::Timer sync_timer_;
  loop::Timer health_timer_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::unique_ptr<Scrub> scrub_;
  std::unique_ptr<IoPool> pool_;  // last: its thread uses what is above
};

}  // namespace di::store
