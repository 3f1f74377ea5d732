// What only VerbsFabric does; the rest is in conformance_test.cpp.
#include "transfer/verbs_fabric.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "loop/loop.h"
#include "tests/support/softverbs/softverbs.h"
#include "tests/unit/transfer/world.h"
#include "transfer/address.h"
#include "transfer/frame.h"
#include "transfer/verbs_message.h"

namespace di::transfer {
namespace {

constexpr int retry_exceeded = 12;  // IBV_WC_RETRY_EXC_ERR

// Two nodes, or three, step by step; nothing moves that is not let move.
struct VerbsFabricTest : testing::Test {
  VerbsFabricTest() { softverbs::run_deterministic(1); }
  ~VerbsFabricTest() override {
    a.fabric.reset();
    b.fabric.reset();
    c.fabric.reset();
    softverbs::no_faults();
    for (std::size_t device = 0; device < 2; ++device) {
      softverbs::set_port(device, true);
      softverbs::set_path(device, true);
      softverbs::set_gid(device, static_cast<std::uint8_t>(device + 1));
    }
    EXPECT_EQ(softverbs::counts().objects, 0u);
    softverbs::run_threaded();
  }

  VerbsFabricOptions options_of(Node& node, const char* name) {
    node.self = {name, 1};
    VerbsFabricOptions options;
    options.self = node.self;
    options.listen = "127.0.0.1:0";
    options.region = &node.region;
    options.rails = {{"softverbs0", 1, 0}};
    options.memory = {{{node.region.base, TestRegion::file_bytes}, -1, 0}};
    options.max_unit_bytes = 64 << 10;
    options.bounce_bytes = 1 << 20;
    options.window_bytes = 256 << 10;
    options.dial_pause_min = milliseconds(5);
    options.cancel_wait = seconds(10);
    return options;
  }
  void start(Node& node, const VerbsFabricOptions& options) {
    auto made = make_verbs_fabric(loop, options);
    ASSERT_TRUE(made.ok()) << made.error().message;
    endpoints[node.self] = (*made)->endpoint();
    node.fabric = *std::move(made);
    node.fabric->set_events(
        {[this, &node](const Peer& peer) {
           node.wanted.push_back(peer);
           Node& other = peer == b.self ? b : c;
           node.fabric->ticket(peer, endpoints.at(peer), *other.fabric->grant(node.self, false));
         },
         [&node](OpId op, Code code) { node.done[op].push_back(code); },
         [&node](const Peer& peer, TransferId transfer) { node.concealed.emplace_back(peer, transfer); }});
  }
  void start_both() {
    start_both([](VerbsFabricOptions&) {});
  }
  void start_both(const std::function<void(VerbsFabricOptions&)>& change) {
    VerbsFabricOptions of_a = options_of(a, "di-kvd.a");
    VerbsFabricOptions of_b = options_of(b, "di-kvd.b");
    change(of_a);
    change(of_b);
    start(a, of_a);
    start(b, of_b);
    ASSERT_TRUE(b.fabric->expose(a.self, 1, Access::write, {{0, 1}}).ok());
    ASSERT_TRUE(b.fabric->expose(a.self, 2, Access::read, {{1, 1}}).ok());
  }
  // Everything moves.
  bool until(const std::function<bool()>& met) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!met()) {
      if (std::chrono::steady_clock::now() > end) return false;
      const bool stepped = softverbs::step();
      if (loop.run_ready() == 0 && !stepped) loop.run_until(met, milliseconds(1));
    }
    return true;
  }
  // No byte moves, but timers run and connections open.
  bool until_without_device(const std::function<bool()>& met) { return loop.run_until(met, seconds(20)); }
  void turn() {
    while (loop.run_ready() > 0) {
    }
  }
  OpId write(ByteView bytes) {
    const auto op = a.fabric->write(b.self, 1, {{0, 1}, 0, bytes.size()}, bytes, Class::handover);
    EXPECT_TRUE(op.ok());
    return *op;
  }
  Code finished(OpId op) {
    EXPECT_TRUE(until([&] { return a.is_done(op); }));
    return a.code_of(op);
  }
  // A connection, so that the next operation is about its bytes.
  void connect() { ASSERT_EQ(finished(write(Bytes(1, std::byte{1}))), Code::ok); }
  // The other side's device has the requests and has not begun with the data.
  void ask_only() {
    const std::uint64_t begun = softverbs::counts().begun;
    turn();
    while (softverbs::counts().begun == begun) ASSERT_TRUE(softverbs::step());
    turn();
  }

