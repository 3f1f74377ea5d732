// engine/cpu_pool.h: the KV blocks of one rank.
//
// Owner: the engine thread.  Bound: `blocks` at creation; one mapping, taken then.  A block is free or
// belongs to one sequence.  Plane by plane, inside a plane block by block, so that a block of a plane is
// contiguous: [block_tokens, entry].  Bytes of a taken block are undefined until written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/result.h"
#include "kv/layout.h"

namespace di::engine {

class CpuPool {
 public:
  // Errors: no_space, invalid (zero blocks or more than fit the address space).
  [[nodiscard]] static Result<CpuPool> create(const kv::Layout& layout, std::uint32_t blocks);
  ~CpuPool();
  CpuPool(CpuPool&& other) noexcept;
  CpuPool& operator=(CpuPool&&) = delete;
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;

  // All or nothing.  Errors: busy.
  [[nodiscard]] Result<std::vector<std::uint32_t>> take(std::uint32_t count);
  void give_back(const std::vector<std::uint32_t>& blocks);

  [[nodiscard]] std::byte* at(std::uint32_t plane, std::uint32_t block) const {
    return data_ + plane_offset_[plane] + block * plane_block_bytes_[plane];
  }
  [[nodiscard]] std::uint32_t blocks() const { return blocks_; }
  [[nodiscard]] std::uint32_t blocks_used() const {
    return blocks_ - static_cast<std::uint32_t>(free_.size());
  }

 private:
  CpuPool() = default;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint32_t blocks_ = 0;
  std::vector<std::uint64_t> plane_offset_;
  std::vector<std::uint64_t> plane_block_bytes_;
  std::vector<std::uint32_t> free_;  // a stack: the last one given back is taken first, while it is warm
};

}  // namespace di::engine
