// cmd/di-kvd/store_role.h: di-kvd as the keeper of a volume, around store/server.h.
//
// Owner: the loop thread.  Serves the host di-kvds (kv_read, kv_put) and di-meta (inventory, kv_free).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "daemon/daemon.h"
#include "data_plane.h"
#include "store/server.h"

namespace di::kvd {

enum class Durability : std::uint8_t { standard, strict };

struct StoreConfig {
  std::string path;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = 0;
  bool prewrite = false;
  Durability durability = Durability::standard;
  Duration scrub_interval{0};
  std::uint64_t scrub_bytes_per_s = 0;
  std::uint32_t io_threads = 0;
  store::IoMode io = store::IoMode::automatic;
};
void store_params(config::Params& params, StoreConfig& config);
Status store_validate(const StoreConfig& config);

class StoreRole final : public daemon::Program {
 public:
  StoreRole(StoreConfig config, DataConfig data) : config_(std::move(config)), data_config_(std::move(data)) {}

  // Opens the volume, or makes it when there is none.
  Status on_prepare(daemon::Daemon& daemon) override;
  Status on_start(daemon::Daemon& daemon) override;
  void on_stop(daemon::Daemon& daemon) override;
  bool on_ctl(const std::vector<std::string>& words, daemon::Reply reply) override;
  void on_dump() override;

 private:
  Result<store::DiskFile> make_volume() const;
  Status make_on_device(store::Disk& disk) const;
  Status format(store::Disk& disk) const;
  void register_metrics(daemon::Metrics& metrics);
  void peer_up(const net::Member& member);
  void peer_lost(net::PeerId id);
  void deliver(const net::Incoming& in);
  void put_written(std::function<void()> answer);
  void ctl_scrub(daemon::Reply reply);
  void ctl_check(daemon::Reply reply);
  void scrub_tell();

  StoreConfig config_;
  DataConfig data_config_;
  daemon::Daemon* daemon_ = nullptr;
  bool direct_ = false;
  std::unique_ptr<store::Disk> disk_;      // until on_start
  std::unique_ptr<store::Volume> volume_;  // until on_start
  std::unordered_map<net::PeerId, net::Member> peers_;
  std::vector<std::unique_ptr<loop::Timer>> delayed_;  // answers held back by a fault point
  // Who watches a pass of the scrub, and which; bounded by control_callers_max.
  struct Watcher {
    std::uint64_t pass = 0;
    daemon::Reply reply;
  };
  std::vector<Watcher> watchers_;
  std::unique_ptr<loop::Timer> watch_timer_;
  std::unique_ptr<DataPlane> plane_;
  std::unique_ptr<store::Server> server_;
};

}  // namespace di::kvd
