#include "store/server.h"

#include <gtest/gtest.h>

#include "tests/unit/store/server_shelf.h"

namespace di::store {
namespace {

TEST_F(ServerTest, page_goes_to_the_volume_and_comes_back_in_order) {
  start_with_host();
  for (const std::uint32_t blocks : {1u, 5u, 8u}) {
    ASSERT_EQ(put(blocks, blocks), Code::ok);
    const wire::SlotRef target = take(blocks, kv::SlotState::filling);
    const auto answers = read(100 + blocks, blocks, target);
    // One for each access that arrived, each behind the one before it; or for both at once.
    for (std::size_t i = 0; i < answers.size(); ++i) {
      EXPECT_EQ(answers[i].code, 0u);
      EXPECT_TRUE(i == 0 || answers[i].group > answers[i - 1].group);
    }
    EXPECT_EQ(answers.back().group + 1, layout.groups());
    EXPECT_LE(answers.size(), blocks < 5 ? 1u : 2u);
    const Bytes expected = payload_of(layout, blocks, blocks);
    const MutableByteView bytes = bytes_of(target);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), expected.begin(), expected.end()));
  }
  EXPECT_EQ(server->transfers(), 0u);
  EXPECT_EQ(server->puts(), 0u);
  EXPECT_EQ(server->counters().reads, 3u);
  EXPECT_EQ(server->counters().puts, 3u);
  EXPECT_EQ(mount().volume().stats().reading, 0u);
}

TEST_F(ServerTest, read_starts_at_the_group_asked_for) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  wire::kv_read want = read_of(5, 1, take(2, kv::SlotState::filling));
  want.from_group = 2;
  say(host, want);
  ASSERT_TRUE(until([&] { return server->transfers() == 0; }));
  const auto answers = got<wire::kv_read_done>();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].group, 3u);
  EXPECT_EQ(bytes_of(want.slot)[0], std::byte{0});
}

TEST_F(ServerTest, wrong_reads_have_their_codes) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  const wire::SlotRef target = take(2, kv::SlotState::filling);
  EXPECT_EQ(read(1, 99, target).back().code, static_cast<std::uint16_t>(Code::not_found));
  wire::kv_read other = read_of(2, 1, target);
  other.volume = 1;
  say(host, other);
  EXPECT_EQ(got<wire::kv_read_done>().back().code, static_cast<std::uint16_t>(Code::not_found));
  EXPECT_EQ(read(3, 1, take(3, kv::SlotState::filling)).back().code, static_cast<std::uint16_t>(Code::stale));
  wire::SlotRef old = target;
  ++old.generation;
  EXPECT_EQ(read(4, 1, old).back().code, static_cast<std::uint16_t>(Code::stale));
  EXPECT_EQ(read(5, 1, sealed_page(7, 2)).back().code, static_cast<std::uint16_t>(Code::stale));
  EXPECT_EQ(server->transfers(), 0u);
}

// The first read since the volume was opened compares the payload; the host compares all of them.
TEST_F(ServerTest, damaged_segment_ends_the_first_read_behind_the_good_ones) {
  start_with_host();
  ASSERT_EQ(put(1, 8), Code::ok);
  ASSERT_EQ(put(2, 8), Code::ok);
  const std::uint64_t slot = mount().volume().geometry().segment_offset(0);
  restart();
  server->host_up(host, true);
  ASSERT_EQ(read(5, 2, take(8, kv::SlotState::filling)).back().code, 0u);
  disk->flip_bit(slot + 4096 + layout.segment_offset(3, 8) + 77, 0);
  const auto answers = read(1, 1, take(8, kv::SlotState::filling));
  for (std::size_t i = 0; i + 1 < answers.size(); ++i) {
    EXPECT_EQ(answers[i].code, 0u);
    EXPECT_LT(answers[i].group, 3u);
  }
  EXPECT_EQ(answers.back().code, static_cast<std::uint16_t>(Code::corrupt));
  EXPECT_EQ(server->counters().reads_corrupt, 1u);
  // The header of one that was compared is left alone: the host has the checksums of its plan.
  disk->flip_bit(mount().volume().geometry().segment_offset(0) +
                     slot_class_of(layout, layout.page_bytes(8)).slot_bytes + 100,
                 0);
  const std::uint64_t reads = disk->reads;
  EXPECT_EQ(read(6, 2, take(8, kv::SlotState::filling)).back().code, 0u);
  EXPECT_EQ(disk->reads, reads + 2);
}

