// net/inproc.h: the Transport inside one process, for simulation and thread sanitizing.
//
// A network is shared by the transports of any number of loops and threads; an address is any
// string.  Delivery is a post to the receiver's loop.  Tests cut a connection (both sides see
// `disconnected`) or hold messages back.  Bound: as transport.h says.
#pragma once

#include <memory>
#include <string>

#include "loop/loop.h"
#include "net/transport.h"

namespace di::net {

class InprocNetwork {
 public:
  InprocNetwork();
  ~InprocNetwork();

  // The transport of one endpoint.  Owner: the thread of `loop`.  The network outlives it.
  [[nodiscard]] std::unique_ptr<Transport> make_transport(loop::Loop& loop);

  // Breaks every connection to the transport bound at `address`.  Any thread.
  void test_cut(const std::string& address);
  // From now on nothing is delivered from or to the transport bound at `address`, and connections
  // stay as they are: a frozen process.  False lets the held messages go.  Any thread.
  void test_freeze(const std::string& address, bool frozen);

 private:
  struct Impl;
  class End;
  std::shared_ptr<Impl> impl_;
};

}  // namespace di::net
