// Keys over real TCP: who has the right ones is heard, and nobody else.
#include <gtest/gtest.h>

#include "tests/unit/net/fleet.h"

namespace di::net {
namespace {

constexpr const char* any_port = "tcp://127.0.0.1:0";

// A transport with keys of its own and a list of others' that the test changes.
struct End {
  explicit End(loop::Loop& loop, bool keyed = true)
      : own(key_pair_make()),
        transport(keyed ? make_zmq_transport(
                              loop, Curve{own, [this](std::string_view key) { return ring.may_be(key, ""); }})
                        : make_zmq_transport(loop)) {
    transport->set_events({
        .message =
            [this](ConnectionId c, std::span<const ByteView> frames) {
              received.emplace_back(as_text(frames[0]));
              from = c;
            },
        .connected = [this](ConnectionId) { ++connected; },
        .disconnected = [this](ConnectionId) { ++disconnected; },
    });
  }
  void allow(const std::vector<std::string>& keys) {
    std::string text;
    for (const std::string& key : keys) text += key + "\n";
    std::vector<std::string> errors;
    ring = KeyRing::parse(text, "keys", errors);
    EXPECT_TRUE(errors.empty());
  }
  Status send(ConnectionId to, std::string_view text) {
    const ByteView frames[] = {as_bytes(text), as_bytes("body")};
    return transport->send(to, frames);
  }

  KeyPair own;
  KeyRing ring;
  std::unique_ptr<Transport> transport;
  std::vector<std::string> received;
  ConnectionId from = 0;
  int connected = 0;
  int disconnected = 0;
};

class CurveTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!zmq_testable) GTEST_SKIP() << "libzmq is not instrumented for the thread sanitizer";
  }
  bool wait(const std::function<bool()>& done) { return loop.run_until(done, patience); }
  loop::Loop loop;
};

TEST_F(CurveTest, BothSidesProveTheirKeys) {
  End server(loop);
  End client(loop);
  server.allow({client.own.public_key});
  const std::string address = *server.transport->bind(any_port);
  const ConnectionId c = *client.transport->connect(address, server.own.public_key);
  ASSERT_TRUE(wait([&] { return client.connected == 1; }));
  ASSERT_TRUE(client.send(c, "hello").ok());
  ASSERT_TRUE(wait([&] { return server.received.size() == 1; }));
  EXPECT_EQ(server.transport->peer_key(server.from), client.own.public_key);
  EXPECT_EQ(client.transport->peer_key(c), server.own.public_key);
  ASSERT_TRUE(server.send(server.from, "answer").ok());
  ASSERT_TRUE(wait([&] { return client.received.size() == 1; }));
  EXPECT_EQ(server.transport->counters().keys_refused, 0u);
}

TEST_F(CurveTest, KeyThatIsNotListedIsRefusedCountedAndTakenOnceItIs) {
  End server(loop);
  End client(loop);
  const std::string address = *server.transport->bind(any_port);
  const ConnectionId c = *client.transport->connect(address, server.own.public_key);
  const Instant start = loop.monotonic_now();
  ASSERT_TRUE(wait([&] { return client.transport->counters().handshakes_failed == 3; }));
  // It is no storm: the second and the third try came after pauses that grow.
  EXPECT_GE(loop.monotonic_now() - start, milliseconds(300));
  EXPECT_GE(server.transport->counters().keys_refused, 3u);
  EXPECT_EQ(client.connected, 0);
  EXPECT_EQ(client.send(c, "hello").error().code, Code::unreachable);
  EXPECT_TRUE(server.received.empty());
  server.allow({client.own.public_key});
  ASSERT_TRUE(wait([&] { return client.connected == 1; }));
  ASSERT_TRUE(client.send(c, "hello").ok());
  ASSERT_TRUE(wait([&] { return server.received.size() == 1; }));
}

TEST_F(CurveTest, ServerThatDoesNotHoldTheKeyHearsNothing) {
  End server(loop);
  End client(loop);
  server.allow({client.own.public_key});
  const std::string address = *server.transport->bind(any_port);
  const ConnectionId c = *client.transport->connect(address, key_pair_make().public_key);
  const Instant start = loop.monotonic_now();
  ASSERT_TRUE(wait([&] { return client.transport->counters().handshakes_failed == 3; }));
  EXPECT_GE(loop.monotonic_now() - start, milliseconds(300));
  ASSERT_TRUE(wait([&] { return server.transport->counters().handshakes_refused >= 3; }));
  EXPECT_EQ(client.send(c, "secret").error().code, Code::unreachable);
  EXPECT_EQ(client.connected, 0);
  EXPECT_TRUE(server.received.empty());
}

