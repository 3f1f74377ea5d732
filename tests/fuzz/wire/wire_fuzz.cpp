// Frames from a hostile peer: the header decoder, and the body decoder of whatever number it names.
// What decodes must encode to the same bytes, and describing it must not fail.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "wire/codec.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace di;
  const ByteView input(reinterpret_cast<const std::byte*>(data), size);
  if (size < wire::header_bytes) {
    (void)wire::header_decode(input, {});
    return 0;
  }
  const ByteView frame = input.first(wire::header_bytes);
  const ByteView body = input.subspan(wire::header_bytes);
  (void)wire::header_decode(frame, body);
  // A mutation breaks the checksums; the body decoder has to stand what passes them.
  const auto number = get_le<std::uint16_t>(frame.data() + 6);
  auto again = wire::reencode(number, body);
  if (again && !std::equal(again->begin(), again->end(), body.begin(), body.end())) {
    std::fprintf(stderr, "message %u: encode(decode(x)) differs from x\n", number);
    std::abort();
  }
  (void)wire::describe(number, body);
  wire::Header header;
  header.number = number;
  const auto made = wire::header_encode(header, body);
  if (!wire::header_decode(made, body)) {
    std::fprintf(stderr, "a header of ours is refused\n");
    std::abort();
  }
  return 0;
}
