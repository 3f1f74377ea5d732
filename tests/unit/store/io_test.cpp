#include "store/io.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <mutex>
#include <set>

#include "store/disk_folder.h"
#include "tests/unit/store/shelf.h"

namespace di::store {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr Duration far_away = seconds(60);

// A volume behind a pool, on a disk in memory or in a real file.
struct Pooled {
  explicit Pooled(Disk& on, IoPool::Options options = {}, kv::Layout kv_layout = kv::layout_v41())
      : layout(std::move(kv_layout)), disk(on) {
    auto opened = Volume::open(disk);
    EXPECT_TRUE(opened.ok()) << opened.error().message;
    volume = *std::move(opened);
    auto made = IoPool::create(loop, disk, options);
    EXPECT_TRUE(made.ok()) << made.error().message;
    pool = *std::move(made);
  }

  bool until(const std::function<bool()>& done) { return loop.run_until(done, far_away); }

  // Begins a put; its end is noted under the stripe.
  Code put(std::uint64_t stripe, std::uint32_t blocks) {
    Result<Put> begun = volume->put_begin(shard_of(layout, stripe, blocks));
    if (!begun) return begun.error().code;
    auto payload = std::make_shared<AlignedBuffer>();
    const Bytes bytes = payload_of(layout, stripe, blocks);
    std::copy(bytes.begin(), bytes.end(), payload->first(bytes.size()).begin());
    ColumnPut job;
    job.put = *begun;
    job.payload = [payload, size = bytes.size()]() -> Result<std::vector<ByteView>> {
      // In pieces, as the parts of a page are.
      const ByteView all = payload->first(size);
      return std::vector<ByteView>{all.first(4096), all.subspan(4096)};
    };
    job.done = [this, stripe, put = *begun](const PutOutcome& outcome) {
      volume->put_end(put, outcome);
      ends[stripe] = outcome.status.ok() ? Code::ok : outcome.status.error().code;
    };
    EXPECT_TRUE(pool->put(std::move(job)).ok());
    return Code::ok;
  }
  Code put_now(std::uint64_t stripe, std::uint32_t blocks) {
    ends.erase(stripe);
    if (const Code code = put(stripe, blocks); code != Code::ok) return code;
    EXPECT_TRUE(until([&] { return ends.contains(stripe); }));
    return ends[stripe];
  }
  Code sync() {
    std::optional<Sync> begun = volume->sync_begin();
    if (!begun) return Code::ok;
    std::optional<Code> end;
    EXPECT_TRUE(pool->sync(*std::move(begun),
                           [&](const Status& status) {
                             volume->sync_end(status);
                             end = status.ok() ? Code::ok : status.error().code;
                           })
                    .ok());
    EXPECT_TRUE(until([&] { return end.has_value(); }));
    return *end;
  }

  struct Column {
    std::shared_ptr<AlignedBuffer> buffer = std::make_shared<AlignedBuffer>();
    std::vector<std::uint32_t> arrived;
    std::optional<ColumnEnd> end;
    std::size_t bytes = 0;
    [[nodiscard]] Bytes content() const {
      const ByteView view = buffer->first(bytes);
      return {view.begin(), view.end()};
    }
  };
  enum class Way { whole, scattered, misled };
  // Begins a read of a column; `column` outlives it.
  void read(std::uint64_t stripe, Column& column, Way way = Way::whole,
            const std::function<void(ColumnRead&)>& change = {}) {
    const Result<Read> begun = volume->read_begin(stripe, 0);
    ASSERT_TRUE(begun.ok());
    column.bytes = begun->payload_bytes;
    ColumnRead job;
    job.read = *begun;
    job.verify = true;
    // Scattered: segment g lies g pages further back, so that no two of them are neighbours.
    const std::size_t gap = way == Way::whole ? 0 : 4096;
    column.buffer->reserve(column.bytes + gap * kv::groups_max);
    const auto all = [buffer = column.buffer, room = column.bytes + gap * kv::groups_max] {
      return buffer->first(room);
    };
    if (way != Way::scattered) job.whole = [all, bytes = column.bytes] { return all().first(bytes); };
    job.place = [all, gap](const SlotHeader& header, std::uint32_t group) -> Result<MutableByteView> {
      std::size_t at = gap * group;
      for (std::uint32_t before = 0; before < group; ++before) at += header.shard.segments[before];
      return all().subspan(at, header.shard.segments[group]);
    };
    job.arrived = [&column](std::uint32_t group) { column.arrived.push_back(group); };
    job.done = [this, &column, read = *begun](const ColumnEnd& end) {
      volume->read_end(read, end.verified);
      column.end = end;
    };
    if (change) change(job);
    ASSERT_TRUE(pool->read(std::move(job)).ok());
  }

