#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iostream>

#include "base/rng.h"
#include "tests/unit/transfer/world.h"

namespace di::transfer {
namespace {

enum class Kind { shm, tcp, tcp_sealed, loopback, loopback_sealed, verbs, verbs_stepped };

std::string kind_name(const testing::TestParamInfo<Kind>& info) {
  switch (info.param) {
    case Kind::shm:
      return "shm";
    case Kind::tcp:
      return "tcp";
    case Kind::tcp_sealed:
      return "tcp_sealed";
    case Kind::loopback:
      return "loopback";
    case Kind::loopback_sealed:
      return "loopback_sealed";
    case Kind::verbs:
      return "verbs";
    case Kind::verbs_stepped:
      return "verbs_stepped";
  }
  return {};
}

std::unique_ptr<World> make_world(Kind kind) {
  switch (kind) {
    case Kind::shm:
      return make_shm_world();
    case Kind::tcp:
      return make_tcp_world(false);
    case Kind::tcp_sealed:
      return make_tcp_world(true);
    case Kind::loopback:
      return make_loopback_world(false);
    case Kind::loopback_sealed:
      return make_loopback_world(true);
    case Kind::verbs:
      return make_verbs_world({});
    case Kind::verbs_stepped:
      return make_verbs_world(20261130);
  }
  return nullptr;
}

// No byte of it is a marker.
Bytes pattern(std::size_t bytes, std::uint64_t seed) {
  Rng rng(seed);
  Bytes made(align_up(bytes, 8));
  for (std::size_t at = 0; at < made.size(); at += 8) {
    put_le<std::uint64_t>(&made[at], rng.next() & 0x7f7f7f7f7f7f7f7fULL);
  }
  made.resize(bytes);
  return made;
}

constexpr std::byte marker{0xee};

// By libc: the loops of the library take minutes under a sanitizer.
bool equal(ByteView a, ByteView b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}
bool has_marker(ByteView bytes) {
  return std::memchr(bytes.data(), std::to_integer<int>(marker), bytes.size()) != nullptr;
}
bool all_are(ByteView bytes, std::byte value) {
  return bytes[0] == value && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}
void fill(MutableByteView bytes, std::byte value) {
  std::memset(bytes.data(), std::to_integer<int>(value), bytes.size());
}

struct FabricTest : testing::TestWithParam<Kind> {
  FabricTest() : world(make_world(GetParam())), a(world->add_node()), b(world->add_node()) {}

  bool finish(Node& node, OpId op) {
    return world->until([&] { return node.is_done(op); });
  }
  Code write(Node& from, Node& to, TransferId transfer, const Place& place, ByteView bytes) {
    const auto op = from.fabric->write(to.self, transfer, place, bytes, Class::handover);
    if (!op) return op.error().code;
    EXPECT_TRUE(finish(from, *op));
    return from.code_of(*op);
  }
  Code read(Node& from, Node& to, TransferId transfer, const Place& place, MutableByteView bytes) {
    const auto op = from.fabric->read(to.self, transfer, place, bytes, Class::fetch);
    if (!op) return op.error().code;
    EXPECT_TRUE(finish(from, *op));
    return from.code_of(*op);
  }
  void expose(Node& owner, Node& to, TransferId transfer, Access access, std::vector<SlotName> slots) {
    ASSERT_TRUE(owner.fabric->expose(to.self, transfer, access, std::move(slots)).ok());
  }
  void conceal(Node& owner, Node& to, TransferId transfer) {
    const std::size_t before = owner.concealed.size();
    owner.fabric->conceal(to.self, transfer);
    EXPECT_EQ(owner.concealed.size(), before) << "called from inside a call";
    ASSERT_TRUE(world->until([&] { return owner.concealed.size() > before; }));
    EXPECT_EQ(owner.concealed.back(), (std::pair{to.self, transfer}));
  }

  void TearDown() override {
    if (!HasFailure()) return;
    for (const Node* node : {&a, &b}) {
      const FabricCounters c = node->fabric->counters();
      std::cout << node->self.instance << ": ops=" << node->fabric->gauges().ops << " failed=" << c.ops_failed
                << " dials=" << c.dials << " dials_failed=" << c.dials_failed
                << " tickets=" << c.refused_ticket << " transfer=" << c.refused_transfer
                << " late=" << c.refused_late << " stale=" << c.refused_stale
                << " bounds=" << c.refused_bounds << " seal=" << c.refused_seal
                << " malformed=" << c.malformed << " connections=" << c.refused_connections << "\n";
    }
  }

