#include "tests/unit/transfer/world.h"
#include "transfer/loopback.h"

namespace di::transfer {

namespace {

class LoopbackWorld final : public World {
 public:
  explicit LoopbackWorld(bool sealed) : sealed_(sealed), net_(LoopbackOptions{}) {}
  ~LoopbackWorld() override { nodes.clear(); }

  bool guarded() const override { return true; }
  bool sealed() const override { return sealed_; }

  Node& add_node() override {
    auto node = std::make_unique<Node>();
    node->self = {"di-kvd.host" + std::to_string(nodes.size()), 1};
    node->fabric = net_.attach(node->self, &node->region);
    return listen_to(std::move(node));
  }

  bool until(const std::function<bool()>& met) override {
    const Instant end = net_.now() + seconds(120);
    while (!met()) {
      const Instant next = net_.next_due();
      if (next > end) return false;
      net_.advance(next);
    }
    return true;
  }
  void settle() override { net_.advance(net_.now() + seconds(2)); }
  void dial(Node& from, Node& to, const Ticket& ticket) override { from.fabric->ticket(to.self, "", ticket); }
  void outlive_tickets(Node&) override { net_.advance(net_.now() + ticket_life); }
  void flip_a_bit(Node& from, Node& to) override { net_.flip_next(from.self, to.self); }
  void black_hole(Node& to) override {
    for (const auto& node : nodes) net_.cut(node->self, to.self);
  }

 private:
  const bool sealed_;
  LoopbackNet net_;
};

}  // namespace

std::unique_ptr<World> make_loopback_world(bool sealed) {
  return std::make_unique<LoopbackWorld>(sealed);
}

}  // namespace di::transfer
