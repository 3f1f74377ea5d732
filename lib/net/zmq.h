// net/zmq.h: the Transport over ZeroMQ: one ROUTER that is bound, one DEALER per outgoing connection.
//
// Owner: loop thread; a socket never leaves the thread that made it.  All socket options are set in
// one function.  The sources drain until EAGAIN and ZMQ_EVENTS is read again after every send and
// every receive, because ZMQ_FD signals edges.  A DEALER lives for one connection: when its monitor
// says that the connection broke, it is closed with what it had queued.
//
// With keys of its own (CURVE), every connection but those over ipc is encrypted and both sides prove
// their keys: callers are asked about at `admits` by a ZAP handler on the same loop, servers have to hold
// the key that connect() was given.  Who may open a socket file is a matter of its permissions.
//
// Addresses: "ipc:///run/di/di-kvd.host0.sock" and "tcp://127.0.0.1:0".
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "loop/loop.h"
#include "net/keys.h"
#include "net/transport.h"

namespace di::net {

struct Curve {
  KeyPair own;
  // Whether the holder of this public key may connect; asked at its handshake and at its first message.
  std::function<bool(std::string_view public_key)> admits;
};

[[nodiscard]] std::unique_ptr<Transport> make_zmq_transport(loop::Loop& loop,
                                                            std::optional<Curve> curve = std::nullopt);

// Whether an address can be reached from this machine only.
// tcp://HOST:PORT or ipc://PATH, as others connect to.
[[nodiscard]] bool is_endpoint(std::string_view address);
[[nodiscard]] bool is_ipc(std::string_view address);
[[nodiscard]] bool is_local(std::string_view address);  // ipc, or TCP on loopback

}  // namespace di::net
