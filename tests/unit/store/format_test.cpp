#include "store/format.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/unit/store/shelf.h"

namespace di::store {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

TEST(Format, geometry_leaves_no_overlap_and_little_waste) {
  for (const std::uint64_t volume : {10 * mib, 64 * mib, 100 * mib + 4096, 1024 * mib}) {
    const auto g = Geometry::of(volume, 4 * mib);
    ASSERT_TRUE(g.ok());
    EXPECT_EQ(g->records_per_segment, 256u);
    EXPECT_EQ(g->segment_table_offset, 8192u);
    EXPECT_GE(g->slot_table_offset, g->segment_table_offset + std::uint64_t{g->segments} * record_bytes);
    EXPECT_GE(g->segments_offset,
              g->slot_table_offset + std::uint64_t{g->segments} * g->records_per_segment * record_bytes);
    EXPECT_EQ(g->segments_offset % 4096, 0u);
    const std::uint64_t end = g->segment_offset(g->segments);
    EXPECT_LE(end, volume);
    EXPECT_LT(volume - end, 4 * mib + 64 * 1024);
  }
}

TEST(Format, superblock_comes_back_and_every_changed_byte_is_refused) {
  Superblock superblock;
  superblock.uuid[3] = std::byte{9};
  superblock.sequence = 77;
  superblock.epoch = 5;
  superblock.geometry = *Geometry::of(64 * mib, 4 * mib);
  superblock.open = {3, 1, 14};
  Bytes bytes(superblock_bytes);
  superblock_encode(superblock, bytes);
  const auto back = superblock_decode(bytes);
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(*back, superblock);
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    bytes[at] ^= std::byte{4};
    EXPECT_FALSE(superblock_decode(bytes).ok()) << at;
    bytes[at] ^= std::byte{4};
  }
}

TEST(Format, records_come_back_and_every_changed_byte_is_refused) {
  std::byte bytes[record_bytes];
  const SegmentRecord segment{true, 12, {1 << 20, 8192}};
  segment_record_encode(segment, bytes);
  EXPECT_EQ(*segment_record_decode(bytes), segment);
  for (std::byte& b : bytes) {
    b ^= std::byte{1};
    EXPECT_FALSE(segment_record_decode(bytes).ok());
    b ^= std::byte{1};
  }
  const SlotRecord slot{12, true, 1234567890123, 99, 77 * 4096, 3};
  slot_record_encode(slot, bytes);
  EXPECT_EQ(*slot_record_decode(bytes), slot);
  for (std::byte& b : bytes) {
    b ^= std::byte{1};
    EXPECT_FALSE(slot_record_decode(bytes).ok());
    b ^= std::byte{1};
  }
  std::fill(std::begin(bytes), std::end(bytes), std::byte{0});
  EXPECT_EQ(*segment_record_decode(bytes), SegmentRecord{});
  EXPECT_EQ(*slot_record_decode(bytes), SlotRecord{});
}

SlotHeader header_of(const kv::Layout& layout) {
  SlotHeader header;
  auto shard =
      shard_make(layout, 0xabcdef, 1, {page_of(layout, 1, layout.page_blocks()), page_of(layout, 2, 1)});
  EXPECT_TRUE(shard.ok()) << shard.error().message;
  header.shard = *std::move(shard);
  header.volume[1] = std::byte{3};
  header.offset = 4096 * 1000;
  header.sequence = 31;
  header.segment_generation = 8;
  return header;
}

TEST(Format, slot_header_comes_back_and_every_changed_byte_is_refused) {
  for (const kv::Layout& layout : {kv::layout_v41(), *kv::layout_mla("mla-f32-1", 32, 8, 128)}) {
    const SlotHeader header = header_of(layout);
    const SlotClass slot_class = header.shard.slot_class;
    Bytes bytes(slot_class.header_bytes);
    slot_header_encode(header, bytes);
    const auto back = slot_header_decode(bytes, slot_class);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(*back, header);
    for (std::size_t at = 0; at < bytes.size(); at += at < 1200 ? 1 : 37) {
      bytes[at] ^= std::byte{16};
      EXPECT_FALSE(slot_header_decode(bytes, slot_class).ok()) << at;
      bytes[at] ^= std::byte{16};
    }
    SlotClass other = slot_class;
    other.slot_bytes += 4096;
    EXPECT_FALSE(slot_header_decode(bytes, other).ok());
  }
}