  std::unique_ptr<World> world;
  Node& a;
  Node& b;
};

TEST_P(FabricTest, writes_and_reads_by_slot_offset_and_length) {
  expose(b, a, 7, Access::write, {{2, 1}, {3, 1}});
  expose(b, a, 8, Access::read, {{2, 1}});
  for (const std::size_t bytes : {1u, 15u, 64u, 4096u, 1u << 20, (3u << 20) + 5u}) {
    SCOPED_TRACE(bytes);
    const Bytes sent = pattern(bytes, bytes);
    ASSERT_EQ(write(a, b, 7, {{2, 1}, 100, bytes}, sent), Code::ok);
    EXPECT_TRUE(equal(b.region.slot(2).subspan(100, bytes), sent));
    Bytes got(bytes);
    ASSERT_EQ(read(a, b, 8, {{2, 1}, 100, bytes}, got), Code::ok);
    EXPECT_EQ(got, sent);
  }
  EXPECT_TRUE(all_are(b.region.slot(2).first(100), std::byte{0}));
}

TEST_P(FabricTest, whole_slot_and_its_last_byte_are_in_bounds) {
  expose(b, a, 7, Access::write, {{0, 1}});
  const Bytes sent = pattern(test_slot_bytes, 1);
  EXPECT_EQ(write(a, b, 7, {{0, 1}, 0, test_slot_bytes}, sent), Code::ok);
  EXPECT_TRUE(equal(b.region.slot(0), sent));
  EXPECT_EQ(write(a, b, 7, {{0, 1}, test_slot_bytes - 1, 1}, ByteView(sent).first(1)), Code::ok);
}

TEST_P(FabricTest, sizes_that_differ_and_nothing_at_all_are_invalid_at_once) {
  Bytes bytes(10);
  EXPECT_EQ(a.fabric->write(b.self, 7, {{0, 1}, 0, 9}, bytes, Class::fetch).error().code, Code::invalid);
  EXPECT_EQ(a.fabric->read(b.self, 7, {{0, 1}, 0, 0}, {}, Class::fetch).error().code, Code::invalid);
  EXPECT_EQ(a.fabric->gauges().ops, 0u);
}

TEST_P(FabricTest, both_sides_write_to_each_other) {
  expose(b, a, 1, Access::write, {{0, 1}});
  expose(a, b, 1, Access::write, {{0, 1}});
  const Bytes from_a = pattern(2 << 20, 1);
  const Bytes from_b = pattern(2 << 20, 2);
  const auto one = a.fabric->write(b.self, 1, {{0, 1}, 0, from_a.size()}, from_a, Class::handover);
  const auto two = b.fabric->write(a.self, 1, {{0, 1}, 0, from_b.size()}, from_b, Class::handover);
  ASSERT_TRUE(one.ok() && two.ok());
  ASSERT_TRUE(world->until([&] { return a.is_done(*one) && b.is_done(*two); }));
  EXPECT_TRUE(equal(b.region.slot(0).first(from_a.size()), from_a));
  EXPECT_TRUE(equal(a.region.slot(0).first(from_b.size()), from_b));
}

TEST_P(FabricTest, several_segments_are_in_flight_and_all_arrive) {
  expose(b, a, 7, Access::write, {{0, 1}, {1, 1}});
  expose(b, a, 8, Access::read, {{4, 1}});
  const Bytes sent = pattern(2 * test_slot_bytes, 3);
  const Bytes stored = pattern(test_slot_bytes, 4);
  std::copy(stored.begin(), stored.end(), b.region.slot(4).begin());
  Bytes got(test_slot_bytes);
  std::vector<OpId> ops;
  constexpr std::size_t segment = test_slot_bytes / 16;
  for (std::size_t i = 0; i < 32; ++i) {
    const Place to{{static_cast<std::uint32_t>(i / 16), 1}, i % 16 * segment, segment};
    const auto write = a.fabric->write(b.self, 7, to, ByteView(sent).subspan(i * segment, segment),
                                       static_cast<Class>(i % classes));
    ASSERT_TRUE(write.ok());
    ops.push_back(*write);
    if (i >= 16) continue;
    const auto read = a.fabric->read(b.self, 8, {{4, 1}, i * segment, segment},
                                     MutableByteView(got).subspan(i * segment, segment), Class::fetch);
    ASSERT_TRUE(read.ok());
    ops.push_back(*read);
  }
  EXPECT_EQ(a.fabric->gauges().ops, 48u);
  EXPECT_GT(a.fabric->link(b.self).queued_bytes, 0u);
  for (const OpId op : ops) {
    ASSERT_TRUE(finish(a, op));
    EXPECT_EQ(a.code_of(op), Code::ok);
  }
  EXPECT_TRUE(equal(b.region.slot(0), ByteView(sent).first(test_slot_bytes)));
  EXPECT_TRUE(equal(b.region.slot(1), ByteView(sent).subspan(test_slot_bytes)));
  EXPECT_EQ(got, stored);
  EXPECT_EQ(a.fabric->gauges().ops, 0u);
  EXPECT_EQ(a.fabric->link(b.self).queued_bytes, 0u);
}

TEST_P(FabricTest, stale_generation_is_refused_and_later_operations_work) {
  expose(b, a, 7, Access::write, {{2, 1}});
  Bytes bytes(4096, marker);
  EXPECT_EQ(write(a, b, 7, {{2, 9}, 0, 4096}, bytes), Code::stale);
  b.region.generations[2] = 2;
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 4096}, bytes), Code::stale);
  EXPECT_EQ(b.region.slot(2)[0], std::byte{0});
  if (world->guarded()) {
    // The second was named as it was opened: the owner took it back in the meantime.
    EXPECT_EQ(b.fabric->counters().refused_stale, 1u);
    EXPECT_EQ(b.fabric->counters().refused_late, 1u);
  }
  EXPECT_EQ(a.fabric->counters().ops_failed, 2u);
  b.region.generations[2] = 1;
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 4096}, bytes), Code::ok);
}

