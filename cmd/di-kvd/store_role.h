// cmd/di-kvd/store_role.h: di-kvd as the keeper of volumes, around store/server.h.
//
// Owner: the loop thread.  Serves the host di-kvds (kv_read, kv_put) and di-meta (inventory, kv_free).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "daemon/daemon.h"
#include "data_plane.h"
#include "store/server.h"

namespace di::kvd {

enum class Durability : std::uint8_t { standard, strict };

struct StoreConfig {
  std::string path;                  // of the only volume
  std::vector<std::string> volumes;  // or of all of them
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = 0;
  bool prewrite = false;
  Durability durability = Durability::standard;
  Duration scrub_interval{0};
  std::uint64_t scrub_bytes_per_s = 0;
  std::uint64_t endurance_bytes = 0;
  Duration service_life{0};
  std::uint32_t io_threads = 0;
  store::IoMode io = store::IoMode::automatic;
};
void store_params(config::Params& params, StoreConfig& config);
Status store_validate(const StoreConfig& config, const config::Params& rows);

class StoreRole final : public daemon::Program {
 public:
  StoreRole(StoreConfig config, DataConfig data)
      : config_(std::move(config)), data_config_(std::move(data)) {}
  ~StoreRole() override;

  // Opens the volumes, or makes those that are not there.
  Status on_prepare(daemon::Daemon& daemon) override;
  Status on_start(daemon::Daemon& daemon) override;
  void on_stop(daemon::Daemon& daemon) override;
  bool on_ctl(const daemon::Words& words, daemon::Reply reply) override;
  void on_dump() override;

 private:
  struct Opened {
    store::Mount::Backing backing;
    bool direct = false;
  };
  Result<Opened> open_volume(const std::string& path) const;
  Result<store::DiskFile> make_volume(const std::string& path) const;
  Result<store::DiskFile> make_folder(const std::string& path) const;
  // Tells now and then how far a volume is that is being made, and the supervisor that it goes on.
  [[nodiscard]] std::function<void(std::uint64_t)> progress_of(const std::string& path) const;
  Status make_on_device(const std::string& path, store::Disk& disk) const;
  // Gives an opened volume its thread.
  Status add_pool(Opened& opened, std::uint16_t volume, std::shared_ptr<store::DiskFigures> figures) const;
  Status format(store::Disk& disk) const;
  void register_metrics(daemon::Metrics& metrics);
  static void register_metrics(daemon::Metrics& metrics, const store::Mount& mount);
  [[nodiscard]] static std::string_view state_of(const store::Mount& mount);
  void peer_up(const net::Member& member);
  void peer_lost(net::PeerId id);
  void deliver(const net::Incoming& in);
  void put_written(std::function<void()> answer);
  void ctl_scrub(daemon::Reply reply);
  void ctl_check(daemon::Reply reply);
  void ctl_volumes(daemon::Reply reply);
  void ctl_return(const std::string& number, daemon::Reply reply);
  void return_late(std::uint16_t volume);
  void return_opened(std::uint16_t volume, Result<Opened> opened);
  void ctl_kv(daemon::Reply reply);
  void scrub_tell();
  // The volumes that take no columns, and why.
  void tell_degraded();

  StoreConfig config_;
  DataConfig data_config_;
  daemon::Daemon* daemon_ = nullptr;
  std::vector<Opened> opened_;  // until on_start
  std::vector<bool> direct_;    // by volume
  std::unordered_map<net::PeerId, net::Member> peers_;
  std::vector<std::unique_ptr<loop::Timer>> delayed_;  // answers held back by a fault point
  // Who watches passes of the scrub, and which; bounded by control_callers_max.
  struct Watcher {
    std::vector<std::uint64_t> passes;   // by volume
    std::vector<std::uint16_t> running;  // volumes that are not through
    daemon::Reply reply;
  };
  std::vector<Watcher> watchers_;
  std::unique_ptr<loop::Timer> watch_timer_;
  std::unique_ptr<DataPlane> plane_;
  std::unique_ptr<store::Server> server_;
  // Volumes that are being put back into service, each opened by a thread of its own beside the loop: a disk
  // that does not answer keeps nobody else from it.
  struct Returning {
    std::optional<daemon::Reply> reply;  // none: the caller was told that it takes longer
    std::unique_ptr<loop::Timer> late;
    std::thread opener;
  };
  std::map<std::uint16_t, Returning> returning_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace di::kvd
