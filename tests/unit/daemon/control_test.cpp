#include "daemon/control.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/fd.h"
#include "daemon/stream.h"

namespace di::daemon {
namespace {

constexpr Duration patience = seconds(20);

class Control : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/di-control-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    folder = pattern;
    server = std::make_unique<ControlServer>(
        loop, "di-probe.0",
        [this](const std::vector<std::string>& words, Reply reply) { return handler(words, reply); });
    ASSERT_TRUE(server->listen(path(), false).ok());
    ASSERT_TRUE(server->listen(folder + "/ro", true).ok());
  }
  void TearDown() override {
    server.reset();
    std::filesystem::remove_all(folder);
  }
  std::string path() const { return folder + "/ctl"; }

  // Runs the loop while `client` blocks in a thread of its own.
  void with_loop(const std::function<void()>& client) {
    std::thread thread([&] {
      client();
      loop.stop();
    });
    loop.run();
    thread.join();
  }
  // A command and what came back: "a=1 b=2|" per row, then ok or the error.
  std::string ask(const std::vector<std::string>& words, const std::string& socket = "") {
    std::string text;
    with_loop([&] {
      Result<ControlClient> client = ControlClient::connect(socket.empty() ? path() : socket, "di-ctl");
      if (!client) {
        text = client.error().message;
        return;
      }
      const Status status = client->request(
          words,
          [&](const wire::ctl_row& row) {
            for (const wire::ControlColumn& column : row.columns)
              text += column.name + "=" + column.value + " ";
            text += "|";
          },
          patience);
      text +=
          status.ok() ? "ok" : std::string(code_name(status.error().code)) + ": " + status.error().message;
    });
    return text;
  }

  static Fd dial(const std::string& path) {
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size());
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  // A hello and these requests, at once.
  static void say(const Fd& fd, const std::vector<Words>& requests) {
    Bytes bytes;
    stream_append(bytes, wire::ctl_hello{"test", wire::protocol_version});
    for (const Words& words : requests) stream_append(bytes, wire::ctl_request{words});
    EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  // Takes what has come into `back`; true when the other side has ended the connection.
  static bool ended(const Fd& fd, Bytes& back) {
    std::array<std::byte, 4096> buffer;
    while (true) {
      const ssize_t got = ::recv(fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (got <= 0) return got == 0;
      back.insert(back.end(), buffer.begin(), buffer.begin() + got);
    }
  }
  // The other side has, whatever is left to take.
  static bool hung_up(const Fd& fd) {
    pollfd gone{fd.get(), 0, 0};
    return ::poll(&gone, 1, 0) == 1 && (gone.revents & POLLHUP) != 0;
  }
  // How many messages of this number those bytes have.
  static int count(const Bytes& bytes, std::uint16_t number) {
    int found = 0;
    for (std::size_t at = 0;;) {
      auto taken = stream_take(ByteView(bytes).subspan(at), 1 << 20);
      if (!taken || !taken->has_value()) return found;
      at += (*taken)->used;
      if ((*taken)->header.number == number) ++found;
    }
  }

  std::string folder;
  loop::Loop loop;
  std::unique_ptr<ControlServer> server;
  std::function<bool(const std::vector<std::string>&, Reply)> handler = [](const auto&, const Reply&) {
    return false;
  };
};

TEST_F(Control, RowsComeInOrderThenTheEnd) {
  handler = [](const std::vector<std::string>& words, Reply reply) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      Row row;
      row.text("word", words[i]).number("index", i).boolean("first", i == 0).number("half", 0.5);
      reply.row(row);
    }
    reply.end();
    return true;
  };
  EXPECT_EQ(ask({"show", "kv"}),
            "word=show index=0 first=true half=0.5 |word=kv index=1 first=false half=0.5 |ok");
}

