#include "kernels/page_copy.h"

#include <cstring>

namespace di::kernels {

void page_copy_ref(const PageCopy& copy) {
  for (std::uint32_t b = 0; b < copy.block_count; ++b) {
    const BlockCopy& block = copy.blocks[b];
    for (std::uint32_t p = 0; p < copy.plane_count; ++p) {
      const PlaneCopy& plane = copy.planes[p];
      std::byte* in_page = block.segment + piece_offset(plane, block);
      std::byte* in_pool = plane.pool + plane.bytes * block.pool_block;
      if (copy.direction == CopyDirection::to_pool) {
        std::memcpy(in_pool, in_page, plane.bytes);
      } else {
        std::memcpy(in_page, in_pool, plane.bytes);
      }
    }
  }
}

}  // namespace di::kernels