TEST_F(CurveTest, CallerWithoutKeysIsRefused) {
  End server(loop);
  End client(loop, false);
  const std::string address = *server.transport->bind(any_port);
  ASSERT_TRUE(client.transport->connect(address).ok());
  ASSERT_TRUE(wait([&] { return server.transport->counters().handshakes_refused >= 2; }));
  ASSERT_TRUE(wait([&] { return client.transport->counters().handshakes_failed >= 2; }));
  EXPECT_EQ(client.connected, 0);
  EXPECT_TRUE(server.received.empty());
}

TEST_F(CurveTest, CallerWithKeysDoesNotTalkToAServerWithout) {
  End server(loop, false);
  End client(loop);
  const std::string address = *server.transport->bind(any_port);
  ASSERT_TRUE(client.transport->connect(address, server.own.public_key).ok());
  ASSERT_TRUE(wait([&] { return client.transport->counters().handshakes_failed >= 2; }));
  EXPECT_EQ(client.connected, 0);
  // Nor is it talked into the clear by a server whose key nobody told.
  EXPECT_EQ(client.transport->connect(address).error().code, Code::denied);
  EXPECT_EQ(client.transport->connect(address, "no key").error().code, Code::denied);
  EXPECT_EQ(server.transport->connect(address, client.own.public_key).error().code, Code::denied);
}

TEST_F(CurveTest, SocketFilesStayInTheClear) {
  ZmqNet net;
  End server(loop);
  End client(loop);
  const std::string address = *server.transport->bind(net.address("s"));
  const ConnectionId c = *client.transport->connect(address, "");
  ASSERT_TRUE(wait([&] { return client.connected == 1; }));
  ASSERT_TRUE(client.send(c, "hello").ok());
  ASSERT_TRUE(wait([&] { return server.received.size() == 1; }));
  EXPECT_EQ(server.transport->peer_key(server.from), "");
}

TEST_F(CurveTest, RefusedConnectionEndsAndNothingOfItIsHeardAgain) {
  End server(loop);
  End client(loop);
  End stays(loop);
  server.allow({client.own.public_key, stays.own.public_key});
  const std::string address = *server.transport->bind(any_port);
  const ConnectionId s = *stays.transport->connect(address, server.own.public_key);
  const ConnectionId c = *client.transport->connect(address, server.own.public_key);
  ASSERT_TRUE(wait([&] { return client.connected == 1 && stays.connected == 1; }));
  ASSERT_TRUE(client.send(c, "first").ok());
  ASSERT_TRUE(wait([&] { return server.received.size() == 1; }));
  const ConnectionId from = server.from;
  server.allow({stays.own.public_key});
  ASSERT_TRUE(client.send(c, "under way").ok());
  server.transport->refuse(from);
  EXPECT_EQ(server.send(from, "late").error().code, Code::unreachable);
  ASSERT_TRUE(wait([&] { return client.disconnected == 1; })) << "the connection itself is shut";
  ASSERT_TRUE(stays.send(s, "stays").ok());
  ASSERT_TRUE(wait([&] { return server.received.size() == 2; }));
  EXPECT_EQ(server.received.back(), "stays");
  EXPECT_EQ(server.disconnected, 0);
  ASSERT_TRUE(client.transport->connect(address, server.own.public_key).ok());
  ASSERT_TRUE(wait([&] { return server.transport->counters().keys_refused >= 1; }));
  EXPECT_EQ(client.connected, 1);
}

TEST_F(CurveTest, KeyRemovedBetweenHandshakeAndFirstMessageIsRefused) {
  End server(loop);
  End client(loop);
  server.allow({client.own.public_key});
  const std::string address = *server.transport->bind(any_port);
  const ConnectionId c = *client.transport->connect(address, server.own.public_key);
  ASSERT_TRUE(wait([&] { return client.connected == 1; }));
  server.allow({});
  ASSERT_TRUE(client.send(c, "hello").ok());
  ASSERT_TRUE(wait([&] { return server.transport->counters().dropped_refused == 1; }));
  ASSERT_TRUE(wait([&] { return client.disconnected == 1; }));
  EXPECT_TRUE(server.received.empty());
}

