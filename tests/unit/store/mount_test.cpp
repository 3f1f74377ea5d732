#include "store/mount.h"

#include <gtest/gtest.h>

#include "tests/unit/store/server_shelf.h"

namespace di::store {
namespace {

// Through a server, which is who has mounts.
using MountTest = ServerTest;

// Reads of stripe 2 on volume 1 fail too often.
void second_disk_fails(ServerTest& test) {
  for (std::uint64_t i = 0; i <= DiskHealth::errors_max; ++i) {
    test.more_disks[0]->fail_read_in = 0;
    wire::kv_read want = test.read_of(10 + i, 2, test.take(2, kv::SlotState::filling));
    want.volume = 1;
    EXPECT_EQ(test.answers_to(want).back().code, static_cast<std::uint16_t>(Code::io));
  }
  test.more_disks[0]->fail_read_in.reset();
  ASSERT_TRUE(test.until([&] { return test.mount(1).state() == DiskState::failed; }));
}

TEST_F(MountTest, full_volume_answers_no_space_until_stripes_are_freed) {
  start_with_host();
  const wire::SlotRef page = sealed_page(1, 8);
  std::vector<std::uint64_t> written;
  Code last = Code::ok;
  for (std::uint64_t stripe = 1; last == Code::ok; ++stripe) {
    wire::kv_put want = put_of(1, 8, page);  // the same bytes under many stripes
    want.stripe = stripe;
    const std::size_t before = got<wire::kv_put_done>().size();
    say(host, want);
    ASSERT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
    last = static_cast<Code>(got<wire::kv_put_done>().back().code);
    if (last == Code::ok) written.push_back(stripe);
  }
  EXPECT_EQ(last, Code::no_space);
  EXPECT_GT(written.size(), 10u);
  say(meta, wire::kv_free{{written[0], written[1], 12345}});
  EXPECT_EQ(server->counters().columns_freed, 2u);
  EXPECT_EQ(put(1000, 8), Code::ok);
}

TEST_F(MountTest, strict_put_is_acknowledged_after_a_flush) {
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  const std::uint64_t flushes = disk->flushes;
  ASSERT_EQ(put(1, 8), Code::ok);
  EXPECT_GT(disk->flushes, flushes);
  Rng rng(1);
  // The power goes at once: what was acknowledged is there.
  ASSERT_TRUE(until([&] { return mount().volume().clean(); }));
  server.reset();
  disk->power_loss(rng);
  auto volume = Volume::open(*disk);
  ASSERT_TRUE(volume.ok());
  EXPECT_TRUE((*volume)->read_begin(1, 0).ok());
}

// The answer to the first one was lost, or its host was: what it repeats is not durable before the flush.
TEST_F(MountTest, repetition_of_a_strict_put_is_acknowledged_after_a_flush_too) {
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  std::promise<void> flushes;
  before_flush = [gate = flushes.get_future().share()] { gate.wait(); };
  const wire::kv_put want = put_of(1, 8, sealed_page(1, 8));
  say(host, want);
  ASSERT_TRUE(until([&] { return mount().volume().stats().slots_live == 1; }));
  say(host, want);
  EXPECT_TRUE(got<wire::kv_put_done>().empty());
  flushes.set_value();
  ASSERT_TRUE(until([&] { return got<wire::kv_put_done>().size() == 2; }));
  ASSERT_TRUE(until([&] { return mount().volume().clean(); }));
  say(host, want);  // nothing is left to flush
  ASSERT_EQ(got<wire::kv_put_done>().size(), 3u);
  for (const wire::kv_put_done& done : got<wire::kv_put_done>()) EXPECT_EQ(done.code, 0u);
  EXPECT_EQ(server->counters().puts, 1u);
}

TEST_F(MountTest, repetition_of_a_strict_put_fails_when_the_flush_does) {
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  std::promise<void> flushes;
  before_flush = [gate = flushes.get_future().share()] { gate.wait(); };
  const wire::kv_put want = put_of(1, 8, sealed_page(1, 8));
  say(host, want);
  ASSERT_TRUE(until([&] { return mount().volume().stats().slots_live == 1; }));
  say(host, want);
  disk->fail_flush = true;
  flushes.set_value();
  ASSERT_TRUE(until([&] { return got<wire::kv_put_done>().size() == 2; }));
  for (const wire::kv_put_done& done : got<wire::kv_put_done>())
    EXPECT_EQ(done.code, static_cast<std::uint16_t>(Code::io));
  EXPECT_EQ(mount().volume().stats().slots_live, 0u);
}

TEST_F(MountTest, strict_put_fails_when_the_flush_does) {
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  disk->fail_flush = true;
  EXPECT_EQ(put(1, 8), Code::io);
  EXPECT_TRUE(mount().volume().broken());
  EXPECT_EQ(mount().volume().stats().slots_live, 0u) << "nobody knows of it";
  EXPECT_EQ(put(2, 8), Code::io);
}

// Reads that fail are counted where they fail; the look that finds too many of them takes the disk out of service.
TEST_F(MountTest, failing_disk_takes_no_more_puts_and_tells_di_meta) {
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put(1, 2), Code::ok);
  EXPECT_EQ(mount().state(), DiskState::good);
  const std::size_t told = got<wire::meta_volumes>().size();
  for (std::uint64_t i = 0; i <= DiskHealth::errors_max; ++i) {
    disk->fail_read_in = 0;
    EXPECT_EQ(read(10 + i, 1, take(2, kv::SlotState::filling)).back().code,
              static_cast<std::uint16_t>(Code::io));
  }
  disk->fail_read_in.reset();
  ASSERT_TRUE(until([&] { return mount().state() == DiskState::failed; }));
  EXPECT_EQ(mount().reason(), "errors");
  ASSERT_GT(got<wire::meta_volumes>().size(), told);
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(0).state, 2u);
  EXPECT_EQ(put(2, 2), Code::io);
  EXPECT_EQ(read(99, 1, take(2, kv::SlotState::filling)).back().code, 0u);  // reads go on
}

