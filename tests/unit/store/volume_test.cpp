#include "store/volume.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <set>

#include "base/file.h"
#include "tests/unit/store/shelf.h"

namespace di::store {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

TEST(Volume, put_is_read_back) {
  Shelf shelf(32 * mib, 4 * mib);
  for (const std::uint32_t blocks : {1u, 3u, 8u}) {
    ASSERT_TRUE(shelf.put(100 + blocks, blocks).ok());
    const auto bytes = shelf.get(100 + blocks);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    EXPECT_EQ(*bytes, payload_of(shelf.layout, 100 + blocks, blocks));
  }
  EXPECT_EQ(shelf.get(999).error().code, Code::not_found);
  EXPECT_EQ(shelf.get(101, 1).error().code, Code::not_found);
  EXPECT_EQ(shelf.put(101, 1).error().code, Code::exists);
  const Volume::Stats stats = shelf.volume->stats();
  EXPECT_EQ(stats.slots_live, 3u);
  EXPECT_EQ(stats.payload_bytes_live,
            shelf.layout.page_bytes(1) + shelf.layout.page_bytes(3) + shelf.layout.page_bytes(8));
  EXPECT_EQ(stats.segments_bound, 3u);  // three classes: 1, 4 and 8 blocks
  EXPECT_EQ(stats.writing, 0u);
  EXPECT_EQ(stats.reading, 0u);
}

TEST(Volume, both_layouts_of_the_specification_fit) {
  for (const auto& [layout, segment_bytes] :
       {std::pair{*kv::layout_mla("mla-bf16-1", 64, 61, 1152), 16 * mib},
        std::pair{kv::layout_v41(), 4 * mib}, std::pair{*kv::layout_mla("mla-f32-1", 32, 8, 128), 4 * mib}}) {
    Shelf shelf(80 * mib, segment_bytes, layout);
    const std::uint32_t blocks = layout.page_blocks();
    ASSERT_TRUE(shelf.put(1, blocks).ok());
    shelf.reopen();
    const auto bytes = shelf.get(1);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    EXPECT_EQ(*bytes, payload_of(layout, 1, blocks));
  }
}

TEST(Volume, page_that_fits_no_segment_is_unsupported) {
  Shelf shelf(32 * mib, 4 * mib, *kv::layout_mla("mla-bf16-1", 64, 61, 1152));  // 4.3 MiB pages
  EXPECT_EQ(shelf.put(1, 1).error().code, Code::unsupported);
}

TEST(Volume, full_volume_answers_no_space_and_takes_again_after_a_free) {
  Shelf shelf(16 * mib, 4 * mib);
  std::uint64_t stripe = 1;
  Status last;
  while ((last = shelf.put(stripe, 8)).ok()) ++stripe;
  EXPECT_EQ(last.error().code, Code::no_space);
  const std::uint64_t count = stripe - 1;
  EXPECT_EQ(count, shelf.volume->geometry().segments *
                       (4 * mib / slot_class_of(shelf.layout, shelf.layout.page_bytes(8)).slot_bytes));
  EXPECT_EQ(shelf.volume->free(1), 1u);
  EXPECT_EQ(shelf.volume->free(1), 0u);
  EXPECT_TRUE(shelf.put(stripe, 8).ok());
  EXPECT_EQ(shelf.put(stripe + 1, 8).error().code, Code::no_space);
  // Nothing of the live ones was touched.
  for (std::uint64_t live = 2; live <= stripe; ++live) {
    const auto bytes = shelf.get(live);
    ASSERT_TRUE(bytes.ok()) << live;
    EXPECT_EQ(*bytes, payload_of(shelf.layout, live, 8));
  }
}

TEST(Volume, empty_segment_takes_another_class) {
  Shelf shelf(10 * mib, 4 * mib);
  ASSERT_EQ(shelf.volume->geometry().segments, 2u);
  std::uint64_t stripe = 1;
  while (shelf.put(stripe, 8).ok()) ++stripe;
  EXPECT_EQ(shelf.put(1000, 1).error().code, Code::no_space);
  for (std::uint64_t old = 1; old < stripe; ++old) EXPECT_EQ(shelf.volume->free(old), 1u);
  ASSERT_TRUE(shelf.put(1000, 1).ok());
  // The headers and records of the earlier class, of which nothing was written behind, do not count.
  shelf.reopen();
  EXPECT_TRUE(shelf.get(1000).ok());
  for (const std::uint64_t seen : shelf.stripes()) EXPECT_TRUE(seen == 1000 || seen < stripe);
}

// F04: nothing of the longer slots that were there before shows among the shorter ones, after a stop and
// after a kill.
TEST(Volume, volume_filled_anew_with_another_class_has_that_and_nothing_else) {
  for (const bool kill : {false, true}) {
    SCOPED_TRACE(kill ? "kill" : "stop");
    Shelf shelf(24 * mib, 4 * mib);
    std::uint64_t old = 0;
    while (shelf.put(old + 1, 8).ok()) ++old;
    shelf.sync_until_clean();
    for (std::uint64_t stripe = 1; stripe <= old; ++stripe) ASSERT_EQ(shelf.volume->free(stripe), 1u);
    shelf.sync_until_clean();
    std::vector<std::uint64_t> live;
    while (shelf.put(1000 + live.size(), 1).ok()) live.push_back(1000 + live.size());
    EXPECT_GT(live.size(), 3 * old);
    if (!kill) shelf.sync_until_clean();
    shelf.reopen();
    EXPECT_EQ(shelf.stripes(), live);
    EXPECT_EQ(shelf.volume->stats().dropped_torn, 0u);
    for (const std::uint64_t stripe : live)
      ASSERT_EQ(*shelf.get(stripe), payload_of(shelf.layout, stripe, 1));
    for (std::uint64_t stripe = 1; stripe <= old; ++stripe) {
      EXPECT_EQ(shelf.volume->read_begin(stripe, 0).error().code, Code::not_found);
    }
  }
}

// F06: what is counted as used goes down with every removal, not only with what is thrown out for want of room.
TEST(Volume, filled_by_half_and_emptied_again_and_again_it_has_all_of_its_room) {
  Shelf shelf(24 * mib, 4 * mib);
  std::uint64_t stripe = 0;
  while (shelf.put(stripe + 1, 8).ok()) ++stripe;
  const std::uint64_t room = stripe;
  for (std::uint64_t old = 1; old <= room; ++old) ASSERT_EQ(shelf.volume->free(old), 1u);
  for (int cycle = 0; cycle < 20; ++cycle) {
    const std::uint64_t first = stripe + 1;
    const std::uint32_t blocks = cycle % 2 == 0 ? 8 : 3;  // of two lengths by turns
    for (std::uint64_t i = 0; i < room / 2; ++i) ASSERT_TRUE(shelf.put(++stripe, blocks).ok()) << cycle;
    EXPECT_EQ(shelf.volume->stats().payload_bytes_live, room / 2 * shelf.layout.page_bytes(blocks));
    for (std::uint64_t old = first; old <= stripe; ++old) ASSERT_EQ(shelf.volume->free(old), 1u);
    EXPECT_EQ(shelf.volume->stats().payload_bytes_live, 0u);
    EXPECT_EQ(shelf.volume->stats().slots_live, 0u);
  }
  for (std::uint64_t i = 0; i < room; ++i) ASSERT_TRUE(shelf.put(++stripe, 8).ok()) << i;
  EXPECT_EQ(shelf.put(stripe + 1, 8).error().code, Code::no_space);
}

// F07: a kill forgets nothing of what is used, and it takes no more than it did.
TEST(Volume, after_a_kill_it_has_the_room_that_was_left) {
  Shelf shelf(24 * mib, 4 * mib);
  std::uint64_t stripe = 0;
  while (shelf.put(stripe + 1, 8).ok()) ++stripe;
  const std::uint64_t room = stripe;
  for (std::uint64_t old = room * 4 / 5 + 1; old <= room; ++old) ASSERT_EQ(shelf.volume->free(old), 1u);
  shelf.sync_until_clean();                  // or what was freed may be there again
  ASSERT_TRUE(shelf.put(++stripe, 8).ok());  // of which no table on the disk knows
  const Volume::Stats before = shelf.volume->stats();
  EXPECT_EQ(before.slots_live, room * 4 / 5 + 1);
  shelf.reopen();
  EXPECT_EQ(shelf.volume->stats().payload_bytes_live, before.payload_bytes_live);
  std::uint64_t more = 0;
  while (shelf.put(++stripe, 8).ok()) ++more;
  EXPECT_EQ(more, room - before.slots_live);
  for (std::uint64_t old = 1; old <= room * 4 / 5; ++old)
    ASSERT_EQ(*shelf.get(old), payload_of(shelf.layout, old, 8)) << old;
}

TEST(Volume, clean_stop_leaves_nothing_to_look_at) {
  Shelf shelf(32 * mib, 4 * mib);
  for (std::uint64_t stripe = 1; stripe <= 10; ++stripe) ASSERT_TRUE(shelf.put(stripe, 2).ok());
  EXPECT_FALSE(shelf.volume->clean());
  shelf.sync_until_clean();
  EXPECT_EQ(shelf.volume->stats().segments_open, 0u);
  shelf.reopen();
  EXPECT_EQ(shelf.volume->stats().recovered_by_header, 0u);
  EXPECT_EQ(shelf.volume->stats().epoch, 2u);
  EXPECT_EQ(shelf.stripes().size(), 10u);
}

TEST(Volume, kill_before_any_sync_loses_nothing) {
  Shelf shelf(32 * mib, 4 * mib);
  for (std::uint64_t stripe = 1; stripe <= 10; ++stripe) ASSERT_TRUE(shelf.put(stripe, 2).ok());
  shelf.reopen();
  EXPECT_EQ(shelf.volume->stats().recovered_by_header, 10u);
  EXPECT_EQ(shelf.stripes().size(), 10u);
  shelf.sync_until_clean();
  shelf.reopen();
  EXPECT_EQ(shelf.volume->stats().recovered_by_header, 0u);
  EXPECT_EQ(shelf.stripes().size(), 10u);
}

// F03, across a restart.
TEST(Volume, freed_slot_stays_free_after_a_sync) {
  Shelf shelf(32 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  ASSERT_TRUE(shelf.put(2, 8).ok());
  shelf.volume->free(1);
  // The segment is still in the open list: its header is read, and is not newer than the record.
  ASSERT_TRUE(shelf.sync().ok());
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), std::vector<std::uint64_t>{2});
}

