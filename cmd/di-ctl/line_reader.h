// cmd/di-ctl/line_reader.h: lines from a person, with editing and a history (libedit underneath), or from a
// pipe.
//
// Owner: the one thread of di-ctl, which it blocks.  Bounds: `line_bytes_max`, and `history_lines` of a
// person.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace di::ctl {

inline constexpr std::size_t line_bytes_max = 1 << 20;
inline constexpr int history_lines = 200;

enum class LineOutcome : std::uint8_t {
  line,
  end,          // end of the input; of a person: Ctrl-D on an empty line
  interrupted,  // what was typed so far is dropped
  too_long,     // the line is dropped
};

class LineReader {
 public:
  virtual ~LineReader() = default;
  // Without its end of line.
  virtual LineOutcome read(std::string& line) = 0;
};

// Standard input as it comes.
[[nodiscard]] std::unique_ptr<LineReader> make_plain_reader();
// The terminal.  Reading ends as `interrupted` while `interrupt_fd` is readable; it is not read from.
[[nodiscard]] std::unique_ptr<LineReader> make_terminal_reader(const std::string& prompt, int interrupt_fd);

}  // namespace di::ctl