TEST_F(ServerTest, cancelled_read_writes_nothing_after_its_answer) {
  std::promise<void> reached;
  std::promise<void> gate;
  auto opened = gate.get_future().share();
  std::atomic<int> segments{0};
  mid_segment = [&, opened] {
    if (segments.fetch_add(1) == 1) {
      reached.set_value();
      opened.wait();
    }
  };
  start_with_host();
  ASSERT_EQ(put(1, 8), Code::ok);
  const wire::SlotRef target = take(8, kv::SlotState::filling);
  say(host, read_of(1, 1, target));
  reached.get_future().wait();
  say(host, wire::kv_read_cancel{1});
  EXPECT_TRUE(got<wire::kv_read_cancelled>().empty());  // a segment is being written
  gate.set_value();
  ASSERT_TRUE(until([&] { return !got<wire::kv_read_cancelled>().empty(); }));
  EXPECT_EQ(segments.load(), 2);
  EXPECT_EQ(bytes_of(target)[layout.segment_offset(2, 8)], std::byte{0});
  EXPECT_EQ(server->transfers(), 0u);
  EXPECT_EQ(server->counters().reads_cancelled, 1u);
}

// A disk that does not answer has as many accesses as it may have: those behind them end all the same.
TEST_F(ServerTest, cancelled_read_that_did_not_begin_waits_for_no_disk) {
  std::promise<void> gate;
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  before_read = [opened = gate.get_future().share()] { opened.wait(); };
  const wire::SlotRef target = take(2, kv::SlotState::filling);
  constexpr std::uint64_t reads = 120;
  for (std::uint64_t i = 1; i <= reads; ++i) say(host, read_of(i, 1, target));
  for (std::uint64_t i = 1; i <= reads; ++i) say(host, wire::kv_read_cancel{i});
  ASSERT_TRUE(until([&] { return got<wire::kv_read_cancelled>().size() >= reads / 2; }));
  gate.set_value();
  ASSERT_TRUE(until([&] { return server->transfers() == 0; }));
  EXPECT_EQ(got<wire::kv_read_cancelled>().size(), reads);
}

TEST_F(ServerTest, cancel_of_anything_else_is_answered_at_once) {
  start_with_host();
  say(host, wire::kv_read_cancel{77});
  EXPECT_EQ(got<wire::kv_read_cancelled>(), std::vector<wire::kv_read_cancelled>{{77}});
}

TEST_F(ServerTest, what_comes_before_the_arena_waits_for_it) {
  listen();
  start();
  server->host_up(host, true);
  EXPECT_EQ(server->arenas(), 0u);
  EXPECT_EQ(put(1, 2), Code::ok);
  EXPECT_EQ(server->arenas(), 1u);
  // And can be cancelled there.
  server->host_lost(host);
  host.generation = 5;
  owner->set_generation(5);
  arena_socket.reset();
  listen();
  server->host_up(host, true);
  say(host, read_of(9, 1, take(2, kv::SlotState::filling)));
  EXPECT_EQ(server->transfers(), 1u);
  say(host, wire::kv_read_cancel{9});
  EXPECT_EQ(server->transfers(), 0u);
  EXPECT_EQ(got<wire::kv_read_cancelled>().size(), 1u);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  EXPECT_TRUE(got<wire::kv_read_done>().empty());
}

TEST_F(ServerTest, host_without_a_socket_is_unreachable) {
  start();
  server->host_up(host, true);
  EXPECT_EQ(put(1, 2), Code::unreachable);
  EXPECT_EQ(read(1, 1, take(2, kv::SlotState::filling)).back().code,
            static_cast<std::uint16_t>(Code::unreachable));
  listen();
  EXPECT_EQ(put(1, 2), Code::ok);
}

