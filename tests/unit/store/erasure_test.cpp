#include "store/erasure.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <sstream>
#include <string>

#include "base/checksum.h"
#include "base/rng.h"
#include "kv/stripe.h"

namespace di::store {
namespace {

using Lengths = std::vector<std::size_t>;

// The definition, bit by bit.
std::uint8_t times(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; b != 0; b >>= 1) {
    if ((b & 1) != 0) product ^= a;
    a <<= 1;
    if ((a & 0x100) != 0) a ^= 0x11d;
  }
  return static_cast<std::uint8_t>(product);
}

std::uint8_t weight(std::uint32_t parity, std::uint32_t column) {
  std::uint8_t out = 1;
  for (std::uint32_t i = 0; i < parity * column; ++i) out = times(out, 2);
  return out;
}

// One segment of a stripe: what the columns are, parity by the definition.
struct Segment {
  std::uint32_t k = 0;
  std::uint32_t m = 0;
  std::vector<Bytes> columns;
  std::vector<std::uint32_t> crcs;

  Segment(std::uint32_t data, std::uint32_t parity, const Lengths& lengths, Rng& rng)
      : k(data), m(parity), columns(data + parity) {
    for (std::uint32_t c = 0; c < k; ++c) {
      columns[c].resize(lengths[c]);
      for (std::byte& byte : columns[c]) byte = static_cast<std::byte>(rng.next());
    }
    make_parity();
  }
  void make_parity() {
    std::size_t longest = 0;
    for (std::uint32_t c = 0; c < k; ++c) longest = std::max(longest, columns[c].size());
    for (std::uint32_t p = 0; p < m; ++p) {
      Bytes& out = columns[k + p];
      out.assign(longest, std::byte{0});
      for (std::uint32_t c = 0; c < k; ++c) {
        std::array<std::byte, 256> products;
        for (std::uint32_t value = 0; value < 256; ++value) {
          products[value] = static_cast<std::byte>(times(weight(p, c), value));
        }
        for (std::size_t at = 0; at < columns[c].size(); ++at) {
          out[at] ^= products[std::to_integer<std::size_t>(columns[c][at])];
        }
      }
    }
    crcs.clear();
    for (const Bytes& column : columns) crcs.push_back(crc32c(column));
  }
  [[nodiscard]] std::vector<Erasure::Present> present(std::uint32_t lost) const {
    std::vector<Erasure::Present> out;
    for (std::uint32_t c = 0; c < k + m; ++c) {
      const bool there = (lost >> c & 1u) == 0;
      out.push_back({there, false, crcs[c], there ? ByteView(columns[c]) : ByteView()});
    }
    return out;
  }
};

void expect_encoded(const Erasure& code, const Segment& segment) {
  std::vector<ByteView> data(segment.columns.begin(), segment.columns.begin() + segment.k);
  std::vector<Bytes> made;
  for (std::uint32_t p = 0; p < segment.m; ++p)
    made.emplace_back(segment.columns[segment.k + p].size(), std::byte{0x5a});
  const std::vector<MutableByteView> parity(made.begin(), made.end());
  std::vector<std::uint32_t> crcs(segment.k + segment.m, 77);
  code.encode(data, parity, crcs);
  for (std::uint32_t p = 0; p < segment.m; ++p) {
    EXPECT_TRUE(made[p] == segment.columns[segment.k + p]) << "parity " << p;
  }
  EXPECT_EQ(crcs, segment.crcs);
}

// Every column of `lost` that `wanted` has comes back, and nothing behind it is touched.
void expect_decoded(const Erasure& code, const Segment& segment, std::uint32_t lost, std::uint32_t wanted) {
  constexpr std::byte guard{0xa5};
  std::vector<Bytes> made;
  for (std::uint32_t c = 0; c < code.columns(); ++c) {
    made.emplace_back((wanted >> c & 1u) != 0 ? segment.columns[c].size() + 64 : 0, guard);
  }
  std::vector<Erasure::Wanted> out;
  for (std::uint32_t c = 0; c < code.columns(); ++c) {
    if ((wanted >> c & 1u) == 0) continue;
    out.push_back({c, segment.crcs[c], MutableByteView(made[c]).first(segment.columns[c].size())});
  }
  const Result<std::uint32_t> wrong = code.decode(segment.present(lost), out);
  ASSERT_TRUE(wrong.ok()) << wrong.error().message;
  EXPECT_EQ(*wrong, 0u) << "lost " << lost;
  for (const Erasure::Wanted& want : out) {
    EXPECT_TRUE(std::equal(want.bytes.begin(), want.bytes.end(), segment.columns[want.column].begin()))
        << "lost " << lost << " column " << want.column;
    EXPECT_TRUE(std::all_of(made[want.column].end() - 64, made[want.column].end(),
                            [](std::byte byte) { return byte == guard; }));
  }
}

void expect_every_loss(const Erasure& code, const Segment& segment) {
  const std::uint32_t all = (1u << code.columns()) - 1;
  for (std::uint32_t lost = 1; lost <= all; ++lost) {
    const auto count = static_cast<std::uint32_t>(std::popcount(lost));
    if (count > code.parity_columns()) continue;
    expect_decoded(code, segment, lost, lost);
    // And each alone.
    for (std::uint32_t c = 0; c < code.columns() && count > 1; ++c) {
      if ((lost >> c & 1u) != 0) expect_decoded(code, segment, lost, 1u << c);
    }
    if (testing::Test::HasFailure()) return;
  }
}

// Every test of the arithmetic goes both ways, where the processor has both.
class Erasures : public testing::TestWithParam<Products::Way> {
 protected:
  void SetUp() override {
    if (GetParam() == Products::Way::gfni && Products::best() != Products::Way::gfni)
      GTEST_SKIP() << "this processor has no GFNI";
  }
  static Erasure code_of(std::uint32_t k, std::uint32_t m) {
    Result<Erasure> code = Erasure::create(k, m, GetParam());
    EXPECT_TRUE(code.ok());
    return *std::move(code);
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, Erasures, testing::Values(Products::Way::isal, Products::Way::gfni),
                         [](const auto& way) { return way.param == Products::Way::gfni ? "gfni" : "isal"; });

TEST_P(Erasures, every_double_loss_of_ten_and_two_comes_back_whatever_the_pages) {
  constexpr std::uint64_t seed = 4202;
  Rng rng(seed);
  const Erasure code = code_of(10, 2);
  EXPECT_EQ(code.code_id(), code_id_reed_solomon);
  for (std::uint32_t pages = 1; pages <= 10; ++pages) {
    const std::uint32_t stored = pages * (10 / pages);
    const auto of = [&](const auto& length) {
      Lengths lengths(10, 0);
      for (std::uint32_t c = 0; c < stored; ++c) lengths[c] = length(c);
      return lengths;
    };
    const std::vector<Lengths> sizes = {
        of([](std::uint32_t) { return 1u; }),
        of([](std::uint32_t) { return 31u; }),
        of([](std::uint32_t c) { return 1 + 17 * c; }),
        of([](std::uint32_t) { return 4096u; }),
        of([](std::uint32_t) { return 3 * 4096u; }),
        of([](std::uint32_t c) { return 4096 * (5 + c % 2); }),
        of([](std::uint32_t c) { return c == 3 % 10 ? 0u : 4096u; }),  // a part without units here
        of([&](std::uint32_t) { return 4096 * rng.below(12); }),
        of([](std::uint32_t c) { return c % 3 == 0 ? 9 * 4096u : 4096u; }),
    };
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " pages " + std::to_string(pages) + " sizes " +
                   std::to_string(i));
      const Segment segment(10, 2, sizes[i], rng);
      expect_encoded(code, segment);
      expect_every_loss(code, segment);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Erasures, other_geometries_come_back_too) {
  constexpr std::uint64_t seed = 4203;
  Rng rng(seed);
  const std::vector<std::pair<std::uint32_t, std::uint32_t>> geometries = {
      {1, 0}, {1, 1}, {1, 2}, {2, 1}, {3, 2}, {4, 2}, {6, 3}, {8, 4}, {14, 2}, {16, 0}};
  for (const auto& [k, m] : geometries) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + std::to_string(k) + "+" + std::to_string(m));
    const Erasure code = code_of(k, m);
    for (std::uint32_t round = 0; round < 3; ++round) {
      Lengths lengths;
      for (std::uint32_t c = 0; c < k; ++c) lengths.push_back(round == 0 ? 8192 : rng.below(300));
      const Segment segment(k, m, lengths, rng);
      expect_encoded(code, segment);
      expect_every_loss(code, segment);
    }
    if (HasFailure()) return;
  }
  EXPECT_EQ(code_of(1, 0).code_id(), code_id_none);
}

