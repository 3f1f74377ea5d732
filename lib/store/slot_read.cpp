#include "store/slot_read.h"

#include <algorithm>

#include "base/checksum.h"

namespace di::store {

Result<SlotHeader> header_check(const Read& read, ByteView bytes) {
  Result<SlotHeader> header = slot_header_decode(bytes, read.slot_class);
  if (!header) return header;
  if (header->volume != read.volume || header->offset != read.offset || header->sequence != read.sequence ||
      header->segment_generation != read.segment_generation || header->shard.stripe != read.stripe ||
      header->shard.column != read.column) {
    return Error{Code::corrupt, 0, "a slot holds another column than it should"};
  }
  if (header->shard.payload_bytes() != read.payload_bytes) {
    return Error{Code::corrupt, 0, "a slot holds a column of another length than it should"};
  }
  return header;
}

bool slot_is_newer(const Read& read, ByteView bytes) {
  const Result<SlotHeader> header = slot_header_decode(bytes, read.slot_class);
  return header && header->volume == read.volume && header->offset == read.offset &&
         header->sequence > read.sequence;
}

Result<SlotHeader> read_header(Disk& disk, const Read& read, AlignedBuffer& scratch) {
  const MutableByteView bytes = scratch.first(read.slot_class.header_bytes);
  DI_TRY(disk.read(read.offset, bytes));
  return header_check(read, bytes);
}

Status read_segment(Disk& disk, const Read& read, const SlotHeader& header, std::uint32_t group,
                    MutableByteView to) {
  const Shard& shard = header.shard;
  DI_ASSERT(group < shard.segments.size() && to.size() == shard.segments[group]);
  std::uint64_t offset = read.offset + read.slot_class.header_bytes;
  for (std::uint32_t before = 0; before < group; ++before) offset += shard.segments[before];
  DI_TRY(disk.read(offset, to));
  if (crc32c(to) != shard.crcs()[group])
    return Error{Code::corrupt, 0, "a segment does not match its checksum"};
  return {};
}

Status payload_check(const Shard& shard, std::span<const ByteView> pieces) {
  std::uint64_t bytes = 0;
  for (const ByteView& piece : pieces) bytes += piece.size();
  if (bytes != shard.payload_bytes())
    return Error{Code::stale, 0, "the payload has another length than it should"};
  auto piece = pieces.begin();
  std::size_t used = 0;  // of the piece
  for (std::size_t group = 0; group < shard.segments.size(); ++group) {
    std::uint32_t crc = crc32c({});
    for (std::size_t left = shard.segments[group]; left > 0;) {
      while (used == piece->size()) {
        ++piece;
        used = 0;
      }
      const std::size_t part = std::min(left, piece->size() - used);
      crc = crc32c_extend(crc, piece->subspan(used, part));
      used += part;
      left -= part;
    }
    if (crc != shard.crcs()[group])
      return Error{Code::corrupt, 0, "the payload does not match its checksums"};
  }
  return {};
}

}  // namespace di::store
