// kernels/cuda/page_copy.cu: gather and scatter of KV blocks (kernels/page_copy.h).
//
// Tiling: a piece (one plane of one block) is cut into chunks of chunk_bytes; thread blocks of 128 threads
// walk the chunks of the whole copy with a stride of the grid.  A thread moves four words of 16 bytes of a
// chunk: it loads all four before it stores the first, which is what keeps enough reads in flight when the
// page is on the other side of PCIe.  The planes' table is a parameter of the kernel (constant memory), a
// block's descriptor one read of 24 bytes that all threads of a warp share.
//
// No shared memory.  Bytes are read and written once, so both sides pass by L1.
#include <cuda_runtime.h>

#include "kernels/page_copy.h"

namespace di::kernels {

namespace {

constexpr std::uint32_t threads = 128;
constexpr std::uint32_t words_per_thread = 4;
constexpr std::uint32_t word_bytes = 16;
constexpr std::uint32_t chunk_bytes = threads * words_per_thread * word_bytes;  // 8 KiB
// Thread blocks for each multiprocessor: 64 KiB of reads in flight on each, twice what the memory of an H200
// needs (4.8 TB/s times 0.7 us over 132 multiprocessors).
constexpr std::uint32_t blocks_per_sm = 8;
// Keeps a chunk's number plus the grid in 32 bits: 16 TiB in one copy.
constexpr std::uint32_t chunks_max = 1u << 31;

struct Planes {
  PlaneCopy plane[copy_planes_max];
  std::uint32_t
      first_chunk[copy_planes_max + 1];  // of each plane within a block; the last: chunks of a block
};

__device__ __forceinline__ uint4 load_word(const std::byte* at) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(at));
  return word;
}

__device__ __forceinline__ void store_word(std::byte* at, uint4 word) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(at), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

// A whole chunk or the end of a piece; both sides lie at multiples of 16 bytes.
__device__ __forceinline__ void copy_words(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  const std::uint32_t words = bytes / word_bytes;
  uint4 word[words_per_thread];
#pragma unroll
  for (std::uint32_t i = 0; i < words_per_thread; ++i) {
    const std::uint32_t at = threadIdx.x + i * threads;
    if (at < words) word[i] = load_word(from + std::size_t{at} * word_bytes);
  }
#pragma unroll
  for (std::uint32_t i = 0; i < words_per_thread; ++i) {
    const std::uint32_t at = threadIdx.x + i * threads;
    if (at < words) store_word(to + std::size_t{at} * word_bytes, word[i]);
  }
  const std::uint32_t done = words * word_bytes;
  if (threadIdx.x < bytes - done) to[done + threadIdx.x] = from[done + threadIdx.x];
}

// No layout we serve comes here; one with an odd number of bytes for each token might.
__device__ __forceinline__ void copy_bytes(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  for (std::uint32_t at = threadIdx.x; at < bytes; at += threads) to[at] = from[at];
}

template <CopyDirection direction>
__global__ void __launch_bounds__(threads)
    copy_chunks(const __grid_constant__ Planes planes, std::uint32_t plane_count,
                const BlockCopy* __restrict__ blocks, std::uint32_t chunks) {
  const std::uint32_t chunks_per_block = planes.first_chunk[plane_count];
  for (std::uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const std::uint32_t block_index = chunk / chunks_per_block;
    const std::uint32_t in_block = chunk - block_index * chunks_per_block;
    std::uint32_t p = 0;
    while (planes.first_chunk[p + 1] <= in_block) ++p;
    const PlaneCopy& plane = planes.plane[p];
    const BlockCopy block = blocks[block_index];
    const std::uint64_t at = std::uint64_t{in_block - planes.first_chunk[p]} * chunk_bytes;
    std::byte* const in_page = block.segment + piece_offset(plane, block) + at;
    std::byte* const in_pool = plane.pool + plane.bytes * block.pool_block + at;
    std::byte* const to = direction == CopyDirection::to_pool ? in_pool : in_page;
    const std::byte* const from = direction == CopyDirection::to_pool ? in_page : in_pool;
    const std::uint64_t left = plane.bytes - at;
    const auto bytes = static_cast<std::uint32_t>(left < chunk_bytes ? left : chunk_bytes);
    if (((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) &
         (word_bytes - 1)) == 0) {
      copy_words(to, from, bytes);
    } else {
      copy_bytes(to, from, bytes);
    }
  }
}

}  // namespace

int page_copy_cuda(const PageCopy& copy, std::uint32_t sm_max, void* stream) {
  if (copy.plane_count > copy_planes_max) return cudaErrorInvalidValue;
  Planes planes;
  std::uint32_t chunks_per_block = 0;
  for (std::uint32_t p = 0; p < copy.plane_count; ++p) {
    const std::uint64_t chunks = (copy.planes[p].bytes + chunk_bytes - 1) / chunk_bytes;
    if (chunks > chunks_max - chunks_per_block) return cudaErrorInvalidValue;
    planes.plane[p] = copy.planes[p];
    planes.first_chunk[p] = chunks_per_block;
    chunks_per_block += static_cast<std::uint32_t>(chunks);
  }
  planes.first_chunk[copy.plane_count] = chunks_per_block;
  const std::uint64_t all = std::uint64_t{chunks_per_block} * copy.block_count;
  if (all > chunks_max) return cudaErrorInvalidValue;
  if (all == 0) return cudaSuccess;
  const auto chunks = static_cast<std::uint32_t>(all);

  int device = 0;
  int multiprocessors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  auto used = static_cast<std::uint32_t>(multiprocessors);
  if (sm_max > 0 && sm_max < used) used = sm_max;
  const std::uint32_t grid = chunks < used * blocks_per_sm ? chunks : used * blocks_per_sm;
  auto* const on = static_cast<cudaStream_t>(stream);
  if (copy.direction == CopyDirection::to_pool) {
    copy_chunks<CopyDirection::to_pool>
        <<<grid, threads, 0, on>>>(planes, copy.plane_count, copy.blocks, chunks);
  } else {
    copy_chunks<CopyDirection::to_page>
        <<<grid, threads, 0, on>>>(planes, copy.plane_count, copy.blocks, chunks);
  }
  return cudaGetLastError();
}

}  // namespace di::kernels
