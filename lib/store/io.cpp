#include "store/io.h"

#include <pthread.h>

#include <future>

#include "store/io_access.h"
#include "store/io_read.h"
#include "store/io_write.h"

namespace di::store {

// What the disk thread owns.
class IoPool::Engine {
 public:
  Engine(DiskQueue& queue, DiskFigures& figures, JobEnds& ends)
      : queue_(queue), ends_(ends), accesses_(queue, figures) {}

  void take(Inbox&& inbox) {
    for (MemoryChange& change : inbox.memory) take(std::move(change));
    for (ColumnRead& read : inbox.reads) columns_.take(std::move(read));
    for (HeadersRead& read : inbox.headers) headers_.take(std::move(read));
    if (inbox.cancelled) columns_.end_cancelled();
    for (auto& write : inbox.writes) std::visit([this](auto& job) { writes_.take(std::move(job)); }, write);
  }
  void begin() {
    writes_.begin();
    columns_.begin();
    headers_.begin();
  }
  void collect(bool wait) { accesses_.collect(wait); }
  [[nodiscard]] bool idle() const { return columns_.idle() && headers_.idle() && writes_.idle(); }

 private:
  void take(MemoryChange&& change) {
    if (change.add) {
      queue_.memory_add(change.memory);
    } else {
      queue_.memory_remove(change.memory);
    }
    ends_.ended(JobEnds::Kind::other);
    if (change.removed) ends_.tell(std::move(change.removed));
  }

  DiskQueue& queue_;
  JobEnds& ends_;
  Accesses accesses_;
  ColumnReads columns_{accesses_, ends_};
  HeaderReads headers_{accesses_, ends_};
  Writes writes_{accesses_, ends_};
};

Result<std::unique_ptr<IoPool>> IoPool::create(loop::Loop& loop, Disk& disk, const Options& options) {
  std::unique_ptr<IoPool> pool(new IoPool(loop, disk, options));
  if (pool->queue_ == nullptr) return *pool->refused_;
  return pool;
}

IoPool::IoPool(loop::Loop& loop, Disk& disk, const Options& options)
    : disk_(disk),
      options_(options),
      figures_(options.figures ? options.figures : std::make_shared<DiskFigures>()),
      ends_(loop, options.queue_max) {
  std::promise<void> made;
  thread_ = std::thread([this, &made] {
    ::pthread_setname_np(::pthread_self(), options_.name.substr(0, 15).c_str());
    if (options_.mode != IoMode::threads) {
      // The ring belongs to the thread that makes it.
      auto ring = disk_queue_uring(disk_, Accesses::accesses_max);
      if (ring) {
        queue_ = *std::move(ring);
      } else {
        refused_ = ring.error();
      }
    }
    if (queue_ == nullptr && options_.mode != IoMode::uring) {
      queue_ = disk_queue_threads(disk_, Accesses::accesses_max, options_.threads, options_.name);
    }
    if (queue_ != nullptr) mode_ = queue_->name();
    const bool works = queue_ != nullptr;
    made.set_value();
    if (!works) return;
    serve();
    const std::lock_guard lock(mutex_);
    queue_.reset();
  });
  made.get_future().wait();
}

IoPool::~IoPool() {
  ends_.stop();
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (queue_ != nullptr) queue_->wake();
  }
  thread_.join();
}

void IoPool::serve() {
  Engine engine(*queue_, *figures_, ends_);
  while (true) {
    Inbox inbox;
    {
      const std::lock_guard lock(mutex_);
      sleeping_ = false;
      std::swap(inbox, inbox_);
    }
    engine.take(std::move(inbox));
    engine.begin();
    bool wait = false;
    {
      const std::lock_guard lock(mutex_);
      wait = inbox_.empty();
      if (wait && closed_ && engine.idle()) return;
      sleeping_ = wait;
    }
    // A wake is certain: something is in flight, or the inbox will be filled, or the pool closed.
    engine.collect(wait);
  }
}

template <class Add>
Status IoPool::push(JobEnds::Kind kind, const Add& add) {
  DI_TRY(ends_.begin(kind));
  tell(add);
  return {};
}

template <class Add>
void IoPool::tell(const Add& add) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    add(inbox_);
    wake = std::exchange(sleeping_, false);
  }
  if (wake) queue_->wake();
}

void IoPool::look_at_cancelled() {
  tell([](Inbox& inbox) { inbox.cancelled = true; });
}

Status IoPool::read(ColumnRead read) {
  return push(JobEnds::Kind::read, [&](Inbox& inbox) { inbox.reads.push_back(std::move(read)); });
}

Status IoPool::headers(HeadersRead headers) {
  return push(JobEnds::Kind::read, [&](Inbox& inbox) { inbox.headers.push_back(std::move(headers)); });
}

Status IoPool::put(ColumnPut put) {
  return push(JobEnds::Kind::put, [&](Inbox& inbox) { inbox.writes.emplace_back(std::move(put)); });
}

Status IoPool::sync(Sync sync, std::function<void(const Status&)> done) {
  return push(JobEnds::Kind::other, [&](Inbox& inbox) {
    inbox.writes.emplace_back(SyncJob{std::move(sync), std::move(done)});
  });
}

void IoPool::memory_add(MutableByteView memory) {
  const Status added = push(JobEnds::Kind::other, [&](Inbox& inbox) {
    inbox.memory.push_back({memory, true, {}});
  });
  DI_ASSERT(added.ok());
}

void IoPool::memory_remove(MutableByteView memory, std::function<void()> removed) {
  const Status added = push(JobEnds::Kind::other, [&](Inbox& inbox) {
    inbox.memory.push_back({memory, false, std::move(removed)});
  });
  DI_ASSERT(added.ok());
}

}  // namespace di::store