// F09.
TEST_F(MountTest, put_that_found_no_room_on_the_disk_leaves_its_slot_usable) {
  start_with_host();
  ASSERT_EQ(put(1, 2), Code::ok);
  disk->full = true;
  EXPECT_EQ(put(2, 2), Code::no_space);
  EXPECT_EQ(mount().volume().stats().slots_bad, 0u);
}

// ---- write budget

TEST_F(MountTest, put_above_the_budget_is_vetoed_and_a_repair_is_not) {
  Server::Options options;
  options.budget = {.endurance_bytes = 4 * mib, .days = 1, .amplification = 1};
  listen();
  start(options);
  server->host_up(host, true);
  server->meta_up(meta);
  EXPECT_FALSE(got<wire::meta_volumes>().back().volumes.at(0).spent);
  std::uint64_t stripe = 0;
  while (put(++stripe, 8) == Code::ok) ASSERT_LT(stripe, 10u);
  EXPECT_EQ(stripe, 5u);  // 0.9 MiB each
  EXPECT_EQ(static_cast<Code>(got<wire::kv_put_done>().back().code), Code::over_budget);
  EXPECT_EQ(server->counters().puts_over_budget, 1u);
  EXPECT_EQ(server->counters().puts_refused, 0u);
  EXPECT_EQ(mount().budget().vetoes(), 1u);
  EXPECT_GT(mount().budget().vetoed_bytes(), layout.page_bytes(8));
  EXPECT_GE(mount().budget().written_bytes(), 4 * layout.page_bytes(8));
  EXPECT_EQ(mount().stats().slots_live, 4u);
  EXPECT_EQ(mount().state(), DiskState::good);  // nothing is wrong with it
  const wire::VolumeState told = got<wire::meta_volumes>().back().volumes.at(0);
  EXPECT_TRUE(told.spent);
  EXPECT_EQ(told.state, 0u);
  const std::uint64_t written = mount().budget().written_bytes();
  wire::kv_put repair = put_of(stripe, 8, sealed_page(stripe, 8));
  repair.repair = true;
  const std::size_t before = got<wire::kv_put_done>().size();
  say(host, repair);
  ASSERT_TRUE(until([&] { return got<wire::kv_put_done>().size() > before; }));
  EXPECT_EQ(got<wire::kv_put_done>().back().code, 0u);
  EXPECT_GT(mount().budget().written_bytes(), written + layout.page_bytes(8));
  EXPECT_EQ(mount().budget().left_today_bytes(loop.monotonic_now()), 0u);
}

