#include "transfer/links.h"

#include <cmath>

namespace di::transfer {

namespace {

// Weight of the past in a link's rate falls to 1/e in this much busy time.
constexpr double rate_memory_s = 0.5;
constexpr Duration rate_sample = milliseconds(5);

}  // namespace

std::optional<double> LinkRate::moved(std::uint64_t bytes, bool goes_on, Instant now) {
  if (busy_from_) busy_ += now - std::min(now, *busy_from_);
  busy_from_.reset();
  if (goes_on) busy_from_ = now;
  bytes_ += bytes;
  if (busy_ < rate_sample) return std::nullopt;
  const double busy_s = static_cast<double>(busy_.count()) * 1e-9;
  const double rate = static_cast<double>(bytes_) / busy_s;
  const double weight = bytes_per_s_ == 0 ? 1 : 1 - std::exp(-busy_s / rate_memory_s);
  bytes_per_s_ += weight * (rate - bytes_per_s_);
  busy_ = Duration(0);
  bytes_ = 0;
  return bytes_per_s_;
}

}  // namespace di::transfer
