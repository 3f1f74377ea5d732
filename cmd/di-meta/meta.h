// cmd/di-meta/meta.h: the directory daemon around service.h.
//
// Owner: the loop thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ctl.h"
#include "daemon/daemon.h"
#include "service.h"

namespace di::meta {

struct TenantConfig {
  std::string name;
  std::uint64_t quota_bytes = 0;
  kv::Evictor::OverQuota over = kv::Evictor::OverQuota::refuse;
  Duration ttl{0};
  Duration ttl_cap{0};
};

struct Config {
  daemon::CommonConfig common;
  std::string catalogue;
  std::uint32_t blocks_max = 0;
  Duration kv_ttl{0};
  Duration kv_ttl_cap{0};
  std::vector<TenantConfig> tenants;
  Duration reconcile{0};
  Duration cross_check{0};
  std::string geometry;
  bool lab = false;
  directory::RepairPolicy repair = directory::RepairPolicy::all;
  std::uint64_t repair_bytes_per_s = 0;
  Duration repair_after{0};
  Duration slow_start{0};
};
void params(config::Params& params, Config& config);

class Meta final : public daemon::ProgramOf<Config> {
 public:
  explicit Meta(Config config) : config_(std::move(config)) {}

  Status on_prepare(daemon::Daemon& daemon) override;
  Status on_start(daemon::Daemon& daemon) override;
  void on_stop(daemon::Daemon& daemon) override;
  bool on_ctl(const std::vector<std::string>& words, daemon::Reply reply) override;
  void on_dump() override;

 private:
  void register_metrics(daemon::Metrics& metrics);
  void register_tenants(daemon::Metrics& metrics);

  Config config_;
  std::unique_ptr<directory::Catalogue> catalogue_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<Control> control_;
};

}  // namespace di::meta
