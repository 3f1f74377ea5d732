#include "store/io.h"

#include <pthread.h>

#include <algorithm>

#include "base/checksum.h"

namespace di::store {

namespace {

Status write_pages(Disk& disk, const std::vector<MetaWrite>& writes, AlignedBuffer& scratch) {
  for (const MetaWrite& write : writes) {
    if (write.flush_before) DI_TRY(disk.flush());
    const MutableByteView page = scratch.first(write.bytes.size());
    std::copy(write.bytes.begin(), write.bytes.end(), page.begin());
    DI_TRY(disk.write(write.offset, page));
  }
  return {};
}

Error broken_volume() {
  return Error{Code::io, 0, "the volume is broken: a write of its tables failed"};
}

}  // namespace

PutOutcome put_run(Disk& disk, const Put& put, const PayloadSource& source, AlignedBuffer& scratch,
                   bool& broken) {
  PutOutcome outcome;
  if (broken) {
    outcome.status = broken_volume();
    return outcome;
  }
  // The metadata goes out even when the payload turns out to be wrong: later puts count on it.
  if (Status before = write_pages(disk, put.before, scratch); !before.ok()) {
    broken = true;
    outcome.metadata_failed = true;
    outcome.status = before;
    return outcome;
  }
  const Shard& shard = put.header.shard;
  const MutableByteView slot = scratch.first(shard.slot_class.header_bytes + shard.payload_bytes());
  const MutableByteView payload = slot.subspan(shard.slot_class.header_bytes);
  if (Status filled = source(payload); !filled.ok()) {
    outcome.status = filled;
    return outcome;
  }
  std::size_t at = 0;
  for (std::size_t group = 0; group < shard.segments.size(); ++group) {
    if (crc32c(payload.subspan(at, shard.segments[group])) != shard.crcs()[group]) {
      outcome.status = Error{Code::corrupt, 0, "the payload does not match its checksums"};
      return outcome;
    }
    at += shard.segments[group];
  }
  slot_header_encode(put.header, slot.first(shard.slot_class.header_bytes));
  outcome.slot_touched = true;
  outcome.status = disk.write(put.offset, slot);
  return outcome;
}

Result<SlotHeader> read_header(Disk& disk, const Read& read, AlignedBuffer& scratch) {
  const MutableByteView bytes = scratch.first(read.slot_class.header_bytes);
  DI_TRY(disk.read(read.offset, bytes));
  Result<SlotHeader> header = slot_header_decode(bytes, read.slot_class);
  if (!header) return header;
  if (header->volume != read.volume || header->offset != read.offset || header->sequence != read.sequence ||
      header->segment_generation != read.segment_generation || header->shard.stripe != read.stripe ||
      header->shard.column != read.column) {
    return Error{Code::corrupt, 0, "a slot holds another column than it should"};
  }
  return header;
}

Status read_segment(Disk& disk, const Read& read, const SlotHeader& header, std::uint32_t group,
                    MutableByteView to) {
  const Shard& shard = header.shard;
  DI_ASSERT(group < shard.segments.size() && to.size() == shard.segments[group]);
  std::uint64_t offset = read.offset + read.slot_class.header_bytes;
  for (std::uint32_t before = 0; before < group; ++before) offset += shard.segments[before];
  DI_TRY(disk.read(offset, to));
  if (crc32c(to) != shard.crcs()[group])
    return Error{Code::corrupt, 0, "a segment does not match its checksum"};
  return {};
}

Status sync_run(Disk& disk, const Sync& sync, AlignedBuffer& scratch, bool& broken) {
  if (broken) return broken_volume();
  const auto run = [&]() -> Status {
    DI_TRY(disk.flush());
    DI_TRY(write_pages(disk, sync.table, scratch));
    return write_pages(disk, sync.superblock, scratch);
  };
  Status status = run();
  if (!status.ok()) broken = true;
  return status;
}

// ---- threads

IoPool::IoPool(loop::Loop& loop, const Options& options)
    : queue_max_(options.queue_max),
      reports_((2 * options.queue_max + options.readers + 1) * reports_max),
      reader_(loop, reports_, "store-io", [](std::function<void()>&& callback) { callback(); }) {
  DI_ASSERT(options.readers > 0);
  for (std::uint32_t i = 0; i < options.readers; ++i) {
    threads_.emplace_back([this, name = options.name + "-r" + std::to_string(i)] { serve(reads_, name); });
  }
  threads_.emplace_back([this, name = options.name + "-w"] { serve(writes_, name); });
}

IoPool::~IoPool() {
  stopping_.store(true, std::memory_order_relaxed);
  for (Queue* queue : {&reads_, &writes_}) {
    {
      const std::lock_guard lock(queue->mutex);
      queue->closed = true;
    }
    queue->ready.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

Status IoPool::read(std::uint8_t priority, Task task) {
  return push(reads_, std::min<std::uint8_t>(priority, priorities - 1), std::move(task));
}

Status IoPool::write(Task task) {
  return push(writes_, 0, std::move(task));
}

Status IoPool::push(Queue& queue, std::uint8_t priority, Task task) {
  {
    const std::lock_guard lock(queue.mutex);
    if (queue.count >= queue_max_) return Error{Code::busy, 0, "the queue of the disk is full"};
    queue.tasks[priority].push_back(std::move(task));
    ++queue.count;
  }
  pending_.fetch_add(1, std::memory_order_relaxed);
  queue.ready.notify_one();
  return {};
}

void IoPool::serve(Queue& queue, const std::string& name) {
  ::pthread_setname_np(::pthread_self(), name.substr(0, 15).c_str());
  Context context;
  // Bounded by tasks times reports_max, which is the mailbox's capacity as long as the loop keeps up
  // with finished tasks; when it does not, this thread waits for it.
  context.report = [this](std::function<void()> callback) {
    while (!reports_.try_push(std::move(callback)) && !stopping_.load(std::memory_order_relaxed)) {
      std::this_thread::yield();
    }
  };
  while (true) {
    Task task;
    {
      std::unique_lock lock(queue.mutex);
      queue.ready.wait(lock, [&] { return queue.count > 0 || queue.closed; });
      if (queue.count == 0) return;
      for (std::deque<Task>& tasks : queue.tasks) {
        if (tasks.empty()) continue;
        task = std::move(tasks.front());
        tasks.pop_front();
        break;
      }
      --queue.count;
    }
    task(context);
    task = nullptr;
    pending_.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace di::store