  // Whatever can happen has happened.
  void come_to_rest() {
    do {
      turn();
    } while (softverbs::step());
  }

  loop::Loop loop;
  Node a;
  Node b;
  Node c;
  std::map<Peer, std::string> endpoints;
};

// All of it, as soon as the connection is there; nothing else happens meanwhile.
bool sent(const Fd& fd, ByteView bytes) {
  pollfd ready{fd.get(), POLLOUT, 0};
  return ::poll(&ready, 1, 20'000) == 1 &&
         ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

void two_rails(VerbsFabricOptions& options) {
  options.rails.push_back({"softverbs1", 1, 0});
}

TEST_F(VerbsFabricTest, cancelled_memory_is_in_quarantine_until_its_units_are_answered) {
  start_both();
  connect();
  Bytes bytes(64 << 10, std::byte{2});
  const OpId op = write(bytes);
  ask_only();
  a.fabric->cancel(op);
  turn();
  EXPECT_FALSE(a.is_done(op)) << "the other side may still read from it";
  EXPECT_EQ(finished(op), Code::cancelled);
  EXPECT_EQ(a.fabric->counters().ops_cancelled, 1u);
  EXPECT_EQ(b.region.slot(0)[65535], std::byte{2}) << "it was, and this is why";
}

TEST_F(VerbsFabricTest, peer_that_does_not_answer_a_cancel_loses_its_connection) {
  start_both([](VerbsFabricOptions& options) { options.cancel_wait = milliseconds(50); });
  connect();
  Bytes into(64 << 10, std::byte{3});
  std::fill(b.region.slot(1).begin(), b.region.slot(1).end(), std::byte{9});
  const auto op = a.fabric->read(b.self, 2, {{1, 1}, 0, into.size()}, into, Class::fetch);
  ASSERT_TRUE(op.ok());
  ask_only();
  a.fabric->cancel(*op);
  ASSERT_TRUE(until_without_device([&] { return a.is_done(*op); }));
  EXPECT_EQ(a.code_of(*op), Code::cancelled);
  EXPECT_EQ(a.fabric->gauges().connections, 0u);
  // What the other side's device had in its queue comes to nothing.
  softverbs::run_all();
  turn();
  EXPECT_EQ(std::count(into.begin(), into.end(), std::byte{3}), static_cast<std::ptrdiff_t>(into.size()));
  EXPECT_EQ(finished(write(Bytes(1, std::byte{1}))), Code::ok) << "the next connects anew";
}

TEST_F(VerbsFabricTest, concealed_waits_for_the_device) {
  start_both();
  connect();
  const Bytes bytes(64 << 10, std::byte{2});
  const OpId op = write(bytes);
  ask_only();
  b.fabric->conceal(a.self, 1);
  turn();
  EXPECT_TRUE(b.concealed.empty()) << "a READ into the slot is under way";
  EXPECT_EQ(finished(op), Code::ok);
  ASSERT_TRUE(until([&] { return b.concealed.size() == 1; }));
  std::fill(b.region.slot(0).begin(), b.region.slot(0).end(), std::byte{0});
  EXPECT_EQ(finished(write(bytes)), Code::not_found);
  EXPECT_EQ(b.fabric->counters().refused_late, 1u);
  EXPECT_EQ(b.region.slot(0)[0], std::byte{0});
}

TEST_F(VerbsFabricTest, device_that_never_ends_an_access_is_reset_before_the_slot_is_free) {
  start_both([](VerbsFabricOptions& options) {
    if (options.self.instance == "di-kvd.b") options.stall_max = milliseconds(100);
  });
  connect();
  const Bytes bytes(64 << 10, std::byte{2});
  write(bytes);
  ask_only();
  b.fabric->conceal(a.self, 1);
  ASSERT_TRUE(until_without_device([&] { return b.concealed.size() == 1; }));
  std::fill(b.region.slot(0).begin(), b.region.slot(0).end(), std::byte{0});
  softverbs::run_all();
  EXPECT_EQ(std::count(b.region.slot(0).begin(), b.region.slot(0).end(), std::byte{0}),
            static_cast<std::ptrdiff_t>(test_slot_bytes));
}

TEST_F(VerbsFabricTest, failed_request_ends_what_had_begun_and_the_next_connects_anew) {
  for (std::uint64_t nth = 1; nth <= 3; ++nth) {  // the request, the data, the answer
    SCOPED_TRACE(nth);
    start_both();
    connect();
    const std::uint64_t dials = a.fabric->counters().dials;
    softverbs::fail_nth(nth, retry_exceeded);
    EXPECT_EQ(finished(write(Bytes(1000, std::byte{2}))), Code::unreachable);
    EXPECT_EQ(finished(write(Bytes(1000, std::byte{2}))), Code::ok);
    EXPECT_EQ(a.fabric->counters().dials, dials + 1);
    EXPECT_EQ(a.fabric->gauges().ops, 0u);
    a.fabric.reset();
    b.fabric.reset();
    a.done.clear();
  }
}

TEST_F(VerbsFabricTest, lost_completion_ends_as_a_stall) {
  start_both([](VerbsFabricOptions& options) { options.stall_max = milliseconds(1000); });
  connect();
  for (int i = 0; i < 10000 && a.fabric->link(b.self).bytes_per_s == 0; ++i) connect();
  EXPECT_GT(a.fabric->link(b.self).bytes_per_s, 0);
  softverbs::lose_completion_nth(2);  // of the data: no answer ever comes
  EXPECT_EQ(finished(write(Bytes(1000, std::byte{2}))), Code::unreachable);
  EXPECT_EQ(a.fabric->link(b.self).bytes_per_s, 0) << "of the next one nothing is known";
  EXPECT_EQ(finished(write(Bytes(1000, std::byte{2}))), Code::ok);
}

// As after the loss of an acknowledgement: whoever asked has the bytes, and asks anew, while the device that sent
// them does not know yet.
TEST_F(VerbsFabricTest, place_of_a_read_is_used_again_before_its_completion) {
  start_both();
  connect();
  Bytes into(1000);
  const auto read = [&] { return *a.fabric->read(b.self, 2, {{1, 1}, 0, into.size()}, into, Class::fetch); };
  const OpId first = read();
  ask_only();
  softverbs::hold_nth(1);  // the data
  EXPECT_EQ(finished(first), Code::ok);
  for (std::uint32_t i = 1; i < verbs_units_max; ++i) ASSERT_EQ(finished(read()), Code::ok) << i;
  EXPECT_EQ(b.fabric->counters().served_bytes, 0u) << "no completion has come";
  const OpId last = read();
  come_to_rest();
  EXPECT_FALSE(a.is_done(last)) << "it has the place of the first";
  softverbs::let_go();
  EXPECT_EQ(finished(last), Code::ok);
  come_to_rest();
  EXPECT_EQ(b.fabric->counters().served_bytes, (verbs_units_max + 1) * into.size());
  EXPECT_EQ(b.fabric->counters().malformed, 0u);
  EXPECT_EQ(a.fabric->counters().dials, 1u);
}

TEST_F(VerbsFabricTest, port_that_goes_down_takes_along_no_more_than_its_rail) {
  start_both(two_rails);
  connect();
  const Bytes bytes(1000, std::byte{2});
  for (const std::size_t down : {1u, 0u, 1u}) {
    softverbs::set_port(down, false);
    turn();
    for (int i = 0; i < 5; ++i) EXPECT_EQ(finished(write(bytes)), Code::ok) << down;
    softverbs::set_port(down, true);
    turn();
  }
  EXPECT_EQ(a.fabric->counters().dials, 1u);
}

TEST_F(VerbsFabricTest, rail_that_is_down_at_the_start_is_taken_in_later) {
  softverbs::set_port(1, false);
  start_both([](VerbsFabricOptions& options) {
    two_rails(options);
    options.rail_rest = milliseconds(20);
  });
  const Bytes bytes(1000, std::byte{2});
  EXPECT_EQ(finished(write(bytes)), Code::ok);
  EXPECT_EQ(a.fabric->counters().dials, 1u);
  softverbs::set_port(1, true);
  OpId last = write(bytes);
  EXPECT_TRUE(until([&] {
    if (!a.is_done(last)) return false;
    EXPECT_EQ(a.code_of(last), Code::ok);
    last = write(bytes);
    return a.fabric->counters().dials == 2;
  }));
  EXPECT_EQ(finished(last), Code::ok);
  softverbs::set_port(0, false);
  turn();
  EXPECT_EQ(finished(write(bytes)), Code::ok);
  EXPECT_EQ(a.fabric->counters().dials, 2u) << "both were there";
}

TEST_F(VerbsFabricTest, link_that_is_never_idle_takes_in_a_rail_all_the_same) {
  softverbs::set_port(1, false);
  start_both([](VerbsFabricOptions& options) {
    two_rails(options);
    options.rail_rest = milliseconds(20);
  });
  const Bytes bytes(256 << 10, std::byte{2});  // four units each
  std::vector<OpId> ops;
  for (int i = 0; i < 4; ++i) ops.push_back(write(bytes));
  std::size_t done = 0;
  const auto go_on = [&] {
    for (; done + 3 < ops.size() && a.is_done(ops[done]); ++done) ops.push_back(write(bytes));
  };
  ASSERT_TRUE(until([&] {
    go_on();
    return done > 3;
  }));
  softverbs::set_port(1, true);
  EXPECT_TRUE(until([&] {
    go_on();
    return a.fabric->counters().dials == 2;
  }));
  for (const OpId op : ops) ASSERT_EQ(finished(op), Code::ok);
  softverbs::set_port(0, false);
  turn();
  EXPECT_EQ(finished(write(bytes)), Code::ok);
  EXPECT_EQ(a.fabric->counters().dials, 2u) << "both were there";
}

TEST_F(VerbsFabricTest, rail_that_is_down_on_the_other_side_is_not_joined) {
  start_both([](VerbsFabricOptions& options) {
    options.rails.push_back({options.self.instance == "di-kvd.b" ? "softverbs1" : "softverbs0", 1, 0});
  });
  softverbs::set_port(1, false);
  turn();
  const Bytes bytes(1000, std::byte{2});
  for (int i = 0; i < 5; ++i) EXPECT_EQ(finished(write(bytes)), Code::ok);
  EXPECT_EQ(a.fabric->counters().dials, 1u);
}

TEST_F(VerbsFabricTest, peer_with_no_rail_that_is_up_here_and_there_is_unreachable) {
  start_both([](VerbsFabricOptions& options) {
    if (options.self.instance == "di-kvd.a") options.rails = {{"softverbs1", 1, 0}};
    two_rails(options);
  });
  softverbs::set_port(0, false);
  turn();
  const Bytes bytes(1000, std::byte{2});
  EXPECT_EQ(finished(write(bytes)), Code::ok) << "the second is up on both";
  softverbs::set_port(1, false);
  a.fabric->peer_lost(b.self);
  turn();
  EXPECT_EQ(finished(write(bytes)), Code::unreachable);
  softverbs::set_port(0, true);
  softverbs::set_port(1, true);
  OpId last = write(bytes);
  EXPECT_TRUE(until([&] {
    if (!a.is_done(last)) return false;
    if (a.code_of(last) == Code::ok) return true;
    last = write(bytes);
    return false;
  }));
}

TEST_F(VerbsFabricTest, rail_on_which_nothing_arrives_is_left_out_by_the_next_connection) {
  start_both(two_rails);
  connect();
  softverbs::set_path(1, false);
  const Bytes bytes(1000, std::byte{2});
  EXPECT_EQ(finished(write(bytes)), Code::unreachable) << "it went there";
  for (int i = 0; i < 5; ++i) EXPECT_EQ(finished(write(bytes)), Code::ok) << i;
  EXPECT_EQ(a.fabric->counters().dials, 2u);
}

// The other side's second port is down, which is not known here: without the first there is nothing to join.
TEST_F(VerbsFabricTest, rail_that_rests_is_offered_again_when_the_other_side_has_none_but_that) {
  start_both([](VerbsFabricOptions& options) {
    options.rails.push_back({options.self.instance == "di-kvd.b" ? "softverbs1" : "softverbs0", 1, 0});
  });
  softverbs::set_port(1, false);
  turn();
  connect();
  const Bytes bytes(1000, std::byte{2});
  softverbs::fail_nth(1, retry_exceeded);
  EXPECT_EQ(finished(write(bytes)), Code::unreachable) << "its queue pair broke";
  EXPECT_EQ(finished(write(bytes)), Code::unreachable) << "offered was the other alone";
  OpId last = write(bytes);
  EXPECT_TRUE(until([&] {
    if (!a.is_done(last)) return false;
    if (a.code_of(last) == Code::ok) return true;
    last = write(bytes);
    return false;
  }));
  EXPECT_EQ(a.fabric->counters().dials, 3u);
}

TEST_F(VerbsFabricTest, dials_of_a_port_that_is_closed_are_told_once) {
  start_both();
  DataListener closed = *data_listen("127.0.0.1:0");
  closed.fd.reset();
  const std::string real = std::exchange(endpoints[b.self], closed.endpoint);
  const Bytes bytes(1000, std::byte{2});
  testing::internal::CaptureStderr();
  const OpId op = write(bytes);
  const bool failed = until([&] { return a.is_done(op) && a.fabric->counters().dials_failed >= 3; });
  const std::string said = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(failed);
  const std::size_t told = said.find("dial failed");
  ASSERT_NE(told, std::string::npos) << said;
  EXPECT_NE(said.find("refused"), std::string::npos) << said;
  EXPECT_EQ(said.find("dial failed", told + 1), std::string::npos) << said;
  endpoints[b.self] = real;
  EXPECT_TRUE(until([&] { return finished(write(bytes)) == Code::ok; }));
}

TEST_F(VerbsFabricTest, address_that_has_become_another_is_told_by_the_next_connection) {
  start_both();
  connect();
  softverbs::set_gid(0, 77);
  softverbs::fail_nth(1, retry_exceeded);
  const Bytes bytes(1000, std::byte{2});
  EXPECT_EQ(finished(write(bytes)), Code::unreachable);
  EXPECT_EQ(finished(write(bytes)), Code::ok);
}

TEST_F(VerbsFabricTest, peer_that_does_not_answer_leaves_memory_to_copy_for_others) {
  const auto small = [](VerbsFabricOptions& options) {
    options.bounce_bytes = 4ull * options.max_unit_bytes;
  };
  start_both(small);
  VerbsFabricOptions of_c = options_of(c, "di-kvd.c");
  small(of_c);
  start(c, of_c);
  ASSERT_TRUE(c.fabric->expose(a.self, 1, Access::write, {{0, 1}}).ok());
  connect();
  const Bytes bytes(512 << 10, std::byte{2});
  const OpId first = write(ByteView(bytes).first(64 << 10));
  ask_only();
  softverbs::hold_nth(1);  // its data, and so all that follows
  const OpId silent = write(bytes);
  come_to_rest();
  const auto third = a.fabric->write(c.self, 1, {{0, 1}, 0, bytes.size()}, bytes, Class::handover);
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(finished(*third), Code::ok);
  EXPECT_FALSE(a.is_done(first) || a.is_done(silent)) << "it had to wait until they were given up";
  softverbs::let_go();
  EXPECT_EQ(finished(first), Code::ok);
  EXPECT_EQ(finished(silent), Code::ok);
}

TEST_F(VerbsFabricTest, silent_connections_keep_nobody_out) {
  start_both([](VerbsFabricOptions& options) { options.greetings_max = 4; });
  std::vector<Fd> silent;
  for (int i = 0; i < 10; ++i) silent.push_back(*data_connect(endpoints.at(b.self)));
  ASSERT_TRUE(until_without_device([&] { return b.fabric->counters().refused_connections == 6; }));
  EXPECT_EQ(finished(write(Bytes(8, std::byte{1}))), Code::ok);
}

TEST_F(VerbsFabricTest, peers_that_all_connect_at_once_are_all_greeted) {
  constexpr std::size_t greetings_max = 4;
  start_both([](VerbsFabricOptions& options) { options.greetings_max = greetings_max; });
  const auto rail = *VerbsRail::open({"softverbs0", 1, 0});
  const auto qp = *VerbsQueuePair::make(*rail, {1, 1, 1, true});
  VerbsSetup setup;
  setup.rails = 1;
  setup.lanes = {{0, qp->address()}};
  std::vector<Fd> peers;
  for (std::size_t i = 0; i < 2 * greetings_max; ++i) {
    setup.peer = {"di-kvd.peer" + std::to_string(i), 1};
    Bytes said = verbs_setup_encode(setup);
    Frame hello = frame_hello(b.fabric->grant(setup.peer, false)->secret, false);
    hello.bytes = static_cast<std::uint32_t>(said.size());
    const FrameHeader header = frame_encode(hello);
    said.insert(said.begin(), header.begin(), header.end());
    peers.push_back(*data_connect(endpoints.at(b.self)));
    ASSERT_TRUE(sent(peers.back(), said));
  }
  const auto welcomed = [](const Fd& fd) {
    FrameHeader header;
    if (::recv(fd.get(), header.data(), header.size(), MSG_PEEK | MSG_DONTWAIT) < 64) return false;
    return frame_decode(header)->kind == FrameKind::welcome;
  };
  EXPECT_TRUE(until_without_device([&] {
    return b.fabric->counters().refused_connections > 0 || std::all_of(peers.begin(), peers.end(), welcomed);
  }));
  EXPECT_EQ(b.fabric->counters().refused_connections, 0u);
  EXPECT_EQ(b.fabric->gauges().connections, 2 * greetings_max);
}

TEST_F(VerbsFabricTest, operation_that_is_not_done_in_time_ends_as_timeout) {
  start_both([](VerbsFabricOptions& options) {
    options.op_wait = milliseconds(1000);
    options.cancel_wait = milliseconds(50);
  });
  connect();
  const Bytes bytes(64 << 10, std::byte{2});
  const OpId op = write(bytes);
  ask_only();
  ASSERT_TRUE(until_without_device([&] { return a.is_done(op); }));
  EXPECT_EQ(a.code_of(op), Code::timeout);
}

TEST_F(VerbsFabricTest, registered_memory_of_the_asker_goes_without_a_copy) {
  start_both([](VerbsFabricOptions& options) { options.bounce_bytes = options.max_unit_bytes; });
  connect();
  // One unit would have to wait for another if they were copied: a window of four is asked for at once.
  const MutableByteView own = a.region.slot(3).first(256 << 10);
  std::fill(own.begin(), own.end(), std::byte{4});
  const OpId op = write(own);
  turn();
  const std::uint64_t before = softverbs::counts().begun;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(softverbs::step());
  EXPECT_EQ(softverbs::counts().begun, before + 4);
  EXPECT_EQ(finished(op), Code::ok);
  EXPECT_TRUE(std::equal(own.begin(), own.end(), b.region.slot(0).begin()));
  const auto read = a.fabric->read(b.self, 2, {{1, 1}, 0, own.size()}, own, Class::fetch);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(finished(*read), Code::ok);
  EXPECT_EQ(own[0], std::byte{0});
}

TEST_F(VerbsFabricTest, memory_that_is_not_registered_waits_for_room_to_copy) {
  start_both([](VerbsFabricOptions& options) { options.bounce_bytes = options.max_unit_bytes; });
  const Bytes bytes(1 << 20, std::byte{5});
  EXPECT_EQ(finished(write(bytes)), Code::ok);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), b.region.slot(0).begin()));
}

