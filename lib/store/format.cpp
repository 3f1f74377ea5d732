#include "store/format.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"

namespace di::store {

namespace {

constexpr std::uint64_t superblock_magic = 0x454d554c4f564944;  // "DIVOLUME" as a little-endian number
// Another one whenever the header is: what an earlier program wrote is no slot then, and is freed.
constexpr std::uint64_t slot_magic = 0x3130544f4c534944;  // "DISLOT01"
constexpr std::size_t superblock_open_at = 112;
constexpr std::size_t superblock_spent_at = superblock_open_at + std::size_t{4} * open_segments_max;

Error corrupt(std::string what) {
  return Error{Code::corrupt, 0, std::move(what)};
}
Error invalid(std::string what) {
  return Error{Code::invalid, 0, std::move(what)};
}

void put32(MutableByteView to, std::size_t at, std::uint32_t value) {
  put_le<std::uint32_t>(&to[at], value);
}
void put64(MutableByteView to, std::size_t at, std::uint64_t value) {
  put_le<std::uint64_t>(&to[at], value);
}
std::uint32_t get32(ByteView from, std::size_t at) {
  return get_le<std::uint32_t>(&from[at]);
}
std::uint64_t get64(ByteView from, std::size_t at) {
  return get_le<std::uint64_t>(&from[at]);
}
template <std::size_t N>
void put_raw(MutableByteView to, std::size_t at, const std::array<std::byte, N>& raw) {
  std::copy(raw.begin(), raw.end(), to.begin() + static_cast<std::ptrdiff_t>(at));
}
template <std::size_t N>
std::array<std::byte, N> get_raw(ByteView from, std::size_t at) {
  std::array<std::byte, N> raw;
  std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(at), N, raw.begin());
  return raw;
}

// CRC32C of `bytes` with the four bytes at `at` taken as zero.
std::uint32_t crc_without(ByteView bytes, std::size_t at) {
  const std::array<std::byte, 4> zero{};
  std::uint32_t crc = crc32c(bytes.first(at));
  crc = crc32c_extend(crc, zero);
  return crc32c_extend(crc, bytes.subspan(at + 4));
}

bool all_zero(ByteView bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

// ---- geometry and superblock

Result<Geometry> Geometry::of(std::uint64_t volume_bytes, std::uint64_t segment_bytes) {
  constexpr std::uint64_t segment_bytes_limit = std::uint64_t{2} << 30;
  if (segment_bytes % 4096 != 0 || segment_bytes < slot_bytes_min || segment_bytes > segment_bytes_limit) {
    return invalid("a segment must have 16 KiB to 2 GiB and be a multiple of 4 KiB");
  }
  if (volume_bytes % 4096 != 0) return invalid("a volume must be a multiple of 4 KiB");
  Geometry geometry;
  geometry.volume_bytes = volume_bytes;
  geometry.segment_bytes = segment_bytes;
  geometry.records_per_segment =
      static_cast<std::uint32_t>(align_up(segment_bytes / slot_bytes_min, records_per_page));
  geometry.segment_table_offset = 2 * superblock_bytes;
  const std::uint64_t slot_table_bytes = std::uint64_t{geometry.records_per_segment} * record_bytes;
  std::uint64_t segments = volume_bytes / (segment_bytes + slot_table_bytes);
  segments = std::min<std::uint64_t>(segments, 1u << 24);
  for (; segments > 0; --segments) {
    geometry.slot_table_offset = geometry.segment_table_offset + align_up(segments * record_bytes, 4096);
    geometry.segments_offset = geometry.slot_table_offset + segments * slot_table_bytes;
    if (geometry.segments_offset + segments * segment_bytes <= volume_bytes) break;
  }
  if (segments == 0) return invalid("a volume of this length has no room for a segment");
  geometry.segments = static_cast<std::uint32_t>(segments);
  return geometry;
}

void superblock_encode(const Superblock& superblock, MutableByteView to) {
  DI_ASSERT(to.size() == superblock_bytes && superblock.open.size() <= open_segments_max);
  std::fill(to.begin(), to.end(), std::byte{0});
  put64(to, 0, superblock_magic);
  put32(to, 8, volume_format);
  put_raw(to, 16, superblock.uuid);
  put64(to, 32, superblock.sequence);
  put64(to, 40, superblock.epoch);
  put64(to, 48, superblock.geometry.volume_bytes);
  put64(to, 56, superblock.geometry.segment_bytes);
  put32(to, 64, superblock.geometry.segments);
  put32(to, 68, superblock.geometry.records_per_segment);
  put64(to, 72, superblock.geometry.segment_table_offset);
  put64(to, 80, superblock.geometry.slot_table_offset);
  put64(to, 88, superblock.geometry.segments_offset);
  put32(to, 96, static_cast<std::uint32_t>(superblock.open.size()));
  put64(to, 104, superblock.wear.written_bytes);
  put64(to, superblock_spent_at, superblock.wear.spent_bytes);
  for (std::size_t i = 0; i < superblock.open.size(); ++i)
    put32(to, superblock_open_at + i * 4, superblock.open[i]);
  put32(to, 12, crc_without(to, 12));
}

Result<Superblock> superblock_decode(ByteView from) {
  DI_ASSERT(from.size() == superblock_bytes);
  if (get64(from, 0) != superblock_magic) return corrupt("not a volume: no superblock");
  if (get32(from, 12) != crc_without(from, 12)) return corrupt("the superblock does not match its checksum");
  if (get32(from, 8) != volume_format) return Error{Code::unsupported, 0, "the volume has another format"};
  Superblock superblock;
  superblock.uuid = get_raw<16>(from, 16);
  superblock.sequence = get64(from, 32);
  superblock.epoch = get64(from, 40);
  Result<Geometry> geometry = Geometry::of(get64(from, 48), get64(from, 56));
  if (!geometry) return corrupt("the superblock's lengths make no volume");
  superblock.geometry = *geometry;
  if (get32(from, 64) != geometry->segments || get32(from, 68) != geometry->records_per_segment ||
      get64(from, 72) != geometry->segment_table_offset || get64(from, 80) != geometry->slot_table_offset ||
      get64(from, 88) != geometry->segments_offset) {
    return corrupt("the superblock's places do not follow from its lengths");
  }
  superblock.wear = {get64(from, 104), get64(from, superblock_spent_at)};
  const std::uint32_t open = get32(from, 96);
  if (open > open_segments_max) return corrupt("the superblock's open list is too long");
  for (std::uint32_t i = 0; i < open; ++i) {
    const std::uint32_t segment = get32(from, superblock_open_at + i * 4);
    if (segment >= geometry->segments) return corrupt("the superblock's open list names no segment");
    superblock.open.push_back(segment);
  }
  return superblock;
}

// ---- records

void segment_record_encode(const SegmentRecord& record, std::byte* at) {
  const MutableByteView to(at, record_bytes);
  std::fill(to.begin(), to.end(), std::byte{0});
  put32(to, 4, record.bound ? 1 : 0);
  put32(to, 8, record.generation);
  put32(to, 12, record.slot_class.slot_bytes);
  put32(to, 16, record.slot_class.header_bytes);
  put32(to, 0, crc_without(to, 0));
}

Result<SegmentRecord> segment_record_decode(const std::byte* at) {
  const ByteView from(at, record_bytes);
  SegmentRecord record;
  if (all_zero(from)) return record;
  if (get32(from, 0) != crc_without(from, 0)) return corrupt("a segment record does not match its checksum");
  record.bound = get32(from, 4) == 1;
  record.generation = get32(from, 8);
  record.slot_class = {get32(from, 12), get32(from, 16)};
  const SlotClass& c = record.slot_class;
  if (record.bound && (c.slot_bytes % 4096 != 0 || c.header_bytes % 4096 != 0 || c.header_bytes == 0 ||
                       c.slot_bytes < slot_bytes_min || c.header_bytes >= c.slot_bytes)) {
    return corrupt("a segment record names a class that cannot be");
  }
  return record;
}

void slot_record_encode(const SlotRecord& record, std::byte* at) {
  const MutableByteView to(at, record_bytes);
  std::fill(to.begin(), to.end(), std::byte{0});
  put32(to, 4, record.segment_generation);
  put64(to, 8, record.stripe);
  put64(to, 16, record.sequence);
  put32(to, 24, record.payload_bytes);
  put_le<std::uint16_t>(&to[28], record.column);
  to[30] = record.live ? std::byte{1} : std::byte{0};
  put32(to, 0, crc_without(to, 0));
}

Result<SlotRecord> slot_record_decode(const std::byte* at) {
  const ByteView from(at, record_bytes);
  SlotRecord record;
  if (all_zero(from)) return record;
  if (get32(from, 0) != crc_without(from, 0)) return corrupt("a slot record does not match its checksum");
  record.segment_generation = get32(from, 4);
  record.stripe = get64(from, 8);
  record.sequence = get64(from, 16);
  record.payload_bytes = get32(from, 24);
  record.column = get_le<std::uint16_t>(&from[28]);
  record.live = from[30] == std::byte{1};
  return record;
}

// ---- slots

namespace {

// The n-th of a full page, the shortest first.
constexpr std::array<std::uint32_t, classes_per_layout_max> class_fractions = {16, 10, 8, 5, 4, 3, 2, 1};

std::uint64_t class_payload_bytes(const kv::Layout& layout, std::uint32_t fraction) {
  std::uint64_t bytes = 0;
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    const std::uint64_t units = layout.segment_bytes(group, layout.page_blocks()) / kv::segment_align_bytes;
    bytes += (units + fraction - 1) / fraction * kv::segment_align_bytes;
  }
  return bytes;
}

// Places in Shard::code.crcs of the column's checksums; none for a column that is a whole page.
std::optional<std::size_t> code_crcs_at(const Shard& shard) {
  const std::size_t groups = shard.segments.size();
  const std::size_t parts_stored = shard.parts == 1 ? 0 : shard.pages.size() * shard.parts;
  if (shard.is_parity()) return (parts_stored + (shard.column - shard.code.data_columns)) * groups;
  if (shard.parts > 1) return shard.column * groups;
  return std::nullopt;
}

}  // namespace

std::uint32_t Shard::payload_bytes() const {
  std::uint32_t bytes = 0;
  for (const std::uint32_t segment : segments) bytes += segment;
  return bytes;
}

std::uint32_t Shard::segment_offset(std::uint32_t group) const {
  std::uint32_t offset = 0;
  for (std::uint32_t before = 0; before < group; ++before) offset += segments[before];
  return offset;
}

std::span<const std::uint32_t> Shard::crcs() const {
  const std::optional<std::size_t> at = code_crcs_at(*this);
  if (!at) return pages[column].crcs;
  return std::span(code.crcs).subspan(*at, segments.size());
}

SlotClass slot_class_of(const kv::Layout& layout, std::uint64_t payload_bytes) {
  std::uint64_t bytes = 0;
  for (const std::uint32_t fraction : class_fractions) {
    bytes = class_payload_bytes(layout, fraction);
    if (bytes >= payload_bytes) break;
  }
  DI_ASSERT(payload_bytes > 0 && payload_bytes <= bytes);
  const std::uint64_t page_bytes = slot_page_bytes + std::uint64_t{layout.page_blocks()} * 32;
  SlotClass out;
  out.header_bytes = static_cast<std::uint32_t>(
      align_up(slot_header_fixed_bytes + kv::stripe_pages_max * page_bytes +
                   std::uint64_t{kv::stripe_columns_max} * layout.groups() * sizeof(std::uint32_t),
               4096));
  out.slot_bytes = std::max(slot_bytes_min, static_cast<std::uint32_t>(out.header_bytes + bytes));
  return out;
}

Result<Shard> shard_make(const kv::Layout& layout, std::uint64_t stripe, std::uint16_t column,
                         std::vector<wire::PutPage> pages, wire::StripeCode code) {
  if (pages.empty() || pages.size() > kv::stripe_pages_max) return invalid("a stripe has 1 to 10 pages");
  std::vector<std::uint32_t> blocks;
  for (const wire::PutPage& page : pages) {
    if (page.keys.empty() || page.keys.size() > layout.page_blocks()) {
      return invalid("a page has more or fewer blocks than its layout allows");
    }
    if (page.crcs.size() != layout.groups()) return invalid("a page has not one checksum for each segment");
    blocks.push_back(static_cast<std::uint32_t>(page.keys.size()));
    if (page.bytes != layout.page_bytes(blocks.back())) {
      return invalid("a page has another length than its layout says");
    }
  }
  const Result<kv::StripeShape> shape =
      kv::StripeShape::of(layout, code.data_columns, code.parity_columns, blocks);
  if (!shape) return shape.error();
  if (!shape->is_stored(column)) return invalid("a column that the stripe does not have");
  if (code.crcs.size() != shape->crcs_count()) {
    return invalid("a stripe has not one checksum for each segment of its parts and parity");
  }
  Shard shard;
  shard.stripe = stripe;
  shard.column = column;
  shard.fingerprint = layout.fingerprint();
  shard.parts = static_cast<std::uint8_t>(shape->parts());
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    shard.segments.push_back(static_cast<std::uint32_t>(shape->segment_bytes(column, group)));
  }
  shard.slot_class = slot_class_of(layout, shape->column_bytes(column));
  shard.pages = std::move(pages);
  shard.code = std::move(code);
  return shard;
}

