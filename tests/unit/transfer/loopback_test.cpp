#include "transfer/loopback.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "tests/unit/transfer/world.h"

namespace di::transfer {
namespace {

// What happened, in order, with the time: two runs of one seed must give the same.
struct Outcome {
  std::vector<std::string> events;
  FabricCounters counters;
  std::size_t wrong_bytes = 0;
  std::size_t ops_left = 0;
};

Outcome run(const LoopbackOptions& options, bool sealed, bool cut_back = false) {
  LoopbackNet net(options);
  Rng rng(options.seed);
  const Peer a{"a", 1};
  const Peer b{"b", 1};
  TestRegion memory_a;
  TestRegion memory_b;
  auto at_a = net.attach(a, &memory_a);
  auto at_b = net.attach(b, &memory_b);
  Outcome result;
  struct Started {
    std::uint64_t offset;
    std::size_t bytes;
  };
  std::map<OpId, Started> started;
  Bytes from(1 << 20);
  for (std::byte& each : from) each = static_cast<std::byte>(rng.next());
  at_a->set_events({[&](const Peer& peer) {
                      const auto ticket = at_b->grant(a, sealed);
                      if (ticket) {
                        at_a->ticket(peer, "", *ticket);
                      } else {
                        at_a->ticket_refused(peer);
                      }
                    },
                    [&](OpId op, Code code) {
                      result.events.push_back(std::to_string(op) + " " + std::string(code_name(code)) + " " +
                                              std::to_string(net.now().ns));
                      const Started& what = started.at(op);
                      if (code == Code::ok &&
                          !std::equal(from.begin() + static_cast<std::ptrdiff_t>(what.offset),
                                      from.begin() + static_cast<std::ptrdiff_t>(what.offset + what.bytes),
                                      memory_b.slot(0).begin() + static_cast<std::ptrdiff_t>(what.offset))) {
                        ++result.wrong_bytes;
                      }
                    },
                    {}});
  EXPECT_TRUE(at_b->expose(a, 1, Access::write, {{0, 1}}).ok());
  for (int i = 0; i < 200; ++i) {
    if (i == 100 && cut_back) net.cut(b, a);
    const std::uint64_t offset = rng.below(from.size() - 70000);
    const std::size_t bytes = 1 + rng.below(70000);
    const auto op = at_a->write(b, 1, {{0, 1}, offset, bytes}, ByteView(from).subspan(offset, bytes),
                                static_cast<Class>(rng.below(classes)));
    EXPECT_TRUE(op.ok());
    started[*op] = {offset, bytes};
    net.advance(net.now() + milliseconds(20));
  }
  net.advance(net.now() + seconds(40));
  result.counters = at_a->counters();
  result.counters.refused_seal += at_b->counters().refused_seal;
  result.ops_left = at_a->gauges().ops;
  EXPECT_EQ(result.events.size(), 200u);
  return result;
}

LoopbackOptions with(const LoopbackFaults& faults, std::uint64_t seed) {
  LoopbackOptions options;
  options.seed = seed;
  options.faults = faults;
  options.max_unit_bytes = 16384;
  options.window_bytes = 65536;
  return options;
}

TEST(LoopbackTest, a_seed_is_one_run_and_another_seed_another) {
  LoopbackFaults faults;
  faults.delay_max = milliseconds(5);
  faults.loss = 0.1;
  faults.flip = 0.02;
  faults.reset = 0.01;
  faults.reorder = true;
  const Outcome first = run(with(faults, 1), true);
  EXPECT_EQ(run(with(faults, 1), true).events, first.events);
  EXPECT_NE(run(with(faults, 2), true).events, first.events);
}

// "30 % loss of frames in loopback: no token lost, bounded waits": every operation ends, and well.
TEST(LoopbackTest, a_third_of_the_frames_lost_costs_time_only) {
  LoopbackFaults faults;
  faults.loss = 0.3;
  faults.resend = milliseconds(20);
  faults.resends_max = 30;
  const Outcome result = run(with(faults, 3), false);
  EXPECT_EQ(result.counters.ops_failed, 0u);
  EXPECT_EQ(result.wrong_bytes, 0u);
  EXPECT_EQ(result.ops_left, 0u);
}

TEST(LoopbackTest, flipped_bits_are_refused_when_sealed_and_arrive_otherwise) {
  LoopbackFaults faults;
  faults.flip = 0.05;
  const Outcome sealed = run(with(faults, 4), true);
  EXPECT_GT(sealed.counters.refused_seal, 0u);
  EXPECT_GT(sealed.counters.ops_failed, 0u);
  const Outcome clear = run(with(faults, 4), false);
  EXPECT_EQ(clear.counters.refused_seal, 0u);
  EXPECT_EQ(clear.counters.ops_failed, 0u);
  EXPECT_GT(clear.wrong_bytes, 0u);
}

TEST(LoopbackTest, resets_fail_what_was_under_way_and_no_more) {
  LoopbackFaults faults;
  faults.reset = 0.01;
  const Outcome result = run(with(faults, 5), false);
  EXPECT_GT(result.counters.ops_failed, 0u);
  EXPECT_GT(result.counters.dials, 1u);
  EXPECT_LT(result.counters.ops_failed, 100u);
  EXPECT_EQ(result.wrong_bytes, 0u);
}

// Requests arrive, answers do not: the initiator gives up in bounded time and does not hang.
TEST(LoopbackTest, one_way_cut_ends_operations_in_bounded_time) {
  const Outcome result = run(with({}, 6), false, true);
  EXPECT_GT(result.counters.ops_failed, 50u);
  EXPECT_EQ(result.ops_left, 0u);
}

TEST(LoopbackTest, rate_of_the_path_is_the_rate_of_the_link) {
  LoopbackOptions options;
  options.faults.bytes_per_s = 10 << 20;
  LoopbackNet net(options);
  TestRegion memory_a;
  TestRegion memory_b;
  auto at_a = net.attach({"a", 1}, &memory_a);
  auto at_b = net.attach({"b", 1}, &memory_b);
  std::vector<Code> done;
  at_a->set_events({[&](const Peer& peer) {
                      at_a->ticket(peer, "", *at_b->grant({"a", 1}, false));
                    },
                    [&](OpId, Code code) { done.push_back(code); },
                    {}});
  ASSERT_TRUE(at_b->expose({"a", 1}, 1, Access::write, {{0, 1}}).ok());
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(at_a->write({"b", 1}, 1, {{0, 1}, 0, test_slot_bytes}, memory_a.slot(0), Class::fetch).ok());
  }
  net.advance(net.now() + milliseconds(1900));
  EXPECT_EQ(done.size(), 4u);
  EXPECT_NEAR(at_a->link({"b", 1}).bytes_per_s, 10 << 20, 1 << 20);
  EXPECT_GT(at_a->link({"b", 1}).queued_bytes, 0u);
  net.advance(net.now() + milliseconds(200));
  EXPECT_EQ(done.size(), 5u);
}

TEST(LoopbackTest, killed_process_ends_connections_of_others) {
  LoopbackNet net({});
  TestRegion memory_a;
  TestRegion memory_b;
  auto at_a = net.attach({"a", 1}, &memory_a);
  auto at_b = net.attach({"b", 1}, &memory_b);
  std::vector<Code> done;
  at_a->set_events({[&](const Peer& peer) {
                      if (at_b) at_a->ticket(peer, "", *at_b->grant({"a", 1}, false));
                    },
                    [&](OpId, Code code) { done.push_back(code); },
                    {}});
  ASSERT_TRUE(at_b->expose({"a", 1}, 1, Access::write, {{0, 1}}).ok());
  const auto write = [&] {
    return at_a->write({"b", 1}, 1, {{0, 1}, 0, test_slot_bytes}, memory_a.slot(0), Class::fetch).ok();
  };
  ASSERT_TRUE(write());
  net.advance(net.now() + microseconds(120));
  at_b.reset();
  net.advance(net.now() + milliseconds(1));
  EXPECT_EQ(done, std::vector<Code>{Code::unreachable});
  ASSERT_TRUE(write());
  net.advance(net.now() + dial_wait);
  EXPECT_EQ(done.size(), 2u);
  EXPECT_EQ(at_a->gauges().connections, 0u);
}

}  // namespace
}  // namespace di::transfer
