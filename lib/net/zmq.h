// net/zmq.h: the Transport over ZeroMQ: one ROUTER that is bound, one DEALER per outgoing connection.
//
// Owner: loop thread; a socket never leaves the thread that made it.  All socket options are set in
// one function.  The sources drain until EAGAIN and ZMQ_EVENTS is read again after every send and
// every receive, because ZMQ_FD signals edges.  A DEALER lives for one connection: when its monitor
// says that the connection broke, it is closed with what it had queued.
//
// Addresses: "ipc:///run/di/di-kvd.host0.sock" and "tcp://127.0.0.1:0".
#pragma once

#include <memory>

#include "loop/loop.h"
#include "net/transport.h"

namespace di::net {

[[nodiscard]] std::unique_ptr<Transport> make_zmq_transport(loop::Loop& loop);

}  // namespace di::net
