// worker/config.h: the parameters that di-prefill and di-decode share, and the engine they name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "config/param.h"
#include "daemon/daemon.h"
#include "engine/engine.h"

namespace di::worker {

enum class Backend : std::uint8_t { cpu, script };
enum class ScriptLayout : std::uint8_t { demo, v3, v41 };

struct EngineConfig {
  Backend backend = Backend::cpu;
  std::string model_path;
  std::string model_name;
  std::string model_revision;  // 64 hexadecimal digits; empty: computed from the files
  std::string script;
  ScriptLayout script_layout = ScriptLayout::demo;
  std::uint64_t step_delay_ms = 0;
  std::uint64_t pool_bytes = 0;
  std::uint32_t context_tokens_max = 0;  // 0: what the model allows
};

struct Config {
  daemon::CommonConfig common;
  EngineConfig engine;
  std::uint16_t ranks = 1;
  std::uint32_t requests_max = 0;
  std::uint32_t chunk_tokens = 0;
  bool overlap = true;
  bool arbiter = true;
  Duration swap_wait{};
  Duration hold{};
  Duration seat_ttl{};
};

// Binds the rows; `program` decides which defaults and which of the last rows apply.
void prefill_params(config::Params& params, Config& config);
void decode_params(config::Params& params, Config& config);
// Rows together: a script for the script backend, a model folder for the others.
[[nodiscard]] Status validate(const Config& config, const config::Params& rows);

// Makes one rank's engine.  Blocks while weights are mapped and checked.  `sequences_max` is the rank's
// requests_max; `clock` is product time and outlives the engine.
[[nodiscard]] Result<std::unique_ptr<engine::Engine>> make_engine(const EngineConfig& config,
                                                                  const std::string& run_dir,
                                                                  std::uint32_t sequences_max,
                                                                  std::uint32_t chunk_tokens,
                                                                  const Clock& clock);

}  // namespace di::worker
