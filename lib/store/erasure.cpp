#include "store/erasure.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/assert.h"
#include "base/checksum.h"

namespace di::store {

namespace {

// Of each column at a time, all of which fill a part of a second-level cache, and what is done with it first.
// Measured (tests/bench/erasure_bench), each at its best:
//   isal  products: they read the columns side by side, which memory answers faster than one after the other, and
//         the checksums find the slice in the cache.  The other way round costs a third of the rate.
//   gfni  checksums: the products are faster than memory, and lose more when they wait for it.  The other way
//         round costs a tenth to a fifth.
struct Pace {
  std::size_t slice_bytes;
  bool sums_first;
};
constexpr Pace pace_of(Products::Way way) {
  return way == Products::Way::gfni ? Pace{std::size_t{64} << 10, true} : Pace{std::size_t{8} << 10, false};
}

constexpr std::size_t columns_max = Erasure::columns_max;
constexpr std::size_t rows_max = Erasure::parity_max;

// made[r] = sum over s of factors[r][s] * source[s], and checksums of what is asked for.
struct Combination {
  struct Source {
    ByteView bytes;
    std::uint32_t* crc = nullptr;  // may be null
  };
  struct Row {
    MutableByteView bytes;
    const std::uint8_t* factors = nullptr;  // [sources]
    std::uint32_t* crc = nullptr;
  };
  std::array<Source, columns_max> sources;
  std::size_t sources_count = 0;
  std::array<Row, rows_max> rows;
  std::size_t rows_count = 0;