  kv::Layout layout;
  Disk& disk;
  loop::Loop loop;
  std::unique_ptr<Volume> volume;
  std::map<std::uint64_t, Code> ends;
  std::unique_ptr<IoPool> pool;
};

std::unique_ptr<MemoryDisk> memory(std::uint64_t bytes, std::uint64_t segment_bytes) {
  auto disk = std::make_unique<MemoryDisk>(bytes);
  EXPECT_TRUE(Volume::format(*disk, {segment_bytes, {}}).ok());
  return disk;
}

struct RealFile {
  explicit RealFile(bool folder = false) {
    std::string name = testing::TempDir() + "di-io-XXXXXX";
    directory = ::mkdtemp(name.data());
    auto made = folder ? folder_create(directory + "/0.vol", 64 * mib, false, {}, 3 * mib)
                       : disk_create(directory + "/0.vol", 64 * mib, false);
    EXPECT_TRUE(made.ok());
    disk = std::move(made->disk);
    EXPECT_TRUE(Volume::format(*disk, {8 * mib, {}}).ok());
  }
  ~RealFile() {
    disk.reset();
    std::filesystem::remove_all(directory);
  }
  std::string directory;
  std::unique_ptr<Disk> disk;
};

// Puts, reads in every way, and syncs, all at once; the same over threads and over io_uring.
void run_mixed(Disk& disk, IoMode mode, std::uint64_t seed) {
  Rng rng(seed);
  Pooled p(disk, {.mode = mode, .threads = 3, .queue_max = 256});
  std::map<std::uint64_t, std::uint32_t> written;
  std::uint64_t next = 1;
  for (int round = 0; round < 6; ++round) {
    std::map<std::uint64_t, std::uint32_t> fresh;
    for (int i = 0; i < 8; ++i) {
      const auto blocks = static_cast<std::uint32_t>(1 + rng.below(8));
      if (p.put(next, blocks) == Code::ok) fresh[next] = blocks;
      ++next;
    }
    std::vector<std::pair<std::uint64_t, std::unique_ptr<Pooled::Column>>> reads;
    for (const auto& [stripe, blocks] : written) {
      reads.emplace_back(stripe, std::make_unique<Pooled::Column>());
      const auto way = static_cast<Pooled::Way>(rng.below(3));
      p.read(stripe, *reads.back().second, way,
             [&](ColumnRead& job) { job.priority = static_cast<std::uint8_t>(rng.below(4)); });
    }
    ASSERT_EQ(p.sync(), Code::ok);
    ASSERT_TRUE(p.until([&] { return p.pool->pending() == 0; }));
    ASSERT_TRUE(p.until([&] {
      return std::all_of(reads.begin(), reads.end(),
                         [](const auto& r) { return r.second->end.has_value(); }) &&
             std::all_of(fresh.begin(), fresh.end(), [&](const auto& f) { return p.ends.contains(f.first); });
    }));
    for (const auto& [stripe, blocks] : fresh) ASSERT_EQ(p.ends[stripe], Code::ok);
    for (const auto& [stripe, column] : reads) {
      ASSERT_TRUE(column->end->status.ok()) << column->end->status.error().message;
      EXPECT_TRUE(column->end->verified);
      ASSERT_FALSE(column->arrived.empty());
      EXPECT_TRUE(std::is_sorted(column->arrived.begin(), column->arrived.end()));
      EXPECT_EQ(column->arrived.back() + 1, p.layout.groups());
    }
    written.insert(fresh.begin(), fresh.end());
  }
  for (const auto& [stripe, blocks] : written) {
    Pooled::Column column;
    p.read(stripe, column);
    ASSERT_TRUE(p.until([&] { return column.end.has_value(); }));
    ASSERT_TRUE(column.end->status.ok());
    ASSERT_EQ(column.content(), payload_of(p.layout, stripe, blocks));
  }
  EXPECT_EQ(p.volume->stats().reading, 0u);
  EXPECT_EQ(p.volume->stats().writing, 0u);
}

TEST(IoPool, everything_at_once_over_threads) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    const auto disk = memory(64 * mib, 8 * mib);
    run_mixed(*disk, IoMode::automatic, seed);
    RealFile file;
    run_mixed(*file.disk, IoMode::threads, seed);
  }
}

