// cmd/di-router/router.h: the shell that joins the HTTP front, the router's core and the fleet.
//
// Owner: the loop thread.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "config.h"
#include "daemon/daemon.h"
#include "frontend.h"
#include "request/core.h"
#include "request/identity.h"

namespace di::router {

class Router final : public daemon::ProgramOf<Config>, public Backend {
 public:
  explicit Router(const Config& config);
  ~Router() override;

  Status on_prepare(daemon::Daemon& daemon) override;
  Status on_start(daemon::Daemon& daemon) override;
  void on_stop(daemon::Daemon& daemon) override;
  void on_drain_over(daemon::Daemon& daemon) override;
  Status on_reload(const Config& fresh) override;
  bool on_ctl(const daemon::Words& words, daemon::Reply reply) override;

 private:
  Status submit(request::NewRequest request, const std::string& tenant, const std::string& user_id,
                const std::string& cache_salt) override;
  void cancel(const RequestId& id, Code reason) override;
  [[nodiscard]] bool serves() const override;

  Result<account::KeyTable> load_keys(const Config& config) const;
  void deliver(const net::Incoming& in);
  // Nobody finds the address any more, or takes it for that of another router.
  void withdraw_address();
  void peer_up(const net::Member& member);
  // Takes the rank's model for the router's, or says why the rank is not used.
  bool rank_up(const net::Member& member);
  void peer_lost(net::PeerId id);
  // After anything that moved the core: messages out, tokens and endings to the front, timers.
  void turn();
  void explain(const std::string& text, daemon::Reply& reply) const;
  void show_requests(daemon::Reply& reply) const;
  void show_fleet(daemon::Reply& reply) const;

  Config config_;
  daemon::Daemon* daemon_ = nullptr;
  std::unique_ptr<Frontend> front_;
  std::unique_ptr<request::RouterCore> core_;
  request::Identity identity_;
  Bytes secret_;  // namespace secret of the catalogue
  std::map<net::PeerId, net::Member> peers_;
  std::unique_ptr<loop::Timer> due_timer_;
  std::unique_ptr<loop::Timer> second_timer_;
  bool turning_ = false;
  bool turn_again_ = false;
  bool stopping_ = false;
  bool drain_over_ = false;
  std::string address_file_;  // RUNDIR/INSTANCE.listen while it is there
};

}  // namespace di::router
