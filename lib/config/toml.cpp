#include "config/toml.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "base/file.h"

#define TOML_EXCEPTIONS 0
#define TOML_HEADER_ONLY 1
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

namespace di::config {

namespace {

struct Problem {
  std::uint32_t line = 0;
  std::uint32_t column = 0;
  std::string text;
};

class Reader {
 public:
  // `name` is what positions are reported against; relative paths in the text begin in its folder.
  explicit Reader(std::string_view name)
      : name_(name),
        folder_(name.substr(0, name.rfind('/') == std::string_view::npos ? 0 : name.rfind('/') + 1)) {}

  void table(Params& params, const toml::table& from, const std::string& prefix) {
    for (auto&& [key, node] : from) {
      const std::string path = prefix + std::string(key.str());
      if (Row* row = params.find(path)) {
        value(*row, node);
      } else if (const Tables* tables = params.find_tables(path)) {
        array_of_tables(*tables, node);
      } else if (node.is_table() && is_prefix(params, path + ".")) {
        table(params, *node.as_table(), path + ".");
      } else {
        problem(key.source(), "unknown key '" + path + "'");
      }
    }
  }

  std::vector<Problem> take() {
    std::stable_sort(problems_.begin(), problems_.end(), [](const Problem& a, const Problem& b) {
      return std::tie(a.line, a.column) < std::tie(b.line, b.column);
    });
    return std::move(problems_);
  }

 private:
  static bool is_prefix(const Params& params, const std::string& prefix) {
    return std::any_of(params.rows().begin(), params.rows().end(),
                       [&](const Row& row) { return row.path.starts_with(prefix); }) ||
           std::any_of(params.table_arrays().begin(), params.table_arrays().end(),
                       [&](const Tables& tables) { return tables.path.starts_with(prefix); });
  }

  void value(Row& row, const toml::node& node) {
    std::optional<Value> given = convert(node);
    if (!given) {
      problem(node.source(), row.path + (row.type == Type::integer ? ": want an " : ": want a ") +
                                 std::string(type_name(row.type)));
      return;
    }
    row.given = true;
    const toml::source_position begin = node.source().begin;
    row.at = name_ + ":" + std::to_string(begin.line) + ":" + std::to_string(begin.column);
    if (std::string* text = row.is_path ? std::get_if<std::string>(&*given) : nullptr) {
      if (!text->empty() && text->front() != '/') text->insert(0, folder_);
    }
    if (const Status status = row.set(*given); !status.ok()) {
      problem(node.source(), row.path + ": " + status.error().message);
    }
  }

  void array_of_tables(const Tables& tables, const toml::node& node) {
    const toml::array* elements = node.as_array();
    if (elements == nullptr || (!elements->empty() && !elements->is_homogeneous<toml::table>())) {
      problem(node.source(), tables.path + ": want tables, as in [[" + tables.path + "]]");
      return;
    }
    tables.clear();
    std::set<std::string> given;
    for (std::size_t i = 0; i < elements->size(); ++i) {
      const toml::table& element = *elements->get(i)->as_table();
      if (i >= tables.max) {
        problem(element.source(), tables.path + ": more than " + std::to_string(tables.max) + " entries");
        return;
      }
      Params rows = tables.append();
      table(rows, element, "");
      for (const Row& row : rows.rows()) {
        if (row.required && !row.given) {
          problem(element.source(), tables.path + ": missing key '" + row.path + "'");
        }
        if (row.given && row.path == tables.unique && !given.insert(row.print()).second) {
          problem(element.get(row.path)->source(), tables.path + ": " + row.path + ": " +
                                                       (row.secret ? "it" : row.print()) + " is given twice");
        }
      }
    }
  }

