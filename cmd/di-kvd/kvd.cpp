#include "kvd.h"

namespace di::kvd {

void params(config::Params& params, Config& config) {
  daemon::common_params(params, config.common, "di-kvd");
  params.choice<Role>("kvd.role", config.role, {{Role::store, "store"}},
                      {.def = Role::store, .help = "store: keeps a volume"});
  store_params(params, config.store);
}

Status validate(const Config& config) {
  if (config.role == Role::store) return store_validate(config.store);
  return {};
}

}  // namespace di::kvd