TEST(IoPool, everything_at_once_over_io_uring) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    RealFile file;
    if (auto ring = disk_queue_uring(*file.disk, 8); !ring) GTEST_SKIP() << ring.error().message;
    run_mixed(*file.disk, IoMode::uring, seed);
  }
}

TEST(IoPool, mixed_work_over_threads_in_a_folder) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    RealFile file(true);
    run_mixed(*file.disk, IoMode::automatic, seed);
  }
}

TEST(IoPool, disk_without_a_descriptor_has_threads_and_says_why) {
  const auto disk = memory(16 * mib, 4 * mib);
  loop::Loop loop;
  auto pool = IoPool::create(loop, *disk, {});
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ((*pool)->mode(), "threads");
  ASSERT_TRUE((*pool)->refused().has_value());
  EXPECT_EQ(IoPool::create(loop, *disk, {.mode = IoMode::uring}).error().code, Code::unsupported);
}

TEST(IoPool, scattered_and_misled_reads_put_every_segment_where_the_header_says) {
  const auto disk = memory(32 * mib, 8 * mib);
  Pooled p(*disk);
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  const Bytes payload = payload_of(p.layout, 1, 8);
  for (const Pooled::Way way : {Pooled::Way::scattered, Pooled::Way::misled}) {
    Pooled::Column column;
    p.read(1, column, way);
    ASSERT_TRUE(p.until([&] { return column.end.has_value(); }));
    ASSERT_TRUE(column.end->status.ok()) << column.end->status.error().message;
    const ByteView all = column.buffer->first(payload.size() + 4096 * kv::groups_max);
    for (std::uint32_t group = 0; group < p.layout.groups(); ++group) {
      const std::uint64_t at = p.layout.segment_offset(group, 8);
      const ByteView there = all.subspan(at + 4096 * group, p.layout.segment_bytes(group, 8));
      EXPECT_TRUE(std::equal(there.begin(), there.end(), payload.begin() + static_cast<std::ptrdiff_t>(at)));
    }
  }
}

TEST(IoPool, payload_alone_is_read_when_the_segments_are_known) {
  const auto disk = memory(32 * mib, 8 * mib);
  Pooled p(*disk);
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  const Read at = *p.volume->read_begin(1, 0);
  p.volume->read_end(at);
  disk->flip_bit(at.offset + 40, 2);  // in the header
  std::vector<std::uint32_t> segments;
  for (std::uint32_t group = 0; group < p.layout.groups(); ++group) {
    segments.push_back(static_cast<std::uint32_t>(p.layout.segment_bytes(group, 8)));
  }
  Pooled::Column column;
  p.read(1, column, Pooled::Way::whole, [&](ColumnRead& job) {
    job.verify = false;
    job.segments = segments;
  });
  ASSERT_TRUE(p.until([&] { return column.end.has_value(); }));
  ASSERT_TRUE(column.end->status.ok()) << column.end->status.error().message;
  EXPECT_FALSE(column.end->verified);
  EXPECT_EQ(column.content(), payload_of(p.layout, 1, 8));
  EXPECT_EQ(column.arrived.back() + 1, p.layout.groups());
  // To verify, the header is needed.
  Pooled::Column verified;
  p.read(1, verified, Pooled::Way::whole, [&](ColumnRead& job) { job.segments = segments; });
  ASSERT_TRUE(p.until([&] { return verified.end.has_value(); }));
  EXPECT_EQ(verified.end->status.error().code, Code::corrupt);
  segments.pop_back();
  Pooled::Column wrong;
  p.read(1, wrong, Pooled::Way::whole, [&](ColumnRead& job) {
    job.verify = false;
    job.segments = segments;
  });
  ASSERT_TRUE(p.until([&] { return wrong.end.has_value(); }));
  EXPECT_EQ(wrong.end->status.error().code, Code::corrupt);
}

