// base/assert.h: our own bugs.  Asserts stay on in release builds; input from a peer, a file, a
// user or a device is validated into a Result and never asserted on.
#pragma once

#include <string_view>

namespace di {

// One line on stderr, a backtrace, abort (so that a core is left).
[[noreturn]] void panic(std::string_view message, const char* file, int line);

}  // namespace di

#define DI_ASSERT(condition)                                            \
  do {                                                                  \
    if (!(condition)) [[unlikely]] {                                    \
      ::di::panic("assertion failed: " #condition, __FILE__, __LINE__); \
    }                                                                   \
  } while (false)
#define DI_PANIC(message) ::di::panic((message), __FILE__, __LINE__)
