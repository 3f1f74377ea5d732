// loop/signal.h: signals as events of a loop, by signalfd; nothing of ours runs in a handler.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "base/fd.h"
#include "loop/loop.h"

namespace di::loop {

// Blocks `signals` in the calling thread.  Call it before any other thread exists, so that all
// inherit the mask and the signals wait for the Signals object below.
void signals_block(std::initializer_list<int> signals);

// One of them, blocked already, has come and is not taken yet: for work that blocks before the loop runs.
[[nodiscard]] bool signals_waiting(std::initializer_list<int> signals);

// Owner: loop thread.
class Signals {
 public:
  // `signals` are blocked already (asserted by the kernel's behaviour: an unblocked one would act).
  Signals(Loop& loop, std::initializer_list<int> signals, std::function<void(int signal)> callback);

 private:
  void read();
  std::function<void(int)> callback_;
  Fd fd_;
  std::unique_ptr<Watch> watch_;
};

}  // namespace di::loop