// A loss of power can keep slots and take back the tables: that is no fault of the disk's.
TEST(IoPool, slot_that_is_newer_than_the_tables_does_not_count_against_the_disk) {
  const auto disk = memory(32 * mib, 8 * mib);
  Pooled p(*disk);
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  for (const bool newer : {true, false}) {
    Pooled::Column column;
    p.read(1, column, Pooled::Way::whole, [newer](ColumnRead& job) {
      job.read.sequence = newer ? job.read.sequence - 1 : job.read.sequence + 1;
    });
    ASSERT_TRUE(p.until([&] { return column.end.has_value(); }));
    EXPECT_EQ(column.end->status.error().code, Code::corrupt);
    EXPECT_EQ(p.pool->figures().corrupt.load(), newer ? 0u : 1u);
  }
}

TEST(IoPool, read_from_a_later_group_touches_nothing_before_it) {
  const auto disk = memory(32 * mib, 8 * mib);
  Pooled p(*disk);
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  Pooled::Column column;
  p.read(1, column, Pooled::Way::whole, [](ColumnRead& job) { job.from_group = 2; });
  ASSERT_TRUE(p.until([&] { return column.end.has_value(); }));
  ASSERT_TRUE(column.end->status.ok());
  EXPECT_FALSE(column.end->verified);  // not all of it
  const Bytes payload = payload_of(p.layout, 1, 8);
  const Bytes content = column.content();
  const auto at = static_cast<std::ptrdiff_t>(p.layout.segment_offset(2, 8));
  EXPECT_TRUE(std::equal(content.begin() + at, content.end(), payload.begin() + at));
  EXPECT_TRUE(
      std::all_of(content.begin(), content.begin() + at, [](std::byte b) { return b == std::byte{0}; }));
  Pooled::Column behind;
  p.read(1, behind, Pooled::Way::whole, [](ColumnRead& job) { job.from_group = 4; });
  ASSERT_TRUE(p.until([&] { return behind.end.has_value(); }));
  EXPECT_EQ(behind.end->status.error().code, Code::invalid);
}

// F23: a part of a column, from any group on, of columns of every length at once.
TEST(IoPool, reads_from_every_group_on_are_what_was_written) {
  const auto disk = memory(80 * mib, 8 * mib);
  Pooled p(*disk);
  constexpr std::uint32_t lengths = 8;
  for (std::uint32_t blocks = 1; blocks <= lengths; ++blocks) ASSERT_EQ(p.put_now(blocks, blocks), Code::ok);
  for (const Pooled::Way way : {Pooled::Way::whole, Pooled::Way::scattered}) {
    for (std::uint32_t from = 0; from < p.layout.groups(); ++from) {
      std::array<Pooled::Column, lengths> columns;
      for (std::uint32_t i = 0; i < lengths; ++i) {
        p.read(i + 1, columns[i], way, [&](ColumnRead& job) { job.from_group = from; });
      }
      ASSERT_TRUE(p.until([&] {
        return std::all_of(columns.begin(), columns.end(), [](const auto& c) { return c.end.has_value(); });
      }));
      for (std::uint32_t i = 0; i < lengths; ++i) {
        const std::uint32_t blocks = i + 1;
        ASSERT_TRUE(columns[i].end->status.ok());
        EXPECT_EQ(columns[i].arrived.back() + 1, p.layout.groups());
        const Bytes payload = payload_of(p.layout, blocks, blocks);
        for (std::uint32_t group = from; group < p.layout.groups(); ++group) {
          const std::uint64_t offset = p.layout.segment_offset(group, blocks);
          const std::uint64_t bytes = p.layout.segment_bytes(group, blocks);
          const std::uint64_t gap = way == Pooled::Way::whole ? 0 : 4096 * group;
          const ByteView got = columns[i].buffer->first(offset + gap + bytes).subspan(offset + gap);
          EXPECT_TRUE(
              std::equal(got.begin(), got.end(), payload.begin() + static_cast<std::ptrdiff_t>(offset)))
              << blocks << " blocks, from " << from << ", group " << group;
        }
      }
    }
  }
}