TEST_F(VerbsFabricTest, slot_that_is_not_registered_is_not_reached) {
  start_both([&](VerbsFabricOptions& options) {
    if (options.self.instance == "di-kvd.b") options.memory.clear();
  });
  EXPECT_EQ(finished(write(Bytes(8, std::byte{1}))), Code::io);
}

// As memory of a GPU would be: by a descriptor and an offset in it.
TEST_F(VerbsFabricTest, memory_behind_a_descriptor_is_registered_by_it) {
  constexpr std::uint64_t from = TestRegion::index_bytes;
  start_both([&](VerbsFabricOptions& options) {
    if (options.self.instance != "di-kvd.b") return;
    options.memory = {{{b.region.base + from, TestRegion::file_bytes - from}, b.region.fd.get(), from}};
  });
  const Bytes bytes(1 << 20, std::byte{5});
  EXPECT_EQ(finished(write(bytes)), Code::ok);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), b.region.slot(0).begin()));
  VerbsFabricOptions beyond = options_of(c, "di-kvd.c");
  beyond.memory[0].dmabuf = c.region.fd.get();
  beyond.memory[0].dmabuf_offset = 1;
  EXPECT_FALSE(make_verbs_fabric(loop, beyond).ok()) << "beyond its end";
}

TEST_F(VerbsFabricTest, what_is_sealed_is_refused_by_both_sides) {
  start_both();
  EXPECT_EQ(b.fabric->grant(a.self, true).error().code, Code::unsupported);
  Ticket sealed;
  sealed.seal = true;
  a.fabric->set_events({[&](const Peer& peer) { a.fabric->ticket(peer, "tcp://127.0.0.1:1", sealed); },
                        [&](OpId op, Code code) { a.done[op].push_back(code); },
                        {}});
  EXPECT_EQ(finished(write(Bytes(8, std::byte{1}))), Code::unreachable);
  EXPECT_EQ(a.fabric->counters().dials_failed, 1u);
}

