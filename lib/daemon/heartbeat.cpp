#include "daemon/heartbeat.h"

#include <algorithm>

#include "base/assert.h"

namespace di::daemon {

void Heartbeats::Beat::operator()() {
  last_ = all_->clock_.now();
}

Heartbeats::Beat& Heartbeats::add(std::string_view name, Duration late_after) {
  DI_ASSERT(late_after > Duration{0});
  DI_ASSERT(std::none_of(beats_.begin(), beats_.end(), [&](const Beat& beat) { return beat.name_ == name; }));
  Beat& beat = beats_.emplace_back();
  beat.all_ = this;
  beat.name_ = name;
  beat.late_after_ = late_after;
  beat();
  return beat;
}

bool Heartbeats::is_late(const Beat& beat) const {
  return clock_.now() - beat.last_ > beat.late_after_;
}

bool Heartbeats::is_late(std::string_view name) const {
  return std::any_of(beats_.begin(), beats_.end(),
                     [&](const Beat& beat) { return beat.name_ == name && is_late(beat); });
}

std::string Heartbeats::late() const {
  std::string names;
  for (const Beat& beat : beats_) {
    if (is_late(beat)) names += (names.empty() ? "" : " ") + beat.name_;
  }
  return names;
}

}  // namespace di::daemon