TEST_F(ServerTest, without_a_fabric_a_host_on_another_machine_is_unsupported) {
  listen();
  start();
  server->host_up(host, false);
  EXPECT_EQ(put(1, 2), Code::unsupported);
  EXPECT_EQ(read(1, 1, take(2, kv::SlotState::filling)).back().code,
            static_cast<std::uint16_t>(Code::unsupported));
}

TEST_F(ServerTest, unknown_hosts_are_not_answered) {
  start_with_host();
  say(Peer{host.instance, 3}, read_of(1, 1, take(2, kv::SlotState::filling)));
  say(Peer{"di-kvd.host9", 4}, put_of(1, 2, sealed_page(1, 2)));
  EXPECT_TRUE(sent.empty());
  EXPECT_EQ(server->transfers(), 0u);
}

TEST_F(ServerTest, loss_of_a_host_ends_its_transfers_without_answers) {
  std::promise<void> reached;
  std::promise<void> gate;
  auto opened = gate.get_future().share();
  std::atomic<int> segments{0};
  mid_segment = [&, opened] {
    if (segments.fetch_add(1) == 0) {
      reached.set_value();
      opened.wait();
    }
  };
  start_with_host();
  ASSERT_EQ(put(1, 8), Code::ok);
  sent.clear();
  say(host, read_of(1, 1, take(8, kv::SlotState::filling)));
  reached.get_future().wait();
  server->host_lost(host);
  gate.set_value();
  ASSERT_TRUE(until([&] { return server->transfers() == 0; }));
  EXPECT_EQ(mount().volume().stats().reading, 0u);
  for (const auto& done : got<wire::kv_read_done>()) EXPECT_EQ(done.code, 0u);
  EXPECT_TRUE(got<wire::kv_read_cancelled>().empty());
}

TEST_F(ServerTest, end_of_the_arena_socket_unmaps) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  arena_socket.reset();
  ASSERT_TRUE(until([&] { return server->arenas() == 0; }));
}

TEST_F(ServerTest, wrong_puts_have_their_codes) {
  start_with_host();
  const wire::SlotRef page = sealed_page(1, 2);
  const auto code = [&](const wire::kv_put& want) {
    const std::size_t before = got<wire::kv_put_done>().size();
    say(host, want);
    EXPECT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
    return static_cast<Code>(got<wire::kv_put_done>().back().code);
  };
  wire::kv_put want = put_of(1, 2, page);
  want.fingerprint.raw[0] ^= std::byte{1};
  EXPECT_EQ(code(want), Code::unsupported);
  want = put_of(1, 2, page);
  want.pages.clear();
  EXPECT_EQ(code(want), Code::invalid);
  want = put_of(1, 2, page);
  want.volume = 3;
  EXPECT_EQ(code(want), Code::not_found);
  want = put_of(1, 2, page);
  ++want.slot.generation;
  EXPECT_EQ(code(want), Code::stale);
  want = put_of(1, 3, page);  // another length than the slot's
  EXPECT_EQ(code(want), Code::stale);
  bytes_of(page)[5000] ^= std::byte{1};
  EXPECT_EQ(code(put_of(1, 2, page)), Code::corrupt);
  bytes_of(page)[5000] ^= std::byte{1};
  EXPECT_EQ(code(put_of(1, 2, page)), Code::ok);
  EXPECT_EQ(code(put_of(1, 2, page)), Code::ok);  // a repetition
  EXPECT_EQ(server->counters().puts, 1u);
  EXPECT_EQ(server->puts(), 0u);
}

