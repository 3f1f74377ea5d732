// cmd/di-kvd/kvd.h: one program, two roles: what both are configured by.
#pragma once

#include "daemon/daemon.h"
#include "data_plane.h"
#include "host_role.h"
#include "store_role.h"

namespace di::kvd {

enum class Role : std::uint8_t { host, store };

struct Config {
  daemon::CommonConfig common;
  Role role = Role::host;
  DataConfig data;
  HostConfig host;
  StoreConfig store;
};
void params(config::Params& params, Config& config);
Status validate(const Config& config, const config::Params& rows);

}  // namespace di::kvd
