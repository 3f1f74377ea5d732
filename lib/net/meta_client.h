// net/meta_client.h: registration of this instance at di-meta, and the list of members from it.
//
// Owner: loop thread.  A generation is issued once per process start; after di-meta restarts the
// client registers again with the generation it has.  While di-meta is away the fleet goes on with
// the last list.  The heartbeat of the connection to di-meta is the lease of the registration.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "loop/loop.h"
#include "net/peer.h"

namespace di::net {

inline constexpr Duration told_wait = milliseconds(200);

class MetaClient {
 public:
  struct Events {
    // After the first registration: the endpoint has its identity.  Once.
    std::function<void(const wire::meta_registered&)> registered;
    // di-meta refused this instance (another layout for the model, name in use).  Not retried until
    // publish().
    std::function<void(const Error&)> refused;
    // After the endpoint took a new list.  Optional.
    std::function<void(const std::vector<Member>&)> members;
  };

  // `self` without id and generation; its `control` is the bound address to advertise.  Sets the
  // handlers of meta_registered and meta_members on `endpoint`.
  MetaClient(loop::Loop& loop, Endpoint& endpoint, const std::string& meta_endpoint, Member self,
             Events events);
  ~MetaClient();

  // Replaces what is published (a model was loaded) and registers again with it.
  void publish(Member self);
  // 0 up, 1 draining, 2 leaves.
  void set_state(std::uint8_t state);
  // Calls `then` when the fleet has heard the state that was set, so that nobody takes the end of this process
  // for a loss: when di-meta's list says so, at once when it does already or di-meta is not up, at the
  // latest after told_wait.
  void when_told(std::function<void()> then);

  // The instance number of di-meta; 0 while it is not up.
  [[nodiscard]] PeerId meta() const;
  [[nodiscard]] bool registered() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace di::net
