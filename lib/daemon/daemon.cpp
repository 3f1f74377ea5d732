#include "daemon/daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

#include "base/assert.h"
#include "base/fd.h"
#include "config/toml.h"
#include "daemon/exporter.h"
#include "daemon/heartbeat.h"
#include "daemon/log_modules.h"
#include "daemon/ready.h"
#include "loop/signal.h"
#include "net/zmq.h"
#include "wire/names.h"

namespace di::daemon {

namespace {

Status check_instance(const std::string& program, const std::string& instance) {
  if (wire::is_instance_of(program, instance)) return {};
  return Error{Code::invalid, 0,
               "'" + instance + "' is not an instance of " + program + ": want " + program +
                   ".NAME, where NAME has 1 to 64 letters, digits, '-' or '_'"};
}

Status check_label(const std::string& label) {
  if (wire::is_label(label)) return {};
  return Error{Code::invalid, 0, "want at most 64 letters, digits, '-', '_', '.' or ':'"};
}

Status check_endpoint(const std::string& address) {
  if (address.empty() || net::is_endpoint(address)) return {};
  return Error{Code::invalid, 0, "'" + address + "' is no address: want tcp://HOST:PORT or ipc://PATH"};
}

// Every address of this machine: nothing that another one could connect to.
bool is_wildcard(std::string_view address) {
  return address.starts_with("tcp://0.0.0.0:") || address.starts_with("tcp://[::]:");
}

bool has_port_zero(std::string_view address) {
  return address.starts_with("tcp://") && address.ends_with(":0");
}

// What nobody can connect to is told to nobody.
Status check_advertise(const std::string& address) {
  DI_TRY(check_endpoint(has_port_zero(address) ? address.substr(0, address.size() - 1) + "1" : address));
  if (is_wildcard(address))
    return Error{Code::invalid, 0, address + ": every address of this machine says nothing to others"};
  return {};
}

// The soft limit is 1,024 in many shells.  Without a descriptor connections wait, but for one kind: libzmq 4.3.4 ends
// the process when it cannot accept one on ipc.
void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    log_warn("daemon", "limit of open files not raised", {{"error", errno_error("setrlimit")}});
  }
}

// mkdir -p, then the absolute path: peers on this host are told socket paths.
Result<std::string> make_run_dir(const std::string& path) {
  for (std::size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const std::string part = path.substr(0, slash);
    if (::mkdir(part.c_str(), 0755) != 0 && errno != EEXIST) return errno_error("mkdir " + part);
    if (slash == std::string::npos) break;
  }
  char absolute[PATH_MAX];
  if (::realpath(path.c_str(), absolute) == nullptr) return errno_error("open " + path);
  return std::string(absolute);
}

// RUNDIR/INSTANCE.pid, locked for the life of the process.
class PidFile {
 public:
  ~PidFile() {
    if (fd_.valid()) ::unlink(path_.c_str());
  }
  Status take(const std::string& path) {
    path_ = path;
    while (true) {
      Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
      if (!fd.valid()) return errno_error("open " + path);
      if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
        char text[32] = {};
        const ssize_t got = ::read(fd.get(), text, sizeof text - 1);
        std::string pid(text, got > 0 ? static_cast<std::size_t>(got) : 0);
        while (!pid.empty() && pid.back() == '\n') pid.pop_back();
        return Error{Code::exists, 0, "already running as process " + pid + " (" + path + ")"};
      }
      // The holder may have removed the file between our open and our lock.
      struct stat ours {};
      struct stat there {};
      if (::fstat(fd.get(), &ours) != 0 || ::stat(path.c_str(), &there) != 0 || ours.st_ino != there.st_ino)
        continue;
      const std::string pid = std::to_string(::getpid()) + "\n";
      if (::ftruncate(fd.get(), 0) != 0 || ::pwrite(fd.get(), pid.data(), pid.size(), 0) < 0) {
        return errno_error("write " + path);
      }
      fd_ = std::move(fd);
      return {};
    }
  }

 private:
  std::string path_;
  Fd fd_;
};

std::string machine_name() {
  char name[HOST_NAME_MAX + 1] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "localhost";
  return name;
}

