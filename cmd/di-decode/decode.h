// cmd/di-decode/decode.h: the decode daemon around rank/decode.h and worker/worker.h.
#pragma once

#include "daemon/daemon.h"
#include "worker/config.h"
#include "worker/worker.h"

namespace di::decode {

class Decode final : public daemon::ProgramOf<worker::Config> {
 public:
  explicit Decode(const worker::Config& config);

  Status on_prepare(daemon::Daemon& daemon) override { return worker_.prepare(daemon); }
  Status on_start(daemon::Daemon& daemon) override;
  void on_stop(daemon::Daemon& daemon) override { worker_.stop(daemon); }
  bool on_ctl(const std::vector<std::string>& words, daemon::Reply reply) override;
  void on_clock_advanced(loop::Callback done) override { worker_.clock_advanced(std::move(done)); }

 private:
  worker::Config config_;
  worker::Worker worker_;
};

}  // namespace di::decode
