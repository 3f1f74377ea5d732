// cmd/di-meta/service.h: messages to the directory's cores and back.
//
// What it owns: the index, the membership, the timers that step them, what writes to the catalogue and copies it,
// and answers that a fault point delays.  What arrives is checked by the cores; a message from an instance
// that is not a member (any more) is dropped.  Losses have one path: lost() tells membership and index,
// whoever noticed first.
//
// A registration that needs a new generation waits until that is written, and is looked at again then.  Meanwhile
// the same process may come on another connection, and another process of the name in its place.
//
// The list of members goes to everybody when it has changed, at once after a time of rest, and as often as
// publish_every and publish_bytes_per_ms let it while many come and go.
//
// Owner: the loop thread, which never waits for the disk once it has started.  Bounds: those of the cores;
// `delayed_max` delayed answers, `waiting_max` registrations that wait.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backup.h"
#include "daemon/faults.h"
#include "directory/catalogue.h"
#include "directory/index.h"
#include "directory/membership.h"
#include "loop/loop.h"
#include "net/peer.h"
#include "persister.h"

namespace di::meta {

inline constexpr Duration publish_every = milliseconds(50);
// What large fleets are sent of it at most, as long as that leaves a list a second.
inline constexpr std::uint64_t publish_bytes_per_ms = 500'000;
inline constexpr Duration publish_every_max = seconds(1);

class Service {
 public:
  // Called in a later turn, with what the catalogue said.
  using Done = std::function<void(const Status&)>;

  struct Options {
    directory::Index::Options index{};  // `run` is set from the catalogue
    // Called once a second (product time) while the loop has nothing to do or has moved since.
    std::function<void()> directory_beat{};
    std::function<void()> catalogue_beat{};
    // Told what is not written, for want of store nodes or because the catalogue takes nothing, when that changes;
    // "": all is.
    std::function<void(const std::string&)> degraded{};
    // Stores that are away for less, as those that start anew are, are no news.
    Duration shortage_after = seconds(10);
    std::map<std::uint64_t, std::string> tenant_names{};  // those of the configuration, by number
  };
  struct Counters {
    std::uint64_t registrations = 0;
    std::uint64_t refused = 0;
    std::uint64_t lost = 0;
    std::uint64_t published = 0;  // lists, each to everybody
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
  // member that is away, with its numbers; repairs what waits; takes a stripe out; copies the catalogue into a file
  // that is not there.  Errors: not_found, busy; then `done` is not called.  What the catalogue refused may be asked
  // again.
  Status store_leaves(const std::string& instance, bool leaves, Done done);
  Result<directory::Index::Given> store_gone(const std::string& instance, Done done);
  Status forget(const std::string& instance, Done done);
  void repair_now() { index_.repair_now(loop_.monotonic_now()); }
  Status drop_stripe(std::uint64_t stripe);
  void rebalance() { index_.rebalance(); }
  Status backup(const std::string& path, Backup::Done done) { return backup_->start(path, std::move(done)); }

  [[nodiscard]] Instant now() const { return loop_.monotonic_now(); }
  [[nodiscard]] const directory::Index& index() const { return index_; }
  [[nodiscard]] const Persister& persister() const { return *persister_; }
  [[nodiscard]] const directory::Membership& membership() const { return membership_; }
  [[nodiscard]] const std::map<std::uint64_t, std::string>& tenant_names() const { return tenant_names_; }
  [[nodiscard]] bool connected(std::uint32_t id) const { return endpoint_.up(id); }
  [[nodiscard]] const Counters& counters() const { return counters_; }
  // What is not written, for want of store nodes or of a catalogue that takes it, in words.
  [[nodiscard]] const std::string& degraded() const { return degraded_; }
  // Registrations that wait for the catalogue.
  [[nodiscard]] std::size_t waiting() const { return waiting_.size(); }

 private:
  static constexpr std::size_t delayed_max = 64;
  static constexpr std::size_t waiting_max = 1024;

  // A registration, until it is answered.
  struct Asked {
    net::From from;
    RequestId request;
    std::uint16_t attempt = 0;
    std::uint32_t cluster = 0;
    wire::meta_register message;
  };
  struct Waiting {
    Asked asked;
    directory::InstanceRow row;
    Persister::Rows gone;  // to be dropped with it
    bool writing = false;  // this row, or that of the process it replaced: one write at a time
  };

  Service(loop::Loop& loop, net::Endpoint& endpoint, directory::Catalogue& catalogue, Options options,
          directory::Membership membership);

  [[nodiscard]] bool knows_store(const std::string& instance) const;
  [[nodiscard]] Error unknown_store(const std::string& instance) const;
  void set_handlers();
  void registered(Asked asked);
  void refuse(const Asked& asked, Code code, const std::string& reason);
  void answer(const Asked& asked, wire::meta_registered message);
  void write(Waiting& waiting);
  void written(const directory::InstanceRow& row, const Status& status);
  void peer_up(const net::Member& member);
  void apply(const directory::Membership::Change& change);
  // Sends the list to everybody after this turn's events, or when it may go out again.
  void publish_later();
  void publish();
  void tick();
  void beat();
  void step_index();
  void rearm();
  void watch_shortage();
  void watch_degraded();
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
  std::unique_ptr<Backup> backup_;
  std::map<std::string, Waiting> waiting_;  // by instance name
  std::string catalogue_refuses_;           // why it did not take the last row; empty: it did
  Counters counters_;
  std::string shortage_;   // of nodes, as it was logged last
  std::string unwritten_;  // for want of them
  std::string degraded_;   // as it was told
  std::optional<Instant> short_since_;
  std::map<std::uint64_t, std::string> tenant_names_;
  // Of a configured tenant: what the log has heard of, and when.
  struct ToldOfTenant {
    std::uint64_t refused = 0;
    std::uint64_t evicted = 0;
    Instant again;
  };
  std::map<std::uint64_t, ToldOfTenant> told_;
  // The last registration that was refused, and when the log hears of the same again.
  struct ToldRefused {
    std::string instance;
    std::string reason;
    Instant again;
  };
  ToldRefused told_refused_;
  Instant publish_again_;
  loop::Timer publish_;
  loop::Timer tick_;
  loop::Timer due_;
  loop::Timer beat_;
  const std::function<void()> directory_beat_;
  const std::function<void()> catalogue_beat_;
  const std::function<void(const std::string&)> tell_degraded_;
  const Duration shortage_after_;
  std::uint64_t transactions_seen_ = 0;
  std::list<std::unique_ptr<loop::Timer>> delayed_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace di::meta
