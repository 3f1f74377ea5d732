// cmd/di-ctl/output.h: rows on standard output, as text or as JSON lines.
//
// Every row begins with the instance it came from.  Text is separated by tabs under one header, so
// all rows are held until the end (bound: `output_rows_max`, then what is there is printed, and a column that comes
// later has another header); JSON lines go out as they come.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "wire/messages.h"

namespace di::ctl {

inline constexpr std::size_t output_rows_max = 100'000;

class Output {
 public:
  virtual ~Output() = default;
  virtual void row(std::string_view instance, const wire::ctl_row& row) = 0;
  // After the last row.
  virtual void end() = 0;
};

// Columns in the order of their rows; what a row lacks, or has empty, is "-".  `shown`, unless it is empty: the
// instance and these, in this order, whatever the rows have.
[[nodiscard]] std::unique_ptr<Output> make_text_output(std::vector<std::string> shown = {});
// One object a row; names as they are, numbers and booleans bare.
[[nodiscard]] std::unique_ptr<Output> make_json_output();

}  // namespace di::ctl
