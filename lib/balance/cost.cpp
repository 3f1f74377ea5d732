#include "balance/cost.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <optional>

#include "base/assert.h"

namespace di::balance {

namespace {

// Weight of the past per sample: the last hundred count.
constexpr double forgetting = 0.99;
// Variance of a sample's relative error: 10 %.
constexpr double noise = 0.01;
// How far the guess may be off: all coefficients together by their own size, each by half of it.
constexpr double scale_begin = 1.0;
constexpr double shape_begin = 0.25;
// Of coefficients that an earlier run fitted, or of those before the machine changed.
constexpr double scale_known = 0.1;
constexpr double shape_known = 0.04;
constexpr double factor_min = 1e-4;
constexpr double factor_max = 1e4;
constexpr double ratio_max = 1.4;
// Two for a sample that is far off, one back for one that is not.
constexpr int far_off_max = 16;
constexpr std::uint64_t residual_samples = 30;

// The next number of `text`, taken off its front.
std::optional<double> take_number(std::string_view& text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\n')) text.remove_prefix(1);
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number) || number < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

bool take_word(std::string_view& text, std::string_view word) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\n')) text.remove_prefix(1);
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

bool only_blanks(std::string_view text) {
  return text.find_first_not_of(" \n") == std::string_view::npos;
}

std::string number_text(double number) {
  char text[40];
  std::snprintf(text, sizeof text, " %.9g", number);
  return text;
}

}  // namespace

template <std::size_t N>
Fit<N>::Fit(const Features& guess) : guess_(guess) {
  for (const double coefficient : guess_) DI_ASSERT(coefficient > 0);
  factors_.fill(1);
  begin(scale_begin, shape_begin);
}

template <std::size_t N>
void Fit<N>::begin(double scale, double shape) {
  // In units of the coefficients as they are: what is ten times as large is as uncertain.  One that is next
  // to nothing beside the others may be so by mistake.
  double mean = 0;
  for (const double factor : factors_) mean += factor / N;
  for (std::size_t i = 0; i < N; ++i) {
    for (std::size_t j = 0; j < N; ++j) {
      const double unit = std::max(factors_[i], mean / 4) * std::max(factors_[j], mean / 4);
      uncertainty_[i][j] = unit * (scale + (i == j ? shape : 0));
    }
  }
  far_off_ = 0;
}

template <std::size_t N>
double Fit<N>::predict(const Features& features) const {
  double sum = 0;
  for (std::size_t i = 0; i < N; ++i) sum += guess_[i] * factors_[i] * features[i];
  return sum;
}

template <std::size_t N>
void Fit<N>::observe(const Features& features, double took) {
  const double predicted = predict(features);
  if (!std::isfinite(predicted) || !std::isfinite(took) || predicted <= 0 || took <= 0) return;
  const double ratio = took / predicted;
  ++samples_;
  residual_ += (std::min(std::abs(ratio - 1), 10.0) - residual_) /
               static_cast<double>(std::min<std::uint64_t>(samples_, residual_samples));
  const double seen = std::clamp(ratio, 1 / ratio_max, ratio_max);

  Features share{};  // of the prediction, per unit of factor
  for (std::size_t i = 0; i < N; ++i) share[i] = guess_[i] * features[i] / predicted;
  Features gain{};
  double spread = 0;
  for (std::size_t i = 0; i < N; ++i) {
    for (std::size_t j = 0; j < N; ++j) gain[i] += uncertainty_[i][j] * share[j];
  }
  for (std::size_t i = 0; i < N; ++i) spread += share[i] * gain[i];
  if (!(spread >= 0)) {  // rounding has eaten the matrix
    begin(scale_known, shape_known);
    return;
  }
  const double weight = 1 / (forgetting * noise + spread);
  for (std::size_t i = 0; i < N; ++i) {
    factors_[i] = std::clamp(factors_[i] + gain[i] * weight * (seen - 1), factor_min, factor_max);
  }

  if (seen != ratio) {
    // Cut short, it says where to go and not how far: nothing has become more certain, in proportion.
    const double moved = predict(features) / predicted;
    for (auto& row : uncertainty_) {
      for (double& value : row) value *= moved * moved;
    }
    far_off_ += 2;
    if (far_off_ >= far_off_max) begin(scale_begin, shape_begin);
    return;
  }
  far_off_ = std::max(0, far_off_ - 1);
  double trace = 0;
  double trace_max = 0;
  for (std::size_t i = 0; i < N; ++i) {
    for (std::size_t j = 0; j < N; ++j) uncertainty_[i][j] -= gain[i] * gain[j] * weight;
    uncertainty_[i][i] = std::max(uncertainty_[i][i], 0.0);
    trace += uncertainty_[i][i];
    trace_max += factors_[i] * factors_[i] * (scale_begin + shape_begin);
  }
  if (trace / forgetting > trace_max) return;
  for (auto& row : uncertainty_) {
    for (double& value : row) value /= forgetting;
  }
}

template <std::size_t N>
void Fit<N>::restore(const Features& coefficients) {
  for (std::size_t i = 0; i < N; ++i)
    factors_[i] = std::clamp(coefficients[i] / guess_[i], factor_min, factor_max);
  begin(scale_known, shape_known);
}

template class Fit<2>;
template class Fit<3>;

// ---- Forward work ------------------------------------------------------------------------------

StepCost::StepCost(Shape shape)
    // What a peer says may be zero: then it is next to nothing.
    : fit_({std::max(shape.base_us, 1e-3), std::max(shape.token_us, 1e-3),
            std::max(shape.context_us, 1e-6)}) {}

double StepCost::predict_us(std::uint32_t tokens, double context_mean) const {
  const double n = tokens;
  return fit_.predict({1, n, n * context_mean / 1024});
}

double StepCost::predict_prompt_us(std::uint32_t total, std::uint32_t cached,
                                   std::uint32_t chunk_tokens) const {
  DI_ASSERT(cached <= total && chunk_tokens > 0);
  const std::uint32_t fresh = total - cached;
  const std::uint32_t steps = (fresh + chunk_tokens - 1) / chunk_tokens;
  const double mean = (static_cast<double>(total) + cached) / 2;
  return predict_us(fresh, mean) + base_us() * (steps > 1 ? steps - 1 : 0);
}

void StepCost::observe(std::uint32_t tokens, double context_mean, double took_us) {
  if (tokens == 0 || !(context_mean >= 0)) return;
  const double n = tokens;
  fit_.observe({1, n, n * context_mean / 1024}, took_us);
}

std::string StepCost::to_text() const {
  return "step" + number_text(base_us()) + number_text(token_us()) + number_text(context_us()) + "\n";
}

Status StepCost::restore(std::string_view text) {
  Fit<3>::Features coefficients{};
  bool whole = take_word(text, "step");
  for (double& coefficient : coefficients) {
    const std::optional<double> number = whole ? take_number(text) : std::nullopt;
    whole = number.has_value();
    if (whole) coefficient = *number;
  }
  if (!whole || !only_blanks(text))
    return Error{Code::invalid, 0, "not a step cost: want \"step BASE TOKEN CONTEXT\""};
  fit_.restore(coefficients);
  return {};
}

// ---- Fetches -----------------------------------------------------------------------------------

namespace {

constexpr std::array<std::string_view, places> place_words{"arena", "remote_arena", "store"};

Fit<2>::Features fetch_features(std::uint64_t bytes) {
  return {1, static_cast<double>(bytes) / 1048576};
}

Fit<2>::Features guess_of(const FetchCost::Shape& shape) {
  return {std::max(shape.base_us, 1e-3), std::max(shape.mib_us, 1e-3)};
}

}  // namespace

FetchCost::FetchCost(const std::array<Shape, places>& shapes)
    : fits_{Fit<2>(guess_of(shapes[0])), Fit<2>(guess_of(shapes[1])), Fit<2>(guess_of(shapes[2]))} {}

double FetchCost::predict_us(Place place, std::uint64_t bytes) const {
  return fit(place).predict(fetch_features(bytes));
}

void FetchCost::observe(Place place, std::uint64_t bytes, Duration took) {
  fits_[static_cast<std::size_t>(place)].observe(fetch_features(bytes),
                                                 static_cast<double>(took.count()) / 1000);
}

std::string FetchCost::to_text() const {
  std::string text;
  for (std::size_t i = 0; i < places; ++i) {
    text += std::string(place_words[i]) + number_text(fits_[i].coefficient(0)) +
            number_text(fits_[i].coefficient(1)) + "\n";
  }
  return text;
}

Status FetchCost::restore(std::string_view text) {
  std::array<Fit<2>::Features, places> all{};
  bool whole = true;
  for (std::size_t i = 0; i < places && whole; ++i) {
    whole = take_word(text, place_words[i]);
    for (double& coefficient : all[i]) {
      const std::optional<double> number = whole ? take_number(text) : std::nullopt;
      whole = number.has_value();
      if (whole) coefficient = *number;
    }
  }
  if (!whole || !only_blanks(text))
    return Error{Code::invalid, 0, "not a fetch cost: want \"PLACE BASE MIB\" per line"};
  for (std::size_t i = 0; i < places; ++i) fits_[i].restore(all[i]);
  return {};
}

}  // namespace di::balance
