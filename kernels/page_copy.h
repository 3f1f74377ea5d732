// kernels/page_copy.h: KV blocks between the pages of an arena and the paged pool of a rank.
//
// A layer group's segment of a page holds its planes one after the other, a plane its blocks one after the
// other (lib/kv/layout.h); a pool holds each plane as an array of blocks.  One block of one plane is a
// piece, contiguous on both sides, from a few hundred bytes to some hundred KiB.  A copy is a list of blocks
// times a list of planes, so that a launch of thousands of pieces needs a descriptor of 24 bytes for each
// block.
//
// Pure: no allocation, no state.  The caller has checked every address; lists and memory stay as they are
// until the copy is over.  Blocks of one copy may not overlap where they are written.  Padding at the end
// of a segment is not touched.
// Reference: ref/page_copy.cpp.  Tolerance against it: none, bytes are equal.
#pragma once

#include <cstddef>
#include <cstdint>

namespace di::kernels {

// Planes of one copy.  A layer group with more takes several copies, each with a part of its planes.
inline constexpr std::uint32_t copy_planes_max = 64;

enum class CopyDirection : std::uint8_t {
  to_pool,  // scatter: what was fetched becomes the rank's
  to_page,  // gather: what was computed is exported
};

// One plane of a layer group.
struct PlaneCopy {
  std::byte* pool = nullptr;       // its block 0; blocks are `bytes` apart
  std::uint64_t before_bytes = 0;  // of one block of all planes in front of it in the segment
  std::uint64_t bytes = 0;         // of one block of this plane
};

// One block: all planes of the copy.
struct BlockCopy {
  std::byte* segment = nullptr;   // of the layer group, in a page
  std::uint32_t page_blocks = 0;  // blocks that the page has
  std::uint32_t index = 0;        // of this block in its page
  std::uint32_t pool_block = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(BlockCopy) == 24);

struct PageCopy {
  CopyDirection direction = CopyDirection::to_pool;
  const PlaneCopy* planes = nullptr;  // [plane_count], read by the call itself
  std::uint32_t plane_count = 0;
  const BlockCopy* blocks = nullptr;  // [block_count], read while the copy runs
  std::uint32_t block_count = 0;
};

// Where a piece lies in its segment.
[[nodiscard]] constexpr std::uint64_t piece_offset(const PlaneCopy& plane, const BlockCopy& block) {
  return plane.before_bytes * block.page_blocks + plane.bytes * block.index;
}

// The reference, in memory of the host.
void page_copy_ref(const PageCopy& copy);

// The same on a GPU: segments, pool and blocks are device memory or pinned host memory that the device can
// address.  Enqueues on `stream` (a cudaStream_t), does not wait.  Takes at most `sm_max` multiprocessors'
// worth of thread blocks (0: as many as help), so that a copy leaves room for what computes beside it. Pieces
// whose two ends are equally aligned to 16 bytes go in 16-byte words, others byte by byte. Returns 0, or a
// cudaError_t: more than copy_planes_max planes, more than 16 TiB, or a launch that failed. Only where CUDA
// was found (DI_CUDA).
[[nodiscard]] int page_copy_cuda(const PageCopy& copy, std::uint32_t sm_max, void* stream);

}  // namespace di::kernels
