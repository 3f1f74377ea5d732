// What the HTTP front costs: CPU time of the server's thread per request and per event, the figures
// of spec/api.md 1.3 and 1.4 for this server.
//
//   http_bench [REQUESTS [EVENTS_PER_STREAM]]
//
// One tab-separated row per figure.  The clients run in a thread of their own, whose time is not in
// the figures.
#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "api/openai.h"
#include "api/render.h"
#include "base/assert.h"
#include "base/fd.h"
#include "http/address.h"
#include "http/server.h"
#include "http/sse.h"

namespace {

using namespace di;

struct Bench final : http::Handler {
  http::Server* server = nullptr;
  bool parse = false;  // the body as a chat request, as di-router does
  std::vector<http::ExchangeId> streams;
  std::string reply = std::string(200, 'r');

  Verdict on_head(const http::Request&) override {
    return {.refuse = std::nullopt, .body_bytes_max = 1 << 20};
  }
  void on_request(http::ExchangeId id, http::Request request) override {
    if (request.path == "/stream") {
      server->start_stream(id, 200, http::sse_headers(), http::sse_event("{}"));
      streams.push_back(id);
      return;
    }
    if (parse) DI_ASSERT(std::holds_alternative<api::ChatRequest>(api::chat_request_parse(request.body)));
    server->respond(id, {.status = 200, .headers = {}, .body = reply});
  }
  void on_gone(http::ExchangeId, http::Gone) override {}
};

double thread_cpu_us(clockid_t clock) {
  timespec at{};
  ::clock_gettime(clock, &at);
  return static_cast<double>(at.tv_sec) * 1e6 + static_cast<double>(at.tv_nsec) * 1e-3;
}

Fd connect_to(const std::string& address) {
  auto parsed = http::address_parse(address);
  Fd fd(::socket(parsed->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  DI_ASSERT(fd.valid() && ::connect(fd.get(), parsed->get(), parsed->bytes) == 0);
  return fd;
}

void send_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    DI_ASSERT(count > 0);
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
}

// Reads until `count` bytes came.
void receive(int fd, std::size_t count) {
  char buffer[65536];
  while (count > 0) {
    const ssize_t got = ::recv(fd, buffer, std::min(count, sizeof buffer), 0);
    DI_ASSERT(got > 0);
    count -= static_cast<std::size_t>(got);
  }
}

std::size_t receive_answer(int fd) {
  char buffer[65536];
  const ssize_t got = ::recv(fd, buffer, sizeof buffer, 0);  // an answer is one send
  DI_ASSERT(got > 0);
  return static_cast<std::size_t>(got);
}

void row(const char* what, double us, double count) {
  std::printf("%s\t%.2f\t%.0f\n", what, us / count, count);
}

void bench_posts(const char* name, const std::string& address, clockid_t clock, int requests) {
  constexpr int connections = 64;
  std::string body = R"({"model":"m","messages":[{"role":"user","content":")";
  body += std::string(2000 - body.size(), 'x') + R"("}],"max_tokens":5})";
  const std::string request =
      "POST /v1/chat/completions HTTP/1.1\r\nHost: di\r\nContent-Type: application/json\r\n"
      "Authorization: Bearer sk-di-00000000-0000000000000000000000000000000000000000000\r\n"
      "Content-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body;
  std::vector<Fd> fds;
  for (int i = 0; i < connections; ++i) fds.push_back(connect_to(address));
  const auto round = [&] {
    for (const Fd& fd : fds) send_all(fd.get(), request);
    for (const Fd& fd : fds) receive_answer(fd.get());
  };
  for (int i = 0; i < 10; ++i) round();
  const double start = thread_cpu_us(clock);
  const int rounds = requests / connections;
  for (int i = 0; i < rounds; ++i) round();
  row(name, thread_cpu_us(clock) - start, rounds * connections);
}

void bench_events(loop::Loop& loop, Bench& bench, const std::string& address, clockid_t clock, int events) {
  constexpr int streams = 1000;
  std::vector<Fd> fds;
  for (int i = 0; i < streams; ++i) {
    fds.push_back(connect_to(address));
    send_all(fds.back().get(), "GET /stream HTTP/1.1\r\nHost: di\r\n\r\n");
    receive_answer(fds.back().get());
  }
  const api::AnswerHead head{
      .id = "chatcmpl-0123456789abcdef", .model = "m", .created_s = 1, .system_fingerprint = ""};
  std::vector<api::StreamRenderer> renderers(streams, api::StreamRenderer(head, {}));
  std::size_t bytes = 0;
  std::atomic<bool> sent{false};
  // Each batch is one decode step for every stream, as it comes from a worker.
  const auto batch = [&] {
    sent = false;
    loop.post("batch", [&] {
      for (int i = 0; i < streams; ++i) {
        const std::string event =
            http::sse_event(renderers[static_cast<std::size_t>(i)].step(" word", std::nullopt, {}));
        bytes = event.size() + 6;  // "8f\r\n" .. "\r\n"
        DI_ASSERT(bench.server->write(bench.streams[static_cast<std::size_t>(i)], event));
      }
      sent = true;
      sent.notify_one();
    });
    sent.wait(false);
    for (const Fd& fd : fds) receive(fd.get(), bytes);
  };
  batch();  // the first events carry the role
  const double start = thread_cpu_us(clock);
  for (int i = 0; i < events; ++i) batch();
  row("event_us", thread_cpu_us(clock) - start, 1.0 * events * streams);
}

}  // namespace

int main(int argc, char** argv) {
  const int requests = argc > 1 ? std::atoi(argv[1]) : 20000;
  const int events = argc > 2 ? std::atoi(argv[2]) : 50;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 8192);
  ::setrlimit(RLIMIT_NOFILE, &limit);

  loop::Loop loop;
  Bench bench;
  http::Server server(loop, bench, {});
  bench.server = &server;
  const auto address = server.listen("127.0.0.1:0");
  DI_ASSERT(address.ok());
  std::thread thread([&] { loop.run(); });
  clockid_t clock{};
  DI_ASSERT(::pthread_getcpuclockid(thread.native_handle(), &clock) == 0);

  std::printf("what\tcpu_us\tcount\n");
  bench_posts("post_2k_us", *address, clock, requests);
  bench.parse = true;
  bench_posts("post_2k_chat_us", *address, clock, requests);
  bench_events(loop, bench, *address, clock, events);
  loop.stop();
  thread.join();
  return 0;
}
