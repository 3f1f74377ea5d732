// support/naive_code.h: the code of a stripe byte by byte, for tests: what store/erasure.h does fast.
//
// Reed-Solomon over GF(2^8), polynomial 0x11d; byte b of parity p is the sum over the data columns j of
// 2^(p * j) times byte b of column j.  Plain functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/bytes.h"

namespace di::test {

inline std::uint8_t gf_mul(std::uint8_t a, std::uint8_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t shifted = a, left = b; left != 0; left >>= 1) {
    if ((left & 1) != 0) product ^= shifted;
    shifted <<= 1;
    if ((shifted & 0x100) != 0) shifted ^= 0x11d;
  }
  return static_cast<std::uint8_t>(product);
}
inline std::uint8_t gf_inverse(std::uint8_t a) {
  for (std::uint32_t b = 1; b < 256; ++b) {
    if (gf_mul(a, static_cast<std::uint8_t>(b)) == 1) return static_cast<std::uint8_t>(b);
  }
  DI_PANIC("zero has no inverse");
}
// Factor of data column `column` in row `row` of the code: rows 0 .. k-1 are the data columns themselves.
inline std::uint8_t code_factor(std::uint32_t row, std::uint32_t column, std::uint32_t data_columns) {
  if (row < data_columns) return row == column ? 1 : 0;
  std::uint8_t factor = 1;
  for (std::uint32_t i = 0; i < (row - data_columns) * column; ++i) factor = gf_mul(factor, 2);
  return factor;
}
inline void add_scaled(Bytes& to, ByteView from, std::uint8_t factor) {
  if (factor == 0) return;
  std::uint8_t times[256];
  for (std::uint32_t value = 0; value < 256; ++value)
    times[value] = gf_mul(factor, static_cast<std::uint8_t>(value));
  for (std::size_t i = 0; i < from.size(); ++i)
    to[i] ^= static_cast<std::byte>(times[std::to_integer<std::uint8_t>(from[i])]);
}

// One column of the code over data columns that count as if zeros followed.
inline Bytes code_row(std::uint32_t row, std::span<const Bytes> data, std::size_t bytes) {
  Bytes made(bytes);
  for (std::uint32_t column = 0; column < data.size(); ++column) {
    add_scaled(made, data[column], code_factor(row, column, static_cast<std::uint32_t>(data.size())));
  }
  return made;
}

// The data columns, each `bytes` long, out of k columns (row, bytes) of the code.
inline std::vector<Bytes> code_solve(std::uint32_t data_columns,
                                     std::vector<std::pair<std::uint32_t, Bytes>> rows, std::size_t bytes) {
  DI_ASSERT(rows.size() >= data_columns);
  rows.resize(data_columns);
  std::vector<std::vector<std::uint8_t>> matrix(data_columns, std::vector<std::uint8_t>(data_columns));
  for (std::uint32_t r = 0; r < data_columns; ++r) {
    rows[r].second.resize(bytes);
    for (std::uint32_t c = 0; c < data_columns; ++c)
      matrix[r][c] = code_factor(rows[r].first, c, data_columns);
  }
  // Gauss and Jordan, on the bytes as well.
  for (std::uint32_t c = 0; c < data_columns; ++c) {
    std::uint32_t pivot = c;
    while (pivot < data_columns && matrix[pivot][c] == 0) ++pivot;
    DI_ASSERT(pivot < data_columns);
    std::swap(matrix[pivot], matrix[c]);
    std::swap(rows[pivot].second, rows[c].second);
    const std::uint8_t scale = gf_inverse(matrix[c][c]);
    Bytes scaled(bytes);
    add_scaled(scaled, rows[c].second, scale);
    rows[c].second = std::move(scaled);
    for (std::uint8_t& value : matrix[c]) value = gf_mul(value, scale);
    for (std::uint32_t r = 0; r < data_columns; ++r) {
      const std::uint8_t factor = matrix[r][c];
      if (r == c || factor == 0) continue;
      add_scaled(rows[r].second, rows[c].second, factor);
      for (std::uint32_t i = 0; i < data_columns; ++i) {
        matrix[r][i] = static_cast<std::uint8_t>(matrix[r][i] ^ gf_mul(factor, matrix[c][i]));
      }
    }
  }
  std::vector<Bytes> data;
  for (auto& [row, solved] : rows) data.push_back(std::move(solved));
  return data;
}

}  // namespace di::test
