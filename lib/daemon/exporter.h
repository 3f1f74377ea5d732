// daemon/exporter.h: the metrics over HTTP: GET /metrics, /health for whoever only asks whether the process
// answers, and /health/ready: 200 with a second line when the daemon serves without something, or 503 and why
// not.
//
// Owner: loop thread.  Bounds: as http/server.h, with `exporter_connections_max`.
#pragma once

#include <functional>
#include <string>

#include "daemon/metrics.h"
#include "http/server.h"
#include "loop/loop.h"

namespace di::daemon {

inline constexpr std::size_t exporter_connections_max = 32;

class Exporter final : public http::Handler {
 public:
  struct Readiness {
    bool ready = false;
    std::string text;
  };
  Exporter(loop::Loop& loop, const Metrics& metrics, std::function<Readiness()> readiness);

  // An address as in http/address.h; returns it with the port it got.
  Result<std::string> listen(const std::string& address);

  Verdict on_head(const http::Request& head) override;
  void on_request(http::ExchangeId id, http::Request request) override;
  void on_gone(http::ExchangeId, http::Gone) override {}

 private:
  const Metrics& metrics_;
  std::function<Readiness()> readiness_;
  http::Server server_;
};

}  // namespace di::daemon
