#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "base/assert.h"
#include "base/fd.h"
#include "base/json.h"
#include "base/log.h"
#include "daemon/control.h"
#include "daemon/stream.h"

namespace di::daemon {

namespace {

// Until accept() is tried again when there was no descriptor for it.
constexpr Duration accept_again_after = seconds(1);

enum ColumnKind : std::uint8_t { text_kind = 0, number_kind = 1, boolean_kind = 2, json_kind = 3 };

}  // namespace

Row& Row::text(std::string_view name, std::string_view value) {
  row_.columns.push_back({std::string(name), std::string(value), text_kind});
  return *this;
}
Row& Row::boolean(std::string_view name, bool value) {
  row_.columns.push_back({std::string(name), value ? "true" : "false", boolean_kind});
  return *this;
}
Row& Row::json(std::string_view name, std::string value) {
  row_.columns.push_back({std::string(name), std::move(value), json_kind});
  return *this;
}
Row& Row::number(std::string_view name, double value) {
  JsonWriter writer;
  writer.number(value);
  return number_text(name, writer.take());
}
Row& Row::number_text(std::string_view name, std::string value) {
  row_.columns.push_back({std::string(name), std::move(value), number_kind});
  return *this;
}

// A connection.
struct Reply::State {
  struct Caller {
    Caller(loop::Loop& on, Fd socket) : loop(on), fd(std::move(socket)), active(on.monotonic_now()) {}
    loop::Loop& loop;
    Fd fd;
    std::unique_ptr<loop::Watch> watch;
    bool restricted = false;
    // When it came, was answered or took something of an answer; or, with nothing to take, said something.
    Instant active;
    bool greeted = false;
    bool closed = false;
    Bytes in;
    Bytes out;
    std::size_t out_at = 0;
    std::weak_ptr<State> answering;  // a request that is not answered yet
    std::function<void()> go_on;     // takes the next request, in a later turn

    [[nodiscard]] std::size_t pending() const { return out.size() - out_at; }
    // The next request is begun when the last one is answered, and that was mostly taken.
    [[nodiscard]] bool may_ask() const {
      return !closed && answering.expired() && pending() <= control_pending_bytes_max;
    }
    void flush();
    void close();
    void close_unread() {
      log_warn("control", "caller does not read", {{"pending_bytes", pending()}});
      close();
    }
    template <class M>
    void say(const M& message) {
      if (closed) return;
      if (pending() == 0) active = loop.monotonic_now();  // from now on it has something to take
      stream_append(out, message);
      if (pending() > control_pending_bytes_limit) return close_unread();
      flush();
    }
  };

  std::weak_ptr<Caller> caller;
  bool finished = false;

  ~State() {
    if (!finished) finish(Error{Code::cancelled, 0, "the daemon dropped the request"});
  }
  void finish(const Error& error) {
    if (finished) return;
    finished = true;
    const std::shared_ptr<Caller> to = caller.lock();
    if (!to) return;
    to->say(wire::ctl_end{static_cast<std::uint16_t>(error.code), error.message});
    to->answering.reset();
    if (to->go_on) to->go_on();
  }
};

void Reply::State::Caller::flush() {
  while (!closed && out_at < out.size()) {
    const ssize_t sent = ::send(fd.get(), &out[out_at], out.size() - out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      out_at += static_cast<std::size_t>(sent);
      active = loop.monotonic_now();
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      // The sent part is given back now and then, not at every send.
      if (out_at > control_pending_bytes_max) {
        out.erase(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(out_at));
        out_at = 0;
      }
      watch->on_writable([this] { flush(); });
      return;
    } else {
      close();
      return;
    }
  }
  if (closed) return;
  out.clear();
  out_at = 0;
  watch->on_writable(nullptr);
  if (!in.empty() && answering.expired()) go_on();
}

void Reply::State::Caller::close() {
  if (closed) return;
  closed = true;
  // The watch may be running this; the server drops the caller in a later turn.
  watch->on_readable(nullptr);
  watch->on_writable(nullptr);
  if (go_on) go_on();
}

bool answer_by(std::span<const Command> commands, const Words& words, Reply reply) {
  const Command* best = nullptr;
  std::size_t best_count = 0;
  for (const Command& command : commands) {
    std::string_view left = command.words;
    std::size_t count = 0;
    bool fits = true;
    while (fits && !left.empty()) {
      const std::string_view word = left.substr(0, left.find(' '));
      left.remove_prefix(std::min(left.size(), word.size() + 1));
      fits = count < words.size() && words[count] == word;
      ++count;
    }
    const std::size_t more = words.size() - std::min(words.size(), count);
    if (!fits || count <= best_count || more < command.more_min || more > command.more_max) continue;
    best = &command;
    best_count = count;
  }
  if (best == nullptr) return false;
  best->answer(Words(words.begin() + static_cast<std::ptrdiff_t>(best_count), words.end()), reply);
  return true;
}

Reply::Reply(std::shared_ptr<State> state) : state_(std::move(state)) {}

void Reply::row(const Row& row) {
  if (state_->finished) return;
  if (const std::shared_ptr<State::Caller> to = state_->caller.lock()) to->say(row.message());
}
void Reply::end() {
  state_->finish(Error{Code::ok, 0, {}});
}
void Reply::end(const Row& last) {
  row(last);
  end();
}
void Reply::end(const Status& status) {
  status.ok() ? end() : fail(status.error());
}
void Reply::fail(const Error& error) {
  state_->finish(error);
}
bool Reply::wanted() const {
  const std::shared_ptr<State::Caller> to = state_->caller.lock();
  return !state_->finished && to && !to->closed;
}
bool Reply::accepts_more() const {
  const std::shared_ptr<State::Caller> to = state_->caller.lock();
  return to && to->pending() <= control_pending_bytes_max;
}

struct ControlServer::Impl {
  using Caller = Reply::State::Caller;

