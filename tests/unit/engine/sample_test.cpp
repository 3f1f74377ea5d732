#include "engine/sample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/api.h"

namespace di::engine {
namespace {

wire::Sampling sampling(float temperature) {
  wire::Sampling out;
  out.temperature = temperature;
  out.top_p = 1.0f;
  out.seed = 42;
  out.max_tokens = 100;
  return out;
}

// How often each id was chosen over `draws` positions.
std::vector<int> histogram(const std::vector<float>& logits, const wire::Sampling& how, int draws) {
  Sampler sampler(static_cast<std::uint32_t>(logits.size()), kernels::kernels_best());
  std::vector<int> out(logits.size());
  for (int i = 0; i < draws; ++i) ++out[sampler.choose(logits, how, 5, static_cast<std::uint64_t>(i))];
  return out;
}

std::uint32_t chosen(const std::vector<float>& logits, const wire::Sampling& how, std::uint32_t index = 0,
                     std::uint64_t position = 0) {
  Sampler sampler(static_cast<std::uint32_t>(logits.size()), kernels::kernels_best());
  return sampler.choose(logits, how, index, position);
}

TEST(Philox, gives_the_published_numbers) {
  using Four = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, seed_choice_and_position_each_matter) {
  const double base = sample_uniform(1, 0, 7);
  EXPECT_EQ(sample_uniform(1, 0, 7), base);
  EXPECT_NE(sample_uniform(2, 0, 7), base);
  EXPECT_NE(sample_uniform(1ull << 40 | 1, 0, 7), base);
  EXPECT_NE(sample_uniform(1, 1, 7), base);
  EXPECT_NE(sample_uniform(1, 0, 8), base);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    ASSERT_GE(sample_uniform(i, 0, i), 0.0);
    ASSERT_LT(sample_uniform(i, 0, i), 1.0);
  }
}

TEST(Sampler, temperature_zero_takes_the_largest_and_of_equals_the_lowest_id) {
  EXPECT_EQ(chosen({1, 3, 2, 3}, sampling(0)), 1u);
  EXPECT_EQ(chosen({-INFINITY, -5, -INFINITY}, sampling(0)), 1u);
  EXPECT_EQ(chosen({NAN, 0, NAN, 1}, sampling(0)), 3u);
  EXPECT_EQ(chosen({NAN, NAN}, sampling(0)), 0u);
  EXPECT_EQ(chosen({1, 3, 2, 3}, sampling(-1)), 1u);
  EXPECT_EQ(chosen({1, 3, 2, 3}, sampling(NAN)), 1u);
}

TEST(Sampler, extreme_values_choose_something_sensible) {
  EXPECT_EQ(chosen({1, 2, 3}, sampling(1e-30f)), 2u);
  EXPECT_LT(chosen({1, 2, 3}, sampling(INFINITY)), 3u);
  EXPECT_EQ(chosen({0, INFINITY, 1}, sampling(1)), 1u);
  EXPECT_EQ(chosen({-INFINITY, -INFINITY}, sampling(1)), 0u);
  EXPECT_EQ(chosen({NAN, 1, -INFINITY}, sampling(1)), 1u);
  wire::Sampling how = sampling(1);
  how.top_p = 0.0f;
  EXPECT_EQ(chosen({1, 5, 2}, how), 1u);
  how = sampling(1);
  how.min_p = 7.0f;
  EXPECT_EQ(chosen({1, 5, 2}, how), 1u);
}

// Pearson's statistic against the softmax: 7 degrees of freedom exceed 24.3 once in a thousand.
TEST(Sampler, draws_follow_the_softmax) {
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f, 0.5f, -2.0f, 1.5f, 0.2f};
  for (const float temperature : {0.7f, 1.0f, 1.8f}) {
    const int draws = 40000;
    const auto seen = histogram(logits, sampling(temperature), draws);
    double total = 0, statistic = 0;
    for (const float logit : logits) total += std::exp(static_cast<double>(logit / temperature));
    for (std::size_t id = 0; id < logits.size(); ++id) {
      const double expected = draws * std::exp(static_cast<double>(logits[id] / temperature)) / total;
      statistic += (seen[id] - expected) * (seen[id] - expected) / expected;
    }
    EXPECT_LT(statistic, 24.3) << "temperature " << temperature;
  }
}

