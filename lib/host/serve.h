// host/serve.h: pages of this arena that another host reads (arena_read): they are not in the store, or
// not yet.
//
// A serve, one per transfer of another host:
//   state     event                                   next
//   (none)    arena_read of a page that is here       serving; a push of it
//   (none)    arena_read otherwise                    (none); kv_read_done not_found or busy
//   serving   segments are there                      serving; kv_read_done up to them
//   serving   the push is over                        (none); kv_read_done with what is left, or a code
//   serving   kv_read_cancel                          cancelled; the push is cancelled
//   cancelled the push is over                        (none); kv_read_cancelled
//   any       the host is lost                        (none); the push is cancelled
// Any other kv_read_cancel is answered at once.
//
// Owner: the core of a di-kvd host.  Bounds: serves_max.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "host/pages.h"
#include "host/port.h"
#include "host/push.h"
#include "wire/messages.h"

namespace di::host {

struct ServeCounters {
  std::uint64_t served = 0;
  std::uint64_t not_found = 0;
  std::uint64_t refused = 0;  // serves_max
  std::uint64_t failed = 0;
  std::uint64_t cancelled = 0;
};

class Serves {
 public:
  struct Limits {
    std::size_t serves_max = 1024;
  };
  Serves(const Limits& limits, Pages& pages, Pushes& pushes, Outbox& out);

  void read(const Peer& host, const wire::arena_read& message);
  void cancel(const Peer& host, const wire::kv_read_cancel& message);
  void progressed(const Pushes::Progress& progress);
  void host_lost(const Peer& host);

  [[nodiscard]] std::size_t count() const { return serves_.size(); }
  [[nodiscard]] const ServeCounters& counters() const { return counters_; }

 private:
  using Name = std::pair<Peer, std::uint64_t>;  // host and its transfer
  struct Serve {
    Pushes::PushId push = 0;
    bool cancelled = false;
  };
  template <class M>
  void send(const Peer& to, const M& message) {
    out_.push_back(wire::Envelope::make(to.instance, to.generation, {}, message));
  }

  const Limits limits_;
  Pages& pages_;
  Pushes& pushes_;
  Outbox& out_;
  std::map<Name, Serve> serves_;
  std::map<Pushes::PushId, Name> by_push_;
  ServeCounters counters_;
};

}  // namespace di::host
