// request/first_and_last.h: of rows that may be many, the first and the last: how it began and how it ended.
#pragma once

#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

namespace di::request {

// At most `rows_max` rows: half of them from the beginning, the other half the newest.
template <class Row>
class FirstAndLast {
 public:
  explicit FirstAndLast(std::size_t rows_max) : half_(rows_max / 2) {}

  void add(Row row) {
    if (first_.size() < half_) {
      first_.push_back(std::move(row));
      return;
    }
    last_.push_back(std::move(row));
    if (last_.size() <= half_) return;
    last_.pop_front();
    ++missing_;
  }
  [[nodiscard]] const std::vector<Row>& first() const { return first_; }
  [[nodiscard]] std::size_t missing() const { return missing_; }  // between first() and last()
  [[nodiscard]] const std::deque<Row>& last() const { return last_; }

 private:
  std::size_t half_;
  std::vector<Row> first_;
  std::deque<Row> last_;
  std::size_t missing_ = 0;
};

}  // namespace di::request
