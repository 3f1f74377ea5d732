// request/first_and_last.h: of rows that may be many, the first and the last: how it began and how it ended.
//
// Kept for every finished request that can be explained: empty, it has no memory of its own.
#pragma once

#include <algorithm>
#include <cstddef>
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
    } else if (ring_.size() < half_) {
      ring_.push_back(std::move(row));
    } else {
      ring_[missing_++ % half_] = std::move(row);
    }
  }
  [[nodiscard]] const std::vector<Row>& first() const { return first_; }
  [[nodiscard]] std::size_t missing() const { return missing_; }  // between first() and last()
  [[nodiscard]] std::vector<Row> last() const {
    std::vector<Row> rows = ring_;
    if (!rows.empty()) {
      const auto oldest = static_cast<std::ptrdiff_t>(missing_ % half_);
      std::rotate(rows.begin(), rows.begin() + oldest, rows.end());
    }
    return rows;
  }

 private:
  std::size_t half_;
  std::vector<Row> first_;
  std::vector<Row> ring_;  // the oldest at missing_ % half_
  std::size_t missing_ = 0;
};

}  // namespace di::request