// Headers with a right checksum and wrong counts: what a bug or a hostile disk may hold.
TEST(Format, slot_header_with_senseless_counts_is_refused) {
  const SlotHeader header = header_of(kv::layout_v41());
  const SlotClass slot_class = header.shard.slot_class;
  Bytes good(slot_class.header_bytes);
  slot_header_encode(header, good);
  const auto refused = [&](std::size_t at, std::uint32_t value) {
    Bytes bytes = good;
    put_le<std::uint32_t>(&bytes[at], value);
    put_le<std::uint32_t>(&bytes[12], 0);
    put_le<std::uint32_t>(&bytes[12], crc32c(bytes));
    return !slot_header_decode(bytes, slot_class).ok();
  };
  EXPECT_FALSE(refused(64, 5));  // another stripe is a good header
  EXPECT_TRUE(refused(72, 0));   // pages
  EXPECT_TRUE(refused(72, 1));   // column 1 of one page
  EXPECT_TRUE(refused(72, 11));
  EXPECT_TRUE(refused(72, 0xffffffff));
  EXPECT_TRUE(refused(144, 0));  // blocks of page 0
  EXPECT_TRUE(refused(144, 0x7fffffff));
  EXPECT_TRUE(refused(112, 0));  // bytes of segment 0
  EXPECT_TRUE(refused(112, 0xfffff000));
  EXPECT_TRUE(refused(112, 4097));
  EXPECT_TRUE(refused(20, 4096));        // payload bytes
  EXPECT_TRUE(refused(60, 0x09000001));  // nine groups
}

TEST(Format, classes_are_powers_of_two_of_blocks_and_at_most_eight) {
  for (const kv::Layout& layout :
       {kv::layout_v41(), *kv::layout_mla("mla-f32-1", 32, 8, 128),
        *kv::layout_mla("mla-bf16-1", 64, 61, 1152), *kv::layout_mla("tiny-0", 16, 1, 16)}) {
    std::set<SlotClass> classes;
    for (std::uint32_t blocks = 1; blocks <= layout.page_blocks(); ++blocks) {
      const SlotClass c = slot_class_of(layout, blocks);
      classes.insert(c);
      EXPECT_GE(c.slot_bytes, c.header_bytes + layout.page_bytes(blocks));
      EXPECT_EQ(c.slot_bytes % 4096, 0u);
      EXPECT_EQ(c.header_bytes % 4096, 0u);
      EXPECT_EQ(c.header_bytes, slot_class_of(layout, 1).header_bytes);  // the layout determines it
    }
    EXPECT_LE(classes.size(), classes_per_layout_max);
  }
  EXPECT_EQ(slot_class_of(*kv::layout_mla("mla-f32-1", 32, 8, 128), 32).header_bytes, 12288u);
  EXPECT_EQ(slot_class_of(kv::layout_v41(), 8).slot_bytes, 4096u + 917504u);
}

TEST(Format, shards_that_do_not_fit_the_layout_are_refused) {
  const kv::Layout layout = kv::layout_v41();
  const wire::PutPage good = page_of(layout, 1, 4);
  EXPECT_TRUE(shard_make(layout, 1, 0, {good}).ok());
  EXPECT_FALSE(shard_make(layout, 1, 0, {}).ok());
  EXPECT_FALSE(shard_make(layout, 1, 1, {good}).ok());
  EXPECT_FALSE(shard_make(layout, 1, 0, std::vector<wire::PutPage>(11, good)).ok());
  wire::PutPage bad = good;
  bad.keys.resize(9);
  EXPECT_FALSE(shard_make(layout, 1, 0, {bad}).ok());
  bad = good;
  bad.keys.clear();
  EXPECT_FALSE(shard_make(layout, 1, 0, {bad}).ok());
  bad = good;
  bad.crcs.pop_back();
  EXPECT_FALSE(shard_make(layout, 1, 0, {bad}).ok());
  bad = good;
  bad.bytes += 4096;
  EXPECT_FALSE(shard_make(layout, 1, 0, {bad}).ok());
}

}  // namespace
}  // namespace di::store
