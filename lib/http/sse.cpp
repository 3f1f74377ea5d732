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

}  // namespace di::http