TEST_P(FabricTest, out_of_bounds_is_refused_and_later_operations_work) {
  expose(b, a, 7, Access::write, {{2, 1}});
  expose(b, a, 8, Access::read, {{2, 1}});
  Bytes bytes(4096, marker);
  EXPECT_EQ(write(a, b, 7, {{2, 1}, test_slot_bytes - 4095, 4096}, bytes), Code::invalid);
  EXPECT_EQ(write(a, b, 7, {{2, 1}, UINT64_MAX - 5, 4096}, bytes), Code::invalid);
  EXPECT_EQ(read(a, b, 8, {{2, 1}, test_slot_bytes, 4096}, bytes), Code::invalid);
  EXPECT_EQ(b.region.slot(2)[test_slot_bytes - 1], std::byte{0});
  EXPECT_EQ(b.region.slot(3)[0], std::byte{0});
  if (world->guarded()) {
    EXPECT_EQ(b.fabric->counters().refused_bounds, 3u);
  }
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 4096}, bytes), Code::ok);
}

TEST_P(FabricTest, what_is_not_exposed_is_refused) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no guard: memory of one user on one machine";
  expose(b, a, 7, Access::write, {{2, 1}});
  Bytes bytes(4096, marker);
  EXPECT_EQ(write(a, b, 6, {{2, 1}, 0, 4096}, bytes), Code::not_found);
  EXPECT_EQ(write(a, b, 7, {{3, 1}, 0, 4096}, bytes), Code::denied);
  EXPECT_EQ(read(a, b, 7, {{2, 1}, 0, 4096}, bytes), Code::denied);
  EXPECT_EQ(b.fabric->counters().refused_transfer, 3u);
  EXPECT_EQ(b.region.slot(2)[0], std::byte{0});
  EXPECT_EQ(b.region.slot(3)[0], std::byte{0});
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 4096}, bytes), Code::ok);
}

