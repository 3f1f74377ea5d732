#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace di {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::ok:
      return "ok";
    case Code::invalid:
      return "invalid";
    case Code::not_found:
      return "not_found";
    case Code::exists:
      return "exists";
    case Code::busy:
      return "busy";
    case Code::timeout:
      return "timeout";
    case Code::cancelled:
      return "cancelled";
    case Code::unreachable:
      return "unreachable";
    case Code::corrupt:
      return "corrupt";
    case Code::unsupported:
      return "unsupported";
    case Code::denied:
      return "denied";
    case Code::io:
      return "io";
    case Code::no_space:
      return "no_space";
    case Code::stale:
      return "stale";
    case Code::over_quota:
      return "over_quota";
    case Code::over_budget:
      return "over_budget";
  }
  return "unknown";
}

Error Error::in(std::string_view what) const {
  Error outer{code, os_errno, {}};
  outer.message.reserve(what.size() + 2 + message.size());
  outer.message.append(what).append(": ").append(message);
  return outer;
}

Error errno_error(std::string_view what) {
  return errno_error(what, errno);
}

Error errno_error(std::string_view what, int os_errno) {
  Code code = Code::io;
  if (os_errno == ENOSPC) code = Code::no_space;
  if (os_errno == ENOENT) code = Code::not_found;
  if (os_errno == EACCES || os_errno == EPERM) code = Code::denied;
  return Error{code, os_errno, std::string(what) + ": " + std::strerror(os_errno)};
}

}  // namespace di
