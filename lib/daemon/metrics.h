// daemon/metrics.h: counters, gauges and histograms by name, printed as Prometheus text.
//
// One Metrics per daemon, made by the skeleton.  Registration is on the loop thread before on_start
// returns; values may then change from any thread.  Names are "di_..." with the unit last.  The
// control handler and the exporter read the same cells: there is no second bookkeeping.
// Bound: `metrics_max` series, labels included.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/histogram.h"

namespace di::daemon {

inline constexpr std::size_t metrics_max = 4096;

class Counter {
 public:
  void add(std::uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

class Gauge {
 public:
  void set(std::int64_t v) { value_.store(v, std::memory_order_relaxed); }
  void add(std::int64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  [[nodiscard]] std::int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> value_{0};
};

class Metrics {
 public:
  struct Label {
    std::string name;
    std::string value;
  };
  using Labels = std::vector<Label>;

  // The same name may be registered again with other labels; the same name and labels is a bug.
  Counter& counter(std::string_view name, std::string_view help, Labels labels = {});
  Gauge& gauge(std::string_view name, std::string_view help, Labels labels = {});
  Histogram& histogram(std::string_view name, std::string_view help, Labels labels = {});
  // Values that live elsewhere; `read` is called on the loop thread.
  void counter_from(std::string_view name, std::string_view help, std::function<std::uint64_t()> read,
                    Labels labels = {});
  void gauge_from(std::string_view name, std::string_view help, std::function<std::int64_t()> read,
                  Labels labels = {});
  void histogram_from(std::string_view name, std::string_view help, const Histogram& cells,
                      Labels labels = {});

  // Something that is acquired and must be given back: seats, blocks, pins, leases, tickets,
  // reservations, requests in flight, pending write-backs.  Shown by `show gauges` with its
  // configured base (what it holds when idle) and exported as di_held{what="..."}.
  Gauge& held(std::string_view what, std::int64_t base = 0);
  void held_from(std::string_view what, std::function<std::int64_t()> read, std::int64_t base = 0);

  struct Held {
    std::string what;
    std::int64_t count = 0;
    std::int64_t base = 0;
  };
  [[nodiscard]] std::vector<Held> held_values() const;

  struct Sample {
    std::string name;    // without labels
    std::string labels;  // {a="b"} or empty
    std::string value;
  };
  // Histograms appear as _count, _sum and the quantiles 0.5, 0.9, 0.99.
  [[nodiscard]] std::vector<Sample> samples() const;
  [[nodiscard]] std::string prometheus() const;

 private:
  enum class Kind : std::uint8_t { counter, gauge, histogram };
  struct Series {
    std::string name;
    std::string help;
    Labels labels;
    Kind kind = Kind::counter;
    std::function<std::uint64_t()> read_counter;
    std::function<std::int64_t()> read_gauge;
    const Histogram* cells = nullptr;
  };
  struct HeldRow {
    std::string what;
    std::int64_t base = 0;
    std::function<std::int64_t()> read;
  };
  void add(Series series);

  // deques: the addresses of cells handed out never change.
  std::deque<Counter> counters_;
  std::deque<Gauge> gauges_;
  std::deque<Histogram> histograms_;
  std::vector<Series> series_;
  std::vector<HeldRow> held_;
};

}  // namespace di::daemon
