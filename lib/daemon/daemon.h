// daemon/daemon.h: what every daemon does the same way: command line, configuration, log, pid file,
// signals, control socket, metrics, readiness, watchdog, graceful stop.
//
// A main.cpp:
//
//   int main(int argc, char** argv) {
//     const di::daemon::Description about{"di-kvd", "holds KV bytes"};
//     auto parsed = di::daemon::parse<di::kvd::Config>(about, argc, argv, di::kvd::params);
//     di::kvd::Kvd kvd(parsed.config);                   // a daemon::Program
//     return di::daemon::run(parsed, kvd);
//   }
//
// where Config has a member `daemon::CommonConfig common` whose rows params() binds with
// common_params().  parse() handles -f -n -v -V -o -h --ready-fd, and exits by itself: 0 after -h, -V
// and a good -n, 64 for a wrong command line, 78 for a wrong configuration (every error on a line of
// its own).
//
// run(): log -> prepare -> drop rights -> start -> ready -> loop -> stop.  Owner of everything here:
// the main thread, which is the loop thread.
#pragma once

#include <any>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/result.h"
#include "config/param.h"
#include "daemon/control.h"
#include "daemon/exit.h"
#include "daemon/faults.h"
#include "daemon/heartbeat.h"
#include "daemon/metrics.h"
#include "loop/loop.h"
#include "net/keys.h"
#include "net/meta_client.h"
#include "net/peer.h"

namespace di::daemon {

inline constexpr Duration drain_over_wait = seconds(1);
inline constexpr std::size_t degraded_bytes_max = 512;

struct Description {
  std::string_view program;  // "di-kvd"
  std::string_view summary;  // one line, for -h
};

// The rows that every daemon has.
struct CommonConfig {
  std::string run_dir;
  std::string instance;       // "di-kvd.host0"
  std::string meta_endpoint;  // empty: ipc://RUNDIR/di-meta.0.sock
  std::string meta_public_key;
  LogLevel log_level = LogLevel::info;
  bool clock_manual = false;
  std::string fault_at;
  std::string metrics_listen;  // "host:port" or empty
  std::string net_host;        // empty: the name of the machine
  std::string net_rack;
  std::string net_zone;
  std::string net_bind;         // empty: ipc://RUNDIR/INSTANCE.sock
  std::string net_advertise;    // empty: what was bound
  std::string net_secret_key;   // a file, or a folder with INSTANCE.secret; empty: no CURVE
  std::string net_public_keys;  // a file
  bool net_insecure = false;
  Duration drain_timeout{0};  // between the request to stop and giving up on what is left
};
void common_params(config::Params& params, CommonConfig& common, std::string_view program);

class Daemon;

// What a program implements.  All calls are on the loop thread.
class Program {
 public:
  virtual ~Program() = default;
  // Still privileged, no loop running: listening sockets, locked memory, devices.  What takes long looks at
  // stop_asked() and ends with the error `cancelled`.
  virtual Status on_prepare(Daemon&) { return {}; }
  // Starts work.  Calls daemon.ready() here or in a later turn.
  virtual Status on_start(Daemon&) = 0;
  // Drains and persists; calls daemon.stopped() here or later.
  virtual void on_stop(Daemon& daemon);
  // drain.timeout has passed, or work has become impossible (right after on_stop, then): end what is left, so
  // that nobody waits for it and nothing of it is lost, and call daemon.stopped().  After drain_over_wait the
  // process ends without it.
  virtual void on_drain_over(Daemon& daemon);
  // Commands other than the skeleton's own (show config|metrics|gauges|faults|status, log, clock,
  // reload).  False: this daemon has no such command.
  virtual bool on_ctl(const Words& words, Reply reply);
  // Product time moved (clock.manual) and the loop's due timers have run: run what other threads
  // owe, then call `done`.
  virtual void on_clock_advanced(loop::Callback done) { done(); }
  // SIGUSR1: state to the log, at info.
  virtual void on_dump() {}
};

// Adds the reload of a typed configuration.
template <class C>
class ProgramOf : public Program {
 public:
  // Only rows marked reloadable differ from what is running.  An error leaves everything as it is.
  virtual Status on_reload(const C& fresh) {
    static_cast<void>(fresh);
    return {};
  }
};

class Daemon {
 public:
  [[nodiscard]] loop::Loop& loop();
  [[nodiscard]] Metrics& metrics();
  [[nodiscard]] const CommonConfig& config() const;
  [[nodiscard]] std::string_view instance() const;
  // RUNDIR/INSTANCE.SUFFIX
  [[nodiscard]] std::string path(std::string_view suffix) const;