TEST_F(MountTest, budget_of_a_volume_is_its_own_and_outlives_the_process) {
  add_volumes(1);
  Server::Options options;
  options.budget = {.endurance_bytes = 2 * mib, .days = 1, .amplification = 1};
  listen();
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  for (const std::uint64_t stripe : {1u, 2u}) EXPECT_EQ(put_to(0, stripe, 8), Code::ok);
  EXPECT_EQ(put_to(0, 3, 8), Code::over_budget);
  EXPECT_EQ(put_to(1, 3, 8), Code::ok);
  EXPECT_TRUE(mount(0).spent());
  EXPECT_FALSE(mount(1).spent());
  const std::uint64_t written = mount(0).budget().written_bytes();
  bool stopped = false;
  server->stop([&] { stopped = true; });
  ASSERT_TRUE(until([&] { return stopped; }));
  server.reset();
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  EXPECT_GE(mount(0).budget().written_bytes(), written);
  EXPECT_EQ(put_to(0, 4, 8), Code::over_budget);
  EXPECT_EQ(put_to(1, 4, 8), Code::ok);
}

// It fills with time alone, and di-meta, which places nothing there meanwhile, has to hear of it.
TEST_F(MountTest, budget_that_has_grown_back_is_told_though_nothing_is_written) {
  constexpr std::uint64_t per_day = 100 * 1024 * mib;
  auto volume = Volume::open(*disk);
  ASSERT_TRUE(volume.ok());
  (*volume)->set_wear({per_day, per_day});
  const auto sync = (*volume)->sync_begin();
  ASSERT_TRUE(sync.has_value());
  for (const MetaWrite& write : sync->superblock) ASSERT_TRUE(disk->write(write.offset, write.bytes).ok());
  Server::Options options;
  options.budget = {.endurance_bytes = per_day,
                    .days = 1,
                    .amplification = 1,
                    .spent_part = 1 << 20,
                    .unspent_part = 1 << 19};
  start(options);
  server->meta_up(meta);
  EXPECT_TRUE(mount().spent());
  EXPECT_TRUE(got<wire::meta_volumes>().back().volumes.at(0).spent);
  ASSERT_TRUE(until([&] { return !got<wire::meta_volumes>().back().volumes.at(0).spent; }));
  EXPECT_FALSE(mount().spent());
  EXPECT_EQ(mount().budget().vetoes(), 0u);
}

