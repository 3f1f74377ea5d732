// http/server.h: an HTTP/1.1 server on a loop thread: listeners, connections, answers and streams.
//
// Owner: the loop thread; every call comes from it and every hook of the Handler runs on it.  The
// server must outlive nothing but its handler's calls; the loop and the handler outlive the server.
//
// Sends are direct: whoever produced the bytes sends them without blocking, and only what the kernel
// did not take goes to the connection's backlog.  A read is always outstanding, so a client that
// leaves is noticed within milliseconds while nothing is being sent (spec/api.md 1.5).
//
// Life of a connection (one exchange at a time; what is pipelined behind it waits):
//
//   state      meaning                                  bounded by
//   head       waiting for, then reading, a head        idle_s until its first byte, header_s from there
//   body       reading the body                         body_limit, see below
//   handling   the handler has the request              the handler
//   streaming  a chunked answer is open                 the handler; the backlog as below
//   flushing   the answer's last bytes are in backlog   stall_limit, see below
//   lingering  our side is closed, theirs is read away  linger_limit of silence, linger_all_limit in all
//
// A body may fall behind client_rate_bytes a second by what that rate makes of body_limit, the rest of an
// answer by stall_limit: each byte buys its share of a second, and what came faster is no credit for
// silence later.
//
// A backlog above stream_backlog_bytes_max (streams) or without progress for stall_limit is a slow client:
// it is cut off, nothing ever waits for it.  Other bounds: connections_max (also kept below the limit of
// descriptors), head and body bytes, the sum of bodies being read and of answers not yet taken,
// pipelined_bytes_max.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "http/parse.h"
#include "loop/loop.h"

namespace di::http {

inline constexpr std::size_t stream_backlog_bytes_max = 256 << 10;
inline constexpr std::size_t pipelined_bytes_max = 64 << 10;  // then one more read, then none
inline constexpr int accept_batch_max = 64;
inline constexpr int fd_reserve = 64;  // descriptors left to the rest of the program
// A refused request whose body is at most this long is read away to its end, so that the connection lives.
inline constexpr std::size_t refused_body_bytes_max = 64 << 10;

inline constexpr Duration idle_limit = seconds(75);  // longer than the 5 s after which guidellm reuses
inline constexpr Duration header_limit = seconds(10);
inline constexpr Duration body_limit = seconds(30);
inline constexpr Duration stall_limit = seconds(60);
inline constexpr std::int64_t client_rate_bytes = 64 << 10;  // per second, either way
inline constexpr Duration linger_limit = seconds(5);
inline constexpr Duration linger_all_limit = seconds(30);
// After stop_listening(): enough for an answer to be read, and little of the time that a stop has.
inline constexpr Duration linger_stopped_limit = seconds(1);

// The sum of bodies being read.  Those longer than small_body_bytes_max leave a quarter of it to the others.
inline constexpr std::size_t bodies_bytes_max_default = std::size_t{256} << 20;
inline constexpr std::size_t small_body_bytes_max = 1 << 20;
[[nodiscard]] constexpr std::size_t long_bodies_bytes_max(std::size_t bodies_bytes_max) {
  return bodies_bytes_max - bodies_bytes_max / 4;
}

// One request and its answer.  Never reused.
struct ExchangeId {
  std::uint32_t slot = 0;
  std::uint64_t generation = 0;  // 0: none
  friend bool operator==(const ExchangeId&, const ExchangeId&) = default;
};

struct Reply {
  int status = 200;
  Headers headers;  // "Connection: close" closes after the answer; without Content-Type it is JSON
  std::string body;
  // Cost its client something: sent even where what waits for other readers leaves no room.
  bool charged = false;
};

enum class Gone : std::uint8_t {
  client_left,  // closed or reset by the client
  slow_client,  // cut off by us
};
[[nodiscard]] std::string_view gone_name(Gone why);

class Handler {
 public:
  struct Verdict {
    std::optional<Reply> refuse;  // no body is awaited then, and on_request is not called
    std::size_t body_bytes_max = 0;
  };

