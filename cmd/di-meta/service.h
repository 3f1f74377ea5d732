// cmd/di-meta/service.h: messages to the directory's cores and back.
//
// What it owns: the index, the membership, the timers that step them, what writes stripes to the catalogue,
// and answers that a fault point delays.  What arrives is checked by the cores; a message from an instance
// that is not a member (any more) is dropped.  Losses have one path: lost() tells membership and index,
// whoever noticed first.
//
// Owner: the loop thread.  Saving a new generation blocks it for one disk write per start of an
// instance.  Bounds: those of the cores; `delayed_max` delayed answers.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/faults.h"
#include "directory/catalogue.h"
#include "directory/index.h"
#include "directory/membership.h"
#include "loop/loop.h"
#include "net/peer.h"
#include "persister.h"

namespace di::meta {

class Service {
 public:
  struct Options {
    directory::Index::Options index{};  // `run` is set from the catalogue
    // Called once a second (product time) while the loop has nothing to do or has moved since.
    std::function<void()> directory_beat{};
    std::function<void()> catalogue_beat{};
    std::map<std::uint64_t, std::string> tenant_names{};  // those of the configuration, by number
  };
  struct Counters {
    std::uint64_t registrations = 0;
    std::uint64_t refused = 0;
    std::uint64_t lost = 0;
  };

  // Sets the handlers on `endpoint`.  Loop, endpoint and catalogue outlive the service.
  static Result<std::unique_ptr<Service>> create(loop::Loop& loop, net::Endpoint& endpoint,
                                                 directory::Catalogue& catalogue, Options options);
  ~Service() { *alive_ = false; }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Registers the directory itself; `self.control` is bound.
  Status start(net::Member self);
  // No timer runs any more; what messages ask is still answered.
  void stop();

  // The operator's: empties a store for good, or not any more; gives up what a store that is away had; forgets a
  // member that is away; repairs what waits; takes a stripe out; copies the catalogue.  Errors: not_found, busy,
  // those of the catalogue.
  Status store_leaves(const std::string& instance, bool leaves);
  Result<directory::Index::Given> store_gone(const std::string& instance);
  Status forget(const std::string& instance);
  void repair_now() { index_.repair_now(loop_.monotonic_now()); }
  Status drop_stripe(std::uint64_t stripe);
  void rebalance() { index_.rebalance(); }
  Status backup(const std::string& path) { return catalogue_.backup(path); }

  [[nodiscard]] Instant now() const { return loop_.monotonic_now(); }
  [[nodiscard]] const directory::Index& index() const { return index_; }
  [[nodiscard]] const Persister& persister() const { return *persister_; }
  [[nodiscard]] const directory::Membership& membership() const { return membership_; }
  [[nodiscard]] const std::map<std::uint64_t, std::string>& tenant_names() const { return tenant_names_; }
  [[nodiscard]] bool connected(std::uint32_t id) const { return endpoint_.up(id); }
  [[nodiscard]] const Counters& counters() const { return counters_; }

 private:
  static constexpr std::size_t delayed_max = 64;

  Service(loop::Loop& loop, net::Endpoint& endpoint, directory::Catalogue& catalogue, Options options,
          std::vector<directory::InstanceRow> rows);

  [[nodiscard]] Error unknown_store(const std::string& instance) const;
  void set_handlers();
  void registered(const net::Incoming& in, const wire::meta_register& message);
  void peer_up(const net::Member& member);
  void apply(const directory::Membership::Change& change);
  // Sends the list to everybody at the end of this turn's events.
  void publish_later();
  void publish();
  void tick();
  void beat();
  void step_index();
  void rearm();
  void log_shortage();
  void log_over_quota();
  [[nodiscard]] std::optional<directory::Holder> holder(const net::Incoming& in) const;
  template <class M>
  void answer(const net::Incoming& in, const M& message) {
    static_cast<void>(
        endpoint_.reply(in.from, message, {.request = in.header.request, .attempt = in.header.attempt}));
  }
  // Runs `callback` now, later or never, as the fault says.
  void with_fault(daemon::FaultAction action, loop::Callback callback);

  loop::Loop& loop_;
  net::Endpoint& endpoint_;
  directory::Catalogue& catalogue_;
  directory::Membership membership_;
  directory::Index index_;
  std::unique_ptr<Persister> persister_;
  Counters counters_;
  std::string shortage_;  // of nodes, as it was logged last
  std::map<std::uint64_t, std::string> tenant_names_;
  // Of a configured tenant: what the log has heard of, and when.
  struct ToldOfTenant {
    std::uint64_t refused = 0;
    std::uint64_t evicted = 0;
    Instant again;
  };
  std::map<std::uint64_t, ToldOfTenant> told_;
  bool publish_pending_ = false;
  loop::Timer tick_;
  loop::Timer due_;
  loop::Timer beat_;
  const std::function<void()> directory_beat_;
  const std::function<void()> catalogue_beat_;
  std::uint64_t batches_seen_ = 0;
  std::list<std::unique_ptr<loop::Timer>> delayed_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace di::meta
