#include "store/io_ends.h"

#include <thread>

#include "kv/layout.h"

namespace di::store {

JobEnds::JobEnds(loop::Loop& loop, std::size_t queue_max)
    : queue_max_(queue_max),
      // Every job's reports fit; and a sync or a change of memory has one.
      told_((2 * queue_max + 16) * (kv::groups_max + 1)),
      reader_(loop, told_, "store-io", [](std::function<void()>&& callback) { callback(); }) {}

std::atomic<std::size_t>* JobEnds::count(Kind kind) {
  switch (kind) {
    case Kind::read:
      return &reads_;
    case Kind::put:
      return &puts_;
    case Kind::other:
      return nullptr;
  }
  return nullptr;
}

Status JobEnds::begin(Kind kind) {
  std::atomic<std::size_t>* const bounded = count(kind);
  if (bounded != nullptr && bounded->fetch_add(1, std::memory_order_relaxed) >= queue_max_) {
    bounded->fetch_sub(1, std::memory_order_relaxed);
    return Error{Code::busy, 0, "the queue of the disk is full"};
  }
  pending_.fetch_add(1, std::memory_order_relaxed);
  return {};
}

void JobEnds::ended(Kind kind) {
  if (std::atomic<std::size_t>* const bounded = count(kind)) bounded->fetch_sub(1, std::memory_order_relaxed);
  pending_.fetch_sub(1, std::memory_order_relaxed);
}

void JobEnds::tell(std::function<void()> callback) {
  // The box has room for everything that may be told; when the loop is behind by more, this waits for it.
  while (!told_.try_push(std::move(callback)) && !stopping_.load(std::memory_order_relaxed)) {
    std::this_thread::yield();
  }
}

}  // namespace di::store
