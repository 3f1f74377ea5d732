// di-meta: says where things are.
//
// Owns the directory (which block is in which page of which arena or store), the leases of plans, the
// list of members with their generations, and the catalogue (one SQLite file) that outlives a restart.
// Everybody registers here (meta_register) and learns the others from here (meta_members).  Routers ask
// how much of a prompt is cached (meta_match), host di-kvds where exactly (meta_plan), and report what
// their arenas hold (meta_arena_delta); writes to the store are opened and published here (meta_put_*),
// and stores report what they hold (meta_inventory).  It never moves KV bytes.
// See di-meta(8).
#include "meta.h"

int main(int argc, char** argv) {
  const di::daemon::Description about{"di-meta", "says where things are: directory, membership, leases"};
  auto parsed = di::daemon::parse<di::meta::Config>(about, argc, argv, di::meta::params);
  parsed.startup.accept_unregistered = true;
  di::meta::Meta program(parsed.config);
  return di::daemon::run(parsed, program);
}
