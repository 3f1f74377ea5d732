#include "net/peer.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/unit/net/fleet.h"

namespace di::net {
namespace {

class PeerTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "zmq" && !zmq_testable)
      GTEST_SKIP() << "libzmq is not instrumented for the thread sanitizer";
    net = make_net(GetParam());
  }
  bool wait(const std::function<bool()>& done) { return loop.run_until(done, patience); }

  static void introduce(const std::vector<Node*>& nodes) {
    std::vector<Member> members;
    for (const Node* node : nodes) members.push_back(node->self);
    for (Node* node : nodes) node->endpoint.set_members(members);
  }

  loop::Loop loop;
  std::unique_ptr<Net> net;
};

TEST_P(PeerTest, LinkedMembersComeUpOnBothSidesAndOthersDoNot) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  Node decode(loop, *net, member(2, 11, "di-decode.0"));
  Node prefill(loop, *net, member(3, 12, "di-prefill.0"));
  introduce({&router, &decode, &prefill});
  ASSERT_TRUE(wait([&] {
    return router.endpoint.peers_up().size() == 2 && decode.endpoint.up(1) && prefill.endpoint.up(1);
  }));
  EXPECT_EQ(decode.log, "+di-router.0/10 ");
  EXPECT_FALSE(decode.endpoint.up(3));
  EXPECT_NE(decode.endpoint.peer(3), nullptr) << "members that are not linked are known";
  EXPECT_EQ(decode.endpoint.send(3, wire::seat_release{1}).error().code, Code::unreachable);
}

TEST_P(PeerTest, MessagesGoBothWaysOnOneConnectionWithTheirHeader) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  Node decode(loop, *net, member(2, 11, "di-decode.0"));
  wire::Header seen;
  std::string payload;
  decode.endpoint.on<wire::done_ack>([&](const Incoming& in, const wire::done_ack&) {
    seen = in.header;
    for (const ByteView frame : in.payload) payload += as_text(frame);
    EXPECT_TRUE(decode.endpoint.reply(in.from, wire::seat_release{8}).ok());
  });
  introduce({&router, &decode});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode.endpoint.up(1); }));
  SendOptions options;
  options.request.raw[0] = std::byte{9};
  options.attempt = 3;
  options.rank = 4;
  options.deadline_ms = 500;
  const ByteView frames[] = {as_bytes("raw"), as_bytes("bytes")};
  options.payload = frames;
  ASSERT_TRUE(router.endpoint.send(2, wire::done_ack{1}, options).ok());
  ASSERT_TRUE(wait([&] { return router.seats.size() == 1; }));
  EXPECT_EQ(router.seats[0], 8u);
  EXPECT_EQ(seen.sender, 1u);
  EXPECT_EQ(seen.sender_generation, 10u);
  EXPECT_EQ(seen.destination_generation, 11u);
  EXPECT_EQ(seen.request.raw[0], std::byte{9});
  EXPECT_EQ(seen.attempt, 3);
  EXPECT_EQ(seen.rank, 4);
  EXPECT_EQ(seen.deadline_ms, 500u);
  EXPECT_EQ(payload, "rawbytes");
  ASSERT_TRUE(decode.endpoint.send(1, wire::seat_release{9}).ok());
  ASSERT_TRUE(wait([&] { return router.seats.size() == 2; }));
}

TEST_P(PeerTest, DeathIsOneEventOnEitherSideOfTheConnection) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  auto decode = std::make_unique<Node>(loop, *net, member(2, 11, "di-decode.0"));
  introduce({&router, decode.get()});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode->endpoint.up(1); }));
  decode.reset();  // the one that is connected to
  ASSERT_TRUE(wait([&] { return !router.endpoint.up(2); }));
  EXPECT_EQ(router.log, "+di-decode.0/11 -2/11 ");
  EXPECT_EQ(router.endpoint.counters().peers_left, 0u);

  Node prefill(loop, *net, member(3, 12, "di-prefill.0"));
  auto second = std::make_unique<Node>(loop, *net, member(4, 13, "di-router.1"));
  introduce({&prefill, second.get()});
  ASSERT_TRUE(wait([&] { return prefill.endpoint.up(4) && second->endpoint.up(3); }));
  second.reset();  // the one that connects
  ASSERT_TRUE(wait([&] { return !prefill.endpoint.up(4); }));
  EXPECT_EQ(prefill.log, "+di-router.1/13 -4/13 ");
}

