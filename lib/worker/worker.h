// worker/worker.h: the shell around the ranks of a di-prefill or di-decode process.
//
// Owner: the loop thread.  It connects cores (rank/prefill.h, rank/decode.h) to the messages of the
// endpoint, the arena of the host's di-kvd, timers and engine threads, and decides nothing itself.
// One engine thread per rank.  Bound: `engine.ranks`.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "daemon/daemon.h"
#include "kv/arena.h"
#include "rank/gauge.h"
#include "transfer/shm.h"
#include "wire/envelope.h"
#include "worker/config.h"
#include "worker/engine_thread.h"

namespace di::worker {

// What a rank's core is to the shell; PrefillCore and DecodeCore have the same members by these names.
class RankCore {
 public:
  virtual ~RankCore() = default;
  virtual void on_message(const wire::Envelope& message, Instant now) = 0;
  virtual void on_router_up(const std::string& router, std::uint32_t generation, Instant now) = 0;
  virtual void on_router_lost(const std::string& router, Instant now) = 0;
  virtual void on_arena(const std::string& kvd, std::uint32_t generation, Instant now) = 0;
  virtual void on_batch_done(rank::BatchDone done, Instant now) = 0;
  virtual void on_time(Instant now) = 0;
  virtual void set_draining(bool draining) = 0;
  virtual std::optional<rank::Batch> next_batch(Instant now) = 0;
  virtual std::vector<wire::Envelope> take_outgoing() = 0;
  virtual Instant next_due() const = 0;
  virtual std::vector<rank::Gauge> gauges() const = 0;
  virtual bool idle() const = 0;
  virtual std::size_t running() const = 0;
};

template <class Core>
class RankCoreOf final : public RankCore {
 public:
  RankCoreOf(typename Core::Options options, engine::Description description)
      : core(options, std::move(description)) {}
  void on_message(const wire::Envelope& message, Instant now) override { core.on_message(message, now); }
  void on_router_up(const std::string& router, std::uint32_t generation, Instant now) override {
    core.on_router_up(router, generation, now);
  }
  void on_router_lost(const std::string& router, Instant now) override { core.on_router_lost(router, now); }
  void on_arena(const std::string& kvd, std::uint32_t generation, Instant now) override {
    core.on_arena(kvd, generation, now);
  }
  void on_batch_done(rank::BatchDone done, Instant now) override { core.on_batch_done(std::move(done), now); }
  void on_time(Instant now) override { core.on_time(now); }
  void set_draining(bool draining) override { core.set_draining(draining); }
  std::optional<rank::Batch> next_batch(Instant now) override { return core.next_batch(now); }
  std::vector<wire::Envelope> take_outgoing() override { return core.take_outgoing(); }
  [[nodiscard]] Instant next_due() const override { return core.next_due(); }
  [[nodiscard]] std::vector<rank::Gauge> gauges() const override { return core.gauges(); }
  [[nodiscard]] bool idle() const override { return core.idle(); }
  [[nodiscard]] std::size_t running() const override { return core.running(); }

  Core core;
};

// Where the faults of faults.def are hit, per program.
struct FaultPlaces {
  // Called before a message leaves; `drop` keeps it from being sent.
  std::function<daemon::FaultAction(const wire::Envelope&)> before_send;
  std::function<void(const wire::Envelope&)> after_send;
  std::function<void(const wire::Envelope&)> after_receive;
  // A batch with a step came back and its results are not yet looked at.
  std::function<void(const rank::BatchDone&)> step_done;
};

class Worker {
 public:
  // `make_core` makes the core of one rank around its engine's description.
  using MakeCore = std::function<std::unique_ptr<RankCore>(std::uint16_t rank, const engine::Description&)>;

  Worker(const Config& config, MakeCore make_core, FaultPlaces faults);
  ~Worker();

  // Daemon hooks.
  Status prepare(daemon::Daemon& daemon);
  Status start(daemon::Daemon& daemon);
  void stop(daemon::Daemon& daemon);
  bool control(const std::vector<std::string>& words, daemon::Reply& reply);
  void clock_advanced(loop::Callback done);

  [[nodiscard]] const RankCore& core(std::uint16_t rank) const { return *ranks_[rank].core; }

 private:
  struct Rank {
    std::unique_ptr<RankCore> core;
    std::unique_ptr<EngineThread> engine;
    bool busy = false;
  };

  void deliver(const net::Incoming& in);
  void turn();
  void flush(Rank& rank);
  void peer_up(const net::Member& member);
  void peer_lost(net::PeerId id);
  void attach();
  void detach(std::string_view why);
  void close_unused();
  void settle_clock();

  Config config_;
  MakeCore make_core_;
  FaultPlaces faults_;
  daemon::Daemon* daemon_ = nullptr;
  std::vector<Rank> ranks_;
  std::map<net::PeerId, net::Member> peers_;
  // The arena of the own host: known peer, connection, mapping.
  net::Member kvd_;
  std::unique_ptr<transfer::ShmClient> shm_;
  std::uint64_t attachment_ = 0;  // counts; events of an earlier connection are nobody's
  // Connections given up while engines may still copy from or to that arena: di-kvd keeps what the ranks
  // hold until they close.
  struct Closing {
    std::unique_ptr<transfer::ShmClient> shm;
    std::set<std::uint16_t> ranks;  // whose batch was out
  };
  std::vector<Closing> closing_;
  std::shared_ptr<kv::ArenaClient> arena_;
  std::unique_ptr<loop::Timer> attach_timer_;
  std::unique_ptr<loop::Timer> due_timer_;
  bool turn_posted_ = false;
  bool draining_ = false;
  bool stopping_ = false;
  loop::Callback clock_done_;
};

}  // namespace di::worker