TEST_F(MountTest, stop_writes_everything_behind) {
  start_with_host();
  for (std::uint64_t stripe = 1; stripe <= 5; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  bool stopped = false;
  server->stop([&] { stopped = true; });
  EXPECT_EQ(put(6, 2), Code::busy);
  ASSERT_TRUE(until([&] { return stopped; }));
  EXPECT_TRUE(mount().volume().clean());
  server.reset();
  auto volume = Volume::open(*disk);
  ASSERT_TRUE(volume.ok());
  EXPECT_EQ((*volume)->stats().recovered_by_header, 0u);
  EXPECT_EQ((*volume)->stats().slots_live, 5u);
}

// ---- several volumes

TEST_F(MountTest, message_goes_to_the_volume_that_it_names) {
  add_volumes(2);
  start_with_host();
  server->meta_up(meta);
  for (std::uint16_t volume = 0; volume < 3; ++volume) ASSERT_EQ(put_to(volume, 1 + volume, 2), Code::ok);
  EXPECT_EQ(put_to(3, 9, 2), Code::not_found);
  for (std::uint16_t volume = 0; volume < 3; ++volume) {
    EXPECT_EQ(mount(volume).stats().slots_live, 1u);
    const wire::SlotRef target = take(2, kv::SlotState::filling);
    wire::kv_read want = read_of(10 + volume, 1 + volume, target);
    want.volume = volume;
    EXPECT_EQ(answers_to(want).back().code, 0u);
    EXPECT_TRUE(std::ranges::equal(bytes_of(target), payload_of(layout, 1 + volume, 2)));
    want.transfer += 10;
    want.volume = static_cast<std::uint16_t>((volume + 1) % 3);
    EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::not_found));
  }
  const std::vector<wire::VolumeState> told = got<wire::meta_volumes>().back().volumes;
  ASSERT_EQ(told.size(), 3u);
  for (std::uint16_t volume = 0; volume < 3; ++volume) {
    EXPECT_EQ(told[volume].volume, volume);
    EXPECT_EQ(told[volume].state, 0u);
    EXPECT_GT(told[volume].bytes_total, 0u);
  }
  // A free names no volume.
  say(meta, wire::kv_free{{1, 2, 3}, {}});
  for (std::uint16_t volume = 0; volume < 3; ++volume) EXPECT_EQ(mount(volume).stats().slots_live, 0u);
}

TEST_F(MountTest, inventory_goes_through_all_volumes) {
  add_volumes(2);
  start_with_host();
  // The one in the middle is empty.
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_EQ(put_to(0, stripe, 1), Code::ok);
  for (std::uint64_t stripe = 4; stripe <= 5; ++stripe) ASSERT_EQ(put_to(2, stripe, 1), Code::ok);
  server->meta_up(meta);
  std::map<std::uint64_t, std::uint16_t> volume_of;
  std::size_t parts = 0;
  while (server->inventory_running()) {
    ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() > parts; }));
    const wire::meta_inventory part = got<wire::meta_inventory>().back();
    EXPECT_EQ(part.cursor, parts++);
    for (const wire::ShardRecord& shard : part.shards) volume_of[shard.stripe] = shard.volume;
    EXPECT_EQ(part.last, volume_of.size() == 6);
    // While it runs another column comes, where the list has been already.
    if (parts == 1) {
      ASSERT_EQ(put_to(0, 6, 1), Code::ok);
    }
    wire::meta_inventory_ack ack;
    ack.cursor = part.cursor;
    say(meta, ack);
  }
  const std::map<std::uint64_t, std::uint16_t> expected{{1, 0}, {2, 0}, {3, 0}, {4, 2}, {5, 2}, {6, 0}};
  EXPECT_EQ(volume_of, expected);
}

TEST_F(MountTest, failed_volume_is_out_of_service_alone) {
  add_volumes(1);
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put_to(0, 1, 2), Code::ok);
  ASSERT_EQ(put_to(1, 2, 2), Code::ok);
  ASSERT_NO_FATAL_FAILURE(second_disk_fails(*this));
  EXPECT_EQ(mount(0).state(), DiskState::good);
  const std::vector<wire::VolumeState> told = got<wire::meta_volumes>().back().volumes;
  EXPECT_EQ(told.at(0).state, 0u);
  EXPECT_EQ(told.at(1).state, 2u);
  EXPECT_EQ(put_to(1, 3, 2), Code::io);
  EXPECT_EQ(put_to(0, 3, 2), Code::ok);
  EXPECT_EQ(read(99, 1, take(2, kv::SlotState::filling)).back().code, 0u);
  // The node is alive as long as one of its disks is.
  const std::uint64_t before = looks;
  ASSERT_TRUE(until([&] { return looks > before; }));
}

