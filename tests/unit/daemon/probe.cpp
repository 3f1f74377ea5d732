// The smallest daemon there is: what the skeleton does can be seen from outside.
#include <thread>

#include "daemon/daemon.h"

namespace {

struct Config {
  di::daemon::CommonConfig common;
  std::int32_t value = 0;
  std::int32_t fixed = 0;
  bool slow_stop = false;
  bool broken = false;
  bool slow_start = false;
};

void params(di::config::Params& p, Config& c) {
  di::daemon::common_params(p, c.common, "di-probe");
  p.integer("probe.value", c.value, {.def = 1, .max = 100, .reloadable = true, .help = "a value"});
  p.integer("probe.fixed", c.fixed, {.def = 1, .max = 100, .help = "a value that stays"});
  p.boolean("probe.slow_stop", c.slow_stop, {.help = "never stops by itself"});
  p.boolean("probe.broken", c.broken, {.help = "cannot start"});
  p.boolean("probe.slow_start", c.slow_start, {.help = "prepares until it is to stop"});
}

class Probe final : public di::daemon::ProgramOf<Config> {
 public:
  explicit Probe(const Config& config) : config_(config) {}

  di::Status on_prepare(di::daemon::Daemon& daemon) override {
    if (!config_.slow_start) return {};
    daemon.ready();  // for the test: it is busy from here on
    while (!daemon.stop_asked()) std::this_thread::yield();
    return di::Error{di::Code::cancelled, 0, "prepared enough"};
  }
  di::Status on_start(di::daemon::Daemon& daemon) override {
    daemon_ = &daemon;
    if (config_.broken) return di::Error{di::Code::io, 0, "the probe is broken"};
    if (di::Result<std::string> at = daemon.listen(); !at) return at.error();
    daemon.metrics().held("seats").set(2);
    beat_ = &daemon.heartbeat("probe", di::seconds(60));
    tick_ = std::make_unique<di::loop::Timer>(daemon.loop(), di::loop::TimerKind::product, "tick",
                                              [this] { ++ticks_; });
    tick_->start_every(di::milliseconds(10));
    daemon.ready();
    return {};
  }
  void on_stop(di::daemon::Daemon& daemon) override {
    if (!config_.slow_stop) daemon.stopped();
  }
  void on_drain_over(di::daemon::Daemon& daemon) override {
    di::log_info("daemon", "the probe ends what is left");
    daemon.stopped();
  }
  bool on_ctl(const std::vector<std::string>& words, di::daemon::Reply reply) override {
    if (words[0] == "value") {
      di::daemon::Row row;
      row.number("value", config_.value).number("ticks", ticks_);
      reply.row(row);
      reply.end();
      return true;
    }
    if (words[0] == "debug") {
      reply.end(di::daemon::Row().boolean("debug", di::log_enabled("net", di::LogLevel::debug)));
      return true;
    }
    if (words[0] == "beat") {
      (*beat_)();
      reply.end();
      return true;
    }
    if (words[0] == "degraded") {
      daemon_->degraded(words.size() > 1 ? words[1] : "", words.size() < 3);
      reply.end();
      return true;
    }
    if (words[0] == "hit") {
      di::daemon::fault(di::daemon::FaultPoint::decode_mid_step);
      reply.end();
      return true;
    }
    if (words[0] == "fail") {
      reply.end();
      daemon_->fail(di::Error{di::Code::io, 0, "told to"});
      return true;
    }
    return false;
  }
  di::Status on_reload(const Config& fresh) override {
    if (fresh.value == 13) return di::Error{di::Code::invalid, 0, "thirteen is not taken"};
    config_ = fresh;
    return {};
  }

 private:
  Config config_;
  di::daemon::Daemon* daemon_ = nullptr;
  std::unique_ptr<di::loop::Timer> tick_;
  di::daemon::Heartbeats::Beat* beat_ = nullptr;
  int ticks_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const di::daemon::Description about{"di-probe", "is only there to be looked at"};
  const auto parsed = di::daemon::parse<Config>(about, argc, argv, params);
  Probe probe(parsed.config);
  return di::daemon::run(parsed, probe);
}
