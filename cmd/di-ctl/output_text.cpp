#include <algorithm>
#include <cstdio>
#include <map>
#include <vector>

#include "output.h"

namespace di::ctl {

namespace {

// A field may be cut by awk at any blank or tab.
std::string field(std::string_view value) {
  std::string text(value.empty() ? "-" : value);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20; }, ' ');
  return text;
}

class TextOutput final : public Output {
 public:
  explicit TextOutput(std::vector<std::string> shown) : shown_(std::move(shown)) {
    if (shown_.empty()) return;
    columns_.emplace_back("instance");
    columns_.insert(columns_.end(), shown_.begin(), shown_.end());
  }

  void row(std::string_view instance, const wire::ctl_row& row) override {
    std::map<std::string, std::string> values{{"instance", std::string(instance)}};
    std::vector<std::string> names{"instance"};
    for (const wire::ControlColumn& column : row.columns) {
      if (shown_.empty() || std::find(shown_.begin(), shown_.end(), column.name) != shown_.end()) {
        names.push_back(column.name);
        values[column.name] = column.value;
      }
    }
    place(names);
    rows_.push_back(std::move(values));
    if (rows_.size() >= output_rows_max) end();
  }

  void end() override {
    if (rows_.empty()) return;
    std::string text;
    // Once, or again for columns that came behind the first output_rows_max rows.
    if (columns_.size() > columns_said_) {
      for (const std::string& name : columns_) text += (text.empty() ? "" : "\t") + name;
      text += '\n';
      columns_said_ = columns_.size();
    }
    for (const auto& values : rows_) {
      bool first = true;
      for (const std::string& name : columns_) {
        const auto found = values.find(name);
        if (!first) text += '\t';
        first = false;
        text += field(found == values.end() ? "" : found->second);
      }
      text += '\n';
    }
    std::fwrite(text.data(), 1, text.size(), stdout);
    rows_.clear();
  }

 private:
  // Columns that are new stand before the one that they came before, if that is known: the order is the same whichever
  // row comes first, one that has all of them or one that has not.
  void place(const std::vector<std::string>& names) {
    auto next = columns_.end();
    for (auto name = names.rbegin(); name != names.rend(); ++name) {
      const auto known = std::find(columns_.begin(), columns_.end(), *name);
      next = known != columns_.end() ? known : columns_.insert(next, *name);
    }
  }

  const std::vector<std::string> shown_;
  std::vector<std::string> columns_;
  std::size_t columns_said_ = 0;  // in the last header
  std::vector<std::map<std::string, std::string>> rows_;
};

}  // namespace

std::unique_ptr<Output> make_text_output(std::vector<std::string> shown) {
  return std::make_unique<TextOutput>(std::move(shown));
}

}  // namespace di::ctl