TEST_F(MountTest, volume_that_is_cut_short_gives_up_what_lies_behind_its_end) {
  start_with_host();
  server->meta_up(meta);
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  std::vector<Read> slots_there;
  SlotAddress from;
  static_cast<void>(mount().volume().list(from, 100, slots_there));
  ASSERT_EQ(slots_there.size(), 3u);
  for (const Read& slot : slots_there) mount().read_end(slot);
  const Read& last = slots_there.back();
  ASSERT_TRUE(until([&] { return mount().volume().clean(); }));
  const std::uint64_t syncs = mount().syncs();
  // The header is still there, and one page of the payload.
  const std::uint64_t end = last.offset + last.slot_class.header_bytes + disk_align_bytes;
  Bytes image = disk->image();
  std::fill(image.begin() + static_cast<std::ptrdiff_t>(end), image.end(), std::byte{0});
  disk->set_image(std::move(image));
  cut_at = end;
  ASSERT_TRUE(until([&] { return mount().state() == DiskState::failed; }));
  EXPECT_EQ(mount().reason(), "short");
  const auto failed = got<wire::meta_read_failed>();
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].page, last.stripe << 8);
  EXPECT_EQ(failed[0].code, static_cast<std::uint16_t>(Code::not_found));
  EXPECT_EQ(server->counters().columns_dropped, 1u);
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(0).state, 2u);
  for (const Read& slot : slots_there) {
    const wire::SlotRef target = take(2, kv::SlotState::filling);
    const Code expected = slot.stripe == last.stripe ? Code::not_found : Code::ok;
    EXPECT_EQ(read(10 + slot.stripe, slot.stripe, target).back().code, static_cast<std::uint16_t>(expected));
    give_back(target);
  }
  EXPECT_EQ(put(4, 2), Code::io);
  // It does not come back with a restart either.
  ASSERT_TRUE(until([&] { return mount().syncs() > syncs && mount().volume().clean(); }));
  cut_at.reset();
  restart();
  EXPECT_EQ(mount().stats().slots_live, 2u);
}

TEST_F(MountTest, volume_whose_file_was_removed_is_read_and_takes_nothing) {
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put(1, 2), Code::ok);
  cut_at = UINT64_MAX;
  ASSERT_TRUE(until([&] { return mount().state() == DiskState::failed; }));
  EXPECT_EQ(mount().reason(), "removed");
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(0).state, 2u);
  EXPECT_EQ(put(2, 2), Code::io);
  EXPECT_EQ(read(10, 1, take(2, kv::SlotState::filling)).back().code, static_cast<std::uint16_t>(Code::ok));
}

TEST_F(MountTest, read_behind_the_end_finds_at_once_that_the_volume_is_short) {
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put(1, 2), Code::ok);
  cut_at = 4 * disk_align_bytes;
  disk->short_read_in = 0;
  EXPECT_EQ(read(10, 1, take(2, kv::SlotState::filling)).back().code, static_cast<std::uint16_t>(Code::io));
  EXPECT_EQ(mount().state(), DiskState::failed);
  ASSERT_EQ(got<wire::meta_read_failed>().size(), 1u);
  EXPECT_EQ(got<wire::meta_read_failed>()[0].code, static_cast<std::uint16_t>(Code::not_found));
  EXPECT_EQ(mount().stats().slots_live, 0u);
}

