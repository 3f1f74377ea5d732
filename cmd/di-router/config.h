// cmd/di-router/config.h: the parameters of di-router.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/param.h"
#include "daemon/daemon.h"

namespace di::router {

struct KeyConfig {
  std::string key;
  std::string tenant;
};

struct Config {
  daemon::CommonConfig common;
  std::string http_listen;
  std::string admin_listen;
  std::uint64_t body_bytes_max = 0;
  std::uint32_t connections_max = 0;
  std::string model_name;
  std::string model_path;
  std::uint32_t context_tokens_max = 0;
  std::uint32_t output_tokens_default = 0;
  bool auth_required = true;
  std::string auth_key_file;
  std::vector<KeyConfig> auth_keys;
  std::uint32_t concurrency_max = 0;
  std::uint32_t requests_max = 0;
  std::uint16_t attempts_max = 0;
  Duration match_wait{};
  Duration first_token_wait{};
  Duration next_token_wait{};
  Duration total_wait{};
  Duration seat_ahead{};
  Duration keep_alive{};
  Duration settle{};
  std::string journal_dir;
};

void params(config::Params& params, Config& config);
[[nodiscard]] Status validate(const Config& config, const config::Params& rows);

}  // namespace di::router
