#include "transfer/tcp.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstring>

#include "base/rng.h"
#include "tests/unit/transfer/proxy.h"
#include "tests/unit/transfer/world.h"
#include "transfer/frame.h"

namespace di::transfer {
namespace {

const Peer here{"di-kvd.host0", 1};
const Peer there{"di-kvd.host1", 1};

// One fabric that listens, and whatever connects to it.
struct TcpTest : testing::Test {
  TcpTest() { start({}); }

  void start(TcpOptions options) {
    fabric.reset();
    options.self = here;
    options.listen = "127.0.0.1:0";
    options.region = &region;
    auto made = make_tcp_fabric(loop, options);
    ASSERT_TRUE(made.ok());
    fabric = *std::move(made);
    fabric->set_events({[this](const Peer& peer) { wanted.push_back(peer); },
                        [this](OpId op, Code code) { done[op] = code; }, [](const Peer&, TransferId) {}});
  }
  bool until(const std::function<bool()>& met) { return loop.run_until(met, seconds(20)); }

  Fd connect() {
    const Address address = *address_parse(fabric->endpoint());
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), address.get(), address.length), 0);
    return fd;
  }
  static void say(const Fd& fd, ByteView bytes) {
    // The other side may have hung up by now.
    [[maybe_unused]] const ssize_t n =
        ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  bool closed(const Fd& fd) {
    return until([&] {
      std::array<std::byte, 4096> bytes;
      const ssize_t n = ::recv(fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      return n == 0 || (n < 0 && errno != EAGAIN);
    });
  }
  // A header that `fd` answers with.
  Result<Frame> answer(const Fd& fd) {
    FrameHeader header;
    std::size_t have = 0;
    until([&] {
      const ssize_t n = ::recv(fd.get(), header.data() + have, header.size() - have, MSG_DONTWAIT);
      if (n > 0) have += static_cast<std::size_t>(n);
      return have == header.size() || n == 0 || (n < 0 && errno != EAGAIN);
    });
    if (have < header.size()) return Error{Code::unreachable, 0, "no answer"};
    return frame_decode(header);
  }
  static Bytes bytes_of(const Frame& frame, ByteView payload) {
    const FrameHeader header = frame_encode(frame);
    Bytes bytes(header.begin(), header.end());
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    return bytes;
  }
  static Bytes hello_of(const Ticket& ticket, const Peer& self) {
    const Bytes name = peer_encode(self);
    Frame hello = frame_hello(ticket.secret, false);
    hello.bytes = static_cast<std::uint32_t>(name.size());
    return bytes_of(hello, name);
  }
  // A connection that has shown its ticket.
  Fd greet() {
    Fd fd = connect();
    say(fd, hello_of(*fabric->grant(there, false), there));
    EXPECT_EQ(answer(fd)->kind, FrameKind::welcome);
    Bytes name(peer_encode(here).size());
    EXPECT_TRUE(until([&] { return ::recv(fd.get(), name.data(), name.size(), MSG_DONTWAIT) > 0; }));
    EXPECT_EQ(*peer_decode(name), here);
    return fd;
  }

  loop::Loop loop;
  TestRegion region;
  std::unique_ptr<TcpFabric> fabric;
  std::vector<Peer> wanted;
  std::map<OpId, Code> done;
};

Bytes random_bytes_of(Rng& rng, std::size_t count) {
  Bytes bytes(count);
  for (std::byte& each : bytes) each = static_cast<std::byte>(rng.next());
  return bytes;
}

// F20.
TEST_F(TcpTest, strangers_are_hung_up_on_and_counted) {
  Rng rng(11);
  const Bytes valid = hello_of(Ticket{}, there);
  Frame giant = frame_hello({}, false);
  giant.bytes = frame_payload_bytes_max;
  Frame early;
  early.kind = FrameKind::write;
  early.bytes = 64;
  const std::vector<Bytes> hostile{random_bytes_of(rng, 64),
                                   random_bytes_of(rng, 100000),
                                   bytes_of(giant, {}),
                                   bytes_of(early, Bytes(64)),
                                   Bytes(64),
                                   valid};
  for (const Bytes& bytes : hostile) {
    const Fd fd = connect();
    say(fd, bytes);
    EXPECT_TRUE(closed(fd));
  }
  EXPECT_EQ(fabric->counters().malformed, 5u);
  EXPECT_EQ(fabric->counters().refused_ticket, 1u);
  for (const std::size_t some : {0u, 1u, 63u, 64u, 70u}) {
    Fd fd = connect();
    say(fd, ByteView(valid).first(some));
    fd.reset();
  }
  EXPECT_TRUE(until([&] { return fabric->gauges().connections == 0; }));
}

// F21.
TEST_F(TcpTest, silent_connections_are_few_and_do_not_stay) {
  TcpOptions options;
  options.greetings_max = 4;
  options.ticket_life = milliseconds(300);
  start(options);
  std::vector<Fd> silent;
  for (int i = 0; i < 10; ++i) silent.push_back(connect());
  for (const Fd& fd : silent) EXPECT_TRUE(closed(fd));
  EXPECT_EQ(fabric->counters().refused_connections, 10u);
  EXPECT_EQ(fabric->gauges().connections, 0u);
  // There is room again.
  greet();
}

TEST_F(TcpTest, silent_connections_keep_nobody_out) {
  TcpOptions options;
  options.greetings_max = 4;
  options.ticket_life = seconds(20);
  start(options);
  std::vector<Fd> silent;
  for (int i = 0; i < 10; ++i) silent.push_back(connect());
  ASSERT_TRUE(until([&] { return fabric->counters().refused_connections == 6; }));
  greet();
  // Who has shown a ticket is not among those that go.
  const Fd slow = connect();
  const Bytes hello = hello_of(*fabric->grant(there, false), there);
  say(slow, ByteView(hello).first(hello.size() - 1));
  ASSERT_TRUE(until([&] { return fabric->gauges().tickets == 0; }));
  for (int i = 0; i < 10; ++i) silent.push_back(connect());
  ASSERT_TRUE(until([&] { return fabric->counters().refused_connections >= 15; }));
  say(slow, ByteView(hello).last(1));
  EXPECT_EQ(answer(slow)->kind, FrameKind::welcome);
}

// Each has said its hello before the next one comes: whoever is met as the oldest has something to show, read or not.
TEST_F(TcpTest, peers_that_all_connect_at_once_are_all_greeted) {
  TcpOptions options;
  options.greetings_max = 2;
  start(options);
  std::vector<Fd> peers;
  for (std::size_t i = 0; i < 100; ++i) {
    const Peer peer{"di-kvd.peer" + std::to_string(i), 1};
    const Ticket ticket = *fabric->grant(peer, false);
    peers.push_back(connect());
    say(peers.back(), hello_of(ticket, peer));
  }
  for (const Fd& fd : peers) {
    const Result<Frame> welcome = answer(fd);
    ASSERT_TRUE(welcome.ok()) << "hung up on";
    EXPECT_EQ(welcome->kind, FrameKind::welcome);
  }
  EXPECT_EQ(fabric->counters().refused_connections, 0u);
}

// Requests that are refused as fast as they come, and their answers are taken: there is always more to read.
TEST_F(TcpTest, peer_that_asks_without_end_leaves_others_their_turn) {
  const Fd fd = greet();
  Frame frame;
  frame.kind = FrameKind::read;
  frame.transfer = 9;
  frame.slot = {0, 1};
  frame.bytes = 1;
  Bytes requests;
  for (int i = 0; i < 4096; ++i) {
    const Bytes one = bytes_of(frame, {});
    requests.insert(requests.end(), one.begin(), one.end());
  }
  std::size_t sent = 0;
  Bytes answers(1 << 20);
  const auto ask = [&] {
    for (int i = 0; i < 16; ++i) {
      const ssize_t n =
          ::send(fd.get(), requests.data() + sent, requests.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) sent = (sent + static_cast<std::size_t>(n)) % requests.size();
      [[maybe_unused]] const ssize_t taken = ::recv(fd.get(), answers.data(), answers.size(), MSG_DONTWAIT);
    }
  };
  const auto until_asking = [&](const std::function<bool()>& met) {
    const Instant end = loop.monotonic_now() + seconds(20);
    while (!met()) {
      if (loop.monotonic_now() > end) return false;
      ask();
      loop.run_ready();
    }
    return true;
  };
  ASSERT_TRUE(until_asking([&] { return fabric->counters().refused_transfer > 10000; }));
  const Peer third{"di-kvd.host2", 1};
  TcpOptions options;
  options.self = third;
  auto other = *make_tcp_fabric(loop, options);
  std::optional<Code> code;
  other->set_events(
      {[&](const Peer& peer) { other->ticket(peer, fabric->endpoint(), *fabric->grant(third, false)); },
       [&](OpId, Code told) { code = told; },
       {}});
  ASSERT_TRUE(fabric->expose(third, 1, Access::write, {{0, 1}}).ok());
  const Bytes bytes(64, std::byte{1});
  ASSERT_TRUE(other->write(here, 1, {{0, 1}, 0, bytes.size()}, bytes, Class::handover).ok());
  EXPECT_TRUE(until_asking([&] { return code.has_value(); }));
  EXPECT_EQ(code, Code::ok);
}

TEST_F(TcpTest, ticket_for_sealed_frames_opens_no_connection_in_clear) {
  const Fd fd = connect();
  say(fd, hello_of(*fabric->grant(there, true), there));
  EXPECT_TRUE(closed(fd));
  EXPECT_EQ(fabric->counters().refused_ticket, 1u);
  EXPECT_EQ(fabric->gauges().tickets, 0u);
}

// Whoever sees a sealed hello on the wire has the ticket and not the key.
TEST_F(TcpTest, sealed_hello_without_the_key_is_refused) {
  const Ticket ticket = *fabric->grant(there, true);
  const Fd fd = connect();
  Frame hello = frame_hello(ticket.secret, true);
  const Bytes name = peer_encode(there);
  hello.bytes = static_cast<std::uint32_t>(name.size());
  say(fd, bytes_of(hello, Bytes(16 + name.size() + 16)));
  EXPECT_TRUE(closed(fd));
  EXPECT_EQ(fabric->counters().refused_seal, 1u);
}

TEST_F(TcpTest, refused_frames_are_drained_whatever_their_length) {
  ASSERT_TRUE(fabric->expose(there, 1, Access::write, {{0, 1}}).ok());
  const Fd fd = greet();
  Frame frame;
  frame.kind = FrameKind::write;
  frame.transfer = 9;
  frame.slot = {0, 1};
  frame.bytes = frame_payload_bytes_max;
  say(fd, bytes_of(frame, {}));
  const Bytes chunk(1 << 20);
  for (std::size_t left = frame.bytes; left > 0;) {
    const ssize_t n = ::send(fd.get(), chunk.data(), std::min(left, chunk.size()), MSG_NOSIGNAL);
    ASSERT_GT(n, 0);
    left -= static_cast<std::size_t>(n);
  }
  EXPECT_EQ(answer(fd)->code, Code::not_found);
  frame.transfer = 1;
  frame.bytes = 5;
  frame.number = 2;
  say(fd, bytes_of(frame, as_bytes("hello")));
  const auto wrote = answer(fd);
  ASSERT_TRUE(wrote.ok());
  EXPECT_EQ(wrote->kind, FrameKind::wrote);
  EXPECT_EQ(wrote->number, 2u);
  EXPECT_EQ(wrote->code, Code::ok);
  EXPECT_EQ(as_text(region.slot(0).first(5)), "hello");
}

// A peer that asks and never takes its answers costs a bounded number of them, and nobody else anything.
TEST_F(TcpTest, peer_that_takes_no_answers_is_not_read_any_further) {
  ASSERT_TRUE(fabric->expose(there, 1, Access::read, {{0, 1}}).ok());
  const Fd fd = greet();
  Frame frame;
  frame.kind = FrameKind::read;
  frame.transfer = 1;
  frame.slot = {0, 1};
  frame.bytes = test_slot_bytes;
  const Bytes request = bytes_of(frame, {});
  std::size_t sent = 0;
  std::uint64_t served = 0;
  // Until the socket is full for a good while: the owner has stopped.
  ASSERT_TRUE(until([&] {
    while (::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0) ++sent;
    return std::exchange(served, fabric->counters().served_bytes) == served && served > 0 &&
           errno == EAGAIN && served / frame.bytes >= 256;
  }));
  EXPECT_LT(served / frame.bytes, 300u);
  EXPECT_GT(sent, 1000u);
}

// Streams that begin well and are damaged somewhere: whatever comes, only the slot that is open changes.
TEST_F(TcpTest, damaged_streams_harm_nothing) {
  const std::uint64_t seed = 4711;
  RecordProperty("seed", std::to_string(seed));
  Rng rng(seed);
  ASSERT_TRUE(fabric->expose(there, 1, Access::write, {{2, 1}}).ok());
  ASSERT_TRUE(fabric->expose(there, 2, Access::read, {{2, 1}}).ok());
  for (int round = 0; round < 300; ++round) {
    Bytes stream = hello_of(*fabric->grant(there, false), there);
    const std::size_t greeting = stream.size();
    for (std::uint64_t number = 1; number < 6; ++number) {
      Frame frame;
      frame.kind = rng.chance(0.5) ? FrameKind::write : FrameKind::read;
      frame.transfer = frame.kind == FrameKind::write ? 1 : 2;
      frame.number = number;
      frame.slot = {static_cast<std::uint32_t>(rng.below(4)), 1};
      frame.offset = rng.chance(0.2) ? rng.next() : rng.below(1000);
      frame.bytes = static_cast<std::uint32_t>(1 + rng.below(2000));
      const Bytes one =
          bytes_of(frame, frame.kind == FrameKind::write ? random_bytes_of(rng, frame.bytes) : Bytes{});
      stream.insert(stream.end(), one.begin(), one.end());
    }
    const std::size_t from = rng.chance(0.2) ? 0 : greeting;
    for (std::uint64_t hits = rng.below(4); hits > 0; --hits) {
      stream[from + rng.below(stream.size() - from)] ^= static_cast<std::byte>(1u << rng.below(8));
    }
    stream.erase(stream.end() - static_cast<std::ptrdiff_t>(rng.below(100)), stream.end());
    Fd fd = connect();
    say(fd, stream);
    ::shutdown(fd.get(), SHUT_WR);
    ASSERT_TRUE(closed(fd));
  }
  EXPECT_TRUE(until([&] { return fabric->gauges().connections == 0; }));
  for (const std::uint32_t slot : {0u, 1u, 3u, 4u}) {
    EXPECT_EQ(region.slot(slot)[0], std::byte{0});
    EXPECT_EQ(std::memcmp(region.slot(slot).data(), region.slot(slot).data() + 1, test_slot_bytes - 1), 0);
  }
  EXPECT_GT(fabric->counters().malformed, 0u);
  EXPECT_GT(fabric->counters().refused_bounds, 0u);
  EXPECT_GT(fabric->counters().received_bytes, 0u);
}

// The side that dials believes as little.
TEST_F(TcpTest, acceptor_that_talks_nonsense_is_a_failed_dial) {
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  Address any = *address_parse("127.0.0.1:0");
  ASSERT_EQ(::bind(listener.get(), any.get(), any.length), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  any.length = sizeof any.storage;
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&any.storage), &any.length), 0);
  Bytes bytes(64);
  const auto op = fabric->write(there, 1, {{0, 1}, 0, 64}, bytes, Class::fetch);
  ASSERT_TRUE(until([&] { return !wanted.empty(); }));
  fabric->ticket(there, "tcp://" + address_print(any), Ticket{});
  Fd fd;
  ASSERT_TRUE(until([&] {
    fd = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    return fd.valid();
  }));
  say(fd, Bytes(200, std::byte{'x'}));
  ASSERT_TRUE(until([&] { return done.contains(*op); }));
  EXPECT_EQ(done[*op], Code::unreachable);
  EXPECT_EQ(fabric->counters().malformed, 1u);
  EXPECT_EQ(fabric->counters().dials_failed, 1u);
}