TEST_F(MountTest, volume_that_failed_comes_back_when_it_is_opened_again) {
  add_volumes(1);
  start_with_host();
  server->meta_up(meta);
  ASSERT_EQ(put_to(0, 1, 2), Code::ok);
  ASSERT_EQ(put_to(1, 2, 2), Code::ok);
  const auto never = [] { ADD_FAILURE() << "closed"; };
  EXPECT_EQ(server->volume_close(1, never).error().code, Code::busy) << "it serves";
  EXPECT_EQ(server->volume_close(2, never).error().code, Code::not_found);
  more_disks[0]->fail_read_in = 0;
  ASSERT_NO_FATAL_FAILURE(second_disk_fails(*this));
  // One read is under way: the disk is not let go of before it has ended.
  std::promise<void> go;
  std::shared_future<void> gate = go.get_future().share();
  before_read = [gate] { gate.wait(); };
  wire::kv_read want = read_of(99, 2, take(2, kv::SlotState::filling));
  want.volume = 1;
  say(host, want);
  bool closed = false;
  ASSERT_TRUE(server->volume_close(1, [&] { closed = true; }).ok());
  EXPECT_EQ(server->volume_close(1, never).error().code, Code::busy) << "it is being closed";
  loop.run_ready();
  EXPECT_FALSE(closed);
  EXPECT_TRUE(mount(1).is_open());
  go.set_value();
  ASSERT_TRUE(until([&] { return closed; }));
  before_read = {};
  EXPECT_EQ(got<wire::kv_read_done>().back().transfer, 99u);
  EXPECT_FALSE(mount(1).is_open());
  EXPECT_EQ(put_to(1, 3, 2), Code::io);
  wire::kv_read closed_read = read_of(100, 2, take(2, kv::SlotState::filling));
  closed_read.volume = 1;
  EXPECT_EQ(answers_to(closed_read).back().code, static_cast<std::uint16_t>(Code::not_found));
  EXPECT_EQ(put_to(0, 3, 2), Code::ok) << "the other one did not notice";

  const std::uint64_t errors = mount(1).figures()->read_errors.load();
  EXPECT_GT(errors, DiskHealth::errors_max);
  EXPECT_FALSE(mount(1).refused()) << "it was open";
  // Whoever shows why it is out of service hears of each reason.
  Mount::Backing without;
  without.refused = Error{Code::corrupt, 0, "no volume"};
  const int changes = volume_changes;
  server->volume_open(1, std::move(without));
  EXPECT_EQ(mount(1).refused()->message, "no volume");
  EXPECT_EQ(volume_changes, changes + 1);
  server->volume_open(1, backing_of(*more_disks[0], 1, mount(1).figures()));
  EXPECT_FALSE(mount(1).refused());
  EXPECT_GT(volume_changes, changes + 1);
  EXPECT_EQ(mount(1).state(), DiskState::good);
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(1).state, 0u);
  EXPECT_TRUE(server->inventory_running()) << "di-meta hears what it holds";
  EXPECT_EQ(mount(1).stats().slots_live, 1u);
  EXPECT_EQ(mount(1).figures()->read_errors.load(), errors);
  const std::uint64_t before = looks;
  ASSERT_TRUE(until([&] { return looks > before + 1; }));
  EXPECT_EQ(mount(1).state(), DiskState::good) << "what was counted before is over";
  want = read_of(101, 2, take(2, kv::SlotState::filling));
  want.volume = 1;
  EXPECT_EQ(answers_to(want).back().code, 0u);
  EXPECT_EQ(put_to(1, 4, 2), Code::ok);
}

// Its reads had all the places of the store.
TEST_F(MountTest, volume_whose_disk_does_not_answer_leaves_places_to_the_others) {
  add_volumes(1);
  listen();
  Server::Options options;
  options.transfers_max = 16;
  start(options);
  server->host_up(host, true);
  ASSERT_EQ(put_to(0, 1, 2), Code::ok);
  ASSERT_EQ(put_to(1, 2, 2), Code::ok);
  std::promise<void> go;
  before_read = [gate = go.get_future().share()] { gate.wait(); };
  const auto busy = [&](std::uint64_t transfer, std::uint16_t volume) {
    wire::kv_read want = read_of(transfer, volume + 1u, take(2, kv::SlotState::filling));
    want.volume = volume;
    const std::size_t before = got<wire::kv_read_done>().size();
    say(host, want);
    return got<wire::kv_read_done>().size() > before &&
           got<wire::kv_read_done>().back().code == static_cast<std::uint16_t>(Code::busy);
  };
  std::uint64_t reads = 0;
  while (!busy(++reads, 1)) ASSERT_LT(reads, options.transfers_max) << "it has all of them";
  EXPECT_GT(reads, options.transfers_max / 2);
  EXPECT_FALSE(busy(++reads, 0));
  go.set_value();
  ASSERT_TRUE(until([&] { return got<wire::kv_read_done>().size() == reads; }));
  before_read = {};
  EXPECT_FALSE(busy(++reads, 1)) << "they are given back";
  ASSERT_TRUE(until([&] { return got<wire::kv_read_done>().size() == reads; }));
}

