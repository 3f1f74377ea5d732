#include "net/meta_client.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/unit/net/fleet.h"

namespace di::net {
namespace {

// As much of di-meta as the client needs.
struct Meta {
  Meta(loop::Loop& loop, Net& net, std::uint32_t generation)
      : node(loop, net, member(1, generation, "di-meta.0"), [] {
          Endpoint::Options options;
          options.accept_unregistered = true;
          return options;
        }()) {
    node.endpoint.on<wire::meta_register>([this](const Incoming& in, const wire::meta_register& message) {
      ++registrations;
      wire::meta_registered answer;
      answer.cluster = cluster;
      if (!refuse.empty()) {
        answer.code = static_cast<std::uint16_t>(refuse_as);
        answer.reason = refuse;
        EXPECT_TRUE(node.endpoint.reply(in.from, answer).ok());
        return;
      }
      Member m = message.self;
      m.id = m.instance == "di-router.0" ? 2 : 3;
      if (m.generation == 0) m.generation = ++last_generation;
      answer.id = m.id;
      answer.generation = m.generation;
      members[m.id] = m;
      node.endpoint.set_members(list());
      EXPECT_TRUE(node.endpoint.reply(in.from, answer).ok());
      publish();
    });
    node.endpoint.on<wire::meta_state>([this](const Incoming& in, const wire::meta_state& message) {
      members[in.from.id].state = message.state;
      publish();
    });
    node.endpoint.on_peer_up([this](const Member&) { publish(); });
  }
  std::vector<Member> list() {
    std::vector<Member> all{node.self};
    for (const auto& [id, m] : members) all.push_back(m);
    return all;
  }
  void publish() {
    ++epoch;
    for (const Member* peer : node.endpoint.peers_up()) {
      EXPECT_TRUE(node.endpoint.send(peer->id, wire::meta_members{epoch, list()}).ok());
    }
  }

  Node node;
  std::map<PeerId, Member> members;
  std::uint32_t last_generation = 100;
  std::uint64_t epoch = 0;
  int registrations = 0;
  std::string refuse;
  Code refuse_as = Code::exists;
  std::uint32_t cluster = 7;
};

struct Client {
  Client(loop::Loop& loop, Net& net, const std::string& instance)
      : node(loop, net, member(0, 0, instance)),
        meta(loop, node.endpoint, net.address("di-meta.0"), node.self,
             {.registered =
                  [this](const wire::meta_registered&) {
                    ++registered;
                    if (on_registered) on_registered();
                  },
              .refused = [this](const Error& error) { refused = error.message; },
              .members = {}}) {}
  Node node;
  int registered = 0;
  std::string refused;
  std::function<void()> on_registered;
  MetaClient meta;
};

class MetaClientTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "zmq" && !zmq_testable)
      GTEST_SKIP() << "libzmq is not instrumented for the thread sanitizer";
    net = make_net(GetParam());
  }
  bool wait(const std::function<bool()>& done) { return loop.run_until(done, patience); }
  loop::Loop loop;
  std::unique_ptr<Net> net;
};

TEST_P(MetaClientTest, RegistersBeforeMetaIsThereAndMeetsItsPeers) {
  Client router(loop, *net, "di-router.0");
  Client decode(loop, *net, "di-decode.0");
  EXPECT_FALSE(router.meta.registered());
  Meta meta(loop, *net, 50);
  ASSERT_TRUE(wait([&] { return router.node.endpoint.up(3) && decode.node.endpoint.up(2); }));
  EXPECT_EQ(router.registered, 1);
  EXPECT_EQ(router.node.endpoint.self().id, 2u);
  ASSERT_TRUE(wait([&] { return router.meta.meta() == 1; }));
  ASSERT_TRUE(wait([&] { return meta.node.endpoint.up(2) && meta.node.endpoint.up(3); }));
}

