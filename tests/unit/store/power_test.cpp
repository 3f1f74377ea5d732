// The power goes in the middle of puts, syncs and frees, with many of them in flight: what was acknowledged
// under `strict`, or more than one flush ago, is there; everything that can be read is right.
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <set>

#include "store/io.h"
#include "tests/unit/store/shelf.h"

namespace di::store {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr Duration far_away = seconds(60);

// A store's writing half: puts and syncs as the server has them, over a pool with threads.
struct Writer {
  Writer(MemoryDisk& on, const kv::Layout& kv_layout, bool is_strict)
      : layout(kv_layout), disk(on), strict(is_strict), volume(*Volume::open(disk)) {
    pool = *IoPool::create(loop, disk, {.threads = 4});
  }

  void put(std::uint64_t stripe, std::uint32_t blocks) {
    const Result<Put> begun = volume->put_begin(shard_of(layout, stripe, blocks));
    if (!begun) return;
    auto payload = std::make_shared<AlignedBuffer>();
    const Bytes bytes = payload_of(layout, stripe, blocks);
    std::copy(bytes.begin(), bytes.end(), payload->first(bytes.size()).begin());
    ColumnPut job;
    job.put = *begun;
    job.payload = [payload, size = bytes.size()]() -> Result<std::vector<ByteView>> {
      return std::vector<ByteView>{payload->first(size)};
    };
    job.done = [this, stripe, put = *begun](const PutOutcome& outcome) {
      volume->put_end(put, outcome);
      if (outcome.status.ok()) (strict ? written : acknowledged).insert(stripe);
    };
    EXPECT_TRUE(pool->put(std::move(job)).ok());
  }
  // False when there was nothing to write or one is under way.
  bool sync() {
    std::optional<Sync> begun = volume->sync_begin();
    if (!begun) return false;
    const std::set<std::uint64_t> covered = strict ? std::exchange(written, {}) : acknowledged;
    EXPECT_TRUE(pool->sync(*std::move(begun),
                           [this, covered](const Status& status) {
                             volume->sync_end(status);
                             if (!status.ok()) return;
                             // Here a strict put is acknowledged; a standard one cannot be lost any more.
                             for (const std::uint64_t stripe : covered) {
                               if (!freed.contains(stripe)) safe.insert(stripe);
                             }
                           })
                    .ok());
    return true;
  }
  void free(std::uint64_t stripe) {
    volume->free(stripe);
    for (std::set<std::uint64_t>* set : {&written, &acknowledged, &safe}) set->erase(stripe);
    freed.insert(stripe);
  }

  kv::Layout layout;
  MemoryDisk& disk;
  const bool strict;
  loop::Loop loop;
  std::unique_ptr<Volume> volume;
  std::set<std::uint64_t> written;       // strict: not acknowledged yet
  std::set<std::uint64_t> acknowledged;  // standard
  std::set<std::uint64_t> safe;
  std::set<std::uint64_t> freed;
  std::unique_ptr<IoPool> pool;
};

void run(std::uint64_t seed, bool strict) {
  Rng rng(seed);
  const kv::Layout layout = *kv::layout_mla("mla-f32-1", 32, 8, 128);  // pages of 32 to 256 KiB
  MemoryDisk disk(12 * mib);
  ASSERT_TRUE(Volume::format(disk, {1 * mib, {}}).ok());
  std::map<std::uint64_t, std::uint32_t> blocks_of;
  std::uint64_t next = 1;
  for (int life = 0; life < 4; ++life) {
    std::set<std::uint64_t> safe;
    std::set<std::uint64_t> freed;
    {
      Writer writer(disk, layout, strict);
      const int turns = 20 + static_cast<int>(rng.below(120));
      for (int turn = 0; turn < turns; ++turn) {
        const double what = rng.uniform();
        if (what < 0.6) {
          blocks_of[next] = static_cast<std::uint32_t>(1 + rng.below(8));
          writer.put(next, blocks_of[next]);
          ++next;
        } else if (what < 0.7 && !writer.safe.empty()) {
          writer.free(
              *std::next(writer.safe.begin(), static_cast<std::ptrdiff_t>(rng.below(writer.safe.size()))));
        } else if (what < 0.8) {
          writer.sync();
        } else {
          // Some of what is in flight ends, or all of it.
          if (rng.chance(0.5)) {
            writer.loop.run_ready();
          } else {
            ASSERT_TRUE(writer.loop.run_until([&] { return writer.pool->pending() == 0; }, far_away));
            writer.loop.run_ready();
          }
        }
      }
      // What the callbacks have not told by now was never acknowledged.
      disk.cut_power();
      safe = writer.safe;
      freed = writer.freed;
    }
    disk.power_loss(rng);
    auto volume = Volume::open(disk);
    ASSERT_TRUE(volume.ok()) << "seed " << seed << " life " << life << ": " << volume.error().message;
    std::vector<Read> reads;
    SlotAddress from;
    while ((*volume)->list(from, reads.size() + 100, reads)) {
    }
    AlignedBuffer scratch;
    std::set<std::uint64_t> there;
    for (const Read& read : reads) {
      (*volume)->read_end(read);
      ASSERT_TRUE(blocks_of.contains(read.stripe));
      const Bytes expected = payload_of(layout, read.stripe, blocks_of[read.stripe]);
      const Result<SlotHeader> header = read_header(disk, read, scratch);
      bool good = header.ok();
      std::size_t at = 0;
      for (std::uint32_t group = 0; good && group < header->shard.segments.size(); ++group) {
        const MutableByteView to = scratch.first(header->shard.segments[group]);
        good = read_segment(disk, read, *header, group, to).ok();
        if (!good) break;
        ASSERT_TRUE(std::equal(to.begin(), to.end(), expected.begin() + static_cast<std::ptrdiff_t>(at)));
        at += to.size();
      }
      if (good) there.insert(read.stripe);
      if (!good) (*volume)->free(read.stripe);
    }
    for (const std::uint64_t stripe : safe) {
      ASSERT_TRUE(there.contains(stripe)) << "seed " << seed << " life " << life << " stripe " << stripe;
    }
    // As di-meta does with what it does not know.
    for (const std::uint64_t stripe : there) {
      if (rng.chance(0.5)) (*volume)->free(stripe);
    }
  }
}

TEST(Power, strict_loses_nothing_acknowledged) {
  for (std::uint64_t seed = 1; seed <= 25; ++seed) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    ASSERT_NO_FATAL_FAILURE(run(seed, true));
  }
}

TEST(Power, standard_loses_at_most_what_no_flush_covered) {
  for (std::uint64_t seed = 101; seed <= 125; ++seed) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    ASSERT_NO_FATAL_FAILURE(run(seed, false));
  }
}

}  // namespace
}  // namespace di::store