TEST_F(MountTest, full_volume_refuses_and_the_other_one_takes) {
  add_volumes(1);
  start_with_host();
  disk->full = true;
  EXPECT_EQ(put_to(0, 1, 2), Code::no_space);
  EXPECT_EQ(put_to(1, 1, 2), Code::ok);
  EXPECT_EQ(mount(1).stats().slots_live, 1u);
}

TEST_F(MountTest, failed_flush_of_one_volume_fails_only_its_puts) {
  add_volumes(1);
  listen();
  Server::Options options;
  options.strict = true;
  start(options);
  server->host_up(host, true);
  ASSERT_TRUE(until([&] { return server->arenas() == 1; }));
  disk->fail_flush = true;
  EXPECT_EQ(put_to(0, 1, 2), Code::io);
  EXPECT_TRUE(mount(0).volume().broken());
  EXPECT_EQ(put_to(1, 1, 2), Code::ok);
  EXPECT_FALSE(mount(1).volume().broken());
}

TEST_F(MountTest, volume_that_could_not_be_opened_does_not_hold_up_the_others) {
  add_volumes(2);
  // The last one and the one in the middle have nothing that could be a volume.
  more_disks[0]->set_image(Bytes(24 * mib));
  more_disks[1]->set_image(Bytes(24 * mib));
  may_be_refused = true;
  start_with_host();
  EXPECT_FALSE(mount(1).is_open());
  EXPECT_TRUE(mount(1).refused());
  EXPECT_FALSE(mount(0).refused());
  EXPECT_EQ(put_to(1, 1, 2), Code::io);
  EXPECT_EQ(put_to(0, 1, 2), Code::ok);
  server->meta_up(meta);
  const std::vector<wire::VolumeState> told = got<wire::meta_volumes>().back().volumes;
  ASSERT_EQ(told.size(), 3u);
  EXPECT_EQ(told[0].state, 0u);
  EXPECT_EQ(told[1].state, 2u);
  EXPECT_EQ(told[1].bytes_total, 0u);
  wire::kv_read want = read_of(5, 1, take(2, kv::SlotState::filling));
  want.volume = 2;
  EXPECT_EQ(answers_to(want).back().code, static_cast<std::uint16_t>(Code::not_found));
  std::optional<std::vector<Server::Check>> found;
  ASSERT_TRUE(server->check([&](const std::vector<Server::Check>& checks) { found = checks; }).ok());
  std::size_t parts = 0;
  while (server->inventory_running()) {
    ASSERT_TRUE(until([&] { return got<wire::meta_inventory>().size() > parts; }));
    wire::meta_inventory_ack ack;
    ack.cursor = got<wire::meta_inventory>()[parts++].cursor;
    say(meta, ack);
  }
  ASSERT_TRUE(found);
  EXPECT_EQ(found->at(0).slots, 1u);
  EXPECT_EQ(found->at(1).slots, 0u);
  restart();
  EXPECT_EQ(mount(0).stats().slots_live, 1u);
}

TEST_F(MountTest, store_of_one_volume_that_could_not_be_opened_is_up_and_says_so) {
  disk->set_image(Bytes(24 * mib));
  may_be_refused = true;
  start_with_host();
  server->meta_up(meta);
  EXPECT_EQ(got<wire::meta_volumes>().back().volumes.at(0).state, 2u);
  EXPECT_EQ(put(1, 2), Code::io);
  ASSERT_TRUE(until([&] { return !got<wire::meta_inventory>().empty(); }));
  EXPECT_TRUE(got<wire::meta_inventory>().back().last);
  EXPECT_EQ(looks, 0u);  // so that it is not ready
  restart();
}

// ---- scrub and check