// F11, at the store.
TEST(Volume, slot_being_read_is_not_reused_until_the_read_ends) {
  Shelf shelf(16 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  const auto read = shelf.volume->read_begin(1, 0);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(shelf.volume->free(1), 1u);
  EXPECT_EQ(shelf.volume->read_begin(1, 0).error().code, Code::not_found);
  std::uint64_t stripe = 2;
  while (shelf.put(stripe, 8).ok()) ++stripe;
  EXPECT_EQ(*shelf.get(*read), payload_of(shelf.layout, 1, 8));
  shelf.volume->read_end(*read);
  EXPECT_TRUE(shelf.put(stripe, 8).ok());
}

// Whoever finds it bad speaks of what was there: a free and another write may have come in between.
TEST(Volume, read_of_a_column_that_was_written_anew_is_not_of_what_is_held) {
  Shelf shelf(16 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  const auto read = shelf.volume->read_begin(1, 0);
  ASSERT_TRUE(read.ok());
  EXPECT_TRUE(shelf.volume->holds(*read));
  shelf.volume->free(1);
  EXPECT_FALSE(shelf.volume->holds(*read));
  ASSERT_TRUE(shelf.put(1, 8).ok());  // beside it
  EXPECT_FALSE(shelf.volume->holds(*read));
  shelf.volume->read_end(*read);
  shelf.volume->free(1);
  ASSERT_TRUE(shelf.put(1, 8).ok());  // in the same slot
  EXPECT_FALSE(shelf.volume->holds(*read));
}

TEST(Volume, column_being_written_exists_and_is_not_readable) {
  Shelf shelf(16 * mib, 4 * mib);
  const auto put = shelf.volume->put_begin(shard_of(shelf.layout, 1, 8));
  ASSERT_TRUE(put.ok());
  EXPECT_EQ(shelf.put(1, 8).error().code, Code::exists);
  EXPECT_EQ(shelf.get(1).error().code, Code::not_found);
  EXPECT_TRUE(shelf.volume->put_end(*put, shelf.run(*put, 8)));
  EXPECT_TRUE(shelf.get(1).ok());
}

// The free of a put that was given up came while its column was written, found nothing, and the column stayed.
TEST(Volume, column_freed_while_it_is_written_does_not_stay) {
  Shelf shelf(16 * mib, 4 * mib);
  const auto freed = shelf.volume->put_begin(shard_of(shelf.layout, 1, 8));
  const auto other = shelf.volume->put_begin(shard_of(shelf.layout, 2, 8));
  ASSERT_TRUE(freed.ok() && other.ok());
  EXPECT_EQ(shelf.volume->free(1, 7), 0u);  // another column
  EXPECT_EQ(shelf.volume->free(2, 7), 0u);
  EXPECT_EQ(shelf.volume->free(1), 0u);
  EXPECT_FALSE(shelf.volume->put_end(*freed, shelf.run(*freed, 8)));
  EXPECT_TRUE(shelf.volume->put_end(*other, shelf.run(*other, 8)));
  EXPECT_EQ(shelf.get(1).error().code, Code::not_found);
  EXPECT_EQ(shelf.volume->stats().slots_live, 1u);
  EXPECT_EQ(shelf.volume->stats().writing, 0u);
  EXPECT_TRUE(shelf.put(1, 8).ok());
  EXPECT_EQ(shelf.volume->free(1), 1u);
  ASSERT_TRUE(shelf.sync().ok());
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), std::vector<std::uint64_t>{2});
}