// Both are still in everybody's list as they were: the news of di-meta may come later.
TEST_P(PeerTest, WhoeverSaysThatItLeavesIsNotTakenForDead) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  auto decode = std::make_unique<Node>(loop, *net, member(2, 11, "di-decode.0"));
  introduce({&router, decode.get()});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode->endpoint.up(1); }));
  decode->endpoint.leave();
  const std::uint64_t before = router.endpoint.counters().received;
  ASSERT_TRUE(wait([&] { return router.endpoint.counters().received > before; }));
  EXPECT_TRUE(router.endpoint.up(2));  // it may have to finish something
  decode.reset();
  ASSERT_TRUE(wait([&] { return !router.endpoint.up(2); }));
  EXPECT_EQ(router.endpoint.counters().peers_left, 1u);
  // Its next start has said nothing yet.
  decode = std::make_unique<Node>(loop, *net, member(2, 12, "di-decode.0"));
  introduce({&router, decode.get()});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2); }));
  decode.reset();
  ASSERT_TRUE(wait([&] { return !router.endpoint.up(2); }));
  EXPECT_EQ(router.endpoint.counters().peers_left, 1u);
  EXPECT_EQ(router.endpoint.counters().peers_lost, 2u);
}

// G13.
TEST_P(PeerTest, NewGenerationOnTheSameAddressGetsNothingOfTheOld) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  auto decode = std::make_unique<Node>(loop, *net, member(2, 11, "di-decode.0"));
  introduce({&router, decode.get()});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2); }));
  decode.reset();
  decode = std::make_unique<Node>(loop, *net, member(2, 12, "di-decode.0"));
  // Before the list says so, hellos to the old generation are answered `stale`.
  decode->endpoint.set_members({router.self});
  ASSERT_TRUE(wait([&] { return decode->endpoint.counters().dropped_stale > 0; }));
  EXPECT_FALSE(router.endpoint.up(2));
  introduce({&router, decode.get()});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode->endpoint.up(1); }));
  EXPECT_EQ(router.log, "+di-decode.0/11 -2/11 +di-decode.0/12 ");
  EXPECT_TRUE(decode->seats.empty());
}

TEST_P(PeerTest, ListWithANewGenerationLosesTheOldOneAtOnce) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  Node decode(loop, *net, member(2, 11, "di-decode.0"));
  introduce({&router, &decode});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2); }));
  Member newer = decode.self;
  newer.generation = 12;
  newer.control = net->address("elsewhere");
  router.endpoint.set_members({router.self, newer});
  EXPECT_EQ(router.log, "+di-decode.0/11 -2/11 ");
  EXPECT_EQ(router.endpoint.peer(2)->generation, 12u);
}

// G01: a list that lacks a member says nothing about the member.
TEST_P(PeerTest, MemberMissingFromAListStaysWhileItsConnectionHolds) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  auto decode = std::make_unique<Node>(loop, *net, member(2, 11, "di-decode.0"));
  introduce({&router, decode.get()});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode->endpoint.up(1); }));
  router.endpoint.set_members({router.self});
  EXPECT_TRUE(router.endpoint.up(2));
  ASSERT_TRUE(router.endpoint.send(2, wire::seat_release{1}).ok());
  ASSERT_TRUE(wait([&] { return decode->seats.size() == 1; }));
  decode.reset();
  ASSERT_TRUE(wait([&] { return !router.endpoint.up(2); }));
  EXPECT_EQ(router.endpoint.peer(2), nullptr);
}

TEST_P(PeerTest, CallerIsKeptWaitingUntilTheListKnowsIt) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  Node decode(loop, *net, member(2, 11, "di-decode.0"));
  router.endpoint.set_members({router.self, decode.self});
  ASSERT_TRUE(wait([&] { return decode.endpoint.counters().received > 0; }));
  EXPECT_FALSE(decode.endpoint.up(1));
  decode.endpoint.set_members({router.self, decode.self});
  ASSERT_TRUE(wait([&] { return decode.endpoint.up(1) && router.endpoint.up(2); }));
}

TEST_P(PeerTest, LosingAPeerVoidsBothSidesAndBothComeUpAgain) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  Node decode(loop, *net, member(2, 11, "di-decode.0"));
  introduce({&router, &decode});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode.endpoint.up(1); }));
  decode.endpoint.lose(1, "test");  // the side that does not connect
  EXPECT_EQ(decode.log, "+di-router.0/10 -1/10 ");
  ASSERT_TRUE(wait([&] { return router.log == "+di-decode.0/11 -2/11 +di-decode.0/11 "; })) << router.log;
  ASSERT_TRUE(wait([&] { return decode.endpoint.up(1); }));
  router.endpoint.lose(2, "test");  // the side that does
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode.endpoint.up(1); }));
  EXPECT_EQ(router.log, "+di-decode.0/11 -2/11 +di-decode.0/11 -2/11 +di-decode.0/11 ");
  ASSERT_TRUE(wait([&] {
    return decode.log == "+di-router.0/10 -1/10 +di-router.0/10 -1/10 +di-router.0/10 ";
  })) << decode.log;
}