TEST_P(MetaClientTest, KeepsItsGenerationAndItsPeersAcrossARestartOfMeta) {
  Client router(loop, *net, "di-router.0");
  Client decode(loop, *net, "di-decode.0");
  auto meta = std::make_unique<Meta>(loop, *net, 50);
  ASSERT_TRUE(wait(
      [&] { return router.node.endpoint.up(3) && decode.node.endpoint.up(2) && router.meta.meta() == 1; }));
  const std::uint32_t generation = router.node.endpoint.self().generation;
  meta.reset();
  ASSERT_TRUE(wait([&] { return router.meta.meta() == 0 && decode.meta.meta() == 0; }));
  EXPECT_TRUE(router.node.endpoint.up(3)) << "the fleet goes on";
  meta = std::make_unique<Meta>(loop, *net, 51);
  ASSERT_TRUE(wait([&] { return router.meta.meta() == 1 && decode.meta.meta() == 1; }));
  EXPECT_EQ(router.node.endpoint.self().generation, generation);
  EXPECT_EQ(router.registered, 1);
  EXPECT_EQ(meta->members[2].generation, generation);
  EXPECT_EQ(router.node.log.find("-3/"), std::string::npos) << router.node.log;
}

// Restored from a copy it may be the start that it has been before, and count lists from below.
TEST_P(MetaClientTest, ListsCountAnewOnANewConnection) {
  Client router(loop, *net, "di-router.0");
  auto meta = std::make_unique<Meta>(loop, *net, 50);
  meta->epoch = 1000;
  ASSERT_TRUE(wait([&] { return router.meta.meta() == 1; }));
  meta.reset();
  ASSERT_TRUE(wait([&] { return router.meta.meta() == 0; }));
  meta = std::make_unique<Meta>(loop, *net, 50);
  ASSERT_TRUE(wait([&] { return router.meta.meta() == 1; }));
  Client decode(loop, *net, "di-decode.0");
  EXPECT_TRUE(wait([&] { return router.node.endpoint.up(3); }));
}

TEST_P(MetaClientTest, AnInstanceOfAnotherClusterIsToldSo) {
  Client router(loop, *net, "di-router.0");
  auto meta = std::make_unique<Meta>(loop, *net, 50);
  ASSERT_TRUE(wait([&] { return router.meta.meta() == 1; }));
  meta.reset();
  ASSERT_TRUE(wait([&] { return router.meta.meta() == 0; }));
  // Its catalogue was moved away.
  meta = std::make_unique<Meta>(loop, *net, 1);
  meta->cluster = 8;
  meta->node.endpoint.identify(meta->node.self, 8);
  ASSERT_TRUE(wait([&] { return !router.refused.empty(); }));
  EXPECT_EQ(router.refused, "di-meta has another catalogue than the one that this instance registered in");
  EXPECT_EQ(router.registered, 1);
}

TEST_P(MetaClientTest, RefusalIsReportedAndNotRepeatedUntilSomethingChanged) {
  Meta meta(loop, *net, 50);
  meta.refuse = "another layout for this model";
  Client router(loop, *net, "di-router.0");
  ASSERT_TRUE(wait([&] { return !router.refused.empty(); }));
  EXPECT_EQ(router.refused, "di-meta refused di-router.0: another layout for this model");
  EXPECT_FALSE(router.meta.registered());
  meta.refuse.clear();
  router.meta.publish(router.node.self);
  ASSERT_TRUE(wait([&] { return router.meta.registered(); }));
  EXPECT_EQ(meta.registrations, 2);
}

// One that waits for a name must not be ahead of the process that has it, when both meet a di-meta that has
// restarted and knows neither.
TEST_P(MetaClientTest, WhoeverWaitsForANameLetsItsHolderComeFirst) {
  auto meta = std::make_unique<Meta>(loop, *net, 50);
  Client holder(loop, *net, "di-kvd.host0");
  ASSERT_TRUE(wait([&] { return holder.registered == 1; }));
  meta->refuse = "the name is taken";
  meta->refuse_as = Code::busy;
  Client waits(loop, *net, "di-router.0");
  ASSERT_TRUE(wait([&] { return meta->registrations > 2; })) << "asked again";
  EXPECT_TRUE(waits.refused.empty());
  meta.reset();
  Meta again(loop, *net, 51);
  ASSERT_TRUE(wait([&] { return again.registrations == 1; }));
  EXPECT_TRUE(again.members.contains(3)) << "the one that waits came first";
  ASSERT_TRUE(wait([&] { return waits.registered == 1; }));
}

