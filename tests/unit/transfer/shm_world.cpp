#include <cstdlib>
#include <filesystem>

#include "loop/loop.h"
#include "tests/unit/transfer/world.h"
#include "transfer/shm.h"
#include "transfer/shm_fabric.h"

namespace di::transfer {

namespace {

class ShmWorld final : public World {
 public:
  ShmWorld() {
    std::string name = testing::TempDir() + "di-shm-XXXXXX";
    directory_ = ::mkdtemp(name.data());
  }
  ~ShmWorld() override {
    nodes.clear();
    servers_.clear();
    std::filesystem::remove_all(directory_);
  }

  bool guarded() const override { return false; }
  bool sealed() const override { return false; }

  Node& add_node() override {
    auto node = std::make_unique<Node>();
    node->self = {"di-kvd.host" + std::to_string(nodes.size()), 1};
    auto server = ShmServer::listen(
        loop_, path(node->self),
        {node->region.fd.get(), TestRegion::file_bytes, node->self.generation, node->self.instance}, {});
    EXPECT_TRUE(server.ok());
    servers_.push_back(*std::move(server));
    ShmFabricOptions options;
    options.self = node->self;
    options.arena_path = [this](const Peer& peer) { return path(peer); };
    options.map = [](const wire::arena_region&, Fd fd) -> Result<std::unique_ptr<Region>> {
      return std::unique_ptr<Region>(std::make_unique<TestRegion>(std::move(fd)));
    };
    node->fabric = make_shm_fabric(loop_, options);
    return listen_to(std::move(node));
  }

  bool until(const std::function<bool()>& met) override { return loop_.run_until(met, seconds(20)); }
  void settle() override {
    while (loop_.run_ready() > 0) {
    }
  }

  // There are no connections here.
  void dial(Node&, Node&, const Ticket&) override {}
  void outlive_tickets(Node&) override {}
  void flip_a_bit(Node&, Node&) override {}
  void black_hole(Node&) override {}

 private:
  std::string path(const Peer& peer) const { return directory_ + "/" + peer.instance + ".arena"; }

  std::string directory_;
  loop::Loop loop_;
  std::vector<std::unique_ptr<ShmServer>> servers_;
};

}  // namespace

std::unique_ptr<World> make_shm_world() {
  return std::make_unique<ShmWorld>();
}

}  // namespace di::transfer
