#include "base/log.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <mutex>

#include "base/clock.h"

namespace di {

namespace {

// Named bound: distinct (module, text) pairs are literals in the source, a few hundred at most.
struct Repeat {
  std::int64_t second = 0;
  int count = 0;
  std::uint64_t held = 0;
};

struct LogState {
  std::mutex mutex;
  std::string program = "di";
  LogLevel level = LogLevel::info;
  std::map<std::string, LogLevel, std::less<>> by_module;
  std::map<std::string, Repeat, std::less<>> repeats;
};

LogState& log_state() {
  static LogState* state = new LogState;  // never destroyed: threads may log while the process ends
  return *state;
}

std::string_view level_name(LogLevel level) {
  switch (level) {
    case LogLevel::error:
      return "error";
    case LogLevel::warn:
      return "warn";
    case LogLevel::info:
      return "info";
    case LogLevel::debug:
      return "debug";
  }
  return "info";
}

bool needs_quotes(std::string_view value) {
  if (value.empty()) return true;
  for (const char c : value) {
    if (static_cast<unsigned char>(c) <= ' ' || c == '"' || c == '=') return true;
  }
  return false;
}

void append_value(std::string& line, std::string_view value) {
  if (!needs_quotes(value)) {
    line.append(value);
    return;
  }
  line.push_back('"');
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      line.push_back('\\');
      line.push_back(c);
    } else if (static_cast<unsigned char>(c) < ' ') {
      line.append(fmt::format("\\x{:02x}", static_cast<unsigned char>(c)));
    } else {
      line.push_back(c);
    }
  }
  line.push_back('"');
}

bool enabled_locked(const LogState& state, std::string_view module, LogLevel level) {
  const auto found = state.by_module.find(module);
  return level <= (found != state.by_module.end() ? found->second : state.level);
}

}  // namespace

void log_set_program(std::string_view name) {
  LogState& state = log_state();
  const std::lock_guard lock(state.mutex);
  state.program = name;
}

void log_set_level(std::string_view module, LogLevel level) {
  LogState& state = log_state();
  const std::lock_guard lock(state.mutex);
  if (module.empty()) {
    state.level = level;
    state.by_module.clear();
  } else {
    state.by_module.insert_or_assign(std::string(module), level);
  }
}

Result<LogLevel> log_level_parse(std::string_view name) {
  for (const LogLevel level : {LogLevel::error, LogLevel::warn, LogLevel::info, LogLevel::debug}) {
    if (name == level_name(level)) return level;
  }
  return Error{Code::invalid, 0,
               fmt::format("'{}' is not a log level: want error, warn, info or debug", name)};
}

bool log_enabled(std::string_view module, LogLevel level) {
  LogState& state = log_state();
  const std::lock_guard lock(state.mutex);
  return enabled_locked(state, module, level);
}

void log_write(LogLevel level, std::string_view module, std::string_view text,
               std::initializer_list<LogField> fields) {
  LogState& state = log_state();
  const std::lock_guard lock(state.mutex);
  if (!enabled_locked(state, module, level)) return;

  const std::int64_t wall_ms = wall_clock_ms();
  std::uint64_t held = 0;
  if (level != LogLevel::debug) {
    Repeat& repeat = state.repeats[fmt::format("{}:{}", module, text)];
    if (repeat.second != wall_ms / 1000) {
      held = repeat.held;
      repeat = Repeat{wall_ms / 1000, 0, 0};
    }
    if (++repeat.count > log_burst_per_s) {
      ++repeat.held;
      return;
    }
  }
  const auto now = std::chrono::time_point_cast<std::chrono::microseconds>(std::chrono::system_clock::now());
  std::string line = fmt::format("{:%Y-%m-%dT%H:%M:%S}Z {} {}[{}] {}: {}", now, level_name(level),
                                 state.program, getpid(), module, text);
  for (const LogField& field : fields) {
    line.push_back(' ');
    line.append(field.key).push_back('=');
    append_value(line, field.value);
  }
  if (held > 0) line.append(fmt::format(" repeated={}", held));
  line.push_back('\n');
  // One write per line: lines of several processes on one file do not mix.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace di
