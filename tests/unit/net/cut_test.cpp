// A network that swallows what goes in one direction: a half-open connection, over TCP with keys.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <list>

#include "base/fd.h"
#include "tests/unit/net/fleet.h"

namespace di::net {
namespace {

// Passes bytes between callers and a port, as long as it is let.
class Wire {
 public:
  Wire(loop::Loop& loop, const std::string& target)
      : loop_(loop), target_(address_of(target.substr(target.rfind(':') + 1))) {
    listener_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    sockaddr_in any = address_of("0");
    socklen_t bytes = sizeof any;
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&any), sizeof any), 0);
    EXPECT_EQ(::listen(listener_.get(), 16), 0);
    EXPECT_EQ(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&any), &bytes), 0);
    address = "tcp://127.0.0.1:" + std::to_string(ntohs(any.sin_port));
    watch_ = std::make_unique<loop::Watch>(loop_, listener_.get(), "wire");
    watch_->on_readable([this] { accept(); });
  }

  // 0: what callers send; 1: what they are sent.
  void cut(std::size_t direction, bool is_cut) {
    cut_[direction] = is_cut;
    for (Pair& pair : pairs_) open(pair, direction);
  }

  std::string address;

 private:
  struct Pair {
    std::array<Fd, 2> ends;  // the caller's, the server's
    std::array<std::unique_ptr<loop::Watch>, 2> watches;
    bool over = false;
  };

  static sockaddr_in address_of(const std::string& port) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<std::uint16_t>(std::stoi(port)));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
  }

  void accept() {
    Fd caller(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!caller.valid()) return;
    Fd server(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(server.get(), reinterpret_cast<const sockaddr*>(&target_), sizeof target_) != 0) return;
    Pair& pair = pairs_.emplace_back();
    pair.ends = {std::move(caller), std::move(server)};
    open(pair, 0);
    open(pair, 1);
  }

  void open(Pair& pair, std::size_t direction) {
    pair.watches[direction].reset();
    if (cut_[direction] || pair.over) return;
    pair.watches[direction] = std::make_unique<loop::Watch>(loop_, pair.ends[direction].get(), "wire");
    pair.watches[direction]->on_readable([this, &pair, direction] { pass(pair, direction); });
  }

  void pass(Pair& pair, std::size_t direction) {
    std::array<char, 65536> bytes{};
    const ssize_t got = ::recv(pair.ends[direction].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    const int to = pair.ends[1 - direction].get();
    if (got > 0 && ::send(to, bytes.data(), static_cast<std::size_t>(got), MSG_NOSIGNAL) == got) return;
    pair.over = true;
    for (std::size_t i : {0u, 1u}) {
      pair.watches[i].reset();
      ::shutdown(pair.ends[i].get(), SHUT_RDWR);
    }
  }

  loop::Loop& loop_;
  const sockaddr_in target_;
  Fd listener_;
  std::unique_ptr<loop::Watch> watch_;
  std::array<bool, 2> cut_{};
  std::list<Pair> pairs_;
};

class KeyedNet final : public Net {
 public:
  std::unique_ptr<Transport> make(loop::Loop& loop) override {
    return make_zmq_transport(loop, Curve{own, [](std::string_view) { return true; }});
  }
  std::string address(const std::string&) override { return "tcp://127.0.0.1:0"; }
  KeyPair own;
};

// The loss of one direction is loss on both sides, and both come back.
void cut_and_mend(std::size_t direction) {
  if (!zmq_testable) GTEST_SKIP() << "libzmq is not instrumented for the thread sanitizer";
  loop::Loop loop;
  KeyedNet net;
  Endpoint::Options options;
  options.heartbeat = milliseconds(50);
  options.lost_after = milliseconds(500);
  const auto node = [&](Member m) {
    net.own = key_pair_make();
    m.public_key = net.own.public_key;
    return std::make_unique<Node>(loop, net, std::move(m), options);
  };
  const auto router = node(member(1, 10, "di-router.0"));
  const auto decode = node(member(2, 11, "di-decode.0"));
  Wire wire(loop, decode->self.control);
  Member through = decode->self;
  through.control = wire.address;
  const std::vector<Member> members{router->self, through};
  router->endpoint.set_members(members);
  decode->endpoint.set_members(members);
  const auto both = [&] { return router->endpoint.up(2) && decode->endpoint.up(1); };
  ASSERT_TRUE(loop.run_until(both, patience));
  wire.cut(direction, true);
  ASSERT_TRUE(loop.run_until([&] { return !router->endpoint.up(2) && !decode->endpoint.up(1); }, patience));
  wire.cut(direction, false);
  ASSERT_TRUE(loop.run_until(both, patience));
  ASSERT_TRUE(router->endpoint.send_body(2, wire::seat_release::number, as_bytes("a number"), {}).ok());
  ASSERT_TRUE(loop.run_until([&] { return !decode->seats.empty(); }, patience));
  EXPECT_EQ(decode->seats.size(), 1u);
}

TEST(Cut, OfWhatCallersSend) {
  cut_and_mend(0);
}

TEST(Cut, OfWhatCallersAreSent) {
  cut_and_mend(1);
}

}  // namespace
}  // namespace di::net
