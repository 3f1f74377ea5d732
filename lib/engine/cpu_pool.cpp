#include "engine/cpu_pool.h"

#include <sys/mman.h>

#include <utility>

#include "base/assert.h"

namespace di::engine {

Result<CpuPool> CpuPool::create(const kv::Layout& layout, std::uint32_t blocks) {
  if (blocks == 0) return Error{Code::invalid, 0, "the pool has no blocks"};
  CpuPool pool;
  pool.blocks_ = blocks;
  std::uint64_t offset = 0;
  for (std::uint32_t plane = 0; plane < layout.planes().size(); ++plane) {
    pool.plane_offset_.push_back(offset);
    pool.plane_block_bytes_.push_back(layout.plane_block_bytes(plane));
    offset += align_up(layout.plane_block_bytes(plane) * blocks, 64);  // a block is below 2^30 bytes
  }
  void* data = ::mmap(nullptr, offset, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Error{Code::no_space, 0, "no memory for a pool of " + std::to_string(offset) + " bytes"};
  }
  pool.data_ = static_cast<std::byte*>(data);
  pool.bytes_ = offset;
  pool.free_.reserve(blocks);
  for (std::uint32_t block = blocks; block > 0; --block) pool.free_.push_back(block - 1);
  return pool;
}

CpuPool::~CpuPool() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

CpuPool::CpuPool(CpuPool&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      blocks_(other.blocks_),
      plane_offset_(std::move(other.plane_offset_)),
      plane_block_bytes_(std::move(other.plane_block_bytes_)),
      free_(std::move(other.free_)) {}

Result<std::vector<std::uint32_t>> CpuPool::take(std::uint32_t count) {
  if (count > free_.size()) return Error{Code::busy, 0, "the pool has no room"};
  std::vector<std::uint32_t> out(count);
  for (std::uint32_t& block : out) {
    block = free_.back();
    free_.pop_back();
  }
  return out;
}

void CpuPool::give_back(const std::vector<std::uint32_t>& blocks) {
  for (const std::uint32_t block : blocks) {
    DI_ASSERT(block < blocks_ && free_.size() < blocks_);
    free_.push_back(block);
  }
}

}  // namespace di::engine