// A drain in the moment between the two was lost, and new work came for as long as the process lived.
TEST_P(MetaClientTest, StateThatIsSetBetweenRegistrationAndHelloIsSaid) {
  Client router(loop, *net, "di-router.0");
  router.on_registered = [&] {
    EXPECT_EQ(router.meta.meta(), 0u) << "up already: this test is of before";
    router.meta.set_state(1);
  };
  Meta meta(loop, *net, 50);
  ASSERT_TRUE(wait([&] { return meta.members[2].state == 1; }));
  bool told = false;
  router.meta.when_told([&] { told = true; });
  ASSERT_TRUE(wait([&] { return told; }));
}

// An address at which another daemon listens: it was asked again as fast as connections are made.
TEST_P(MetaClientTest, WhoeverIsNoMetaIsAskedWithPausesUntilOneIsThere) {
  auto other = std::make_unique<Node>(loop, *net, member(9, 90, "di-kvd.host0", "host"));
  const std::string address = other->self.control;
  // Each registration that is not taken is one more that came from nobody.
  Node node(loop, *net, member(0, 0, "di-router.0"));
  const Instant begin = loop.monotonic_now();
  MetaClient client(loop, node.endpoint, address, node.self,
                    {.registered = {}, .refused = {}, .members = {}});
  ASSERT_TRUE(wait([&] { return other->endpoint.counters().dropped_unknown == 4; }));
  EXPECT_GE(loop.monotonic_now() - begin, 7 * reconnect_after) << "pauses of 1, 2 and 4";
  EXPECT_FALSE(client.registered());
  other.reset();
  Endpoint::Options options;
  options.accept_unregistered = true;
  Node meta(loop, *net, member(1, 50, "di-meta.0"), options, address);
  meta.endpoint.on<wire::meta_register>([&](const Incoming& in, const wire::meta_register& message) {
    Member self = message.self;
    self.id = 2;
    self.generation = 10;
    meta.endpoint.set_members({self});
    wire::meta_registered answer;
    answer.cluster = 7;
    answer.id = self.id;
    answer.generation = self.generation;
    EXPECT_TRUE(meta.endpoint.reply(in.from, answer).ok());
  });
  ASSERT_TRUE(wait([&] { return client.meta() == 1; }));
}

TEST_P(MetaClientTest, MembersAreBelievedOfMetaOnly) {
  Client router(loop, *net, "di-router.0");
  Client decode(loop, *net, "di-decode.0");
  Meta meta(loop, *net, 50);
  ASSERT_TRUE(wait([&] { return router.node.endpoint.up(3) && decode.node.endpoint.up(2); }));
  // A list in which the sender is what it likes, and an answer that nobody asked for.
  Member another = member(9, 900, "di-kvd.host9", "host");
  another.control = net->address("nowhere");
  ASSERT_TRUE(decode.node.endpoint.send(2, wire::meta_members{1u << 20, {another}}).ok());
  wire::meta_registered answer;
  answer.id = 77;
  answer.generation = 1;
  ASSERT_TRUE(decode.node.endpoint.send(2, answer).ok());
  ASSERT_TRUE(decode.node.endpoint.send(2, wire::seat_release{1}).ok());
  ASSERT_TRUE(wait([&] { return router.node.seats.size() == 1; }));
  EXPECT_EQ(router.node.endpoint.peer(9), nullptr);
  EXPECT_EQ(router.node.endpoint.self().id, 2u);
  EXPECT_EQ(router.refused, "");
  EXPECT_TRUE(router.node.endpoint.up(3));
}

INSTANTIATE_TEST_SUITE_P(Both, MetaClientTest, testing::Values("inproc", "zmq"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace di::net