TEST(Addresses, WhatOtherMachinesCanReach) {
  for (const char* local : {"ipc:///run/di/x.sock", "tcp://127.0.0.1:0", "tcp://127.8.0.1:1",
                            "tcp://localhost:80", "tcp://[::1]:0"}) {
    EXPECT_TRUE(is_local(local)) << local;
  }
  for (const char* far :
       {"tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:0", "tcp://[::]:0", "tcp://127.example.org:1",
        "tcp://localhost.example.org:1", "tcp://lo:1", "tcp://127.0.0.1", "udp://127.0.0.1:1", ""}) {
    EXPECT_FALSE(is_local(far)) << far;
  }
}

// ---- Names

// Nodes with keys; `ring` is everybody's list.
class CurveNet final : public Net {
 public:
  std::unique_ptr<Transport> make(loop::Loop& loop) override {
    return make_zmq_transport(loop,
                              Curve{own, [this](std::string_view key) { return ring.may_be(key, ""); }});
  }
  std::string address(const std::string&) override { return any_port; }
  Endpoint::Options options() {
    Endpoint::Options options;
    options.may_be = [this](std::string_view key, std::string_view name) { return ring.may_be(key, name); };
    return options;
  }
  // A node with a new key.
  std::unique_ptr<Node> node(loop::Loop& loop, Member m, Endpoint::Options options) {
    own = key_pair_make();
    m.public_key = own.public_key;
    return std::make_unique<Node>(loop, *this, std::move(m), std::move(options));
  }
  std::unique_ptr<Node> node(loop::Loop& loop, Member m) { return node(loop, std::move(m), options()); }
  void allow(const std::vector<std::pair<std::string, std::string>>& keys) {
    std::string text;
    for (const auto& [key, name] : keys) text += key + " " + name + "\n";
    std::vector<std::string> errors;
    ring = KeyRing::parse(text, "keys", errors);
    EXPECT_TRUE(errors.empty());
  }

  KeyPair own;
  KeyRing ring;
};

TEST_F(CurveTest, PeersComeUpUnderTheNamesOfTheirKeys) {
  CurveNet net;
  const auto router = net.node(loop, member(1, 10, "di-router.0"));
  const auto decode = net.node(loop, member(2, 11, "di-decode.0"));
  net.allow({{router->self.public_key, "di-router.0"}, {decode->self.public_key, ""}});
  for (Node* node : {router.get(), decode.get()}) node->endpoint.set_members({router->self, decode->self});
  ASSERT_TRUE(wait([&] { return router->endpoint.up(2) && decode->endpoint.up(1); }));
  ASSERT_TRUE(router->endpoint.send(2, wire::seat_release{5}).ok());
  ASSERT_TRUE(wait([&] { return decode->seats.size() == 1; }));
}

TEST_F(CurveTest, NameOfAnotherKeyIsRefused) {
  CurveNet net;
  const auto decode = net.node(loop, member(2, 11, "di-decode.0"));
  // It holds a listed key and says that it is the router.
  const auto liar = net.node(loop, member(1, 10, "di-router.0"));
  const std::string routers = key_pair_make().public_key;
  net.allow({{routers, "di-router.0"},
             {liar->self.public_key, "di-prefill.0"},
             {decode->self.public_key, "di-decode.0"}});
  Member real = liar->self;
  real.public_key = routers;
  decode->endpoint.set_members({real, decode->self});
  liar->endpoint.set_members({liar->self, decode->self});
  ASSERT_TRUE(wait([&] { return decode->endpoint.counters().names_refused >= 1; }));
  EXPECT_FALSE(decode->endpoint.up(1));
  EXPECT_FALSE(liar->endpoint.up(2));
  EXPECT_TRUE(decode->seats.empty());
  EXPECT_EQ(decode->log, "");
}

TEST_F(CurveTest, MemberWhoseKeyIsNotListedUnderItsNameIsNotConnectedTo) {
  CurveNet net;
  const auto router = net.node(loop, member(1, 10, "di-router.0"));
  const auto decode = net.node(loop, member(2, 11, "di-decode.0"));
  net.allow({{router->self.public_key, "di-router.0"}, {decode->self.public_key, "di-decode.1"}});
  for (Node* node : {router.get(), decode.get()}) node->endpoint.set_members({router->self, decode->self});
  EXPECT_EQ(router->endpoint.counters().sent, 0u);
  net.allow({{router->self.public_key, "di-router.0"}, {decode->self.public_key, "di-decode.0"}});
  router->endpoint.recheck_keys();
  ASSERT_TRUE(wait([&] { return router->endpoint.up(2) && decode->endpoint.up(1); }));
}