TEST_F(VerbsFabricTest, fewer_rails_on_one_side_are_all_that_is_used) {
  start_both([](VerbsFabricOptions& options) {
    if (options.self.instance == "di-kvd.a") options.rails.push_back({"softverbs1", 1, 0});
  });
  const Bytes bytes(1 << 20, std::byte{5});
  EXPECT_EQ(finished(write(bytes)), Code::ok);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), b.region.slot(0).begin()));
}

TEST_F(VerbsFabricTest, rails_that_are_not_there_are_named) {
  VerbsFabricOptions options = options_of(a, "di-kvd.a");
  options.rails = {{"mlx5_0", 1, 0}};
  const auto none = make_verbs_fabric(loop, options);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code, Code::not_found);
  EXPECT_EQ(none.error().message, "verbs: no device mlx5_0; there are: softverbs0 softverbs1");
  options.rails = {{"softverbs0", 2, 0}};
  EXPECT_EQ(make_verbs_fabric(loop, options).error().code, Code::not_found);
  options.rails = {{"softverbs0", 1, 5}};
  EXPECT_EQ(make_verbs_fabric(loop, options).error().code, Code::not_found);
  softverbs::set_port(0, false);
  options.rails = {{"softverbs0", 1, 0}};
  EXPECT_EQ(make_verbs_fabric(loop, options).error().code, Code::io);
  options.rails = {{"", 1, 0}};
  EXPECT_TRUE(make_verbs_fabric(loop, options).ok()) << "the one whose port is up";
  softverbs::set_port(0, true);
  options.rails.clear();
  EXPECT_EQ(make_verbs_fabric(loop, options).error().code, Code::invalid);
}

}  // namespace
}  // namespace di::transfer
