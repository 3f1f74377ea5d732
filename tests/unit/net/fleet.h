// Members and endpoints for the tests of this folder, on either transport.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "net/inproc.h"
#include "net/peer.h"
#include "net/zmq.h"

namespace di::net {

// libzmq is not instrumented, and its own threads look like races to the thread sanitizer.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool zmq_testable = false;
#else
inline constexpr bool zmq_testable = true;
#endif

inline constexpr Duration patience = seconds(20);

// Addresses and transports of one kind.
class Net {
 public:
  virtual ~Net() = default;
  virtual std::unique_ptr<Transport> make(loop::Loop& loop) = 0;
  virtual std::string address(const std::string& name) = 0;
};

class InprocNet final : public Net {
 public:
  std::unique_ptr<Transport> make(loop::Loop& loop) override { return network.make_transport(loop); }
  std::string address(const std::string& name) override { return name; }
  InprocNetwork network;
};

class ZmqNet final : public Net {
 public:
  ZmqNet() {
    char pattern[] = "/tmp/di-net-XXXXXX";
    const char* made = ::mkdtemp(pattern);
    EXPECT_NE(made, nullptr);
    folder = made;
  }
  ~ZmqNet() override { std::filesystem::remove_all(folder); }
  std::unique_ptr<Transport> make(loop::Loop& loop) override { return make_zmq_transport(loop); }
  std::string address(const std::string& name) override { return "ipc://" + folder + "/" + name; }
  std::string folder;
};

inline std::unique_ptr<Net> make_net(const std::string& kind) {
  if (kind == "zmq") return std::make_unique<ZmqNet>();
  return std::make_unique<InprocNet>();
}

inline Member member(PeerId id, std::uint32_t generation, const std::string& instance,
                     const std::string& role = "", const std::string& host = "h") {
  Member m;
  m.id = id;
  m.generation = generation;
  m.instance = instance;
  m.program = instance.substr(0, instance.find('.'));
  m.role = role;
  m.host = host;
  return m;
}

// One instance of a fleet, on the loop of the test.
struct Node {
  // `address`: where it listens; empty: at that of its name.
  Node(loop::Loop& loop, Net& net, Member m, Endpoint::Options options = {}, const std::string& address = {})
      : transport(net.make(loop)), endpoint(loop, *transport, std::move(options)), self(std::move(m)) {
    const Result<std::string> bound = endpoint.bind(address.empty() ? net.address(self.instance) : address);
    EXPECT_TRUE(bound.ok()) << bound.error().message;
    if (bound.ok()) self.control = *bound;
    if (self.id != 0) endpoint.identify(self, 7);
    endpoint.on_peer_up([this](const Member& peer) {
      log += "+" + peer.instance + "/" + std::to_string(peer.generation) + " ";
    });
    endpoint.on_peer_lost([this](PeerId id, std::uint32_t generation) {
      log += "-" + std::to_string(id) + "/" + std::to_string(generation) + " ";
    });
    endpoint.on<wire::seat_release>([this](const Incoming& in, const wire::seat_release& message) {
      EXPECT_TRUE(endpoint.up(in.from.id)) << "a message outside of up and lost";
      seats.push_back(message.seat);
      last_from = in.from;
    });
  }

  std::unique_ptr<Transport> transport;
  Endpoint endpoint;
  Member self;
  std::string log;  // "+di-decode.0/3 -2/3 "
  std::vector<std::uint64_t> seats;
  From last_from;
};

}  // namespace di::net
