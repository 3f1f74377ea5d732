#include "worker/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "config/toml.h"

namespace di::worker {
namespace {

std::string script_file(const std::string& text) {
  const std::string path = testing::TempDir() + "di-worker-" + std::to_string(getpid()) + ".jsonl";
  std::ofstream(path) << text;
  return path;
}

TEST(WorkerConfig, RowsHaveDefaultsThatValidate) {
  for (void (*bind)(config::Params&, Config&) : {prefill_params, decode_params}) {
    Config config;
    config::Params params;
    bind(params, config);
    EXPECT_TRUE(validate(config, params));
    EXPECT_GE(config.requests_max, 1U);
    EXPECT_GE(config.engine.pool_bytes, 1U << 20);
  }
}

TEST(WorkerConfig, AScriptBackendNeedsAScript) {
  Config config;
  config::Params params;
  decode_params(params, config);
  ASSERT_TRUE(config::parse_text(params, "[engine]\nbackend = \"script\"\n", "d.toml").empty());
  EXPECT_EQ(validate(config, params).error().message,
            "d.toml:2:11: engine.backend: \"script\" needs engine.script");
  config.engine.script = "x";
  EXPECT_TRUE(validate(config, params));
}

TEST(MakeEngine, ScriptEngineHasTheLayoutAndPoolAskedFor) {
  const ManualClock clock;
  EngineConfig config;
  config.backend = Backend::script;
  config.model_name = "demo";
  config.script = script_file("{\"match\":\"\",\"pieces\":[{\"text\":\"a\"}]}\n");
  config.pool_bytes = 64 << 20;
  const std::string run = testing::TempDir();
  auto engine = make_engine(config, run, 4, 512, clock);
  ASSERT_TRUE(engine) << engine.error().message;
  const engine::Description& demo = (*engine)->describe();
  EXPECT_EQ(demo.pool_blocks, config.pool_bytes / demo.layout.block_bytes());
  EXPECT_TRUE(demo.wants_debug_text);
  config.script_layout = ScriptLayout::v41;
  auto v41 = make_engine(config, run, 4, 512, clock);
  ASSERT_TRUE(v41);
  EXPECT_EQ((*v41)->describe().layout.fingerprint(), kv::layout_v41().fingerprint());
}

TEST(MakeEngine, ErrorsNameTheFile) {
  const ManualClock clock;
  EngineConfig config;
  config.backend = Backend::script;
  config.script = script_file("{\"match\":\"\",\"pieces\":[]}\nnot json\n");
  config.pool_bytes = 1 << 20;
  auto broken = make_engine(config, testing::TempDir(), 1, 1, clock);
  ASSERT_FALSE(broken);
  EXPECT_NE(broken.error().message.find(config.script + ":2"), std::string::npos) << broken.error().message;
  config.backend = Backend::cpu;
  config.model_path = "/nonexistent/model";
  auto missing = make_engine(config, testing::TempDir(), 1, 1, clock);
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message.find("/nonexistent/model"), std::string::npos) << missing.error().message;
}

}  // namespace
}  // namespace di::worker