TEST(Volume, payload_that_does_not_match_is_not_written) {
  Shelf shelf(16 * mib, 4 * mib);
  const auto put = shelf.volume->put_begin(shard_of(shelf.layout, 1, 8));
  ASSERT_TRUE(put.ok());
  const PutOutcome outcome = shelf.run(*put, 7);  // another page's bytes
  EXPECT_EQ(outcome.status.error().code, Code::corrupt);
  EXPECT_FALSE(outcome.slot_touched);
  shelf.volume->put_end(*put, outcome);
  EXPECT_EQ(shelf.get(1).error().code, Code::not_found);
  EXPECT_EQ(shelf.volume->stats().slots_bad, 0u);
  EXPECT_TRUE(shelf.put(1, 8).ok());
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), std::vector<std::uint64_t>{1});
}

TEST(Volume, failed_slot_write_is_an_error_and_its_slot_is_left_alone) {
  Shelf shelf(16 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  shelf.disk.fail_write_in = 0;
  EXPECT_EQ(shelf.put(2, 8).error().code, Code::io);
  EXPECT_EQ(shelf.volume->stats().slots_bad, 1u);
  EXPECT_FALSE(shelf.volume->broken());
  EXPECT_TRUE(shelf.put(2, 8).ok());
  EXPECT_EQ(*shelf.get(2), payload_of(shelf.layout, 2, 8));
}

// Tears the slot write at each 4 KiB and kills the process there.
TEST(Volume, torn_slot_write_is_found_at_restart) {
  const std::uint32_t blocks = 2;
  const kv::Layout layout = kv::layout_v41();
  const std::uint64_t bytes =
      slot_class_of(layout, layout.page_bytes(blocks)).header_bytes + layout.page_bytes(blocks);
  for (std::uint64_t torn = 0; torn <= bytes; torn += 4096) {
    Shelf shelf(4 * mib, 512 << 10);
    ASSERT_TRUE(shelf.put(1, blocks).ok());
    const auto put = shelf.volume->put_begin(shard_of(layout, 2, blocks));
    ASSERT_TRUE(put.ok());
    shelf.disk.tear_write_in = put->before.size();
    shelf.disk.tear_after_bytes = torn;
    static_cast<void>(shelf.run(*put, blocks));
    shelf.reopen();
    const std::vector<std::uint64_t> expected =
        torn == bytes ? std::vector<std::uint64_t>{1, 2} : std::vector<std::uint64_t>{1};
    EXPECT_EQ(shelf.stripes(), expected) << torn;
    EXPECT_EQ(shelf.volume->stats().dropped_torn, torn > 0 && torn < bytes ? 1u : 0u) << torn;
    // Its number is known: a later write into the slot counts as newer.
    ASSERT_TRUE(shelf.put(3, blocks).ok());
    shelf.reopen();
    EXPECT_TRUE(shelf.get(3).ok());
  }
}

TEST(Volume, failed_metadata_write_stops_puts_but_not_reads) {
  Shelf shelf(32 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  shelf.disk.fail_write_in = 0;
  EXPECT_EQ(shelf.put(2, 1).error().code, Code::io);  // first of its class: binds a segment
  EXPECT_TRUE(shelf.volume->broken());
  EXPECT_EQ(shelf.put(3, 8).error().code, Code::io);
  EXPECT_TRUE(shelf.get(1).ok());
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), std::vector<std::uint64_t>{1});
}

