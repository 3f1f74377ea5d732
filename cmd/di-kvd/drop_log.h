// drop_log.h: what the log of a host hears of pages that were not written to the store: the first at once, then what
// has come together, at most every `drop_line_every`.  Pages that were evicted first are no news: the arena is a cache.
//
// Pure.  Owner: the host's loop.  Bounds: that of Writeback::over_quota().
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "base/time.h"
#include "host/writeback.h"

namespace di::kvd {

inline constexpr Duration drop_line_every = seconds(10);

class DropLog {
 public:
  struct News {
    std::uint64_t failed = 0;                           // refused, or tried in vain
    std::uint64_t full = 0;                             // the queue was
    std::map<std::uint64_t, std::uint64_t> over_quota;  // pages by tenant
    bool operator==(const News&) const = default;
  };
  // nullopt: nothing new, or too soon.
  std::optional<News> look(const host::Writeback& writeback, Instant now) {
    return look(writeback.counters(), writeback.over_quota(), now);
  }
  std::optional<News> look(const host::WritebackCounters& counters,
                           const std::map<std::uint64_t, std::uint64_t>& over_quota, Instant now);

 private:
  std::uint64_t failed_ = 0;
  std::uint64_t full_ = 0;
  std::uint64_t quota_ = 0;
  std::map<std::uint64_t, std::uint64_t> over_quota_;
  Instant again_{};
};

}  // namespace di::kvd
