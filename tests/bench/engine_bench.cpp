// How fast the built-in engine is on one core: prefill tokens per second and the time of a decode step.
//
//   engine_bench [FOLDER [PATH]]     default etc/model-demo and the best path (scalar, avx2, avx512)
//
// Prints one tab-separated row per measurement and asserts nothing.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "base/rng.h"
#include "engine/cpu.h"

namespace {

using namespace di;
using namespace di::engine;

// Time of this thread on a core, so that a shared machine does not show; the engine has one thread.
double core_s() {
  timespec at{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
  return static_cast<double>(at.tv_sec) + static_cast<double>(at.tv_nsec) * 1e-9;
}

SequenceSpec random_prompt(Rng& rng, std::uint32_t tokens, std::uint32_t answer, std::uint32_t vocab) {
  SequenceSpec spec;
  for (std::uint32_t i = 0; i < tokens; ++i)
    spec.tokens.push_back(static_cast<std::uint32_t>(rng.below(vocab)));
  spec.known_tokens_max = tokens + answer;
  spec.sampling.top_p = 1.0f;
  spec.sampling.max_tokens = answer;
  return spec;
}

void prefill(Engine& engine, Rng& rng, std::uint32_t tokens, std::uint32_t chunk) {
  const auto id = engine.admit(random_prompt(rng, tokens, 1, engine.describe().vocab));
  if (!id) return (void)std::printf("prefill\t%u\t%u\t%s\n", tokens, chunk, id.error().message.c_str());
  const double start_s = core_s();
  for (std::uint32_t done = 0; done < tokens; done += chunk) {
    (void)engine.step({{{*id, std::min(chunk, tokens - done)}}, Duration{}}, Instant{});
  }
  const double taken_s = core_s() - start_s;
  std::printf("prefill\t%u\t%u\t%.1f ms\t%.0f tokens/s\n", tokens, chunk, taken_s * 1e3, tokens / taken_s);
  engine.release(*id);
}

void decode(Engine& engine, Rng& rng, std::uint32_t streams, std::uint32_t context) {
  constexpr std::uint32_t steps = 20;
  StepPlan plan;
  std::vector<SequenceId> ids;
  for (std::uint32_t i = 0; i < streams; ++i) {
    const auto id = engine.admit(random_prompt(rng, context, steps + 1, engine.describe().vocab));
    if (!id) return (void)std::printf("decode\t%u\t%u\t%s\n", streams, context, id.error().message.c_str());
    ids.push_back(*id);
    (void)engine.step({{{*id, context}}, Duration{}}, Instant{});
    plan.rows.push_back({*id, 1});
  }
  const double start_s = core_s();
  for (std::uint32_t i = 0; i < steps; ++i) (void)engine.step(plan, Instant{});
  const double step_s = (core_s() - start_s) / steps;
  std::printf("decode\t%u\t%u\t%.2f ms\t%.0f tokens/s\n", streams, context, step_s * 1e3, streams / step_s);
  for (const SequenceId id : ids) engine.release(id);
}

}  // namespace

int main(int argc, char** argv) {
  CpuOptions options;
  options.folder = argc > 1 ? argv[1] : DI_SOURCE_DIR "/etc/model-demo";
  options.pool_blocks = 8192;
  const std::string path = argc > 2 ? argv[2] : "best";
  options.path = path == "scalar"   ? CpuPath::scalar
                 : path == "avx2"   ? CpuPath::avx2
                 : path == "avx512" ? CpuPath::avx512
                                    : CpuPath::best;
  const auto engine = cpu_engine_create(options);
  if (!engine) {
    std::fprintf(stderr, "engine_bench: %s\n", engine.error().message.c_str());
    return 1;
  }
  Rng rng(1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::printf("what\ttokens or streams\tchunk or context\ttime\trate\n");
  prefill(**engine, rng, 128, 128);
  prefill(**engine, rng, 2000, 2000);
  prefill(**engine, rng, 2000, 256);
  for (const std::uint32_t streams : {1u, 8u, 64u}) decode(**engine, rng, streams, 200);
  decode(**engine, rng, 1, 4000);
  decode(**engine, rng, 16, 2000);
  return 0;
}