TEST(Volume, put_queued_behind_a_failed_metadata_write_is_not_acknowledged) {
  Shelf shelf(32 * mib, 4 * mib);
  const auto first = shelf.volume->put_begin(shard_of(shelf.layout, 1, 8));
  const auto second = shelf.volume->put_begin(shard_of(shelf.layout, 2, 8));
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_TRUE(second->before.empty());  // counts on the first one's
  shelf.disk.fail_write_in = 1;         // the superblock
  const PutOutcome one = shelf.run(*first, 8);
  const PutOutcome two = shelf.run(*second, 8);
  EXPECT_TRUE(one.metadata_failed);
  EXPECT_EQ(two.status.error().code, Code::io);
  shelf.volume->put_end(*first, one);
  shelf.volume->put_end(*second, two);
  shelf.reopen();
  EXPECT_TRUE(shelf.stripes().empty());
}

TEST(Volume, what_was_written_is_remembered_and_a_kill_forgets_at_most_the_lag) {
  Shelf shelf(32 * mib, 4 * mib);
  EXPECT_EQ(shelf.volume->wear(), Wear{});
  shelf.volume->set_wear({5 * mib, mib});
  ASSERT_TRUE(shelf.put(1, 8).ok());  // binds a segment, and with it goes a superblock
  shelf.reopen();
  EXPECT_EQ(shelf.volume->wear(), (Wear{5 * mib, mib}));
  shelf.sync_until_clean();
  ASSERT_TRUE(shelf.put(2, 8).ok());
  shelf.volume->set_wear({6 * mib, 2 * mib});
  ASSERT_TRUE(shelf.sync().ok());
  shelf.reopen();
  EXPECT_EQ(shelf.volume->wear(), (Wear{5 * mib, mib}));  // no reason for a superblock
  ASSERT_TRUE(shelf.put(3, 8).ok());
  shelf.volume->set_wear({5 * mib + Volume::wear_lag_bytes, 3 * mib});
  ASSERT_TRUE(shelf.sync().ok());
  shelf.reopen();
  EXPECT_EQ(shelf.volume->wear(), (Wear{5 * mib + Volume::wear_lag_bytes, 3 * mib}));
}