std::vector<std::uint32_t> support(const std::vector<float>& logits, const wire::Sampling& how) {
  const auto seen = histogram(logits, how, 4000);
  std::vector<std::uint32_t> out;
  for (std::uint32_t id = 0; id < seen.size(); ++id) {
    if (seen[id] > 0) out.push_back(id);
  }
  return out;
}

TEST(Sampler, filters_keep_what_they_promise) {
  // Probabilities 0.1, 0.4, 0.1, 0.25, 0.15.
  std::vector<float> logits;
  for (const double p : {0.1, 0.4, 0.1, 0.25, 0.15}) logits.push_back(static_cast<float>(std::log(p)));
  using Ids = std::vector<std::uint32_t>;
  wire::Sampling how = sampling(1);
  EXPECT_EQ(support(logits, how), (Ids{0, 1, 2, 3, 4}));
  how.top_k = 3;
  EXPECT_EQ(support(logits, how), (Ids{1, 3, 4}));
  how.top_k = 4;
  EXPECT_EQ(support(logits, how), (Ids{0, 1, 3, 4})) << "of equals the lower id";
  how.top_k = 1;
  EXPECT_EQ(support(logits, how), (Ids{1}));
  how.top_k = 99;
  EXPECT_EQ(support(logits, how), (Ids{0, 1, 2, 3, 4}));
  how = sampling(1);
  how.top_p = 0.6f;
  EXPECT_EQ(support(logits, how), (Ids{1, 3}));
  how.top_p = 0.7f;
  EXPECT_EQ(support(logits, how), (Ids{1, 3, 4}));
  how.top_p = 0.85f;
  EXPECT_EQ(support(logits, how), (Ids{0, 1, 3, 4})) << "of equals the lower id";
  how.top_k = 2;
  how.top_p = 0.7f;
  EXPECT_EQ(support(logits, how), (Ids{1, 3})) << "0.4 of the 0.65 that top_k left is less than 0.7";
  how.top_p = 0.6f;
  EXPECT_EQ(support(logits, how), (Ids{1}));
  how = sampling(1);
  how.min_p = 0.3f;
  EXPECT_EQ(support(logits, how), (Ids{1, 3, 4}));
}

TEST(Sampler, a_filter_that_keeps_everything_changes_no_draw) {
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f, 0.5f};
  wire::Sampling wide = sampling(1);
  wide.top_p = 0.999999f;
  wide.top_k = 5;
  for (std::uint64_t position = 0; position < 200; ++position) {
    ASSERT_EQ(chosen(logits, wide, 0, position), chosen(logits, sampling(1), 0, position));
  }
}

TEST(Sampler, stop_ids_are_masked_before_min_tokens) {
  for (const float temperature : {0.0f, 1.0f}) {
    wire::Sampling how = sampling(temperature);
    how.stop_ids = {1, 4000000000u};
    how.min_tokens = 3;
    EXPECT_EQ(chosen({0, 50, 20}, how, 0), 2u);
    EXPECT_EQ(chosen({0, 50, 20}, how, 2), 2u);
    EXPECT_EQ(chosen({0, 50, 20}, how, 3), 1u);
  }
}

TEST(Sampler, every_path_draws_the_same) {
  std::vector<float> logits(1000);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7919 % 1000) / 100.0f;
  wire::Sampling how = sampling(0.9f);
  how.top_p = 0.95f;
  const auto draws = [&](const kernels::Kernels& kernels) {
    Sampler sampler(1000, kernels);
    std::vector<std::uint32_t> out;
    for (std::uint64_t position = 0; position < 300; ++position)
      out.push_back(sampler.choose(logits, how, 0, position));
    return out;
  };
  const auto scalar = draws(*kernels::kernels_for(kernels::Path::scalar));
  for (const kernels::Path path : {kernels::Path::avx2, kernels::Path::avx512}) {
    if (const auto* kernels = kernels::kernels_for(path)) {
      EXPECT_EQ(draws(*kernels), scalar);
    }
  }
}

}  // namespace
}  // namespace di::engine