TEST_P(PeerTest, UnknownNumberIsCountedAndAnswered) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  Node decode(loop, *net, member(2, 11, "di-decode.0"));
  introduce({&router, &decode});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode.endpoint.up(1); }));
  const std::uint64_t before = router.endpoint.counters().received;
  ASSERT_TRUE(router.endpoint.send_body(2, 0x0eee, {}, {}).ok());
  ASSERT_TRUE(wait([&] { return decode.endpoint.counters().dropped_unsupported == 1; }));
  ASSERT_TRUE(wait([&] { return router.endpoint.counters().received > before; }));
  EXPECT_TRUE(router.endpoint.up(2));
}

TEST_P(PeerTest, BodyThatDoesNotDecodeIsDroppedAndCounted) {
  Node router(loop, *net, member(1, 10, "di-router.0"));
  Node decode(loop, *net, member(2, 11, "di-decode.0"));
  introduce({&router, &decode});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode.endpoint.up(1); }));
  ASSERT_TRUE(router.endpoint.send_body(2, wire::seat_release::number, as_bytes("short"), {}).ok());
  ASSERT_TRUE(router.endpoint.send_body(2, wire::seat_release::number, as_bytes("123456789"), {}).ok());
  ASSERT_TRUE(wait([&] { return decode.endpoint.counters().dropped_malformed == 2; }));
  EXPECT_TRUE(decode.seats.empty());
  EXPECT_TRUE(decode.endpoint.up(1));
}

// G10: without any traffic.
TEST_P(PeerTest, IdlePeersStayUpByTheirHeartbeats) {
  Endpoint::Options options;
  options.heartbeat = milliseconds(20);
  options.lost_after = milliseconds(1000);
  Node router(loop, *net, member(1, 10, "di-router.0"), options);
  Node decode(loop, *net, member(2, 11, "di-decode.0"), options);
  introduce({&router, &decode});
  ASSERT_TRUE(wait([&] { return router.endpoint.up(2) && decode.endpoint.up(1); }));
  // For twice as long as silence may last: a heartbeat is sent every 20 ms at most.
  const std::uint64_t sent = router.endpoint.counters().sent;
  ASSERT_TRUE(wait([&] { return router.endpoint.counters().sent >= sent + 100; }));
  EXPECT_EQ(router.log, "+di-decode.0/11 ");
  EXPECT_EQ(decode.log, "+di-router.0/10 ");
}

INSTANTIATE_TEST_SUITE_P(Both, PeerTest, testing::Values("inproc", "zmq"),
                         [](const auto& param) { return param.param; });

TEST(PeerFrozen, SilenceIsLossOnBothSidesAndItComesBack) {
  loop::Loop loop;
  InprocNet net;
  Endpoint::Options options;
  options.heartbeat = milliseconds(20);
  options.lost_after = milliseconds(200);
  Node router(loop, net, member(1, 10, "di-router.0"), options);
  Node decode(loop, net, member(2, 11, "di-decode.0"), options);
  for (Node* node : {&router, &decode}) node->endpoint.set_members({router.self, decode.self});
  ASSERT_TRUE(loop.run_until([&] { return router.endpoint.up(2) && decode.endpoint.up(1); }, patience));
  net.network.test_freeze(decode.self.control, true);
  ASSERT_TRUE(loop.run_until([&] { return !router.endpoint.up(2) && !decode.endpoint.up(1); }, patience));
  EXPECT_EQ(router.log, "+di-decode.0/11 -2/11 ");
  EXPECT_EQ(decode.log, "+di-router.0/10 -1/10 ");
  net.network.test_freeze(decode.self.control, false);
  ASSERT_TRUE(loop.run_until([&] { return router.endpoint.up(2) && decode.endpoint.up(1); }, patience));
}