TEST(IoPool, flipped_bits_and_failed_reads_end_the_read_with_their_code) {
  const auto disk = memory(32 * mib, 8 * mib);
  Pooled p(*disk);
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  const Read at = *p.volume->read_begin(1, 0);
  p.volume->read_end(at);
  const auto code = [&](bool verify, bool again = false) {
    Pooled::Column column;
    p.read(1, column, Pooled::Way::whole, [&](ColumnRead& job) {
      job.verify = verify;
      job.again = again;
    });
    EXPECT_TRUE(p.until([&] { return column.end.has_value(); }));
    return column.end->status.ok() ? Code::ok : column.end->status.error().code;
  };
  for (const std::uint64_t where :
       {std::uint64_t{40}, std::uint64_t{4096 + 77}, std::uint64_t{4096 + 900000}}) {
    disk->flip_bit(at.offset + where, 2);
    EXPECT_EQ(code(true), Code::corrupt);
    EXPECT_EQ(code(true, true), Code::corrupt);  // which does not count
    EXPECT_EQ(code(false), where < 4096 ? Code::corrupt : Code::ok);
    disk->flip_bit(at.offset + where, 2);
  }
  EXPECT_EQ(p.pool->figures().corrupt.load(), 4u);
  disk->fail_read_in = 0;
  EXPECT_EQ(code(true), Code::io);
  EXPECT_EQ(p.pool->figures().read_errors.load(), 1u);
  disk->fail_read_in = 0;
  EXPECT_EQ(code(true, true), Code::io);
  EXPECT_EQ(p.pool->figures().read_errors.load(), 1u);
  disk->fail_read_in.reset();
  disk->short_read_in = 1;
  EXPECT_EQ(code(true), Code::io);
  disk->short_read_in.reset();
  EXPECT_EQ(p.pool->figures().read_errors.load(), 2u);
  EXPECT_EQ(code(true), Code::ok);
}

TEST(IoPool, place_that_is_refused_ends_the_read) {
  const auto disk = memory(32 * mib, 8 * mib);
  Pooled p(*disk);
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  for (const std::uint32_t good : {0u, 6u}) {
    Pooled::Column column;
    int asked = 0;
    p.read(1, column, Pooled::Way::scattered, [&](ColumnRead& job) {
      job.place = [&asked, good, place = job.place](const SlotHeader& header, std::uint32_t group) {
        if (asked++ >= static_cast<int>(good))
          return Result<MutableByteView>(Error{Code::stale, 0, "given up"});
        return place(header, group);
      };
    });
    ASSERT_TRUE(p.until([&] { return column.end.has_value(); }));
    EXPECT_EQ(column.end->status.error().code, Code::stale);
  }
}

TEST(IoPool, headers_of_many_slots_come_in_their_order) {
  const auto disk = memory(64 * mib, 8 * mib);
  Pooled p(*disk);
  for (std::uint64_t stripe = 1; stripe <= 60; ++stripe) ASSERT_EQ(p.put_now(stripe, 1), Code::ok);
  SlotAddress from;
  HeadersRead job;
  EXPECT_FALSE(p.volume->list(from, 100, job.reads));
  disk->flip_bit(job.reads[7].offset + 100, 1);
  const std::vector<Read> reads = job.reads;
  std::optional<std::vector<Result<SlotHeader>>> found;
  job.done = [&](std::vector<Result<SlotHeader>> headers) { found = std::move(headers); };
  ASSERT_TRUE(p.pool->headers(std::move(job)).ok());
  ASSERT_TRUE(p.until([&] { return found.has_value(); }));
  ASSERT_EQ(found->size(), 60u);
  for (std::size_t i = 0; i < reads.size(); ++i) {
    p.volume->read_end(reads[i]);
    if (i == 7) {
      EXPECT_EQ((*found)[i].error().code, Code::corrupt);
    } else {
      EXPECT_EQ((*found)[i]->shard.stripe, reads[i].stripe);
    }
  }
}

