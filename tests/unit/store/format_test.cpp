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
  superblock.wear = {0x1122334455667788, 99};
  superblock.open = {3, 1, 14};
  Bytes bytes(superblock_bytes);
  superblock_encode(superblock, bytes);
  const auto back = superblock_decode(bytes);
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(*back, superblock);
  EXPECT_EQ(get_le<std::uint64_t>(&bytes[104]), superblock.wear.written_bytes);
  EXPECT_EQ(get_le<std::uint64_t>(&bytes[2160]), superblock.wear.spent_bytes);
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

SlotHeader header_of(Shard shard) {
  SlotHeader header;
  header.shard = std::move(shard);
  header.shard.tenant = 0x8877665544332211;
  header.volume[1] = std::byte{3};
  header.offset = 4096 * 1000;
  header.sequence = 31;
  header.segment_generation = 8;
  return header;
}

SlotHeader header_of(const kv::Layout& layout) {
  auto shard = shard_make(layout, 0xabcdef, 1,
                          {page_of(layout, 1, layout.page_blocks()), page_of(layout, 2, 1)}, {2, 0, {}});
  EXPECT_TRUE(shard.ok()) << shard.error().message;
  return header_of(*std::move(shard));
}

// A stripe as a host puts it; its checksums are numbers.
struct Stripe {
  Stripe(const kv::Layout& layout, std::uint16_t k, std::uint16_t m, const std::vector<std::uint32_t>& blocks)
      : shape(*kv::StripeShape::of(layout, k, m, blocks)), code{k, m, {}} {
    for (const std::uint32_t count : blocks) {
      wire::PutPage page;
      page.bytes = layout.page_bytes(count);
      page.parent.raw[0] = static_cast<std::byte>(pages.size());
      page.keys.resize(count);
      for (Key& key : page.keys) key.raw[3] = static_cast<std::byte>(++number);
      for (std::uint32_t group = 0; group < layout.groups(); ++group) page.crcs.push_back(++number);
      pages.push_back(std::move(page));
    }
    for (std::size_t i = 0; i < shape.crcs_count(); ++i) code.crcs.push_back(++number);
  }
  kv::StripeShape shape;
  wire::StripeCode code;
  std::vector<wire::PutPage> pages;
  std::uint32_t number = 0;
};

