// wire/names.h: what members of a fleet may be called.  A daemon asks before it starts, di-meta when it registers one:
// what the one lets through, the other takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace di::wire {

inline constexpr std::size_t name_bytes_max = 64;

[[nodiscard]] inline bool is_name_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

// PROGRAM.NAME with 1 to name_bytes_max letters, digits, '-' or '_' behind the dot.
[[nodiscard]] inline bool is_instance_of(std::string_view program, std::string_view instance) {
  if (program.empty() || !instance.starts_with(program) ||
      !instance.substr(program.size()).starts_with('.')) {
    return false;
  }
  const std::string_view name = instance.substr(program.size() + 1);
  return !name.empty() && name.size() <= name_bytes_max &&
         std::all_of(name.begin(), name.end(), is_name_letter);
}

// Of a host, rack or zone, or empty.  Host names have dots.
[[nodiscard]] inline bool is_label(std::string_view text) {
  return text.size() <= name_bytes_max && std::all_of(text.begin(), text.end(), [](char c) {
           return is_name_letter(c) || c == '.' || c == ':';
         });
}

}  // namespace di::wire
