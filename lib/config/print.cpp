#include <map>

#include "config/param.h"

namespace di::config {

namespace {

// "kv.evict.high_pct" -> table "kv.evict", key "high_pct".
std::pair<std::string, std::string> split(const std::string& path) {
  const std::size_t dot = path.rfind('.');
  if (dot == std::string::npos) return {"", path};
  return {path.substr(0, dot), path.substr(dot + 1)};
}

void print_row(std::string& out, const Row& row, const std::string& key, bool describe) {
  if (describe) {
    out += "# " + row.help;
    out += " (" + std::string(type_name(row.type));
    if (!row.unit.empty()) out += " in " + row.unit;
    if (!row.min_text.empty()) out += ", " + row.min_text + " to " + row.max_text;
    for (std::size_t i = 0; i < row.choices.size(); ++i) out += (i == 0 ? ": " : ", ") + row.choices[i];
    out += row.required ? "; required" : "; default " + row.def_text;
    if (row.reloadable) out += "; reloadable";
    out += ")\n";
  }
  out += key + " = " + row.print() + "\n";
}

}  // namespace

std::string print(const Params& params, bool describe) {
  // Keys outside any table first, because a table header ends them; then tables in the order of
  // their first row, then arrays of tables.
  std::vector<std::string> order{""};
  std::map<std::string, std::string> text;
  for (const Row& row : params.rows()) {
    const auto [table, key] = split(row.path);
    if (!table.empty() && !text.contains(table)) order.push_back(table);
    print_row(text[table], row, key, describe);
  }
  std::string out = text[""];
  for (const std::string& table : order) {
    if (table.empty()) continue;
    if (!out.empty()) out += "\n";
    out += "[" + table + "]\n" + text[table];
  }
  for (const Tables& tables : params.table_arrays()) {
    if (describe) out += "\n# [[" + tables.path + "]]: " + tables.help + "\n";
    for (const Params& element : tables.each()) {
      out += "\n[[" + tables.path + "]]\n";
      for (const Row& row : element.rows()) print_row(out, row, row.path, false);
    }
  }
  return out;
}

std::vector<std::string> changed(const Params& running, const Params& fresh) {
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < running.rows().size() && i < fresh.rows().size(); ++i) {
    if (running.rows()[i].print() != fresh.rows()[i].print()) paths.push_back(running.rows()[i].path);
  }
  const auto all = [](const Tables& tables) {
    std::string text;
    for (const Params& element : tables.each()) {
      for (const Row& row : element.rows()) print_row(text, row, row.path, false);
      text += "\n";
    }
    return text;
  };
  for (std::size_t i = 0; i < running.table_arrays().size() && i < fresh.table_arrays().size(); ++i) {
    if (all(running.table_arrays()[i]) != all(fresh.table_arrays()[i])) {
      paths.push_back(running.table_arrays()[i].path);
    }
  }
  return paths;
}

}  // namespace di::config