// Fit for a row and systemd's status line; a letter is not cut in two.
std::string one_line(std::string_view text) {
  static constexpr std::string_view more = "...";
  std::string line(text);
  if (line.size() > degraded_bytes_max) {
    std::size_t end = degraded_bytes_max - more.size();
    while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xc0U) == 0x80) --end;
    line = line.substr(0, end).append(more);
  }
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  return line;
}

std::string port_of(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  return colon == std::string::npos ? "" : address.substr(colon + 1);
}

std::optional<std::int64_t> integer_of(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

[[noreturn]] void exit_with_errors(std::string_view program, const std::vector<std::string>& errors) {
  for (const std::string& error : errors) {
    std::fprintf(stderr, "%.*s: %s\n", static_cast<int>(program.size()), program.data(), error.c_str());
  }
  std::exit(exit_config);
}

}  // namespace

void common_params(config::Params& params, CommonConfig& common, std::string_view program) {
  const std::string name(program);
  const std::string standard = name + ".0";
  params.string("run.dir", common.run_dir,
                {.def = "/run/di", .help = "directory of sockets and pid files, one for a fleet"});
  params.string("run.instance", common.instance,
                {.def = standard,
                 .check = [name](const std::string& instance) { return check_instance(name, instance); },
                 .help = "PROGRAM.NAME, unique in the fleet"});
  params.string(
      "meta.endpoint", common.meta_endpoint,
      {.check = check_endpoint, .help = "where di-meta listens; empty: ipc://RUNDIR/di-meta.0.sock"});
  params.string("meta.public_key", common.meta_public_key,
                {.check = [](const std::string& key) -> Status {
                   if (key.empty() || net::is_key(key)) return {};
                   return Error{Code::invalid, 0, "want a public key of 40 characters"};
                 },
                 .help = "public key of di-meta; needed with net.secret_key when meta.endpoint is TCP"});
  params.choice<LogLevel>(
      "log.level", common.log_level,
      {{LogLevel::error, "error"},
       {LogLevel::warn, "warn"},
       {LogLevel::info, "info"},
       {LogLevel::debug, "debug"}},
      {.def = LogLevel::info, .reloadable = true, .help = "least important line that is written"});
  params.boolean("clock.manual", common.clock_manual,
                 {.help = "product time moves only by di-ctl clock advance: for tests"});
  params.string(
      "fault.at", common.fault_at,
      {.check = fault_check, .help = "NAME[:n]=kill|stop|drop|delay, several between commas: for tests"});
  params.string("metrics.listen", common.metrics_listen,
                {.help = "HOST:PORT for metrics besides RUNDIR/INSTANCE.http; empty: none"});
  params.string("net.host", common.net_host,
                {.check = check_label,
                 .help = "host label, inside which memory is shared; empty: the name of the machine"});
  params.string("net.rack", common.net_rack, {.check = check_label, .help = "rack label"});
  params.string("net.zone", common.net_zone, {.check = check_label, .help = "zone label"});
  params.string("net.bind", common.net_bind,
                {.help = "where other instances connect; empty: ipc://RUNDIR/INSTANCE.sock"});
  params.string("net.advertise", common.net_advertise,
                {.check = check_advertise, .help = "the address others are told; empty: what was bound"});
  params.string(
      "net.secret_key", common.net_secret_key,
      {.path = true,
       .help = "file with the secret key of this instance, mode 0600, or folder of INSTANCE.secret; "
               "empty: no encryption"});
  params.string(
      "net.public_keys", common.net_public_keys,
      {.reloadable = true,
       .path = true,
       .help = "file of the public keys that may talk to this instance; its contents are read again "
               "at each reload"});
  params.boolean("net.insecure", common.net_insecure,
                 {.help = "allow addresses beyond loopback without keys"});
  params.duration("drain.timeout", common.drain_timeout,
                  {.def = seconds(5),
                   .max = std::chrono::hours(24),
                   .reloadable = true,
                   .help = "from the request to stop until what is left is given up"});
}

void Program::on_stop(Daemon& daemon) {
  daemon.stopped();
}

void Program::on_drain_over(Daemon& daemon) {
  daemon.stopped();
}

