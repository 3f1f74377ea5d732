// worker/engine_thread.h: the thread that owns a rank's engine.
//
// The loop thread hands it one rank::Batch at a time and gets a rank::BatchDone back through a mailbox.
// The engine is created before the thread starts and destroyed after it has ended.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "engine/engine.h"
#include "kv/arena.h"
#include "loop/mailbox.h"
#include "rank/carry_out.h"

namespace di::worker {

// A batch with the arena it belongs to: the mapping outlives the batch even when the arena is lost
// meanwhile.  `arena` may be null when the batch has neither slots nor exports.
struct Work {
  rank::Batch batch;
  std::shared_ptr<kv::ArenaClient> arena;
};

class EngineThread {
 public:
  // `done` runs on the loop thread for every finished batch.  `loop` outlives this.
  EngineThread(loop::Loop& loop, std::unique_ptr<engine::Engine> engine, std::string_view name,
               std::function<void(rank::BatchDone&&)> done);
  // Ends after the batch in hand.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // One at a time: the next one after `done`.
  void submit(Work work);
  [[nodiscard]] const engine::Description& describe() const { return engine_->describe(); }

 private:
  void run();

  loop::Loop& loop_;
  std::unique_ptr<engine::Engine> engine_;
  loop::Mailbox<Work> in_{1};
  loop::Mailbox<rank::BatchDone> out_{1};
  loop::MailboxReader<rank::BatchDone> reader_;
  std::thread thread_;
};

}  // namespace di::worker