// F03: nothing is there after a free that overlaps the put, and after one that comes last, now and
// after a stop, and what comes back after a kill is freed when di-meta hears of it.
TEST_F(ServerTest, column_that_is_freed_last_is_gone) {
  Rng rng(3);
  start_with_host();
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  const wire::kv_put want = put_of(1, 1, sealed_page(1, 1));
  const wire::SlotRef target = take(1, kv::SlotState::filling);
  const auto gone = [&] {
    EXPECT_EQ(mount().volume().stats().slots_live, 0u);
    say(host, read_of(1, 1, target));
    EXPECT_EQ(got<wire::kv_read_done>().back().code, static_cast<std::uint16_t>(Code::not_found));
  };
  for (int round = 0; round < 10000; ++round) {
    SCOPED_TRACE(round);
    sent.clear();
    say(host, want);
    for (std::uint64_t turn = rng.below(6); turn > 0; --turn) loop.run_ready();
    const bool written = !got<wire::kv_put_done>().empty();
    const bool overlaps = rng.chance(0.5);
    if (overlaps) say(meta, wire::kv_free{{1}, {}});
    ASSERT_TRUE(until([&] { return !got<wire::kv_put_done>().empty(); }));
    ASSERT_EQ(got<wire::kv_put_done>()[0].code,
              static_cast<std::uint16_t>(overlaps && !written ? Code::cancelled : Code::ok));
    EXPECT_EQ(mount().volume().stats().slots_live, overlaps ? 0u : 1u);
    say(meta, wire::kv_free{{1}, {}});
    gone();
    if (round % 500 != 0) continue;
    const bool kill = rng.chance(0.5);
    if (kill) {
      server.reset();
      start();
    } else {
      restart();
      EXPECT_EQ(mount().volume().stats().slots_live, 0u);
    }
    server->host_up(host, true);
    ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
    server->meta_up(meta);
    ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
    say(meta, wire::meta_inventory_ack{0, {1}});
    gone();
    ASSERT_FALSE(HasFailure());
  }
}

TEST_F(ServerTest, answer_to_a_put_goes_through_the_fault_point) {
  std::function<void()> held;
  put_written = [&](std::function<void()> answer) { held = std::move(answer); };
  start_with_host();
  say(host, put_of(1, 2, sealed_page(1, 2)));
  ASSERT_TRUE(until([&] { return held != nullptr; }));
  EXPECT_TRUE(got<wire::kv_put_done>().empty());
  EXPECT_EQ(mount().volume().stats().slots_live, 1u);
  held();
  EXPECT_EQ(got<wire::kv_put_done>().size(), 1u);
}

TEST_F(ServerTest, put_that_is_freed_before_it_is_written_is_not_acknowledged) {
  start_with_host();
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  say(host, put_of(1, 2, sealed_page(1, 2)));
  say(meta, wire::kv_free{{1}, {}});
  ASSERT_TRUE(until([&] { return !got<wire::kv_put_done>().empty(); }));
  EXPECT_EQ(got<wire::kv_put_done>()[0].code, static_cast<std::uint16_t>(Code::cancelled));
  EXPECT_EQ(server->counters().columns_freed, 1u);
  EXPECT_EQ(server->counters().puts, 0u);
  EXPECT_EQ(mount().volume().stats().slots_live, 0u);
}

TEST_F(ServerTest, inventory_tells_what_is_there_and_frees_what_nobody_knows) {
  start_with_host();
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  server->meta_up(meta);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  const wire::meta_inventory part = got<wire::meta_inventory>()[0];
  EXPECT_EQ(part.cursor, 0u);
  EXPECT_TRUE(part.last);
  ASSERT_EQ(part.shards.size(), 3u);
  for (std::uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(part.shards[i].stripe, i + 1);
    EXPECT_EQ(part.shards[i].fingerprint, layout.fingerprint());
    EXPECT_EQ(part.shards[i].tenant, 1001 + i);
    EXPECT_EQ(part.shards[i].pages, std::vector<wire::PutPage>{page_of(layout, i + 1, 2)});
  }
  EXPECT_TRUE(server->inventory_running());
  say(Peer{"di-meta.0", 1}, wire::meta_inventory_ack{0, {1, 2, 3}});  // an earlier di-meta's
  say(meta, wire::meta_inventory_ack{4, {1, 2, 3}});                  // another part's
  EXPECT_EQ(server->counters().columns_freed, 0u);
  say(meta, wire::meta_inventory_ack{0, {2}});
  EXPECT_FALSE(server->inventory_running());
  EXPECT_EQ(server->counters().columns_freed, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 2u);
}

