// store/mount.h: one volume of a store in service: its disk and the disk's thread, what is written behind, its
// scrub and its health.
//
// Owner: loop thread; disk work is on the thread of its IoPool.  A volume that fails, is slow or is full
// (store/health.h) is out of service alone: puts are refused, reads go on as long as they succeed, and the
// others of the node do not notice.  One that could not be opened is out of service from the start and holds
// nothing.
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
    // Why it could not be opened; the three above are null then.
    std::optional<Error> refused = {};
  };
  struct Options {
    Duration flush_every = milliseconds(100);
    Scrub::Options scrub;
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
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;

  [[nodiscard]] std::uint16_t number() const { return number_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  // False: there are no volume(), pool() and scrub().
  [[nodiscard]] bool is_open() const { return volume_ != nullptr; }
  [[nodiscard]] Volume& volume() { return *volume_; }
  [[nodiscard]] const Volume& volume() const { return *volume_; }
  [[nodiscard]] IoPool& pool() { return *pool_; }
  [[nodiscard]] const IoPool& pool() const { return *pool_; }
  [[nodiscard]] Scrub& scrub() { return *scrub_; }
  [[nodiscard]] const Scrub& scrub() const { return *scrub_; }

  // Errors: as of Volume; not_found when it is not open.
  Result<Read> read_begin(std::uint64_t stripe, std::uint16_t column);
  void read_end(const Read& read, bool verified = false) { volume_->read_end(read, verified); }
  // What a put is refused with while the volume is let alone; ok when it is not.
  [[nodiscard]] Code put_refusal() const;
  void put_end(const Put& put, const PutOutcome& outcome);
  // `then` is told ok when everything that had ended before is durable, or io.
  void after_flush(std::function<void(Code)> then);
  std::uint32_t free(std::uint64_t stripe, std::optional<std::uint16_t> column = {});
  // Tells that a column is bad, and gives it up when nobody will ever read it.
  void column_bad(std::uint64_t stripe, std::uint16_t column, Code code);

  [[nodiscard]] DiskState state() const;
  // Why it is not good.
  [[nodiscard]] std::string_view reason() const;
  // What di-meta is told: what has broken tables can be read, what fails should not be.
  [[nodiscard]] DiskState state_told() const;
  // What the tables say; nothing but zeros when it is not open.
  [[nodiscard]] Volume::Stats stats() const;
  [[nodiscard]] const std::uint64_t& syncs() const { return syncs_; }

  // No scrub and no look any more.
  void stop();
  // True when nothing of it runs and everything is written behind; else it sees to that.
  bool settled();

 private:
  void sync_soon();
  void sync_now();
  void sync_ended(const Status& status);
  void health_look();
  void tell_broken(const Error& error);

  const std::uint16_t number_;
  const std::string path_;
  const Options options_;
  Hooks hooks_;
  std::unique_ptr<Disk> disk_;
  std::unique_ptr<Volume> volume_;
  std::vector<std::function<void(Code)>> unflushed_;
  std::vector<std::function<void(Code)>> flushing_;  // covered by the sync in progress
  bool syncing_ = false;
  bool stopping_ = false;
  std::uint64_t syncs_ = 0;
  DiskHealth health_;
  LastPercentile read_p99_;
  LastPercentile write_p99_;
  loop::Loop& loop_;
  loop::Timer sync_timer_;
  loop::Timer health_timer_;
  std::unique_ptr<Scrub> scrub_;
  std::unique_ptr<IoPool> pool_;  // last: its thread uses what is above
};

}  // namespace di::store
