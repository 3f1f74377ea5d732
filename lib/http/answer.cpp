#include "http/answer.h"

#include <algorithm>

#include "base/clock.h"
#include "http/status.h"

namespace di::http {

namespace {

// Values may come from a request (ids, names of models): a line break in one must not begin a field.
void append_field(std::string& out, std::string_view name, std::string_view value) {
  out.append(name).append(": ");
  for (const char c : value) out.push_back(static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c);
  out.append("\r\n");
}

}  // namespace

bool same_word(std::string_view a, std::string_view lower) {
  return a.size() == lower.size() && std::equal(a.begin(), a.end(), lower.begin(), [](char x, char y) {
           return (x >= 'A' && x <= 'Z' ? static_cast<char>(x - 'A' + 'a') : x) == y;
         });
}

bool wants_close(const Headers& headers) {
  return std::any_of(headers.begin(), headers.end(), [](const auto& field) {
    return same_word(field.first, "connection") && same_word(field.second, "close");
  });
}

std::string AnswerText::head(const AnswerHead& head) {
  std::string out;
  out.reserve(256);
  out.append("HTTP/1.1 ").append(std::to_string(head.status)).append(" ").append(status_reason(head.status));
  out.append("\r\nDate: ").append(date()).append("\r\n");
  std::string_view content_type = head.content_type;
  for (const auto& [name, value] : head.headers) {
    if (same_word(name, "connection")) continue;
    if (same_word(name, "content-type")) content_type = {};
    append_field(out, name, value);
  }
  if (!content_type.empty()) append_field(out, "Content-Type", content_type);
  if (head.length) append_field(out, "Content-Length", std::to_string(*head.length));
  if (head.chunked) append_field(out, "Transfer-Encoding", "chunked");
  if (!head.connection.empty()) append_field(out, "Connection", head.connection);
  out.append("\r\n");
  return out;
}

std::string_view AnswerText::date() {
  const std::time_t now = static_cast<std::time_t>(wall_clock_ms() / 1000);
  if (now != date_s_) {
    date_s_ = now;
    std::tm parts{};
    ::gmtime_r(&now, &parts);
    char text[40];
    date_.assign(text, std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts));
  }
  return date_;
}

void append_chunk(std::string& out, std::string_view bytes) {
  if (bytes.empty()) return;
  char hex[16];
  std::size_t at = sizeof hex;
  for (std::size_t rest = bytes.size(); rest > 0; rest >>= 4) hex[--at] = "0123456789abcdef"[rest & 15];
  out.append(hex + at, sizeof hex - at);
  out.append("\r\n");
  out.append(bytes);
  out.append("\r\n");
}

}  // namespace di::http
