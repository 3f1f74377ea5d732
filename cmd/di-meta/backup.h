// cmd/di-meta/backup.h: copies the catalogue into another file, in a thread, while it is used.
//
// Owner: the loop thread; the thread inside has the copier.  Bound: one copy at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "directory/catalogue.h"
#include "loop/loop.h"

namespace di::meta {

class Backup {
 public:
  // The bytes of the copy.
  using Done = std::function<void(const Result<std::uint64_t>&)>;

  // The loop outlives it.
  Backup(loop::Loop& loop, directory::CatalogueCopier copier) : loop_(loop), copier_(std::move(copier)) {}
  // Ends a copy that is being made; nobody is told.
  ~Backup() { stop(); }
  Backup(const Backup&) = delete;
  Backup& operator=(const Backup&) = delete;

  // `done` is called in a later turn.  Errors: busy; `done` has those of CatalogueCopier.
  Status start(std::string path, Done done);
  void stop();

 private:
  loop::Loop& loop_;
  directory::CatalogueCopier copier_;
  bool running_ = false;
  std::future<void> copy_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace di::meta
