#include "loop/loop.h"
#include "tests/unit/transfer/proxy.h"
#include "tests/unit/transfer/world.h"
#include "transfer/tcp.h"

namespace di::transfer {

namespace {

class TcpWorld final : public World {
 public:
  explicit TcpWorld(bool sealed) : sealed_(sealed) {}
  ~TcpWorld() override { nodes.clear(); }

  bool guarded() const override { return true; }
  bool sealed() const override { return sealed_; }

  Node& add_node() override {
    auto node = std::make_unique<Node>();
    node->self = {"di-kvd.host" + std::to_string(nodes.size()), 1};
    TcpOptions options;
    options.self = node->self;
    options.listen = "127.0.0.1:0";
    options.region = &node->region;
    // Short enough that nobody waits, long enough for a loaded machine.
    options.ticket_life = milliseconds(2000);
    options.dial_wait = milliseconds(1000);
    options.dial_pause_min = milliseconds(20);
    auto made = make_tcp_fabric(loop_, options);
    EXPECT_TRUE(made.ok()) << made.error().message;
    endpoints_.push_back((*made)->endpoint());
    node->fabric = *std::move(made);
    proxies_.emplace_back();
    return listen_to(std::move(node));
  }

  bool until(const std::function<bool()>& met) override { return loop_.run_until(met, seconds(20)); }

  void dial(Node& from, Node& to, const Ticket& ticket) override {
    const std::size_t at = index(to);
    from.fabric->ticket(to.self, proxies_[at] ? proxies_[at]->endpoint() : endpoints_[at], ticket);
  }

  void outlive_tickets(Node& granter) override {
    EXPECT_TRUE(until([&] { return granter.fabric->gauges().tickets == 0; }));
  }

  void flip_a_bit(Node&, Node& to) override { proxy(to).flip_to = 1000; }
  void black_hole(Node& to) override { proxy(to).hole = true; }

  void settle() override {
    // One round trip on every connection, and through every mailbox.
    for (const auto& from : nodes) {
      for (const auto& to : nodes) {
        if (from == to) continue;
        Bytes probe(1);
        const auto op = from->fabric->read(to->self, UINT64_MAX, {{0, 1}, 0, 1}, probe, Class::fetch);
        ASSERT_TRUE(op.ok());
        ASSERT_TRUE(until([&] { return from->is_done(*op); }));
      }
    }
  }

 private:
  std::size_t index(const Node& node) const {
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].get() == &node) return i;
    }
    return 0;
  }
  Proxy& proxy(const Node& to) {
    const std::size_t at = index(to);
    if (!proxies_[at]) proxies_[at] = std::make_unique<Proxy>(endpoints_[at]);
    return *proxies_[at];
  }

  const bool sealed_;
  loop::Loop loop_;
  std::vector<std::string> endpoints_;
  std::vector<std::unique_ptr<Proxy>> proxies_;
};

}  // namespace

std::unique_ptr<World> make_tcp_world(bool sealed) {
  return std::make_unique<TcpWorld>(sealed);
}

}  // namespace di::transfer