// Each column says what it is, where its checksums are, and what the whole stripe is.
TEST(Format, every_column_of_every_geometry_describes_its_stripe) {
  const auto mla = kv::layout_mla("mla-f32-1", 32, 8, 128);
  for (const kv::Layout& layout : {kv::layout_v41(), kv::layout_v3(), *mla}) {
    for (const auto& [k, m] : std::vector<std::pair<std::uint16_t, std::uint16_t>>{
             {1, 0}, {2, 1}, {4, 2}, {10, 2}, {12, 4}, {16, 0}}) {
      for (std::uint32_t n = 1; n <= std::min<std::uint32_t>(k, kv::stripe_pages_max); ++n) {
        std::vector<std::uint32_t> blocks(n, layout.page_blocks());
        for (const bool short_last : {false, true}) {
          blocks.back() = short_last ? 1 : layout.page_blocks();
          const Stripe stripe(layout, k, m, blocks);
          for (std::uint32_t i = 0; i < stripe.shape.columns_stored(); ++i) {
            const std::uint32_t column = stripe.shape.stored_column(i);
            SCOPED_TRACE(layout.format() + " " + std::to_string(k) + "+" + std::to_string(m) + " pages " +
                         std::to_string(n) + " column " + std::to_string(column));
            auto shard =
                shard_make(layout, 99, static_cast<std::uint16_t>(column), stripe.pages, stripe.code);
            ASSERT_TRUE(shard.ok()) << shard.error().message;
            EXPECT_EQ(shard->payload_bytes(), stripe.shape.column_bytes(column));
            EXPECT_EQ(shard->is_parity(), stripe.shape.is_parity(column));
            EXPECT_EQ(shard->code_id(), m == 0 ? code_id_none : code_id_reed_solomon);
            for (std::uint32_t group = 0; group < layout.groups(); ++group) {
              EXPECT_EQ(shard->segments[group], stripe.shape.segment_bytes(column, group));
              EXPECT_EQ(shard->segment_offset(group), stripe.shape.column_offset(column, group));
              const auto place = stripe.shape.crc_index(column, group);
              EXPECT_EQ(shard->crcs()[group], place ? stripe.code.crcs[*place]
                                                    : stripe.pages[stripe.shape.page_of(column)].crcs[group]);
            }
            const SlotHeader header = header_of(*std::move(shard));
            Bytes bytes(header.shard.slot_class.header_bytes);
            slot_header_encode(header, bytes);
            const auto back = slot_header_decode(bytes, header.shard.slot_class);
            ASSERT_TRUE(back.ok()) << back.error().message;
            EXPECT_EQ(*back, header);
          }
        }
      }
    }
  }
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
  EXPECT_TRUE(refused(slot_header_fixed_bytes, 0));  // blocks of page 0
  EXPECT_TRUE(refused(slot_header_fixed_bytes, 0x7fffffff));
  EXPECT_TRUE(refused(112, 0));  // bytes of segment 0
  EXPECT_TRUE(refused(112, 0xfffff000));
  EXPECT_TRUE(refused(112, 4097));
  EXPECT_TRUE(refused(20, 4096));         // payload bytes
  EXPECT_TRUE(refused(60, 0x09000001));   // nine groups
  EXPECT_TRUE(refused(60, 0x04010001));   // a code without parity
  EXPECT_TRUE(refused(60, 0x04000002));   // a column that is not stored
  EXPECT_TRUE(refused(144, 0x00010000));  // no data columns
  EXPECT_TRUE(refused(144, 0x00010001));  // more pages than columns
  EXPECT_TRUE(refused(144, 0x0001ff02));  // 255 parity columns
  EXPECT_TRUE(refused(144, 0x00000002));  // no parts
  EXPECT_TRUE(refused(144, 0x00020002));  // more parts than columns
  EXPECT_TRUE(refused(148, 4));           // checksums nobody needs
  EXPECT_TRUE(refused(148, 0xffffffff));
}

TEST(Format, parity_headers_with_senseless_counts_are_refused) {
  const kv::Layout layout = kv::layout_v41();
  const Stripe stripe(layout, 10, 2, {8, 8, 8});
  const SlotHeader header = header_of(*shard_make(layout, 99, 10, stripe.pages, stripe.code));
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
  EXPECT_FALSE(refused(60, 0x0401000b));  // the other parity column
  EXPECT_TRUE(refused(60, 0x0401000c));   // a third
  EXPECT_TRUE(refused(60, 0x04010009));   // a data column that is zeros
  EXPECT_TRUE(refused(60, 0x0400000a));   // parity of no code
  EXPECT_TRUE(refused(60, 0x0402000a));   // of another code
  EXPECT_TRUE(refused(112, 0));           // parity has no empty segment
  EXPECT_TRUE(refused(148, 43));
}

