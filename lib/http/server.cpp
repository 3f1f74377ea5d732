#include "http/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include "base/assert.h"
#include "base/fd.h"
#include "base/log.h"
#include "http/address.h"
#include "http/answer.h"
#include "http/listener.h"
#include "http/wheel.h"

namespace di::http {

namespace {

constexpr std::size_t read_bytes_max = 64 << 10;  // one read; the buffer is shared by all connections

void set_option(int fd, int level, int name, int value) {
  // Options that speed up or bound a connection; without them it still works.
  if (::setsockopt(fd, level, name, &value, sizeof value) != 0) return;
}

}  // namespace

std::string_view gone_name(Gone why) {
  switch (why) {
    case Gone::client_left:
      return "client_left";
    case Gone::slow_client:
      return "slow_client";
  }
  return "";
}

struct Server::Impl {
  enum class Phase : std::uint8_t { head, body, handling, streaming, flushing, lingering };

  struct Connection {
    Connection(std::uint32_t index, Fd socket, std::size_t header_bytes_max)
        : slot(index), fd(std::move(socket)), parser(header_bytes_max) {}

    const std::uint32_t slot;
    Fd fd;
    std::optional<loop::Watch> watch;  // after fd: it must go first
    RequestParser parser;
    std::string peer;
    std::uint64_t generation = 0;  // of the exchange the handler has; 0: none
    Phase phase = Phase::head;
    std::optional<Reply> refusal;  // waits until the refused body has been read away
    std::string pipelined;         // bytes behind the present request
    std::string out;               // backlog, sent up to out_sent
    std::size_t out_sent = 0;
    std::size_t body_counted_bytes = 0;
    std::size_t body_seen_bytes = 0;
    Instant until;  // of a body being read, an answer being flushed, or a lingering end
    bool head_started = false;
    bool head_known = false;  // the parser has the head of the present request
    bool keep_alive = true;   // of the present exchange
    bool head_only = false;   // a HEAD request: no body in the answer
    bool chunked = true;      // false for HTTP/1.0
    bool feeding = false;     // feed() is on the stack
    bool more = false;        // and holds bytes behind the present request
    bool read_paused = false;
    bool read_closed = false;  // the client closed its side and may wait for the answer
    bool closed = false;       // out of the table; the object lives until the stack is unwound

    std::size_t backlog() const { return out.size() - out_sent; }
  };

  struct GoneNotice {
    ExchangeId id;
    Gone why;
  };

  Impl(loop::Loop& l, Handler& h, Options o)
      : loop(l),
        handler(h),
        options(o),
        wheel(l.now()),
        tick(l, loop::TimerKind::product, "http tick", [this] { on_tick(); }),
        deferred(l, loop::TimerKind::liveness, "http deferred", [this] { run_deferred(); }) {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
      const std::size_t room =
          limit.rlim_cur > static_cast<rlim_t>(2 * fd_reserve) ? limit.rlim_cur - fd_reserve : fd_reserve;
      options.connections_max = std::min(options.connections_max, room);
    }
  }

  // Listening.

  Result<std::string> listen(std::string_view text) {
    auto listener = listen_on(text);
    if (!listener) return listener.error();
    watch(**listener);
    listeners.push_back(*std::move(listener));
    return listeners.back()->address;
  }

  void watch(Listener& listener) {
    if (!listener.watch) listener.watch.emplace(loop, listener.fd.get(), "http accept");
    listener.watch->on_readable([this, &listener] { on_acceptable(listener); });
  }

  void on_acceptable(Listener& listener) {
    for (int i = 0; i < accept_batch_max; ++i) {
      SocketAddress peer;
      peer.bytes = sizeof peer.storage;
      Fd fd(::accept4(listener.fd.get(), peer.get(), &peer.bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd.valid()) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        // Out of descriptors or memory: the queue would make us spin, so look again with the next tick.
        log_warn("http", "accept failed", {{"error", errno_error("accept")}});
        listener.watch->on_readable(nullptr);
        accept_paused = true;
        start_tick();
        return;
      }
      ++counters.accepted;
      if (live >= options.connections_max) {
        ++counters.refused_connections;
        log_warn("http", "connection limit reached", {{"connections", live}});
        refuse_connection(fd.get());
        continue;
      }
      add_connection(std::move(fd), peer);
    }
  }

