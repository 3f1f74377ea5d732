// kv/stripe.h: how consecutive pages of a chain become the columns of a stripe (spec/store.md 4.2).
//
// A stripe has k data columns and m parity columns; n <= k pages are in it.  With n > k / 2 a page is one
// column.  Fewer pages are split, each into c <= k / n parts, as many as are not shorter than
// part_bytes_min on average: so a short stripe of long pages costs hardly more parity than a full one, and
// short pages are not ground to dust.  A part takes the same share of every segment, in whole units of
// 4 KiB, so that a layer group of a page is complete as soon as that group of its parts is, and parts need
// no order among each other.
//
//   column numbers   0 .. n*c-1        part (i mod c) of page (i div c)
//                    n*c .. k-1        zeros; stored nowhere
//                    k .. k+m-1        parity
//   segments         a column has one per layer group, one after the other when it is stored; a part may
//                    have an empty one (fewer units than parts)
//   parity           of segment g: the code over segment g of every data column, each padded with zeros
//                    to the longest of them, which is the length of the parity's segment
//   checksums        one CRC32C per column and segment.  Those of a column that is a whole page are the
//                    page's; wire::StripeCode::crcs has the others, column after column, parts before parity
//
// So everything follows from the layout, k, m and the blocks of each page.  Pure, immutable; any thread.
// Bounds: columns_max.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "kv/layout.h"

namespace di::kv {

// Of the largest geometry, 10+2, and what a laboratory may want to try beside it.
inline constexpr std::uint32_t stripe_columns_max = 16;
inline constexpr std::uint32_t stripe_pages_max = 10;
// Below this an I/O costs several times the CPU per byte (spec/store.md 1.3).
inline constexpr std::uint64_t part_bytes_min = 64 << 10;

// Parts of each page (c) when `pages` pages make a stripe, of which the shortest has so many bytes.
[[nodiscard]] std::uint32_t stripe_parts(std::uint32_t data_columns, std::uint32_t pages,
                                         std::uint64_t shortest_page_bytes);

class StripeShape {
 public:
  // Errors: invalid: no data column, more than stripe_columns_max columns, no page, more pages than data
  // columns or than stripe_pages_max, a page that is empty or longer than the layout's.
  static Result<StripeShape> of(const Layout& layout, std::uint32_t data_columns,
                                std::uint32_t parity_columns, std::span<const std::uint32_t> page_blocks);

  [[nodiscard]] std::uint32_t data_columns() const { return data_columns_; }                             // k
  [[nodiscard]] std::uint32_t parity_columns() const { return parity_columns_; }                         // m
  [[nodiscard]] std::uint32_t pages() const { return static_cast<std::uint32_t>(page_blocks_.size()); }  // n
  [[nodiscard]] std::uint32_t parts() const { return parts_; }                                           // c
  [[nodiscard]] std::uint32_t groups() const { return groups_; }
  [[nodiscard]] std::uint32_t page_blocks(std::uint32_t page) const { return page_blocks_[page]; }

  // Data columns that are stored: n * c.  A stripe can be read with any so many of its stored columns.
  [[nodiscard]] std::uint32_t data_stored() const { return pages() * parts_; }
  [[nodiscard]] std::uint32_t columns_stored() const { return data_stored() + parity_columns_; }
  [[nodiscard]] bool is_stored(std::uint32_t column) const {
    return column < data_stored() || is_parity(column);
  }
  [[nodiscard]] bool is_parity(std::uint32_t column) const {
    return column >= data_columns_ && column < data_columns_ + parity_columns_;
  }
  // The stored columns in the order of their numbers; 0 <= i < columns_stored().
  [[nodiscard]] std::uint32_t stored_column(std::uint32_t i) const {
    return i < data_stored() ? i : data_columns_ + (i - data_stored());
  }
  // Of a stored data column.
  [[nodiscard]] std::uint32_t page_of(std::uint32_t column) const { return column / parts_; }
  [[nodiscard]] std::uint32_t part_of(std::uint32_t column) const { return column % parts_; }
  [[nodiscard]] bool is_whole_page(std::uint32_t column) const {
    return parts_ == 1 && column < data_stored();
  }

  // Of a stored column.  A multiple of 4 KiB; 0 for an empty segment of a part.
  [[nodiscard]] std::uint64_t segment_bytes(std::uint32_t column, std::uint32_t group) const;
  // Where the segment lies in the column as it is stored, and in a slot that parity is made in.
  [[nodiscard]] std::uint64_t column_offset(std::uint32_t column, std::uint32_t group) const;
  [[nodiscard]] std::uint64_t column_bytes(std::uint32_t column) const;
  // Where the segment of a stored data column lies in its page.
  [[nodiscard]] std::uint64_t page_offset(std::uint32_t column, std::uint32_t group) const;
  // Blocks of a page whose payload is at least as long as a parity column: what to take a slot for.
  [[nodiscard]] std::uint32_t parity_slot_blocks() const { return blocks_max_; }

  // Place of the checksum of (column, group) in StripeCode::crcs; none for a column that is a whole page.
  [[nodiscard]] std::optional<std::size_t> crc_index(std::uint32_t column, std::uint32_t group) const;
  // Checksums in StripeCode::crcs.
  [[nodiscard]] std::size_t crcs_count() const;

  bool operator==(const StripeShape&) const = default;

 private:
  StripeShape() = default;

  std::uint32_t data_columns_ = 1;
  std::uint32_t parity_columns_ = 0;
  std::uint32_t parts_ = 1;
  std::uint32_t groups_ = 1;
  std::uint32_t blocks_max_ = 1;
  std::vector<std::uint32_t> page_blocks_;
  // [page][group]: of the page's segments.
  std::vector<std::array<std::uint64_t, groups_max>> segment_bytes_;
  std::vector<std::array<std::uint64_t, groups_max>> segment_offset_;
  std::array<std::uint64_t, groups_max> parity_bytes_{};
};

}  // namespace di::kv