TEST(Format, columns_fill_their_slots_and_a_layout_has_at_most_eight_classes) {
  for (const kv::Layout& layout :
       {kv::layout_v41(), kv::layout_v3(), *kv::layout_mla("mla-f32-1", 32, 8, 128),
        *kv::layout_mla("mla-bf16-1", 64, 61, 1152), *kv::layout_mla("tiny-0", 16, 1, 16)}) {
    std::set<SlotClass> classes;
    const std::uint64_t full = layout.page_bytes(layout.page_blocks());
    for (std::uint64_t bytes = 4096; bytes <= full; bytes += 4096) {
      const SlotClass c = slot_class_of(layout, bytes);
      classes.insert(c);
      EXPECT_GE(c.slot_bytes, c.header_bytes + bytes);
      EXPECT_EQ(c.slot_bytes % 4096, 0u);
      EXPECT_EQ(c.header_bytes % 4096, 0u);
      EXPECT_EQ(c.header_bytes, slot_class_of(layout, full).header_bytes);  // the layout determines it
    }
    EXPECT_LE(classes.size(), classes_per_layout_max);
    // Pages of a power of two of blocks, and parts and parity of full pages, leave nothing empty.
    const auto exact = [&](std::uint64_t bytes) {
      const SlotClass c = slot_class_of(layout, bytes);
      return c.slot_bytes == std::max<std::uint64_t>(slot_bytes_min, c.header_bytes + bytes);
    };
    for (std::uint32_t blocks = layout.page_blocks(); blocks >= std::max(1u, layout.page_blocks() / 8);
         blocks /= 2) {
      EXPECT_TRUE(exact(layout.page_bytes(blocks))) << layout.format() << " " << blocks;
    }
    for (std::uint32_t pages = 1; pages <= 10; ++pages) {
      const std::vector<std::uint32_t> blocks(pages, layout.page_blocks());
      const auto shape = kv::StripeShape::of(layout, 10, 2, blocks);
      ASSERT_TRUE(shape.ok());
      if (shape->parts() == 10 / pages) {
        EXPECT_TRUE(exact(shape->column_bytes(10))) << layout.format() << " pages " << pages;
      }
      for (std::uint32_t column = 0; column < shape->data_stored(); ++column) {
        EXPECT_LE(slot_class_of(layout, shape->column_bytes(column)).slot_bytes,
                  slot_class_of(layout, shape->column_bytes(10)).slot_bytes);
      }
    }
  }
  const kv::Layout mla = *kv::layout_mla("mla-f32-1", 32, 8, 128);
  EXPECT_EQ(slot_class_of(mla, mla.page_bytes(32)).header_bytes, 12288u);
  EXPECT_EQ(slot_class_of(kv::layout_v41(), kv::layout_v41().page_bytes(8)).slot_bytes, 4096u + 917504u);
}

TEST(Format, shards_that_do_not_fit_the_layout_are_refused) {
  const kv::Layout layout = kv::layout_v41();
  const wire::PutPage good = page_of(layout, 1, 4);
  const wire::StripeCode plain{1, 0, {}};
  EXPECT_TRUE(shard_make(layout, 1, 0, {good}, plain).ok());
  EXPECT_FALSE(shard_make(layout, 1, 0, {}, plain).ok());
  EXPECT_FALSE(shard_make(layout, 1, 1, {good}, plain).ok());
  EXPECT_FALSE(shard_make(layout, 1, 0, std::vector<wire::PutPage>(11, good), {11, 0, {}}).ok());
  wire::PutPage bad = good;
  bad.keys.resize(9);
  EXPECT_FALSE(shard_make(layout, 1, 0, {bad}, plain).ok());
  bad = good;
  bad.keys.clear();
  EXPECT_FALSE(shard_make(layout, 1, 0, {bad}, plain).ok());
  bad = good;
  bad.crcs.pop_back();
  EXPECT_FALSE(shard_make(layout, 1, 0, {bad}, plain).ok());
  bad = good;
  bad.bytes += 4096;
  EXPECT_FALSE(shard_make(layout, 1, 0, {bad}, plain).ok());
  // The code.
  const Stripe stripe(layout, 10, 2, {8, 8, 8});  // three parts each
  EXPECT_TRUE(shard_make(layout, 1, 8, stripe.pages, stripe.code).ok());
  EXPECT_FALSE(shard_make(layout, 1, 9, stripe.pages, stripe.code).ok());
  EXPECT_TRUE(shard_make(layout, 1, 11, stripe.pages, stripe.code).ok());
  EXPECT_FALSE(shard_make(layout, 1, 12, stripe.pages, stripe.code).ok());
  EXPECT_FALSE(shard_make(layout, 1, 0, stripe.pages, plain).ok());
  EXPECT_FALSE(shard_make(layout, 1, 0, stripe.pages, {0, 0, {}}).ok());
  EXPECT_FALSE(shard_make(layout, 1, 0, stripe.pages, {10, 7, stripe.code.crcs}).ok());
  wire::StripeCode code = stripe.code;
  code.crcs.pop_back();
  EXPECT_FALSE(shard_make(layout, 1, 0, stripe.pages, code).ok());
}

}  // namespace
}  // namespace di::store
