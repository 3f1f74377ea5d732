// The reference of kernels/page_copy.h against copies written out from the layout's definition.
#include "kernels/page_copy.h"

#include <gtest/gtest.h>

#include "tests/support/page_copies.h"

namespace di::kernels {
namespace {

constexpr std::uint64_t seed = 90;
constexpr std::byte untouched{0xee};

// A page of `page_blocks` blocks as lib/kv/layout.h words it: group after group, in it plane after plane, in
// it block after block, each group padded to 4 KiB.
void append_page(Bytes& out, const kv::Layout& layout, std::uint32_t page_blocks,
                 std::span<const std::byte> pool, std::span<const std::uint64_t> offsets,
                 std::span<const std::uint32_t> pool_blocks) {
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    for (std::uint32_t plane = layout.group_first_plane(group); plane < layout.group_last_plane(group);
         ++plane) {
      const std::uint64_t bytes = layout.plane_block_bytes(plane);
      for (std::uint32_t i = 0; i < page_blocks; ++i) {
        const std::byte* from = pool.data() + offsets[plane] + pool_blocks[i] * bytes;
        out.insert(out.end(), from, from + bytes);
      }
    }
    out.resize(align_up(out.size(), 4096), std::byte{0});
  }
}

void copy_all(const kv::Layout& layout, CopyDirection direction, std::uint32_t page_blocks, std::byte* pages,
              std::byte* pool, std::span<const std::uint64_t> offsets,
              std::span<const std::uint32_t> pool_blocks) {
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    const auto planes = support::group_planes(layout, group, offsets, pool);
    const auto blocks = support::group_blocks(layout, group, page_blocks, pages, pool_blocks);
    // In two parts, as a group with many planes is.
    const auto half = static_cast<std::uint32_t>(planes.size() / 2);
    for (const auto& [first, count] :
         {std::pair{0u, half}, std::pair{half, std::uint32_t(planes.size()) - half}}) {
      page_copy_ref({direction, planes.data() + first, count, blocks.data(),
                     static_cast<std::uint32_t>(blocks.size())});
    }
  }
}

void check(const kv::Layout& layout, std::uint32_t page_blocks, std::uint32_t pages) {
  SCOPED_TRACE(layout.format() + ", " + std::to_string(pages) + " pages of " + std::to_string(page_blocks));
  Rng rng(seed);
  const std::uint32_t count = page_blocks * pages;
  const std::uint32_t capacity = count + 5;
  const auto offsets = support::pool_offsets(layout, capacity);
  Bytes pool(offsets.back());
  support::fill(pool, rng);
  const auto pool_blocks = support::scattered(count, capacity, rng);

  Bytes want;
  for (std::uint32_t page = 0; page < pages; ++page) {
    append_page(want, layout, page_blocks, pool, offsets,
                std::span(pool_blocks).subspan(page * page_blocks, page_blocks));
  }
  Bytes got(layout.page_bytes(page_blocks) * pages);
  copy_all(layout, CopyDirection::to_page, page_blocks, got.data(), pool.data(), offsets, pool_blocks);
  EXPECT_TRUE(got == want) << "gathered pages differ";

  // Back into another pool: the blocks are those of the first, and nothing else is written.
  Bytes other(pool.size(), untouched);
  copy_all(layout, CopyDirection::to_pool, page_blocks, got.data(), other.data(), offsets, pool_blocks);
  Bytes expected(pool.size(), untouched);
  for (std::uint32_t plane = 0; plane < layout.planes().size(); ++plane) {
    const std::uint64_t bytes = layout.plane_block_bytes(plane);
    for (const std::uint32_t block : pool_blocks) {
      const std::uint64_t at = offsets[plane] + block * bytes;
      std::copy_n(pool.begin() + static_cast<std::ptrdiff_t>(at), bytes,
                  expected.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
  EXPECT_TRUE(other == expected) << "scattered pool differs";
  EXPECT_TRUE(got == want) << "scatter wrote its source";
}

TEST(PageCopy, V41HasEightPlanesAnd890BytesForEachToken) {
  const kv::Layout layout = kv::layout_v41();
  ASSERT_EQ(layout.planes().size(), 8U);
  ASSERT_EQ(layout.block_bytes(), 890U * layout.block_tokens());
  ASSERT_EQ(layout.page_blocks(), 8U);
  for (const std::uint32_t page_blocks : {1u, 3u, 8u}) check(layout, page_blocks, 2);
}

TEST(PageCopy, V3) {
  const auto layout = kv::layout_mla("mla-bf16-1", 64, 61, 1152);
  ASSERT_TRUE(layout.ok());
  check(*layout, layout->page_blocks(), 3);
  // Short prefixes of it: one layer, and blocks that are smaller than a page.
  const auto small = kv::layout_mla("mla-bf16-1", 32, 5, 1152);
  ASSERT_TRUE(small.ok());
  for (const std::uint32_t page_blocks : {1u, 2u, 5u}) check(*small, page_blocks, 3);
}

TEST(PageCopy, OddBytes) {
  for (const std::uint32_t page_blocks : {1u, 3u, 7u}) check(support::layout_odd(), page_blocks, 3);
}

TEST(PageCopy, NothingIsCopiedForAnEmptyList) {
  std::byte pool[16]{};
  std::byte page[16]{untouched};
  const PlaneCopy plane{pool, 0, 16};
  const BlockCopy block{page, 1, 0, 0};
  page_copy_ref({CopyDirection::to_page, &plane, 1, &block, 0});
  page_copy_ref({CopyDirection::to_page, &plane, 0, &block, 1});
  EXPECT_EQ(page[0], untouched);
}

}  // namespace
}  // namespace di::kernels
