// kv/layout.h: what a model's KV cache looks like in bytes.  Data, not code (spec/v41.md 2.3).
//
// A Layout lists planes; everything else (layer groups, segments, page sizes) is derived here and
// nowhere else.  Immutable after creation; any thread.
//
// A page holds `n` consecutive blocks.  Its payload is one segment per layer group; a segment holds
// its planes one after the other, a plane its n blocks one after the other; each segment is padded
// with zeros to 4 KiB.  Worked example, V4.1: 4 owner layers -> 4 groups, page of 8 blocks =
// 3 x align4K(8 x 22,784) + align4K(8 x 45,568) = 917,504 bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "wire/ids.h"

namespace di::kv {

inline constexpr std::uint32_t groups_max = 8;
inline constexpr std::uint32_t page_payload_bytes_max = 1u << 20;  // unpadded; one block may exceed it
inline constexpr std::uint32_t segment_align_bytes = 4096;
inline constexpr std::uint32_t planes_max = 4096;

// One kind of entry of one owner layer.
struct Plane {
  std::string name;  // "kv", "main", "index"
  std::uint32_t owner_layer = 0;
  std::uint32_t tokens_per_entry = 1;  // divides block_tokens
  std::uint32_t bytes_per_entry = 0;

  bool operator==(const Plane&) const = default;
};

class Layout {
 public:
  // `planes` are ordered by owner layer.  Errors: invalid, saying which field.
  static Result<Layout> create(std::string format, std::uint32_t block_tokens, std::vector<Plane> planes);
  // Descriptor bytes as they travel in registration, and back.
  [[nodiscard]] const Bytes& descriptor() const { return descriptor_; }
  static Result<Layout> decode(ByteView descriptor);
  // SHA-256 of the descriptor.
  [[nodiscard]] const Key& fingerprint() const { return fingerprint_; }

  // Number format and kernel version, for example "mla-bf16-1": different bits, different name.
  [[nodiscard]] const std::string& format() const { return format_; }
  [[nodiscard]] std::uint32_t block_tokens() const { return block_tokens_; }
  [[nodiscard]] const std::vector<Plane>& planes() const { return planes_; }
  // Layer groups that own planes = segments of a page; 1 to groups_max.
  [[nodiscard]] std::uint32_t groups() const {
    return static_cast<std::uint32_t>(group_first_plane_.size() - 1);
  }
  // Planes [first, last) of a group.
  [[nodiscard]] std::uint32_t group_first_plane(std::uint32_t group) const {
    return group_first_plane_[group];
  }
  [[nodiscard]] std::uint32_t group_last_plane(std::uint32_t group) const {
    return group_first_plane_[group + 1];
  }
  // The last layer of a group's owners: a layer l may run when the group with the smallest
  // group_last_layer >= l is there.
  [[nodiscard]] std::uint32_t group_last_layer(std::uint32_t group) const;

  [[nodiscard]] std::uint32_t page_blocks() const { return page_blocks_; }
  [[nodiscard]] std::uint64_t plane_block_bytes(std::uint32_t plane) const {
    return plane_block_bytes_[plane];
  }
  [[nodiscard]] std::uint64_t block_bytes() const { return block_bytes_; }  // unpadded, all planes
  // Segment of a page of `blocks` blocks: padded length, and offset inside the page.
  [[nodiscard]] std::uint64_t segment_bytes(std::uint32_t group, std::uint32_t blocks) const;
  [[nodiscard]] std::uint64_t segment_offset(std::uint32_t group, std::uint32_t blocks) const;
  [[nodiscard]] std::uint64_t page_bytes(std::uint32_t blocks) const;
  // Offset of (plane, block 0) inside its segment of a page of `blocks` blocks.
  [[nodiscard]] std::uint64_t plane_offset(std::uint32_t plane, std::uint32_t blocks) const;

  bool operator==(const Layout& other) const { return descriptor_ == other.descriptor_; }

 private:
  Layout() = default;
  std::string format_;
  std::uint32_t block_tokens_ = 0;
  std::vector<Plane> planes_;
  std::vector<std::uint32_t> group_first_plane_;
  std::vector<std::uint64_t> plane_block_bytes_;
  std::uint64_t block_bytes_ = 0;
  std::uint32_t page_blocks_ = 1;
  Bytes descriptor_;
  Key fingerprint_;
};

// The synthetic V4.1 layout (eight planes, 890 bytes per token), for tests and script engines.
[[nodiscard]] Layout layout_v41();
// DeepSeek-V3 in BF16: 61 layers of 512 + 64 values, 70,272 bytes a token, a page of one block of 64.
[[nodiscard]] Layout layout_v3();
// A uniform MLA layout: one plane per layer.
[[nodiscard]] Result<Layout> layout_mla(std::string format, std::uint32_t block_tokens, std::uint32_t layers,
                                        std::uint32_t bytes_per_token_and_layer);

}  // namespace di::kv
