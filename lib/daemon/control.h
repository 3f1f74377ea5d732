// daemon/control.h: the control socket: RUNDIR/INSTANCE.ctl, and the restricted RUNDIR/INSTANCE.ro.
//
// SOCK_STREAM; each way a stream of (64-byte header, body).  The caller says ctl_hello with its
// protocol version, the daemon answers with its own; then one ctl_request, rows, ctl_end, and the
// next request.  A caller that closes the connection cancels what it asked for.  A caller that does
// not read is waited for, for `control_idle_max`: rows beyond `control_pending_bytes_max` make accepts_more()
// false, and whoever takes nothing for so long is dropped, whether its answer is whole or not.
//
// Owner: loop thread.  Bounds: `control_callers_max` connections on each of the two, which end when they asked
// nothing, or took nothing of an answer, for `control_idle_max`; one that waits for its answer stays.  A request
// of `control_request_bytes_max`.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/result.h"
#include "loop/loop.h"
#include "wire/messages.h"

namespace di::daemon {

inline constexpr std::size_t control_callers_max = 64;
inline constexpr Duration control_idle_max = std::chrono::minutes(1);
inline constexpr std::size_t control_request_bytes_max = 64 << 10;
inline constexpr std::size_t control_pending_bytes_max = 1 << 20;
inline constexpr std::size_t control_pending_bytes_limit = 64 << 20;  // beyond: the caller is dropped

// One row of an answer.  Names are snake_case with their unit.
class Row {
 public:
  Row& text(std::string_view name, std::string_view value);
  Row& boolean(std::string_view name, bool value);
  Row& json(std::string_view name, std::string value);
  template <std::integral T>
  requires(!std::same_as<T, bool>) Row& number(std::string_view name, T value) {
    return number_text(name, std::to_string(value));
  }
  Row& number(std::string_view name, double value);

  [[nodiscard]] const wire::ctl_row& message() const { return row_; }

 private:
  Row& number_text(std::string_view name, std::string value);
  wire::ctl_row row_;
};

// The answer to one request.  Copies are the same answer; it may be kept and finished in a later
// turn.  When the last copy goes without end(), the caller gets `cancelled`.
class Reply {
 public:
  void row(const Row& row);
  void end();
  // The last row.
  void end(const Row& row);
  // Nothing to show: it was done, or it fails.
  void end(const Status& status);
  void fail(const Error& error);
  // False when the caller is gone or the answer is finished: stop working.
  [[nodiscard]] bool wanted() const;
  // False while the caller has more than control_pending_bytes_max to read.
  [[nodiscard]] bool accepts_more() const;

  struct State;
  explicit Reply(std::shared_ptr<State> state);

 private:
  std::shared_ptr<State> state_;
};

using Words = std::vector<std::string>;

// One command of a daemon.
struct Command {
  std::string_view words;  // "kv drain"
  // `more`: the words behind those.
  std::function<void(const Words& more, Reply& reply)> answer;
  std::size_t more_min = 0;
  std::size_t more_max = 0;
};
// By the command with the most words that these begin with and that takes as many more.  False: there is none.
[[nodiscard]] bool answer_by(std::span<const Command> commands, const Words& words, Reply reply);

// `words` is the command ("show", "kv"); true when it was taken, now or later.
using ControlHandler = std::function<bool(const Words& words, Reply reply)>;

class ControlServer {
 public:
  // `program` names the daemon in errors; `handler` gets what is allowed on the socket it came by.
  ControlServer(loop::Loop& loop, std::string program, ControlHandler handler,
                Duration idle_max = control_idle_max);
  ~ControlServer();

  // Creates the socket, replacing a file that is there.  `restricted`: only `show` and `explain`, the rest is
  // answered `denied`; mode 0666, for whoever gets into the folder, where the other has 0660.
  Status listen(const std::string& path, bool restricted);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The other side, blocking, for di-ctl and tests.
class ControlClient {
 public:
  ControlClient();
  ~ControlClient();
  ControlClient(ControlClient&&) noexcept;

  // Errors: unreachable, unsupported ("incompatible di-ctl and di-kvd").
  static Result<ControlClient> connect(const std::string& path, std::string_view program);
  // Calls `row` for each row.  Errors: what the daemon answered; unreachable when it hung up; timeout
  // when it was silent for `silence_max`.
  Status request(const std::vector<std::string>& words, const std::function<void(const wire::ctl_row&)>& row,
                 Duration silence_max);
  // What the daemon called itself.
  [[nodiscard]] const std::string& daemon() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace di::daemon
