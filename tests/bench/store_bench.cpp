// What the store costs against the same accesses without it: columns of 512 KiB through the server of di-kvd
// (messages in, messages out, arena mapped, no network) against raw io_uring with registered buffers on files
// of the same folder; and the restart of a volume of millions of slots against reading its slot table.
//
//   store_bench [ROUNDS [FOLDER [MILLIONS_OF_SLOTS [read | write | strict]]]]
//
// Every round measures every case once, one after the other, so that what else the machine does hits all
// alike; a row is the median rate of a case, the median of its ratio to the raw case of the same round, its
// CPU time (all threads of the process), and the ratio of that.  FOLDER is on the disk to be measured; where
// that is noisy take /dev/shm.
#include <fcntl.h>
#include <liburing.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/assert.h"
#include "base/checksum.h"
#include "base/fd.h"
#include "base/rng.h"
#include "kv/arena.h"
#include "loop/loop.h"
#include "store/server.h"
#include "transfer/shm.h"

namespace {

using namespace di;
using namespace di::store;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr std::uint32_t depth = 16;
constexpr std::uint64_t payload_bytes = 512 << 10;
constexpr std::uint64_t segment_bytes = 32 * mib;
constexpr std::uint64_t volume_bytes = 768 * mib;
constexpr std::uint32_t columns = 1024;         // read in a round
constexpr std::uint32_t columns_written = 384;  // written in a round, beside those that are read

double seconds_of(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double cpu_s() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// ---- raw

struct Raw {
  explicit Raw(const std::string& path) {
    fd = Fd(::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
    DI_ASSERT(fd.valid());
    int made = io_uring_queue_init(64, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (made == -EINVAL) made = io_uring_queue_init(64, &ring, 0);
    DI_ASSERT(made == 0);
    const int descriptor = fd.get();
    DI_ASSERT(io_uring_register_files(&ring, &descriptor, 1) == 0);
    buffers.reserve(depth * buffer_bytes);
    std::vector<iovec> vectors;
    for (std::uint32_t i = 0; i < depth; ++i) {
      vectors.push_back({buffers.first(depth * buffer_bytes).data() + i * buffer_bytes, buffer_bytes});
    }
    DI_ASSERT(io_uring_register_buffers(&ring, vectors.data(), depth) == 0);
  }
  ~Raw() { io_uring_queue_exit(&ring); }
  Raw(const Raw&) = delete;
  Raw& operator=(const Raw&) = delete;

  // `count` accesses of `bytes` bytes, `depth` at a time; with `batch` an fdatasync behind so many.
  void run(bool write, const std::vector<std::uint64_t>& offsets, std::uint64_t bytes, std::uint32_t batch) {
    std::size_t next = 0;
    std::size_t done = 0;
    std::vector<std::uint32_t> free;
    for (std::uint32_t i = 0; i < depth; ++i) free.push_back(i);
    std::size_t limit = batch > 0 ? std::min<std::size_t>(batch, offsets.size()) : offsets.size();
    while (done < offsets.size()) {
      while (next < limit && !free.empty()) {
        const std::uint32_t buffer = free.back();
        free.pop_back();
        io_uring_sqe* sqe = io_uring_get_sqe(&ring);
        void* memory = buffers.first(depth * buffer_bytes).data() + buffer * buffer_bytes;
        if (write) {
          io_uring_prep_write_fixed(sqe, 0, memory, static_cast<unsigned>(bytes), offsets[next],
                                    static_cast<int>(buffer));
        } else {
          io_uring_prep_read_fixed(sqe, 0, memory, static_cast<unsigned>(bytes), offsets[next],
                                   static_cast<int>(buffer));
        }
        sqe->flags |= IOSQE_FIXED_FILE;
        io_uring_sqe_set_data64(sqe, buffer);
        ++next;
      }
      io_uring_submit_and_wait(&ring, 1);
      io_uring_cqe* cqe = nullptr;
      unsigned head = 0;
      unsigned seen = 0;
      io_uring_for_each_cqe(&ring, head, cqe) {
        DI_ASSERT(cqe->res == static_cast<int>(bytes));
        free.push_back(static_cast<std::uint32_t>(io_uring_cqe_get_data64(cqe)));
        ++seen;
      }
      io_uring_cq_advance(&ring, seen);
      done += seen;
      if (batch > 0 && done == limit) {
        DI_ASSERT(::fdatasync(fd.get()) == 0);
        limit = std::min<std::size_t>(limit + batch, offsets.size());
      }
    }
  }

  static constexpr std::size_t buffer_bytes = payload_bytes + 8192;
  Fd fd;
  io_uring ring{};
  AlignedBuffer buffers;
};

// ---- through the server

kv::Layout bench_layout() {
  return *kv::layout_mla("bench-1", 32, 8, 2048);  // a block is 512 KiB
}

class Daemon {
 public:
  Daemon(const std::string& folder, const std::string& volume, bool strict)
      : layout_(bench_layout()), volume_path_(volume), strict_(strict) {
    run_dir_ = folder + "/run";
    std::filesystem::create_directories(run_dir_);
    owner_ = *kv::ArenaOwner::create({.name = "bench",
                                      .generation = host_.generation,
                                      .payload_bytes = depth * payload_bytes,
                                      .slots_max = depth,
                                      .entries_max = 8,
                                      .prefault = true});
    socket_ =
        *transfer::ShmServer::listen(loop_, run_dir_ + "/" + host_.instance + ".arena",
                                     {owner_->fd(), owner_->bytes(), host_.generation, host_.instance}, {});
    for (std::uint32_t slot = 0; slot < depth; ++slot) assign(slot, kv::SlotState::filling);
    // One page for all: what is measured is how it moves.
    Bytes payload(payload_bytes);
    Rng rng(7);
    for (std::size_t at = 0; at < payload.size(); at += 8) put_le<std::uint64_t>(&payload[at], rng.next());
    for (std::uint32_t slot = 0; slot < depth; ++slot) {
      const MutableByteView to = owner_->payload(slot * payload_bytes, payload_bytes);
      std::copy(payload.begin(), payload.end(), to.begin());
    }
    page_.parent.raw[0] = std::byte{1};
    page_.keys.resize(1);
    for (std::uint32_t group = 0; group < layout_.groups(); ++group) {
      page_.crcs.push_back(crc32c(
          ByteView(payload).subspan(layout_.segment_offset(group, 1), layout_.segment_bytes(group, 1))));
    }
    page_.bytes = payload_bytes;
    open();
  }
  ~Daemon() { close(); }
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Everything is unverified afterwards, as after a restart.
  void reopen() {
    close();
    open();
  }

  void read_all(const std::vector<std::uint64_t>& stripes) {
    set_state(kv::SlotState::filling);
    run(stripes, [this](std::uint64_t stripe, std::uint32_t slot) {
      wire::kv_read read;
      read.transfer = ++transfer_;
      slot_of_[read.transfer % slot_of_.size()] = slot;
      read.stripe = stripe;
      read.page_blocks = 1;
      read.slot = ref(slot);
      server_->on_message(wire::Envelope::make(host_.instance, host_.generation, {}, read));
    });
  }
  void put_all(const std::vector<std::uint64_t>& stripes) {
    set_state(kv::SlotState::sealed);
    run(stripes, [this](std::uint64_t stripe, std::uint32_t slot) {
      wire::kv_put put;
      put.stripe = stripe;
      put.fingerprint = layout_.fingerprint();
      put.pages = {page_};
      put.code.data_columns = 1;
      put.slot = ref(slot);
      slot_of_[stripe % slot_of_.size()] = slot;
      server_->on_message(wire::Envelope::make(host_.instance, host_.generation, {}, put));
    });
  }
  void free_all(const std::vector<std::uint64_t>& stripes) {
    wire::kv_free free;
    free.stripes = stripes;
    server_->on_message(wire::Envelope::make("di-meta.0", 1, {}, free));
    DI_ASSERT(loop_.run_until([this] { return server_->mounts()[0]->volume().clean(); }, seconds(60)));
  }
  [[nodiscard]] const Server& server() const { return *server_; }
  [[nodiscard]] std::string_view io() const { return io_; }

 private:
  void open() {
    auto file = disk_open(volume_path_);
    if (!file) std::fprintf(stderr, "%s\n", file.error().message.c_str());
    DI_ASSERT(file.ok());
    auto volume = Volume::open(*file->disk);
    DI_ASSERT(volume.ok());
    Server::Options options;
    options.self = {"di-kvd.store0", 9};
    options.run_dir = run_dir_;
    options.strict = strict_;
    auto pool = IoPool::create(loop_, *file->disk, {.queue_max = Server::io_queue_max(options)});
    DI_ASSERT(pool.ok());
    io_ = (*pool)->mode();
    std::vector<Mount::Backing> volumes;
    volumes.push_back({volume_path_, std::move(file->disk), *std::move(volume), *std::move(pool)});
    server_ = std::make_unique<Server>(
        loop_, std::move(volumes), nullptr, options,
        Server::Hooks{[this](const wire::Envelope& message) { answered(message); }, {}, {}});
    server_->learn_layout(layout_);
    server_->host_up(host_, true);
    DI_ASSERT(loop_.run_until([this] { return server_->arenas() == 1; }, seconds(10)));
  }
  void close() {
    bool stopped = false;
    server_->stop([&] { stopped = true; });
    DI_ASSERT(loop_.run_until([&] { return stopped; }, seconds(60)));
    server_.reset();
  }

  void assign(std::uint32_t slot, kv::SlotState state) {
    owner_->slot_assign({slot, 1, 1, slot * payload_bytes, payload_bytes, state});
  }
  void set_state(kv::SlotState state) {
    for (std::uint32_t slot = 0; slot < depth; ++slot) owner_->slot_state(slot, state);
  }
  [[nodiscard]] static wire::SlotRef ref(std::uint32_t slot) { return {slot, 1, 1, 0, 1}; }

  void run(const std::vector<std::uint64_t>& stripes,
           std::function<void(std::uint64_t, std::uint32_t)> begin) {
    begin_ = std::move(begin);
    stripes_ = &stripes;
    next_ = 0;
    ended_ = 0;
    for (std::uint32_t slot = 0; slot < depth; ++slot) go_on(slot);
    DI_ASSERT(loop_.run_until([this] { return ended_ == stripes_->size(); }, seconds(600)));
  }
  void go_on(std::uint32_t slot) {
    if (next_ < stripes_->size()) begin_((*stripes_)[next_++], slot);
  }
  void answered(const wire::Envelope& message) {
    std::uint64_t key = 0;
    if (message.number == wire::kv_read_done::number) {
      const auto done = *message.as<wire::kv_read_done>();
      DI_ASSERT(done.code == 0);
      if (done.group + 1 < layout_.groups()) return;
      key = done.transfer;
    } else if (message.number == wire::kv_put_done::number) {
      const auto done = *message.as<wire::kv_put_done>();
      DI_ASSERT(done.code == 0);
      key = done.stripe;
    } else {
      return;
    }
    ++ended_;
    // In a later turn, as an answer over a socket would be.
    ready_.push_back(slot_of_[key % slot_of_.size()]);
    if (ready_.size() == 1) {
      loop_.post("next", [this] {
        for (const std::uint32_t slot : std::exchange(ready_, {})) go_on(slot);
      });
    }
  }

  kv::Layout layout_;
  std::string volume_path_;
  bool strict_;
  std::string run_dir_;
  std::string io_;
  Peer host_{"di-kvd.host0", 4};
  loop::Loop loop_;
  std::unique_ptr<kv::ArenaOwner> owner_;
  std::unique_ptr<transfer::ShmServer> socket_;
  wire::PutPage page_;
  std::unique_ptr<Server> server_;
  std::uint64_t transfer_ = 0;
  std::vector<std::uint32_t> slot_of_ = std::vector<std::uint32_t>(4096);
  std::function<void(std::uint64_t, std::uint32_t)> begin_;
  const std::vector<std::uint64_t>* stripes_ = nullptr;
  std::size_t next_ = 0;
  std::size_t ended_ = 0;
  std::vector<std::uint32_t> ready_;
};

// ---- cases

struct Case {
  const char* name;
  std::size_t against;  // the raw case
  std::function<void()> run;
  double gigabytes = 0;
  std::function<void()> after = {};  // not measured
  std::vector<double> seconds = {};
  std::vector<double> cpu = {};
};

void measure(std::vector<Case>& cases, int rounds) {
  for (int round = -1; round < rounds; ++round) {  // the first one is for caches
    for (Case& each : cases) {
      const double cpu = cpu_s();
      const auto start = std::chrono::steady_clock::now();
      each.run();
      const double took = seconds_of(start);
      const double used = cpu_s() - cpu;
      if (each.after) each.after();
      if (round < 0) continue;
      each.seconds.push_back(took);
      each.cpu.push_back(used);
    }
  }
  std::printf("case\tMB/s\tratio\tCPU s/GB\tratio\n");
  for (const Case& each : cases) {
    std::vector<double> rate;
    std::vector<double> ratio;
    std::vector<double> cpu;
    std::vector<double> cpu_ratio;
    const Case& raw = cases[each.against];
    for (std::size_t i = 0; i < each.seconds.size(); ++i) {
      rate.push_back(each.gigabytes / each.seconds[i]);
      cpu.push_back(each.cpu[i] / each.gigabytes);
      ratio.push_back(rate.back() / (raw.gigabytes / raw.seconds[i]));
      cpu_ratio.push_back(cpu.back() / (raw.cpu[i] / raw.gigabytes));
    }
    std::printf("%s\t%.0f\t%.2f\t%.4f\t%.2f\n", each.name, median(rate) * 1000, median(ratio), median(cpu),
                median(cpu_ratio));
  }
  std::fflush(stdout);
}

std::vector<std::uint64_t> shuffled(std::vector<std::uint64_t> values, Rng& rng) {
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[rng.below(i)]);
  return values;
}

void columns_bench(const std::string& folder, int rounds, const std::string& only) {
  const std::string volume = folder + "/0.vol";
  const std::string plain = folder + "/plain";
  {
    auto made = disk_create(volume, volume_bytes, true);
    DI_ASSERT(made.ok());
    DI_ASSERT(Volume::format(*made->disk, {segment_bytes, {}}).ok());
    DI_ASSERT(disk_create(plain, columns_written * mib, true).ok());
  }
  Rng rng(1);
  std::vector<std::uint64_t> stripes;
  for (std::uint64_t i = 0; i < columns; ++i) stripes.push_back(i + 1);
  std::vector<std::uint64_t> written;
  for (std::uint64_t i = 0; i < columns_written; ++i) written.push_back(columns + 1 + i);
  auto standard = std::make_unique<Daemon>(folder, volume, false);
  standard->put_all(stripes);
  std::printf("io: %s, %s\n", std::string(standard->io()).c_str(), folder.c_str());

  Raw raw(volume);
  Raw raw_write(plain);
  const std::uint64_t first = standard->server().mounts()[0]->volume().geometry().segments_offset;
  std::vector<std::uint64_t> places;
  for (std::uint64_t i = 0; i < columns; ++i) places.push_back(first + i * payload_bytes);
  std::vector<std::uint64_t> write_places;
  for (std::uint64_t i = 0; i < columns_written; ++i) write_places.push_back(i * (payload_bytes + 4096));
  const double read_gb = static_cast<double>(columns) * payload_bytes * 1e-9;
  const double write_gb = static_cast<double>(columns_written) * payload_bytes * 1e-9;
  if (only.empty() || only == "read") {
    std::vector<Case> cases{
        {"raw read", 0, [&] { raw.run(false, shuffled(places, rng), payload_bytes, 0); }, read_gb},
        {"di-kvd read", 0, [&] { standard->read_all(shuffled(stripes, rng)); }, read_gb,
         [&] { standard->reopen(); }},
        {"di-kvd first read (verified)", 0, [&] { standard->read_all(shuffled(stripes, rng)); }, read_gb},
    };
    // The order matters: a reopened volume is unverified, and the case after it verifies.
    measure(cases, rounds);
  }
  if (only.empty() || only == "write") {
    std::vector<Case> cases{
        {"raw overwrite", 0, [&] { raw_write.run(true, write_places, payload_bytes + 4096, 0); }, write_gb},
        {"di-kvd write", 0, [&] { standard->put_all(written); }, write_gb,
         [&] { standard->free_all(written); }},
    };
    measure(cases, rounds);
  }
  standard.reset();
  if (!only.empty() && only != "strict") return;
  Daemon strict(folder, volume, true);
  std::vector<Case> cases{
      {"raw overwrite + fdatasync", 0,
       [&] { raw_write.run(true, write_places, payload_bytes + 4096, depth); }, write_gb},
      {"di-kvd strict write", 0, [&] { strict.put_all(written); }, write_gb,
       [&] { strict.free_all(written); }},
  };
  measure(cases, rounds);
}

// ---- restart

std::size_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  unsigned long total = 0;
  unsigned long resident = 0;
  DI_ASSERT(file != nullptr && std::fscanf(file, "%lu %lu", &total, &resident) == 2);
  std::fclose(file);
  return resident * 4096;
}

void restart_bench(const std::string& folder, int rounds, double millions) {
  const std::string path = folder + "/sparse";
  constexpr std::uint64_t slots_per_segment = 16384;
  constexpr std::uint64_t big_segment_bytes = slots_per_segment * slot_bytes_min;
  const auto segments = static_cast<std::uint32_t>(millions * 1e6 / slots_per_segment + 1);
  const std::uint64_t bytes = (segments + 1) * (big_segment_bytes + slots_per_segment * record_bytes);
  std::uint64_t table_offset = 0;
  {
    Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    DI_ASSERT(fd.valid() && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  }
  std::uint32_t count = 0;
  {
    auto file = disk_open(path);
    DI_ASSERT(file.ok());
    Superblock superblock;
    superblock.geometry = *Geometry::of(bytes, big_segment_bytes);
    count = superblock.geometry.segments;
    AlignedBuffer buffer(slots_per_segment * record_bytes);
    for (superblock.sequence = 1; superblock.sequence <= 2; ++superblock.sequence) {
      superblock_encode(superblock, buffer.first(superblock_bytes));
      DI_ASSERT(
          file->disk->write(superblock.sequence % 2 * superblock_bytes, buffer.first(superblock_bytes)).ok());
    }
    const MutableByteView table = buffer.first(align_up(count * std::uint64_t{record_bytes}, 4096));
    std::memset(table.data(), 0, table.size());
    for (std::uint32_t segment = 0; segment < count; ++segment) {
      segment_record_encode({true, segment + 1, {slot_bytes_min, 4096}}, &table[segment * record_bytes]);
    }
    DI_ASSERT(file->disk->write(superblock.geometry.segment_table_offset, table).ok());
    table_offset = superblock.geometry.slot_table_offset;
    Rng rng(3);
    for (std::uint32_t segment = 0; segment < count; ++segment) {
      const MutableByteView records = buffer.first(slots_per_segment * record_bytes);
      for (std::uint64_t slot = 0; slot < slots_per_segment; ++slot) {
        SlotRecord record;
        record.segment_generation = segment + 1;
        record.live = true;
        record.stripe = rng.next();
        record.sequence = segment * slots_per_segment + slot + 1;
        record.payload_bytes = 8192;
        slot_record_encode(record, &records[slot * record_bytes]);
      }
      DI_ASSERT(file->disk->write(superblock.geometry.record_page_offset(segment, 0), records).ok());
    }
    DI_ASSERT(file->disk->flush().ok());
  }
  const double slots = static_cast<double>(count) * slots_per_segment;
  std::size_t memory = 0;
  std::size_t resident = 0;
  const auto table_read = [&](bool parse) {
    auto file = disk_open(path);
    DI_ASSERT(file.ok());
    AlignedBuffer buffer(mib);
    const std::uint64_t table_bytes = count * slots_per_segment * record_bytes;
    std::uint64_t live = 0;
    for (std::uint64_t at = 0; at < table_bytes; at += mib) {
      const MutableByteView part = buffer.first(mib);
      DI_ASSERT(file->disk->read(table_offset + at, part).ok());
      if (!parse) continue;
      for (std::size_t record = 0; record < mib; record += record_bytes) {
        const Result<SlotRecord> decoded = slot_record_decode(&part[record]);
        live += decoded && decoded->live ? 1 : 0;
      }
    }
    DI_ASSERT(!parse || static_cast<double>(live) == slots);
  };
  std::vector<Case> cases{
      {"raw table read + parse", 0, [&] { table_read(true); }, slots * record_bytes * 1e-9},
      {"raw table read", 0, [&] { table_read(false); }, slots * record_bytes * 1e-9},
      {"restart", 0,
       [&] {
         const std::size_t before = resident_bytes();
         auto file = disk_open(path);
         auto volume = Volume::open(*file->disk);
         DI_ASSERT(volume.ok() && static_cast<double>((*volume)->stats().slots_live) == slots);
         memory = (*volume)->memory_bytes();
         resident = resident_bytes() - before;
       },
       slots * record_bytes * 1e-9},
  };
  std::printf("%.1f million slots\n", slots * 1e-6);
  measure(cases, rounds);
  std::printf("memory\t%.1f bytes a slot, resident %.1f\n", static_cast<double>(memory) / slots,
              static_cast<double>(resident) / slots);
  ::unlink(path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  std::string folder = std::string(argc > 2 ? argv[2] : ".") + "/di-store-bench-XXXXXX";
  const double millions = argc > 3 ? std::atof(argv[3]) : 8;
  DI_ASSERT(::mkdtemp(folder.data()) != nullptr);
  columns_bench(folder, rounds, argc > 4 ? argv[4] : "");
  if (millions > 0) restart_bench(folder, rounds, millions);
  std::filesystem::remove_all(folder);
  return 0;
}