  static std::optional<Value> convert(const toml::node& node) {
    if (const auto* v = node.as_boolean()) return Value(v->get());
    if (const auto* v = node.as_integer()) return Value(v->get());
    if (const auto* v = node.as_floating_point()) return Value(v->get());
    if (const auto* v = node.as_string()) return Value(v->get());
    if (const toml::array* array = node.as_array()) {
      std::vector<std::string> items;
      for (const toml::node& item : *array) {
        const auto* text = item.as_string();
        if (text == nullptr) return std::nullopt;
        items.push_back(text->get());
      }
      return Value(std::move(items));
    }
    return std::nullopt;
  }

  void problem(const toml::source_region& where, std::string text) {
    problems_.push_back({where.begin.line, where.begin.column, std::move(text)});
  }

  const std::string name_;
  const std::string folder_;  // ends in a slash or is empty
  std::vector<Problem> problems_;
};

std::vector<Problem> read_text(Params& params, std::string_view text, std::string_view name) {
  const toml::parse_result parsed = toml::parse(text);
  if (!parsed) {
    const toml::source_position at = parsed.error().source().begin;
    return {{at.line, at.column, std::string(parsed.error().description())}};
  }
  Reader reader(name);
  reader.table(params, parsed.table(), "");
  return reader.take();
}

// Whether the row takes an override's text as it is.
bool is_textual(const Row& row) {
  switch (row.type) {
    case Type::boolean:
    case Type::integer:
    case Type::real:
      return false;
    case Type::size:
    case Type::duration:
      return row.unit.empty();
    case Type::string:
    case Type::choice:
    case Type::list:
      return true;
  }
  return true;
}

Value textual(const Row& row, std::string_view text) {
  if (row.type != Type::list) return std::string(text);
  std::vector<std::string> items;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    items.emplace_back(text.substr(0, comma));
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  return items;
}

}  // namespace

std::vector<std::string> parse_text(Params& params, std::string_view text, std::string_view name) {
  std::vector<std::string> errors;
  for (const Problem& problem : read_text(params, text, name)) {
    errors.push_back(std::string(name) + ":" + std::to_string(problem.line) + ":" +
                     std::to_string(problem.column) + ": " + problem.text);
  }
  return errors;
}

std::vector<std::string> parse_file(Params& params, const std::string& path) {
  const Result<std::string> text = file_read(path, config_bytes_max);
  if (!text) return {text.error().message};
  return parse_text(params, *text, path);
}

std::vector<std::string> parse_override(Params& params, std::string_view assignment) {
  const std::string name = "-o " + std::string(assignment);
  const std::size_t equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0) return {name + ": want key=value"};
  if (assignment.find('\n') != std::string_view::npos) return {"-o: want key=value on one line"};
  const std::string path(assignment.substr(0, equals));
  const std::string_view text = assignment.substr(equals + 1);
  Row* row = params.find(path);
  if (row == nullptr) {
    if (params.find_tables(path) != nullptr) return {name + ": '" + path + "' is set in the file only"};
    return {name + ": unknown key '" + path + "'"};
  }
  // A key may begin with a bracket: that is TOML for a list only.
  const bool is_toml =
      text.starts_with('"') || text.starts_with('\'') || (row->type == Type::list && text.starts_with('['));
  if (is_textual(*row) && !is_toml) {
    row->given = true;
    const Status status = row->set(textual(*row, text));
    row->at = name;
    if (!status.ok()) return {name + ": " + status.error().message};
    return {};
  }
  const std::vector<Problem> problems = read_text(params, path + " = " + std::string(text) + "\n", "");
  row->at = name;
  if (problems.empty()) return {};
  // A value that is no TOML at all gets the row's own words: `want an integer, got a string`.
  std::string message = problems.front().text;
  if (message.starts_with(path + ": ")) {
    message.erase(0, path.size() + 2);
  } else if (const Status status = row->set(Value(std::string(text))); !status.ok()) {
    message = status.error().message;
  }
  return {name + ": " + message};
}

std::vector<std::string> check_required(const Params& params, std::string_view name) {
  std::vector<std::string> errors;
  for (const Row& row : params.rows()) {
    if (row.required && !row.given) errors.push_back(std::string(name) + ": missing key '" + row.path + "'");
  }
  return errors;
}

}  // namespace di::config
