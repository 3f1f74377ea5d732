// tests/unit/transfer/proxy.h: a TCP forwarder that damages what passes.
//
// Owner: the test's thread makes and destroys it; one thread of its own forwards.  Bound: as many
// connections as the test opens.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "transfer/address.h"

namespace di::transfer {

class Proxy {
 public:
  static constexpr std::uint64_t none = UINT64_MAX;

  // `target`: "tcp://host:port".
  explicit Proxy(const std::string& target) : target_(*address_parse(target)) {
    listener_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    Address any = *address_parse("127.0.0.1:0");
    EXPECT_EQ(::bind(listener_.get(), any.get(), any.length), 0);
    EXPECT_EQ(::listen(listener_.get(), 16), 0);
    any.length = sizeof any.storage;
    EXPECT_EQ(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&any.storage), &any.length), 0);
    endpoint_ = "tcp://" + address_print(any);
    stop_ = Fd(::eventfd(0, EFD_CLOEXEC));
    thread_ = std::thread([this] { run(); });
  }
  ~Proxy() {
    const std::uint64_t one = 1;
    EXPECT_EQ(::write(stop_.get(), &one, sizeof one), 8);
    thread_.join();
  }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  [[nodiscard]] const std::string& endpoint() const { return endpoint_; }

  // Of the stream to the target, or back: flip a bit of the byte at this offset, once.
  std::atomic<std::uint64_t> flip_to{none};
  std::atomic<std::uint64_t> flip_back{none};
  // Ends the connection after this many bytes to the target, once.
  std::atomic<std::uint64_t> cut_to{none};
  // Takes connections and bytes and passes nothing on.
  std::atomic<bool> hole{false};

 private:
  struct Lane {
    Fd in;
    Fd out;
    std::uint64_t there = 0;
    std::uint64_t back = 0;
  };

  static bool send_all(int fd, ByteView bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }

  // False: the lane ends.
  bool pass(Lane& lane, bool to_target) {
    const ssize_t n = ::recv(to_target ? lane.in.get() : lane.out.get(), buffer_.data(), buffer_.size(), 0);
    if (n <= 0) return false;
    MutableByteView bytes(buffer_.data(), static_cast<std::size_t>(n));
    std::uint64_t& at = to_target ? lane.there : lane.back;
    std::atomic<std::uint64_t>& flip = to_target ? flip_to : flip_back;
    if (const std::uint64_t where = flip; where >= at && where < at + bytes.size()) {
      bytes[where - at] ^= std::byte{4};
      flip = none;
    }
    at += bytes.size();
    if (to_target && at > cut_to) {
      cut_to = none;
      return false;
    }
    return hole || send_all(to_target ? lane.out.get() : lane.in.get(), bytes);
  }

  void run() {
    while (true) {
      std::vector<pollfd> entries{{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const Lane& lane : lanes_) {
        entries.push_back({lane.in.get(), POLLIN, 0});
        entries.push_back({lane.out.get(), POLLIN, 0});
      }
      ::poll(entries.data(), entries.size(), -1);
      if (entries[0].revents != 0) return;
      std::vector<bool> over(lanes_.size());
      for (std::size_t i = 0; i < lanes_.size(); ++i) {
        if (entries[2 + 2 * i].revents != 0) over[i] = !pass(lanes_[i], true);
        if (!over[i] && entries[3 + 2 * i].revents != 0) over[i] = !pass(lanes_[i], false);
      }
      for (std::size_t i = over.size(); i-- > 0;) {
        if (over[i]) lanes_.erase(lanes_.begin() + static_cast<std::ptrdiff_t>(i));
      }
      if (entries[1].revents != 0) {
        Lane lane;
        lane.in = Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        lane.out = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (::connect(lane.out.get(), target_.get(), target_.length) == 0) lanes_.push_back(std::move(lane));
      }
    }
  }

  Address target_;
  std::string endpoint_;
  Fd listener_;
  Fd stop_;
  std::array<std::byte, 65536> buffer_{};
  std::vector<Lane> lanes_;
  std::thread thread_;
};

}  // namespace di::transfer