  struct Listener {
    Fd fd;
    std::string path;
    bool restricted = false;
    std::unique_ptr<loop::Watch> watch;
  };

  void watch(Listener& listener) {
    listener.watch->on_readable([this, &listener] { accept(listener); });
  }

  void accept(Listener& listener) {
    while (true) {
      Fd fd(::accept4(listener.fd.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd.valid()) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        // Out of descriptors or memory: the queue would make us spin.
        log_warn("control", "accept failed", {{"error", errno_error("accept " + listener.path)}});
        listener.watch->on_readable(nullptr);
        accept_again.start_after(accept_again_after);
        return;
      }
      // Each socket has its own: whoever may only look keeps nobody from steering.
      const auto here = std::count_if(callers.begin(), callers.end(), [&](const auto& other) {
        return other.second->restricted == listener.restricted;
      });
      if (static_cast<std::size_t>(here) >= control_callers_max) {
        log_warn("control", "too many callers", {{"socket", listener.path}, {"max", control_callers_max}});
        continue;
      }
      const std::uint64_t id = ++last_id;
      auto caller = std::make_shared<Caller>(loop, std::move(fd));
      caller->restricted = listener.restricted;
      caller->watch = std::make_unique<loop::Watch>(loop, caller->fd.get(), "control");
      caller->go_on = [this, id, alive = std::weak_ptr<bool>(alive)] {
        loop.post("control", [this, id, alive] {
          if (alive.lock()) go_on(id);
        });
      };
      callers[id] = caller;
      caller->watch->on_readable([this, weak = std::weak_ptr<Caller>(caller)] {
        if (const std::shared_ptr<Caller> from = weak.lock()) read(from);
      });
      if (!idle.armed()) idle.start_after(idle_max);
    }
  }

  // Ends callers that have asked nothing for long, or take nothing of what is there for them, be it all or not.
  void end_idle() {
    const Instant now = loop.monotonic_now();
    Instant next = instant_never;
    for (const auto& [id, caller] : callers) {
      if (caller->closed) continue;
      const bool unread = caller->pending() > 0;
      const bool waits = !caller->answering.expired() && !unread;
      if (waits || now - caller->active < idle_max) {
        next = std::min(next, (waits ? now : caller->active) + idle_max);
      } else if (unread) {
        caller->close_unread();
      } else {
        caller->close();
      }
    }
    if (next != instant_never) idle.start_at(next);
  }

  void go_on(std::uint64_t id) {
    const auto found = callers.find(id);
    if (found == callers.end()) return;
    const std::shared_ptr<Caller> caller = found->second;
    caller->active = loop.monotonic_now();
    if (caller->closed) {
      callers.erase(found);
    } else {
      take(caller);
    }
  }

  void read(const std::shared_ptr<Caller>& caller) {
    std::array<std::byte, 16384> buffer;
    // One request at a time: more than that waits in the socket.
    const ssize_t got = ::recv(caller->fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) {
      caller->close();
      return;
    }
    if (got < 0) return;
    if (caller->pending() == 0) caller->active = loop.monotonic_now();
    caller->in.insert(caller->in.end(), buffer.begin(), buffer.begin() + got);
    if (caller->in.size() > control_request_bytes_max + 2 * wire::header_bytes + buffer.size()) {
      caller->close();
      return;
    }
    take(caller);
  }

