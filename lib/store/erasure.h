// store/erasure.h: the code of a stripe: m parity columns over k data columns, one segment at a time.
//
// Reed-Solomon over GF(2^8), polynomial 0x11d.  Byte b of parity p is the sum over the data columns j of
// 2^(p * j) times byte b of column j: parity 0 is their XOR, parity 1 weighs them with 1, 2, 4, ....  Any k
// of the k + m columns make the others.  A column that is shorter than the longest one counts as if zeros
// followed, and an empty one as zeros; nothing is copied for that.  Lengths are free; whole 4 KiB are fast.
//
// The work is done in slices that stay in the cache, and each slice is checksummed (CRC32C) while it is
// there: memory is read once.
//
// Pure: immutable after creation, any thread; a call allocates nothing.  Bounds: columns_max, parity_max; the
// factors of all C(k + m, m) ways to lose m columns are made at creation (66 for 10+2: 1.3 KB).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "store/galois.h"

namespace di::store {

// How parity is made, as slot headers say it.
inline constexpr std::uint8_t code_id_none = 0;  // there is none
inline constexpr std::uint8_t code_id_reed_solomon = 1;

class Erasure {
 public:
  static constexpr std::uint32_t columns_max = Products::sources_max;
  static constexpr std::uint32_t parity_max = Products::rows_max;

  // Errors: unsupported: no data column, more columns than the bounds, or a geometry whose matrix cannot
  // make up for every loss.
  static Result<Erasure> create(std::uint32_t data_columns, std::uint32_t parity_columns,
                                Products::Way way = Products::best());

  [[nodiscard]] std::uint32_t data_columns() const { return data_columns_; }      // k
  [[nodiscard]] std::uint32_t parity_columns() const { return parity_columns_; }  // m
  [[nodiscard]] std::uint32_t columns() const { return data_columns_ + parity_columns_; }
  [[nodiscard]] std::uint8_t code_id() const {
    return parity_columns_ == 0 ? code_id_none : code_id_reed_solomon;
  }

  // Makes the parity of one segment, and the checksums of all its columns.
  //   data    [k]      segments of the data columns in their order; empty for one that is not stored
  //   parity  [m]      each as long as the longest of them
  //   crcs    [k + m]  of data, then of parity; 0 for an empty one
  void encode(std::span<const ByteView> data, std::span<const MutableByteView> parity,
              std::span<std::uint32_t> crcs) const;

  // A column of the segment, as somebody has it.
  struct Present {
    bool present = false;   // a data column that is not stored is there, and empty
    bool verified = false;  // it was compared with its checksum already
    std::uint32_t crc = 0;
    ByteView bytes;
  };
  // A column that is not there.  Its length is what it is in the stripe, which may be less than the parity's.
  struct Wanted {
    std::uint32_t column = 0;
    std::uint32_t crc = 0;
    MutableByteView bytes;
  };
  // Makes the wanted columns of one segment out of k present ones: all the data columns there are, then
  // parity in its order.  Those, and what was made, are compared with their checksums.
  //   columns  [k + m]; wanted: at most m, ascending, none of them present
  // Returns which of them do not match, a bit for each column; unless it is 0 the bytes made are of no use.
  // Errors: not_found: fewer than k columns are present.
  Result<std::uint32_t> decode(std::span<const Present> columns, std::span<const Wanted> wanted) const;

  // The columns that decode would use, a bit for each; 0 when they are too few.
  [[nodiscard]] std::uint32_t sources(std::uint32_t present) const;

 private:
  struct Pattern {
    std::uint32_t unused = 0;           // bits of the m columns that the others make
    std::vector<std::uint8_t> factors;  // [m][k], rows and sources ascending
  };
  Erasure(std::uint32_t data_columns, std::uint32_t parity_columns, Products::Way way)
      : data_columns_(data_columns), parity_columns_(parity_columns), way_(way) {}

  std::uint32_t data_columns_;
  std::uint32_t parity_columns_;
  Products::Way way_;
  std::vector<Pattern> patterns_;  // ascending by `unused`
};

// True when the XOR of these is zero, a shorter one as if zeros followed: the data columns of a segment and
// parity 0.  Plain on purpose: it shares no step with Erasure, whose mistakes it is to find.
[[nodiscard]] bool xor_is_zero(std::span<const ByteView> columns);

}  // namespace di::store
