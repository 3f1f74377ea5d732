#include "http/sse.h"

#include "base/assert.h"

namespace di::http {

std::string sse_event(std::string_view json) {
  DI_ASSERT(json.find_first_of("\r\n") == std::string_view::npos);
  std::string out;
  out.reserve(json.size() + 8);
  out.append("data: ");
  out.append(json);
  out.append("\n\n");
  return out;
}

const Headers& sse_headers() {
  static const Headers headers = {
      {"Content-Type", "text/event-stream"}, {"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  return headers;
}

Status SseReader::push(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    line_.append(bytes.substr(0, end));
    if (line_.size() + data_.size() > sse_event_bytes_max) {
      return Error{Code::no_space, 0,
                   "an event has more than " + std::to_string(sse_event_bytes_max) + " bytes"};
    }
    if (end == std::string_view::npos) break;
    bytes.remove_prefix(end + 1);
    if (line_.ends_with('\r')) line_.pop_back();
    line(line_);
    line_.clear();
  }
  return {};
}

void SseReader::line(std::string_view text) {
  if (text.empty()) {
    if (has_data_) on_data_(data_);
    data_.clear();
    has_data_ = false;
    return;
  }
  if (!text.starts_with("data:")) return;
  text.remove_prefix(5);
  if (text.starts_with(' ')) text.remove_prefix(1);
  if (has_data_) data_.push_back('\n');
  data_.append(text);
  has_data_ = true;
}

}  // namespace di::http
