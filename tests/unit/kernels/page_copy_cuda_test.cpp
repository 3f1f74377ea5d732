// The CUDA path of kernels/page_copy.h against its reference, byte for byte; needs a GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "kernels/page_copy.h"
#include "tests/support/page_copies.h"

namespace di::kernels {
namespace {

constexpr std::uint64_t seed = 91;
constexpr int untouched = 0xee;

void ok(int status) {
  ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(static_cast<cudaError_t>(status));
}

struct Memory {
  std::byte* at = nullptr;
  bool pinned = false;

  Memory(std::size_t bytes, bool on_host) : pinned(on_host) {
    void* raw = nullptr;
    const auto status = pinned ? cudaMallocHost(&raw, bytes + 1) : cudaMalloc(&raw, bytes + 1);
    if (status != cudaSuccess) ADD_FAILURE() << cudaGetErrorString(status);
    at = static_cast<std::byte*>(raw);
  }
  ~Memory() { pinned ? cudaFreeHost(at) : cudaFree(at); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

class PageCopyCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
    int major = 0;
    ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major != 9 && major != 10)
      GTEST_SKIP() << "built for sm_90a and sm_100a only, this is sm_" << major << "x";
    ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) ok(cudaStreamDestroy(stream_));
  }

  // Both directions; pages in pinned memory of the host or on the device.
  void check(const kv::Layout& layout, std::uint32_t page_blocks, std::uint32_t count, bool pages_on_host,
             std::uint32_t sm_max) {
    SCOPED_TRACE(layout.format() + ", " + std::to_string(count) + " blocks in pages of " +
                 std::to_string(page_blocks) + (pages_on_host ? " on the host" : " on the device"));
    Rng rng(seed);
    const std::uint32_t capacity = count + 5;
    const auto offsets = support::pool_offsets(layout, capacity);
    const auto pool_blocks = support::scattered(count, capacity, rng);
    const std::size_t pool_bytes = offsets.back();
    const std::size_t pages_bytes =
        layout.page_bytes(page_blocks) * ((count + page_blocks - 1) / page_blocks);
    Bytes pool(pool_bytes), pages(pages_bytes);
    support::fill(pool, rng);
    support::fill(pages, rng);

    Memory pool_memory(pool_bytes, false);
    Memory pages_memory(pages_bytes, pages_on_host);
    Memory list(sizeof(BlockCopy) * count + 1, true);
    for (const CopyDirection direction : {CopyDirection::to_page, CopyDirection::to_pool}) {
      Bytes want_pool = pool, want_pages = pages;
      ok(cudaMemcpy(pool_memory.at, pool.data(), pool_bytes, cudaMemcpyDefault));
      ok(cudaMemcpy(pages_memory.at, pages.data(), pages_bytes, cudaMemcpyDefault));
      // A copy from pageable memory may return before its last bytes arrive, and this stream waits for no
      // other.
      ok(cudaDeviceSynchronize());
      for (std::uint32_t group = 0; group < layout.groups(); ++group) {
        const auto host_planes = support::group_planes(layout, group, offsets, want_pool.data());
        const auto host_blocks =
            support::group_blocks(layout, group, page_blocks, want_pages.data(), pool_blocks);
        const auto plane_count = static_cast<std::uint32_t>(host_planes.size());
        page_copy_ref({direction, host_planes.data(), plane_count, host_blocks.data(), count});
        const auto planes = support::group_planes(layout, group, offsets, pool_memory.at);
        const auto blocks = support::group_blocks(layout, group, page_blocks, pages_memory.at, pool_blocks);
        // The list of the group before is read no more.
        ok(cudaStreamSynchronize(stream_));
        if (count > 0) std::memcpy(list.at, blocks.data(), sizeof(BlockCopy) * count);
        ok(page_copy_cuda(
            {direction, planes.data(), plane_count, reinterpret_cast<const BlockCopy*>(list.at), count},
            sm_max, stream_));
      }
      ok(cudaStreamSynchronize(stream_));
      Bytes got_pool(pool_bytes), got_pages(pages_bytes);
      ok(cudaMemcpy(got_pool.data(), pool_memory.at, pool_bytes, cudaMemcpyDefault));
      ok(cudaMemcpy(got_pages.data(), pages_memory.at, pages_bytes, cudaMemcpyDefault));
      EXPECT_TRUE(got_pool == want_pool) << "pool, direction " << static_cast<int>(direction);
      EXPECT_TRUE(got_pages == want_pages) << "pages, direction " << static_cast<int>(direction);
    }
  }

  cudaStream_t stream_ = nullptr;
};

TEST_F(PageCopyCuda, V41) {
  for (const bool on_host : {true, false}) {
    check(kv::layout_v41(), 8, 24, on_host, 0);
    check(kv::layout_v41(), 3, 9, on_host, 1);
    check(kv::layout_v41(), 1, 1, on_host, 0);
    check(kv::layout_v41(), 8, 3, on_host, 0);
    check(kv::layout_v41(), 8, 0, on_host, 0);
  }
}

TEST_F(PageCopyCuda, V3) {
  const auto layout = kv::layout_mla("mla-bf16-1", 64, 61, 1152);
  ASSERT_TRUE(layout.ok());
  for (const bool on_host : {true, false}) {
    check(*layout, 1, 1, on_host, 0);
    check(*layout, 1, 12, on_host, 4);
  }
}

TEST_F(PageCopyCuda, OddBytes) {
  for (const bool on_host : {true, false}) check(support::layout_odd(), 7, 50, on_host, 0);
}

// More blocks than one grid has thread blocks, and a piece of many chunks with an end that is none.
TEST_F(PageCopyCuda, LongLists) {
  check(support::layout_odd(), 16, 20000, false, 2);
  auto large = kv::Layout::create("large-0", 16, {{"kv", 0, 1, 65537}});
  ASSERT_TRUE(large.ok());
  check(*large, 1, 7, false, 0);
}

TEST_F(PageCopyCuda, WhatDoesNotFitIsAnError) {
  std::vector<PlaneCopy> planes(copy_planes_max + 1);
  const BlockCopy block;
  EXPECT_EQ(
      page_copy_cuda({CopyDirection::to_pool, planes.data(), copy_planes_max + 1, &block, 1}, 0, stream_),
      cudaErrorInvalidValue);
  const PlaneCopy huge{nullptr, 0, std::uint64_t{1} << 45};
  EXPECT_EQ(page_copy_cuda({CopyDirection::to_pool, &huge, 1, &block, 1}, 0, stream_), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace di::kernels