  void take(const std::shared_ptr<Caller>& caller) {
    std::size_t used = 0;
    while (caller->may_ask()) {
      auto taken = stream_take(ByteView(caller->in).subspan(used), control_request_bytes_max);
      if (!taken) {
        log_warn("control", "message refused", {{"fault", wire::fault_name(taken.fault())}});
        // A caller of another version learns ours from the header of this.
        if (!caller->greeted) caller->say(hello());
        caller->close();
        return;
      }
      if (!taken->has_value()) break;
      const StreamMessage message = **taken;
      used += message.used;
      handle(caller, message);
    }
    if (!caller->closed)
      caller->in.erase(caller->in.begin(), caller->in.begin() + static_cast<std::ptrdiff_t>(used));
  }

  [[nodiscard]] wire::ctl_hello hello() const { return {program, wire::protocol_version}; }

  void handle(const std::shared_ptr<Caller>& caller, const StreamMessage& message) {
    switch (message.header.number) {
      case wire::ctl_hello::number:
        caller->greeted = true;
        caller->say(hello());
        return;
      case wire::ctl_flow::number:
        return;  // rows wait for the socket by themselves
      case wire::ctl_request::number:
        break;
      default:
        log_warn("control", "message refused", {{"fault", wire::fault_name(wire::Fault::number)}});
        caller->close();
        return;
    }
    wire::Decoded<wire::ctl_request> request = wire::body_decode<wire::ctl_request>(message.body);
    if (!request || !caller->greeted) {
      caller->close();
      return;
    }
    auto state = std::make_shared<Reply::State>();
    state->caller = caller;
    caller->answering = state;
    const std::vector<std::string>& words = request->words;
    if (words.empty()) {
      state->finish(Error{Code::invalid, 0, "no command"});
      return;
    }
    if (caller->restricted && words[0] != "show" && words[0] != "explain") {
      state->finish(Error{Code::denied, 0, "'" + words[0] + "' is not allowed on this socket"});
      return;
    }
    if (!handler(words, Reply(state))) {
      std::string text;
      for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
      state->finish(Error{Code::unsupported, 0, program + " has no command '" + text + "'"});
    }
  }

  Impl(loop::Loop& l, std::string p, ControlHandler h, Duration idle_limit)
      : loop(l),
        program(std::move(p)),
        handler(std::move(h)),
        idle_max(idle_limit),
        accept_again(l, loop::TimerKind::liveness, "control accept",
                     [this] {
                       for (const auto& listener : listeners) watch(*listener);
                     }),
        idle(l, loop::TimerKind::liveness, "control idle", [this] { end_idle(); }) {}

  loop::Loop& loop;
  const std::string program;
  const ControlHandler handler;
  const Duration idle_max;
  loop::Timer accept_again;
  loop::Timer idle;
  std::vector<std::unique_ptr<Listener>> listeners;
  std::map<std::uint64_t, std::shared_ptr<Caller>> callers;
  std::uint64_t last_id = 0;
  std::shared_ptr<bool> alive = std::make_shared<bool>(true);
};

ControlServer::ControlServer(loop::Loop& loop, std::string program, ControlHandler handler, Duration idle_max)
    : impl_(std::make_unique<Impl>(loop, std::move(program), std::move(handler), idle_max)) {}

ControlServer::~ControlServer() {
  for (const auto& [id, caller] : impl_->callers) {
    caller->go_on = nullptr;
    caller->close();
  }
  for (const auto& listener : impl_->listeners) ::unlink(listener->path.c_str());
}

Status ControlServer::listen(const std::string& path, bool restricted) {
  sockaddr_un address{};
  if (path.size() >= sizeof address.sun_path) {
    return Error{Code::invalid, 0,
                 path + ": a socket path of at most 107 bytes is possible; use a shorter run.dir"};
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  auto listener = std::make_unique<Impl::Listener>();
  listener->path = path;
  listener->restricted = restricted;
  listener->fd = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener->fd.valid()) return errno_error("socket " + path);
  // The instance's lock is held: whoever made this file is gone.
  ::unlink(path.c_str());
  if (::bind(listener->fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return errno_error("bind " + path);
  }
  if (::chmod(path.c_str(), restricted ? 0666 : 0660) != 0) return errno_error("chmod " + path);
  if (::listen(listener->fd.get(), 64) != 0) return errno_error("listen " + path);
  listener->watch = std::make_unique<loop::Watch>(impl_->loop, listener->fd.get(), "control");
  impl_->watch(*listener);
  impl_->listeners.push_back(std::move(listener));
  return {};
}

}  // namespace di::daemon