// di-meta takes what an inventory does not show for lost.
TEST_F(ServerTest, inventory_shows_what_was_put_while_it_ran) {
  std::promise<void> gate;
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  before_read = [opened = gate.get_future().share()] { opened.wait(); };
  server->meta_up(meta);
  ASSERT_EQ(put(2, 2), Code::ok);  // the list is made already
  gate.set_value();
  ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() == 1; }));
  const wire::meta_inventory listed = got<wire::meta_inventory>()[0];
  ASSERT_EQ(listed.shards.size(), 1u);
  EXPECT_EQ(listed.shards[0].stripe, 1u);
  EXPECT_FALSE(listed.last);
  say(meta, wire::meta_inventory_ack{0, {}});
  ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() == 2; }));
  const wire::meta_inventory fresh = got<wire::meta_inventory>()[1];
  ASSERT_EQ(fresh.shards.size(), 1u);
  EXPECT_EQ(fresh.shards[0].stripe, 2u);
  EXPECT_TRUE(fresh.last);
  say(meta, wire::meta_inventory_ack{1, {}});
  EXPECT_FALSE(server->inventory_running());
}

// di-meta has forgotten the free by then, and would have the column in the books for good.
TEST_F(ServerTest, inventory_leaves_out_what_was_freed_while_it_ran) {
  std::promise<void> gate;
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  ASSERT_EQ(put(2, 2), Code::ok);
  before_read = [opened = gate.get_future().share()] { opened.wait(); };
  server->meta_up(meta);
  say(meta, wire::kv_free{{1}, {}});
  gate.set_value();
  ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() == 1; }));
  const wire::meta_inventory told = got<wire::meta_inventory>()[0];
  ASSERT_EQ(told.shards.size(), 1u);
  EXPECT_EQ(told.shards[0].stripe, 2u);
  EXPECT_TRUE(told.last);
}

// However often it starts over while its disk does not answer: that gets one job, and the last start what it finds.
TEST_F(ServerTest, inventory_of_a_slow_disk_does_not_pile_up) {
  std::promise<void> gate;
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  before_read = [opened = gate.get_future().share()] { opened.wait(); };
  server->meta_up(meta);
  const std::size_t pending = server->io_pending();
  for (std::uint32_t i = 1; i <= 600; ++i) say(meta, wire::meta_inventory_want{i});
  EXPECT_EQ(server->io_pending(), pending);
  // An answer to an earlier one is none to a part that is not sent.
  say(meta, wire::meta_inventory_ack{0, {}});
  EXPECT_TRUE(server->inventory_running());
  gate.set_value();
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  const auto parts = got<wire::meta_inventory>();
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].asked, 600u);
  EXPECT_EQ(parts[0].cursor, 0u);
  EXPECT_EQ(parts[0].shards.size(), 1u);
  say(meta, wire::meta_inventory_ack{0, {}});
  EXPECT_FALSE(server->inventory_running());
}

TEST_F(ServerTest, inventory_that_is_asked_for_begins_after_the_question) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  say(meta, wire::meta_inventory_want{4});
  EXPECT_FALSE(server->inventory_running()) << "it is not connected to this one";
  server->meta_up(meta);
  ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() == 1; }));
  EXPECT_EQ(got<wire::meta_inventory>()[0].asked, 0u);
  ASSERT_EQ(put(2, 2), Code::ok);
  // The one under way does not count.
  say(meta, wire::meta_inventory_want{5});
  ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() == 2; }));
  const wire::meta_inventory asked = got<wire::meta_inventory>()[1];
  EXPECT_EQ(asked.cursor, 0u);
  EXPECT_EQ(asked.asked, 5u);
  EXPECT_EQ(asked.shards.size(), 2u);
  EXPECT_TRUE(asked.last);
  say(meta, wire::meta_inventory_ack{0, {}});
  EXPECT_FALSE(server->inventory_running());
  say(meta, wire::meta_inventory_want{6});
  ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() == 3; }));
  EXPECT_EQ(got<wire::meta_inventory>()[2].asked, 6u);
  EXPECT_EQ(put(3, 2), Code::ok) << "puts go on";
}

