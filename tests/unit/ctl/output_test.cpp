#include "output.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace di::ctl {
namespace {

wire::ctl_row row_of(const std::vector<std::pair<std::string, std::string>>& columns) {
  wire::ctl_row row;
  for (const auto& [name, value] : columns) {
    wire::ControlColumn column;
    column.name = name;
    column.value = value;
    row.columns.push_back(std::move(column));
  }
  return row;
}

// What it has printed since the last time, line by line.
class Printed {
 public:
  Printed() { testing::internal::CaptureStdout(); }
  ~Printed() { testing::internal::GetCapturedStdout(); }
  Printed(const Printed&) = delete;
  Printed& operator=(const Printed&) = delete;

  std::vector<std::string> take() {
    const std::string text = testing::internal::GetCapturedStdout();
    testing::internal::CaptureStdout();
    std::vector<std::string> lines;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = text.find('\n', at);
      lines.push_back(text.substr(at, end - at));
      at = end == std::string::npos ? text.size() : end + 1;
    }
    return lines;
  }
};

using Lines = std::vector<std::string>;

TEST(TextOutput, ColumnsAreInTheOrderOfTheirRows) {
  Printed printed;
  const auto output = make_text_output();
  output->row("a.0", row_of({{"x", "1"}, {"y", ""}}));
  output->row("b.0", row_of({{"z", "three\tof\nthem"}, {"x", "2"}}));
  EXPECT_EQ(printed.take(), Lines{}) << "before the last column is known";
  output->end();
  EXPECT_EQ(printed.take(), (Lines{"instance\tz\tx\ty", "a.0\t-\t1\t-", "b.0\tthree of them\t2\t-"}));
}

// What a store had that was away stood first, or in the middle, as it was the first or the last that answered.
TEST(TextOutput, ARowThatHasNotAllColumnsDoesNotChangeTheirOrder) {
  const wire::ctl_row whole = row_of({{"x", "1"}, {"y", "2"}, {"z", "3"}, {"end", "4"}});
  const wire::ctl_row part = row_of({{"x", "1"}, {"z", "3"}});
  for (const bool part_first : {false, true}) {
    Printed printed;
    const auto output = make_text_output();
    output->row("a.0", part_first ? part : whole);
    output->row("b.0", part_first ? whole : part);
    output->end();
    EXPECT_EQ(printed.take().at(0), "instance\tx\ty\tz\tend") << part_first;
  }
}

TEST(TextOutput, WithoutRowsThereIsNothing) {
  Printed printed;
  make_text_output()->end();
  EXPECT_EQ(printed.take(), Lines{});
}

TEST(TextOutput, OnlyWhatWasChosenIsShown) {
  Printed printed;
  const auto output = make_text_output({"y", "z", "v"});
  output->row("a.0", row_of({{"x", "1"}, {"z", "3"}, {"y", "2"}}));
  output->end();
  EXPECT_EQ(printed.take(), (Lines{"instance\ty\tz\tv", "a.0\t2\t3\t-"}))
      << "always the same columns, in the same order";
}

// It had another one in its middle.
TEST(TextOutput, ALongListingHasOneHeader) {
  for (const std::size_t more : {std::size_t{0}, std::size_t{1}, output_rows_max}) {
    Printed printed;
    const auto output = make_text_output();
    for (std::size_t i = 0; i < output_rows_max + more; ++i)
      output->row("a.0", row_of({{"x", std::to_string(i)}}));
    output->end();
    const Lines lines = printed.take();
    ASSERT_EQ(lines.size(), 1 + output_rows_max + more);
    EXPECT_EQ(lines[0], "instance\tx");
    for (std::size_t i = 0; i < output_rows_max + more; ++i)
      ASSERT_EQ(lines[1 + i], "a.0\t" + std::to_string(i));
  }
}

TEST(TextOutput, ALongListingIsPrintedOnTheWayAndALaterColumnHasItsHeader) {
  Printed printed;
  const auto output = make_text_output();
  for (std::size_t i = 0; i < output_rows_max; ++i) output->row("a.0", row_of({{"x", "1"}}));
  EXPECT_EQ(printed.take().size(), 1 + output_rows_max) << "as many are held and not more";
  output->row("a.0", row_of({{"x", "2"}}));
  output->row("b.0", row_of({{"y", "3"}}));
  output->end();
  EXPECT_EQ(printed.take(), (Lines{"instance\tx\ty", "a.0\t2\t-", "b.0\t-\t3"}));
}

TEST(JsonOutput, EveryRowIsPrintedAtOnce) {
  Printed printed;
  const auto output = make_json_output();
  wire::ctl_row row = row_of({{"x", "1"}, {"y", "2"}, {"z", "none"}});
  row.columns[1].kind = row.columns[2].kind = 1;
  output->row("a.0", row);
  EXPECT_EQ(printed.take(), (Lines{R"({"instance":"a.0","x":"1","y":2,"z":"none"})"}));
  output->end();
  EXPECT_EQ(printed.take(), Lines{});
}

}  // namespace
}  // namespace di::ctl
