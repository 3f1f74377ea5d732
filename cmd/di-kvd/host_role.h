// cmd/di-kvd/host_role.h: a di-kvd with role = "host": the arena of a compute host around host/core.h.
//
// Owner: the loop thread.  It owns the shared memory, the socket that hands it out, and the timers; the
// core decides.  Checksums of what ranks seal and stores deliver are computed on this thread, one page
// (about 1 MiB, 0.15 ms) per message, and so is the code of stripes, one layer group (about a millisecond) a
// turn.  Bounds: kv.arena_bytes; what the core bounds.
//
// Life: prepare takes the arena that is parked, or makes and parks one; start registers; once registered (the arena's generation is the
// instance's) the arena socket listens and the daemon is ready; stop waits for pending write-backs and
// hand-overs, at most drain.timeout.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/daemon.h"
#include "daemon/kept.h"
#include "data_plane.h"
#include "drop_log.h"
#include "host/core.h"
#include "kv/arena.h"
#include "parking.h"
#include "recovery.h"
#include "transfer/shm.h"
#include "wire/envelope.h"

namespace di::kvd {

struct HostConfig {
  std::uint64_t arena_bytes = 0;
  bool prefault = false;
  Park park = Park::automatic;
  kv::HugePages huge_pages = kv::HugePages::automatic;
  std::uint32_t fetch_delay_ms = 0;
  host::Admit admit = host::Admit::always;
  std::uint32_t writeback_queue_pages = 0;
  std::uint32_t stripe_linger_ms = 0;
  double skip_ratio = 0;
  double hedge_ratio = 0;
  double hedge_budget_pct = 0;
  std::uint32_t repairs_max = 0;
  Duration hold{0};
  Duration handover_wait{0};
};
// The rows of the host role, in table [kv].
void host_params(config::Params& params, HostConfig& config);

class HostRole final : public daemon::Program {
 public:
  HostRole(const HostConfig& config, const DataConfig& data);
  ~HostRole() override;

  Status on_prepare(daemon::Daemon& daemon) override;
  Status on_start(daemon::Daemon& daemon) override;
  void on_stop(daemon::Daemon& daemon) override;
  // show kv, show kv pages, show kv holders, kv drop arena.
  bool on_ctl(const daemon::Words& words, daemon::Reply reply) override;
  void on_dump() override;

 private:
  // host::ArenaPort and host::DataPort on the real things.
  class Port;
  class Data;
  // `show kv pages`: some rows a turn.
  class Listing;
  void ctl_kv(daemon::Reply& reply) const;
  void ctl_holders(daemon::Reply& reply) const;
  void ctl_drop(daemon::Reply& reply);
  [[nodiscard]] const std::uint64_t& pages_unrecorded() const;

  void deliver(const net::Incoming& in);
  void peer_up(const net::Member& member);
  void peer_lost(net::PeerId id, std::uint32_t generation);
  void make_core(const host::Core::Options& options);
  Status open_arena(const host::Core::Options& options, const kv::ArenaOwner::Options& arena);
  void listen_arena();
  // Peers whose layout waits for the pages of another one to go.
  void look_at_refused();
  // The end of every turn that did something: sends, loops back, sets timers.
  void turn();
  void send(wire::Envelope message);
  void send_now(const wire::Envelope& message);
  [[nodiscard]] host::Now now() const;
  // Loops that have moved, or have nothing to do, are alive.
  void beat();
  void tell_drops();
  void register_metrics(daemon::Metrics& metrics);

  HostConfig config_;
  DataConfig data_config_;
  daemon::Daemon* daemon_ = nullptr;
  std::unique_ptr<Parking> parking_;
  std::unique_ptr<kv::ArenaOwner> arena_;
  std::unique_ptr<Port> port_;
  std::unique_ptr<Data> data_;
  std::unique_ptr<host::Core> core_;
  std::unique_ptr<transfer::ShmServer> socket_;
  std::unique_ptr<daemon::Kept> costs_;
  std::unique_ptr<loop::Timer> product_timer_;
  std::unique_ptr<loop::Timer> liveness_timer_;
  std::unique_ptr<loop::Timer> beat_timer_;
  struct Pulse {
    daemon::Heartbeats::Beat* beat = nullptr;
    std::uint64_t moves = 0;
  };
  std::vector<Pulse> pulses_;  // as the loops of Core::background()
  std::map<net::PeerId, host::Peer> peers_;
  std::vector<net::Member> refused_;
  struct Delayed {
    Instant at;  // liveness time
    bool incoming = false;
    wire::Envelope message;
  };
  std::vector<Delayed> delayed_;  // by `fault.at = ...=delay`
  std::vector<std::unique_ptr<Listing>> listings_;
  bool touched_ = false;  // something happened in this turn
  DropLog drop_log_;
  bool stopping_ = false;
  bool asleep_ = false;  // by `fault.at = kvd_before_wait=drop`
  std::unique_ptr<Recovery> recovery_;
  std::unique_ptr<DataPlane> plane_;  // last: its thread uses the arena
};

}  // namespace di::kvd
