#include "persister.h"

#include <pthread.h>

#include "base/log.h"

namespace di::meta {

Persister::Persister(loop::Loop& loop, directory::Index& index, directory::StripeWriter writer)
    : index_(index),
      writer_(std::move(writer)),
      timer_(loop, loop::TimerKind::liveness, "catalogue", [this] { send(); }),
      reader_(std::in_place, loop, in_, "catalogue", [this](Done&& done) { written(std::move(done)); }) {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "catalogue");
    while (std::optional<Batch> batch = out_.pop_wait()) {
      Done done{*std::move(batch), {}};
      done.status = writer_.write(done.batch);
      static_cast<void>(in_.try_push(std::move(done)));  // one in flight: there is room
    }
  });
}

Persister::~Persister() {
  out_.close();
  if (thread_.joinable()) thread_.join();
}

void Persister::poll() {
  if (busy_ || index_.changes() == 0) return;
  if (index_.changes() >= batch_max && failed_.empty()) return send();
  if (!timer_.armed()) timer_.start_after(batch_wait);
}

void Persister::send() {
  if (busy_) return;
  timer_.cancel();
  Batch batch = failed_.empty() ? index_.take_changes(batch_max) : std::exchange(failed_, {});
  if (batch.empty()) return;
  busy_ = true;
  static_cast<void>(out_.try_push(std::move(batch)));
}

void Persister::written(Done done) {
  busy_ = false;
  if (done.status) {
    ++counters_.batches;
    counters_.rows += done.batch.size();
    return poll();
  }
  if (counters_.failures++ == 0) log_error("meta", "cannot write stripes", {{"error", done.status.error()}});
  failed_ = std::move(done.batch);
  timer_.start_after(retry_wait);
}

void Persister::finish() {
  if (!thread_.joinable()) return;
  reader_.reset();
  out_.close();
  thread_.join();
  while (std::optional<Done> done = in_.try_pop()) {
    if (!done->status) failed_ = std::move(done->batch);
  }
  for (Batch batch = std::exchange(failed_, {});; batch = index_.take_changes(batch_max)) {
    if (batch.empty() && index_.changes() == 0) return;
    if (batch.empty()) continue;
    if (const Status status = writer_.write(batch); !status) {
      log_error("meta", "cannot write stripes", {{"error", status.error()}});
      return;
    }
    counters_.rows += batch.size();
  }
}

}  // namespace di::meta