TEST_F(Control, ManyRowsToASlowReader) {
  constexpr int rows = 20000;
  handler = [](const std::vector<std::string>&, Reply reply) {
    for (int i = 0; i < rows; ++i) {
      Row row;
      row.number("i", i).text("pad", std::string(100, 'x'));
      reply.row(row);
    }
    reply.end();
    return true;
  };
  int seen = 0;
  with_loop([&] {
    Result<ControlClient> client = ControlClient::connect(path(), "di-ctl");
    ASSERT_TRUE(client.ok());
    const Status status = client->request(
        {"show"},
        [&](const wire::ctl_row& row) {
          EXPECT_EQ(row.columns[0].value, std::to_string(seen));
          ++seen;
        },
        patience);
    EXPECT_TRUE(status.ok());
  });
  EXPECT_EQ(seen, rows);
}

TEST_F(Control, ErrorsAreTheDaemons) {
  handler = [](const std::vector<std::string>& words, Reply reply) {
    if (words[0] != "explain") return false;
    reply.fail(Error{Code::not_found, 0, "no such request"});
    return true;
  };
  EXPECT_EQ(ask({"explain", "x"}), "not_found: no such request");
  EXPECT_EQ(ask({"show", "kv"}), "unsupported: di-probe.0 has no command 'show kv'");
}

TEST_F(Control, TheCommandWithTheMostWordsAnswers) {
  std::string said;
  const auto says = [&](const std::string& name) {
    return [&said, name](const Words& more, Reply& reply) {
      said = name;
      for (const std::string& word : more) said += "," + word;
      more.empty() ? reply.end(Row().text("name", name)) : reply.end(Status{});
    };
  };
  const Command commands[] = {{"show kv", says("kv")},
                              {"show kv pages", says("pages")},
                              {"kv drop", says("drop"), 1, 1},
                              {"kv drop store", says("store"), 1, 1},
                              {"kv drain", says("drain"), 0, 2},
                              {"fail", [](const Words&, Reply& reply) {
                                 reply.end(Error{Code::busy, 0, "not now"});
                               }}};
  handler = [&](const Words& words, Reply reply) { return answer_by(commands, words, std::move(reply)); };
  const auto answered = [&](const Words& words) {
    said.clear();
    const std::string answer = ask(words);
    return said.empty() ? answer : said;
  };
  EXPECT_EQ(answered({"show", "kv"}), "kv");
  EXPECT_EQ(answered({"show", "kv", "pages"}), "pages");
  EXPECT_EQ(answered({"kv", "drop", "7"}), "drop,7");
  EXPECT_EQ(answered({"kv", "drop", "store", "a"}), "store,a");
  EXPECT_EQ(answered({"kv", "drain"}), "drain");
  EXPECT_EQ(answered({"kv", "drain", "a", "off"}), "drain,a,off");
  EXPECT_EQ(answered({"fail"}), "busy: not now");
  // Too many words, too few, and part of one.
  for (const Words& words :
       {Words{"show", "kv", "pages", "7"}, Words{"show"}, Words{"kv", "drop"},
        Words{"kv", "drain", "a", "off", "b"}, Words{"show", "k"}, Words{"show", "kvs"}}) {
    EXPECT_TRUE(answered(words).starts_with("unsupported: di-probe.0 has no command")) << answered(words);
  }
}

TEST_F(Control, RestrictedSocketShowsOnly) {
  handler = [](const std::vector<std::string>&, Reply reply) {
    reply.end();
    return true;
  };
  EXPECT_EQ(ask({"drain"}, folder + "/ro"), "denied: 'drain' is not allowed on this socket");
  EXPECT_EQ(ask({"show", "kv"}, folder + "/ro"), "ok");
}

TEST_F(Control, AnswerMayComeInALaterTurnAndTheNextRequestWaits) {
  std::vector<std::string> order;
  handler = [&](const std::vector<std::string>& words, Reply reply) {
    order.push_back(words[0]);
    if (words[0] == "slow") {
      loop.post("answer", [&order, reply]() mutable {
        order.push_back("answered");
        reply.end();
      });
    } else {
      reply.end();
    }
    return true;
  };
  // Both are there before the first is answered.
  const Fd fd = dial(path());
  say(fd, {{"slow"}, {"fast"}});
  Bytes back;
  ASSERT_TRUE(loop.run_until(
      [&] {
        EXPECT_FALSE(ended(fd, back));
        return count(back, wire::ctl_end::number) == 2;
      },
      patience));
  EXPECT_EQ(order, (std::vector<std::string>{"slow", "answered", "fast"}));
}