// The segments of real stripes, long pages among them.
TEST_P(Erasures, segments_of_stripes_of_every_page_count_come_back) {
  constexpr std::uint64_t seed = 4204;
  Rng rng(seed);
  const Erasure code = code_of(10, 2);
  const auto mla = kv::layout_mla("mla-f32-1", 32, 8, 128);
  ASSERT_TRUE(mla.ok());
  for (const kv::Layout& layout : {kv::layout_v41(), *mla}) {
    for (std::uint32_t pages = 1; pages <= 10; ++pages) {
      std::vector<std::uint32_t> blocks(pages, layout.page_blocks());
      blocks.back() = 1 + static_cast<std::uint32_t>(rng.below(layout.page_blocks()));
      const auto shape = kv::StripeShape::of(layout, 10, 2, blocks);
      ASSERT_TRUE(shape.ok());
      const auto group = static_cast<std::uint32_t>(rng.below(layout.groups()));
      SCOPED_TRACE("seed " + std::to_string(seed) + " " + layout.format() + " pages " +
                   std::to_string(pages));
      Lengths lengths(10, 0);
      for (std::uint32_t c = 0; c < shape->data_stored(); ++c) lengths[c] = shape->segment_bytes(c, group);
      const Segment segment(10, 2, lengths, rng);
      EXPECT_EQ(segment.columns[10].size(), shape->segment_bytes(10, group));
      expect_encoded(code, segment);
      for (const std::uint32_t lost : {0x3u, 0x201u, 0x401u, 0x804u, 0xc00u})
        expect_decoded(code, segment, lost, lost);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Erasures, four_mebibytes_come_back) {
  Rng rng(4205);
  const Erasure code = code_of(10, 2);
  const Segment segment(10, 2, Lengths(10, std::size_t{4} << 20), rng);
  expect_encoded(code, segment);
  expect_decoded(code, segment, 0x402, 0x402);
  expect_decoded(code, segment, 0x021, 0x021);
}

TEST_P(Erasures, a_wrong_source_or_result_is_named) {
  Rng rng(4206);
  const Erasure code = code_of(4, 2);
  Segment segment(4, 2, {8192, 8192, 4096, 8192}, rng);
  Bytes made(8192);
  const std::vector<Erasure::Wanted> wanted = {{1, segment.crcs[1], made}};
  // Sources of column 1: 0, 2, 3 and parity 4; 5 is not looked at.
  EXPECT_EQ(code.sources(0b111101), 0b011101u);
  for (const std::uint32_t source : {0u, 2u, 3u, 4u, 5u}) {
    segment.columns[source].back() ^= std::byte{2};
    std::vector<Erasure::Present> columns = segment.present(0b10);
    const Result<std::uint32_t> wrong = code.decode(columns, wanted);
    ASSERT_TRUE(wrong.ok());
    EXPECT_EQ(*wrong, source == 5 ? 0u : (1u << source | 0b10u));
    // One that was said to be verified shows in what is made of it.
    for (Erasure::Present& column : columns) column.verified = true;
    EXPECT_EQ(*code.decode(columns, wanted), source == 5 ? 0u : 0b10u);
    segment.columns[source].back() ^= std::byte{2};
  }
  EXPECT_EQ(*code.decode(segment.present(0b10), wanted), 0u);
  const std::vector<Erasure::Wanted> other = {{1, segment.crcs[1] ^ 1u, made}};
  EXPECT_EQ(*code.decode(segment.present(0b10), other), 0b10u);
}

// Case F16: 4+2 with damage in 1, 2 and 3 columns: right bytes as long as there can be any, and never wrong
// ones.
TEST_P(Erasures, damage_is_found_and_made_up_for_until_too_many_columns_have_it) {
  Rng rng(4208);
  const Erasure code = code_of(4, 2);
  for (std::uint32_t damaged = 1; damaged < 1u << 6; ++damaged) {
    const int count = std::popcount(damaged);
    if (count > 3) continue;
    const Segment good(4, 2, Lengths(4, 8192), rng);
    Segment segment = good;
    for (std::uint32_t c = 0; c < 6; ++c) {
      if ((damaged >> c & 1u) != 0) segment.columns[c][rng.below(8192)] ^= std::byte{0x10};
    }
    // Every column that turned out to be wrong is taken out, until those that are left make the rest.
    std::uint32_t lost = 0;
    Result<std::uint32_t> wrong = code.decode(segment.present(lost), {});
    std::vector<Bytes> made(6, Bytes(8192));
    while (wrong.ok() && *wrong != 0) {
      lost |= *wrong & damaged;
      std::vector<Erasure::Wanted> wanted;
      for (std::uint32_t c = 0; c < 6 && std::popcount(lost) <= 2; ++c) {
        if ((lost >> c & 1u) != 0) wanted.push_back({c, segment.crcs[c], made[c]});
      }
      wrong = code.decode(segment.present(lost), wanted);
    }
    const bool data_damaged = (damaged & 0xf) != 0;
    ASSERT_EQ(wrong.ok(), count < 3) << damaged;
    if (!wrong.ok()) {
      EXPECT_EQ(wrong.error().code, Code::not_found);
      continue;
    }
    EXPECT_EQ(lost != 0, data_damaged) << damaged;
    for (std::uint32_t c = 0; c < 4; ++c) {
      if ((lost >> c & 1u) != 0) {
        EXPECT_TRUE(made[c] == good.columns[c]) << damaged;
      } else {
        EXPECT_TRUE(segment.columns[c] == good.columns[c]) << damaged;
      }
    }
  }
}

TEST_P(Erasures, too_few_columns_are_refused) {
  Rng rng(4207);
  const Erasure code = code_of(4, 2);
  const Segment segment(4, 2, Lengths(4, 4096), rng);
  Bytes made(4096);
  const std::vector<Erasure::Wanted> wanted = {{1, segment.crcs[1], made}};
  EXPECT_EQ(code.decode(segment.present(0b000111), wanted).error().code, Code::not_found);
  EXPECT_EQ(code.sources(0b000111), 0u);
  // With nothing wanted the sources are compared, and no more.
  EXPECT_EQ(*code.decode(segment.present(0), {}), 0u);
}

TEST(Erasure, geometries_that_cannot_be_are_refused) {
  for (const auto& [k, m] : std::vector<std::pair<std::uint32_t, std::uint32_t>>{
           {0, 0}, {0, 2}, {17, 0}, {15, 2}, {4, 5}, {UINT32_MAX, 1}, {1, UINT32_MAX}}) {
    const Result<Erasure> code = Erasure::create(k, m);
    ASSERT_FALSE(code.ok());
    EXPECT_EQ(code.error().code, Code::unsupported);
  }
}

// tests/golden/store/erasure.txt is made by erasure.py beside it, which knows the definition only.
// Lengths that end anywhere in a vector, against a multiplication table.
TEST_P(Erasures, products_are_products) {
  constexpr std::uint64_t seed = 4211;
  Rng rng(seed);
  for (int turn = 0; turn < 400; ++turn) {
    const std::size_t sources = 1 + rng.below(Products::sources_max);
    const std::size_t rows = 1 + rng.below(Products::rows_max);
    const std::size_t bytes = 1 + rng.below(700);
    SCOPED_TRACE("seed=" + std::to_string(seed) + " turn=" + std::to_string(turn));
    std::vector<std::uint8_t> factors(sources * rows);
    for (std::uint8_t& factor : factors) factor = static_cast<std::uint8_t>(rng.next());
    std::vector<std::vector<unsigned char>> from(sources);
    std::vector<const unsigned char*> from_at;
    for (auto& source : from) {
      for (std::size_t i = 0; i < bytes; ++i) source.push_back(static_cast<unsigned char>(rng.next()));
      from_at.push_back(source.data());
    }
    std::vector<std::vector<unsigned char>> to(rows, std::vector<unsigned char>(bytes + 64, 0xa5));
    std::vector<unsigned char*> to_at;
    for (auto& row : to) to_at.push_back(row.data());
    Products products(GetParam());
    products.set(factors, sources, rows);
    products.run(bytes, from_at, to_at);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t i = 0; i < bytes; ++i) {
        std::uint8_t sum = 0;
        for (std::size_t s = 0; s < sources; ++s)
          sum = static_cast<std::uint8_t>(sum ^ galois::multiply(factors[r * sources + s], from[s][i]));
        ASSERT_EQ(to[r][i], sum) << "row " << r << " byte " << i;
      }
      for (std::size_t i = bytes; i < to[r].size(); ++i) ASSERT_EQ(to[r][i], 0xa5) << "behind the end";
    }
  }
}