TEST_F(MountTest, scrub_reads_every_column_and_reports_the_damaged_one) {
  start_with_host();
  server->meta_up(meta);
  const Stripe stripe = stripe_of(1, 10, 2, {8, 8, 8});
  for (std::uint32_t i = 0; i < stripe.shape.columns_stored(); ++i) {
    ASSERT_EQ(put(stripe, stripe.shape.stored_column(i)), Code::ok);
  }
  ASSERT_EQ(put(2, 8), Code::ok);
  mount().scrub().start();
  ASSERT_TRUE(until([&] { return !mount().scrub().pass().running; }));
  EXPECT_EQ(mount().scrub().pass().slots, 12u);
  EXPECT_EQ(mount().scrub().pass().slots_done, 12u);
  EXPECT_EQ(mount().scrub().pass().corrupt, 0u);
  EXPECT_TRUE(got<wire::meta_read_failed>().empty());
  EXPECT_GT(beats, 12);

  // The second column in the first segment of its class; its header stays good.
  const SlotClass slot_class = slot_class_of(layout, stripe.shape.column_bytes(10));
  disk->flip_bit(payload_at(mount().volume(), 0) + slot_class.slot_bytes + 70000, 6);
  mount().scrub().start();
  ASSERT_TRUE(until([&] { return !mount().scrub().pass().running; }));
  EXPECT_EQ(mount().scrub().pass().number, 2u);
  EXPECT_EQ(mount().scrub().pass().slots_done, 12u);
  EXPECT_EQ(mount().scrub().pass().corrupt, 1u);
  ASSERT_EQ(got<wire::meta_read_failed>().size(), 1u);
  EXPECT_EQ(got<wire::meta_read_failed>()[0].page >> 8, 1u);
  EXPECT_EQ(mount().volume().stats().slots_live, 11u);
  // Read twice, and one column.
  EXPECT_EQ(mount().figures()->corrupt.load(), 1u);
  EXPECT_EQ(mount().volume().stats().reading, 0u);

  // What cannot be read stays: the next reading may do better.
  disk->fail_read_in = 0;
  mount().scrub().start();
  ASSERT_TRUE(until([&] { return !mount().scrub().pass().running; }));
  EXPECT_EQ(mount().scrub().pass().unreadable, 0u);  // the second reading did
  EXPECT_EQ(mount().volume().stats().slots_live, 11u);
}

// Every bad column is read twice by a scrub; the limit is one of columns.
TEST_F(MountTest, scrub_that_finds_as_many_bad_columns_as_a_good_disk_may_have_leaves_it_in_service) {
  start_with_host();
  server->meta_up(meta);
  constexpr std::uint64_t bad = DiskHealth::corrupt_max + 1;
  for (std::uint64_t stripe = 1; stripe <= bad; ++stripe) ASSERT_EQ(put(stripe, 2), Code::ok);
  std::vector<Read> columns;
  SlotAddress from;
  static_cast<void>(mount().volume().list(from, 100, columns));
  ASSERT_EQ(columns.size(), bad);
  for (const Read& slot : columns) mount().read_end(slot);
  const auto damage = [&](const Read& slot) {
    disk->flip_bit(slot.offset + slot.slot_class.header_bytes + 77, 3);
  };
  const auto scrub_to_the_end = [&] {
    mount().scrub().start();
    EXPECT_TRUE(until([&] { return !mount().scrub().pass().running; }));
    return mount().scrub().pass().corrupt;
  };
  for (std::size_t i = 0; i < DiskHealth::corrupt_max; ++i) damage(columns[i]);
  EXPECT_EQ(scrub_to_the_end(), DiskHealth::corrupt_max);
  EXPECT_EQ(mount().figures()->corrupt.load(), DiskHealth::corrupt_max);
  const std::uint64_t before = looks;
  ASSERT_TRUE(until([&] { return looks > before; }));
  EXPECT_EQ(mount().state(), DiskState::good);
  damage(columns.back());
  EXPECT_EQ(scrub_to_the_end(), 1u);
  ASSERT_TRUE(until([&] { return mount().state() == DiskState::failed; }));
  EXPECT_EQ(mount().reason(), "corrupt");
}

}  // namespace
}  // namespace di::store