void slot_header_encode(const SlotHeader& header, MutableByteView to) {
  const Shard& shard = header.shard;
  DI_ASSERT(to.size() == shard.slot_class.header_bytes);
  DI_ASSERT(!shard.pages.empty() && shard.pages.size() <= kv::stripe_pages_max);
  DI_ASSERT(!shard.segments.empty() && shard.segments.size() <= kv::groups_max);
  DI_ASSERT(shard.crcs().size() == shard.segments.size());
  std::fill(to.begin(), to.end(), std::byte{0});
  put64(to, 0, slot_magic);
  put32(to, 8, volume_format);
  put32(to, 16, shard.slot_class.header_bytes);
  put32(to, 20, shard.payload_bytes());
  put64(to, 24, header.offset);
  put_raw(to, 32, header.volume);
  put64(to, 48, header.sequence);
  put32(to, 56, header.segment_generation);
  put_le<std::uint16_t>(&to[60], shard.column);
  to[62] = std::byte{shard.code_id()};
  to[63] = static_cast<std::byte>(shard.segments.size());
  put64(to, 64, shard.stripe);
  put32(to, 72, static_cast<std::uint32_t>(shard.pages.size()));
  put32(to, 76, shard.slot_class.slot_bytes);
  put_raw(to, 80, shard.fingerprint.raw);
  for (std::size_t i = 0; i < shard.segments.size(); ++i) put32(to, 112 + i * 4, shard.segments[i]);
  to[144] = static_cast<std::byte>(shard.code.data_columns);
  to[145] = static_cast<std::byte>(shard.code.parity_columns);
  to[146] = std::byte{shard.parts};
  put32(to, 148, static_cast<std::uint32_t>(shard.code.crcs.size()));
  put64(to, 152, shard.tenant);
  std::size_t at = slot_header_fixed_bytes;
  for (const wire::PutPage& page : shard.pages) {
    DI_ASSERT(page.crcs.size() == shard.segments.size());
    put32(to, at, static_cast<std::uint32_t>(page.keys.size()));
    put64(to, at + 8, page.bytes);
    put_raw(to, at + 16, page.parent.raw);
    for (std::size_t i = 0; i < page.crcs.size(); ++i) put32(to, at + 48 + i * 4, page.crcs[i]);
    at += slot_page_bytes;
  }
  for (const std::uint32_t crc : shard.code.crcs) {
    put32(to, at, crc);
    at += 4;
  }
  for (const wire::PutPage& page : shard.pages) {
    for (const Key& key : page.keys) {
      DI_ASSERT(at + 32 <= to.size());
      put_raw(to, at, key.raw);
      at += 32;
    }
  }
  put32(to, 12, crc_without(to, 12));
}

