// store/places.h: where the segments of a column lie in a slot of a host's arena.
//
// Pure, except that a Places learns what its column is from the first header that it sees.  Owner: of a Places,
// the disk's thread.  Bounds: kv::groups_max segments.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/result.h"
#include "kv/layout.h"
#include "kv/stripe.h"
#include "store/format.h"
#include "wire/messages.h"

namespace di::store {

using Layouts = std::map<Key, std::shared_ptr<const kv::Layout>>;

// A stretch of a slot's payload in a host's arena.
struct Strip {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Where the segments of a column lie in the slot that kv_put and kv_read name: those of a data column where
// they are in its page, those of parity one after the other.
inline Strip strip_of(const kv::StripeShape& shape, std::uint32_t column, std::uint32_t group) {
  const std::uint64_t bytes = shape.segment_bytes(column, group);
  if (shape.is_parity(column)) return {shape.column_offset(column, group), bytes};
  return {shape.page_offset(column, group), bytes};
}

// The same for a column on the disk, of which only the header knows what it is.  Disk thread.
class Places {
 public:
  Places(const wire::kv_read& want, std::shared_ptr<const Layouts> layouts)
      : want_(want), layouts_(std::move(layouts)) {}

  // Errors: stale (a page of another length), unsupported (a part, and its layout is not known).
  Result<Strip> of(const Shard& shard, std::uint32_t group) {
    if (!known_) DI_TRY(learn(shard));
    return strips_[group];
  }

 private:
  Status learn(const Shard& shard) {
    const auto groups = static_cast<std::uint32_t>(shard.segments.size());
    if (!shard.is_parity()) {
      const wire::PutPage& page = shard.pages[shard.column / shard.parts];
      if (page.keys.size() != want_.page_blocks || want_.slot.page_blocks < want_.page_blocks) {
        return Error{Code::stale, 0, "the column holds a page of another length"};
      }
    }
    std::optional<kv::StripeShape> shape;
    if (!shard.is_parity() && shard.parts > 1) {
      const auto layout = layouts_->find(shard.fingerprint);
      if (layout == layouts_->end())
        return Error{Code::unsupported, 0, "the layout of the column is not known"};
      std::vector<std::uint32_t> blocks;
      for (const wire::PutPage& page : shard.pages)
        blocks.push_back(static_cast<std::uint32_t>(page.keys.size()));
      Result<kv::StripeShape> made =
          kv::StripeShape::of(*layout->second, shard.code.data_columns, shard.code.parity_columns, blocks);
      if (!made || made->parts() != shard.parts || made->groups() != groups) {
        return Error{Code::unsupported, 0, "the column's stripe does not fit its layout"};
      }
      shape = *std::move(made);
    }
    for (std::uint32_t group = 0; group < groups; ++group) {
      strips_[group] = {shard.segment_offset(group), shard.segments[group]};
      if (!shape) continue;
      strips_[group] = strip_of(*shape, shard.column, group);
      if (strips_[group].bytes != shard.segments[group]) {
        return Error{Code::unsupported, 0, "the column's stripe does not fit its layout"};
      }
    }
    known_ = true;
    return {};
  }

  const wire::kv_read want_;
  const std::shared_ptr<const Layouts> layouts_;
  bool known_ = false;
  std::array<Strip, kv::groups_max> strips_;
};

}  // namespace di::store
