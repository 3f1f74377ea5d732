// support/byte_arena.h: an arena with bytes, for tests of the host's core that are about stripes.
//
// Slots and entries are those of FakeArena; checksums and the code are computed over real bytes, the code by
// the slow way of naive_code.h.
#pragma once

#include <algorithm>

#include "base/checksum.h"
#include "tests/support/fake_arena.h"
#include "tests/support/naive_code.h"

namespace di::test {

class ByteArena final : public FakeArena {
 public:
  explicit ByteArena(std::uint64_t payload_bytes) : payload(payload_bytes) {}

  std::uint32_t segment_crc(std::uint64_t offset, std::uint64_t bytes) override {
    return crc32c(at(offset, bytes));
  }

  // Where a column's segment lies in a slot, whoever has the slot by now.
  MutableByteView at(std::uint64_t offset, std::uint64_t bytes) {
    DI_ASSERT(offset + bytes <= payload.size());
    return MutableByteView(payload).subspan(offset, bytes);
  }

  Bytes payload;

 private:
  Bytes load(const host::Strip& strip) override {
    const MutableByteView bytes = at(strip.offset, strip.bytes);
    return {bytes.begin(), bytes.end()};
  }
  void store(const host::Strip& strip, ByteView bytes) override {
    std::copy(bytes.begin(), bytes.end(), at(strip.offset, strip.bytes).begin());
  }
  std::uint64_t length(const host::Strip& strip) override { return strip.bytes; }
  std::uint32_t checksum(ByteView bytes) override { return crc32c(bytes); }
};

}  // namespace di::test
