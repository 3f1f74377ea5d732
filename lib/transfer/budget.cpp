#include "transfer/budget.h"

#include <algorithm>

#include "base/assert.h"

namespace di::transfer {

Budget::Budget(const Options& options)
    : options_(options), tokens_(static_cast<double>(options.burst_bytes)) {
  DI_ASSERT(options_.quantum_bytes > 0 && options_.burst_bytes > 0);
  for (const std::uint32_t weight : options_.weights) DI_ASSERT(weight > 0);
  saved_[turn_] = options_.quantum_bytes * options_.weights[turn_];
}

void Budget::refill(Instant now) {
  if (options_.bytes_per_s == 0) return;
  if (filled_at_ && now > *filled_at_) {
    const double passed_s = static_cast<double>((now - *filled_at_).count()) * 1e-9;
    tokens_ = std::min(static_cast<double>(options_.burst_bytes),
                       tokens_ + passed_s * static_cast<double>(options_.bytes_per_s));
  }
  if (!filled_at_ || now > *filled_at_) filled_at_ = now;
}

void Budget::next_class() {
  turn_ = (turn_ + 1) % classes;
  saved_[turn_] += options_.quantum_bytes * options_.weights[turn_];
}

std::optional<Class> Budget::take(const Heads& heads, Instant now) {
  if (std::all_of(heads.begin(), heads.end(), [](const Head& head) { return head.bytes == 0; })) {
    return std::nullopt;
  }
  refill(now);
  if (options_.bytes_per_s != 0 && tokens_ <= 0) return std::nullopt;
  while (true) {
    const Head& head = heads[turn_];
    if (head.bytes != 0 && saved_[turn_] >= head.bytes) {
      saved_[turn_] -= head.bytes;
      if (options_.bytes_per_s != 0) tokens_ -= static_cast<double>(head.bytes);
      return static_cast<Class>(turn_);
    }
    // What an idle class saved is gone; what one that only waits for its peers saved stays as it was.
    if (head.bytes == 0) {
      const std::uint64_t round = options_.quantum_bytes * options_.weights[turn_];
      saved_[turn_] = head.backlog ? saved_[turn_] - std::min(saved_[turn_], round) : 0;
    }
    next_class();
  }
}

Instant Budget::ready_at(Instant now) {
  if (options_.bytes_per_s == 0) return now;
  refill(now);
  if (tokens_ > 0) return now;
  const double wait_s = (1 - tokens_) / static_cast<double>(options_.bytes_per_s);
  return now + Duration(static_cast<std::int64_t>(wait_s * 1e9) + 1);
}

}  // namespace di::transfer