TEST(Volume, failed_flush_breaks_the_volume) {
  Shelf shelf(32 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  shelf.disk.fail_flush = true;
  EXPECT_EQ(shelf.sync().error().code, Code::io);
  EXPECT_TRUE(shelf.volume->broken());
}

// F10.
TEST(Volume, flipped_bit_is_corrupt_wherever_it_is) {
  Shelf shelf(16 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  const auto read = shelf.volume->read_begin(1, 0);
  ASSERT_TRUE(read.ok());
  const std::uint64_t end = shelf.layout.page_bytes(8) + read->slot_class.header_bytes;
  for (std::uint64_t at = 0; at < end; at += at < read->slot_class.header_bytes ? 97 : 40961) {
    shelf.disk.flip_bit(read->offset + at, 3);
    EXPECT_EQ(shelf.get(1).error().code, Code::corrupt) << at;
    shelf.disk.flip_bit(read->offset + at, 3);
  }
  EXPECT_TRUE(shelf.get(1).ok());
  shelf.volume->read_end(*read);
}

// A power loss in the middle of its write can leave a sector that cannot be read.
TEST(Volume, one_superblock_that_cannot_be_read_is_enough_of_a_loss) {
  Shelf shelf(16 * mib, 4 * mib);
  for (const std::uint64_t which : {0u, 1u}) {
    shelf.disk.fail_read_in = which;
    const auto volume = Volume::open(shelf.disk);
    shelf.disk.fail_read_in.reset();
    EXPECT_TRUE(volume.ok()) << which;
  }
}

// One bad place in the tables costs what it described, and not the volume; what the headers know is found.
TEST(Volume, bad_places_in_the_tables_do_not_close_it) {
  Shelf shelf(16 * mib, 4 * mib);
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) ASSERT_TRUE(shelf.put(stripe, 8).ok());
  const auto read = shelf.volume->read_begin(2, 0);
  ASSERT_TRUE(read.ok());
  const Geometry& geometry = shelf.volume->geometry();
  const std::uint64_t records = geometry.record_page_offset(read->at.segment, 0);
  const std::uint64_t segments = geometry.segment_table_offset;
  shelf.volume->read_end(*read);

  shelf.disk.bad_places = {records};
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), (std::vector<std::uint64_t>{1, 2, 3}));
  EXPECT_EQ(shelf.volume->stats().unreadable, 1u);

  shelf.disk.bad_places = {read->offset};  // the header of one slot of a segment that is open
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), (std::vector<std::uint64_t>{1, 3}));

  shelf.disk.bad_places = {segments};
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), std::vector<std::uint64_t>{});
  EXPECT_TRUE(shelf.put(4, 8).ok());
  EXPECT_TRUE(shelf.get(4).ok());
}

TEST(Volume, disk_that_gives_nothing_but_its_superblock_is_not_opened) {
  Shelf shelf(64 * mib, 1 * mib);
  for (std::uint64_t stripe = 1; stripe <= 20; ++stripe) ASSERT_TRUE(shelf.put(stripe, 8).ok());
  for (std::uint32_t segment = 0; segment < shelf.volume->geometry().segments; ++segment)
    shelf.disk.bad_places.insert(shelf.volume->geometry().record_page_offset(segment, 0));
  EXPECT_EQ(Volume::open(shelf.disk).error().code, Code::io);
}

