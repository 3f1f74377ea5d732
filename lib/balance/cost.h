// balance/cost.h: predicted times in microseconds: of forward work, and of bringing blocks here.
//
// Both are sums of a few features with coefficients that are fitted to what really was, by recursive least
// squares with forgetting (Fit).  Before the first sample the coefficients are a guess, which only has to be
// right in proportion: the common scale is found within a few samples, the proportions after about
// `Fit::samples_documented`, if what is observed differs in the features at all.  Where it does not, the
// guessed proportions stay.  Pure; owner: whoever predicts.  Bound: none grows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"
#include "base/time.h"

namespace di::balance {

// y = sum of coefficient x feature, all of them not negative.  What is made small is the *relative* error: a
// step of one token counts as much as one of 512.  Safe by these rules:
//   - a sample moves its own prediction by 40 % at most, so one that was descheduled does no harm;
//   - when more than every third sample is far off, the fit begins anew from where it is (the machine
//     changed);
//   - what is not observed is not forgotten: the uncertainty never grows above that of the beginning;
//   - a coefficient stays within 1e-4 and 1e4 times the guess.
template <std::size_t N>
class Fit {
 public:
  using Features = std::array<double, N>;
  static constexpr int samples_documented = 200;

  explicit Fit(const Features& guess);

  [[nodiscard]] double predict(const Features& features) const;
  // Not finite or not positive: ignored.
  void observe(const Features& features, double took);
  [[nodiscard]] double coefficient(std::size_t index) const { return guess_[index] * factors_[index]; }
  [[nodiscard]] std::uint64_t samples() const { return samples_; }
  // Mean of |took / predicted - 1| over about the last thirty samples, before each was learnt from.
  [[nodiscard]] double residual() const { return residual_; }

  // Coefficients that an earlier fit had; they are believed more than the guess and less than many samples.
  void restore(const Features& coefficients);

 private:
  void begin(double scale, double shape);

  Features guess_;
  std::array<double, N> factors_;                     // coefficient / guess
  std::array<std::array<double, N>, N> uncertainty_;  // of factors_, relative
  std::uint64_t samples_ = 0;
  double residual_ = 0;
  int far_off_ = 0;
};

extern template class Fit<2>;
extern template class Fit<3>;

// Forward work.  One step of `tokens` new tokens whose mean context is `context` costs
//   base + token x tokens + context x tokens x context / 1024.
class StepCost {
 public:
  struct Shape {
    double base_us = 300;  // measured: an empty step of the CPU engine on the demo model
    double token_us = 400;
    double context_us = 20;  // per token and 1,024 tokens of context
  };

  StepCost() : StepCost(Shape{}) {}
  explicit StepCost(Shape shape);

  [[nodiscard]] double predict_us(std::uint32_t tokens, double context_mean) const;
  // The whole of a prompt: tokens [cached, total) in chunks of at most `chunk_tokens`.
  [[nodiscard]] double predict_prompt_us(std::uint32_t total, std::uint32_t cached,
                                         std::uint32_t chunk_tokens) const;
  void observe(std::uint32_t tokens, double context_mean, double took_us);

  [[nodiscard]] double base_us() const { return fit_.coefficient(0); }
  [[nodiscard]] double token_us() const { return fit_.coefficient(1); }
  [[nodiscard]] double context_us() const { return fit_.coefficient(2); }
  [[nodiscard]] double residual() const { return fit_.residual(); }

  // One line, for a file that outlives the process.  Errors of restore(): invalid; the fit stays as it is.
  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] Status restore(std::string_view text);

 private:
  Fit<3> fit_;
};

// Where blocks come from.
enum class Place : std::uint8_t { arena = 0, remote_arena = 1, store = 2 };
inline constexpr std::size_t places = 3;

// Bringing blocks into the arena of this host: base per fetch + per byte, for each place.  Bytes that were in
// front of it in the same queue count as its own, when observed and when predicted.
class FetchCost {
 public:
  struct Shape {
    double base_us = 0;
    double mib_us = 0;
  };
  // Guesses from spec/store.md 1: nothing moves out of the own arena; sockets 1.2 GB/s; a disk 1 GB/s.
  static constexpr std::array<Shape, places> guess{{{20, 1}, {200, 870}, {1000, 1050}}};

  FetchCost() : FetchCost(guess) {}
  explicit FetchCost(const std::array<Shape, places>& shapes);

  [[nodiscard]] double predict_us(Place place, std::uint64_t bytes) const;
  void observe(Place place, std::uint64_t bytes, Duration took);
  [[nodiscard]] double base_us(Place place) const { return fit(place).coefficient(0); }
  [[nodiscard]] double mib_us(Place place) const { return fit(place).coefficient(1); }
  [[nodiscard]] std::uint64_t samples(Place place) const { return fit(place).samples(); }
  [[nodiscard]] double residual(Place place) const { return fit(place).residual(); }

  // One line per place.
  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] Status restore(std::string_view text);

 private:
  [[nodiscard]] const Fit<2>& fit(Place place) const { return fits_[static_cast<std::size_t>(place)]; }

  std::array<Fit<2>, places> fits_;
};

}  // namespace di::balance
