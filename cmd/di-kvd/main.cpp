// di-kvd: holds KV bytes.
//
// As `host` it owns the arena of a machine: the shared memory in which every rank of that machine reads
// and writes KV pages (kv_open, kv_sealed, kv_fetch), brings pages in from stores, writes new ones back,
// and hands requests over between arenas (handover_*).  As `store` it owns a volume: pages on a disk
// (kv_read, kv_put).  It asks di-meta where pages are (meta_plan) and reports what it has.  It never
// computes, and never decides what is evicted from a store.
// See di-kvd(8) and di-volume(5).
#include "kvd.h"

int main(int argc, char** argv) {
  const di::daemon::Description about{"di-kvd",
                                      "holds KV bytes: the arena of a host, or a volume of the store"};
  const auto parsed =
      di::daemon::parse<di::kvd::Config>(about, argc, argv, di::kvd::params, di::kvd::validate);
  // Neither role has anything to reload besides the skeleton's own rows.
  const di::daemon::Reload reload = [](const std::any&) -> di::Status { return {}; };
  if (parsed.config.role == di::kvd::Role::host) {
    di::kvd::HostRole program(parsed.config.host, parsed.config.data);
    return di::daemon::run_program(parsed.startup, program, reload);
  }
  di::kvd::StoreRole program(parsed.config.store, parsed.config.data);
  return di::daemon::run_program(parsed.startup, program, reload);
}
