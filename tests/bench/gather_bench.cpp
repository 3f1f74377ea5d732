// Moving KV blocks between pages and a GPU's pool: the kernel of kernels/page_copy.h against the copy engine,
// piece by piece and as one batch, and against one contiguous copy, which is what the link gives.
//
//   gather_bench [MIB]      payload of a copy, default 256
//
// One tab-separated row per layout, place of the pages, direction and way: GB/s of payload (best of several
// runs), the ratio to the contiguous copy, pieces of a copy.  Without a GPU it says SKIP.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/page_copies.h"

namespace {

using namespace di;
using kernels::BlockCopy;
using kernels::CopyDirection;
using kernels::PlaneCopy;

constexpr int runs = 7;
constexpr std::uint64_t seed = 92;

void ok(int status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "gather_bench: %s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(status)));
  std::exit(1);
}

// Best seconds of one run; the first is not counted.
double seconds_of(cudaStream_t stream, const std::function<void()>& work) {
  cudaEvent_t start = nullptr;
  cudaEvent_t end = nullptr;
  ok(cudaEventCreate(&start), "event");
  ok(cudaEventCreate(&end), "event");
  float best_ms = 1e30f;
  for (int run = 0; run <= runs; ++run) {
    ok(cudaEventRecord(start, stream), "record");
    work();
    ok(cudaEventRecord(end, stream), "record");
    ok(cudaEventSynchronize(end), "copy");
    float ms = 0;
    ok(cudaEventElapsedTime(&ms, start, end), "time");
    if (run > 0) best_ms = std::min(best_ms, ms);
  }
  ok(cudaEventDestroy(start), "event");
  ok(cudaEventDestroy(end), "event");
  return static_cast<double>(best_ms) / 1e3;
}

struct Pieces {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;
};

struct Copy {
  std::vector<PlaneCopy> planes;
  std::vector<BlockCopy> blocks;
  const BlockCopy* device_blocks = nullptr;  // the same, where the kernel reads them
};

Pieces pieces_of(const std::vector<Copy>& copies, CopyDirection direction) {
  Pieces pieces;
  for (const Copy& copy : copies) {
    for (const BlockCopy& block : copy.blocks) {
      for (const PlaneCopy& plane : copy.planes) {
        std::byte* const page = block.segment + kernels::piece_offset(plane, block);
        std::byte* const pool = plane.pool + plane.bytes * block.pool_block;
        const bool to_pool = direction == CopyDirection::to_pool;
        pieces.to.push_back(to_pool ? pool : page);
        pieces.from.push_back(to_pool ? page : pool);
        pieces.bytes.push_back(plane.bytes);
      }
    }
  }
  return pieces;
}

void batch_copy(Pieces& pieces, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
  ok(cudaMemcpyBatchAsync(pieces.to.data(), pieces.from.data(), pieces.bytes.data(), pieces.to.size(),
                          &attributes, &first, 1, stream),
     "batch");
#else
  (void)pieces, (void)stream;
#endif
}

void measure(const kv::Layout& layout, bool on_host, std::uint64_t payload_bytes) {
  const std::uint32_t page_blocks = layout.page_blocks();
  const auto pages = static_cast<std::uint32_t>(
      std::max<std::uint64_t>(1, payload_bytes / (layout.block_bytes() * page_blocks)));
  const std::uint32_t count = pages * page_blocks;
  const auto offsets = support::pool_offsets(layout, count);
  const std::size_t pages_bytes = layout.page_bytes(page_blocks) * pages;
  Rng rng(seed);
  const auto pool_blocks = support::scattered(count, count, rng);

  std::byte* pool = nullptr;
  std::byte* pages_at = nullptr;
  std::byte* flat = nullptr;
  std::byte* lists = nullptr;         // as an engine makes them
  std::byte* device_lists = nullptr;  // where the kernel reads them: sent along with every copy
  const std::size_t list_bytes = sizeof(BlockCopy) * count;
  ok(cudaMalloc(&pool, offsets.back()), "pool");
  ok(cudaMalloc(&flat, pages_bytes), "target of the contiguous copy");
  ok(on_host ? cudaMallocHost(&pages_at, pages_bytes) : cudaMalloc(&pages_at, pages_bytes), "pages");
  ok(cudaMemset(pool, 1, offsets.back()), "fill");
  ok(on_host ? cudaMemcpy(pages_at, pool, std::min(pages_bytes, offsets.back()), cudaMemcpyDefault)
             : cudaMemset(pages_at, 2, pages_bytes),
     "fill");
  ok(cudaMallocHost(&lists, list_bytes * layout.groups()), "lists");
  ok(cudaMalloc(&device_lists, list_bytes * layout.groups()), "lists");
  std::vector<Copy> copies(layout.groups());
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    copies[group].planes = support::group_planes(layout, group, offsets, pool);
    copies[group].blocks = support::group_blocks(layout, group, page_blocks, pages_at, pool_blocks);
    std::memcpy(lists + list_bytes * group, copies[group].blocks.data(), list_bytes);
    copies[group].device_blocks = reinterpret_cast<const BlockCopy*>(device_lists + list_bytes * group);
  }
  ok(cudaDeviceSynchronize(), "fill");
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");

