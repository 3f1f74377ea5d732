#include "backup.h"

#include <pthread.h>

namespace di::meta {

Status Backup::start(std::string path, Done done) {
  if (running_) return Error{Code::busy, 0, "another backup is being made"};
  running_ = true;
  copy_ = std::async(std::launch::async, [this, path = std::move(path), done = std::move(done)]() mutable {
    pthread_setname_np(pthread_self(), "backup");
    auto bytes = copier_.copy(path);
    loop_.post("backup", [this, alive = alive_, done = std::move(done), bytes = std::move(bytes)] {
      if (!*alive) return;
      running_ = false;
      done(bytes);
    });
  });
  return {};
}

void Backup::stop() {
  *alive_ = false;
  if (!copy_.valid()) return;
  // An interrupt before its first statement is lost.
  while (copy_.wait_for(milliseconds(10)) != std::future_status::ready) copier_.interrupt();
}

}  // namespace di::meta