bool Program::on_ctl(const Words&, Reply) {
  return false;
}

void load(Startup::Reading& reading, const Startup& startup) {
  if (!startup.file.empty()) reading.errors = config::parse_file(reading.params, startup.file);
  const auto more = [&](const std::vector<std::string>& errors) {
    reading.errors.insert(reading.errors.end(), errors.begin(), errors.end());
  };
  for (const std::string& assignment : startup.overrides)
    more(config::parse_override(reading.params, assignment));
  more(config::check_required(reading.params, startup.file.empty() ? "configuration" : startup.file));
}

void load_keys(Startup::Reading& reading, const CommonConfig& common, std::string_view program) {
  const auto wrong = [&](std::string_view path, const std::string& what) {
    reading.errors.push_back(config::wrong(reading.params, {path}, what).message);
  };
  const bool keyed = !common.net_secret_key.empty();
  if (keyed) {
    Result<net::KeyPair> own = net::key_pair_read(common.net_secret_key, common.instance);
    if (own) {
      reading.own_keys = *std::move(own);
    } else {
      wrong("net.secret_key", own.error().message);
    }
    if (common.net_public_keys.empty()) wrong("net.secret_key", "needs net.public_keys: who may talk to us?");
    if (common.net_insecure) wrong("net.insecure", "has no meaning with net.secret_key");
  } else if (!common.net_public_keys.empty()) {
    wrong("net.public_keys", "has no meaning without net.secret_key");
  }
  if (!common.net_public_keys.empty()) {
    reading.public_keys = net::KeyRing::read(common.net_public_keys, reading.errors);
  }
  static constexpr std::string_view want =
      "without keys: set net.secret_key, or net.insecure in a closed network";
  if (!common.net_bind.empty() && !net::is_local(common.net_bind) && !keyed && !common.net_insecure) {
    wrong("net.bind", common.net_bind + " would serve other machines " + std::string(want));
  }
  if (program == "di-meta" || common.meta_endpoint.empty() || net::is_ipc(common.meta_endpoint)) return;
  if (keyed && common.meta_public_key.empty()) {
    wrong("meta.endpoint", common.meta_endpoint + " needs meta.public_key");
  }
  if (!keyed && !net::is_local(common.meta_endpoint) && !common.net_insecure) {
    wrong("meta.endpoint", common.meta_endpoint + " would be used " + std::string(want));
  }
}

void settle_configuration(const Startup& startup, const Startup::Reading& reading, bool check_only) {
  if (!reading.errors.empty()) exit_with_errors(startup.about.program, reading.errors);
  if (!check_only) return;
  if (startup.verbose > 0) std::fputs(config::print(reading.params, startup.verbose > 1).c_str(), stdout);
  std::exit(exit_ok);
}

struct Daemon::Impl {
  Impl(const Startup& s, Program& p, Reload r)
      : startup(s),
        program(p),
        reload_program(std::move(r)),
        running(s.read()),
        common(s.common),
        loop(options_of(*this)),
        transport(net::make_zmq_transport(loop, curve())),
        endpoint(loop, *transport, endpoint_options()),
        drain(loop, loop::TimerKind::liveness, "drain timeout",
              [this] {
                if (drain_over) return loop.stop();
                log_warn("daemon", "gave up waiting for what is left",
                         {{"drain_timeout_ms", to_ms(common.drain_timeout)}});
                give_up();
              }),
        watchdog(loop, loop::TimerKind::liveness, "watchdog", [] { notify_supervisor("WATCHDOG=1"); }) {}

  static loop::Loop::Options options_of(Impl& impl) {
    loop::Loop::Options options;
    options.name = "main";
    if (impl.common.clock_manual) options.manual = &impl.manual_clock;
    return options;
  }
  std::optional<net::Curve> curve() const {
    if (!running.own_keys) return std::nullopt;
    return net::Curve{*running.own_keys,
                      [this](std::string_view key) { return running.public_keys.may_be(key, ""); }};
  }
  net::Endpoint::Options endpoint_options() const {
    net::Endpoint::Options options;
    options.accept_unregistered = startup.accept_unregistered;
    if (!running.own_keys) return options;
    options.may_be = [this](std::string_view key, std::string_view instance) {
      return running.public_keys.may_be(key, instance);
    };
    if (!common.meta_endpoint.empty() && !net::is_ipc(common.meta_endpoint)) {
      options.bootstrap_key = common.meta_public_key;
    }
    return options;
  }

