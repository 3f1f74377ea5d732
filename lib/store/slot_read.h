// store/slot_read.h: what is in a slot, against what should be; and reading it, one access at a time.
//
// Any thread.  No state.
#pragma once

#include <cstdint>
#include <span>

#include "base/bytes.h"
#include "base/result.h"
#include "store/disk.h"
#include "store/format.h"
#include "store/volume.h"

namespace di::store {

// Decodes the slot's header and compares it with what `read` expects.  Errors: corrupt.
Result<SlotHeader> header_check(const Read& read, ByteView bytes);
// The same of the slot on the disk.  Blocks.  Errors: corrupt, io.
Result<SlotHeader> read_header(Disk& disk, const Read& read, AlignedBuffer& scratch);
// What was refused was written to this slot by this volume, later than `read` knows: a loss of power took back
// tables and kept slots.  The column is lost, the disk is well.
bool slot_is_newer(const Read& read, ByteView bytes);
// Reads one segment into `to`, which has its length, and compares its checksum.  Blocks.  Errors: corrupt, io.
Status read_segment(Disk& disk, const Read& read, const SlotHeader& header, std::uint32_t group,
                    MutableByteView to);
// Compares what is to be written, in pieces of any lengths, with the checksums of its header.  Errors: stale
// (another length), corrupt.
Status payload_check(const Shard& shard, std::span<const ByteView> pieces);

}  // namespace di::store