TEST_F(Control, DroppedRequestIsCancelled) {
  handler = [](const std::vector<std::string>&, const Reply&) { return true; };
  EXPECT_EQ(ask({"x"}), "cancelled: the daemon dropped the request");
}

TEST_F(Control, ClosingTheConnectionCancels) {
  std::optional<Reply> kept;
  handler = [&](const std::vector<std::string>&, const Reply& reply) {
    kept = reply;
    return true;
  };
  Fd fd = dial(path());
  say(fd, {{"wait"}});
  ASSERT_TRUE(loop.run_until([&] { return kept.has_value(); }, patience));
  EXPECT_TRUE(kept->wanted());
  fd.reset();
  ASSERT_TRUE(loop.run_until([&] { return !kept->wanted(); }, patience));
  kept->row(Row());
  kept->end();
}

TEST_F(Control, WhoeverMayOnlyLookKeepsNobodyFromSteering) {
  handler = [](const std::vector<std::string>&, Reply reply) {
    reply.end();
    return true;
  };
  std::vector<Fd> callers;
  for (std::size_t i = 0; i < control_callers_max; ++i) {
    callers.push_back(dial(folder + "/ro"));
    loop.run_ready();
  }
  const Fd more = dial(folder + "/ro");
  Bytes back;
  ASSERT_TRUE(loop.run_until([&] { return ended(more, back); }, patience)) << "one too many is not let in";
  EXPECT_EQ(ask({"drain"}), "ok");
  // And who looks need not be of the daemon's group.
  EXPECT_EQ(std::filesystem::status(folder + "/ro").permissions(), std::filesystem::perms(0666));
  EXPECT_EQ(std::filesystem::status(path()).permissions(), std::filesystem::perms(0660));
}

TEST_F(Control, WhoeverAsksNothingForLongIsLetGo) {
  server.reset();
  std::optional<Reply> kept;
  server = std::make_unique<ControlServer>(
      loop, "di-probe.0",
      [&](const Words&, const Reply& reply) {
        kept = reply;
        return true;
      },
      milliseconds(20));
  ASSERT_TRUE(server->listen(path(), false).ok());
  const Fd waits = dial(path());
  say(waits, {{"wait"}});
  ASSERT_TRUE(loop.run_until([&] { return kept.has_value(); }, patience));
  const Fd silent = dial(path());
  const Fd greets = dial(path());
  say(greets, {});
  Bytes back;
  ASSERT_TRUE(loop.run_until([&] { return ended(silent, back) && ended(greets, back); }, patience));
  // Whoever waits for an answer does so as long as it takes.
  Bytes answer;
  EXPECT_FALSE(ended(waits, answer));
  EXPECT_TRUE(kept->wanted());
  kept->end();
  ASSERT_TRUE(loop.run_until([&] { return ended(waits, answer); }, patience));
  EXPECT_EQ(count(answer, wire::ctl_end::number), 1);
}

// Its answers piled up in the daemon, up to a limit that others could not come close to.
TEST_F(Control, WhoeverDoesNotReadIsNotAnsweredFurtherAndIsLetGo) {
  server.reset();
  constexpr int asked = 64;
  int answered = 0;
  const auto large = [&](const Words&, Reply reply) {
    ++answered;
    for (int i = 0; i < 32; ++i) reply.row(Row().text("x", std::string(16384, 'x')));
    reply.end();
    return true;
  };
  server = std::make_unique<ControlServer>(loop, "di-probe.0", large);
  ASSERT_TRUE(server->listen(path(), false).ok());
  const Fd fd = dial(path());
  say(fd, std::vector<Words>(asked, Words{"show"}));
  for (int i = 0; i < 100; ++i) loop.run_ready();
  EXPECT_GT(answered, 0);
  EXPECT_LT(answered, 8);  // half a megabyte each
  // All is there for whoever reads after all.
  Bytes back;
  ASSERT_TRUE(loop.run_until(
      [&] {
        EXPECT_FALSE(ended(fd, back));
        return answered == asked && count(back, wire::ctl_end::number) == asked;
      },
      patience));

  server = std::make_unique<ControlServer>(loop, "di-probe.0", large, milliseconds(20));
  ASSERT_TRUE(server->listen(folder + "/again", false).ok());
  const Fd silent = dial(folder + "/again");
  say(silent, std::vector<Words>(asked, Words{"show"}));
  ASSERT_TRUE(loop.run_until([&] { return hung_up(silent); },  // without taking anything
                             patience));
}

