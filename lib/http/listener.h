// http/listener.h: a socket that listens, over TCP or on a file.
//
// Owner: the thread of the server.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "base/result.h"
#include "loop/loop.h"

namespace di::http {

struct Listener {
  Fd fd;                             // does not block
  std::optional<loop::Watch> watch;  // after fd: it must go first
  std::string path;                  // of a Unix socket: removed with the listener
  std::string address;               // as http/address.h spells it, with the port that was given

  Listener() = default;
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
};

// Listens; a socket file that nobody listens on is replaced.  Nobody watches it yet.
// Errors: busy (the address is in use), exists (there is another file), as address_parse(), io.
[[nodiscard]] Result<std::unique_ptr<Listener>> listen_on(std::string_view text);

}  // namespace di::http