  void register_metrics() {
    metrics.gauge_from("di_uptime_s", "seconds since the start", [this] {
      return std::chrono::duration_cast<seconds>(loop.monotonic_now() - started).count();
    });
    metrics.gauge_from("di_degraded", "1 when it serves without something, which show status names",
                       [this] { return degraded.empty() ? 0 : 1; });
    metrics.histogram_from("di_loop_turn_us", "length of the loop's turns", loop.turn_us());
    metrics.counter_from("di_loop_stalls_total", "turns that took too long",
                         [this] { return loop.stalls(); });
    const net::EndpointCounters& net = endpoint.counters();
    const auto count = [&](std::string_view name, std::string_view help, const std::uint64_t& value) {
      metrics.counter_from(name, help, [&value] { return value; });
    };
    count("di_net_sent_total", "messages sent", net.sent);
    count("di_net_received_total", "messages received", net.received);
    count("di_net_dropped_stale_total", "messages of or for another generation", net.dropped_stale);
    count("di_net_dropped_malformed_total", "messages that did not decode", net.dropped_malformed);
    count("di_net_dropped_unsupported_total", "messages without a handler", net.dropped_unsupported);
    count("di_net_dropped_unknown_total", "messages from callers that did not say hello",
          net.dropped_unknown);
    count("di_net_send_failed_total", "messages that could not be sent", net.send_failed);
    count("di_net_peers_lost_total", "peers lost", net.peers_lost);
    count("di_net_peers_left_total", "peers lost that had said that they stop", net.peers_left);
    const net::TransportCounters& calls = transport->counters();
    const auto refused = [&](std::string_view reason, const std::uint64_t& value) {
      metrics.counter_from("di_net_refused_total", "callers refused", [&value] { return value; },
                           {{"reason", std::string(reason)}});
    };
    refused("key", calls.keys_refused);
    refused("handshake", calls.handshakes_refused);
    refused("name", net.names_refused);
    refused("revoked", net.keys_revoked);
    count("di_net_handshakes_failed_total", "connections of ours that the other side did not take",
          calls.handshakes_failed);
    count("di_net_dropped_refused_total", "messages on connections that were refused", calls.dropped_refused);
  }

  Status prepare(Daemon& daemon) {
    // It was good when it was parsed; what was read here is what holds, keys among it.
    if (!running.errors.empty()) return Error{Code::invalid, 0, running.errors.front()};
    Result<std::string> run_dir = make_run_dir(common.run_dir);
    if (!run_dir) return run_dir.error();
    common.run_dir = *run_dir;
    DI_TRY(pid.take(daemon.path("pid")));
    DI_TRY(fault_arm(common.fault_at, common.run_dir, common.instance));
    register_metrics();
    DI_TRY(program.on_prepare(daemon));
    // Nothing that is started from here on gains rights.
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return errno_error("prctl no_new_privs");
    control = std::make_unique<ControlServer>(
        loop, common.instance, [this](const Words& words, const Reply& reply) {
          return answer_by(commands, words, reply) || program.on_ctl(words, reply);
        });
    DI_TRY(control->listen(daemon.path("ctl"), false));
    DI_TRY(control->listen(daemon.path("ro"), true));
    exporter = std::make_unique<Exporter>(loop, metrics, [this] { return readiness(); });
    http_path = daemon.path("http");
    if (Result<std::string> at = exporter->listen("unix:" + http_path); !at) return at.error();
    if (!common.metrics_listen.empty()) {
      Result<std::string> at = exporter->listen(common.metrics_listen);
      if (!at) return at.error().in("metrics.listen");
      log_info("daemon", "metrics", {{"listen", *at}});
    }
    return {};
  }

