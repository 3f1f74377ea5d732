// tests/unit/transfer/world.h: a few processes with one kind of fabric between them, as the conformance
// suite sees them.
//
// Owner: the test's thread.  Every node answers want_ticket of the others as a di-kvd would, unless the
// test takes that over.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "transfer/fabric.h"

namespace di::transfer {

inline constexpr std::size_t test_slots = 5;
inline constexpr std::size_t test_slot_bytes = 4 << 20;

// On a memfd, so that another "process" can map it: generations in the first 4 KiB, then the slots.
class TestRegion final : public Region {
 public:
  static constexpr std::size_t index_bytes = 4096;
  static constexpr std::size_t file_bytes = index_bytes + test_slots * test_slot_bytes;

  TestRegion() : TestRegion(Fd(::memfd_create("region", MFD_CLOEXEC))) {
    for (std::size_t slot = 0; slot < test_slots; ++slot) generations[slot] = 1;
  }
  explicit TestRegion(Fd file) : fd(std::move(file)) {
    EXPECT_EQ(::ftruncate(fd.get(), file_bytes), 0);
    void* at = ::mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    EXPECT_NE(at, MAP_FAILED);
    base = static_cast<std::byte*>(at);
    generations = reinterpret_cast<std::atomic<std::uint32_t>*>(base);
  }
  ~TestRegion() override { ::munmap(base, file_bytes); }
  TestRegion(const TestRegion&) = delete;
  TestRegion& operator=(const TestRegion&) = delete;

  Result<MutableByteView> resolve(const SlotName& name) override {
    if (name.slot >= test_slots) return Error{Code::invalid, 0, "no such slot"};
    if (generations[name.slot] != name.generation) return Error{Code::stale, 0, "another page by now"};
    return slot(name.slot);
  }
  [[nodiscard]] MutableByteView slot(std::size_t index) const {
    return {base + index_bytes + index * test_slot_bytes, test_slot_bytes};
  }

  Fd fd;
  std::byte* base = nullptr;
  std::atomic<std::uint32_t>* generations = nullptr;
};

struct Node {
  Peer self;
  TestRegion region;
  std::unique_ptr<Fabric> fabric;
  std::map<OpId, std::vector<Code>> done;  // every answer: more than one is a fault
  std::vector<std::pair<Peer, TransferId>> concealed;
  std::vector<Peer> wanted;
  // Instead of asking the peer for a ticket; null: ask.
  std::function<void(const Peer&)> on_want_ticket;

  [[nodiscard]] bool is_done(OpId op) const { return done.contains(op); }
  [[nodiscard]] Code code_of(OpId op) const {
    const auto at = done.find(op);
    return at == done.end() || at->second.size() != 1 ? Code::invalid : at->second.front();
  }
};

class World {
 public:
  virtual ~World() = default;

  // The owner's side checks peer, transfer, slot and direction.  Without a guard memory is simply shared.
  [[nodiscard]] virtual bool guarded() const = 0;
  [[nodiscard]] virtual bool sealed() const = 0;
  virtual Node& add_node() = 0;
  // Lets things happen until `met`; false when that takes too long.
  virtual bool until(const std::function<bool()>& met) = 0;
  // Hands `ticket` of `to` to `from`.
  virtual void dial(Node& from, Node& to, const Ticket& ticket) = 0;
  // Lets the life of a ticket pass.
  virtual void outlive_tickets(Node& granter) = 0;
  // Flips one bit of the payload of the next write from `from` to `to`; before their first operation.
  virtual void flip_a_bit(Node& from, Node& to) = 0;
  // Nothing reaches `to` from anybody any more, and nobody is told.
  virtual void black_hole(Node& to) = 0;
  // Lets everything that is under way come to its end.
  virtual void settle() = 0;

  Node& node(const Peer& peer) {
    for (const auto& each : nodes) {
      if (each->self == peer) return *each;
    }
    ADD_FAILURE() << "no node " << peer.instance;
    return *nodes.front();
  }

  std::vector<std::unique_ptr<Node>> nodes;

 protected:
  Node& listen_to(std::unique_ptr<Node> made) {
    Node& node = *made;
    nodes.push_back(std::move(made));
    node.fabric->set_events(
        {[this, &node](const Peer& peer) {
           node.wanted.push_back(peer);
           if (node.on_want_ticket) {
             node.on_want_ticket(peer);
             return;
           }
           Node& other = this->node(peer);
           const Result<Ticket> ticket = other.fabric->grant(node.self, sealed());
           ASSERT_TRUE(ticket.ok());
           dial(node, other, *ticket);
         },
         [&node](OpId op, Code code) { node.done[op].push_back(code); },
         [&node](const Peer& peer, TransferId transfer) { node.concealed.emplace_back(peer, transfer); }});
    return node;
  }
};

std::unique_ptr<World> make_tcp_world(bool sealed);
std::unique_ptr<World> make_shm_world();
std::unique_ptr<World> make_loopback_world(bool sealed);
// Over softverbs: threaded, or with a seed step by step, with delays and torn writes.  Null in a build without it.
std::unique_ptr<World> make_verbs_world(std::optional<std::uint64_t> seed);
bool verbs_world_there();

}  // namespace di::transfer