TEST_F(ServerTest, inventory_ends_with_di_meta_and_starts_over_with_the_next) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  server->meta_up(meta);
  server->meta_lost(meta);
  EXPECT_FALSE(server->inventory_running());
  const Peer next{"di-meta.0", 3};
  server->meta_up(next);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  ASSERT_EQ(got<wire::meta_inventory>().size(), 1u);
  EXPECT_EQ(sent.back().peer_generation, 3u);
}

TEST_F(ServerTest, slot_without_a_good_header_is_dropped_by_the_inventory) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  ASSERT_EQ(put(2, 2), Code::ok);
  disk->flip_bit(mount().volume().geometry().segment_offset(0) + 100, 0);
  server->meta_up(meta);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  ASSERT_EQ(got<wire::meta_inventory>()[0].shards.size(), 1u);
  EXPECT_EQ(got<wire::meta_inventory>()[0].shards[0].stripe, 2u);
  EXPECT_EQ(server->counters().slots_dropped, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 1u);
}

// ---- columns

// Whole pages, parts and parity of short and full stripes, some with a short page.
const std::vector<std::pair<std::pair<std::uint16_t, std::uint16_t>, std::vector<std::uint32_t>>> stripes = {
    {{1, 0}, {8}},
    {{2, 1}, {8}},
    {{2, 1}, {8, 3}},
    {{10, 2}, {8}},
    {{10, 2}, {8, 5}},
    {{10, 2}, {8, 8, 8}},
    {{10, 2}, {8, 8, 8, 1}},
    {{10, 2}, {4, 4, 4, 4, 4, 2}},
    {{10, 2}, {8, 8, 8, 8, 8, 8, 8, 8, 8, 3}}};

TEST_F(ServerTest, columns_of_every_kind_go_to_the_volume_and_back_to_their_places) {
  start_with_host();
  std::uint64_t number = 0;
  for (const auto& [geometry, blocks] : stripes) {
    SCOPED_TRACE("stripe " + std::to_string(++number));
    const Stripe stripe = stripe_of(number, geometry.first, geometry.second, blocks);
    for (std::uint32_t i = 0; i < stripe.shape.columns_stored(); ++i) {
      ASSERT_EQ(put(stripe, stripe.shape.stored_column(i)), Code::ok) << i;
    }
    for (const wire::SlotRef& slot : stripe.slots) give_back(slot);
    expect_columns(stripe);
    say(meta, wire::kv_free{{number}, {}});
    EXPECT_EQ(mount().volume().stats().slots_live, 0u);
  }
}

TEST_F(ServerTest, columns_of_every_kind_come_from_another_machine_and_go_there) {
  fabric = std::make_unique<NearFabric>(loop, *owner,
                                        [this](transfer::OpId op, Code code) { server->moved(op, code); });
  start();
  server->host_up(host, false);
  std::uint64_t number = 0;
  for (const auto& [geometry, blocks] : stripes) {
    SCOPED_TRACE("stripe " + std::to_string(++number));
    const Stripe stripe = stripe_of(number, geometry.first, geometry.second, blocks);
    for (std::uint32_t i = 0; i < stripe.shape.columns_stored(); ++i) {
      ASSERT_EQ(put(stripe, stripe.shape.stored_column(i)), Code::ok) << i;
    }
    for (const wire::SlotRef& slot : stripe.slots) give_back(slot);
    expect_columns(stripe);
    say(meta, wire::kv_free{{number}, {}});
  }
  EXPECT_GT(fabric->moves, 0u);
}

