// Every kernel of every path this processor has, against the scalar one bit for bit; and the scalar one
// against the same mathematics in double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/rng.h"
#include "kernels/api.h"

namespace di::kernels {
namespace {

constexpr std::uint64_t seed = 7140;

class Data {
 public:
  Data() { std::printf("seed=%llu\n", static_cast<unsigned long long>(seed)); }

  float value() {
    // Mostly about one, now and then tiny, large, zero or negative zero.
    const auto kind = rng_.below(40);
    if (kind == 0) return 0.0f;
    if (kind == 1) return -0.0f;
    const auto x = static_cast<float>(rng_.uniform() * 4 - 2);
    return kind == 2 ? x * 1e-30f : kind == 3 ? x * 1e4f : x;
  }
  std::vector<float> floats(std::size_t count) {
    std::vector<float> out(count);
    for (float& x : out) x = value();
    return out;
  }
  std::vector<float> even(std::size_t count, double low, double high) {
    std::vector<float> out(count);
    for (float& x : out) x = static_cast<float>(low + rng_.uniform() * (high - low));
    return out;
  }
  std::uint64_t below(std::uint64_t bound) { return rng_.below(bound); }

 private:
  Rng rng_{seed};
};

std::vector<std::byte> stored(const std::vector<float>& values, Format format) {
  std::vector<std::byte> out(values.size() * (format == Format::f32 ? 4 : 2));
  narrow(values.data(), format, out.data(), values.size());
  return out;
}

std::vector<float> widened(const std::vector<std::byte>& bytes, Format format) {
  std::vector<float> out(bytes.size() / (format == Format::f32 ? 4 : 2));
  widen(bytes.data(), format, out.data(), out.size());
  return out;
}

::testing::AssertionResult same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "lengths differ";
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) {
      return ::testing::AssertionFailure() << "at " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

const Kernels& scalar() {
  return *kernels_for(Path::scalar);
}

// Runs once for each vector path; a path the processor lacks is a loud skip.
class VectorPath : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    kernels_ = kernels_for(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this processor has no " << path_name(GetParam());
  }
  const Kernels* kernels_ = nullptr;
  Data data_;
};
INSTANTIATE_TEST_SUITE_P(Kernels, VectorPath, ::testing::Values(Path::avx2, Path::avx512),
                         [](const auto& test) { return std::string(path_name(test.param)); });

std::vector<float> run_matmul(const Kernels& kernels, const std::vector<float>& x,
                              const std::vector<std::byte>& w, Format format, std::size_t rows, std::size_t n,
                              std::size_t k, std::size_t x_stride, std::size_t y_stride) {
  std::vector<float> y(rows * y_stride, -7.0f);
  kernels.matmul({.x = x.data(),
                  .x_stride = x_stride,
                  .w = w.data(),
                  .format = format,
                  .y = y.data(),
                  .y_stride = y_stride,
                  .rows = rows,
                  .n = n,
                  .k = k});
  return y;
}

TEST_P(VectorPath, matmul_equals_scalar) {
  for (const Format format : {Format::f32, Format::bf16}) {
    for (const std::size_t rows : {0, 1, 2, 3, 5, 6, 7, 13, 64}) {
      for (const std::size_t n : {0, 1, 3, 4, 9, 17}) {
        for (const std::size_t k : {0, 1, 15, 16, 17, 48, 61}) {
          const auto x = data_.floats(rows * (k + 3));
          const auto w = stored(data_.floats(n * k), format);
          EXPECT_TRUE(same_bits(run_matmul(*kernels_, x, w, format, rows, n, k, k + 3, n + 2),
                                run_matmul(scalar(), x, w, format, rows, n, k, k + 3, n + 2)))
              << rows << " x " << n << " x " << k;
        }
      }
    }
  }
}

TEST_P(VectorPath, matmul_over_several_panels_equals_scalar) {
  const std::size_t rows = 61, n = 5, k = 8200;
  const auto x = data_.floats(rows * k);
  const auto w = stored(data_.floats(n * k), Format::bf16);
  EXPECT_TRUE(same_bits(run_matmul(*kernels_, x, w, Format::bf16, rows, n, k, k, n),
                        run_matmul(scalar(), x, w, Format::bf16, rows, n, k, k, n)));
}

TEST_P(VectorPath, a_row_alone_gives_the_bits_it_gives_in_a_batch) {
  const std::size_t rows = 64, n = 37, k = 83;
  const auto x = data_.floats(rows * k);
  const auto w = stored(data_.floats(n * k), Format::bf16);
  const auto all = run_matmul(*kernels_, x, w, Format::bf16, rows, n, k, k, n);
  for (std::size_t r = 0; r < rows; ++r) {
    const std::vector<float> row(x.begin() + static_cast<std::ptrdiff_t>(r * k),
                                 x.begin() + static_cast<std::ptrdiff_t>((r + 1) * k));
    const std::vector<float> expected(all.begin() + static_cast<std::ptrdiff_t>(r * n),
                                      all.begin() + static_cast<std::ptrdiff_t>((r + 1) * n));
    EXPECT_TRUE(same_bits(run_matmul(*kernels_, row, w, Format::bf16, 1, n, k, k, n), expected));
  }
}

TEST_P(VectorPath, elementwise_kernels_equal_scalar) {
  for (const std::size_t count : {0, 1, 15, 16, 17, 100}) {
    for (int round = 0; round < 50; ++round) {
      auto x = data_.even(count, -100, 100);
      const auto up = data_.floats(count);
      if (count > 3) {
        x[0] = INFINITY;
        x[1] = -INFINITY;
        x[2] = NAN;
        x[3] = -0.0f;
      }
      std::vector<float> got(count), want(count);
      kernels_->exp(x.data(), got.data(), count);
      scalar().exp(x.data(), want.data(), count);
      EXPECT_TRUE(same_bits(got, want));
      kernels_->sigmoid(x.data(), got.data(), count);
      scalar().sigmoid(x.data(), want.data(), count);
      EXPECT_TRUE(same_bits(got, want));
      if (count > 3) x[2] = 1.0f;  // the bits of a NaN result are nobody's business
      kernels_->silu_mul(x.data(), up.data(), got.data(), count);
      scalar().silu_mul(x.data(), up.data(), want.data(), count);
      if (count > 3) got[0] = want[0] = got[1] = want[1] = 0.0f;
      EXPECT_TRUE(same_bits(got, want));
    }
  }
}

TEST_P(VectorPath, rmsnorm_equals_scalar) {
  for (const std::size_t rows : {0, 1, 3}) {
    for (const std::size_t width : {1, 7, 16, 28, 37, 192}) {
      const auto x = data_.floats(rows * (width + 1));
      const auto weight = data_.floats(width);
      std::vector<float> got(rows * width), want(rows * width);
      kernels_->rmsnorm(x.data(), width + 1, weight.data(), 1e-6f, got.data(), width, rows, width);
      scalar().rmsnorm(x.data(), width + 1, weight.data(), 1e-6f, want.data(), width, rows, width);
      EXPECT_TRUE(same_bits(got, want)) << rows << " x " << width;
    }
  }
}

// A paged cache: blocks in shuffled places, NaN wherever no position was written.
class Cache {
 public:
  Cache(Data& data, std::size_t tokens, std::size_t width, std::size_t block_tokens, Format format)
      : values_(data.floats(tokens * width)) {
    const std::size_t element = format == Format::f32 ? 4 : 2;
    const std::size_t count = (tokens + block_tokens - 1) / block_tokens;
    bytes_.assign(count * block_tokens * width * element, std::byte{0xff});
    for (std::size_t block = 0; block < count; ++block) {
      const std::size_t place = count - 1 - block;
      std::byte* at = bytes_.data() + place * block_tokens * width * element;
      blocks_.push_back(at);
      const std::size_t here = std::min(block_tokens, tokens - block * block_tokens);
      float* from = values_.data() + block * block_tokens * width;
      narrow(from, format, at, here * width);
      widen(at, format, from, here * width);
    }
  }
  [[nodiscard]] const std::byte* const* blocks() const { return blocks_.data(); }
  [[nodiscard]] const std::vector<float>& values() const { return values_; }