// As behind a firewall, or a process that is stopped: the connection is there, and no greeting comes.
TEST_F(TcpTest, dials_that_nobody_answers_are_told_once) {
  TcpOptions options;
  options.dial_wait = milliseconds(50);
  options.dial_pause_min = milliseconds(1);
  start(options);
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Address any = *address_parse("127.0.0.1:0");
  ASSERT_EQ(::bind(listener.get(), any.get(), any.length), 0);
  ASSERT_EQ(::listen(listener.get(), 16), 0);
  any.length = sizeof any.storage;
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&any.storage), &any.length), 0);
  fabric->set_events(
      {[&](const Peer& peer) { fabric->ticket(peer, "tcp://" + address_print(any), Ticket{}); },
       [this](OpId op, Code code) { done[op] = code; },
       {}});
  const Bytes bytes(64);
  testing::internal::CaptureStderr();
  const auto op = fabric->write(there, 1, {{0, 1}, 0, 64}, bytes, Class::handover);
  const bool failed = until([&] { return done.contains(*op) && fabric->counters().dials_failed >= 3; });
  fabric.reset();
  const std::string said = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(failed);
  const std::size_t told = said.find("dial failed");
  ASSERT_NE(told, std::string::npos) << said;
  EXPECT_NE(said.find("no greeting came in time"), std::string::npos) << said;
  EXPECT_EQ(said.find("dial failed", told + 1), std::string::npos) << said;
}

