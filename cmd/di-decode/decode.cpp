#include "decode.h"

#include "base/crypto.h"
#include "rank/decode.h"

namespace di::decode {

namespace {

using daemon::FaultAction;
using daemon::FaultPoint;

std::unique_ptr<worker::RankCore> make_core(const worker::Config& config, std::uint16_t rank,
                                            const engine::Description& description) {
  rank::DecodeCore::Options options;
  options.rank = rank;
  options.requests_max = config.requests_max;
  options.swap_wait = config.swap_wait;
  options.seat_ttl = config.seat_ttl;
  options.first_seat = random_u64() >> 16;
  return std::make_unique<rank::DecodeCore>(options, description);
}

worker::FaultPlaces fault_places() {
  worker::FaultPlaces places;
  places.step_done = [](const rank::BatchDone&) { daemon::fault(FaultPoint::decode_mid_step); };
  places.before_send = [](const wire::Envelope& message) {
    switch (message.number) {
      case wire::kv_sealed::number:
        return daemon::fault(FaultPoint::decode_before_sealed);
      case wire::request_done::number:
        return daemon::fault(FaultPoint::decode_before_done);
      default:
        return FaultAction::none;
    }
  };
  places.after_send = [](const wire::Envelope& message) {
    switch (message.number) {
      case wire::seat_granted::number:
        daemon::fault(FaultPoint::decode_after_seat);
        break;
      case wire::decode_started::number:
        daemon::fault(FaultPoint::decode_after_started);
        break;
      case wire::token_batch::number:
        daemon::fault(FaultPoint::decode_after_first_batch);
        break;
      default:
        break;
    }
  };
  return places;
}

void count(daemon::Metrics& metrics, const worker::RankCore& rank, const daemon::Metrics::Labels& labels) {
  const auto& core = static_cast<const rank::DecodeCore&>(rank);
  metrics.counter_from(
      "di_decode_tokens_total", "Tokens produced", [&core] { return core.tokens_produced(); }, labels);
  metrics.counter_from(
      "di_decode_steps_total", "Engine steps", [&core] { return core.steps(); }, labels);
  metrics.counter_from(
      "di_decode_pages_given_up_total", "Finished pages that found no slot in the arena",
      [&core] { return core.pages_given_up(); }, labels);
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

}  // namespace di::decode
