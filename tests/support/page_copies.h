// tests/support/page_copies.h: the lists of kernels/page_copy.h for a layout, for tests and benchmarks.
//
// Plain functions; the memory is the caller's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/rng.h"
#include "kernels/page_copy.h"
#include "kv/layout.h"

namespace di::support {

// Where the planes of a pool of `blocks` blocks begin; the last element is the pool's length.
inline std::vector<std::uint64_t> pool_offsets(const kv::Layout& layout, std::uint32_t blocks) {
  std::vector<std::uint64_t> offsets{0};
  for (std::uint32_t plane = 0; plane < layout.planes().size(); ++plane) {
    offsets.push_back(align_up(offsets.back() + layout.plane_block_bytes(plane) * blocks, 64));
  }
  return offsets;
}

inline std::vector<kernels::PlaneCopy> group_planes(const kv::Layout& layout, std::uint32_t group,
                                                    std::span<const std::uint64_t> offsets, std::byte* pool) {
  std::vector<kernels::PlaneCopy> planes;
  for (std::uint32_t p = layout.group_first_plane(group); p < layout.group_last_plane(group); ++p) {
    // In a page of one block the offset is what the planes in front have of one block.
    planes.push_back({pool + offsets[p], layout.plane_offset(p, 1), layout.plane_block_bytes(p)});
  }
  return planes;
}

// Block i of a chain is block i of page after page, and pool_blocks[i] of the pool.
inline std::vector<kernels::BlockCopy> group_blocks(const kv::Layout& layout, std::uint32_t group,
                                                    std::uint32_t page_blocks, std::byte* pages,
                                                    std::span<const std::uint32_t> pool_blocks) {
  std::vector<kernels::BlockCopy> blocks;
  for (std::uint32_t i = 0; i < pool_blocks.size(); ++i) {
    std::byte* const page = pages + i / page_blocks * layout.page_bytes(page_blocks);
    blocks.push_back(
        {page + layout.segment_offset(group, page_blocks), page_blocks, i % page_blocks, pool_blocks[i]});
  }
  return blocks;
}

// `count` different blocks of a pool in no order.
inline std::vector<std::uint32_t> scattered(std::uint32_t count, std::uint32_t pool_blocks, Rng& rng) {
  std::vector<std::uint32_t> all(pool_blocks);
  for (std::uint32_t i = 0; i < pool_blocks; ++i) all[i] = i;
  for (std::uint32_t i = 0; i < count; ++i) std::swap(all[i], all[i + rng.below(pool_blocks - i)]);
  all.resize(count);
  return all;
}

inline void fill(std::span<std::byte> bytes, Rng& rng) {
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng.next());
}

// Two planes of 7 and 13 bytes for each token, three owners: nothing lies at a multiple of 16.
inline kv::Layout layout_odd() {
  std::vector<kv::Plane> planes;
  for (const std::uint32_t layer : {0u, 3u, 4u}) {
    planes.push_back({"seven", layer, 1, 7});
    planes.push_back({"thirteen", layer, 1, 13});
  }
  auto layout = kv::Layout::create("odd-0", 1, std::move(planes));
  DI_ASSERT(layout.ok());
  return *std::move(layout);
}

}  // namespace di::support