  void on_signal(int number) {
    switch (number) {
      case SIGTERM:
      case SIGINT:
        if (stopping) {
          log_warn("daemon", "second request to stop: exit at once");
          ::_exit(exit_failure);
        }
        stop();
        break;
      case SIGHUP:
        static_cast<void>(reload());
        break;
      case SIGUSR1:
        dump();
        break;
      default:
        break;
    }
  }

  void stop() {
    if (stopping) return;
    stopping = true;
    log_info("daemon", "stop");
    notify_supervisor("STOPPING=1");
    if (meta) meta->set_state(1);
    endpoint.leave();
    drain.start_after(common.drain_timeout);
    program.on_stop(*self);
  }
  void give_up() {
    if (std::exchange(drain_over, true)) return;
    drain.start_after(drain_over_wait);
    program.on_drain_over(*self);
  }

  // Everything that is wrong is logged; the error says only that.
  Status reload() {
    const Status status = read_again();
    if (!status.ok()) log_warn("daemon", "configuration kept", {{"error", status.error()}});
    return status;
  }

  Status read_again() {
    Startup::Reading fresh = startup.read();
    if (!fresh.errors.empty()) {
      for (const std::string& error : fresh.errors)
        log_error("daemon", "wrong configuration", {{"at", error}});
      return Error{Code::invalid, 0, fresh.errors.front()};
    }
    const std::vector<std::string> paths = config::changed(running.params, fresh.params);
    std::string fixed;
    for (const std::string& path : paths) {
      const config::Row* row = fresh.params.find(path);
      const config::Tables* tables = fresh.params.find_tables(path);
      const bool reloadable = row != nullptr ? row->reloadable : tables != nullptr && tables->reloadable;
      if (!reloadable) fixed += (fixed.empty() ? "" : ", ") + path;
    }
    // Not `unsupported`: that says that there is no such command, and a caller of all passes it over.
    if (!fixed.empty()) return Error{Code::denied, 0, "needs a restart to change: " + fixed};
    DI_TRY(reload_program(fresh.config));
    running = std::move(fresh);
    // The other rows are the same; but for this, which was made absolute.
    std::string run_dir = std::move(common.run_dir);
    common = running.common;
    common.run_dir = std::move(run_dir);
    endpoint.recheck_keys();
    // Not when another row changed: di-ctl log, like -v, holds until somebody says otherwise.
    const bool level_changed = std::find(paths.begin(), paths.end(), "log.level") != paths.end();
    if (level_changed && startup.verbose == 0) log_set_level("", common.log_level);
    log_info("daemon", "reload", {{"changed", paths.size()}});
    return {};
  }

  void dump() {
    for (const Metrics::Held& held : metrics.held_values()) {
      log_info("daemon", "held", {{"what", held.what}, {"count", held.count}, {"base", held.base}});
    }
    for (const net::Member* peer : endpoint.peers_up()) {
      log_info("daemon", "peer", {{"peer", peer->instance}, {"generation", peer->generation}});
    }
    program.on_dump();
  }

  // ---- control

  // Every daemon's.
  [[nodiscard]] std::vector<Command> own_commands() {
    const auto shown = [this](void (Impl::*show)(Reply&)) {
      return [this, show](const Words&, Reply& reply) {
        (this->*show)(reply);
        reply.end();
      };
    };
    return {{"show status", shown(&Impl::show_status)},
            {"show config", shown(&Impl::show_config)},
            {"show metrics", shown(&Impl::show_metrics)},
            {"show gauges", shown(&Impl::show_gauges)},
            {"show faults", shown(&Impl::show_faults)},
            {"show peers", shown(&Impl::show_peers)},
            {"log", [this](const Words& more, Reply& reply) { reply.end(set_log(more)); }, 1, 2},
            {"clock advance", [this](const Words& more, Reply& reply) { advance(more[0], reply); }, 1, 1},
            {"reload", [this](const Words&, Reply& reply) { reply.end(reload()); }}};
  }

  // Empty: it is.
  [[nodiscard]] std::string why_not_ready() const {
    if (stopping) return "stopping";
    if (!ready) return "starting";
    const std::string late = heartbeats.late();
    if (!late.empty()) return "late: " + late;
    return serves ? "" : "out of service: " + degraded;
  }

