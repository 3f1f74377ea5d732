// http/sse.h: server-sent events as the clients read them (spec/api.md 2.3, rules 1, 2 and 7), and how a
// client of ours reads them.
//
// Pure functions and values; any thread.  An event is `data: {json}\n\n`: LF LF, one space, one JSON
// text, handed to the server in one write.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "base/time.h"
#include "http/parse.h"

namespace di::http {

inline constexpr std::string_view sse_done = "data: [DONE]\n\n";
inline constexpr std::string_view sse_keep_alive = ": keep-alive\n\n";

// `json` is one line (asserted), as JsonWriter makes it.
[[nodiscard]] std::string sse_event(std::string_view json);
// Content-Type, exactly text/event-stream, and what keeps proxies from holding events back.
[[nodiscard]] const Headers& sse_headers();

// The data of events out of a body that comes in any pieces.  Comments, names and ids of events are passed
// over; an event that the body breaks off in is none.  Bound: `sse_event_bytes_max` for each event.
inline constexpr std::size_t sse_event_bytes_max = 1 << 20;

class SseReader {
 public:
  using OnData = std::function<void(std::string_view)>;

  explicit SseReader(OnData on_data) : on_data_(std::move(on_data)) {}
  // Errors: no_space when an event is larger than the bound; what follows is of no use then.
  Status push(std::string_view bytes);

 private:
  void line(std::string_view text);

  OnData on_data_;
  std::string line_;  // the end of it has not come
  std::string data_;
  bool has_data_ = false;
};

// When to send a comment so that an idle timer between us and the client does not fire.  Comments
// cost some clients events or spoil their measurements, so there is none before `interval` of silence.
class KeepAlive {
 public:
  // An interval of 0 turns them off.
  KeepAlive(Duration interval, Instant start) : interval_(interval), last_(start) {}

  // Bytes went to the client, a comment among them.
  void sent(Instant now) { last_ = now; }
  // When the next comment is due unless bytes go out before; instant_never when off.
  [[nodiscard]] Instant due() const { return interval_.count() > 0 ? last_ + interval_ : instant_never; }

 private:
  Duration interval_;
  Instant last_;
};

inline constexpr Duration keep_alive_interval_default = seconds(15);

}  // namespace di::http
