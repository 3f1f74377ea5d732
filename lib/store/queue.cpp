#include "store/queue.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace di::store {

void DiskOp::add(MutableByteView piece) {
  if (piece.empty()) return;
  DI_ASSERT(count < disk_pieces_max);
  pieces[count++] = piece;
}

void DiskOp::add(ByteView piece) {
  add(MutableByteView(const_cast<std::byte*>(piece.data()), piece.size()));
}

std::uint64_t DiskOp::bytes() const {
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < count; ++i) sum += pieces[i].size();
  return sum;
}

namespace {

Status run(Disk& disk, const DiskOp& op) {
  const std::span<const MutableByteView> pieces(op.pieces.data(), op.count);
  switch (op.kind) {
    case DiskOp::Kind::read:
      return disk.read_pieces(op.offset, pieces);
    case DiskOp::Kind::write: {
      std::array<ByteView, disk_pieces_max> from;
      std::copy(pieces.begin(), pieces.end(), from.begin());
      return disk.write_pieces(op.offset, {from.data(), op.count});
    }
    case DiskOp::Kind::flush:
      return disk.flush();
  }
  DI_PANIC("no such operation");
}

class ThreadQueue final : public DiskQueue {
 public:
  ThreadQueue(Disk& disk, std::uint32_t depth, std::uint32_t threads, const std::string& name)
      : disk_(disk), depth_(depth) {
    DI_ASSERT(threads > 0 && depth > 0);
    for (std::uint32_t i = 0; i < threads; ++i) {
      threads_.emplace_back([this, title = name + "-" + std::to_string(i)] { serve(title); });
    }
  }
  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(const DiskOp& op) override {
    {
      const std::lock_guard lock(mutex_);
      DI_ASSERT(in_flight_ < depth_);
      ++in_flight_;
      waiting_.push_back(op);
    }
    work_.notify_one();
  }

  void collect(bool wait, std::vector<Done>& done) override {
    std::unique_lock lock(mutex_);
    if (wait) ready_.wait(lock, [this] { return !done_.empty() || woken_; });
    woken_ = false;
    in_flight_ -= done_.size();
    std::move(done_.begin(), done_.end(), std::back_inserter(done));
    done_.clear();
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    ready_.notify_one();
  }

  [[nodiscard]] std::string_view name() const override { return "threads"; }

 private:
  void serve(const std::string& title) {
    ::pthread_setname_np(::pthread_self(), title.substr(0, 15).c_str());
    while (true) {
      DiskOp op;
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [this] { return !waiting_.empty() || closed_; });
        if (waiting_.empty()) return;
        op = waiting_.front();
        waiting_.pop_front();
      }
      Status status = run(disk_, op);
      {
        const std::lock_guard lock(mutex_);
        done_.push_back({op.tag, std::move(status)});
      }
      ready_.notify_one();
    }
  }

  Disk& disk_;
  const std::size_t depth_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable ready_;
  std::deque<DiskOp> waiting_;
  std::vector<Done> done_;
  std::size_t in_flight_ = 0;
  bool woken_ = false;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<DiskQueue> disk_queue_threads(Disk& disk, std::uint32_t depth, std::uint32_t threads,
                                              const std::string& name) {
  return std::make_unique<ThreadQueue>(disk, depth, threads, name);
}

}  // namespace di::store