TEST_P(FabricTest, transfer_of_another_peer_is_refused) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no guard: memory of one user on one machine";
  Node& c = world->add_node();
  expose(b, a, 7, Access::write, {{2, 1}});
  const Bytes bytes(4096, marker);
  EXPECT_EQ(write(c, b, 7, {{2, 1}, 0, 4096}, bytes), Code::not_found);
  EXPECT_EQ(b.fabric->counters().refused_transfer, 1u);
  EXPECT_EQ(b.region.slot(2)[0], std::byte{0});
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 4096}, bytes), Code::ok);
}

TEST_P(FabricTest, transfer_can_be_extended_and_is_open_once) {
  expose(b, a, 7, Access::write, {{2, 1}});
  EXPECT_EQ(b.fabric->expose(a.self, 7, Access::write, {{3, 1}}).error().code, Code::exists);
  EXPECT_EQ(b.fabric->extend(a.self, 8, {{3, 1}}).error().code, Code::not_found);
  ASSERT_TRUE(b.fabric->extend(a.self, 7, {{3, 1}}).ok());
  const Bytes bytes(64, marker);
  EXPECT_EQ(write(a, b, 7, {{3, 1}, 0, 64}, bytes), Code::ok);
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 64}, bytes), Code::ok);
}

TEST_P(FabricTest, concealed_comes_once_and_also_for_what_is_not_exposed) {
  expose(b, a, 7, Access::write, {{2, 1}});
  EXPECT_EQ(b.fabric->gauges().exposures, 1u);
  b.fabric->conceal(a.self, 7);
  b.fabric->conceal(a.self, 7);
  ASSERT_TRUE(world->until([&] { return !b.concealed.empty(); }));
  conceal(b, a, 99);
  EXPECT_EQ(b.concealed.size(), 2u);
  EXPECT_EQ(b.fabric->gauges().exposures, 0u);
  if (world->guarded()) {
    const Bytes bytes(64, marker);
    EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 64}, bytes), Code::not_found);
  }
  expose(b, a, 7, Access::write, {{2, 1}});
}

// Found as refusals for `transfer` in a fleet where nobody had done anything wrong.
TEST_P(FabricTest, what_was_on_its_way_when_it_was_concealed_is_counted_apart) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no guard: memory of one user on one machine";
  const Bytes bytes = pattern(test_slot_bytes, 9);
  // Where the other side has a thread of its own, everything may be in before it is concealed: then once more.
  for (int turn = 0; turn < 1000 && b.fabric->counters().refused_late == 0; ++turn) {
    expose(b, a, 7, Access::write, {{2, 1}});
    const std::uint64_t before = b.fabric->counters().received_bytes;
    std::vector<OpId> ops;
    for (int i = 0; i < 6; ++i) {
      const auto op = a.fabric->write(b.self, 7, {{2, 1}, 0, test_slot_bytes}, bytes, Class::fetch);
      ASSERT_TRUE(op.ok());
      ops.push_back(*op);
    }
    ASSERT_TRUE(world->until([&] { return b.fabric->counters().received_bytes > before; }));
    conceal(b, a, 7);
    for (const OpId op : ops) ASSERT_TRUE(finish(a, op));
    EXPECT_EQ(a.code_of(ops.back()) != Code::ok, b.fabric->counters().refused_late > 0);
  }
  EXPECT_GT(b.fabric->counters().refused_late, 0u);
  // A transfer that never was, the other direction, and another peer are no latecomers.
  Bytes some(64);
  EXPECT_EQ(write(a, b, 8, {{2, 1}, 0, 64}, some), Code::not_found);
  // An operation fails with its first frame that is refused: others of it were still on their way then.
  // They came before this write, and now all of them are counted.
  const std::uint64_t late = b.fabric->counters().refused_late;
  EXPECT_EQ(read(a, b, 7, {{2, 1}, 0, 64}, some), Code::not_found);
  Node& c = world->add_node();
  EXPECT_EQ(write(c, b, 7, {{2, 1}, 0, 64}, some), Code::not_found);
  const FabricCounters counters = b.fabric->counters();
  EXPECT_EQ(counters.refused_transfer, 3u);
  EXPECT_EQ(counters.refused_stale + counters.refused_bounds, 0u);
  EXPECT_EQ(counters.refused_late, late);
}

