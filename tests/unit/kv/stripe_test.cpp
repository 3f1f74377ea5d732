#include "kv/stripe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/rng.h"

namespace di::kv {
namespace {

using Blocks = std::vector<std::uint32_t>;

StripeShape shape_of(const Layout& layout, std::uint32_t k, std::uint32_t m, const Blocks& blocks) {
  Result<StripeShape> shape = StripeShape::of(layout, k, m, blocks);
  EXPECT_TRUE(shape.ok());
  return *std::move(shape);
}

// Every byte of every page is in exactly one column, every column's segments follow each other, and the
// parity is as long as the longest.
void check(const Layout& layout, std::uint32_t k, std::uint32_t m, const Blocks& blocks) {
  const StripeShape shape = shape_of(layout, k, m, blocks);
  ASSERT_LE(shape.data_stored(), k);
  std::vector<std::vector<std::uint32_t>> owners;
  for (const std::uint32_t count : blocks)
    owners.emplace_back(layout.page_bytes(count) / segment_align_bytes, 0);
  for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
    const std::uint32_t column = shape.stored_column(i);
    ASSERT_TRUE(shape.is_stored(column));
    std::uint64_t end = 0;
    for (std::uint32_t group = 0; group < layout.groups(); ++group) {
      const std::uint64_t bytes = shape.segment_bytes(column, group);
      EXPECT_EQ(bytes % segment_align_bytes, 0u);
      EXPECT_EQ(shape.column_offset(column, group), end);
      end += bytes;
      if (shape.is_parity(column)) continue;
      const std::uint32_t page = shape.page_of(column);
      const std::uint64_t first = layout.segment_offset(group, blocks[page]);
      EXPECT_GE(shape.page_offset(column, group), first);
      EXPECT_LE(shape.page_offset(column, group) + bytes, first + layout.segment_bytes(group, blocks[page]));
      for (std::uint64_t at = 0; at < bytes; at += segment_align_bytes) {
        ++owners[page][(shape.page_offset(column, group) + at) / segment_align_bytes];
      }
      if (m > 0) {
        EXPECT_LE(bytes, shape.segment_bytes(k, group));
      }
    }
    EXPECT_EQ(shape.column_bytes(column), end);
    EXPECT_GT(end, 0u);
    EXPECT_LE(end, layout.page_bytes(shape.parity_slot_blocks()));
  }
  for (const auto& page : owners) {
    EXPECT_TRUE(std::all_of(page.begin(), page.end(), [](std::uint32_t count) { return count == 1; }));
  }
  // Checksum places: all different, none missing.
  std::vector<std::uint32_t> places(shape.crcs_count(), 0);
  for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
    for (std::uint32_t group = 0; group < layout.groups(); ++group) {
      const auto place = shape.crc_index(shape.stored_column(i), group);
      EXPECT_EQ(place.has_value(), !shape.is_whole_page(shape.stored_column(i)));
      if (place) ++places.at(*place);
    }
  }
  EXPECT_TRUE(std::all_of(places.begin(), places.end(), [](std::uint32_t count) { return count == 1; }));
}

TEST(StripeShape, EveryByteIsInOneColumn) {
  constexpr std::uint64_t seed = 20261130;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  for (const Layout& layout : {layout_v3(), layout_v41(), *layout_mla("mla-f32-1", 32, 6, 160)}) {
    for (const auto& [k, m] : {std::pair<std::uint32_t, std::uint32_t>{10, 2}, {2, 1}, {1, 0}, {4, 2}}) {
      for (std::uint32_t pages = 1; pages <= k; ++pages) {
        for (int round = 0; round < 8; ++round) {
          Blocks blocks;
          for (std::uint32_t i = 0; i < pages; ++i) {
            blocks.push_back(1 + static_cast<std::uint32_t>(rng.below(layout.page_blocks())));
          }
          check(layout, k, m, blocks);
        }
      }
    }
  }
}

// A page of V3 is 4.3 MiB in one block: two of them make ten columns, six make six.
TEST(StripeShape, ShortStripesOfLongPagesAreSplit) {
  const Layout layout = layout_v3();
  const auto parts = [&](std::size_t pages) { return shape_of(layout, 10, 2, Blocks(pages, 1)).parts(); };
  EXPECT_EQ(parts(1), 10u);
  EXPECT_EQ(parts(2), 5u);
  EXPECT_EQ(parts(3), 3u);
  EXPECT_EQ(parts(4), 2u);
  EXPECT_EQ(parts(5), 2u);
  EXPECT_EQ(parts(6), 1u);
  EXPECT_EQ(parts(10), 1u);
  // What parity costs beside the data: a third at most, and a fifth of a full stripe.
  for (std::size_t pages = 1; pages <= 10; ++pages) {
    const StripeShape shape = shape_of(layout, 10, 2, Blocks(pages, 1));
    std::uint64_t data = 0;
    for (std::uint32_t column = 0; column < shape.data_stored(); ++column) data += shape.column_bytes(column);
    const double overhead =
        static_cast<double>(data + 2 * shape.column_bytes(10)) / static_cast<double>(data);
    EXPECT_LE(overhead, 1.37) << pages;
  }
}

TEST(StripeShape, ShortPagesStayWhole) {
  const Layout layout = *layout_mla("mla-f32-1", 32, 6, 160);  // 32 KiB a block
  EXPECT_EQ(shape_of(layout, 10, 2, {1}).parts(), 1u);
  EXPECT_EQ(shape_of(layout, 10, 2, {layout.page_blocks()}).parts(), 10u);
  // The shortest page decides.
  EXPECT_EQ(shape_of(layout, 10, 2, {layout.page_blocks(), 1}).parts(), 1u);
}

TEST(StripeShape, RefusesWhatIsNoStripe) {
  const Layout layout = layout_v41();
  const auto refused = [&](std::uint32_t k, std::uint32_t m, const Blocks& blocks) {
    const auto shape = StripeShape::of(layout, k, m, blocks);
    return !shape.ok() && shape.error().code == Code::invalid;
  };
  EXPECT_TRUE(refused(0, 2, {1}));
  EXPECT_TRUE(refused(10, 7, {1}));
  EXPECT_TRUE(refused(17, 0, {1}));
  EXPECT_TRUE(refused(10, 2, {}));
  EXPECT_TRUE(refused(2, 1, {1, 1, 1}));
  EXPECT_TRUE(refused(12, 2, Blocks(11, 1)));
  EXPECT_TRUE(refused(10, 2, {0}));
  EXPECT_TRUE(refused(10, 2, {layout.page_blocks() + 1}));
  EXPECT_TRUE(refused(0xffffffff, 0xffffffff, {1}));
}

}  // namespace
}  // namespace di::kv