 private:
  std::vector<float> values_;
  std::vector<std::byte> bytes_;
  std::vector<const std::byte*> blocks_;
};

struct AttentionShape {
  std::size_t heads, latent, rope, block_tokens, first, rows;
  Format format;
};

std::vector<float> run_attention(const Kernels& kernels, const AttentionShape& s, const std::vector<float>& q,
                                 const Cache& cache) {
  std::vector<float> out(s.rows * s.heads * s.latent, -7.0f);
  std::vector<float> memory(attention_scratch_count(s.heads, s.latent, s.rope) + 16, NAN);
  float* scratch = memory.data();
  while (reinterpret_cast<std::uintptr_t>(scratch) % 64 != 0) ++scratch;
  kernels.attention({.q = q.data(),
                     .out = out.data(),
                     .blocks = cache.blocks(),
                     .block_tokens = s.block_tokens,
                     .format = s.format,
                     .rows = s.rows,
                     .heads = s.heads,
                     .latent = s.latent,
                     .rope = s.rope,
                     .first_position = s.first,
                     .scale = 0.21f,
                     .scratch = scratch});
  return out;
}

const std::vector<AttentionShape>& attention_shapes() {
  static const std::vector<AttentionShape> shapes = {
      {1, 20, 6, 32, 0, 1, Format::f32},      {3, 20, 6, 32, 0, 70, Format::f32},
      {5, 13, 2, 64, 61, 9, Format::bf16},    {4, 64, 16, 32, 127, 1, Format::bf16},
      {4, 64, 16, 32, 100, 30, Format::bf16}, {2, 80, 8, 128, 63, 2, Format::f32},
      {9, 33, 4, 8, 64, 3, Format::bf16},     {1, 16, 2, 1, 190, 5, Format::bf16},
      {2, 16, 2, 32, 5, 0, Format::bf16}};
  return shapes;
}

TEST_P(VectorPath, attention_equals_scalar) {
  for (const AttentionShape& s : attention_shapes()) {
    const Cache cache(data_, s.first + std::max<std::size_t>(s.rows, 1), s.latent + s.rope, s.block_tokens,
                      s.format);
    const auto q = data_.even(s.rows * s.heads * (s.latent + s.rope), -1, 1);
    EXPECT_TRUE(same_bits(run_attention(*kernels_, s, q, cache), run_attention(scalar(), s, q, cache)))
        << s.heads << " heads, " << s.latent << " + " << s.rope << ", rows " << s.first << " + " << s.rows;
  }
}

TEST_P(VectorPath, attention_of_a_row_does_not_depend_on_the_rows_beside_it) {
  AttentionShape s{4, 64, 16, 32, 40, 50, Format::bf16};
  const std::size_t width = s.latent + s.rope;
  const Cache cache(data_, s.first + s.rows, width, s.block_tokens, s.format);
  const auto q = data_.even(s.rows * s.heads * width, -1, 1);
  const auto all = run_attention(*kernels_, s, q, cache);
  const std::size_t first = s.first, rows = s.rows;
  for (std::size_t begin = 0; begin < rows;) {
    s.first = first + begin;
    s.rows = std::min(rows - begin, 1 + data_.below(11));
    const auto at = [&](const std::vector<float>& from, std::size_t per_row) {
      return std::vector<float>(from.begin() + static_cast<std::ptrdiff_t>(begin * per_row),
                                from.begin() + static_cast<std::ptrdiff_t>((begin + s.rows) * per_row));
    };
    EXPECT_TRUE(
        same_bits(run_attention(*kernels_, s, at(q, s.heads * width), cache), at(all, s.heads * s.latent)));
    begin += s.rows;
  }
}

TEST(ScalarKernels, exp_is_within_two_ulp) {
  std::vector<float> x;
  for (double at = -87.32; at < 88.36; at += 0.0037) x.push_back(static_cast<float>(at));
  x.push_back(0.0f);
  std::vector<float> y(x.size());
  scalar().exp(x.data(), y.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    ASSERT_LE(std::abs(static_cast<double>(y[i]) - want), 2 * ulp) << x[i];
  }
  const std::vector<float> edge = {-87.4f, -INFINITY, NAN, 0.0f, -0.0f};
  std::vector<float> out(edge.size());
  scalar().exp(edge.data(), out.data(), edge.size());
  EXPECT_EQ(out, (std::vector<float>{0, 0, 0, 1, 1}));
}

TEST(ScalarKernels, matmul_and_attention_are_what_mathematics_says) {
  Data data;
  {
    const std::size_t rows = 3, n = 5, k = 61;
    const auto x = data.even(rows * k, -1, 1);
    const auto w = stored(data.even(n * k, -1, 1), Format::bf16);
    const auto wide = widened(w, Format::bf16);
    const auto y = run_matmul(scalar(), x, w, Format::bf16, rows, n, k, k, n);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < n; ++c) {
        double sum = 0;
        for (std::size_t i = 0; i < k; ++i)
          sum += static_cast<double>(x[r * k + i]) * static_cast<double>(wide[c * k + i]);
        EXPECT_NEAR(static_cast<double>(y[r * n + c]), sum, 1e-5);
      }
    }
  }
  const AttentionShape s{2, 20, 6, 32, 60, 75, Format::bf16};
  const std::size_t width = s.latent + s.rope;
  const Cache cache(data, s.first + s.rows, width, s.block_tokens, s.format);
  const auto q = data.even(s.rows * s.heads * width, -1e-4, 1e-4);  // cache values reach 2e4
  const auto out = run_attention(scalar(), s, q, cache);
  for (std::size_t i = 0; i < s.rows * s.heads; ++i) {
    const std::size_t count = s.first + i / s.heads + 1;
    std::vector<double> weight(count);
    double total = 0;
    for (std::size_t j = 0; j < count; ++j) {
      double sum = 0;
      for (std::size_t c = 0; c < width; ++c) {
        sum += static_cast<double>(q[i * width + c]) * static_cast<double>(cache.values()[j * width + c]);
      }
      weight[j] = std::exp(sum * static_cast<double>(0.21f));
      total += weight[j];
    }
    for (std::size_t c = 0; c < s.latent; ++c) {
      double value = 0, size = 0;
      for (std::size_t j = 0; j < count; ++j) {
        const double term = weight[j] / total * static_cast<double>(cache.values()[j * width + c]);
        value += term;
        size += std::abs(term);
      }
      ASSERT_NEAR(static_cast<double>(out[i * s.latent + c]), value, 2e-5 * size + 1e-30);
    }
  }
}