// Writes of one pattern all over a slot; in their middle the owner takes it back and puts something else
// there.
TEST_P(FabricTest, no_byte_is_written_after_concealed) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no guard: a writer of the same user is trusted";
  const Bytes bytes = pattern(test_slot_bytes, 5);
  for (TransferId transfer = 1; transfer <= 20; ++transfer) {
    const std::uint64_t some = b.fabric->counters().received_bytes + transfer % 7 * (1 << 20) + 1;
    expose(b, a, transfer, Access::write, {{2, 1}});
    std::vector<OpId> ops;
    for (int i = 0; i < 6; ++i) {
      const auto op = a.fabric->write(b.self, transfer, {{2, 1}, 0, test_slot_bytes}, bytes, Class::handover);
      ASSERT_TRUE(op.ok());
      ops.push_back(*op);
    }
    // Somewhere between the first byte and the last.
    ASSERT_TRUE(world->until([&] { return b.fabric->counters().received_bytes >= some; }));
    conceal(b, a, transfer);
    fill(b.region.slot(2), marker);
    for (const OpId op : ops) ASSERT_TRUE(finish(a, op));
    world->settle();
    ASSERT_TRUE(all_are(b.region.slot(2), marker));
  }
}

// F11: memory that is used again is not read by who was slower than the lease, on any fabric.
TEST_P(FabricTest, no_byte_is_read_after_concealed) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no guard: a reader of the same user is trusted";
  const Bytes bytes = pattern(test_slot_bytes, 5);
  std::vector<Bytes> got(6, Bytes(test_slot_bytes));
  for (TransferId transfer = 1; transfer <= 20; ++transfer) {
    std::copy(bytes.begin(), bytes.end(), b.region.slot(2).begin());
    const std::uint64_t some = b.fabric->counters().served_bytes + transfer % 7 * (1 << 20) + 1;
    expose(b, a, transfer, Access::read, {{2, 1}});
    std::vector<OpId> ops;
    for (Bytes& into : got) {
      fill(into, std::byte{0});
      const auto op = a.fabric->read(b.self, transfer, {{2, 1}, 0, test_slot_bytes}, into, Class::fetch);
      ASSERT_TRUE(op.ok());
      ops.push_back(*op);
    }
    ASSERT_TRUE(world->until([&] { return b.fabric->counters().served_bytes >= some; }));
    conceal(b, a, transfer);
    fill(b.region.slot(2), marker);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      ASSERT_TRUE(finish(a, ops[i]));
      ASSERT_FALSE(has_marker(got[i]));
      if (a.code_of(ops[i]) == Code::ok) {
        ASSERT_TRUE(equal(got[i], bytes));
      }
    }
  }
}

TEST_P(FabricTest, memory_of_a_cancelled_operation_is_not_in_use) {
  expose(b, a, 7, Access::write, {{2, 1}});
  expose(b, a, 8, Access::read, {{3, 1}});
  fill(b.region.slot(3), std::byte{1});
  for (int round = 0; round < 20; ++round) {
    Bytes from = pattern(test_slot_bytes, 6);
    Bytes into(test_slot_bytes);
    const std::uint64_t some = a.fabric->counters().written_bytes + 1;
    const auto write = a.fabric->write(b.self, 7, {{2, 1}, 0, from.size()}, from, Class::writeback);
    const auto read = a.fabric->read(b.self, 8, {{3, 1}, 0, into.size()}, into, Class::fetch);
    ASSERT_TRUE(write.ok() && read.ok());
    if (round % 2 == 1) {
      ASSERT_TRUE(world->until([&] { return a.fabric->counters().written_bytes >= some; }));
    }
    a.fabric->cancel(*write);
    a.fabric->cancel(*read);
    a.fabric->cancel(*read);
    ASSERT_TRUE(world->until([&] { return a.is_done(*write) && a.is_done(*read); }));
    fill(from, marker);
    fill(into, marker);
    const Code code = a.code_of(*write);
    EXPECT_TRUE(code == Code::cancelled || code == Code::ok) << code_name(code);
    world->settle();
    ASSERT_FALSE(has_marker(b.region.slot(2)));
    ASSERT_TRUE(all_are(into, marker));
  }
  // Operations behind the cancelled ones are what they would have been.
  const Bytes last = pattern(test_slot_bytes, 7);
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, last.size()}, last), Code::ok);
  EXPECT_TRUE(equal(b.region.slot(2), last));
}

