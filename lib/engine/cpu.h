// engine/cpu.h: the built-in engine: DeepSeek-V3 models on CPUs, exact and deterministic.
//
// Owner: the engine thread; a step runs on it alone.  Weights are mapped, not read; the pool and all
// scratch are taken at creation.  Bounds: `pool_blocks`, `sequences_max`, `step_rows_max` rows in one pass (a
// plan with more is cut into several passes, which changes no bit of any result).
//
// Cached KV arrives while a pass runs: before the first layer of each layer group the engine copies what is
// there into the pool, waits for what is not, up to StepPlan::swap_wait for all rows together, and drops
// rows that are still late from this step only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "engine/engine.h"

namespace di::engine {

enum class CpuPath : std::uint8_t { best, scalar, avx2, avx512 };
enum class CpuCache : std::uint8_t { bf16, f32 };

struct CpuOptions {
  std::string folder;  // a Hugging Face folder: config.json and safetensors
  std::string model;   // served name; empty: the last part of `folder`
  std::uint32_t pool_blocks = 1024;
  std::uint64_t pool_bytes = 0;  // when not 0: as many blocks as fit, instead of pool_blocks
  std::uint32_t sequences_max = 64;
  std::uint32_t block_tokens = 0;        // 0: 32 when a token has less than 4 KiB of KV, else 64
  std::uint32_t context_tokens_max = 0;  // 0: what the model allows; never more than the pool holds
  std::uint32_t step_rows_max = 512;     // scratch: about 20 * hidden floats a row
  CpuCache cache = CpuCache::bf16;       // f32: for comparison with a reference
  CpuPath path = CpuPath::best;
  std::optional<Key> revision;  // model.revision; otherwise that of the files
  Duration step_delay{};        // engine.step_delay_ms

  // Sees the logits [vocab] of every computed row, at its absolute position.
  std::function<void(SequenceId, std::uint32_t, std::span<const float>)> test_logits;
};

// Blocks.  Errors name the file and key or tensor: not_found, invalid, corrupt, unsupported (also a path that
// this processor lacks), no_space.
[[nodiscard]] Result<std::unique_ptr<Engine>> cpu_engine_create(CpuOptions options);

}  // namespace di::engine
