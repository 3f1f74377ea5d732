// base/error.h: what went wrong, as a value.
//
// An Error is a code (what the caller should do about it), an errno when there is one, and a
// message that grows outward: "open /var/lib/di/kv.0: Permission denied".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace di {

// Append-only: the numbers travel in wire messages.  A new code needs a caller that behaves
// differently because of it.
enum class Code : std::uint16_t {
  ok = 0,
  invalid = 1,  // the input is wrong; do not repeat it
  not_found = 2,
  exists = 3,
  busy = 4,  // try again later or elsewhere
  timeout = 5,
  cancelled = 6,
  unreachable = 7,  // the peer is gone
  corrupt = 8,      // bytes do not match their checksum or format
  unsupported = 9,
  denied = 10,
  io = 11,
  no_space = 12,
  stale = 13,        // addressed to an earlier generation or attempt
  over_quota = 14,   // who asks may not have more; others may
  over_budget = 15,  // nobody made a mistake and nothing is full: do without it
};

// The spelling used in logs, metrics and control output, e.g. "not_found".
[[nodiscard]] std::string_view code_name(Code code);

struct [[nodiscard]] Error {
  Code code = Code::invalid;
  int os_errno = 0;
  std::string message;

  // Returns the same error with "`what`: " in front of its message.
  [[nodiscard]] Error in(std::string_view what) const;
};

// An Error from the current errno: `what` + ": " + strerror.  ENOSPC maps to no_space, ENOENT to
// not_found, EACCES and EPERM to denied, everything else to io.
[[nodiscard]] Error errno_error(std::string_view what);
[[nodiscard]] Error errno_error(std::string_view what, int os_errno);

}  // namespace di
