#include "daemon/metrics.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/assert.h"

namespace di::daemon {

namespace {

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

std::string labels_text(const Metrics::Labels& labels, const std::string& more = "") {
  std::string text;
  for (const Metrics::Label& label : labels) {
    text += (text.empty() ? "{" : ",") + label.name + "=\"" + escaped(label.value) + "\"";
  }
  if (!more.empty()) text += (text.empty() ? "{" : ",") + more;
  return text.empty() ? text : text + "}";
}

constexpr std::pair<double, const char*> quantiles[] = {{0.5, "0.5"}, {0.9, "0.9"}, {0.99, "0.99"}};

}  // namespace

void Metrics::add(Series series) {
  DI_ASSERT(series_.size() < metrics_max);
  for (const Series& other : series_) {
    DI_ASSERT(other.name != series.name || labels_text(other.labels) != labels_text(series.labels));
  }
  series_.push_back(std::move(series));
}

Counter& Metrics::counter(std::string_view name, std::string_view help, Labels labels) {
  Counter& cell = counters_.emplace_back();
  counter_from(
      name, help, [&cell] { return cell.value(); }, std::move(labels));
  return cell;
}

Gauge& Metrics::gauge(std::string_view name, std::string_view help, Labels labels) {
  Gauge& cell = gauges_.emplace_back();
  gauge_from(
      name, help, [&cell] { return cell.value(); }, std::move(labels));
  return cell;
}

Histogram& Metrics::histogram(std::string_view name, std::string_view help, Labels labels) {
  Histogram& cells = histograms_.emplace_back();
  histogram_from(name, help, cells, std::move(labels));
  return cells;
}

void Metrics::counter_from(std::string_view name, std::string_view help, std::function<std::uint64_t()> read,
                           Labels labels) {
  Series series;
  series.name = name;
  series.help = help;
  series.labels = std::move(labels);
  series.kind = Kind::counter;
  series.read_counter = std::move(read);
  add(std::move(series));
}

void Metrics::gauge_from(std::string_view name, std::string_view help, std::function<std::int64_t()> read,
                         Labels labels) {
  Series series;
  series.name = name;
  series.help = help;
  series.labels = std::move(labels);
  series.kind = Kind::gauge;
  series.read_gauge = std::move(read);
  add(std::move(series));
}

void Metrics::histogram_from(std::string_view name, std::string_view help, const Histogram& cells,
                             Labels labels) {
  Series series;
  series.name = name;
  series.help = help;
  series.labels = std::move(labels);
  series.kind = Kind::histogram;
  series.cells = &cells;
  add(std::move(series));
}

Gauge& Metrics::held(std::string_view what, std::int64_t base) {
  Gauge& cell = gauges_.emplace_back();
  held_from(
      what, [&cell] { return cell.value(); }, base);
  return cell;
}

void Metrics::held_from(std::string_view what, std::function<std::int64_t()> read, std::int64_t base) {
  gauge_from("di_held", "things acquired and not yet given back", read, {{"what", std::string(what)}});
  held_.push_back({std::string(what), base, std::move(read)});
}

std::vector<Metrics::Held> Metrics::held_values() const {
  std::vector<Held> all;
  for (const HeldRow& row : held_) all.push_back({row.what, row.read(), row.base});
  return all;
}

std::vector<Metrics::Sample> Metrics::samples() const {
  std::vector<Sample> all;
  for (const Series& series : series_) {
    switch (series.kind) {
      case Kind::counter:
        all.push_back({series.name, labels_text(series.labels), std::to_string(series.read_counter())});
        break;
      case Kind::gauge:
        all.push_back({series.name, labels_text(series.labels), std::to_string(series.read_gauge())});
        break;
      case Kind::histogram: {
        const Histogram& cells = *series.cells;
        for (const auto& [q, name] : quantiles) {
          all.push_back({series.name, labels_text(series.labels, std::string("quantile=\"") + name + "\""),
                         std::to_string(cells.quantile(q))});
        }
        all.push_back({series.name + "_sum", labels_text(series.labels), std::to_string(cells.sum())});
        all.push_back({series.name + "_count", labels_text(series.labels), std::to_string(cells.count())});
        break;
      }
    }
  }
  return all;
}

std::string Metrics::prometheus() const {
  // All series of a name stand together under one HELP and one TYPE line.
  std::vector<std::string> order;
  std::map<std::string, std::vector<const Series*>> by_name;
  for (const Series& series : series_) {
    std::vector<const Series*>& group = by_name[series.name];
    if (group.empty()) order.push_back(series.name);
    group.push_back(&series);
  }
  std::string out;
  for (const std::string& name : order) {
    const std::vector<const Series*>& group = by_name[name];
    out += "# HELP " + name + " " + group.front()->help + "\n# TYPE " + name + " ";
    switch (group.front()->kind) {
      case Kind::counter:
        out += "counter\n";
        break;
      case Kind::gauge:
        out += "gauge\n";
        break;
      case Kind::histogram:
        out += "summary\n";
        break;
    }
    for (const Series* series : group) {
      const std::string labels = labels_text(series->labels);
      switch (series->kind) {
        case Kind::counter:
          out += name + labels + " " + std::to_string(series->read_counter()) + "\n";
          break;
        case Kind::gauge:
          out += name + labels + " " + std::to_string(series->read_gauge()) + "\n";
          break;
        case Kind::histogram:
          for (const auto& [q, q_name] : quantiles) {
            out += name + labels_text(series->labels, std::string("quantile=\"") + q_name + "\"") + " " +
                   std::to_string(series->cells->quantile(q)) + "\n";
          }
          out += name + "_sum" + labels + " " + std::to_string(series->cells->sum()) + "\n";
          out += name + "_count" + labels + " " + std::to_string(series->cells->count()) + "\n";
          break;
      }
    }
  }
  return out;
}

}  // namespace di::daemon
