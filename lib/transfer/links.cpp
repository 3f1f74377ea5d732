#include "transfer/links.h"

#include <cmath>
#include <utility>

#include "base/log.h"

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

void LinkBase::dial_failed(Instant now, Duration pause_min, Duration pause_max, std::string_view why) {
  // Loudly once: a peer that is ending is dialled in vain, too, and one that tells a wrong address always is.
  if (!why.empty()) {
    log_write(std::exchange(told, true) ? LogLevel::debug : LogLevel::warn, "fabric", "dial failed",
              {{"peer", peer.instance}, {"error", why}});
  }
  ++failures;
  phase = LinkPhase::pause;
  until = now + dial_pause(failures, pause_min, pause_max);
}

std::string_view LinkBase::late() const {
  switch (phase) {
    case LinkPhase::asked:
      return "no ticket came in time";
    case LinkPhase::connecting:
      return "no connection in time";
    case LinkPhase::greeting:
      return "no greeting came in time";
    case LinkPhase::idle:
    case LinkPhase::up:
    case LinkPhase::pause:
      break;
  }
  DI_PANIC("not a dial");
}

}  // namespace di::transfer