  [[nodiscard]] Exporter::Readiness readiness() const {
    const std::string why = why_not_ready();
    if (!why.empty()) return {false, why};
    return {true, degraded.empty() ? "ready" : "ready\ndegraded: " + degraded};
  }
  // As systemd shows it.
  [[nodiscard]] std::string status_line() const {
    if (!serves) return "STATUS=out of service: " + degraded;
    return "STATUS=" + (degraded.empty() ? "ready" : "degraded: " + degraded);
  }

  void show_status(Reply& reply) {
    const std::string late = heartbeats.late();
    Row row;
    row.text("program", startup.about.program)
        .number("pid", ::getpid())
        .text("state", stopping        ? "stopping"
                       : !ready        ? "starting"
                       : !late.empty() ? "late"
                       : !serves       ? "out of service"
                                       : "ready")
        .text("late", late)
        .text("degraded", degraded)
        .number("id", endpoint.self().id)
        .number("generation", endpoint.self().generation)
        .number("peers", endpoint.peers_up().size())
        .number("uptime_s", std::chrono::duration_cast<seconds>(loop.monotonic_now() - started).count())
        .boolean("clock_manual", common.clock_manual);
    reply.row(row);
  }
  void show_config(Reply& reply) {
    for (const config::Row& parameter : running.params.rows()) {
      const std::string value = parameter.print();
      Row row;
      row.text("key", parameter.path)
          .text("value", parameter.secret && value != "\"\"" ? "(set)" : value)
          .text("default", parameter.def_text)
          .boolean("given", parameter.given)
          .boolean("reloadable", parameter.reloadable);
      reply.row(row);
    }
  }
  void show_metrics(Reply& reply) {
    for (const Metrics::Sample& sample : metrics.samples()) {
      Row row;
      row.text("name", sample.name).text("labels", sample.labels);
      if (const std::optional<std::int64_t> value = integer_of(sample.value)) {
        row.number("value", *value);
      } else {
        row.text("value", sample.value);
      }
      reply.row(row);
    }
  }
  void show_gauges(Reply& reply) {
    for (const Metrics::Held& held : metrics.held_values()) {
      Row row;
      row.text("what", held.what).number("count", held.count).number("base", held.base);
      reply.row(row);
    }
  }
  void show_faults(Reply& reply) {
    for (const FaultState& state : fault_states()) {
      if (state.program != startup.about.program) continue;
      Row row;
      row.text("name", state.name)
          .number("hits", state.hits)
          .text("armed", state.armed)
          .boolean("fired", state.fired)
          .text("where", state.sentence);
      reply.row(row);
    }
  }
  void show_peers(Reply& reply) {
    for (const net::Member* peer : endpoint.peers_up()) {
      Row row;
      row.text("peer", peer->instance)
          .number("id", peer->id)
          .number("generation", peer->generation)
          .text("host", peer->host)
          .text("control", peer->control);
      reply.row(row);
    }
  }
  Status set_log(const Words& more) {
    const Result<LogLevel> level = log_level_parse(more[0]);
    if (!level) return level.error();
    const std::string module = more.size() == 2 ? more[1] : "";
    if (more.size() == 2 && std::find(log_modules.begin(), log_modules.end(), module) == log_modules.end()) {
      std::string known;
      for (const std::string_view name : log_modules)
        known += (known.empty() ? "" : ", ") + std::string(name);
      return Error{Code::invalid, 0, "'" + module + "' is no module that logs: want " + known};
    }
    log_set_level(module, *level);
    return {};
  }
  void advance(const std::string& text, Reply& reply) {
    const std::optional<std::int64_t> ms = integer_of(text);
    constexpr std::int64_t year_ms = std::int64_t{366} * 24 * 3600 * 1000;
    if (!common.clock_manual) {
      reply.fail(Error{Code::denied, 0, "clock.manual is false: product time is real time"});
    } else if (!ms || *ms < 0 || *ms > year_ms) {
      reply.fail(Error{Code::invalid, 0, "'" + text + "' is not a number of milliseconds"});
    } else {
      loop.advance(milliseconds(*ms), [this, reply] {
        program.on_clock_advanced([this, reply]() mutable {
          Row row;
          row.number("now_ms", to_ms(Duration(loop.now().ns)));
          reply.end(row);
        });
      });
    }
  }