  void run(Products::Way way) const;
};

void Combination::run(Products::Way way) const {
  const std::span all(sources.data(), sources_count);
  const std::span made(rows.data(), rows_count);
  std::size_t end = 0;
  for (const Source& source : all) end = std::max(end, source.bytes.size());
  for (const Row& row : made) end = std::max(end, row.bytes.size());

  const Pace pace = pace_of(way);
  // Of those that reach as far as the slice.
  Products products(way);
  std::array<std::uint8_t, rows_max * columns_max> factors;
  std::array<const unsigned char*, columns_max> from;
  std::array<unsigned char*, rows_max> to;
  std::uint32_t gathered = 0;  // bits of the sources, and above them of the rows, that `products` is for
  std::size_t bytes = 0;
  for (std::size_t at = 0; at < end; at += bytes) {
    bytes = std::min(end - at, pace.slice_bytes);
    std::uint32_t active = 0;
    const auto reach = [&](std::size_t length, std::size_t bit) {
      if (length <= at) return false;
      bytes = std::min(bytes, length - at);
      active |= 1u << bit;
      return true;
    };
    std::size_t from_count = 0;
    std::size_t to_count = 0;
    for (std::size_t s = 0; s < all.size(); ++s) {
      if (reach(all[s].bytes.size(), s))
        from[from_count++] = reinterpret_cast<const unsigned char*>(all[s].bytes.data()) + at;
    }
    for (std::size_t r = 0; r < made.size(); ++r) {
      if (reach(made[r].bytes.size(), columns_max + r))
        to[to_count++] = reinterpret_cast<unsigned char*>(made[r].bytes.data()) + at;
    }
    if (gathered != active) {
      gathered = active;
      std::size_t count = 0;
      for (std::size_t r = 0; r < made.size(); ++r) {
        if ((active >> (columns_max + r) & 1u) == 0) continue;
        for (std::size_t s = 0; s < all.size(); ++s) {
          if ((active >> s & 1u) != 0) factors[count++] = made[r].factors[s];
        }
      }
      products.set(std::span(factors).first(count), from_count, to_count);
    }
    const auto sum = [&] {
      for (const Source& source : all) {
        if (source.crc != nullptr && source.bytes.size() > at)
          *source.crc = crc32c_extend(*source.crc, source.bytes.subspan(at, bytes));
      }
    };
    if (pace.sums_first) sum();
    if (from_count > 0) {
      products.run(bytes, std::span(from).first(from_count), std::span(to).first(to_count));
    } else {
      for (std::size_t r = 0; r < to_count; ++r) std::memset(to[r], 0, bytes);
    }
    if (!pace.sums_first) sum();
    for (const Row& row : made) {
      if (row.bytes.size() <= at) continue;
      *row.crc = crc32c_extend(*row.crc, row.bytes.subspan(at, bytes));
    }
  }
}

}  // namespace

Result<Erasure> Erasure::create(std::uint32_t data_columns, std::uint32_t parity_columns, Products::Way way) {
  const std::uint32_t k = data_columns;
  const std::uint32_t m = parity_columns;
  const auto refused = [&](const char* why) {
    return Error{Code::unsupported, 0, "code " + std::to_string(k) + "+" + std::to_string(m) + ": " + why};
  };
  if (k == 0 || m > parity_max || k > columns_max - m) return refused("too few or too many columns");
  Erasure code(k, m, way);
  using Matrix = std::array<std::uint8_t, std::size_t{columns_max} * columns_max>;
  Matrix encode;
  galois::reed_solomon(encode, k + m, k);
  for (std::uint32_t unused = 0; unused < 1u << (k + m); ++unused) {
    if (static_cast<std::uint32_t>(std::popcount(unused)) != m) continue;
    // Rows of the columns that are used; its inverse makes data of them.
    Matrix used;
    std::uint32_t row = 0;
    for (std::uint32_t column = 0; column < k + m; ++column) {
      if ((unused >> column & 1u) == 0) std::copy_n(&encode[column * k], k, &used[row++ * k]);
    }
    Matrix inverse;
    if (!galois::invert(used, inverse, k)) {
      return refused("some losses could not be made up for");
    }
    Pattern& pattern = code.patterns_.emplace_back();
    pattern.unused = unused;
    pattern.factors.resize(std::size_t{m} * k);
    row = 0;
    for (std::uint32_t column = 0; column < k + m; ++column) {
      if ((unused >> column & 1u) == 0) continue;
      for (std::uint32_t source = 0; source < k; ++source) {
        std::uint8_t sum = 0;
        for (std::uint32_t data = 0; data < k; ++data) {
          sum = static_cast<std::uint8_t>(
              sum ^ galois::multiply(encode[column * k + data], inverse[data * k + source]));
        }
        pattern.factors[row * k + source] = sum;
      }
      ++row;
    }
  }
  return code;
}

void Erasure::encode(std::span<const ByteView> data, std::span<const MutableByteView> parity,
                     std::span<std::uint32_t> crcs) const {
  const std::uint32_t k = data_columns_;
  DI_ASSERT(data.size() == k && parity.size() == parity_columns_ && crcs.size() == columns());
  std::fill(crcs.begin(), crcs.end(), 0u);
  Combination work;
  std::size_t longest = 0;
  for (std::uint32_t c = 0; c < k; ++c) {
    longest = std::max(longest, data[c].size());
    work.sources[c] = {data[c], &crcs[c]};
  }
  work.sources_count = k;
  // The pattern without any parity has the highest bits.
  const Pattern& pattern = patterns_.back();
  for (std::uint32_t p = 0; p < parity_columns_; ++p) {
    DI_ASSERT(parity[p].size() == longest);
    work.rows[p] = {parity[p], pattern.factors.data() + std::size_t{p} * k, &crcs[k + p]};
  }
  work.rows_count = parity_columns_;
  work.run(way_);
}

std::uint32_t Erasure::sources(std::uint32_t present) const {
  std::uint32_t out = 0;
  std::uint32_t count = 0;
  for (std::uint32_t c = 0; c < columns() && count < data_columns_; ++c) {
    if ((present >> c & 1u) == 0) continue;
    out |= 1u << c;
    ++count;
  }
  return count == data_columns_ ? out : 0;
}

Result<std::uint32_t> Erasure::decode(std::span<const Present> given, std::span<const Wanted> wanted) const {
  DI_ASSERT(given.size() == columns());
  std::uint32_t present = 0;
  for (std::uint32_t c = 0; c < columns(); ++c) present |= given[c].present ? 1u << c : 0u;
  const std::uint32_t used = sources(present);
  if (used == 0) return Error{Code::not_found, 0, "too few columns of a stripe are there"};
  const std::uint32_t unused = ~used & ((1u << columns()) - 1);
  const auto pattern = std::lower_bound(patterns_.begin(), patterns_.end(), unused,
                                        [](const Pattern& a, std::uint32_t b) { return a.unused < b; });
  DI_ASSERT(pattern != patterns_.end() && pattern->unused == unused);

  Combination work;
  std::array<std::uint32_t, columns_max> crcs{};
  for (std::uint32_t c = 0; c < columns(); ++c) {
    if ((used >> c & 1u) == 0) continue;
    work.sources[work.sources_count++] = {given[c].bytes, given[c].verified ? nullptr : &crcs[c]};
  }
  for (const Wanted& want : wanted) {
    DI_ASSERT(want.column < columns() && (present >> want.column & 1u) == 0);
    const auto row = static_cast<std::size_t>(std::popcount(unused & ((1u << want.column) - 1)));
    DI_ASSERT(work.rows_count == 0 || want.column > wanted[work.rows_count - 1].column);
    work.rows[work.rows_count++] = {want.bytes, pattern->factors.data() + row * data_columns_,
                                    &crcs[want.column]};
  }
  work.run(way_);

  std::uint32_t wrong = 0;
  for (std::uint32_t c = 0; c < columns(); ++c) {
    if ((used >> c & 1u) != 0 && !given[c].verified && crcs[c] != given[c].crc) wrong |= 1u << c;
  }
  for (const Wanted& want : wanted) wrong |= crcs[want.column] != want.crc ? 1u << want.column : 0u;
  return wrong;
}

bool xor_is_zero(std::span<const ByteView> columns) {
  constexpr std::size_t slice = 4096;
  std::size_t longest = 0;
  for (const ByteView column : columns) longest = std::max(longest, column.size());
  std::array<std::byte, slice> sum;
  for (std::size_t at = 0; at < longest; at += slice) {
    sum.fill(std::byte{0});
    for (const ByteView column : columns) {
      if (column.size() <= at) continue;
      const ByteView part = column.subspan(at, std::min(slice, column.size() - at));
      for (std::size_t i = 0; i < part.size(); ++i) sum[i] ^= part[i];
    }
    if (std::any_of(sum.begin(), sum.end(), [](std::byte b) { return b != std::byte{0}; })) return false;
  }
  return true;
}

}  // namespace di::store
