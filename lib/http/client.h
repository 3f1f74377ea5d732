// http/client.h: a small blocking HTTP client for di-ctl and tests, over TCP or a Unix socket.
//
// Owner: any one thread, which it blocks; never a loop thread.  One request at a time on one
// connection, which is used again when the server keeps it open.  Bounds: head 64 KiB, body
// `reply_bytes_max` unless the caller takes it piece by piece, each wait `timeout`.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "base/result.h"
#include "base/time.h"
#include "http/parse.h"

namespace di::http {

inline constexpr std::size_t reply_bytes_max = std::size_t{64} << 20;

struct ClientReply {
  int status = 0;
  Headers headers;        // names in lower case
  std::string body;       // empty when a callback took it
  bool complete = false;  // false: the body was cut off before its end

  [[nodiscard]] std::optional<std::string_view> header(std::string_view name) const {
    return header_find(headers, name);
  }
};

class Client {
 public:
  // Takes the body's bytes as they come; false to read no further, which closes the connection.
  using OnBytes = std::function<bool(std::string_view)>;

  // The address as in http/address.h.  A wait, here and later, ends with the code `cancelled` once `cancel_fd` is
  // readable; nothing is read from it, and it is the caller's.  -1: none.  Errors: unreachable when nobody listens,
  // timeout, invalid.
  static Result<Client> connect(std::string_view address, Duration timeout, int cancel_fd = -1);

  Result<ClientReply> get(std::string_view path, const Headers& headers = {});
  Result<ClientReply> post(std::string_view path, std::string_view json, const Headers& headers = {});
  // The whole of it.  Errors: unreachable when the connection breaks before the head is there,
  // timeout, corrupt when the answer is not HTTP, no_space when the body is too large to keep.
  Result<ClientReply> request(std::string_view method, std::string_view path, const Headers& headers,
                              std::string_view body, const OnBytes& on_bytes = nullptr);

  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  Client(Fd fd, std::string host, Duration timeout, int cancel_fd);

  Status wait(short events);
  Status send_all(std::string_view bytes);
  // Reads once; false at the end of the stream.
  Result<bool> fill();
  Result<std::string> line();
  Status read_head(ClientReply& reply);
  Status read_body(ClientReply& reply, bool none, const OnBytes& on_bytes);

  Fd fd_;
  std::string host_;
  Duration timeout_;
  std::string in_;  // read and not used yet
  int cancel_fd_;
};

}  // namespace di::http