  const Startup& startup;
  Program& program;
  const Reload reload_program;
  Startup::Reading running;
  CommonConfig common;
  Daemon* self = nullptr;
  PidFile pid;  // given back last
  ManualClock manual_clock;
  loop::Loop loop;
  Metrics metrics;
  Heartbeats heartbeats{loop.clock()};
  std::unique_ptr<net::Transport> transport;
  net::Endpoint endpoint;
  std::unique_ptr<net::MetaClient> meta;
  std::unique_ptr<ControlServer> control;
  std::unique_ptr<Exporter> exporter;
  std::unique_ptr<loop::Signals> signals;
  loop::Timer drain;
  bool drain_over = false;  // its second turn ends the process
  loop::Timer watchdog;
  Instant started;
  std::string bound;  // where others connect
  std::string http_path;
  const std::vector<Command> commands = own_commands();
  std::string degraded;  // what it serves without
  bool serves = true;    // something is left to serve with
  bool ready = false;
  bool stopping = false;
  bool leaving = false;  // stopped() was called
  int exit_status = exit_ok;
};

Daemon::Daemon(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->self = this;
}

Daemon::~Daemon() {
  // The libraries that made these leave them behind.
  if (!impl_->http_path.empty()) ::unlink(impl_->http_path.c_str());
  if (impl_->bound.starts_with("ipc://")) ::unlink(impl_->bound.c_str() + 6);
}

loop::Loop& Daemon::loop() {
  return impl_->loop;
}
Metrics& Daemon::metrics() {
  return impl_->metrics;
}
const CommonConfig& Daemon::config() const {
  return impl_->common;
}
std::string_view Daemon::instance() const {
  return impl_->common.instance;
}
std::string Daemon::path(std::string_view suffix) const {
  return impl_->common.run_dir + "/" + impl_->common.instance + "." + std::string(suffix);
}
net::Endpoint& Daemon::endpoint() {
  return impl_->endpoint;
}

Result<std::string> Daemon::listen() {
  const CommonConfig& common = impl_->common;
  const std::string address = common.net_bind.empty() ? "ipc://" + path("sock") : common.net_bind;
  Result<std::string> bound = impl_->endpoint.bind(address);
  if (!bound) return bound.error();
  std::string advertise = common.net_advertise;
  if (advertise.empty()) {
    advertise = *bound;
    if (is_wildcard(advertise)) {
      return Error{Code::invalid, 0,
                   "net.bind = \"" + address + "\" says nothing to others: set net.advertise"};
    }
  } else if (has_port_zero(advertise)) {
    if (net::is_ipc(*bound)) {
      return Error{Code::invalid, 0,
                   "net.advertise = \"" + advertise + "\": net.bind has no port to put in place of 0"};
    }
    advertise = advertise.substr(0, advertise.size() - 1) + port_of(*bound);
  }
  impl_->bound = advertise;
  if (!net::is_local(address) && !impl_->running.own_keys) {
    log_warn("daemon", "messages are neither encrypted nor authenticated", {{"listen", *bound}});
  }
  return advertise;
}

net::Member Daemon::self_member() const {
  net::Member member;
  member.instance = impl_->common.instance;
  member.program = impl_->startup.about.program;
  member.host = impl_->common.net_host.empty() ? machine_name() : impl_->common.net_host;
  member.rack = impl_->common.net_rack;
  member.zone = impl_->common.net_zone;
  member.control = impl_->bound;
  if (impl_->running.own_keys && !net::is_ipc(impl_->bound)) {
    member.public_key = impl_->running.own_keys->public_key;
  }
  return member;
}

net::MetaClient& Daemon::enroll(net::Member self, net::MetaClient::Events events) {
  DI_ASSERT(!impl_->meta);
  const CommonConfig& common = impl_->common;
  const std::string address =
      common.meta_endpoint.empty() ? "ipc://" + common.run_dir + "/di-meta.0.sock" : common.meta_endpoint;
  if (!events.refused) events.refused = [this](const Error& error) { fail(error); };
  impl_->meta = std::make_unique<net::MetaClient>(impl_->loop, impl_->endpoint, address, std::move(self),
                                                  std::move(events));
  return *impl_->meta;
}