// E05: a process that was started anew behind the same address is not the one that was meant.
TEST_F(TcpTest, another_process_behind_the_address_is_a_failed_dial) {
  TestRegion memory;
  TcpOptions options;
  options.self = {there.instance, 2};
  options.listen = "127.0.0.1:0";
  options.region = &memory;
  auto other = *make_tcp_fabric(loop, options);
  ASSERT_TRUE(other->expose(here, 1, Access::write, {{0, 1}}).ok());
  Bytes bytes(64, std::byte{1});
  const auto op = fabric->write(there, 1, {{0, 1}, 0, 64}, bytes, Class::fetch);
  ASSERT_TRUE(until([&] { return !wanted.empty(); }));
  fabric->ticket(there, other->endpoint(), *other->grant(here, false));
  ASSERT_TRUE(until([&] { return done.contains(*op); }));
  EXPECT_EQ(done[*op], Code::unreachable);
  EXPECT_EQ(memory.slot(0)[0], std::byte{0});
}

TEST_F(TcpTest, address_that_is_none_and_a_port_that_is_taken_are_errors) {
  TcpOptions options;
  options.listen = "nonsense";
  EXPECT_EQ(make_tcp_fabric(loop, options).error().code, Code::invalid);
  options.listen = fabric->endpoint();
  EXPECT_EQ(make_tcp_fabric(loop, options).error().code, Code::io);
  Bytes bytes(64);
  const auto op = fabric->write(there, 1, {{0, 1}, 0, 64}, bytes, Class::fetch);
  ASSERT_TRUE(until([&] { return !wanted.empty(); }));
  fabric->ticket(there, "tcp://no-number.example:1", Ticket{});
  ASSERT_TRUE(until([&] { return done.contains(*op); }));
  EXPECT_EQ(done[*op], Code::unreachable);
}

