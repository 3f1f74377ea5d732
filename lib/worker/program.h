// worker/program.h: the daemon of a rank process: what di-prefill and di-decode have in common as programs.
//
// Owner: the loop thread.  The two differ in their core, in where faults are hit, and in what they count.
#pragma once

#include <functional>

#include "daemon/daemon.h"
#include "worker/config.h"
#include "worker/worker.h"

namespace di::worker {

class RankProgram final : public daemon::ProgramOf<Config> {
 public:
  // Registers what one rank's core counts, under the label of its rank.
  using Count = std::function<void(daemon::Metrics&, const RankCore&, const daemon::Metrics::Labels&)>;

  RankProgram(const Config& config, Worker::MakeCore make_core, FaultPlaces faults, Count count)
      : ranks_(config.ranks),
        count_(std::move(count)),
        worker_(config, std::move(make_core), std::move(faults)) {}

  Status on_prepare(daemon::Daemon& daemon) override { return worker_.prepare(daemon); }
  Status on_start(daemon::Daemon& daemon) override {
    for (std::uint16_t rank = 0; rank < ranks_; ++rank) {
      count_(daemon.metrics(), worker_.core(rank), {{"rank", std::to_string(rank)}});
    }
    return worker_.start(daemon);
  }
  void on_stop(daemon::Daemon& daemon) override { worker_.stop(daemon); }
  bool on_ctl(const std::vector<std::string>& words, daemon::Reply reply) override {
    return worker_.control(words, reply);
  }
  void on_clock_advanced(loop::Callback done) override { worker_.clock_advanced(std::move(done)); }

 private:
  std::uint16_t ranks_;
  Count count_;
  Worker worker_;
};

}  // namespace di::worker
