#include "persister.h"

#include <pthread.h>

#include "base/log.h"

namespace di::meta {

Persister::Persister(loop::Loop& loop, directory::Index& index, directory::StripeWriter stripes,
                     directory::RowWriter rows)
    : index_(index),
      stripes_(std::move(stripes)),
      rows_(std::move(rows)),
      timer_(loop, loop::TimerKind::liveness, "catalogue", [this] { send_stripes(); }),
      reader_(std::in_place, loop, in_, "catalogue", [this](Done&& ended) { done(std::move(ended)); }) {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "catalogue");
    while (std::optional<Job> job = out_.pop_wait()) {
      Done ended{*std::move(job), {}};
      ended.status = ended.job.rows.empty() ? stripes_.write(ended.job.batch) : rows_.write(ended.job.rows);
      static_cast<void>(in_.try_push(std::move(ended)));  // one in flight: there is room
    }
  });
}

Persister::~Persister() {
  out_.close();
  if (thread_.joinable()) thread_.join();
}

void Persister::write(Rows rows, Written written) {
  waiting_.rows.insert(waiting_.rows.end(), std::make_move_iterator(rows.begin()),
                       std::make_move_iterator(rows.end()));
  waiting_.written.push_back(std::move(written));
}

void Persister::poll() {
  if (busy_) return;
  if (!waiting_.rows.empty()) {
    Waiting all = std::exchange(waiting_, {});
    told_ = std::move(all.written);
    return send({{}, std::move(all.rows)});
  }
  if (!failed_.empty()) {
    if (!timer_.armed()) timer_.start_after(retry_wait);
    return;
  }
  if (index_.changes() == 0) return;
  if (index_.changes() >= batch_max) return send_stripes();
  if (!timer_.armed()) timer_.start_after(batch_wait);
}

void Persister::send_stripes() {
  if (busy_) return;  // poll() looks again
  timer_.cancel();
  Batch batch = failed_.empty() ? index_.take_changes(batch_max) : std::exchange(failed_, {});
  if (!batch.empty()) send({std::move(batch), {}});
}

void Persister::send(Job job) {
  busy_ = true;
  static_cast<void>(out_.try_push(std::move(job)));
}

void Persister::done(Done ended) {
  busy_ = false;
  if (ended.status) ++counters_.transactions;
  if (ended.job.rows.empty()) {
    stripes_done(std::move(ended.job.batch), ended.status);
  } else {
    for (const Written& written : std::exchange(told_, {})) written(ended.status);
  }
  poll();
}

void Persister::stripes_done(Batch batch, const Status& status) {
  if (status) {
    ++counters_.batches;
    counters_.rows += batch.size();
    if (!std::exchange(refused_, {}).empty()) log_info("meta", "stripes are written again");
    return;
  }
  ++counters_.failures;
  if (std::exchange(refused_, status.error().message).empty())
    log_error("meta", "cannot write stripes", {{"error", status.error()}});
  failed_ = std::move(batch);
}

void Persister::finish() {
  if (!thread_.joinable()) return;
  reader_.reset();
  out_.close();
  thread_.join();
  while (std::optional<Done> ended = in_.try_pop()) {
    // After rows, which have no batch, stripes may wait that failed before.
    if (ended->job.rows.empty()) stripes_done(std::move(ended->job.batch), ended->status);
  }
  for (Batch batch = std::exchange(failed_, {});; batch = index_.take_changes(batch_max)) {
    if (batch.empty() && index_.changes() == 0) return;
    if (batch.empty()) continue;
    if (const Status status = stripes_.write(batch); !status) {
      log_error("meta", "cannot write stripes", {{"error", status.error()}});
      return;
    }
    counters_.rows += batch.size();
  }
}

}  // namespace di::meta