TEST(Volume, a_slot_that_many_read_is_listed_all_the_same) {
  Shelf shelf(16 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  std::vector<Read> readers;
  while (true) {
    const auto read = shelf.volume->read_begin(1, 0);
    if (!read) break;
    readers.push_back(*read);
  }
  EXPECT_EQ(readers.size(), 254u);
  SlotAddress from;
  std::vector<Read> listed;
  EXPECT_FALSE(shelf.volume->list(from, 10, listed));
  EXPECT_EQ(listed.size(), 1u);
  for (const Read& read : listed) shelf.volume->read_end(read);
  for (const Read& read : readers) shelf.volume->read_end(read);
}

TEST(Volume, read_errors_are_io) {
  Shelf shelf(16 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  shelf.disk.fail_read_in = 0;
  EXPECT_EQ(shelf.get(1).error().code, Code::io);
  shelf.disk.fail_read_in.reset();
  shelf.disk.short_read_in = 2;
  EXPECT_EQ(shelf.get(1).error().code, Code::io);
  shelf.disk.short_read_in.reset();
  EXPECT_TRUE(shelf.get(1).ok());
}

TEST(Volume, misdirected_write_is_corrupt) {
  Shelf shelf(16 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  ASSERT_TRUE(shelf.put(2, 8).ok());
  const auto one = shelf.volume->read_begin(1, 0);
  const auto two = shelf.volume->read_begin(2, 0);
  ASSERT_TRUE(one.ok() && two.ok());
  Bytes image = shelf.disk.image();
  std::copy_n(image.begin() + static_cast<std::ptrdiff_t>(one->offset), one->slot_class.slot_bytes,
              image.begin() + static_cast<std::ptrdiff_t>(two->offset));
  shelf.disk.set_image(image);
  EXPECT_EQ(shelf.get(2).error().code, Code::corrupt);
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), std::vector<std::uint64_t>{1});
}

TEST(Volume, one_torn_superblock_is_survived_two_are_not) {
  for (const std::uint64_t which : {0u, 1u}) {
    Shelf shelf(16 * mib, 4 * mib);
    shelf.disk.flip_bit(which * superblock_bytes + 50, 1);
    shelf.reopen();
    EXPECT_TRUE(shelf.put(1, 8).ok());
  }
  Shelf shelf(16 * mib, 4 * mib);
  shelf.disk.flip_bit(50, 1);
  shelf.disk.flip_bit(superblock_bytes + 50, 1);
  EXPECT_EQ(Volume::open(shelf.disk).error().code, Code::corrupt);
}

// Each first put of a class writes a superblock; a power failure must not tear the last two at once.
TEST(Volume, power_failure_after_several_superblocks_leaves_one) {
  for (std::uint64_t seed = 1; seed <= 25; ++seed) {
    Rng rng(seed);
    Shelf shelf(4 * mib, 512 << 10);
    shelf.disk.sector_bytes = 32;  // a long open list has many sectors, a short one must do here
    for (const std::uint32_t blocks : {1u, 2u, 4u}) ASSERT_TRUE(shelf.put(blocks, blocks).ok());
    shelf.disk.power_loss(rng);
    const auto opened = Volume::open(shelf.disk);
    ASSERT_TRUE(opened.ok()) << "seed=" << seed << ": " << opened.error().message;
  }
}

TEST(Volume, torn_record_falls_back_to_the_header) {
  Shelf shelf(16 * mib, 4 * mib);
  ASSERT_TRUE(shelf.put(1, 8).ok());
  ASSERT_TRUE(shelf.put(2, 8).ok());
  shelf.sync_until_clean();
  shelf.disk.flip_bit(shelf.volume->geometry().record_page_offset(0, 0) + 20, 0);
  shelf.reopen();
  EXPECT_EQ(shelf.stripes(), (std::vector<std::uint64_t>{1, 2}));
  EXPECT_EQ(shelf.volume->stats().recovered_by_header, 1u);
}

TEST(Volume, another_file_is_not_a_volume) {
  MemoryDisk disk(4 * mib);
  EXPECT_EQ(Volume::open(disk).error().code, Code::corrupt);
  MemoryDisk tiny(4096);
  EXPECT_EQ(Volume::open(tiny).error().code, Code::corrupt);
  EXPECT_EQ(Volume::format(disk, {4 * mib, {}}).error().code, Code::invalid);  // no room for a segment
  EXPECT_EQ(Volume::format(disk, {5000, {}}).error().code, Code::invalid);
}

TEST(Volume, what_lies_behind_an_end_is_freed_and_nothing_else) {
  Shelf shelf(32 * mib, 4 * mib);
  std::map<std::uint64_t, std::uint64_t> ends;  // of the slot, by stripe
  for (std::uint64_t stripe = 1; stripe <= 20; ++stripe) {
    ASSERT_TRUE(shelf.put(stripe, stripe % 2 == 0 ? 1 : 4).ok());
    const Result<Read> read = shelf.volume->read_begin(stripe, 0);
    ASSERT_TRUE(read.ok());
    ends[stripe] = read->offset + read->slot_class.slot_bytes;
    shelf.volume->read_end(*read);
  }
  EXPECT_TRUE(shelf.volume->free_behind(shelf.disk.bytes()).empty());
  const std::uint64_t end = ends.at(7);
  std::set<std::pair<std::uint64_t, std::uint16_t>> expected;
  for (const auto& [stripe, slot_end] : ends) {
    if (slot_end > end) expected.insert({stripe, 0});
  }
  ASSERT_FALSE(expected.empty());
  ASSERT_LT(expected.size(), ends.size());
  const auto gone = shelf.volume->free_behind(end);
  EXPECT_EQ(std::set(gone.begin(), gone.end()), expected);
  for (const auto& [stripe, slot_end] : ends) {
    const Result<Read> read = shelf.volume->read_begin(stripe, 0);
    EXPECT_EQ(read.ok(), slot_end <= end);
    if (read) shelf.volume->read_end(*read);
  }
  EXPECT_EQ(shelf.volume->stats().slots_live, ends.size() - expected.size());
}

TEST(Volume, list_goes_through_in_parts) {
  Shelf shelf(32 * mib, 4 * mib);
  std::set<std::uint64_t> expected;
  for (std::uint64_t stripe = 1; stripe <= 20; ++stripe) {
    ASSERT_TRUE(shelf.put(stripe, stripe % 2 == 0 ? 1 : 4).ok());
    expected.insert(stripe);
  }
  SlotAddress from;
  std::set<std::uint64_t> seen;
  int parts = 0;
  for (bool more = true; more; ++parts) {
    std::vector<Read> part;
    more = shelf.volume->list(from, 3, part);
    EXPECT_LE(part.size(), 3u);
    for (const Read& read : part) {
      EXPECT_TRUE(seen.insert(read.stripe).second);
      shelf.volume->read_end(read);
    }
  }
  EXPECT_EQ(seen, expected);
  EXPECT_GE(parts, 7);
}

// Random puts, frees, syncs and kills: what was acknowledged is there with its bytes, and nothing else is.
TEST(Volume, kills_lose_nothing_acknowledged_and_show_nothing_else) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    Rng rng(seed);
    Shelf shelf(4 * mib, 512 << 10, *kv::layout_mla("mla-f32-1", 32, 8, 128));  // pages of 32 to 256 KiB
    std::map<std::uint64_t, std::uint32_t> live;  // acknowledged: stripe -> blocks
    std::map<std::uint64_t, std::uint32_t>
        may_return;  // freed and not yet written behind, or written whole and not acknowledged
    std::map<std::uint64_t, std::uint32_t> freed;  // since the last sync began
    std::uint64_t next_stripe = 1;
    for (int turn = 0; turn < 150; ++turn) {
      const double what = rng.uniform();
      const auto blocks = static_cast<std::uint32_t>(1 + rng.below(8));
      if (what < 0.55) {
        const std::uint64_t stripe = next_stripe++;
        const Status status = shelf.put(stripe, blocks);
        if (status.ok()) {
          live[stripe] = blocks;
        } else {
          ASSERT_EQ(status.error().code, Code::no_space);
        }
      } else if (what < 0.75 && !live.empty()) {
        auto it = live.begin();
        std::advance(it, rng.below(live.size()));
        ASSERT_EQ(shelf.volume->free(it->first), 1u);
        freed.insert(*it);
        live.erase(it);
      } else if (what < 0.9) {
        ASSERT_TRUE(shelf.sync().ok());
        freed.clear();
        may_return.clear();
      } else {
        // Killed in the middle of a put, at any of its writes and anywhere inside.
        const std::uint64_t stripe = next_stripe++;
        if (const auto put = shelf.volume->put_begin(shard_of(shelf.layout, stripe, blocks)); put.ok()) {
          shelf.disk.tear_write_in = rng.below(put->before.size() + 2);
          shelf.disk.tear_after_bytes = rng.below(75) * 4096;
          const PutOutcome outcome = shelf.run(*put, blocks);
          const bool whole = shelf.disk.tear_after_bytes >= shelf.layout.page_bytes(blocks);
          shelf.disk.tear_write_in.reset();
          if (outcome.status.ok() || whole) may_return[stripe] = blocks;
        }
        may_return.insert(freed.begin(), freed.end());
        freed.clear();
        shelf.reopen();
        std::set<std::uint64_t> seen;
        for (const std::uint64_t stripe_seen : shelf.stripes()) {
          ASSERT_TRUE(seen.insert(stripe_seen).second);
          const auto found =
              live.contains(stripe_seen) ? live.find(stripe_seen) : may_return.find(stripe_seen);
          ASSERT_TRUE(found != live.end() && found != may_return.end())
              << "turn " << turn << " stripe " << stripe_seen;
          const auto bytes = shelf.get(stripe_seen);
          ASSERT_TRUE(bytes.ok()) << bytes.error().message;
          ASSERT_EQ(*bytes, payload_of(shelf.layout, stripe_seen, found->second));
        }
        for (const auto& [stripe_live, blocks_live] : live) ASSERT_TRUE(seen.contains(stripe_live)) << turn;
        // What came back is known to di-meta's inventory exchange, which frees it again.
        for (const std::uint64_t stripe_seen : seen) {
          if (!live.contains(stripe_seen)) {
            ASSERT_EQ(shelf.volume->free(stripe_seen), 1u);
            freed[stripe_seen] = may_return[stripe_seen];
          }
        }
        may_return.clear();
      }
    }
    for (const auto& [stripe, blocks] : live) {
      const auto bytes = shelf.get(stripe);
      ASSERT_TRUE(bytes.ok());
      ASSERT_EQ(*bytes, payload_of(shelf.layout, stripe, blocks));
    }
  }
}