TEST_F(TcpTest, destroyed_in_the_middle_it_leaves_memory_alone) {
  TestRegion memory;
  TcpOptions options;
  options.self = there;
  options.listen = "127.0.0.1:0";
  options.region = &memory;
  auto other = *make_tcp_fabric(loop, options);
  ASSERT_TRUE(other->expose(here, 1, Access::write, {{0, 1}}).ok());
  {
    Bytes bytes(test_slot_bytes, std::byte{1});
    for (int i = 0; i < 8; ++i) {
      ASSERT_TRUE(fabric->write(there, 1, {{0, 1}, 0, bytes.size()}, bytes, Class::fetch).ok());
    }
    ASSERT_TRUE(until([&] { return !wanted.empty(); }));
    fabric->ticket(there, other->endpoint(), *other->grant(here, false));
    ASSERT_TRUE(until([&] { return other->counters().received_bytes > 0; }));
    fabric.reset();
  }
  EXPECT_TRUE(until([&] { return other->gauges().connections == 0; }));
}

// The one that listens, another one that it writes to, and something in between.
struct LinkTest : TcpTest {
  void join(const TcpOptions& options) {
    start(options);
    TcpOptions theirs;
    theirs.self = there;
    theirs.listen = "127.0.0.1:0";
    theirs.region = &memory;
    other = *make_tcp_fabric(loop, theirs);
    proxy = std::make_unique<Proxy>(other->endpoint());
    ASSERT_TRUE(other->expose(here, 1, Access::write, {{0, 1}}).ok());
    fabric->set_events(
        {[this](const Peer& peer) { fabric->ticket(peer, proxy->endpoint(), *other->grant(here, false)); },
         [this](OpId op, Code code) { done[op] = code; },
         {}});
  }
  Code write(ByteView bytes) {
    const auto op = fabric->write(there, 1, {{0, 1}, 0, bytes.size()}, bytes, Class::handover);
    EXPECT_TRUE(op.ok() && until([&] { return done.contains(*op); }));
    return done[*op];
  }

