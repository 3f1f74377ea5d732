#include "decode.h"

#include "rank/decode.h"

namespace di::decode {

namespace {

using Core = worker::RankCoreOf<rank::DecodeCore>;
using daemon::FaultAction;
using daemon::FaultPoint;

std::unique_ptr<worker::RankCore> make_core(const worker::Config& config, std::uint16_t rank,
                                            const engine::Description& description) {
  rank::DecodeCore::Options options;
  options.rank = rank;
  options.requests_max = config.requests_max;
  options.swap_wait = config.swap_wait;
  options.seat_ttl = config.seat_ttl;
  return std::make_unique<Core>(options, description);
}

worker::FaultPlaces fault_places() {
  worker::FaultPlaces places;
  places.step_done = [](const rank::BatchDone&) { daemon::fault(FaultPoint::decode_mid_step); };
  places.before_send = [](const wire::Envelope& message) {
    switch (message.number) {
      case wire::kv_sealed::number: return daemon::fault(FaultPoint::decode_before_sealed);
      case wire::request_done::number: return daemon::fault(FaultPoint::decode_before_done);
      default: return FaultAction::none;
    }
  };
  places.after_send = [](const wire::Envelope& message) {
    switch (message.number) {
      case wire::seat_granted::number: daemon::fault(FaultPoint::decode_after_seat); break;
      case wire::decode_started::number: daemon::fault(FaultPoint::decode_after_started); break;
      case wire::token_batch::number: daemon::fault(FaultPoint::decode_after_first_batch); break;
      default: break;
    }
  };
  return places;
}

}  // namespace

Decode::Decode(const worker::Config& config)
    : config_(config),
      worker_(
          config,
          [config](std::uint16_t rank, const engine::Description& description) {
            return make_core(config, rank, description);
          },
          fault_places()) {}

Status Decode::on_start(daemon::Daemon& daemon) {
  for (std::uint16_t rank = 0; rank < config_.ranks; ++rank) {
    const auto& core = static_cast<const Core&>(worker_.core(rank)).core;
    const daemon::Metrics::Labels labels{{"rank", std::to_string(rank)}};
    daemon::Metrics& metrics = daemon.metrics();
    metrics.counter_from("di_decode_tokens_total", "Tokens produced", [&core] { return core.tokens_produced(); }, labels);
    metrics.counter_from("di_decode_steps_total", "Engine steps", [&core] { return core.steps(); }, labels);
    metrics.counter_from("di_decode_pages_given_up_total", "Finished pages that found no slot in the arena",
                         [&core] { return core.pages_given_up(); }, labels);
  }
  return worker_.start(daemon);
}

bool Decode::on_ctl(const std::vector<std::string>& words, daemon::Reply reply) {
  return worker_.control(words, reply);
}

}  // namespace di::decode