TEST_F(CurveTest, RemovedKeyLosesItsConnectionsAndComesBackWhenItIsListedAgain) {
  CurveNet net;
  const auto router = net.node(loop, member(1, 10, "di-router.0"));
  const auto decode = net.node(loop, member(2, 11, "di-decode.0"));
  const auto prefill = net.node(loop, member(3, 12, "di-prefill.0"));
  const std::vector<std::pair<std::string, std::string>> all{{router->self.public_key, "di-router.0"},
                                                             {decode->self.public_key, "di-decode.0"},
                                                             {prefill->self.public_key, "di-prefill.0"}};
  net.allow(all);
  for (Node* node : {router.get(), decode.get(), prefill.get()}) {
    node->endpoint.set_members({router->self, decode->self, prefill->self});
  }
  ASSERT_TRUE(wait([&] { return decode->endpoint.up(1) && prefill->endpoint.up(1); }));
  ASSERT_TRUE(wait([&] { return router->endpoint.up(2) && router->endpoint.up(3); }));
  // The callee's side: the router called.
  net.allow({all[1], all[2]});
  decode->endpoint.recheck_keys();
  EXPECT_FALSE(decode->endpoint.up(1));
  EXPECT_EQ(decode->endpoint.counters().keys_revoked, 1u);
  EXPECT_EQ(decode->log, "+di-router.0/10 -1/10 ");
  ASSERT_TRUE(wait([&] { return !router->endpoint.up(2); }));
  ASSERT_TRUE(wait([&] { return decode->transport->counters().keys_refused >= 2; }));
  EXPECT_FALSE(decode->endpoint.up(1));
  net.allow(all);
  decode->endpoint.recheck_keys();
  ASSERT_TRUE(wait([&] { return router->endpoint.up(2) && decode->endpoint.up(1); }));
  // The caller's side.
  net.allow({all[0], all[1]});
  router->endpoint.recheck_keys();
  EXPECT_FALSE(router->endpoint.up(3));
  EXPECT_TRUE(router->endpoint.up(2));
  ASSERT_TRUE(wait([&] { return !prefill->endpoint.up(1); }));
  EXPECT_EQ(router->endpoint.counters().keys_revoked, 1u);
}

TEST_F(CurveTest, RegistrationIsTakenUnderTheNameOfItsKeyOnly) {
  CurveNet net;
  Endpoint::Options options = net.options();
  options.accept_unregistered = true;
  const auto meta = net.node(loop, member(1, 50, "di-meta.0"), std::move(options));
  std::vector<std::string> verdicts;
  meta->endpoint.on<wire::meta_register>([&](const Incoming& in, const wire::meta_register& message) {
    const Status may = meta->endpoint.may_register(in.from, message.self);
    verdicts.push_back(may.ok() ? "yes" : may.error().message);
  });
  Endpoint::Options of_client = net.options();
  of_client.bootstrap_key = meta->self.public_key;
  const auto client = net.node(loop, member(0, 0, "di-decode.0"), std::move(of_client));
  net.allow({{client->self.public_key, "di-decode.0"}, {key_pair_make().public_key, "di-decode.1"}});
  client->endpoint.set_bootstrap(meta->self.control, [&](const From& from) {
    wire::meta_register message{client->self, 1};
    EXPECT_TRUE(client->endpoint.reply(from, message).ok());
    message.self.instance = "di-decode.1";
    EXPECT_TRUE(client->endpoint.reply(from, message).ok());
    message.self.instance = "di-decode.0";
    message.self.public_key = key_pair_make().public_key;
    EXPECT_TRUE(client->endpoint.reply(from, message).ok());
  });
  ASSERT_TRUE(wait([&] { return verdicts.size() == 3; }));
  EXPECT_EQ(verdicts[0], "yes");
  EXPECT_EQ(verdicts[1], "net.public_keys does not have its key under this name");
  EXPECT_EQ(verdicts[2], "the public key that it publishes is not the one that it holds");
  EXPECT_EQ(meta->endpoint.counters().names_refused, 2u);
}

}  // namespace
}  // namespace di::net