  TestRegion memory;
  std::unique_ptr<TcpFabric> other;
  std::unique_ptr<Proxy> proxy;
};

TEST_F(LinkTest, connection_on_which_nothing_moves_is_given_up) {
  TcpOptions options;
  options.stall_max = milliseconds(200);
  join(options);
  const Bytes bytes(test_slot_bytes, std::byte{1});
  ASSERT_EQ(write(bytes), Code::ok);
  proxy->hole = true;
  EXPECT_EQ(write(bytes), Code::unreachable);
  proxy->hole = false;
  EXPECT_TRUE(until([&] { return write(bytes) == Code::ok; }));
}

TEST_F(LinkTest, rate_is_forgotten_with_the_connection_that_stalled) {
  TcpOptions options;
  options.stall_max = milliseconds(200);
  join(options);
  const Bytes bytes(test_slot_bytes, std::byte{1});
  for (int i = 0; i < 1000 && fabric->link(there).bytes_per_s == 0; ++i) ASSERT_EQ(write(bytes), Code::ok);
  ASSERT_GT(fabric->link(there).bytes_per_s, 0);
  proxy->hole = true;
  EXPECT_EQ(write(bytes), Code::unreachable);
  EXPECT_EQ(fabric->link(there).bytes_per_s, 0) << "a guess is better than a stall";
}