// Refuses the first connections, as a process without descriptors does.
class Short final : public Transport {
 public:
  Short(std::unique_ptr<Transport> inner, int refused) : inner_(std::move(inner)), refused_(refused) {}
  void set_events(Events events) override { inner_->set_events(std::move(events)); }
  Result<std::string> bind(const std::string& address) override { return inner_->bind(address); }
  Result<ConnectionId> connect(const std::string& address, const std::string& server_key) override {
    if (refused_ > 0) {
      --refused_;
      return Error{Code::busy, EMFILE, "connect " + address + ": Too many open files"};
    }
    return inner_->connect(address, server_key);
  }
  void close(ConnectionId connection) override { inner_->close(connection); }
  void refuse(ConnectionId connection) override { inner_->refuse(connection); }
  std::string peer_key(ConnectionId connection) const override { return inner_->peer_key(connection); }
  const TransportCounters& counters() const override { return inner_->counters(); }
  Status send(ConnectionId connection, std::span<const ByteView> frames) override {
    return inner_->send(connection, frames);
  }

 private:
  std::unique_ptr<Transport> inner_;
  int refused_;
};

TEST(PeerShort, AConnectionThatCannotBeMadeIsTriedAgain) {
  loop::Loop loop;
  InprocNet net;
  Node meta(loop, net, member(1, 10, "di-meta.0"));
  Node decode(loop, net, member(2, 11, "di-decode.0"));
  Short transport(net.make(loop), 3);
  Endpoint endpoint(loop, transport);
  int connected = 0;
  endpoint.set_bootstrap(meta.self.control, [&](const From&) { ++connected; });  // refused twice
  ASSERT_TRUE(loop.run_until([&] { return connected == 1; }, patience));
  const Member self = member(3, 12, "di-router.0");
  endpoint.identify(self, 7);
  decode.endpoint.set_members({self});
  endpoint.set_members({decode.self});
  ASSERT_TRUE(loop.run_until([&] { return endpoint.up(2); }, patience));
}

TEST(PeerBootstrap, NobodyAtTheAddressIsSaidAndNotUntilItsTimeAgain) {
  if (!zmq_testable) GTEST_SKIP() << "libzmq is not instrumented for the thread sanitizer";
  loop::Loop loop;
  ZmqNet net;
  Endpoint::Options options;
  options.heartbeat = milliseconds(10);
  options.lost_after = milliseconds(30);
  Node router(loop, net, member(0, 0, "di-router.0"), options);
  // How often it is said before a timer of our own, which fires in its order, is due.
  const auto said_within = [&](Duration time) {
    bool over = false;
    loop::Timer timer(loop, loop::TimerKind::liveness, "test", [&] { over = true; });
    timer.start_after(time);
    testing::internal::CaptureStderr();
    EXPECT_TRUE(loop.run_until([&] { return over; }, patience));
    const std::string log = testing::internal::GetCapturedStderr();
    int times = 0;
    for (std::size_t at = 0; (at = log.find("no di-meta at its address", at)) != std::string::npos; ++at) {
      ++times;
      EXPECT_NE(log.find("address=" + net.address("di-meta.0"), at), std::string::npos) << log;
      EXPECT_NE(log.find("nobody answers", at), std::string::npos) << log;
    }
    return times;
  };
  router.endpoint.set_bootstrap(net.address("di-meta.0"), [](const From&) {});
  EXPECT_EQ(said_within(20 * options.lost_after), 1);
  EXPECT_GE(said_within(25 * options.lost_after), 1) << "again";
  router.endpoint.leave();
  EXPECT_EQ(said_within(25 * options.lost_after), 0) << "it stops";
}

TEST(PeerThreads, TwoLoopsExchangeMessages) {
  constexpr std::uint64_t count = 500;
  InprocNet net;
  loop::Loop a_loop;
  loop::Loop b_loop;
  const Member a_self = [&] {
    Member m = member(1, 10, "di-router.0");
    m.control = net.address(m.instance);
    return m;
  }();
  const Member b_self = [&] {
    Member m = member(2, 11, "di-decode.0");
    m.control = net.address(m.instance);
    return m;
  }();
  std::thread other([&] {
    Node b(b_loop, net, b_self);
    b.endpoint.set_members({a_self, b_self});
    EXPECT_TRUE(b_loop.run_until([&] { return b.seats.size() == count; }, patience));
    EXPECT_TRUE(b.endpoint.reply(b.last_from, wire::seat_release{count}).ok());
    EXPECT_TRUE(b_loop.run_until([&] { return b.log.ends_with("-1/10 "); }, patience));
  });
  {
    Node a(a_loop, net, a_self);
    a.endpoint.set_members({a_self, b_self});
    EXPECT_TRUE(a_loop.run_until([&] { return a.endpoint.up(2); }, patience));
    for (std::uint64_t i = 0; i < count; ++i) EXPECT_TRUE(a.endpoint.send(2, wire::seat_release{i}).ok());
    EXPECT_TRUE(a_loop.run_until([&] { return a.seats.size() == 1; }, patience));
  }
  other.join();
}

}  // namespace
}  // namespace di::net