// A disk whose writes and flushes wait until they are let go, once it is shut.
class GatedDisk final : public Disk {
 public:
  explicit GatedDisk(Disk& disk) : disk_(disk) {}
  [[nodiscard]] std::uint64_t bytes() const override { return disk_.bytes(); }
  Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) override {
    return disk_.read_pieces(offset, to);
  }
  Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) override {
    pass(offset);
    return disk_.write_pieces(offset, from);
  }
  Status flush() override {
    pass(flush_mark);
    return disk_.flush();
  }

  static constexpr std::uint64_t flush_mark = UINT64_MAX;
  void shut() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    moved_.notify_all();
  }
  // Blocks until exactly these wait.
  bool wait_for(const std::multiset<std::uint64_t>& offsets) {
    std::unique_lock lock(mutex_);
    return moved_.wait_for(lock, far_away, [&] { return waiting_ == offsets; });
  }
  void let(std::uint64_t offset) {
    const std::lock_guard lock(mutex_);
    allowed_.insert(offset);
    moved_.notify_all();
  }

 private:
  void pass(std::uint64_t offset) {
    std::unique_lock lock(mutex_);
    if (open_) return;
    const auto mine = waiting_.insert(offset);
    moved_.notify_all();
    moved_.wait(lock, [&] { return open_ || allowed_.contains(offset); });
    if (const auto one = allowed_.find(offset); one != allowed_.end()) allowed_.erase(one);
    waiting_.erase(mine);
    moved_.notify_all();
  }

  Disk& disk_;
  std::mutex mutex_;
  std::condition_variable moved_;
  std::multiset<std::uint64_t> waiting_;
  std::multiset<std::uint64_t> allowed_;
  bool open_ = true;
};

// Metadata first, one after the other, and then the slots that count on it, which overtake each other; and a
// sync in between, which waits for the metadata before it and for no slot.
TEST(IoPool, slot_is_written_after_the_metadata_that_it_counts_on) {
  const auto keeper = memory(64 * mib, 8 * mib);
  GatedDisk disk(*keeper);
  Pooled p(disk, {.threads = 8});
  disk.shut();
  const Geometry& geometry = p.volume->geometry();
  const std::uint64_t slot_bytes = slot_class_of(p.layout, p.layout.page_bytes(8)).slot_bytes;
  const std::uint64_t table = geometry.segment_table_offset;
  ASSERT_EQ(p.put(1, 8), Code::ok);  // binds segment 0 and opens it
  ASSERT_EQ(p.put(2, 8), Code::ok);  // counts on that
  ASSERT_EQ(p.put(3, 1), Code::ok);  // binds segment 1
  ASSERT_TRUE(disk.wait_for({table}));
  disk.let(table);
  // The volume's third superblock; two were written when it was made, one when it was opened.
  const std::uint64_t a = 0;
  const std::uint64_t b = superblock_bytes;
  ASSERT_TRUE(disk.wait_for({a}));
  disk.let(a);
  const std::uint64_t first = geometry.segment_offset(0);
  ASSERT_TRUE(disk.wait_for({first, first + slot_bytes, table}));
  disk.let(first + slot_bytes);
  ASSERT_TRUE(p.until([&] { return p.ends.size() == 1; }));
  EXPECT_TRUE(p.ends.contains(2));
  disk.let(table);
  // Not two superblocks without a flush between them.
  ASSERT_TRUE(disk.wait_for({first, GatedDisk::flush_mark}));
  disk.let(GatedDisk::flush_mark);
  ASSERT_TRUE(disk.wait_for({first, b}));
  disk.let(b);
  ASSERT_TRUE(disk.wait_for({first, geometry.segment_offset(1)}));
  // A sync flushes although a slot is on its way; what it describes has ended before.
  std::optional<Sync> sync = p.volume->sync_begin();
  ASSERT_TRUE(sync.has_value());
  ASSERT_EQ(sync->table.size(), 1u);
  bool synced = false;
  ASSERT_TRUE(p.pool
                  ->sync(*std::move(sync),
                         [&](const Status& status) {
                           p.volume->sync_end(status);
                           synced = status.ok();
                         })
                  .ok());
  ASSERT_TRUE(disk.wait_for({first, geometry.segment_offset(1), GatedDisk::flush_mark}));
  // A put into an open segment overtakes the sync.
  ASSERT_EQ(p.put(4, 8), Code::ok);
  ASSERT_TRUE(
      disk.wait_for({first, first + 2 * slot_bytes, geometry.segment_offset(1), GatedDisk::flush_mark}));
  disk.let(GatedDisk::flush_mark);
  disk.let(geometry.record_page_offset(0, 0));
  ASSERT_TRUE(p.until([&] { return synced; }));
  disk.open();
  ASSERT_TRUE(p.until([&] { return p.ends.size() == 4; }));
  for (const auto& [stripe, code] : p.ends) EXPECT_EQ(code, Code::ok) << stripe;
}