Result<SlotHeader> slot_header_decode(ByteView from, const SlotClass& slot_class) {
  if (from.size() != slot_class.header_bytes || from.size() < slot_header_fixed_bytes) {
    return corrupt("a slot header has another length than its class");
  }
  if (get64(from, 0) != slot_magic) return corrupt("no slot header");
  if (get32(from, 12) != crc_without(from, 12)) return corrupt("a slot header does not match its checksum");
  if (get32(from, 8) != volume_format) return corrupt("a slot header of another format");
  if (get32(from, 16) != slot_class.header_bytes || get32(from, 76) != slot_class.slot_bytes) {
    return corrupt("a slot header of another class");
  }
  SlotHeader header;
  Shard& shard = header.shard;
  shard.slot_class = slot_class;
  const std::uint32_t payload_bytes = get32(from, 20);
  header.offset = get64(from, 24);
  header.volume = get_raw<16>(from, 32);
  header.sequence = get64(from, 48);
  header.segment_generation = get32(from, 56);
  shard.column = get_le<std::uint16_t>(&from[60]);
  const auto groups = std::to_integer<std::uint32_t>(from[63]);
  shard.stripe = get64(from, 64);
  const std::uint32_t pages = get32(from, 72);
  shard.fingerprint.raw = get_raw<32>(from, 80);
  const auto data_columns = std::to_integer<std::uint32_t>(from[144]);
  const auto parity_columns = std::to_integer<std::uint32_t>(from[145]);
  const auto parts = std::to_integer<std::uint32_t>(from[146]);
  if (groups == 0 || groups > kv::groups_max || pages == 0 || pages > kv::stripe_pages_max ||
      data_columns == 0 || data_columns + parity_columns > kv::stripe_columns_max || parts == 0 ||
      pages * parts > data_columns) {
    return corrupt("a slot header with counts that cannot be");
  }
  shard.code.data_columns = static_cast<std::uint16_t>(data_columns);
  shard.code.parity_columns = static_cast<std::uint16_t>(parity_columns);
  shard.parts = static_cast<std::uint8_t>(parts);
  if (std::to_integer<std::uint8_t>(from[62]) != shard.code_id())
    return corrupt("a slot header of another code");
  if (shard.is_parity() ? shard.column >= data_columns + parity_columns : shard.column >= pages * parts) {
    return corrupt("a slot header of a column that is not stored");
  }
  const bool may_be_empty = parts > 1 && !shard.is_parity();
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < groups; ++i) {
    const std::uint32_t bytes = get32(from, 112 + i * 4);
    if ((bytes == 0 && !may_be_empty) || bytes % kv::segment_align_bytes != 0)
      return corrupt("a slot header with a segment of no length");
    shard.segments.push_back(bytes);
    sum += bytes;
  }
  if (sum == 0 || sum != payload_bytes || sum > slot_class.slot_bytes - slot_class.header_bytes) {
    return corrupt("a slot header whose segments do not fit the slot");
  }
  shard.tenant = get64(from, 152);
  const std::size_t crcs = get32(from, 148);
  if (crcs != ((parts == 1 ? 0 : pages * parts) + parity_columns) * std::size_t{groups}) {
    return corrupt("a slot header has not one checksum for each segment");
  }
  std::size_t at = slot_header_fixed_bytes;
  if (from.size() - at < std::size_t{pages} * slot_page_bytes + crcs * 4) {
    return corrupt("a slot header is cut short");
  }
  std::uint64_t keys = 0;
  for (std::uint32_t i = 0; i < pages; ++i) {
    const std::uint32_t blocks = get32(from, at);
    if (blocks == 0) return corrupt("a slot header with a page of no blocks");
    keys += blocks;
    wire::PutPage page;
    page.bytes = get64(from, at + 8);
    page.parent.raw = get_raw<32>(from, at + 16);
    for (std::uint32_t group = 0; group < groups; ++group)
      page.crcs.push_back(get32(from, at + 48 + group * 4));
    shard.pages.push_back(std::move(page));
    at += slot_page_bytes;
  }
  for (std::size_t i = 0; i < crcs; ++i) {
    shard.code.crcs.push_back(get32(from, at));
    at += 4;
  }
  if (keys * 32 > from.size() - at) return corrupt("a slot header is cut short");
  std::size_t directory = slot_header_fixed_bytes;
  for (wire::PutPage& page : shard.pages) {
    const std::uint32_t blocks = get32(from, directory);
    directory += slot_page_bytes;
    for (std::uint32_t block = 0; block < blocks; ++block) {
      page.keys.push_back(Key{get_raw<32>(from, at)});
      at += 32;
    }
  }
  return header;
}

}  // namespace di::store