TEST_F(ServerTest, a_read_from_another_machine_starts_at_the_group_asked_for_too) {
  fabric = std::make_unique<NearFabric>(loop, *owner,
                                        [this](transfer::OpId op, Code code) { server->moved(op, code); });
  start();
  server->host_up(host, false);
  const Stripe stripe = stripe_of(1, 1, 0, {2});
  ASSERT_EQ(put(stripe, 0), Code::ok);
  for (const std::uint32_t from : {2u, 4u}) {
    wire::kv_read want = read_of(from, 1, take(2, kv::SlotState::filling));
    want.from_group = from;
    fabric->moves = 0;
    say(host, want);
    ASSERT_TRUE(until([&] { return server->transfers() == 0; }));
    const auto answers = got<wire::kv_read_done>();
    ASSERT_FALSE(answers.empty());
    EXPECT_EQ(bytes_of(want.slot)[0], std::byte{0});
    if (from == 4) {  // there are four
      EXPECT_EQ(answers.back().code, static_cast<std::uint16_t>(Code::invalid));
      EXPECT_EQ(fabric->moves, 0u);
      continue;
    }
    EXPECT_EQ(answers.back().code, 0u);
    EXPECT_EQ(answers.back().group, 3u);
    EXPECT_EQ(fabric->moves, 1u);  // two segments that came together, to one place
    const ByteView there = bytes_of(want.slot);
    const ByteView page = bytes_of(stripe.slots[0]);
    const auto begin = static_cast<std::ptrdiff_t>(layout.segment_offset(from, 2));
    EXPECT_TRUE(std::equal(there.begin() + begin, there.end(), page.begin() + begin, page.end()));
  }
}

TEST_F(ServerTest, a_column_that_cannot_be_fetched_is_not_written) {
  fabric = std::make_unique<NearFabric>(loop, *owner,
                                        [this](transfer::OpId op, Code code) { server->moved(op, code); });
  start();
  server->host_up(host, false);
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  for (const std::uint64_t piece : {0u, 2u, 3u}) {
    fabric->fail_in = piece;
    EXPECT_EQ(put(stripe, 4), Code::unreachable);
    EXPECT_EQ(mount().volume().stats().slots_live, 0u);
    EXPECT_EQ(server->puts(), 0u);
  }
  EXPECT_EQ(put(stripe, 4), Code::ok);
}

TEST_F(ServerTest, wrong_columns_are_not_put) {
  start_with_host();
  const Stripe good = stripe_of(1, 10, 2, {8, 8, 8});
  // A byte of a part, of another part of the page, and of parity.
  const std::uint64_t offset = good.shape.page_offset(4, 1);
  bytes_of(good.slots[1])[offset] ^= std::byte{1};
  EXPECT_EQ(put(good, 4), Code::corrupt);
  EXPECT_EQ(put(good, 3), Code::ok);
  bytes_of(good.slots[1])[offset] ^= std::byte{1};
  EXPECT_EQ(put(good, 4), Code::ok);
  bytes_of(good.slots[3])[good.shape.column_offset(10, 2)] ^= std::byte{1};
  EXPECT_EQ(put(good, 10), Code::corrupt);
  EXPECT_EQ(put(good, 9), Code::invalid);  // zeros; stored nowhere
  EXPECT_EQ(put(good, 12), Code::invalid);
  Stripe bad = good;
  bad.put.code.crcs.pop_back();
  EXPECT_EQ(put(bad, 0), Code::invalid);
  bad = good;
  bad.put.code.data_columns = 0;
  EXPECT_EQ(put(bad, 0), Code::invalid);
  bad = good;
  bad.slots[4] = take(1, kv::SlotState::filling);  // too short for parity
  EXPECT_EQ(put(bad, 11), Code::stale);
  EXPECT_EQ(mount().volume().stats().slots_live, 2u);
}

