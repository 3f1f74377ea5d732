// http/status.h: reason phrases.  They matter: vllm bench reports nothing else of a failure.
#pragma once

#include <string_view>

namespace di::http {

// "Too Many Requests" for 429; "Unknown" for a status not listed.
[[nodiscard]] std::string_view status_reason(int status);

}  // namespace di::http