TEST(IoPool, full_queue_is_busy) {
  const auto disk = memory(32 * mib, 8 * mib);
  Pooled p(*disk, {.threads = 1, .queue_max = 4});
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  std::promise<void> reached;
  std::promise<void> gate;
  auto opened = gate.get_future().share();
  bool first = true;
  std::vector<std::unique_ptr<Pooled::Column>> columns;
  std::vector<int> order;
  const auto begin = [&](std::uint8_t priority, int number) {
    columns.push_back(std::make_unique<Pooled::Column>());
    p.read(1, *columns.back(), Pooled::Way::scattered, [&, number, priority](ColumnRead& job) {
      job.priority = priority;
      job.place = [&, number, place = job.place](const SlotHeader& header, std::uint32_t group) {
        if (order.empty() || order.back() != number) order.push_back(number);
        if (std::exchange(first, false)) {
          reached.set_value();
          opened.wait();
        }
        return place(header, group);
      };
    });
  };
  begin(0, 0);
  reached.get_future().wait();
  begin(2, 22);
  begin(1, 11);
  begin(0, 1);
  // The fifth has no room.
  const Result<Read> read = p.volume->read_begin(1, 0);
  ColumnRead fifth;
  fifth.read = *read;
  EXPECT_EQ(p.pool->read(fifth).error().code, Code::busy);
  p.volume->read_end(*read);
  gate.set_value();
  ASSERT_TRUE(p.until([&] {
    return std::all_of(columns.begin(), columns.end(), [](const auto& c) { return c->end.has_value(); });
  }));
  for (const auto& column : columns) EXPECT_TRUE(column->end->status.ok());
  EXPECT_TRUE(p.until([&] { return p.pool->pending() == 0; }));  // counted down behind the end
}

TEST(IoPool, cancelled_read_ends_when_nothing_of_it_runs) {
  const auto disk = memory(32 * mib, 8 * mib);
  Pooled p(*disk);
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  Pooled::Column column;
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  int halves = 0;
  p.read(1, column, Pooled::Way::whole, [&](ColumnRead& job) {
    job.cancelled = cancelled;
    job.half = [&, cancelled] {
      if (++halves == 2) cancelled->store(true);
    };
  });
  ASSERT_TRUE(p.until([&] { return column.end.has_value(); }));
  EXPECT_EQ(column.end->status.error().code, Code::cancelled);
  EXPECT_EQ(halves, 2);
  const Bytes content = column.content();
  EXPECT_EQ(content[p.layout.segment_offset(2, 8)], std::byte{0});
  EXPECT_EQ(p.volume->stats().reading, 0u);
}