TEST_P(FabricTest, cancel_of_what_is_done_or_never_was_is_nothing) {
  expose(b, a, 7, Access::write, {{2, 1}});
  const Bytes bytes(64, marker);
  const auto op = a.fabric->write(b.self, 7, {{2, 1}, 0, 64}, bytes, Class::handover);
  ASSERT_TRUE(op.ok() && finish(a, *op));
  a.fabric->cancel(*op);
  a.fabric->cancel(*op + 1000);
  world->settle();
  EXPECT_EQ(a.code_of(*op), Code::ok);
  EXPECT_EQ(a.fabric->counters().ops_cancelled, 0u);
}

TEST_P(FabricTest, full_queue_is_busy_and_empties) {
  expose(b, a, 7, Access::write, {{2, 1}});
  const Bytes bytes(16, marker);
  std::size_t accepted = 0;
  Code last = Code::ok;
  while (last == Code::ok && accepted <= ops_max) {
    const auto op = a.fabric->write(b.self, 7, {{2, 1}, 0, 16}, bytes, Class::writeback);
    last = op ? Code::ok : op.error().code;
    if (op) ++accepted;
  }
  EXPECT_EQ(last, Code::busy);
  EXPECT_EQ(accepted, ops_max);
  ASSERT_TRUE(world->until([&] { return a.done.size() == accepted; }));
  for (const auto& [op, codes] : a.done) ASSERT_EQ(codes, std::vector<Code>{Code::ok});
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 16}, bytes), Code::ok);
}

TEST_P(FabricTest, lost_peer_ends_everything_of_it) {
  expose(b, a, 7, Access::write, {{2, 1}});
  expose(a, b, 1, Access::read, {{0, 1}});
  expose(a, b, 2, Access::read, {{1, 1}});
  const Bytes bytes = pattern(test_slot_bytes, 8);
  std::vector<OpId> ops;
  for (int i = 0; i < 8; ++i) {
    const auto op = a.fabric->write(b.self, 7, {{2, 1}, 0, bytes.size()}, bytes, Class::handover);
    ASSERT_TRUE(op.ok());
    ops.push_back(*op);
  }
  EXPECT_EQ(a.fabric->grant(b.self, world->sealed()).ok(), world->guarded());
  a.fabric->peer_lost(b.self);
  ASSERT_TRUE(world->until([&] { return a.done.size() == ops.size() && a.concealed.size() == 2; }));
  EXPECT_EQ(a.code_of(ops.back()), Code::unreachable);
  EXPECT_TRUE(world->until([&] { return a.fabric->gauges().connections == 0; }));
  EXPECT_EQ(a.fabric->gauges().ops, 0u);
  EXPECT_EQ(a.fabric->gauges().exposures, 0u);
  EXPECT_EQ(a.fabric->gauges().tickets, 0u);
  EXPECT_EQ(a.fabric->link(b.self).queued_bytes, 0u);
}

TEST_P(FabricTest, ticket_opens_one_connection) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no tickets: the arena socket is the way in";
  Node& c = world->add_node();
  expose(b, a, 7, Access::write, {{2, 1}});
  expose(b, c, 7, Access::write, {{2, 1}});
  std::optional<Ticket> used;
  a.on_want_ticket = [&](const Peer&) {
    used = *b.fabric->grant(a.self, world->sealed());
    world->dial(a, b, *used);
  };
  const Bytes bytes(64, marker);
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 64}, bytes), Code::ok);
  EXPECT_EQ(b.fabric->gauges().tickets, 0u);
  // Replayed by another process.
  c.on_want_ticket = [&](const Peer&) { world->dial(c, b, *used); };
  EXPECT_EQ(write(c, b, 7, {{2, 1}, 0, 64}, bytes), Code::unreachable);
  EXPECT_EQ(b.fabric->counters().refused_ticket, 1u);
  // The one it was given to is not disturbed.
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 64}, bytes), Code::ok);
}