  // Messages to other instances.  Set its handlers in on_start, then listen(), then enroll().
  [[nodiscard]] net::Endpoint& endpoint();
  // Binds net.bind.  `allow_unregistered` as in net::Endpoint::Options is set by di-meta only.
  Result<std::string> listen();
  // A Member with what the configuration says: instance, program, labels, control address.
  [[nodiscard]] net::Member self_member() const;
  // Registers at meta.endpoint.  A refusal is a runtime failure of the daemon unless
  // events.refused is set.  Once.
  net::MetaClient& enroll(net::Member self, net::MetaClient::Events events);
  [[nodiscard]] net::MetaClient* meta();

  // The daemon serves: `ready` line, byte on --ready-fd, READY=1 to systemd.  Once; later calls do
  // nothing.
  void ready();
  // Ready, not stopping, no background loop is late, and something can be served.
  [[nodiscard]] bool is_ready() const;
  // What it serves without, in one line for the operator; empty: nothing.  It stays ready: `show status`,
  // /health/ready and the status line of systemd say it.  Control characters become blanks, and what is longer
  // than degraded_bytes_max is cut.  With `serves` false nothing is left to serve with, and it is not ready: it stays
  // up, as another start would mend nothing.
  void degraded(std::string_view what, bool serves = true);
  // A background loop that must move, see daemon/heartbeat.h.  Before on_start returns.
  Heartbeats::Beat& heartbeat(std::string_view name, Duration late_after);
  // Asks for a graceful stop, as SIGTERM does.
  void stop();
  // Before the loop runs: a signal to stop has come, and waits for it.
  [[nodiscard]] bool stop_asked() const;
  // The program has nothing left to do: ends the loop.
  void stopped();
  // Work has become impossible: one error line, then a stop that waits for nothing, with exit status 1.
  void fail(const Error& error);

  struct Impl;
  explicit Daemon(std::unique_ptr<Impl> impl);
  ~Daemon();

 private:
  std::unique_ptr<Impl> impl_;
};

// What parse() found out; carries how to read the configuration again.
struct Startup {
  Description about;
  std::string file;  // empty: defaults
  std::vector<std::string> overrides;
  int ready_fd = -1;
  int verbose = 0;
  bool accept_unregistered = false;  // set by di-meta before run()
  CommonConfig common;
  // Reads file and overrides again.  The rows belong to the std::any, a shared_ptr to the struct.
  struct Reading {
    std::any config;
    CommonConfig common;  // its own
    config::Params params;
    std::vector<std::string> errors;
    std::optional<net::KeyPair> own_keys;  // with net.secret_key
    net::KeyRing public_keys;
  };
  std::function<Reading()> read;
};

template <class C>
struct Parsed {
  C config;
  Startup startup;
};

// Flags only: fills `startup` and exits for -h, -V and usage errors.  Returns whether -n was given.
bool parse_flags(Startup& startup, int argc, char** argv);
// Reports errors (exit 78), prints for -v, exits for -n.
void settle_configuration(const Startup& startup, const Startup::Reading& reading, bool check_only);

using Reload = std::function<Status(const std::any& fresh)>;
int run_program(const Startup& startup, Program& program, const Reload& reload);

// Checks beyond single rows; the message is one line, of config::wrong().
template <class C>
using Validate = Status (*)(const C&, const config::Params&);

// Reads flags, file and overrides; see the top.
void load(Startup::Reading& reading, const Startup& startup);
// Reads the key files and checks the rows about addresses together: what others can reach has keys.
void load_keys(Startup::Reading& reading, const CommonConfig& common, std::string_view program);

template <class C>
Parsed<C> parse(const Description& about, int argc, char** argv, void (*bind)(config::Params&, C&),
                Validate<C> validate = nullptr) {
  Parsed<C> parsed;
  Startup& startup = parsed.startup;
  startup.about = about;
  const bool check_only = parse_flags(startup, argc, argv);
  startup.read = [bind, validate, flags = startup] {
    auto config = std::make_shared<C>();
    Startup::Reading reading;
    bind(reading.params, *config);
    load(reading, flags);
    if (reading.errors.empty()) load_keys(reading, config->common, flags.about.program);
    if (reading.errors.empty() && validate != nullptr) {
      if (const Status status = validate(*config, reading.params); !status.ok())
        reading.errors.push_back(status.error().message);
    }
    reading.common = config->common;
    reading.config = config;
    return reading;
  };
  const Startup::Reading reading = startup.read();
  settle_configuration(startup, reading, check_only);
  parsed.config = *std::any_cast<std::shared_ptr<C>>(reading.config);
  startup.common = parsed.config.common;
  return parsed;
}

template <class C>
int run(const Parsed<C>& parsed, ProgramOf<C>& program) {
  return run_program(parsed.startup, program, [&program](const std::any& fresh) {
    return program.on_reload(*std::any_cast<std::shared_ptr<C>>(fresh));
  });
}

}  // namespace di::daemon