TEST_P(Erasures, golden_vectors) {
  std::ifstream file(std::string(DI_SOURCE_DIR) + "/tests/golden/store/erasure.txt");
  std::string line;
  std::size_t lines = 0;
  while (std::getline(file, line)) {
    SCOPED_TRACE("line " + std::to_string(++lines));
    std::istringstream in(line);
    std::uint32_t k = 0;
    std::uint32_t m = 0;
    std::uint32_t number = 0;
    in >> k >> m >> number;
    std::vector<Bytes> data(k);
    std::size_t longest = 0;
    for (std::uint32_t c = 0; c < k; ++c) {
      std::size_t length = 0;
      in >> length;
      longest = std::max(longest, length);
      std::uint32_t x = number * 2654435761u + c;
      for (std::size_t i = 0; i < length; ++i) {
        x = x * 1664525u + 1013904223u;
        data[c].push_back(static_cast<std::byte>(x >> 24));
      }
    }
    std::vector<Bytes> made(m, Bytes(longest));
    std::vector<std::uint32_t> crcs(k + m);
    code_of(k, m).encode(std::vector<ByteView>(data.begin(), data.end()),
                         std::vector<MutableByteView>(made.begin(), made.end()), crcs);
    for (std::uint32_t p = 0; p < m; ++p) {
      std::string expected;
      in >> expected;
      if (expected != "-") {
        EXPECT_EQ(to_hex(made[p]), expected);
      }
    }
    for (const std::uint32_t crc : crcs) {
      std::uint32_t expected = 0;
      in >> std::hex >> expected;
      EXPECT_EQ(crc, expected);
    }
    EXPECT_TRUE(in);
  }
  EXPECT_EQ(lines, 15u);
}

TEST(CrossCheck, ParityZeroIsTheXorOfTheDataAndNothingElseIs) {
  Rng rng(20261130);
  for (const Lengths& lengths :
       {Lengths{8192, 8192, 8192}, Lengths{12288, 4096, 0}, Lengths{5, 4099, 8200}, Lengths{1, 0, 0}}) {
    const Segment segment(3, 2, lengths, rng);
    std::vector<Bytes> columns(segment.columns.begin(), segment.columns.begin() + 4);
    const auto zero = [&] { return xor_is_zero(std::vector<ByteView>(columns.begin(), columns.end())); };
    EXPECT_TRUE(zero());
    for (Bytes& column : columns) {
      if (column.empty()) continue;
      for (const std::size_t at : {std::size_t{0}, column.size() / 2, column.size() - 1}) {
        column[at] ^= std::byte{0x10};
        EXPECT_FALSE(zero());
        column[at] ^= std::byte{0x10};
      }
    }
    std::swap(columns[3], *std::next(columns.begin(), 2));  // of whichever column, it stays what it is
    EXPECT_TRUE(zero());
  }
  EXPECT_TRUE(xor_is_zero({}));
}

}  // namespace
}  // namespace di::store
