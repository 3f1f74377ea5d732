#include "worker/engine_thread.h"

#include <pthread.h>

#include <string>

namespace di::worker {

EngineThread::EngineThread(loop::Loop& loop, std::unique_ptr<engine::Engine> engine, std::string_view name,
                           std::function<void(rank::BatchDone&&)> done)
    : loop_(loop), engine_(std::move(engine)), reader_(loop, out_, name, std::move(done)) {
  thread_ = std::thread([this, thread_name = std::string(name)] {
    pthread_setname_np(pthread_self(), thread_name.substr(0, 15).c_str());
    run();
  });
}

EngineThread::~EngineThread() {
  in_.close();
  thread_.join();
}

void EngineThread::submit(Work work) {
  DI_ASSERT(in_.try_push(std::move(work)));
}

void EngineThread::run() {
  while (std::optional<Work> work = in_.pop_wait()) {
    rank::BatchDone done = rank::carry_out(std::move(work->batch), work->arena, *engine_, loop_.clock());
    work.reset();
    DI_ASSERT(out_.try_push(std::move(done)));
  }
}

}  // namespace di::worker