  virtual ~Handler() = default;
  // The head is there, the body is not: key, route and size are judged here, before the client is
  // told to go on (Expect: 100-continue).
  virtual Verdict on_head(const Request& head) = 0;
  // The request is complete.  It is answered now or later: respond(), or start_stream() .. finish()
  // or abort().
  virtual void on_request(ExchangeId id, Request request) = 0;
  // Fields of an answer that the server makes by itself: to a malformed request, for want of time or room.
  // `head` is null when the request's head is not known.
  virtual Headers own_headers(const Request* /*head*/) { return {}; }
  // Exactly once for each exchange that ends otherwise; never from within a call to the server.
  virtual void on_gone(ExchangeId id, Gone why) = 0;
  // Once after stop_listening(), when no connection is left; never from within a call to the server.
  virtual void on_empty() {}
};

class Server {
 public:
  struct Options {
    std::size_t connections_max = 8192;
    std::size_t header_bytes_max = header_bytes_max_default;
    // Beyond it requests get a 503; one whose body could never fit gets a 413.
    std::size_t bodies_bytes_max = bodies_bytes_max_default;
    // The sum of what the kernel has not taken of answers.  Beyond it an answer longer than
    // stream_backlog_bytes_max becomes a 503; shorter and charged ones are bounded by connections_max.
    std::size_t answers_bytes_max = std::size_t{256} << 20;
    // A client that closes its sending side counts as gone, as with most servers; false lets it wait.
    bool half_close_is_leave = true;
  };
  struct Counters {
    std::uint64_t accepted = 0;
    std::uint64_t refused_connections = 0;  // at connections_max
    std::uint64_t requests = 0;             // given to the handler
    std::uint64_t malformed = 0;            // answered by the parser's verdict
    std::uint64_t clients_left = 0;
    std::uint64_t slow_clients = 0;
    std::uint64_t timeouts = 0;
  };

  Server(loop::Loop& loop, Handler& handler, Options options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Listens on an address (http/address.h) and returns it with the port it got.  A Unix socket is
  // made with mode 0660; one left behind by a dead process is replaced.
  // Errors: busy when somebody listens there already, and what address_parse and bind say.
  Result<std::string> listen(std::string_view address);

  // The answers.  Each returns false when the exchange is gone or was answered already; on_gone has
  // then been called or will be.  All of them send at once what the kernel takes.
  bool respond(ExchangeId id, const Reply& reply);
  // Begins a chunked answer (HTTP/1.0: one that ends with the connection) with `first` as its first
  // chunk, in one send with the head.
  bool start_stream(ExchangeId id, int status, const Headers& headers, std::string_view first);
  // One chunk, one send.
  bool write(ExchangeId id, std::string_view bytes);
  // Ends a stream, with `last` as its last chunk if not empty.
  bool finish(ExchangeId id, std::string_view last = {});
  // Ends a stream without the terminating chunk, after `last` (an error event): the client sees a
  // truncated body (an HTTP/1.0 client cannot tell: its body ends with the connection).  On an
  // exchange that is not streaming it closes the connection without an answer.
  bool abort(ExchangeId id, std::string_view last = {});

  // Bytes of this exchange that the kernel has not taken yet.
  [[nodiscard]] std::size_t backlog_bytes(ExchangeId id) const;

  // From now on answers carry Connection: close.
  void announce_drain();
  // Takes the connections and requests that are already here, then closes the listeners and the connections
  // without a request; one that is here in part is answered with a 503.  Implies announce_drain().  May call
  // on_head() and on_request().
  void stop_listening();

  [[nodiscard]] std::size_t connections() const;
  [[nodiscard]] std::size_t exchanges() const;     // with the handler
  [[nodiscard]] std::size_t bodies_bytes() const;  // being read
  [[nodiscard]] std::size_t unsent_bytes() const;  // of all answers
  [[nodiscard]] const Counters& counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace di::http
