// http/wheel.h: one deadline for each connection, looked at every 100 ms.
//
// A timer of its own costs a stream 8 to 10 us per event (spec/api.md 1.4), so deadlines are coarse:
// they pass up to one tick late, never early.  Moving a deadline later costs two stores; the entry in
// its old place finds out when its time comes.
//
// Owner: the loop thread.  Bound: one entry per index, and one stale entry for each time a deadline
// moved earlier, gone when its old time comes.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/time.h"

namespace di::http {

inline constexpr Duration wheel_tick = milliseconds(100);

class DeadlineWheel {
 public:
  explicit DeadlineWheel(Instant start) : tick_(start.ns / wheel_tick.count()) {}

  // Replaces the deadline of `index`; instant_never takes it away.
  void set(std::uint32_t index, Instant at);
  // Appends to `due` every index whose deadline has passed, and forgets it.
  void expire(Instant now, std::vector<std::uint32_t>& due);

 private:
  struct Entry {
    Instant at = instant_never;
    std::int64_t listed_tick = 0;  // 0: in no bucket
  };

  void list(std::uint32_t index);

  static constexpr std::int64_t bucket_count = 1024;  // 102 s; later deadlines are listed again on the way
  std::array<std::vector<std::uint32_t>, bucket_count> buckets_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> passing_;
  std::int64_t tick_;  // the last one looked at
};

}  // namespace di::http