TEST_P(FabricTest, ticket_of_another_peer_is_refused_and_void) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no tickets: the arena socket is the way in";
  Node& c = world->add_node();
  expose(b, c, 7, Access::write, {{2, 1}});
  std::optional<Ticket> stolen;
  c.on_want_ticket = [&](const Peer&) {
    stolen = *b.fabric->grant(a.self, world->sealed());
    world->dial(c, b, *stolen);
  };
  const Bytes bytes(64, marker);
  EXPECT_EQ(write(c, b, 7, {{2, 1}, 0, 64}, bytes), Code::unreachable);
  EXPECT_GE(b.fabric->counters().refused_ticket, 1u);
  EXPECT_EQ(b.region.slot(2)[0], std::byte{0});
  c.on_want_ticket = nullptr;
  // The dialler is back after its pause, without being asked.
  ASSERT_TRUE(world->until([&] { return c.fabric->gauges().connections == 1; }));
  ASSERT_TRUE(world->until([&] { return write(c, b, 7, {{2, 1}, 0, 64}, bytes) == Code::ok; }));
}

TEST_P(FabricTest, expired_ticket_is_refused) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no tickets: the arena socket is the way in";
  expose(b, a, 7, Access::write, {{2, 1}});
  const Ticket old = *b.fabric->grant(a.self, world->sealed());
  world->outlive_tickets(b);
  a.on_want_ticket = [&](const Peer&) { world->dial(a, b, old); };
  const Bytes bytes(64, marker);
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 64}, bytes), Code::unreachable);
  EXPECT_GE(b.fabric->counters().refused_ticket, 1u);
}

TEST_P(FabricTest, refused_ticket_ends_what_waits) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no tickets: the arena socket is the way in";
  a.on_want_ticket = [&](const Peer& peer) { a.fabric->ticket_refused(peer); };
  const Bytes bytes(64, marker);
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 64}, bytes), Code::unreachable);
  EXPECT_GE(a.fabric->counters().dials_failed, 1u);
  // At once while the last dial has failed.
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 64}, bytes), Code::unreachable);
  EXPECT_EQ(a.fabric->counters().dials, 0u);
}

TEST_P(FabricTest, flipped_bit_is_refused_when_sealed_and_for_the_page_checksum_otherwise) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no frames";
  expose(b, a, 7, Access::write, {{2, 1}});
  world->flip_a_bit(a, b);
  const Bytes bytes = pattern(1 << 20, 9);
  const Code code = write(a, b, 7, {{2, 1}, 0, bytes.size()}, bytes);
  if (world->sealed()) {
    EXPECT_EQ(code, Code::unreachable);
    EXPECT_EQ(b.fabric->counters().refused_seal, 1u);
  } else {
    EXPECT_EQ(code, Code::ok);
    EXPECT_FALSE(equal(b.region.slot(2).first(bytes.size()), bytes));
  }
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, bytes.size()}, bytes), Code::ok);
  EXPECT_TRUE(equal(b.region.slot(2).first(bytes.size()), bytes));
}

// E14: an unreachable peer does not delay the healthy ones and is not dialled by every operation.
TEST_P(FabricTest, black_hole_does_not_delay_others) {
  if (!world->guarded()) GTEST_SKIP() << "this fabric has no connections";
  Node& c = world->add_node();
  world->black_hole(c);
  expose(b, a, 7, Access::write, {{2, 1}});
  const Bytes bytes = pattern(1 << 20, 10);
  std::vector<OpId> lost;
  for (int i = 0; i < 20; ++i) {
    const auto op = a.fabric->write(c.self, 7, {{2, 1}, 0, bytes.size()}, bytes, Class::handover);
    ASSERT_TRUE(op.ok());
    lost.push_back(*op);
  }
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(write(a, b, 7, {{2, 1}, 0, bytes.size()}, bytes), Code::ok);
  }
  EXPECT_FALSE(a.is_done(lost.front())) << "the others waited for the hole";
  for (const OpId op : lost) {
    ASSERT_TRUE(finish(a, op));
    EXPECT_EQ(a.code_of(op), Code::unreachable);
  }
  EXPECT_EQ(std::count(a.wanted.begin(), a.wanted.end(), c.self), 1);
}

