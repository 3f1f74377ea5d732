// base/log.h: one event, one line, to stderr:
//   2026-08-23T10:11:12.345678Z info di-kvd.host0[812] evict: freed blocks blocks=412 reason=high_mark
//
// Any thread.  The fixed text is a literal that can be grepped; values are fields, never inside it.
// Repeats of one (module, text) beyond `log_burst_per_s` a second are counted and reported with the
// next line that passes (`repeated=N`), so a storm costs one line a second.  Prompts, completions
// and tokens are never logged.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/result.h"

namespace di {

enum class LogLevel : std::uint8_t { error = 0, warn = 1, info = 2, debug = 3 };

inline constexpr int log_burst_per_s = 20;

struct LogField {
  std::string_view key;
  std::string value;

  LogField(std::string_view k, std::string_view v) : key(k), value(v) {}
  LogField(std::string_view k, const std::string& v) : key(k), value(v) {}
  LogField(std::string_view k, const char* v) : key(k), value(v) {}
  LogField(std::string_view k, bool v) : key(k), value(v ? "true" : "false") {}
  template <std::integral T>
  LogField(std::string_view k, T v) : key(k), value(std::to_string(v)) {}
  LogField(std::string_view k, double v) : key(k), value(std::to_string(v)) {}
  LogField(std::string_view k, const Error& e) : key(k), value(e.message) {}
};

// The name every line carries ("di-kvd.host0"); set once before threads start.
void log_set_program(std::string_view name);
// Sets the level of a module, or of every module when `module` is empty.
void log_set_level(std::string_view module, LogLevel level);
[[nodiscard]] Result<LogLevel> log_level_parse(std::string_view name);
[[nodiscard]] bool log_enabled(std::string_view module, LogLevel level);

void log_write(LogLevel level, std::string_view module, std::string_view text,
               std::initializer_list<LogField> fields);

inline void log_error(std::string_view module, std::string_view text,
                      std::initializer_list<LogField> fields = {}) {
  log_write(LogLevel::error, module, text, fields);
}
inline void log_warn(std::string_view module, std::string_view text,
                     std::initializer_list<LogField> fields = {}) {
  log_write(LogLevel::warn, module, text, fields);
}
inline void log_info(std::string_view module, std::string_view text,
                     std::initializer_list<LogField> fields = {}) {
  log_write(LogLevel::info, module, text, fields);
}
// Fields of a debug line are built only when the level is on: use inside DI_LOG_DEBUG.
#define DI_LOG_DEBUG(module, text, ...)                                      \
  do {                                                                       \
    if (::di::log_enabled((module), ::di::LogLevel::debug))                  \
      ::di::log_write(::di::LogLevel::debug, (module), (text), __VA_ARGS__); \
  } while (false)

}  // namespace di
