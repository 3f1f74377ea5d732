#include "base/assert.h"

#include <execinfo.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace di {

void panic(std::string_view message, const char* file, int line) {
  std::fprintf(stderr, "panic %s:%d %.*s\n", file, line, static_cast<int>(message.size()), message.data());
  void* frames[64];
  const int count = backtrace(frames, 64);
  backtrace_symbols_fd(frames, count, STDERR_FILENO);
  std::abort();
}

}  // namespace di
