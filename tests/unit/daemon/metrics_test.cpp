#include "daemon/metrics.h"

#include <gtest/gtest.h>

namespace di::daemon {
namespace {

TEST(Metrics, PrometheusTextGroupsSeriesUnderTheirName) {
  Metrics metrics;
  metrics.counter("di_a_total", "things", {{"kind", "x"}}).add(3);
  metrics.gauge("di_b", "level").set(-4);
  metrics.counter("di_a_total", "things", {{"kind", "quote\" back\\ line\n"}}).add(1);
  EXPECT_EQ(metrics.prometheus(),
            "# HELP di_a_total things\n# TYPE di_a_total counter\n"
            "di_a_total{kind=\"x\"} 3\n"
            "di_a_total{kind=\"quote\\\" back\\\\ line\\n\"} 1\n"
            "# HELP di_b level\n# TYPE di_b gauge\ndi_b -4\n");
}

TEST(Metrics, HistogramIsASummary) {
  Metrics metrics;
  Histogram& times = metrics.histogram("di_t_us", "time", {{"op", "read"}});
  for (std::uint64_t i = 1; i <= 100; ++i) times.record(i);
  const std::string text = metrics.prometheus();
  EXPECT_NE(text.find("# TYPE di_t_us summary\n"), std::string::npos) << text;
  EXPECT_NE(text.find("di_t_us_count{op=\"read\"} 100\n"), std::string::npos) << text;
  EXPECT_NE(text.find("di_t_us_sum{op=\"read\"} 5050\n"), std::string::npos) << text;
  EXPECT_NE(text.find("di_t_us{op=\"read\",quantile=\"0.5\"} 51\n"), std::string::npos) << text;
}

TEST(Metrics, HeldThingsAreTheSameCellsInBothPlaces) {
  Metrics metrics;
  Gauge& seats = metrics.held("seats");
  std::int64_t pins = 7;
  metrics.held_from(
      "pins", [&] { return pins; }, 5);
  seats.add(2);
  const std::vector<Metrics::Held> held = metrics.held_values();
  ASSERT_EQ(held.size(), 2u);
  EXPECT_EQ(held[0].what, "seats");
  EXPECT_EQ(held[0].count, 2);
  EXPECT_EQ(held[1].count, 7);
  EXPECT_EQ(held[1].base, 5);
  EXPECT_NE(metrics.prometheus().find("di_held{what=\"seats\"} 2\n"), std::string::npos);
}

TEST(MetricsDeathTest, OneNameAndLabelsTwiceIsABug) {
  EXPECT_DEATH(
      {
        Metrics metrics;
        metrics.counter("di_a_total", "a");
        metrics.counter("di_a_total", "a");
      },
      "assertion failed");
}

}  // namespace
}  // namespace di::daemon