TEST_F(LinkTest, operation_that_takes_too_long_ends_as_timeout) {
  TcpOptions options;
  options.op_wait = milliseconds(200);
  join(options);
  ASSERT_EQ(write(Bytes(64)), Code::ok);
  proxy->hole = true;
  const auto bytes = std::make_unique<Bytes>(test_slot_bytes, std::byte{1});
  EXPECT_EQ(write(*bytes), Code::timeout);
  EXPECT_EQ(fabric->gauges().ops, 0u);
}

TEST_F(LinkTest, total_rate_is_kept_and_the_rate_of_the_link_is_known) {
  TcpOptions options;
  options.budget.bytes_per_s = 40 << 20;
  options.budget.burst_bytes = 1 << 20;
  join(options);
  const Bytes bytes(test_slot_bytes, std::byte{1});
  EXPECT_EQ(fabric->link(there).bytes_per_s, 0);
  const Instant start = loop.monotonic_now();
  for (int i = 0; i < 3; ++i) ASSERT_EQ(write(bytes), Code::ok);
  // 12 MiB, of which one is the burst and one may be owed at the end.
  EXPECT_GE(loop.monotonic_now() - start, milliseconds(240));
  EXPECT_GT(fabric->link(there).bytes_per_s, 0);
}

// Two fabrics with something in between that damages what passes.
struct DamageTest : testing::TestWithParam<bool> {
  DamageTest() : world(make_tcp_world(GetParam())), a(world->add_node()), b(world->add_node()) {}

