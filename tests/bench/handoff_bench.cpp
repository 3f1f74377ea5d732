// What it costs that pages reach an engine through the arena (kv/arena.h), between two processes:
//
//   wake   from before the owner's entry_set() to after the engine's wait(), against the same way over a bare
//          futex (half its round trip); both are read from one clock, in turns
//   pages  pages of 512 KiB that are handed over and read in place, against a ring of descriptors in shared
//          memory with the same reader
//
//   handoff_bench [ROUNDS]      default 11
//
// In each round every case once; a row is the median, and the median of the ratios.  Readers spin in neither
// case.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "base/assert.h"
#include "kv/arena.h"
#include "kv/layout.h"

namespace {

using namespace di;

constexpr std::uint32_t generation = 3;
constexpr std::uint32_t pages = 64;
constexpr std::uint32_t laps = 32;  // of the pages in a round
constexpr std::uint32_t wakes = 4000;

kv::Layout bench_layout() {
  return *kv::layout_mla("bench-1", 32, 8, 2048);  // a block is 512 KiB
}

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                    std::chrono::nanoseconds(1));
}

using Word = std::atomic<std::uint32_t>;

void word_wait(Word& word, std::uint32_t seen) {
  while (word.load(std::memory_order_acquire) == seen)
    ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, nullptr, nullptr, 0);
}

