// kv/write_budget.h: how much may still be written to a disk today, and how long it will live.
//
// The flash of a disk endures a number of bytes.  Spread over the days that it shall serve, that is a budget
// a day: a bucket that fills evenly and holds at most one day.  A write that finds too little in it is vetoed
// and counted; the caller does not store the page then, which costs a recomputation and not the disk.  What is
// written all the same may take the bucket down to a day of debt.
//
// Pure: time is given.  Owner: one thread, a budget per disk.  Bound: none grows.
#pragma once

#include <cstdint>

#include "base/time.h"

namespace di::kv {

class WriteBudget {
 public:
  struct Options {
    std::uint64_t endurance_bytes = 0;  // what may be written to it in its life; zero: no budget, no veto
    double days = 5 * 365;              // how long it shall serve, from new
    double amplification = 1.1;       // bytes written inside the disk per byte of ours: large aligned writes
    std::uint64_t written_bytes = 0;  // so far, as the disk or the volume remembers
    std::uint64_t spent_bytes = 0;    // of the bucket, as the volume remembers; no time passed since
    // With less left than the first part of a day the owner has writes go elsewhere, with more than the second
    // it takes them again: six minutes and a quarter of an hour of filling.
    std::uint64_t spent_part = 256;
    std::uint64_t unspent_part = 96;
  };

  WriteBudget(const Options& options, Instant now);

  // False: a veto, which is counted.
  [[nodiscard]] bool allows(std::uint64_t bytes, Instant now);
  // So much is being written, with leave or without.
  void wrote(std::uint64_t bytes, Instant now);

  [[nodiscard]] std::uint64_t budget_bytes_per_day() const { return static_cast<std::uint64_t>(per_day_); }
  [[nodiscard]] std::uint64_t left_today_bytes(Instant now) const;
  [[nodiscard]] std::uint64_t spent_bytes(Instant now) const;             // to be remembered
  [[nodiscard]] std::uint64_t written_bytes() const { return written_; }  // to be remembered
  // Bytes a day at the pace of about the last day; zero before the first write.
  [[nodiscard]] double pace_bytes_per_day(Instant now) const;
  // At this pace, until its endurance is used up; days_max when nothing is written or no endurance is known.
  [[nodiscard]] double days_of_life(Instant now) const;
  [[nodiscard]] std::uint64_t vetoes() const { return vetoes_; }
  [[nodiscard]] std::uint64_t vetoed_bytes() const { return vetoed_bytes_; }

  static constexpr double days_max = 36500;

 private:
  [[nodiscard]] double filled(Instant now) const;
  [[nodiscard]] double faded(Instant now) const;

  Options options_;
  double per_day_ = 0;  // of our bytes
  double left_ = 0;     // in the bucket at at_
  double recent_ = 0;   // writes, faded by the factor e a day, at at_
  Instant begun_;
  Instant at_;
  std::uint64_t written_;
  std::uint64_t vetoes_ = 0;
  std::uint64_t vetoed_bytes_ = 0;
};

}  // namespace di::kv
