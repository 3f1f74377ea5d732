// di-prefill: reads prompts.
//
// Owns a group of prefill ranks: their engines, KV pools and queues.  It is told what to prefill by
// di-router (prefill_bind, prefill_target), has the host's di-kvd fetch cached pages and takes its new
// pages there (kv_fetch, kv_open, kv_sealed, kv_handover), and streams the first token back
// (token_batch).  It never talks to clients and never decides where a request goes.
// See di-prefill(8).
#include "prefill.h"

int main(int argc, char** argv) {
  const di::daemon::Description about{"di-prefill",
                                      "reads prompts: chunked prefill, publishes KV, hands over"};
  const auto parsed = di::daemon::parse<di::worker::Config>(about, argc, argv, di::worker::prefill_params,
                                                            di::worker::validate);
  const auto program = di::prefill::make_program(parsed.config);
  return di::daemon::run(parsed, *program);
}