  const double payload = static_cast<double>(layout.block_bytes()) * count;
  for (const CopyDirection direction : {CopyDirection::to_pool, CopyDirection::to_page}) {
    const bool to_pool = direction == CopyDirection::to_pool;
    Pieces pieces = pieces_of(copies, direction);
    const double flat_rate = static_cast<double>(pages_bytes) / seconds_of(stream, [&] {
                               ok(cudaMemcpyAsync(to_pool ? flat : pages_at, to_pool ? pages_at : flat,
                                                  pages_bytes, cudaMemcpyDefault, stream),
                                  "contiguous");
                             });
    const auto row = [&](const std::string& way, double rate) {
      std::printf("%s\t%s\t%s\t%s\t%.1f\t%.2f\t%zu\n", layout.format().c_str(), on_host ? "host" : "device",
                  to_pool ? "to_pool" : "to_page", way.c_str(), rate / 1e9, rate / flat_rate,
                  pieces.to.size());
      std::fflush(stdout);
    };
    row("contiguous", flat_rate);
    for (const std::uint32_t sm_max : {0u, 4u, 16u}) {
      const double seconds = seconds_of(stream, [&] {
        ok(cudaMemcpyAsync(device_lists, lists, list_bytes * layout.groups(), cudaMemcpyDefault, stream),
           "lists");
        for (const Copy& copy : copies) {
          ok(kernels::page_copy_cuda(
                 {direction, copy.planes.data(), static_cast<std::uint32_t>(copy.planes.size()),
                  copy.device_blocks, count},
                 sm_max, stream),
             "kernel");
        }
      });
      row(sm_max == 0 ? "kernel" : "kernel_" + std::to_string(sm_max) + "_sm", payload / seconds);
    }
    row("memcpy_each",
        payload / seconds_of(stream, [&] {
          for (std::size_t i = 0; i < pieces.to.size(); ++i) {
            ok(cudaMemcpyAsync(pieces.to[i], pieces.from[i], pieces.bytes[i], cudaMemcpyDefault, stream),
               "piece");
          }
        }));
    if (CUDART_VERSION >= 13000) {
      row("memcpy_batch", payload / seconds_of(stream, [&] { batch_copy(pieces, stream); }));
    }
  }
  ok(cudaStreamDestroy(stream), "stream");
  ok(cudaFreeHost(lists), "free");
  ok(cudaFree(device_lists), "free");
  ok(on_host ? cudaFreeHost(pages_at) : cudaFree(pages_at), "free");
  ok(cudaFree(flat), "free");
  ok(cudaFree(pool), "free");
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIP: no CUDA device\n");
    return 0;
  }
  const long mib = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 256;
  if (mib < 1 || mib > 16384) {
    std::fprintf(stderr, "gather_bench: MIB must be 1 to 16384\n");
    return 64;
  }
  const auto v3 = kv::layout_mla("mla-bf16-1", 64, 61, 1152);
  ok(v3.ok() ? cudaSuccess : cudaErrorInvalidValue, "layout");
  std::printf("layout\tpages\tdirection\tway\tgb_per_s\tratio\tpieces\n");
  for (const bool on_host : {true, false}) {
    measure(*v3, on_host, static_cast<std::uint64_t>(mib) << 20);
    measure(kv::layout_v41(), on_host, static_cast<std::uint64_t>(mib) << 20);
  }
  return 0;
}
