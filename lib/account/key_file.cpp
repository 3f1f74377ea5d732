#include "account/key.h"
#include "base/file.h"

namespace di::account {

Status KeyTable::add_file(const std::string& path, std::string_view tenant) {
  const auto text = file_read(path, key_file_bytes_max);
  if (!text) return text.error();
  std::string_view line = std::string_view(*text).substr(0, text->find('\n'));
  while (!line.empty() && (line.back() == '\r' || line.back() == ' ' || line.back() == '\t'))
    line.remove_suffix(1);
  if (const Status added = add(line, tenant); !added.ok()) return added.error().in(path);
  return {};
}

}  // namespace di::account
