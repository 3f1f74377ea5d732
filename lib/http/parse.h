// http/parse.h: one HTTP/1 request from bytes (Boost.Beast's parser underneath, which takes no bare
// LF, no space before a colon, no second Content-Length and no Content-Length beside chunked).
//
// Added here, because a front that reads a request differently from the proxy before it can be made
// to serve one client's bytes as another's request (spec/api.md 1.6): a Transfer-Encoding other than
// exactly "chunked" is a 501, and with HTTP/1.0 a 400; a missing or second Host, a folded line, a
// control character, a Content-Length that is not plain digits or comes twice are a 400, and so is
// CR or LF alone, as soon as it is seen.  Trailers are read and dropped.
//
// Owner: the thread of the connection.  Bounds: head `header_bytes_max`, `header_count_max` fields,
// body as given to accept_body(), chunk headers `chunk_extension_bytes_max` beyond their sizes.
// After a failure the place of the next request is unknown: the connection must be closed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace di::http {

inline constexpr std::size_t header_bytes_max_default = 32 << 10;
inline constexpr std::size_t header_count_max = 128;
inline constexpr std::size_t chunk_extension_bytes_max = 16 << 10;  // all chunks of a body together

using Headers = std::vector<std::pair<std::string, std::string>>;

// The value of the first field of that name; `name` in lower case.
[[nodiscard]] std::optional<std::string_view> header_find(const Headers& headers, std::string_view name);

struct Request {
  std::string method;
  std::string path;   // as sent, not decoded, without the query; of an absolute target only the path
  std::string query;  // what follows '?', not decoded
  Headers headers;    // names in lower case
  std::string body;
  std::string peer;       // "address:port", or "unix"
  int version_minor = 1;  // HTTP/1.0 or 1.1
  bool keep_alive = true;
  bool expects_continue = false;
  std::optional<std::uint64_t> content_length;  // not with a chunked body

  [[nodiscard]] std::optional<std::string_view> header(std::string_view name) const {
    return header_find(headers, name);
  }
};

// Why the server answers by itself: the status and a JSON body in the shape of the API's errors.
struct Failure {
  int status = 400;
  std::string body;
};
[[nodiscard]] Failure failure_make(int status, std::string_view message);

class RequestParser {
 public:
  enum class State : std::uint8_t {
    head,       // reading the head
    head_done,  // request() has its head; accept_body() comes next
    body,
    done,    // request() is complete
    failed,  // see failure()
  };

  explicit RequestParser(std::size_t header_bytes_max = header_bytes_max_default);
  ~RequestParser();
  RequestParser(RequestParser&&) noexcept;
  RequestParser& operator=(RequestParser&&) noexcept;

  // Takes bytes in states `head` and `body`, until the state changes to one of the others; returns
  // how many belong to this request.  What follows is the next request's.
  std::size_t feed(std::string_view bytes);
  // In head_done: reads the body if it has at most `body_bytes_max` bytes, fails with 413 otherwise.
  // Without `keep` its bytes are counted and dropped.
  void accept_body(std::size_t body_bytes_max, bool keep = true);
  // Forgets this request and waits for the next one.
  void reset();

  [[nodiscard]] State state() const;
  // Whether bytes of this request have come (empty lines before it do not count).
  [[nodiscard]] bool started() const;
  [[nodiscard]] Request& request();              // from head_done on
  [[nodiscard]] std::size_t body_bytes() const;  // that have come, kept or not
  [[nodiscard]] const Failure& failure() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace di::http
