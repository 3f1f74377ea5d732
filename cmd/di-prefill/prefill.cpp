#include "prefill.h"

#include "rank/prefill.h"

namespace di::prefill {

namespace {

using daemon::FaultAction;
using daemon::FaultPoint;

std::unique_ptr<worker::RankCore> make_core(const worker::Config& config, std::uint16_t rank,
                                            const engine::Description& description) {
  rank::PrefillCore::Options options;
  options.rank = rank;
  options.requests_max = config.requests_max;
  options.chunk_tokens = config.chunk_tokens;
  options.swap_wait = config.swap_wait;
  options.overlap = config.overlap;
  // A script computes nothing: next to it every fetch would seem dear.
  options.arbiter = config.arbiter && config.engine.backend != worker::Backend::script;
  options.hold = config.hold;
  return std::make_unique<rank::PrefillCore>(options, description);
}

worker::FaultPlaces fault_places() {
  worker::FaultPlaces places;
  places.after_receive = [](const wire::Envelope& message) {
    if (message.number == wire::prefill_bind::number) daemon::fault(FaultPoint::prefill_after_bind);
  };
  places.step_done = [](const rank::BatchDone&) { daemon::fault(FaultPoint::prefill_mid_chunk); };
  places.before_send = [](const wire::Envelope& message) {
    switch (message.number) {
      case wire::kv_sealed::number:
        return daemon::fault(FaultPoint::prefill_before_sealed);
      case wire::kv_handover::number:
        return daemon::fault(FaultPoint::prefill_before_handover);
      case wire::request_done::number:
        return daemon::fault(FaultPoint::prefill_before_done);
      default:
        return FaultAction::none;
    }
  };
  places.after_send = [](const wire::Envelope& message) {
    if (message.number == wire::kv_sealed::number) daemon::fault(FaultPoint::prefill_after_sealed);
  };
  return places;
}

void count(daemon::Metrics& metrics, const worker::RankCore& rank, const daemon::Metrics::Labels& labels) {
  const auto& core = static_cast<const rank::PrefillCore&>(rank);
  metrics.counter_from(
      "di_prefill_tokens_total", "Tokens whose KV was computed here; not those swapped in",
      [&core] { return core.tokens_computed(); }, labels);
  metrics.counter_from(
      "di_prefill_swapped_blocks_total", "Blocks swapped in from the arena",
      [&core] { return core.blocks_swapped(); }, labels);
  metrics.counter_from(
      "di_prefill_steps_total", "Engine steps", [&core] { return core.steps(); }, labels);
  metrics.counter_from(
      "di_prefill_fetches_waited_total", "Fetches that were not there at once and were waited for",
      [&core] { return core.watch().counters().waited; }, labels);
  metrics.counter_from(
      "di_prefill_fetches_given_up_total", "Fetches whose blocks were computed instead",
      [&core] { return core.watch().counters().given_up; }, labels);
  metrics.counter_from(
      "di_prefill_blocks_given_up_total", "Blocks of such fetches",
      [&core] { return core.watch().counters().given_up_blocks; }, labels);
  metrics.counter_from(
      "di_prefill_blocks_cut_total",
      "Cached blocks that were sooner computed than fetched, by what di-kvd predicted",
      [&core] { return core.watch().counters().cut_blocks; }, labels);
  metrics.gauge_from(
      "di_prefill_queue_us", "Predicted work of the bound requests",
      [&core] { return static_cast<std::int64_t>(core.queue_us()); }, labels);
}

}  // namespace

std::unique_ptr<worker::RankProgram> make_program(const worker::Config& config) {
  return std::make_unique<worker::RankProgram>(
      config,
      [config](std::uint16_t rank, const engine::Description& description) {
        return make_core(config, rank, description);
      },
      fault_places(), count);
}

}  // namespace di::prefill
