// store/galois.h: the arithmetic of store/erasure.h: GF(2^8), polynomial 0x11d.
//
// Sums of products over whole columns go two ways with equal results.  `gfni`: a multiplication with a
// constant is linear over the bits of a byte, so one instruction does it for 64 bytes (gf2p8affineqb; Intel,
// "Galois Field New Instructions", 2018); where the processor has it.  `isal`: ISA-L's ec_encode_data, which
// picks what else the processor has.
//
// Owner: whoever combines, one thread.  Bounds: sources_max, rows_max.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace di::store {

namespace galois {

// a x b.
[[nodiscard]] std::uint8_t multiply(std::uint8_t a, std::uint8_t b);
// The identity of `columns`, and below it row p with the powers of 2^p: [rows][columns].
void reed_solomon(std::span<std::uint8_t> matrix, std::size_t rows, std::size_t columns);
// [size][size]; `matrix` is used up.  False: it has no inverse.
[[nodiscard]] bool invert(std::span<std::uint8_t> matrix, std::span<std::uint8_t> inverse, std::size_t size);

}  // namespace galois

class Products {
 public:
  static constexpr std::size_t sources_max = 16;
  static constexpr std::size_t rows_max = 4;
  enum class Way : std::uint8_t { isal, gfni };

  // The faster one that this processor has.
  [[nodiscard]] static Way best();
  explicit Products(Way way) : way_(way) {}

  // From now on made[r] = sum over s of factors[r * sources + s] x from[s].
  void set(std::span<const std::uint8_t> factors, std::size_t sources, std::size_t rows);
  // `bytes` of each; none of the made ones is a source.
  void run(std::size_t bytes, std::span<const unsigned char* const> from,
           std::span<unsigned char* const> to) const;

 private:
  static constexpr std::size_t table_bytes = 32;  // ISA-L's, for one factor

  Way way_;
  std::size_t sources_ = 0;
  std::size_t rows_ = 0;
  // Of the way that is taken, as `factors` of set().
  std::array<std::uint64_t, rows_max * sources_max> matrices_;
  std::array<std::uint8_t, rows_max * sources_max * table_bytes> tables_;
};

}  // namespace di::store
