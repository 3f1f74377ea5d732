#include "tests/sim/data_plane.h"

#include <algorithm>

namespace di::sim {

void DataPlane::expose(std::size_t owner, const wire::Peer& to, std::uint64_t transfer,
                       transfer::Access access, const std::vector<transfer::SlotName>& slots) {
  Exposure& exposure = exposures_[{owner, world_.life(owner), to, transfer}];
  exposure.access = access;
  exposure.slots.insert(slots.begin(), slots.end());
}

void DataPlane::conceal(std::size_t owner, const wire::Peer& to, std::uint64_t transfer,
                        std::function<void()> concealed) {
  // Until then a write may still arrive.
  world_.after(
      owner, world_.random_time(Duration(0), milliseconds(2)),
      [this, name = Name{owner, world_.life(owner), to, transfer}, concealed = std::move(concealed)] {
        exposures_.erase(name);
        concealed();
      });
}

std::uint64_t DataPlane::write(std::size_t initiator, const wire::Peer& to, std::uint64_t transfer,
                               const transfer::Place& place, ByteView from, Done done) {
  return start(
      initiator, to, transfer, place, transfer::Access::write,
      [this, from](MutableByteView theirs) {
        std::copy(from.begin(), from.end(), theirs.begin());
        if (world_.rng.chance(flips_)) theirs[0] ^= std::byte{1};
      },
      std::move(done));
}

std::uint64_t DataPlane::read(std::size_t initiator, const wire::Peer& from, std::uint64_t transfer,
                              const transfer::Place& place, MutableByteView into, Done done) {
  return start(
      initiator, from, transfer, place, transfer::Access::read,
      [into](MutableByteView theirs) { std::copy(theirs.begin(), theirs.end(), into.begin()); },
      std::move(done));
}

std::uint64_t DataPlane::start(std::size_t initiator, const wire::Peer& peer, std::uint64_t transfer,
                               const transfer::Place& place, transfer::Access access,
                               std::function<void(MutableByteView theirs)> move, Done done) {
  const std::uint64_t op = next_op_++;
  ops_.emplace(op, Op{initiator, peer});
  const auto answer = [this, op, initiator, done = std::move(done)](Duration wait) {
    world_.after(initiator, wait, [this, op, done] {
      const Code code = ops_.at(op).code;
      ops_.erase(op);
      done(code);
    });
  };
  const Duration latency = world_.rng.chance(0.05) ? world_.random_time(milliseconds(3), milliseconds(60))
                                                   : world_.random_time(microseconds(50), milliseconds(2));
  // A frozen owner takes nothing in: the initiator waits for it, or for its loss.
  const auto arrive = std::make_shared<std::function<void()>>();
  *arrive = [this, op, initiator, peer, transfer, place, access, move = std::move(move), answer,
             self = std::weak_ptr(arrive)] {
    Op& running = ops_.at(op);
    if (running.code == Code::ok && world_.alive(world_.find(peer.instance)) &&
        world_.frozen(world_.find(peer.instance))) {
      return world_.after(initiator, milliseconds(5), [again = self.lock()] { (*again)(); });
    }
    if (running.code == Code::ok) running.code = carry_out(initiator, peer, transfer, place, access, move);
    running.ended = true;
    answer(world_.random_time(microseconds(50), milliseconds(1)));
  };
  world_.after(initiator, latency, [arrive] { (*arrive)(); });
  return op;
}

Code DataPlane::carry_out(std::size_t initiator, const wire::Peer& peer, std::uint64_t transfer,
                          const transfer::Place& place, transfer::Access access,
                          const std::function<void(MutableByteView theirs)>& move) {
  const std::size_t owner = world_.find(peer.instance);
  if (!world_.alive(owner) || world_.member(owner).generation != peer.generation) return Code::unreachable;
  const Member& me = world_.member(initiator);
  const auto exposure = exposures_.find({owner, world_.life(owner), {me.instance, me.generation}, transfer});
  if (exposure == exposures_.end()) return Code::not_found;
  if (exposure->second.access != access || !exposure->second.slots.contains(place.slot)) return Code::denied;
  Result<MutableByteView> slot =
      world_.node(owner)->arena()->slot_bytes(place.slot.slot, place.slot.generation);
  if (!slot) return Code::stale;
  if (place.offset > slot->size() || place.bytes > slot->size() - place.offset) return Code::invalid;
  move(slot->subspan(place.offset, place.bytes));
  ++moved_;
  return Code::ok;
}

void DataPlane::cancel(std::uint64_t op) {
  const auto found = ops_.find(op);
  if (found != ops_.end() && !found->second.ended && found->second.code == Code::ok)
    found->second.code = Code::cancelled;
}

void DataPlane::peer_lost(std::size_t process, const wire::Peer& peer) {
  for (auto& [number, op] : ops_) {
    if (op.initiator == process && op.peer == peer && !op.ended && op.code == Code::ok)
      op.code = Code::unreachable;
  }
  std::erase_if(exposures_, [&](const auto& item) {
    return std::get<0>(item.first) == process && std::get<1>(item.first) == world_.life(process) &&
           std::get<2>(item.first) == peer;
  });
}

}  // namespace di::sim
