#include "request/emit.h"

namespace di::request {

Result<std::vector<InOrder::Item>> InOrder::take(Item item) {
  std::vector<Item> due;
  if (item.index < next_index_) return due;
  if (item.index > next_index_) {
    if (early_.size() >= early_max)
      return Error{Code::no_space, 0, "too many tokens wait for an earlier one"};
    early_.try_emplace(item.index, std::move(item));
    return due;
  }
  due.push_back(std::move(item));
  ++next_index_;
  for (auto next = early_.find(next_index_); next != early_.end(); next = early_.find(next_index_)) {
    due.push_back(std::move(next->second));
    early_.erase(next);
    ++next_index_;
  }
  return due;
}

}  // namespace di::request
