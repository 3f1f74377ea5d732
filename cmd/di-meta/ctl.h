// cmd/di-meta/ctl.h: `show fleet`, `show kv`, `show kv pages`, `show volumes`, `show missratio`,
// `show tenants`, the `kv` commands, `forget` and `backup`.
//
// Owner: the loop thread.  Bound: one listing per caller of the control socket.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "daemon/control.h"
#include "loop/loop.h"
#include "service.h"

namespace di::meta {

class Control {
 public:
  // Both outlive it.
  Control(loop::Loop& loop, Service& service);

  // False: no such command.
  [[nodiscard]] bool answer(const daemon::Words& words, daemon::Reply reply);
  // Cancels the listings that are not complete.
  void stop() { listings_.clear(); }

 private:
  // A long answer, a part a turn; waits while the caller reads.
  class Listing {
   public:
    Listing(loop::Loop& loop, const Service& service, daemon::Reply reply);
    [[nodiscard]] bool done() const { return done_; }

   private:
    void go_on();
    const Service& service_;
    daemon::Reply reply_;
    std::uint64_t after_ = 0;
    bool done_ = false;
    loop::Timer timer_;
  };

  [[nodiscard]] std::vector<daemon::Command> table();
  void drain(const daemon::Words& more, daemon::Reply& reply);
  [[nodiscard]] Status drop(const std::string& stripe);
  void drop_store(const std::string& store, daemon::Reply& reply);
  void backup(const std::string& file, daemon::Reply& reply);

  loop::Loop& loop_;
  Service& service_;
  const std::vector<daemon::Command> commands_;
  std::vector<std::unique_ptr<Listing>> listings_;
};

}  // namespace di::meta