  // Best effort: the client may see a reset instead, if its request is already here.
  void refuse_connection(int fd) {
    const Failure failure = failure_make(503, "too many connections");
    Headers headers = handler.own_headers(nullptr);
    headers.emplace_back("Retry-After", "1");
    const std::string text = answers.head({.status = 503,
                                           .headers = headers,
                                           .content_type = "application/json",
                                           .length = failure.body.size(),
                                           .connection = "close"}) +
                             failure.body;
    if (::send(fd, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return;
    ::shutdown(fd, SHUT_WR);
  }

  void add_connection(Fd fd, const SocketAddress& peer) {
    std::uint32_t slot = 0;
    if (free_slots.empty()) {
      slot = static_cast<std::uint32_t>(slots.size());
      slots.emplace_back();
    } else {
      slot = free_slots.back();
      free_slots.pop_back();
    }
    const int raw = fd.get();
    if (!peer.is_unix()) {
      set_option(raw, IPPROTO_TCP, TCP_NODELAY, 1);
      set_option(raw, SOL_SOCKET, SO_KEEPALIVE, 1);
      set_option(raw, IPPROTO_TCP, TCP_KEEPIDLE, 60);
      set_option(raw, IPPROTO_TCP, TCP_KEEPINTVL, 10);
      set_option(raw, IPPROTO_TCP, TCP_KEEPCNT, 6);
      set_option(raw, IPPROTO_TCP, TCP_USER_TIMEOUT, 60'000);
    }
    auto connection = std::make_unique<Connection>(slot, std::move(fd), options.header_bytes_max);
    connection->peer = address_text(peer);
    connection->watch.emplace(loop, raw, "http connection");
    Connection& it = *connection;
    slots[slot] = std::move(connection);
    ++live;
    it.watch->on_readable([this, &it] { on_readable(it); });
    deadline(it, idle_limit);
    start_tick();
  }

  // Reading.

  void on_readable(Connection& it) {
    const ssize_t count = ::recv(it.fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return;
      return lose(it, Gone::client_left);
    }
    if (count == 0) return on_client_closed(it);
    const std::string_view bytes(buffer.data(), static_cast<std::size_t>(count));
    switch (it.phase) {
      case Phase::head:
      case Phase::body:
        return feed(it, bytes);
      case Phase::handling:
      case Phase::streaming:
      case Phase::flushing:
        it.pipelined.append(bytes);
        if (it.pipelined.size() >= pipelined_bytes_max) pause_reading(it, true);
        return;
      case Phase::lingering:
        // A client that still sends has not read the answer yet.
        return wheel.set(it.slot, std::min(it.until, loop.now() + linger_limit));
    }
  }

  void on_client_closed(Connection& it) {
    switch (it.phase) {
      case Phase::head:
      case Phase::body:
      case Phase::lingering:
        return close(it);
      case Phase::handling:
      case Phase::streaming:
        if (options.half_close_is_leave) return lose(it, Gone::client_left);
        break;
      case Phase::flushing:
        break;  // the rest of the answer may still be wanted
    }
    it.read_closed = true;
    it.keep_alive = false;
    it.watch->on_readable(nullptr);
  }

  void pause_reading(Connection& it, bool pause) {
    if (it.read_paused == pause || it.read_closed) return;
    it.read_paused = pause;
    if (pause) {
      ++paused;
      it.watch->on_readable(nullptr);
    } else {
      --paused;
      it.watch->on_readable([this, &it] { on_readable(it); });
    }
  }

  // Takes bytes through the parser, request after request, for as long as each is answered at once.
  void feed(Connection& it, std::string_view bytes) {
    const std::string before = std::exchange(it.pipelined, std::string()).append(bytes);
    if (before.size() > bytes.size()) bytes = before;
    it.feeding = true;
    while (!it.closed && (it.phase == Phase::head || it.phase == Phase::body) && !bytes.empty()) {
      const std::size_t taken = it.parser.feed(bytes);
      bytes.remove_prefix(taken);
      it.more = !bytes.empty();
      advance(it);
    }
    it.feeding = false;
    it.more = false;
    if (it.closed || it.phase == Phase::lingering) return;
    it.pipelined.append(bytes);
    pause_reading(it, it.pipelined.size() >= pipelined_bytes_max);
  }

  void advance(Connection& it) {
    if (it.parser.state() == RequestParser::State::head_done) {
      if (!judge_head(it)) return;
    }
    switch (it.parser.state()) {
      case RequestParser::State::head:
        if (it.parser.started() && !it.head_started) {
          it.head_started = true;
          deadline(it, header_limit);
        }
        return;
      case RequestParser::State::body:
        return count_body(it);
      case RequestParser::State::done:
        return dispatch(it);
      case RequestParser::State::failed: {
        ++counters.malformed;
        return answer_failure(it, Failure(it.parser.failure()));
      }
      case RequestParser::State::head_done:
        DI_PANIC("a head that was judged");
    }
  }

  // False when the request was answered here.
  bool judge_head(Connection& it) {
    Request& request = it.parser.request();
    request.peer = it.peer;
    it.head_known = true;
    it.keep_alive = request.keep_alive;
    it.head_only = request.method == "HEAD";
    it.chunked = request.version_minor > 0;
    Handler::Verdict verdict = handler.on_head(request);
    const std::uint64_t length = request.content_length.value_or(0);
    if (verdict.refuse) {
      const bool short_body = !request.expects_continue && !request.header("transfer-encoding") &&
                              length <= refused_body_bytes_max;
      if (!short_body) {
        answer_and_close(it, *verdict.refuse);
        return false;
      }
      it.refusal = std::move(verdict.refuse);
      verdict.body_bytes_max = refused_body_bytes_max;
    } else {
      verdict.body_bytes_max = std::min(verdict.body_bytes_max, longest_body());
      const std::size_t room = bodies_room(static_cast<std::size_t>(length));
      if (length <= verdict.body_bytes_max && length > room - std::min(bodies_bytes, room)) {
        answer_busy(it);
        return false;
      }
    }
    const bool goes_on = request.expects_continue && !it.more;
    it.parser.accept_body(verdict.body_bytes_max, !it.refusal.has_value());
    if (it.parser.state() == RequestParser::State::body) {
      it.phase = Phase::body;
      it.body_seen_bytes = 0;
      it.until = loop.now() + body_limit;
      wheel.set(it.slot, it.until);
      if (goes_on) send(it, "HTTP/1.1 100 Continue\r\n\r\n");
    }
    return !it.closed;
  }

  // A longer one would never find room.
  std::size_t longest_body() const {
    return std::max(std::min(options.bodies_bytes_max, small_body_bytes_max), bodies_room(SIZE_MAX));
  }
  // What all bodies may hold together for one of this length to be among them.
  std::size_t bodies_room(std::size_t body_bytes) const {
    return body_bytes <= small_body_bytes_max ? options.bodies_bytes_max
                                              : long_bodies_bytes_max(options.bodies_bytes_max);
  }

  void count_body(Connection& it) {
    earn_time(it, it.parser.body_bytes() - std::exchange(it.body_seen_bytes, it.parser.body_bytes()),
              body_limit);
    const std::size_t have = it.parser.request().body.size();
    const std::size_t before = std::exchange(it.body_counted_bytes, have);
    bodies_bytes += have - before;
    if (have > before && bodies_bytes > bodies_room(have)) answer_busy(it);
  }

  // Bytes that moved buy time, at most as much as there is without any.
  void earn_time(Connection& it, std::size_t bytes, Duration limit) {
    const Duration earned = seconds(1) * static_cast<std::int64_t>(bytes) / client_rate_bytes;
    it.until = std::min(it.until + earned, loop.now() + limit);
    wheel.set(it.slot, it.until);
  }

  void release_body(Connection& it) {
    bodies_bytes -= it.body_counted_bytes;
    it.body_counted_bytes = 0;
  }

  void dispatch(Connection& it) {
    const std::uint64_t generation = ++last_generation;
    it.generation = generation;
    it.phase = Phase::handling;
    ++exchanges;
    clear_deadline(it);
    if (it.refusal) {
      const Reply reply = std::move(*it.refusal);
      it.refusal.reset();
      respond(it, reply);
      if (!it.closed) release_body(it);
      return;
    }
    ++counters.requests;
    count_body_done(it);
    handler.on_request({it.slot, generation}, std::move(it.parser.request()));
    if (!it.closed) release_body(it);
  }

  // The last piece of a body arrives with the state `done`.
  void count_body_done(Connection& it) {
    const std::size_t have = it.parser.request().body.size();
    bodies_bytes += have - it.body_counted_bytes;
    it.body_counted_bytes = have;
  }

  // Answering.

  // The connection that has this exchange, or null.
  Connection* find(ExchangeId id) const {
    if (id.generation == 0 || id.slot >= slots.size()) return nullptr;
    Connection* it = slots[id.slot].get();
    return it != nullptr && it->generation == id.generation ? it : nullptr;
  }

  void end_exchange(Connection& it) {
    if (it.generation == 0) return;
    it.generation = 0;
    --exchanges;
  }

  // HTTP/1.1 keeps connections unless told otherwise, HTTP/1.0 the other way round.
  static std::string_view connection_field(const Connection& it) {
    if (!it.keep_alive) return "close";
    return it.chunked ? "" : "keep-alive";
  }

  bool no_room_for(const Reply& reply) const {
    const std::size_t room = options.answers_bytes_max - std::min(unsent_bytes, options.answers_bytes_max);
    return reply.body.size() > stream_backlog_bytes_max && reply.body.size() > room;
  }

  // The same request, answered shortly.
  static Reply too_many_answers(const Reply& reply) {
    const Failure failure = failure_make(503, "too many long answers wait for their readers; try again");
    Reply busy{.status = failure.status, .headers = {{"Retry-After", "1"}}, .body = failure.body};
    for (const auto& [name, value] : reply.headers) {
      if (same_word(name, "x-request-id")) busy.headers.emplace_back(name, value);
    }
    return busy;
  }

  void respond(Connection& it, const Reply& reply) {
    if (!reply.charged && no_room_for(reply)) return respond(it, too_many_answers(reply));
    if (draining || wants_close(reply.headers)) it.keep_alive = false;
    const bool bare = reply.status == 204 || reply.status == 304;
    std::string text = answers.head({.status = reply.status,
                                     .headers = reply.headers,
                                     .content_type = reply.body.empty() ? "" : "application/json",
                                     .length = bare ? std::nullopt : std::optional(reply.body.size()),
                                     .connection = connection_field(it)});
    if (!it.head_only && !bare) text.append(reply.body);
    end_exchange(it);
    flush(it, text);
  }

  // The last bytes of an answer.
  void flush(Connection& it, std::string_view bytes) {
    it.phase = Phase::flushing;
    it.until = loop.now() + stall_limit;
    if (!send(it, bytes)) return;
    if (it.backlog() == 0) return complete(it);
    wheel.set(it.slot, it.until);
  }

  // An answer of the server's own, before the request was read to its end.
  void answer_and_close(Connection& it, const Reply& reply) {
    it.refusal.reset();
    release_body(it);
    it.keep_alive = false;
    respond(it, reply);
  }

  void answer_failure(Connection& it, const Failure& failure) {
    Reply reply{.status = failure.status,
                .headers = handler.own_headers(it.head_known ? &it.parser.request() : nullptr),
                .body = failure.body};
    if (failure.status == 503) reply.headers.emplace_back("Retry-After", "1");
    answer_and_close(it, reply);
  }

  void answer_busy(Connection& it) {
    answer_failure(it, failure_make(503, "too many request bodies are being read; try again"));
  }

  bool start_stream(ExchangeId id, int status, const Headers& headers, std::string_view first) {
    Connection* it = find(id);
    if (it == nullptr || it->phase != Phase::handling) return false;
    if (draining || !it->chunked || wants_close(headers)) it->keep_alive = false;
    scratch = answers.head(
        {.status = status, .headers = headers, .connection = connection_field(*it), .chunked = it->chunked});
    it->phase = Phase::streaming;
    append_piece(*it, first);
    return send_stream(*it);
  }

  bool write(ExchangeId id, std::string_view bytes) {
    Connection* it = find(id);
    if (it == nullptr || it->phase != Phase::streaming) return false;
    scratch.clear();
    append_piece(*it, bytes);
    return send_stream(*it);
  }

  bool finish(ExchangeId id, std::string_view last, bool whole) {
    Connection* it = find(id);
    if (it == nullptr) return false;
    if (it->phase != Phase::streaming) {
      DI_ASSERT(!whole);  // finish() of what was never started
      end_exchange(*it);
      close(*it);
      return true;
    }
    scratch.clear();
    append_piece(*it, last);
    if (!whole) {
      it->keep_alive = false;
    } else if (it->chunked) {
      scratch.append("0\r\n\r\n");
    }
    end_exchange(*it);
    flush(*it, scratch);
    return true;
  }

  void append_piece(const Connection& it, std::string_view bytes) {
    if (it.chunked) {
      append_chunk(scratch, bytes);
    } else {
      scratch.append(bytes);
    }
  }

  bool send_stream(Connection& it) {
    if (!send(it, scratch)) return false;
    if (it.backlog() <= stream_backlog_bytes_max) return true;
    lose(it, Gone::slow_client);
    return false;
  }

  // False when the connection broke (and is closed).
  bool send(Connection& it, std::string_view bytes) {
    if (bytes.empty()) return true;
    if (it.backlog() == 0) {
      const ssize_t count = ::send(it.fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        lose(it, Gone::client_left);
        return false;
      }
      if (count > 0) bytes.remove_prefix(static_cast<std::size_t>(count));
      if (bytes.empty()) return true;
      it.watch->on_writable([this, &it] { on_writable(it); });
      deadline(it, stall_limit);
    }
    it.out.append(bytes);
    unsent_bytes += bytes.size();
    return true;
  }

  void on_writable(Connection& it) {
    const ssize_t count =
        ::send(it.fd.get(), it.out.data() + it.out_sent, it.backlog(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return;
      return lose(it, Gone::client_left);
    }
    it.out_sent += static_cast<std::size_t>(count);
    unsent_bytes -= static_cast<std::size_t>(count);
    if (it.backlog() > 0) {
      if (it.phase == Phase::flushing) {
        earn_time(it, static_cast<std::size_t>(count), stall_limit);
      } else {
        deadline(it, stall_limit);
      }
      // Keeps the memory of a stream that never quite catches up near its backlog; what is left is moved
      // only when at least as much went, so that a long answer is not moved again and again.
      if (it.out_sent >= stream_backlog_bytes_max && it.out_sent >= it.backlog()) {
        it.out.erase(0, it.out_sent);
        it.out_sent = 0;
      }
      return;
    }
    it.out = std::string();
    it.out_sent = 0;
    it.watch->on_writable(nullptr);
    if (it.phase == Phase::body) {
      wheel.set(it.slot, it.until);
    } else {
      clear_deadline(it);
    }
    if (it.phase == Phase::flushing) complete(it);
  }

  // The answer is with the kernel.
  void complete(Connection& it) {
    const bool read_all = it.parser.state() == RequestParser::State::done;
    if (draining) it.keep_alive = false;  // a stream that began before did not say so
    if (!it.keep_alive || !read_all) {
      // Closing over unread bytes would reset the connection, and the reset can overtake the answer.
      const bool unread = !read_all || !it.pipelined.empty() || it.more || it.read_paused;
      return unread && !it.read_closed ? linger(it) : close(it);
    }
    it.phase = Phase::head;
    it.head_started = false;
    it.head_known = false;
    it.head_only = false;
    it.chunked = true;
    it.parser.reset();
    deadline(it, idle_limit);
    if (!it.pipelined.empty() && !it.feeding) {
      resumed.push_back({it.slot, &it});
      deferred.start_after(Duration(0));
    }
  }

  void linger(Connection& it) {
    it.phase = Phase::lingering;
    it.pipelined = std::string();
    ::shutdown(it.fd.get(), SHUT_WR);
    pause_reading(it, false);
    it.until = loop.now() + (stopped ? linger_stopped_limit : linger_all_limit);
    wheel.set(it.slot, std::min(it.until, loop.now() + linger_limit));
  }

  // Ending.

  // The client is gone or is given up: the handler is told, later, if it has the exchange.
  void lose(Connection& it, Gone why) {
    if (why == Gone::slow_client) ++counters.slow_clients;
    if (it.generation != 0) {
      if (why == Gone::client_left) ++counters.clients_left;
      gone.push_back({{it.slot, it.generation}, why});
      deferred.start_after(Duration(0));
    }
    end_exchange(it);
    close(it);
  }

  void close(Connection& it) {
    DI_ASSERT(!it.closed && it.generation == 0);
    it.closed = true;
    release_body(it);
    unsent_bytes -= it.backlog();
    if (it.read_paused) --paused;
    it.watch.reset();
    it.fd.reset();
    clear_deadline(it);
    doomed.push_back(std::move(slots[it.slot]));
    free_slots.push_back(it.slot);
    --live;
    deferred.start_after(Duration(0));
  }

  void run_deferred() {
    doomed.clear();
    std::vector<GoneNotice> notices;
    notices.swap(gone);
    std::vector<std::pair<std::uint32_t, Connection*>> going_on;
    going_on.swap(resumed);
    for (const GoneNotice& notice : notices) handler.on_gone(notice.id, notice.why);
    for (const auto& [slot, connection] : going_on) {
      Connection* it = slots[slot].get();
      if (it != connection || it->phase != Phase::head) continue;
      feed(*it, {});
    }
    if (stopped && live == 0 && !std::exchange(empty_told, true)) handler.on_empty();
  }

  // Time.

  void deadline(Connection& it, Duration after) { wheel.set(it.slot, loop.now() + after); }
  void clear_deadline(Connection& it) { wheel.set(it.slot, instant_never); }

  void start_tick() {
    if (!tick.armed()) tick.start_every(wheel_tick);
  }

  void on_tick() {
    if (accept_paused) {
      accept_paused = false;
      for (const auto& listener : listeners) watch(*listener);
    }
    if (paused > 0) look_at_paused();
    due.clear();
    wheel.expire(loop.now(), due);
    for (const std::uint32_t slot : due) {
      if (slots[slot]) on_deadline(*slots[slot]);
    }
    if (live == 0 && !accept_paused) tick.cancel();
  }

  // Reading is paused behind a full pipeline, so nothing else tells that these clients left.
  void look_at_paused() {
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      Connection* it = slots[slot].get();
      if (it == nullptr || !it->read_paused) continue;
      pollfd look{it->fd.get(), POLLRDHUP, 0};
      if (::poll(&look, 1, 0) == 1 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
        lose(*it, Gone::client_left);
      }
    }
  }

  void on_deadline(Connection& it) {
    if (it.backlog() > 0) {
      ++counters.timeouts;
      return lose(it, Gone::slow_client);
    }
    switch (it.phase) {
      case Phase::head:
        if (!it.head_started) return close(it);
        ++counters.timeouts;
        return answer_timeout(it, "the request head took too long");
      case Phase::body:
        ++counters.timeouts;
        return answer_timeout(it, "the request body took too long");
      case Phase::lingering:
        return close(it);
      case Phase::handling:
      case Phase::streaming:
      case Phase::flushing:
        return;  // no deadline without a backlog
    }
  }

  void answer_timeout(Connection& it, std::string_view message) {
    answer_failure(it, failure_make(408, message));
  }

  void stop_listening() {
    if (stopped) return;
    draining = true;
    // Whoever has connected was told that somebody listens here.
    for (const auto& listener : listeners) {
      std::uint64_t before = 0;
      do {
        before = counters.accepted;
        on_acceptable(*listener);
      } while (counters.accepted - before >= static_cast<std::uint64_t>(accept_batch_max));
    }
    listeners.clear();
    accept_paused = false;
    stopped = true;
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      if (slots[slot] && slots[slot]->phase == Phase::lingering) {
        slots[slot]->until = std::min(slots[slot]->until, loop.now() + linger_stopped_limit);
        wheel.set(static_cast<std::uint32_t>(slot), slots[slot]->until);
      }
      // A request may have come since the last turn: closing over it would reset the connection.
      if (is_reading(slots[slot].get())) on_readable(*slots[slot]);
      if (is_reading(slots[slot].get()) && !slots[slot]->pipelined.empty()) feed(*slots[slot], {});
      // A rest that comes slowly would hold the stop, and the request would be refused after all.
      if (is_reading(slots[slot].get())) end_reading(*slots[slot]);
    }
    deferred.start_after(Duration(0));
  }

  static bool is_reading(const Connection* it) {
    return it != nullptr && (it->phase == Phase::head || it->phase == Phase::body);
  }

  void end_reading(Connection& it) {
    if (it.phase == Phase::head && !it.head_started) return close(it);
    answer_failure(it, failure_make(503, "the service is draining"));
  }

  loop::Loop& loop;
  Handler& handler;
  Options options;
  DeadlineWheel wheel;
  loop::Timer tick;
  loop::Timer deferred;
  std::vector<std::unique_ptr<Listener>> listeners;
  std::vector<std::unique_ptr<Connection>> slots;
  std::vector<std::uint32_t> free_slots;
  std::vector<std::unique_ptr<Connection>> doomed;
  std::vector<GoneNotice> gone;
  std::vector<std::pair<std::uint32_t, Connection*>> resumed;
  std::vector<std::uint32_t> due;
  std::array<char, read_bytes_max> buffer{};
  std::string scratch;
  AnswerText answers;
  std::uint64_t last_generation = 0;
  std::size_t live = 0;
  std::size_t exchanges = 0;
  std::size_t bodies_bytes = 0;
  std::size_t unsent_bytes = 0;
  std::size_t paused = 0;
  bool accept_paused = false;
  bool draining = false;
  bool stopped = false;     // stop_listening() was called
  bool empty_told = false;  // on_empty() was called
  Counters counters;
};

Server::Server(loop::Loop& loop, Handler& handler, Options options)
    : impl_(std::make_unique<Impl>(loop, handler, options)) {}
Server::~Server() = default;

Result<std::string> Server::listen(std::string_view address) {
  return impl_->listen(address);
}

bool Server::respond(ExchangeId id, const Reply& reply) {
  Impl::Connection* it = impl_->find(id);
  if (it == nullptr || it->phase != Impl::Phase::handling) return false;
  impl_->respond(*it, reply);
  return true;
}

bool Server::start_stream(ExchangeId id, int status, const Headers& headers, std::string_view first) {
  return impl_->start_stream(id, status, headers, first);
}
bool Server::write(ExchangeId id, std::string_view bytes) {
  return impl_->write(id, bytes);
}
bool Server::finish(ExchangeId id, std::string_view last) {
  return impl_->finish(id, last, true);
}
bool Server::abort(ExchangeId id, std::string_view last) {
  return impl_->finish(id, last, false);
}

std::size_t Server::backlog_bytes(ExchangeId id) const {
  const Impl::Connection* it = impl_->find(id);
  return it == nullptr ? 0 : it->backlog();
}

void Server::announce_drain() {
  impl_->draining = true;
}
void Server::stop_listening() {
  impl_->stop_listening();
}
std::size_t Server::connections() const {
  return impl_->live;
}
std::size_t Server::exchanges() const {
  return impl_->exchanges;
}
std::size_t Server::bodies_bytes() const {
  return impl_->bodies_bytes;
}
std::size_t Server::unsent_bytes() const {
  return impl_->unsent_bytes;
}
const Server::Counters& Server::counters() const {
  return impl_->counters;
}

}  // namespace di::http