TEST(Elements, bf16_rounds_to_nearest_even) {
  const auto round_bits = [](std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return bf16_round(value);
  };
  EXPECT_EQ(round_bits(0x3f800000), 0x3f80);
  EXPECT_EQ(round_bits(0x3f808000), 0x3f80);  // a tie goes to even
  EXPECT_EQ(round_bits(0x3f818000), 0x3f82);
  EXPECT_EQ(round_bits(0x3f808001), 0x3f81);
  EXPECT_EQ(round_bits(0x7f7fffff), 0x7f80);  // past the largest: infinity
  EXPECT_EQ(round_bits(0x80000000), 0x8000);
  EXPECT_TRUE(std::isnan(bf16_widen(round_bits(0x7f800001))));
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (!std::isnan(bf16_widen(half))) {
      ASSERT_EQ(bf16_round(bf16_widen(half)), half);
    }
  }
}

TEST(Elements, rope_turns_adjacent_pairs) {
  float x[] = {1, 0, 0, 2};
  const float cosine[] = {0.0f, 0.5f}, sine[] = {1.0f, 0.25f};
  rope(x, cosine, sine, 2);
  EXPECT_EQ(std::vector<float>(x, x + 4), (std::vector<float>{0, 1, -0.5f, 1}));
  rope(x, cosine, sine, 0);
}

