#include "worker/config.h"

#include <algorithm>

#include "engine/cpu.h"
#include "engine/script.h"

namespace di::worker {

using namespace config::literals;

namespace {

// The script engine's context and vocabulary: those of the demo model, whose tokenizer the router uses.
constexpr std::uint32_t script_context_tokens = 16384;
constexpr std::uint32_t script_vocab = 1u << 20;

void shared_params(config::Params& params, Config& config) {
  EngineConfig& engine = config.engine;
  params.choice(
      "engine.backend", engine.backend, {{Backend::cpu, "cpu"}, {Backend::script, "script"}},
      {.def = Backend::cpu, .help = "what computes tokens: the built-in CPU engine, or a script for tests"});
  params.string("engine.script", engine.script,
                {.path = true, .help = "file of the script engine, see di-script(5)"});
  params.choice("engine.script_layout", engine.script_layout,
                {{ScriptLayout::demo, "demo"}, {ScriptLayout::v3, "v3"}, {ScriptLayout::v41, "v41"}},
                {.def = ScriptLayout::demo, .help = "KV layout that the script engine has"});
  params.integer(
      "engine.step_delay_ms", engine.step_delay_ms,
      {.def = 0, .max = 60000, .unit = "ms", .help = "makes every step so much longer, for tests"});
  params.integer("engine.ranks", config.ranks,
                 {.def = 1, .min = 1, .max = 64, .help = "ranks in this process"});
  params.string("model.path", engine.model_path,
                {.def = "etc/model-demo", .path = true, .help = "Hugging Face folder of the model"});
  params.string("model.name", engine.model_name, {.def = "demo", .help = "name that requests ask for"});
  params.string("model.revision", engine.model_revision,
                {.check = [](const std::string& text) -> Status {
                   Bytes raw;
                   if (text.empty() || (from_hex(text, raw) && raw.size() == 32)) return {};
                   return Error{Code::invalid, 0, "want 64 hexadecimal digits"};
                 },
                 .help = "weight revision; empty: computed from the files"});
  params.integer("model.context_tokens_max", engine.context_tokens_max,
                 {.def = 0,
                  .max = 1 << 24,
                  .unit = "tokens",
                  .help = "longest prompt plus answer; 0: what the model allows"});
  params.duration(
      "kv.swap_wait", config.swap_wait,
      {.def = milliseconds(20), .max = seconds(10), .help = "longest wait of a step for a late layer group"});
}

}  // namespace

void prefill_params(config::Params& params, Config& config) {
  daemon::common_params(params, config.common, "di-prefill");
  shared_params(params, config);
  params.size("kv.pool", config.engine.pool_bytes,
              {.def = 256_MiB, .min = 1_MiB, .help = "KV pool of each rank"});
  params.integer(
      "prefill.requests_max", config.requests_max,
      {.def = 16, .min = 1, .max = 4096, .unit = "requests", .help = "requests bound to a rank at a time"});
  params.integer(
      "prefill.chunk_tokens", config.chunk_tokens,
      {.def = 512, .min = 1, .max = 65536, .unit = "tokens", .help = "tokens of one step over all requests"});
  params.boolean("kv.overlap", config.overlap,
                 {.def = true, .help = "compute a layer group while the next one is still being fetched"});
  params.boolean("kv.arbiter", config.arbiter,
                 {.def = true, .help = "compute cached blocks that would take longer to come"});
  params.duration("prefill.hold", config.hold,
                  {.def = seconds(60), .min = seconds(1), .help = "how long finished pages wait for a seat"});
}

void decode_params(config::Params& params, Config& config) {
  daemon::common_params(params, config.common, "di-decode");
  shared_params(params, config);
  params.size("kv.pool", config.engine.pool_bytes,
              {.def = 512_MiB, .min = 1_MiB, .help = "KV pool of each rank"});
  params.integer("decode.requests_max", config.requests_max,
                 {.def = 128, .min = 1, .max = 4096, .unit = "requests", .help = "seats of a rank"});
  params.duration("decode.seat_ttl", config.seat_ttl,
                  {.def = seconds(30), .min = seconds(1), .help = "how long a seat waits for its hand-over"});
}

Status validate(const Config& config, const config::Params& rows) {
  if (config.engine.backend == Backend::script) {
    if (!config.engine.script.empty()) return {};
    return config::wrong(rows, {"engine.backend"}, "\"script\" needs engine.script");
  }
  return {};
}

Result<std::unique_ptr<engine::Engine>> make_engine(const EngineConfig& config, const std::string& run_dir,
                                                    std::uint32_t sequences_max, std::uint32_t chunk_tokens,
                                                    const Clock& clock) {
  std::optional<Key> revision;
  if (!config.model_revision.empty()) {
    Bytes raw;
    DI_ASSERT(from_hex(config.model_revision, raw) && raw.size() == 32);
    revision.emplace();
    std::copy(raw.begin(), raw.end(), revision->raw.begin());
  }
  if (config.backend == Backend::script) {
    auto lines = engine::script_load(config.script);
    if (!lines) return lines.error();
    const kv::Layout layout = config.script_layout == ScriptLayout::v41  ? kv::layout_v41()
                              : config.script_layout == ScriptLayout::v3 ? kv::layout_v3()
                                                                         : engine::script_layout();
    const std::uint64_t blocks = config.pool_bytes / layout.block_bytes();
    engine::ScriptEngine::Options options{
        .description = engine::Description{
            .model = config.model_name,
            .layout = layout,
            .revision = revision.value_or(Key{}),
            .context_tokens_max =
                config.context_tokens_max == 0 ? script_context_tokens : config.context_tokens_max,
            .vocab = script_vocab,
            .pool_blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(blocks, 1u << 30)),
            .sequences_max = sequences_max,
            .wants_debug_text = true}};
    options.lines = *std::move(lines);
    options.step_delay = milliseconds(config.step_delay_ms);
    options.state_dir = run_dir + "/script";
    options.clock = &clock;
    auto made = engine::ScriptEngine::create(std::move(options));
    if (!made) return made.error();
    return std::unique_ptr<engine::Engine>(*std::move(made));
  }
  engine::CpuOptions options;
  options.folder = config.model_path;
  options.model = config.model_name;
  options.sequences_max = sequences_max;
  options.context_tokens_max = config.context_tokens_max;
  options.step_rows_max = std::max(chunk_tokens, sequences_max);
  options.pool_bytes = config.pool_bytes;
  options.revision = revision;
  options.step_delay = milliseconds(config.step_delay_ms);
  return engine::cpu_engine_create(std::move(options));
}

}  // namespace di::worker
