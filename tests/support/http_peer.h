// tests/support/http_peer.h: a client's socket, driven by the same thread as the server under test.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "base/fd.h"
#include "http/address.h"
#include "loop/loop.h"
#include "tests/support/manual_loop.h"

namespace di::http {

// The body of an answer that was read whole.
inline std::string_view body_of(std::string_view answer) {
  const std::size_t at = answer.find("\r\n\r\n");
  return at == std::string_view::npos ? std::string_view() : answer.substr(at + 4);
}

class Peer {
 public:
  Peer(loop::Loop& loop, const std::string& address, int receive_bytes = 0) : loop_(loop) {
    auto parsed = address_parse(address);
    fd_ = Fd(::socket(parsed->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (receive_bytes > 0) {
      EXPECT_EQ(::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof receive_bytes), 0);
    }
    EXPECT_EQ(::connect(fd_.get(), parsed->get(), parsed->bytes), 0);
    // What put() puts is there at once, not when what was before it is acknowledged.
    const int at_once = 1;
    if (!parsed->is_unix()) {
      EXPECT_EQ(::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once), 0);
    }
    EXPECT_EQ(::fcntl(fd_.get(), F_SETFL, O_NONBLOCK), 0);
  }

  void send(std::string_view bytes) {
    EXPECT_TRUE(loop::turn_until(loop_, [&] {
      const ssize_t count = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count > 0) bytes.remove_prefix(static_cast<std::size_t>(count));
      return bytes.empty();
    }));
  }
  // Puts a few bytes into the socket; the loop does not run.
  void put(std::string_view bytes) {
    EXPECT_EQ(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // Reads `count` bytes away, fewer when the server closes; returns how many.
  std::size_t take(std::size_t count) {
    std::size_t taken = 0;
    EXPECT_TRUE(loop::turn_until(loop_, [&] {
      char buffer[65536];
      const ssize_t got = ::recv(fd_.get(), buffer, std::min(count - taken, sizeof buffer), MSG_DONTWAIT);
      if (got > 0) taken += static_cast<std::size_t>(got);
      if (got == 0 || (got < 0 && errno != EAGAIN)) ended_ = true;
      return ended_ || taken == count;
    }));
    return taken;
  }
  // Runs the loop until `end` is in what was received, and takes everything up to it.
  std::string read_to(std::string_view end) {
    std::size_t at = std::string::npos;
    EXPECT_TRUE(wait([&] { return (at = in_.find(end)) != std::string::npos; })) << "got: " << in_;
    if (at == std::string::npos) return std::exchange(in_, "");
    std::string out = in_.substr(0, at + end.size());
    in_.erase(0, at + end.size());
    return out;
  }
  // One answer with Content-Length.
  std::string read_answer() {
    std::string head = read_to("\r\n\r\n");
    const std::size_t at = head.find("Content-Length: ");
    if (at == std::string::npos) return head;
    const std::size_t length = std::stoul(head.substr(at + 16));
    EXPECT_TRUE(wait([&] { return in_.size() >= length; }));
    head += in_.substr(0, length);
    in_.erase(0, length);
    return head;
  }
  // Everything until the server closes.
  std::string read_all() {
    EXPECT_TRUE(wait([&] { return ended_; }));
    return std::exchange(in_, "");
  }
  bool closed() {
    pull();
    return ended_;
  }
  std::string& received() {
    pull();
    return in_;
  }
  bool wait(const std::function<bool()>& done) {
    return loop::turn_until(loop_, [&] {
      pull();
      return done();
    });
  }
  void leave() { fd_.reset(); }
  void reset() {
    const linger now{1, 0};
    EXPECT_EQ(::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now), 0);
    fd_.reset();
  }
  void half_close() { EXPECT_EQ(::shutdown(fd_.get(), SHUT_WR), 0); }

 private:
  void pull() {
    char buffer[65536];
    while (fd_.valid() && !ended_) {
      const ssize_t count = ::recv(fd_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (count > 0) {
        in_.append(buffer, static_cast<std::size_t>(count));
      } else {
        ended_ = count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
        return;
      }
    }
  }

  loop::Loop& loop_;
  Fd fd_;
  std::string in_;
  bool ended_ = false;
};

}  // namespace di::http