// The power goes: what was acknowledged before the last sync began is there; everything that is readable
// has the right bytes.  With a disk that lies about flushes, only the latter.
TEST(Volume, power_failures_never_give_wrong_bytes) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const bool lying = seed % 4 == 0;
    std::printf("seed=%llu lying=%d\n", static_cast<unsigned long long>(seed), lying);
    Rng rng(seed);
    Shelf shelf(4 * mib, 512 << 10, *kv::layout_mla("mla-f32-1", 32, 8, 128));  // pages of 32 to 256 KiB
    std::map<std::uint64_t, std::uint32_t> all;                                 // every stripe ever put
    std::set<std::uint64_t> flushed;                                            // must be there
    std::set<std::uint64_t> acknowledged;                                       // since
    std::uint64_t next_stripe = 1;
    for (int turn = 0; turn < 150; ++turn) {
      const double what = rng.uniform();
      if (what < 0.5) {
        const std::uint64_t stripe = next_stripe++;
        all[stripe] = static_cast<std::uint32_t>(1 + rng.below(8));
        const Status status = shelf.put(stripe, all[stripe]);
        if (status.ok()) acknowledged.insert(stripe);
      } else if (what < 0.75 && !all.empty()) {
        const std::uint64_t stripe = 1 + rng.below(next_stripe - 1);
        shelf.volume->free(stripe);
        flushed.erase(stripe);
        acknowledged.erase(stripe);
      } else if (what < 0.92) {
        shelf.disk.lose_flushes = lying && rng.chance(0.5);
        if (!shelf.volume->clean()) {
          const std::uint64_t flushes = shelf.disk.flushes;
          ASSERT_TRUE(shelf.sync().ok());
          if (shelf.disk.flushes > flushes) {
            flushed.insert(acknowledged.begin(), acknowledged.end());
            acknowledged.clear();
          }
        }
        shelf.disk.lose_flushes = false;
      } else {
        shelf.disk.power_loss(rng);
        shelf.volume.reset();
        shelf.broken = false;
        auto opened = Volume::open(shelf.disk);
        if (lying && !opened.ok()) break;  // both superblocks may be gone
        ASSERT_TRUE(opened.ok()) << "turn " << turn << ": " << opened.error().message;
        shelf.volume = *std::move(opened);
        for (const std::uint64_t stripe : shelf.stripes()) {
          ASSERT_TRUE(all.contains(stripe));
          const auto bytes = shelf.get(stripe);
          if (bytes.ok()) {
            ASSERT_EQ(*bytes, payload_of(shelf.layout, stripe, all[stripe]));
          } else {
            ASSERT_EQ(bytes.error().code, Code::corrupt);
            shelf.volume->free(stripe);
          }
        }
        if (!lying) {
          for (const std::uint64_t stripe : flushed)
            ASSERT_TRUE(shelf.get(stripe).ok()) << "turn " << turn << " stripe " << stripe;
        }
        acknowledged.clear();
        // Everything on the disk is durable after the failure.
        flushed.clear();
        for (const std::uint64_t stripe : shelf.stripes()) flushed.insert(stripe);
      }
    }
  }
}

