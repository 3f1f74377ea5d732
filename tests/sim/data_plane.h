// tests/sim/data_plane.h: bytes between the machines of a simulated fleet, with the promises of
// transfer/fabric.h: an operation is answered once, nothing reaches what is not exposed (any more), and
// after `concealed` nothing will.
//
// Operations take a random time; some are slow, some bytes arrive wrong when told so.  A process that is
// dead or cannot be reached ends its operations as unreachable; one that is frozen holds them up.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "tests/sim/world.h"
#include "transfer/fabric.h"

namespace di::sim {

class DataPlane {
 public:
  using Done = std::function<void(Code code)>;

  DataPlane(World& world, double flips) : world_(world), flips_(flips) {}

  void expose(std::size_t owner, const wire::Peer& to, std::uint64_t transfer, transfer::Access access,
              const std::vector<transfer::SlotName>& slots);
  void conceal(std::size_t owner, const wire::Peer& to, std::uint64_t transfer,
               std::function<void()> concealed);
  // `from` lives as long as `initiator` or until done.
  std::uint64_t write(std::size_t initiator, const wire::Peer& to, std::uint64_t transfer,
                      const transfer::Place& place, ByteView from, Done done);
  std::uint64_t read(std::size_t initiator, const wire::Peer& from, std::uint64_t transfer,
                     const transfer::Place& place, MutableByteView into, Done done);
  void cancel(std::uint64_t op);
  // `process` has heard of the loss of `peer`.
  void peer_lost(std::size_t process, const wire::Peer& peer);
  [[nodiscard]] std::uint64_t moved() const { return moved_; }

 private:
  struct Exposure {
    transfer::Access access{};
    std::set<transfer::SlotName> slots;
  };
  // Owner and its life, the peer that may, the number.
  using Name = std::tuple<std::size_t, std::uint64_t, wire::Peer, std::uint64_t>;
  struct Op {
    std::size_t initiator = 0;
    wire::Peer peer;
    Code code = Code::ok;  // what it will end with
    bool ended = false;
  };

  std::uint64_t start(std::size_t initiator, const wire::Peer& peer, std::uint64_t transfer,
                      const transfer::Place& place, transfer::Access access,
                      std::function<void(MutableByteView theirs)> move, Done done);
  [[nodiscard]] Code carry_out(std::size_t initiator, const wire::Peer& peer, std::uint64_t transfer,
                               const transfer::Place& place, transfer::Access access,
                               const std::function<void(MutableByteView theirs)>& move);

  World& world_;
  double flips_;
  std::map<Name, Exposure> exposures_;
  std::map<std::uint64_t, Op> ops_;
  std::uint64_t next_op_ = 1;
  std::uint64_t moved_ = 0;
};

}  // namespace di::sim
