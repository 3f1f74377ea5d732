// di-ctl: asks and steers the daemons of a fleet over their control sockets (RUNDIR/INSTANCE.ctl).
//
// Keeps no state.  Rows of the answers are generic, so a daemon
// can list something new without a change here.  It also makes keys, and for scripts/di-up it reads
// fleet.toml and asks a router whether it serves.
// See di-ctl(8).
#include <signal.h>
#include <unistd.h>

#include "commands.h"

int main(int argc, char** argv) {
  // A reader that has seen enough (`| head`) ends us quietly.
  ::signal(SIGPIPE, SIG_DFL);
  const di::daemon::ControlFlags flags = di::daemon::parse_control_flags(argc, argv, di::ctl::command_list());
  return di::ctl::run(flags, ::isatty(STDOUT_FILENO) == 1);
}