std::pair<std::vector<std::uint32_t>, std::vector<float>> routed(Routing routing) {
  std::vector<std::uint32_t> expert(routing.chosen);
  std::vector<float> weight(routing.chosen), scratch(routing.experts + routing.groups);
  route(routing, expert.data(), weight.data(), scratch.data());
  return {expert, weight};
}

TEST(Route, the_bias_chooses_and_the_score_weighs) {
  const float score[] = {0.5f, 0.25f, 0.75f, 0.125f};
  const float bias[] = {0, 1, 0, 0};
  Routing r{.score = score, .bias = bias, .experts = 4, .chosen = 2, .normalize = true, .scale = 2.0f};
  EXPECT_EQ(routed(r).first, (std::vector<std::uint32_t>{1, 2}));
  EXPECT_EQ(routed(r).second, (std::vector<float>{0.5f, 1.5f}));
  r.normalize = false;
  EXPECT_EQ(routed(r).second, (std::vector<float>{0.5f, 1.5f}));
  r.chosen = 4;
  EXPECT_EQ(routed(r).first, (std::vector<std::uint32_t>{0, 1, 2, 3}));
}

TEST(Route, groups_are_ranked_by_their_two_best) {
  // The single best expert is in a group whose second is poor.
  const float score[] = {0.9f, 0.0f, 0.6f, 0.5f, 0.4f, 0.55f};
  const float bias[6] = {};
  Routing r{.score = score, .bias = bias, .experts = 6, .groups = 3, .groups_kept = 1, .chosen = 2};
  EXPECT_EQ(routed(r).first, (std::vector<std::uint32_t>{2, 3}));
  r.groups_kept = 2;
  EXPECT_EQ(routed(r).first, (std::vector<std::uint32_t>{2, 5})) << "0.95 beats 0.9";
}

TEST(Route, ties_go_to_the_lower_index) {
  const float score[] = {0.5f, 0.5f, 0.5f, 0.5f};
  const float bias[4] = {};
  Routing r{.score = score, .bias = bias, .experts = 4, .chosen = 2};
  EXPECT_EQ(routed(r).first, (std::vector<std::uint32_t>{0, 1}));
  r.groups = 2;
  EXPECT_EQ(routed(r).first, (std::vector<std::uint32_t>{0, 1}));
}

}  // namespace
}  // namespace di::kernels