  std::unique_ptr<World> world;
  Node& a;
  Node& b;
};

// A bit anywhere in a sealed stream, both ways, or a cut: what was under way fails, everything later works.
TEST_P(DamageTest, connection_that_ends_takes_along_what_was_under_way_and_no_more) {
  const std::uint64_t seed = 99;
  RecordProperty("seed", std::to_string(seed));
  Rng rng(seed);
  std::unique_ptr<Proxy> proxy;
  std::string endpoint;
  ASSERT_TRUE(b.fabric->expose(a.self, 1, Access::write, {{0, 1}}).ok());
  ASSERT_TRUE(b.fabric->expose(a.self, 2, Access::read, {{0, 1}}).ok());
  proxy = std::make_unique<Proxy>(static_cast<TcpFabric&>(*b.fabric).endpoint());
  a.on_want_ticket = [&](const Peer& peer) {
    a.fabric->ticket(peer, proxy->endpoint(), *b.fabric->grant(a.self, GetParam()));
  };
  Bytes from(300000);
  for (std::byte& each : from) each = static_cast<std::byte>(rng.next());
  Bytes into(from.size());
  int failed = 0;
  for (int round = 0; round < 40; ++round) {
    // A cut or, sealed, a bit; in the greeting, the header or the payload, to or fro.
    const std::uint64_t where = rng.chance(0.5) ? rng.below(400) : rng.below(600000);
    if (!GetParam() || rng.chance(0.2)) {
      proxy->cut_to = where;
    } else if (rng.chance(0.5)) {
      proxy->flip_to = where;
    } else {
      proxy->flip_back = where;
    }
    const auto write = a.fabric->write(b.self, 1, {{0, 1}, 0, from.size()}, from, Class::handover);
    const auto read = a.fabric->read(b.self, 2, {{0, 1}, 0, into.size()}, into, Class::fetch);
    ASSERT_TRUE(write.ok() && read.ok());
    ASSERT_TRUE(world->until([&] { return a.is_done(*write) && a.is_done(*read); }));
    for (const OpId op : {*write, *read}) {
      const Code code = a.code_of(op);
      ASSERT_TRUE(code == Code::ok || code == Code::unreachable) << code_name(code);
      if (code != Code::ok) ++failed;
    }
    proxy->cut_to = proxy->flip_to = proxy->flip_back = Proxy::none;
    // Back to where a dial succeeds, and then all is well.
    Code code = Code::unreachable;
    while (code != Code::ok) {
      const auto op = a.fabric->write(b.self, 1, {{0, 1}, 0, from.size()}, from, Class::handover);
      ASSERT_TRUE(op.ok() && world->until([&] { return a.is_done(*op); }));
      code = a.code_of(*op);
    }
    ASSERT_EQ(std::memcmp(b.region.slot(0).data(), from.data(), from.size()), 0);
    // A new connection, and a new count of its bytes.
    proxy = std::make_unique<Proxy>(static_cast<TcpFabric&>(*b.fabric).endpoint());
  }
  EXPECT_GT(failed, 20);
  if (GetParam()) {
    EXPECT_GT(b.fabric->counters().refused_seal + b.fabric->counters().refused_ticket, 5u);
    EXPECT_GT(a.fabric->counters().refused_seal, 5u);
  }
  EXPECT_TRUE(world->until([&] { return a.fabric->gauges().ops == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Seals, DamageTest, testing::Values(false, true),
                         [](const auto& each) { return each.param ? "sealed" : "clear"; });

}  // namespace
}  // namespace di::transfer
