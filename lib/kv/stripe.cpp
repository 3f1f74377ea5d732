#include "kv/stripe.h"

#include <algorithm>
#include <string>

#include "base/assert.h"

namespace di::kv {

namespace {

Error invalid(std::string message) {
  return {Code::invalid, 0, "stripe: " + std::move(message)};
}

// Units [first, last) of a segment of `units` units are in part `part` of `parts`.
struct Share {
  std::uint64_t first;
  std::uint64_t last;
};
Share share_of(std::uint64_t segment_bytes, std::uint32_t part, std::uint32_t parts) {
  const std::uint64_t units = segment_bytes / segment_align_bytes;
  return {units * part / parts, units * (part + 1) / parts};
}

}  // namespace

std::uint32_t stripe_parts(std::uint32_t data_columns, std::uint32_t pages,
                           std::uint64_t shortest_page_bytes) {
  DI_ASSERT(pages > 0 && pages <= data_columns);
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(shortest_page_bytes / part_bytes_min, 1, data_columns / pages));
}

Result<StripeShape> StripeShape::of(const Layout& layout, std::uint32_t data_columns,
                                    std::uint32_t parity_columns,
                                    std::span<const std::uint32_t> page_blocks) {
  if (data_columns == 0 || data_columns > stripe_columns_max ||
      parity_columns > stripe_columns_max - data_columns) {
    return invalid("no geometry: " + std::to_string(data_columns) + "+" + std::to_string(parity_columns));
  }
  if (page_blocks.empty() || page_blocks.size() > std::min(data_columns, stripe_pages_max)) {
    return invalid(std::to_string(page_blocks.size()) + " pages in " + std::to_string(data_columns) +
                   " data columns");
  }
  for (const std::uint32_t blocks : page_blocks) {
    if (blocks == 0 || blocks > layout.page_blocks()) {
      return invalid("a page of " + std::to_string(blocks) + " blocks");
    }
  }
  StripeShape shape;
  shape.data_columns_ = data_columns;
  shape.parity_columns_ = parity_columns;
  shape.groups_ = layout.groups();
  shape.page_blocks_.assign(page_blocks.begin(), page_blocks.end());
  shape.blocks_max_ = *std::max_element(page_blocks.begin(), page_blocks.end());
  for (const std::uint32_t blocks : page_blocks) {
    auto& bytes = shape.segment_bytes_.emplace_back();
    auto& offset = shape.segment_offset_.emplace_back();
    for (std::uint32_t group = 0; group < shape.groups_; ++group) {
      bytes[group] = layout.segment_bytes(group, blocks);
      offset[group] = layout.segment_offset(group, blocks);
    }
  }
  const std::uint64_t shortest = layout.page_bytes(*std::min_element(page_blocks.begin(), page_blocks.end()));
  shape.parts_ = stripe_parts(data_columns, shape.pages(), shortest);
  for (std::uint32_t group = 0; group < shape.groups_; ++group) {
    for (std::uint32_t column = 0; column < shape.data_stored(); ++column) {
      shape.parity_bytes_[group] = std::max(shape.parity_bytes_[group], shape.segment_bytes(column, group));
    }
  }
  return shape;
}

std::uint64_t StripeShape::segment_bytes(std::uint32_t column, std::uint32_t group) const {
  DI_ASSERT(is_stored(column) && group < groups_);
  if (is_parity(column)) return parity_bytes_[group];
  const Share share = share_of(segment_bytes_[page_of(column)][group], part_of(column), parts_);
  return (share.last - share.first) * segment_align_bytes;
}

std::uint64_t StripeShape::column_offset(std::uint32_t column, std::uint32_t group) const {
  std::uint64_t offset = 0;
  for (std::uint32_t before = 0; before < group; ++before) offset += segment_bytes(column, before);
  return offset;
}

std::uint64_t StripeShape::column_bytes(std::uint32_t column) const {
  return column_offset(column, groups_ - 1) + segment_bytes(column, groups_ - 1);
}

std::uint64_t StripeShape::page_offset(std::uint32_t column, std::uint32_t group) const {
  DI_ASSERT(column < data_stored() && group < groups_);
  const std::uint32_t page = page_of(column);
  const Share share = share_of(segment_bytes_[page][group], part_of(column), parts_);
  return segment_offset_[page][group] + share.first * segment_align_bytes;
}

std::optional<std::size_t> StripeShape::crc_index(std::uint32_t column, std::uint32_t group) const {
  DI_ASSERT(is_stored(column) && group < groups_);
  if (is_whole_page(column)) return std::nullopt;
  const std::size_t parts_before = parts_ == 1 ? 0 : data_stored();
  const std::size_t row = is_parity(column) ? parts_before + (column - data_columns_) : column;
  return row * groups_ + group;
}

std::size_t StripeShape::crcs_count() const {
  return ((parts_ == 1 ? std::size_t{0} : data_stored()) + parity_columns_) * groups_;
}

}  // namespace di::kv