void word_set(Word& word, std::uint32_t value) {
  word.store(value, std::memory_order_release);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

// Beside the arena, in memory of both processes.
struct Shared {
  alignas(64) Word ask{0};     // to the engine: which case, and which number of it
  alignas(64) Word answer{0};  // the engine has had so many
  alignas(64) Word filled{0};  // descriptors in the ring
  struct Descriptor {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  std::array<Descriptor, pages> ring;
  std::atomic<std::uint64_t> sum{0};
  std::atomic<std::uint64_t> woken_ns{0};  // when the engine last came back from waiting
};

enum class Case : std::uint32_t { futex, wake, ring, arena, end };
constexpr std::uint32_t ask_of(Case which, std::uint32_t turn) {
  return static_cast<std::uint32_t>(which) << 28 | (turn & 0x0fffffff);
}

// Reads all of a page; what is done with it counts as the engine's work in both cases.
std::uint64_t read_page(ByteView bytes) {
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at + 8 <= bytes.size(); at += 8) sum += get_le<std::uint64_t>(bytes.data() + at);
  return sum;
}

kv::SlotRef ref_of(std::uint32_t slot) {
  return {slot, 1, 1, 0, 1};
}

// The engine's process.
[[noreturn]] void engine(Shared& shared, int fd, std::uint64_t bytes, std::uint32_t entry) {
  auto arena = kv::ArenaClient::map(fd, bytes);
  DI_ASSERT(arena.ok());
  const kv::Layout layout = bench_layout();
  std::uint32_t seen = 0;
  std::uint32_t answered = 0;
  while (true) {
    word_wait(shared.ask, seen);
    shared.woken_ns.store(now_ns());
    seen = shared.ask.load(std::memory_order_acquire);
    switch (static_cast<Case>(seen >> 28)) {
      case Case::futex:
        break;
      case Case::wake:
        // The owner sets the entry when this says that it waits.
        word_set(shared.answer, ++answered);
        (*arena)->wait(entry, 0, seconds(10));
        shared.woken_ns.store(now_ns());
        break;
      case Case::ring: {
        std::uint64_t sum = 0;
        std::uint32_t taken = 0;
        while (taken < pages) {
          word_wait(shared.filled, taken);
          const std::uint32_t filled = shared.filled.load(std::memory_order_acquire);
          for (; taken < filled; ++taken) {
            const Shared::Descriptor& one = shared.ring[taken];
            sum += read_page((*arena)->memory().subspan(one.offset, one.bytes));
          }
        }
        shared.sum.store(sum);
        break;
      }
      case Case::arena: {
        std::uint64_t sum = 0;
        for (std::uint32_t group = 0; group < layout.groups(); ++group) {
          (*arena)->wait(entry, group, seconds(10));
          for (std::uint32_t slot = 0; slot < pages; ++slot) {
            const Result<ByteView> segment = (*arena)->segment(layout, ref_of(slot), group);
            DI_ASSERT(segment.ok());
            sum += read_page(*segment);
          }
        }
        shared.sum.store(sum);
        break;
      }
      case Case::end:
        std::exit(0);
    }
    word_set(shared.answer, ++answered);
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 11;
  const kv::Layout layout = bench_layout();
  const std::uint64_t page_bytes = layout.page_bytes(1);
  auto owner = *kv::ArenaOwner::create({.name = "handoff",
                                        .generation = generation,
                                        .payload_bytes = pages * page_bytes,
                                        .slots_max = pages,
                                        .entries_max = 4,
                                        .prefault = true});
  for (std::uint32_t slot = 0; slot < pages; ++slot) {
    owner->slot_assign({slot, 1, 1, slot * page_bytes, page_bytes, kv::SlotState::filling});
    const MutableByteView to = owner->payload(slot * page_bytes, page_bytes);
    for (std::size_t at = 0; at < to.size(); at += 8) put_le<std::uint64_t>(&to[at], slot + at);
  }
  std::uint64_t expected = 0;
  for (std::uint32_t slot = 0; slot < pages; ++slot)
    expected += read_page(owner->payload(slot * page_bytes, page_bytes));
  void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  DI_ASSERT(memory != MAP_FAILED);
  Shared& shared = *new (memory) Shared;
  const std::uint32_t entry = (1u << 16) | 1u;
  const pid_t child = ::fork();
  DI_ASSERT(child >= 0);
  if (child == 0) engine(shared, owner->fd(), owner->bytes(), entry);

  std::uint32_t turn = 0;
  std::uint32_t answered = 0;
  const auto await = [&] {
    word_wait(shared.answer, answered);
    ++answered;
  };
  // Each returns how long the engine took to come back from waiting, in microseconds.
  const auto futex = [&] {
    const std::uint64_t begin = now_ns();
    word_set(shared.ask, ask_of(Case::futex, ++turn));
    await();
    return static_cast<double>(shared.woken_ns.load() - begin) * 1e-3;
  };
  const auto wake = [&] {
    owner->entry_open(entry);
    word_set(shared.ask, ask_of(Case::wake, ++turn));
    await();  // the engine is about to wait
    const std::uint64_t begin = now_ns();
    owner->entry_set(entry, {1, wire::block_none});
    await();
    const double took = static_cast<double>(shared.woken_ns.load() - begin) * 1e-3;
    owner->entry_close(entry);
    return took;
  };
  const auto ring = [&] {
    for (std::uint32_t lap = 0; lap < laps; ++lap) {
      shared.filled.store(0);
      word_set(shared.ask, ask_of(Case::ring, ++turn));
      for (std::uint32_t slot = 0; slot < pages; ++slot) {
        shared.ring[slot] = {slot * page_bytes, page_bytes};
        word_set(shared.filled, slot + 1);
      }
      await();
      DI_ASSERT(shared.sum.load() == expected);
    }
  };
  const auto arena = [&] {
    for (std::uint32_t lap = 0; lap < laps; ++lap) {
      for (std::uint32_t slot = 0; slot < pages; ++slot) owner->slot_segments(slot, 0);
      owner->entry_open(entry);
      word_set(shared.ask, ask_of(Case::arena, ++turn));
      for (std::uint32_t group = 0; group < layout.groups(); ++group) {
        for (std::uint32_t slot = 0; slot < pages; ++slot) owner->slot_segments(slot, (2u << group) - 1);
        owner->entry_set(entry, {group + 1, wire::block_none});
      }
      await();
      DI_ASSERT(shared.sum.load() == expected);
      owner->entry_close(entry);
    }
  };

  std::vector<double> futex_us, wake_us, wake_ratio, ring_rate, arena_rate, arena_ratio;
  for (int round = 0; round < rounds; ++round) {
    std::vector<double> bare, woken;
    for (std::uint32_t i = 0; i < wakes; ++i) {
      bare.push_back(futex());
      woken.push_back(wake());
    }
    futex_us.push_back(median(std::move(bare)));
    wake_us.push_back(median(std::move(woken)));
    wake_ratio.push_back(wake_us.back() / futex_us.back());
    const double moved = static_cast<double>(laps) * pages * static_cast<double>(page_bytes) * 1e-9;
    ring_rate.push_back(moved / seconds_of(ring));
    arena_rate.push_back(moved / seconds_of(arena));
    arena_ratio.push_back(arena_rate.back() / ring_rate.back());
  }
  word_set(shared.ask, ask_of(Case::end, 0));
  ::waitpid(child, nullptr, 0);
  std::printf("wake: %.2f us, a bare futex %.2f us; ratio %.2f (want at most 1.5)\n", median(wake_us),
              median(futex_us), median(wake_ratio));
  std::printf("pages: %.2f GB/s, ring of descriptors %.2f GB/s; ratio %.2f (want at least 0.9)\n",
              median(arena_rate), median(ring_rate), median(arena_ratio));
  return 0;
}
