#include "loop/signal.h"

#include <signal.h>
#include <sys/signalfd.h>

#include <algorithm>

#include "base/assert.h"

namespace di::loop {

namespace {

sigset_t set_of(std::initializer_list<int> signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) sigaddset(&set, signal);
  return set;
}

}  // namespace

void signals_block(std::initializer_list<int> signals) {
  const sigset_t set = set_of(signals);
  const int failed = pthread_sigmask(SIG_BLOCK, &set, nullptr);
  DI_ASSERT(failed == 0);
}

bool signals_waiting(std::initializer_list<int> signals) {
  sigset_t waiting;
  sigemptyset(&waiting);
  ::sigpending(&waiting);
  return std::ranges::any_of(signals, [&](int signal) { return sigismember(&waiting, signal) == 1; });
}

Signals::Signals(Loop& loop, std::initializer_list<int> signals, std::function<void(int)> callback)
    : callback_(std::move(callback)) {
  const sigset_t set = set_of(signals);
  fd_ = Fd(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
  DI_ASSERT(fd_.valid());
  watch_ = std::make_unique<Watch>(loop, fd_.get(), "signals");
  watch_->on_readable([this] { read(); });
}

void Signals::read() {
  signalfd_siginfo info{};
  while (::read(fd_.get(), &info, sizeof info) == sizeof info) callback_(static_cast<int>(info.ssi_signo));
}

}  // namespace di::loop
