#include "kv/layout.h"

#include <algorithm>

#include "base/crypto.h"

namespace di::kv {

namespace {

constexpr std::uint32_t descriptor_version = 0;
constexpr std::size_t name_bytes_max = 64;

void put_u32(Bytes& out, std::uint32_t value) {
  std::byte raw[4];
  put_le<std::uint32_t>(raw, value);
  out.insert(out.end(), raw, raw + 4);
}

void put_text(Bytes& out, const std::string& text) {
  put_u32(out, static_cast<std::uint32_t>(text.size()));
  const ByteView bytes = as_bytes(text);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

struct DescriptorReader {
  ByteView in;
  bool ok = true;

  std::uint32_t u32() {
    if (in.size() < 4) {
      ok = false;
      return 0;
    }
    const auto value = get_le<std::uint32_t>(in.data());
    in = in.subspan(4);
    return value;
  }
  std::string text() {
    const std::uint32_t count = u32();
    if (count > name_bytes_max || count > in.size()) {
      ok = false;
      return {};
    }
    std::string out(as_text(in.first(count)));
    in = in.subspan(count);
    return out;
  }
};

Error invalid(std::string what) {
  return Error{Code::invalid, 0, "layout: " + std::move(what)};
}

}  // namespace

Result<Layout> Layout::create(std::string format, std::uint32_t block_tokens, std::vector<Plane> planes) {
  if (format.empty() || format.size() > name_bytes_max) return invalid("format name must have 1 to 64 bytes");
  if (block_tokens == 0 || (block_tokens & (block_tokens - 1)) != 0 || block_tokens > 4096) {
    return invalid("block_tokens must be a power of two up to 4096");
  }
  if (planes.empty() || planes.size() > planes_max) return invalid("1 to 4096 planes are needed");
  Layout layout;
  layout.format_ = std::move(format);
  layout.block_tokens_ = block_tokens;
  std::vector<std::uint32_t> owner_first_plane;
  for (std::uint32_t i = 0; i < planes.size(); ++i) {
    const Plane& plane = planes[i];
    if (plane.name.empty() || plane.name.size() > name_bytes_max)
      return invalid("a plane needs a name of 1 to 64 bytes");
    if (plane.tokens_per_entry == 0 || block_tokens % plane.tokens_per_entry != 0) {
      return invalid("plane " + plane.name + ": tokens_per_entry must divide block_tokens");
    }
    if (plane.bytes_per_entry == 0 || plane.bytes_per_entry > (1u << 20)) {
      return invalid("plane " + plane.name + ": bytes_per_entry must be 1 to 1 MiB");
    }
    if (i > 0 && plane.owner_layer < planes[i - 1].owner_layer)
      return invalid("planes must be ordered by owner layer");
    if (i == 0 || plane.owner_layer != planes[i - 1].owner_layer) owner_first_plane.push_back(i);
    const std::uint64_t bytes = std::uint64_t{block_tokens} / plane.tokens_per_entry * plane.bytes_per_entry;
    layout.plane_block_bytes_.push_back(bytes);
    layout.block_bytes_ += bytes;
  }
  if (layout.block_bytes_ > (std::uint64_t{1} << 30)) return invalid("a block has more than 1 GiB");
  const auto owners = static_cast<std::uint32_t>(owner_first_plane.size());
  const std::uint32_t owners_per_group = (owners + groups_max - 1) / groups_max;
  for (std::uint32_t owner = 0; owner < owners; owner += owners_per_group) {
    layout.group_first_plane_.push_back(owner_first_plane[owner]);
  }
  layout.group_first_plane_.push_back(static_cast<std::uint32_t>(planes.size()));
  while (layout.block_bytes_ * layout.page_blocks_ * 2 <= page_payload_bytes_max) layout.page_blocks_ *= 2;

  put_text(layout.descriptor_, "DIKVLAYOUT");
  put_u32(layout.descriptor_, descriptor_version);
  put_text(layout.descriptor_, layout.format_);
  put_u32(layout.descriptor_, block_tokens);
  put_u32(layout.descriptor_, static_cast<std::uint32_t>(planes.size()));
  for (const Plane& plane : planes) {
    put_text(layout.descriptor_, plane.name);
    put_u32(layout.descriptor_, plane.owner_layer);
    put_u32(layout.descriptor_, plane.tokens_per_entry);
    put_u32(layout.descriptor_, plane.bytes_per_entry);
  }
  layout.fingerprint_.raw = sha256(layout.descriptor_);
  layout.planes_ = std::move(planes);
  return layout;
}

Result<Layout> Layout::decode(ByteView descriptor) {
  DescriptorReader reader{descriptor};
  if (reader.text() != "DIKVLAYOUT" || !reader.ok) return invalid("not a layout descriptor");
  if (reader.u32() != descriptor_version || !reader.ok) {
    return Error{Code::unsupported, 0, "layout: unknown descriptor version"};
  }
  std::string format = reader.text();
  const std::uint32_t block_tokens = reader.u32();
  const std::uint32_t count = reader.u32();
  if (!reader.ok || count > planes_max) return invalid("descriptor is cut short");
  std::vector<Plane> planes;
  for (std::uint32_t i = 0; i < count && reader.ok; ++i) {
    Plane plane;
    plane.name = reader.text();
    plane.owner_layer = reader.u32();
    plane.tokens_per_entry = reader.u32();
    plane.bytes_per_entry = reader.u32();
    planes.push_back(std::move(plane));
  }
  if (!reader.ok) return invalid("descriptor is cut short");
  if (!reader.in.empty()) return invalid("descriptor has trailing bytes");
  return create(std::move(format), block_tokens, std::move(planes));
}

std::uint32_t Layout::group_last_layer(std::uint32_t group) const {
  DI_ASSERT(group < groups());
  return planes_[group_last_plane(group) - 1].owner_layer;
}

std::uint64_t Layout::segment_bytes(std::uint32_t group, std::uint32_t blocks) const {
  DI_ASSERT(group < groups() && blocks > 0);
  std::uint64_t bytes = 0;
  for (std::uint32_t plane = group_first_plane(group); plane < group_last_plane(group); ++plane) {
    bytes += plane_block_bytes_[plane] * blocks;
  }
  return align_up(bytes, segment_align_bytes);
}

std::uint64_t Layout::segment_offset(std::uint32_t group, std::uint32_t blocks) const {
  std::uint64_t offset = 0;
  for (std::uint32_t before = 0; before < group; ++before) offset += segment_bytes(before, blocks);
  return offset;
}

std::uint64_t Layout::page_bytes(std::uint32_t blocks) const {
  return segment_offset(groups() - 1, blocks) + segment_bytes(groups() - 1, blocks);
}

std::uint64_t Layout::plane_offset(std::uint32_t plane, std::uint32_t blocks) const {
  DI_ASSERT(plane < planes_.size());
  std::uint32_t group = 0;
  while (plane >= group_last_plane(group)) ++group;
  std::uint64_t offset = 0;
  for (std::uint32_t before = group_first_plane(group); before < plane; ++before) {
    offset += plane_block_bytes_[before] * blocks;
  }
  return offset;
}

Layout layout_v41() {
  std::vector<Plane> planes;
  for (const std::uint32_t layer : {2u, 8u, 14u, 20u}) {
    const std::uint32_t ratio = layer == 20 ? 1 : 2;
    planes.push_back({"main", layer, ratio, 288});
    planes.push_back({"index", layer, ratio, 68});
  }
  auto layout = Layout::create("v41-nvfp4-0", 128, std::move(planes));
  DI_ASSERT(layout.ok());
  return *std::move(layout);
}

Layout layout_v3() {
  Result<Layout> layout = layout_mla("mla-bf16-1", 64, 61, 1152);
  DI_ASSERT(layout.ok());
  return *std::move(layout);
}

Result<Layout> layout_mla(std::string format, std::uint32_t block_tokens, std::uint32_t layers,
                          std::uint32_t bytes_per_token_and_layer) {
  std::vector<Plane> planes;
  planes.reserve(layers);
  for (std::uint32_t layer = 0; layer < layers; ++layer)
    planes.push_back({"kv", layer, 1, bytes_per_token_and_layer});
  return Layout::create(std::move(format), block_tokens, std::move(planes));
}

}  // namespace di::kv
