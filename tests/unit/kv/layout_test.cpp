#include "kv/layout.h"

#include <gtest/gtest.h>

namespace di::kv {
namespace {

Layout demo() {
  auto layout = layout_mla("mla-f32-1", 32, 8, 128);  // 1,024 bytes per token
  EXPECT_TRUE(layout.ok());
  return *std::move(layout);
}

// Worked examples of design.md section 0 and path.md section 3.
TEST(Layout, demo_model_has_32_blocks_in_a_page) {
  const Layout layout = demo();
  EXPECT_EQ(layout.block_bytes(), 32u * 1024u);
  EXPECT_EQ(layout.page_blocks(), 32u);
  EXPECT_EQ(layout.page_bytes(32), 1u << 20);
  EXPECT_EQ(layout.groups(), 8u);
}

TEST(Layout, v3_in_bf16_has_one_block_in_a_page) {
  const Result<Layout> layout = layout_v3();  // 70,272 bytes per token
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->block_bytes(), 64u * 70272u);
  EXPECT_EQ(layout->page_blocks(), 1u);
  // ceil(61 / 8) = 8 layers to a group: seven of 8 and one of 5.
  EXPECT_EQ(layout->groups(), 8u);
  EXPECT_EQ(layout->group_last_layer(0), 7u);
  EXPECT_EQ(layout->group_last_layer(7), 60u);
  EXPECT_EQ(layout->segment_bytes(7, 1), align_up(5u * 64u * 1152u, 4096));
}

TEST(Layout, v41_has_eight_blocks_in_a_page_of_917504_bytes) {
  const Layout layout = layout_v41();
  EXPECT_EQ(layout.block_bytes(), 113920u);
  EXPECT_EQ(layout.page_blocks(), 8u);
  EXPECT_EQ(layout.groups(), 4u);
  EXPECT_EQ(layout.planes().size(), 8u);
  EXPECT_EQ(layout.page_bytes(8), 917504u);
}

TEST(Layout, segments_and_planes_lie_one_after_the_other) {
  for (const Layout& layout : {demo(), layout_v41()}) {
    for (std::uint32_t blocks = 1; blocks <= layout.page_blocks(); ++blocks) {
      std::uint64_t offset = 0;
      for (std::uint32_t group = 0; group < layout.groups(); ++group) {
        EXPECT_EQ(layout.segment_offset(group, blocks), offset);
        EXPECT_EQ(offset % segment_align_bytes, 0u);
        std::uint64_t inside = 0;
        for (std::uint32_t plane = layout.group_first_plane(group); plane < layout.group_last_plane(group);
             ++plane) {
          EXPECT_EQ(layout.plane_offset(plane, blocks), inside);
          inside += layout.plane_block_bytes(plane) * blocks;
        }
        EXPECT_LE(inside, layout.segment_bytes(group, blocks));
        EXPECT_GT(inside + segment_align_bytes, layout.segment_bytes(group, blocks));
        offset += layout.segment_bytes(group, blocks);
      }
      EXPECT_EQ(layout.page_bytes(blocks), offset);
    }
  }
}

TEST(Layout, page_is_the_largest_power_of_two_within_one_mib) {
  const Layout layout = demo();
  EXPECT_LE(layout.block_bytes() * layout.page_blocks(), page_payload_bytes_max);
  EXPECT_GT(layout.block_bytes() * layout.page_blocks() * 2, page_payload_bytes_max);
}

TEST(Layout, descriptor_comes_back) {
  for (const Layout& layout : {demo(), layout_v41()}) {
    const auto back = Layout::decode(layout.descriptor());
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(*back, layout);
    EXPECT_EQ(back->fingerprint(), layout.fingerprint());
    EXPECT_EQ(back->format(), layout.format());
    EXPECT_EQ(back->planes(), layout.planes());
    EXPECT_EQ(back->page_bytes(1), layout.page_bytes(1));
  }
}

TEST(Layout, every_truncation_of_a_descriptor_is_refused) {
  const Layout layout = layout_v41();
  for (std::size_t length = 0; length < layout.descriptor().size(); ++length) {
    EXPECT_FALSE(Layout::decode(ByteView(layout.descriptor()).first(length)).ok()) << length;
  }
  Bytes longer = layout.descriptor();
  longer.push_back(std::byte{0});
  EXPECT_FALSE(Layout::decode(longer).ok());
}

// A changed byte is refused or is another layout; it is never taken for the same one.
TEST(Layout, changed_descriptor_never_passes_for_the_same_layout) {
  const Layout layout = layout_v41();
  for (std::size_t at = 0; at < layout.descriptor().size(); ++at) {
    Bytes changed = layout.descriptor();
    changed[at] ^= std::byte{0x10};
    const auto back = Layout::decode(changed);
    if (!back.ok()) continue;
    EXPECT_NE(back->fingerprint(), layout.fingerprint()) << at;
  }
}

TEST(Layout, unknown_version_is_unsupported) {
  Bytes changed = layout_v41().descriptor();
  changed[4 + 10] = std::byte{1};  // after the counted tag
  EXPECT_EQ(Layout::decode(changed).error().code, Code::unsupported);
}

// F19: sums of sizes that come out small again in 32 bits.
TEST(Layout, a_block_has_at_most_one_gib) {
  constexpr std::uint32_t mib = 1 << 20;
  const auto largest = Layout::create("f", 1024, {{"kv", 0, 1, mib}});
  ASSERT_TRUE(largest.ok()) << largest.error().message;
  EXPECT_EQ(largest->block_bytes(), std::uint64_t{1} << 30);
  EXPECT_EQ(largest->page_blocks(), 1u);
  EXPECT_EQ(largest->page_bytes(1), std::uint64_t{1} << 30);
  for (const std::vector<Plane>& planes :
       {std::vector<Plane>{{"kv", 0, 1, mib}, {"more", 0, 4096, 1}},     // 4 GiB and one byte
        std::vector<Plane>{{"kv", 0, 1, mib}},                           // 4 GiB, which is 0
        std::vector<Plane>{{"kv", 0, 1, mib - 1}},                       // 4 GiB less 4 KiB
        std::vector<Plane>{{"kv", 0, 4, mib}, {"more", 0, 4096, 1}}}) {  // 1 GiB and one byte
    const auto made = Layout::create("f", 4096, planes);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().message, "layout: a block has more than 1 GiB");
  }
}

TEST(Layout, wrong_fields_are_refused_by_name) {
  EXPECT_FALSE(Layout::create("", 32, {{"kv", 0, 1, 8}}).ok());
  EXPECT_FALSE(Layout::create("f", 33, {{"kv", 0, 1, 8}}).ok());
  EXPECT_FALSE(Layout::create("f", 0, {{"kv", 0, 1, 8}}).ok());
  EXPECT_FALSE(Layout::create("f", 32, {}).ok());
  EXPECT_FALSE(Layout::create("f", 32, {{"kv", 1, 1, 8}, {"kv", 0, 1, 8}}).ok());
  const auto uneven = Layout::create("f", 32, {{"main", 0, 3, 8}});
  ASSERT_FALSE(uneven.ok());
  EXPECT_EQ(uneven.error().message, "layout: plane main: tokens_per_entry must divide block_tokens");
  EXPECT_FALSE(Layout::create("f", 32, {{"kv", 0, 1, 0}}).ok());
}

}  // namespace
}  // namespace di::kv