net::MetaClient* Daemon::meta() {
  return impl_->meta.get();
}

void Daemon::ready() {
  if (impl_->ready || impl_->stopping) return;
  impl_->ready = true;
  log_info("daemon", "ready");
  notify_supervisor("READY=1\n" + impl_->status_line());
  write_ready_byte(impl_->startup.ready_fd);
}

void Daemon::degraded(std::string_view what, bool serves) {
  std::string line = one_line(what);
  if (line == impl_->degraded && serves == impl_->serves) return;
  impl_->degraded = std::move(line);
  impl_->serves = serves;
  if (impl_->ready) notify_supervisor(impl_->status_line());
}

bool Daemon::is_ready() const {
  return impl_->why_not_ready().empty();
}

Heartbeats::Beat& Daemon::heartbeat(std::string_view name, Duration late_after) {
  Heartbeats::Beat& beat = impl_->heartbeats.add(name, late_after);
  impl_->metrics.gauge_from(
      "di_heartbeat_late", "1 when a background loop has not moved for too long",
      [this, loop = std::string(name)] { return impl_->heartbeats.is_late(loop) ? 1 : 0; },
      {{"loop", std::string(name)}});
  return beat;
}

void Daemon::stop() {
  // A later turn: the caller may be in the middle of something that on_stop takes apart.
  impl_->loop.post("stop", [this] { impl_->stop(); });
}

bool Daemon::stop_asked() const {
  return loop::signals_waiting({SIGTERM, SIGINT});
}

void Daemon::stopped() {
  if (std::exchange(impl_->leaving, true)) return;
  if (!impl_->meta) return impl_->loop.stop();
  impl_->meta->when_told([this] { impl_->loop.stop(); });
}

void Daemon::fail(const Error& error) {
  if (std::exchange(impl_->exit_status, exit_failure) == exit_failure) return;
  log_error("daemon", "cannot go on", {{"error", error}});
  // What is open hears of it and is charged, as when drain.timeout has passed.
  impl_->loop.post("fail", [this] {
    impl_->stop();
    impl_->give_up();
  });
}

int run_program(const Startup& startup, Program& program, const Reload& reload) {
  log_set_program(startup.common.instance);
  log_set_level("", startup.verbose > 0 ? LogLevel::debug : startup.common.log_level);
  raise_descriptor_limit();
  loop::signals_block({SIGTERM, SIGINT, SIGHUP, SIGUSR1});
  ::signal(SIGPIPE, SIG_IGN);

  // Until the process ends: what the program's members are attached to (timers, watches, replies)
  // outlives the program, which main() destroys first.
  static std::unique_ptr<Daemon> daemon;
  DI_ASSERT(!daemon);
  auto owned = std::make_unique<Daemon::Impl>(startup, program, reload);
  Daemon::Impl& impl = *owned;
  impl.started = impl.loop.monotonic_now();
  daemon = std::make_unique<Daemon>(std::move(owned));
  log_info("daemon", "start", {{"version", DI_VERSION}, {"config", startup.file}});

  if (const Status status = impl.prepare(*daemon); !status.ok()) {
    if (status.error().code == Code::cancelled && daemon->stop_asked()) {
      log_info("daemon", "stopped before it had started", {{"at", status.error()}});
      return exit_ok;
    }
    log_error("daemon", "cannot start", {{"error", status.error()}});
    return exit_failure;
  }
  impl.signals =
      std::make_unique<loop::Signals>(impl.loop, std::initializer_list<int>{SIGTERM, SIGINT, SIGHUP, SIGUSR1},
                                      [&impl](int number) { impl.on_signal(number); });
  if (const std::optional<Duration> interval = watchdog_interval()) impl.watchdog.start_every(*interval / 2);
  if (const Status status = program.on_start(*daemon); !status.ok()) {
    log_error("daemon", "cannot start", {{"error", status.error()}});
    return exit_failure;
  }
  impl.loop.run();
  log_info("daemon", "stopped", {{"status", impl.exit_status}});
  return impl.exit_status;
}

}  // namespace di::daemon
