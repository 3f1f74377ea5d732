#include "kvd.h"

namespace di::kvd {

void params(config::Params& params, Config& config) {
  daemon::common_params(params, config.common, "di-kvd");
  params.choice<Role>("kvd.role", config.role, {{Role::host, "host"}, {Role::store, "store"}},
                      {.def = Role::host, .help = "host: the arena of a machine; store: keeps a volume"});
  data_params(params, config.data);
  host_params(params, config.host);
  store_params(params, config.store);
}

Status validate(const Config& config, const config::Params& rows) {
  switch (config.role) {
    case Role::host:
      return {};
    case Role::store:
      return store_validate(config.store, rows);
  }
  return {};
}

}  // namespace di::kvd