TEST_F(ServerTest, di_meta_gets_the_volume_before_the_inventory_and_the_code_with_it) {
  start_with_host();
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  ASSERT_EQ(put(stripe, 7), Code::ok);
  ASSERT_EQ(put(stripe, 11), Code::ok);
  sent.clear();
  server->meta_up(meta);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  ASSERT_EQ(sent.front().number, wire::meta_volumes::number);
  const Volume::Stats stats = mount().volume().stats();
  const auto volumes = got<wire::meta_volumes>()[0].volumes;
  ASSERT_EQ(volumes.size(), 1u);
  EXPECT_EQ(volumes[0].state, 0u);
  EXPECT_EQ(volumes[0].bytes_total, stats.bytes_total);
  EXPECT_EQ(volumes[0].bytes_free, stats.bytes_total - stats.slot_bytes_live);
  const auto shards = got<wire::meta_inventory>()[0].shards;
  ASSERT_EQ(shards.size(), 2u);
  for (const wire::ShardRecord& shard : shards) {
    EXPECT_EQ(shard.pages, stripe.put.pages);
    EXPECT_EQ(shard.code, stripe.put.code);
  }
}

TEST_F(ServerTest, one_column_of_a_stripe_can_be_freed) {
  start_with_host();
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  for (const std::uint32_t column : {0u, 7u, 11u}) ASSERT_EQ(put(stripe, column), Code::ok);
  say(meta, wire::kv_free{{1, 1}, {7}});  // not one column for each stripe
  EXPECT_EQ(server->counters().malformed, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 3u);
  say(meta, wire::kv_free{{1, 1}, {7, 8}});
  EXPECT_EQ(mount().volume().stats().slots_live, 2u);
  wire::kv_read want = read_of(1, 1, take(8, kv::SlotState::filling));
  want.column = 7;
  EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::not_found));
  say(meta, wire::kv_free{{1}, {}});
  EXPECT_EQ(mount().volume().stats().slots_live, 0u);
}

TEST_F(ServerTest, a_damaged_column_is_reported_and_dropped_by_whoever_reads_it) {
  start_with_host();
  server->meta_up(meta);
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  ASSERT_EQ(put(stripe, 10), Code::ok);
  ASSERT_EQ(put(stripe, 11), Code::ok);
  restart();  // so that payloads are compared
  disk->flip_bit(payload_at(mount().volume(), 0) + 5000, 3);
  server->host_up(host, true);
  server->meta_up(meta);
  wire::kv_read want = read_of(1, 1, take(8, kv::SlotState::filling));
  want.column = 10;
  EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::corrupt));
  want.transfer = 2;
  want.column = 11;
  EXPECT_EQ(answers_to(want).back().code, 0u);
  const std::vector<wire::meta_read_failed> reports = {
      {1 << 8, 10, static_cast<std::uint16_t>(Code::corrupt), "di-kvd.store0", 9, 0}};
  EXPECT_EQ(got<wire::meta_read_failed>(), reports);
  EXPECT_EQ(server->counters().columns_dropped, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 1u);
}

// ---- scrub and check

TEST_F(ServerTest, check_counts_what_is_there_and_what_di_meta_does_not_know) {
  start_with_host();
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  std::optional<Server::Check> found;
  ASSERT_TRUE(server->check([&](const std::vector<Server::Check>& checks) { found = checks[0]; }).ok());
  ASSERT_TRUE(until([&] { return found.has_value(); }));
  EXPECT_EQ(found->slots, 3u);
  EXPECT_FALSE(found->told);
  EXPECT_EQ(server->counters().inventories, 0u);

  server->meta_up(meta);
  found.reset();
  ASSERT_TRUE(server->check([&](const std::vector<Server::Check>& checks) { found = checks[0]; }).ok());
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  say(meta, wire::meta_inventory_ack{0, {2}});
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->slots, 3u);
  EXPECT_EQ(found->orphans, 1u);
  EXPECT_TRUE(found->told);

  disk->flip_bit(mount().volume().geometry().segment_offset(0) + 100, 0);
  found.reset();
  ASSERT_TRUE(server->check([&](const std::vector<Server::Check>& checks) { found = checks[0]; }).ok());
  // di-meta goes away meanwhile: the check goes on without it.
  server->meta_lost(meta);
  ASSERT_TRUE(until([&] { return found.has_value(); }));
  EXPECT_EQ(server->counters().slots_dropped, 1u);
  EXPECT_FALSE(found->told);
  EXPECT_EQ(mount().volume().stats().slots_live, 1u);
}

}  // namespace
}  // namespace di::store