TEST(IoPool, payload_that_changed_while_it_was_written_is_not_taken_and_its_slot_is_free_again) {
  const auto disk = memory(16 * mib, 4 * mib);
  Pooled p(*disk);
  const auto put_with = [&](std::uint64_t stripe, const std::function<void(ColumnPut&)>& change) {
    Result<Put> begun = p.volume->put_begin(shard_of(p.layout, stripe, 8));
    EXPECT_TRUE(begun.ok());
    auto payload = std::make_shared<AlignedBuffer>();
    const Bytes bytes = payload_of(p.layout, stripe, 8);
    std::copy(bytes.begin(), bytes.end(), payload->first(bytes.size()).begin());
    std::optional<PutOutcome> end;
    ColumnPut job;
    job.put = *begun;
    job.payload = [payload, size = bytes.size()]() -> Result<std::vector<ByteView>> {
      return std::vector<ByteView>{payload->first(size)};
    };
    job.done = [&](const PutOutcome& outcome) {
      p.volume->put_end(*begun, outcome);
      end = outcome;
    };
    change(job);
    EXPECT_TRUE(p.pool->put(std::move(job)).ok());
    EXPECT_TRUE(p.until([&] { return end.has_value(); }));
    return *end;
  };
  const PutOutcome stale = put_with(1, [](ColumnPut& job) { job.current = [] { return false; }; });
  EXPECT_EQ(stale.status.error().code, Code::stale);
  EXPECT_TRUE(stale.slot_sound);
  const PutOutcome refused = put_with(2, [](ColumnPut& job) {
    job.payload = []() -> Result<std::vector<ByteView>> { return Error{Code::stale, 0, "gone"}; };
  });
  EXPECT_EQ(refused.status.error().code, Code::stale);
  EXPECT_FALSE(refused.slot_touched);
  const PutOutcome wrong = put_with(3, [](ColumnPut& job) {
    job.payload = [payload = job.payload]() -> Result<std::vector<ByteView>> {
      auto pieces = payload();
      const_cast<std::byte&>((*pieces)[0][5000]) ^= std::byte{1};
      return pieces;
    };
  });
  EXPECT_EQ(wrong.status.error().code, Code::corrupt);
  const PutOutcome short_one = put_with(4, [](ColumnPut& job) {
    job.payload = [payload = job.payload]() -> Result<std::vector<ByteView>> {
      auto pieces = payload();
      (*pieces)[0] = (*pieces)[0].first(8192);
      return pieces;
    };
  });
  EXPECT_EQ(short_one.status.error().code, Code::stale);
  const Volume::Stats stats = p.volume->stats();
  EXPECT_EQ(stats.slots_bad, 0u);
  EXPECT_EQ(stats.slots_live, 0u);
  EXPECT_EQ(p.put_now(1, 8), Code::ok);
}

TEST(IoPool, failed_metadata_write_ends_every_put_behind_it) {
  const auto disk = memory(64 * mib, 8 * mib);
  Pooled p(*disk);
  disk->fail_write_in = 0;  // the first put's segment record
  for (std::uint64_t stripe = 1; stripe <= 4; ++stripe)
    ASSERT_EQ(p.put(stripe, stripe < 3 ? 8 : 1), Code::ok);
  ASSERT_TRUE(p.until([&] { return p.ends.size() == 4; }));
  for (const auto& [stripe, code] : p.ends) EXPECT_EQ(code, Code::io) << stripe;
  EXPECT_TRUE(p.volume->broken());
  EXPECT_EQ(p.put(9, 8), Code::io);
}

TEST(IoPool, failed_flush_breaks_the_volume) {
  const auto disk = memory(64 * mib, 8 * mib);
  Pooled p(*disk);
  ASSERT_EQ(p.put_now(1, 8), Code::ok);
  disk->fail_flush = true;
  EXPECT_EQ(p.sync(), Code::io);
  EXPECT_TRUE(p.volume->broken());
  Pooled::Column column;
  p.read(1, column);
  ASSERT_TRUE(p.until([&] { return column.end.has_value(); }));
  EXPECT_TRUE(column.end->status.ok());
}

TEST(IoPool, destruction_ends_what_is_queued) {
  const auto disk = memory(64 * mib, 8 * mib);
  {
    Pooled p(*disk);
    for (std::uint64_t stripe = 1; stripe <= 20; ++stripe) ASSERT_EQ(p.put(stripe, 8), Code::ok);
  }
  auto volume = Volume::open(*disk);
  ASSERT_TRUE(volume.ok());
  EXPECT_EQ((*volume)->stats().slots_live, 20u);
}

}  // namespace
}  // namespace di::store
