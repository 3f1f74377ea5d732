// support/fake_data.h: a data plane without bytes, for tests of the host's core.
//
// Exposures are kept as they are given; pushes and conceals wait until the test answers them.  A push
// moves the checksum that stands for a segment's bytes from one FakeArena to another.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "host/port.h"
#include "tests/support/fake_arena.h"

namespace di::test {

class FakeData final : public host::DataPort {
 public:
  struct Exposure {
    transfer::Access access{};
    std::set<transfer::SlotName> slots;
  };
  struct Push {
    std::uint64_t number = 0;
    wire::Peer peer;
    std::uint64_t transfer = 0;
    transfer::Place to;
    std::uint64_t offset = 0;
    bool cancelled = false;
  };
  using Transfer = std::pair<wire::Peer, std::uint64_t>;

  Status expose(const wire::Peer& peer, std::uint64_t transfer, transfer::Access access,
                std::vector<transfer::SlotName> slots) override {
    if (full) return Error{Code::busy, 0, "no room for exposures"};
    Exposure& exposure = exposures[{peer, transfer}];
    exposure.access = access;
    exposure.slots.insert(slots.begin(), slots.end());
    return {};
  }
  void conceal(const wire::Peer& peer, std::uint64_t transfer) override {
    concealing.emplace_back(peer, transfer);
  }
  Status push(std::uint64_t push, const wire::Peer& peer, std::uint64_t transfer, const transfer::Place& to,
              std::uint64_t offset, transfer::Class) override {
    if (unreachable) return Error{Code::unreachable, 0, "no way there"};
    pushes.push_back({push, peer, transfer, to, offset, false});
    return {};
  }
  void cancel(std::uint64_t push) override {
    for (Push& waiting : pushes) {
      if (waiting.number == push) waiting.cancelled = true;
    }
  }
  void see_arrivals() const override {}
  double rate(const wire::Peer&) const override { return bytes_per_s; }

  // The answer to the oldest conceal, which takes effect now.
  Transfer take_concealed() {
    const Transfer oldest = concealing.front();
    concealing.pop_front();
    exposures.erase(oldest);
    return oldest;
  }
  // Whether the owner of `there` has opened this place to `from` for writing, and if so, the bytes arrive.
  static bool arrive(const Push& push, const FakeData& owner, const wire::Peer& from, const FakeArena& here,
                     FakeArena& there) {
    const auto exposure = owner.exposures.find({from, push.transfer});
    if (exposure == owner.exposures.end() || exposure->second.access != transfer::Access::write ||
        !exposure->second.slots.contains(push.to.slot)) {
      return false;
    }
    const auto slot = there.slots.find(push.to.slot.slot);
    // A quarantined slot is not in the index page any more and still takes bytes: they are lost.
    if (slot != there.slots.end() && slot->second.assigned.generation == push.to.slot.generation) {
      const auto bytes = here.written.find(push.offset);
      there.written[slot->second.assigned.offset + push.to.offset] =
          bytes == here.written.end() ? 0 : bytes->second;
    }
    return true;
  }

  std::map<Transfer, Exposure> exposures;
  std::deque<Transfer> concealing;
  std::deque<Push> pushes;
  double bytes_per_s = 0;
  bool full = false;
  bool unreachable = false;
};

}  // namespace di::test
