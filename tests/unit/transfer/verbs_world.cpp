#include <chrono>

#include "loop/loop.h"
#include "tests/support/softverbs/softverbs.h"
#include "tests/unit/transfer/proxy.h"
#include "tests/unit/transfer/world.h"
#include "transfer/verbs_fabric.h"

namespace di::transfer {

namespace {

// Over softverbs, two rails.
class VerbsWorld final : public World {
 public:
  explicit VerbsWorld(std::optional<std::uint64_t> seed) : stepped_(seed.has_value()) {
    if (seed) {
      softverbs::run_deterministic(*seed);
      softverbs::set_delay(0.2);
      softverbs::set_tear(true);
    } else {
      softverbs::run_threaded();
    }
  }
  ~VerbsWorld() override {
    nodes.clear();
    softverbs::no_faults();
    EXPECT_EQ(softverbs::counts().objects, 0u);
  }

  bool guarded() const override { return true; }
  bool sealed() const override { return false; }

  Node& add_node() override {
    auto node = std::make_unique<Node>();
    node->self = {"di-kvd.host" + std::to_string(nodes.size()), 1};
    VerbsFabricOptions options;
    options.self = node->self;
    options.listen = "127.0.0.1:0";
    options.region = &node->region;
    options.rails = {{"softverbs0", 1, 0}, {"softverbs1", 1, 0}};
    options.memory = {{{node->region.base, TestRegion::file_bytes}, -1, 0}};
    // As in TcpWorld, but for a machine that is loaded three threads have to get their turn for each byte.
    options.ticket_life = milliseconds(2000);
    options.dial_wait = milliseconds(3000);
    options.dial_pause_min = milliseconds(20);
    auto made = make_verbs_fabric(loop_, options);
    EXPECT_TRUE(made.ok()) << made.error().message;
    endpoints_.push_back((*made)->endpoint());
    node->fabric = *std::move(made);
    proxies_.emplace_back();
    return listen_to(std::move(node));
  }

  bool until(const std::function<bool()>& met) override {
    if (!stepped_) return loop_.run_until(met, seconds(20));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!met()) {
      if (std::chrono::steady_clock::now() > end) return false;
      const bool stepped = softverbs::step();
      if (loop_.run_ready() == 0 && !stepped) loop_.run_until(met, milliseconds(1));
    }
    return true;
  }

  void dial(Node& from, Node& to, const Ticket& ticket) override {
    const std::size_t at = index(to);
    from.fabric->ticket(to.self, proxies_[at] ? proxies_[at]->endpoint() : endpoints_[at], ticket);
  }

  void outlive_tickets(Node& granter) override {
    EXPECT_TRUE(until([&] { return granter.fabric->gauges().tickets == 0; }));
  }

  void flip_a_bit(Node&, Node&) override { softverbs::flip_next(1000); }
  void black_hole(Node& to) override {
    const std::size_t at = index(to);
    proxies_[at] = std::make_unique<Proxy>(endpoints_[at]);
    proxies_[at]->hole = true;
  }

  void settle() override {
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

  const bool stepped_;
  loop::Loop loop_;
  std::vector<std::string> endpoints_;
  std::vector<std::unique_ptr<Proxy>> proxies_;
};

}  // namespace

bool verbs_world_there() {
  return true;
}

std::unique_ptr<World> make_verbs_world(std::optional<std::uint64_t> seed) {
  return std::make_unique<VerbsWorld>(seed);
}

}  // namespace di::transfer
