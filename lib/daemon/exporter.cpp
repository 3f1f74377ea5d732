#include "daemon/exporter.h"

namespace di::daemon {

Exporter::Exporter(loop::Loop& loop, const Metrics& metrics, std::function<Readiness()> readiness)
    : metrics_(metrics), readiness_(std::move(readiness)), server_(loop, *this, [] {
        http::Server::Options options;
        options.connections_max = exporter_connections_max;
        return options;
      }()) {}

Result<std::string> Exporter::listen(const std::string& address) {
  return server_.listen(address);
}

http::Handler::Verdict Exporter::on_head(const http::Request& head) {
  Verdict verdict;
  if (head.method != "GET" && head.method != "HEAD") {
    verdict.refuse = http::Reply{405, {{"Allow", "GET"}, {"Content-Type", "text/plain"}}, "only GET\n"};
  } else if (head.path != "/metrics" && head.path != "/health" && head.path != "/health/ready") {
    verdict.refuse =
        http::Reply{404, {{"Content-Type", "text/plain"}}, "only /metrics, /health and /health/ready\n"};
  }
  return verdict;
}

void Exporter::on_request(http::ExchangeId id, http::Request request) {
  if (request.path == "/health") {
    server_.respond(id, {200, {{"Content-Type", "text/plain"}}, "ok\n"});
    return;
  }
  if (request.path == "/health/ready") {
    const Readiness now = readiness_();
    server_.respond(id, {now.ready ? 200 : 503, {{"Content-Type", "text/plain"}}, now.text + "\n"});
    return;
  }
  server_.respond(
      id, {200, {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"}}, metrics_.prometheus()});
}

}  // namespace di::daemon
