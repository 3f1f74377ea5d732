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
#include "daemon/kept.h"
#include "kv/arena.h"
#include "rank/core.h"
#include "transfer/shm.h"
#include "wire/envelope.h"
#include "worker/config.h"
#include "worker/engine_thread.h"

namespace di::worker {

using rank::RankCore;

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
    std::unique_ptr<daemon::Kept> costs;
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
  void mapping_look();
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
  // Outlives the host daemon: the next one has the same memory.  Not for long, and not when that was given up:
  // the next one may need the memory for another arena.
  std::shared_ptr<kv::ArenaMapping> mapping_;
  Instant arena_lost_at_;
  std::unique_ptr<loop::Timer> mapping_timer_;
  std::unique_ptr<loop::Timer> attach_timer_;
  std::unique_ptr<loop::Timer> due_timer_;
  bool turn_posted_ = false;
  bool draining_ = false;
  bool stopping_ = false;
  loop::Callback clock_done_;
};

}  // namespace di::worker