// E09: whatever becomes of operations, each is answered once, with the first thing that went wrong, and
// nothing is left of them.
TEST_P(FabricTest, ten_thousand_operations_leave_nothing_behind) {
  const std::uint64_t seed = 20261129;
  RecordProperty("seed", std::to_string(seed));
  Rng rng(seed);
  expose(b, a, 7, Access::write, {{0, 1}, {1, 1}});
  expose(b, a, 8, Access::read, {{2, 1}});
  const Bytes from = pattern(8192, 11);
  std::vector<Bytes> into(64, Bytes(8192));
  std::map<OpId, std::vector<Code>> allowed;
  for (int i = 0; i < 10000; ++i) {
    const std::size_t bytes = 1 + rng.below(8192);
    const bool write = rng.chance(0.5);
    Place place{{write ? static_cast<std::uint32_t>(rng.below(2)) : 2u, 1}, rng.below(65536), bytes};
    TransferId transfer = write ? 7 : 8;
    Code expected = Code::ok;
    switch (rng.below(8)) {
      case 0:
        place.slot.generation = 3;
        expected = Code::stale;
        break;
      case 1:
        place.offset = test_slot_bytes;
        expected = Code::invalid;
        break;
      case 2:
        if (!world->guarded()) break;
        transfer = 99;
        expected = Code::not_found;
        break;
      default:
        break;
    }
    const auto cls = static_cast<Class>(rng.below(classes));
    const auto op = write ? a.fabric->write(b.self, transfer, place, ByteView(from).first(bytes), cls)
                          : a.fabric->read(b.self, transfer, place,
                                           MutableByteView(into[rng.below(64)]).first(bytes), cls);
    ASSERT_TRUE(op.ok());
    allowed[*op] = {expected};
    if (rng.chance(0.1)) {
      a.fabric->cancel(*op);
      allowed[*op].push_back(Code::cancelled);
    }
    if (a.fabric->gauges().ops > 200) {
      ASSERT_TRUE(world->until([&] { return a.fabric->gauges().ops < 50; }));
    }
  }
  ASSERT_TRUE(world->until([&] { return a.fabric->gauges().ops == 0; }));
  EXPECT_EQ(a.done.size(), allowed.size());
  for (const auto& [op, codes] : allowed) {
    ASSERT_EQ(a.done[op].size(), 1u);
    ASSERT_NE(std::find(codes.begin(), codes.end(), a.code_of(op)), codes.end())
        << code_name(a.code_of(op)) << " instead of " << code_name(codes.front());
  }
  conceal(b, a, 7);
  conceal(b, a, 8);
  a.fabric->peer_lost(b.self);
  b.fabric->peer_lost(a.self);
  EXPECT_TRUE(world->until(
      [&] { return a.fabric->gauges().connections == 0 && b.fabric->gauges().connections == 0; }));
  for (const Node* node : {&a, &b}) {
    EXPECT_EQ(node->fabric->gauges().ops, 0u);
    EXPECT_EQ(node->fabric->gauges().exposures, 0u);
    EXPECT_EQ(node->fabric->gauges().tickets, 0u);
  }
}

// Inside a machine there mostly is no copy at all.
TEST_P(FabricTest, view_is_the_memory_of_the_peer) {
  expose(b, a, 7, Access::write, {{2, 1}});
  const Bytes bytes(64, marker);
  EXPECT_EQ(write(a, b, 7, {{2, 1}, 0, 64}, bytes), Code::ok);
  Region* region = a.fabric->view(b.self);
  ASSERT_EQ(region != nullptr, !world->guarded());
  if (region == nullptr) return;
  const auto seen = region->resolve({2, 1});
  ASSERT_TRUE(seen.ok());
  b.region.slot(2)[0] = std::byte{5};
  EXPECT_EQ((*seen)[0], std::byte{5});
  a.fabric->peer_lost(b.self);
  EXPECT_EQ(a.fabric->view(b.self), nullptr);
}

std::vector<Kind> kinds() {
  std::vector<Kind> all{Kind::shm, Kind::tcp, Kind::tcp_sealed, Kind::loopback, Kind::loopback_sealed};
  if (verbs_world_there()) all.insert(all.end(), {Kind::verbs, Kind::verbs_stepped});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Kinds, FabricTest, testing::ValuesIn(kinds()), kind_name);

}  // namespace
}  // namespace di::transfer