// tests/golden/store/volume.bin: what today's code writes for one live and one freed slot; the pages of 4 KiB
// that are not all zeros, each behind its offset.  Changing bytes without changing the format number fails.
TEST(Volume, golden_image) {
  Shelf shelf(1 * mib, 256 << 10);
  // Bytes that do not depend on a generator: the first of each segment is its number.
  const auto write = [&](std::uint64_t stripe) {
    Bytes payload(shelf.layout.page_bytes(1));
    wire::PutPage page = page_of(shelf.layout, stripe, 1);
    for (std::uint32_t group = 0; group < shelf.layout.groups(); ++group) {
      const std::uint64_t at = shelf.layout.segment_offset(group, 1);
      payload[at] = static_cast<std::byte>(group + 1);
      page.crcs[group] = crc32c(ByteView(payload).subspan(at, shelf.layout.segment_bytes(group, 1)));
    }
    Shard shard = *shard_make(shelf.layout, stripe, 0, {page}, {1, 0, {}});
    shard.tenant = 0xb1de19c07c54d2d5;
    const auto put = shelf.volume->put_begin(shard);
    ASSERT_TRUE(put.ok()) << put.error().message;
    const PutOutcome outcome = put_run(
        shelf.disk, *put,
        [&](MutableByteView to) -> Status {
          std::copy(payload.begin(), payload.end(), to.begin());
          return {};
        },
        shelf.scratch, shelf.broken);
    ASSERT_TRUE(outcome.status.ok());
    shelf.volume->put_end(*put, outcome);
  };
  write(0x1122334455667788);
  write(7);
  shelf.volume->free(7);
  ASSERT_TRUE(shelf.sync().ok());
  std::string golden;
  const Bytes& image = shelf.disk.image();
  for (std::size_t at = 0; at < image.size(); at += 4096) {
    const ByteView page = ByteView(image).subspan(at, 4096);
    if (std::all_of(page.begin(), page.end(), [](std::byte b) { return b == std::byte{0}; })) continue;
    std::byte offset[8];
    put_le<std::uint64_t>(offset, at);
    golden += as_text(ByteView(offset, 8));
    golden += as_text(page);
  }
  const std::string path = std::string(DI_SOURCE_DIR) + "/tests/golden/store/volume.bin";
  const auto expected = file_read(path, 4 * mib);
  if (!expected.ok() || *expected != golden) {
    const std::string fresh = testing::TempDir() + "volume.bin";
    std::FILE* file = std::fopen(fresh.c_str(), "wb");
    ASSERT_NE(file, nullptr);
    std::fwrite(golden.data(), 1, golden.size(), file);
    std::fclose(file);
    FAIL() << "the image differs from " << path << "; today's is in " << fresh;
  }
  // And the committed image opens.
  Bytes rebuilt(image.size());
  for (std::size_t at = 0; at < expected->size(); at += 8 + 4096) {
    const ByteView bytes = as_bytes(*expected).subspan(at, 8 + 4096);
    std::copy_n(bytes.begin() + 8, 4096,
                rebuilt.begin() + static_cast<std::ptrdiff_t>(get_le<std::uint64_t>(bytes.data())));
  }
  shelf.disk.set_image(rebuilt);
  shelf.reopen();
  EXPECT_TRUE(shelf.get(0x1122334455667788).ok());
  EXPECT_EQ(shelf.stripes().size(), 1u);
}

}  // namespace
}  // namespace di::store