// An answer that waits for its reader was no end: the connection stayed, and looked again and again.
TEST_F(Control, WhoeverDoesNotReadIsLetGoInTheMiddleOfAnAnswerToo) {
  server.reset();
  std::optional<Reply> kept;
  server = std::make_unique<ControlServer>(
      loop, "di-probe.0",
      [&](const Words&, Reply reply) {
        while (reply.accepts_more()) reply.row(Row().text("x", std::string(16384, 'x')));
        kept = reply;
        return true;
      },
      milliseconds(20));
  ASSERT_TRUE(server->listen(path(), false).ok());
  const Fd talks = dial(path());
  say(talks, {{"show"}});
  std::size_t said = 0;
  ASSERT_TRUE(loop.run_until(
      [&] {
        // What it says meanwhile is no reading.
        if (::send(talks.get(), "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1) ++said;
        return hung_up(talks);
      },
      patience));
  EXPECT_LT(said, control_request_bytes_max);  // that was not the reason
  ASSERT_TRUE(kept);
  EXPECT_FALSE(kept->wanted());
}

// The queue of callers cannot be emptied without descriptors, and is there for ever: the loop turned and turned.
TEST_F(Control, WithoutDescriptorsCallersWaitAndTheLoopSleeps) {
  handler = [](const std::vector<std::string>&, Reply reply) {
    reply.end();
    return true;
  };
  const Fd fd = dial(path());
  say(fd, {{"show"}});
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(Fd(::dup(0)).get());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  // A caller that is not taken wakes nobody again.
  int turns = 0;
  while (loop.run_ready() > 0 && turns < 1000) ++turns;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_LT(turns, 1000);
  Bytes back;
  ASSERT_TRUE(loop.run_until(
      [&] {
        EXPECT_FALSE(ended(fd, back));
        return count(back, wire::ctl_end::number) == 1;
      },
      patience));
}

TEST_F(Control, HostileBytesEndTheConnectionOnly) {
  for (const std::string& junk : {std::string(64, 'x'), std::string(200, '\0'),
                                  std::string("GET / HTTP/1.1\r\n\r\n") + std::string(100, ' ')}) {
    Fd fd = dial(path());
    ASSERT_EQ(::send(fd.get(), junk.data(), junk.size(), 0), static_cast<ssize_t>(junk.size()));
    // What comes back, if anything, is our hello; then the end.
    ASSERT_TRUE(loop.run_until(
        [&] {
          char buffer[256];
          return ::recv(fd.get(), buffer, sizeof buffer, MSG_DONTWAIT) == 0;
        },
        patience));
  }
  handler = [](const std::vector<std::string>&, Reply reply) {
    reply.end();
    return true;
  };
  EXPECT_EQ(ask({"still"}), "ok");
}

TEST_F(Control, AnotherVersionSaysIncompatible) {
  // A caller whose header has version 9 gets our hello, whose header tells it who is older.
  wire::Header header;
  header.version = 9;
  header.number = wire::ctl_hello::number;
  const auto head = wire::header_encode(header, {});
  Fd fd = dial(path());
  ASSERT_EQ(::send(fd.get(), head.data(), head.size(), 0), static_cast<ssize_t>(head.size()));
  Bytes back;
  ASSERT_TRUE(loop.run_until([&] { return ended(fd, back); }, patience));
  auto taken = stream_take(back, 4096);
  ASSERT_TRUE(static_cast<bool>(taken));
  ASSERT_TRUE(taken->has_value());
  EXPECT_EQ((*taken)->header.number, wire::ctl_hello::number);
}

TEST(ControlClientAlone, NobodyThereIsUnreachableOrNotFound) {
  const Result<ControlClient> client = ControlClient::connect("/tmp/di-nobody-here.ctl", "di-ctl");
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.error().code, Code::not_found);
}

}  // namespace
}  // namespace di::daemon
