// What a disk may hold where a slot header, a record or a superblock should be.  Checksums are made right
// before the decoder sees the bytes: it has to stand what passes them.  A header that decodes must encode to
// bytes that decode to the same, and its parts must fit each other.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "base/checksum.h"
#include "store/format.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using namespace di;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

void header(Bytes bytes, const store::SlotClass& slot_class) {
  put_le<std::uint32_t>(&bytes[12], 0);
  put_le<std::uint32_t>(&bytes[12], crc32c(bytes));
  const Result<store::SlotHeader> decoded = store::slot_header_decode(bytes, slot_class);
  if (!decoded) return;
  const store::Shard& shard = decoded->shard;
  expect(shard.crcs().size() == shard.segments.size(), "a header without a checksum for each segment");
  expect(shard.payload_bytes() <= slot_class.slot_bytes - slot_class.header_bytes,
         "a payload behind its slot");
  Bytes again(slot_class.header_bytes);
  store::slot_header_encode(*decoded, again);
  const Result<store::SlotHeader> back = store::slot_header_decode(again, slot_class);
  expect(back.ok() && *back == *decoded, "a header of ours reads differently");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ByteView input(reinterpret_cast<const std::byte*>(data), size);
  constexpr std::uint32_t header_bytes = 4096;
  Bytes page(header_bytes);
  std::copy_n(input.begin(), std::min(input.size(), page.size()), page.begin());
  header(page, {get_le<std::uint32_t>(&page[76]), header_bytes});
  put_le<std::uint32_t>(&page[12], 0);
  put_le<std::uint32_t>(&page[12], crc32c(page));
  (void)store::superblock_decode(page);
  put_le<std::uint32_t>(&page[0], 0);
  put_le<std::uint32_t>(&page[0], crc32c(ByteView(page).first(store::record_bytes)));
  (void)store::segment_record_decode(page.data());
  (void)store::slot_record_decode(page.data());
  return 0;
}
