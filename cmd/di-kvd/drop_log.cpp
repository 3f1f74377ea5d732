#include "drop_log.h"

#include <utility>

namespace di::kvd {

std::optional<DropLog::News> DropLog::look(const host::WritebackCounters& counters,
                                           const std::map<std::uint64_t, std::uint64_t>& over_quota,
                                           Instant now) {
  if (counters.dropped_failed == failed_ && counters.dropped_full == full_ &&
      counters.dropped_quota == quota_)
    return std::nullopt;
  if (now < again_) return std::nullopt;
  again_ = now + drop_line_every;
  News news;
  news.failed = counters.dropped_failed - std::exchange(failed_, counters.dropped_failed);
  news.full = counters.dropped_full - std::exchange(full_, counters.dropped_full);
  quota_ = counters.dropped_quota;
  for (const auto& [tenant, pages] : over_quota) {
    std::uint64_t& told = over_quota_[tenant];
    if (pages != told) news.over_quota.emplace(tenant, pages - std::exchange(told, pages));
  }
  return news;
}

}  // namespace di::kvd
