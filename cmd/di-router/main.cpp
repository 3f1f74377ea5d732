// di-router: HTTP in, tokens out.
//
// Owns client connections, the queue of each model, the reservations of running requests and the
// journal of charge records.  It matches prefixes at di-meta (meta_match), hints host daemons
// (kv_prefetch), binds to prefill ranks (prefill_bind), reserves decode seats (decode_seat) and turns
// their tokens (token_batch) into text.  When a worker is lost it re-enters with what was produced.
// It never touches KV bytes or tensors.
// See di-router(8).
#include "router.h"

int main(int argc, char** argv) {
  const di::daemon::Description about{"di-router", "HTTP in, tokens out: authenticates, routes, streams"};
  const auto parsed =
      di::daemon::parse<di::router::Config>(about, argc, argv, di::router::params, di::router::validate);
  di::router::Router program(parsed.config);
  return di::daemon::run(parsed, program);
}
