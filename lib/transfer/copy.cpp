#include "transfer/copy.h"

#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "base/assert.h"

namespace di::transfer {

void copy_streaming(MutableByteView to, ByteView from) {
  DI_ASSERT(to.size() == from.size());
  std::size_t at = 0;
#ifdef __SSE2__
  constexpr std::size_t line_bytes = 64;
  constexpr std::size_t worth_bytes = 64 << 10;
  if (to.size() >= worth_bytes) {
    // Streaming stores want aligned targets and like whole lines.
    const std::size_t skew = reinterpret_cast<std::uintptr_t>(to.data()) % line_bytes;
    at = skew == 0 ? 0 : line_bytes - skew;
    std::memcpy(to.data(), from.data(), at);
    for (; at + line_bytes <= to.size(); at += line_bytes) {
      const auto* source = reinterpret_cast<const __m128i*>(from.data() + at);
      auto* target = reinterpret_cast<__m128i*>(to.data() + at);
      const __m128i a = _mm_loadu_si128(source);
      const __m128i b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2);
      const __m128i d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    // Streaming stores are not ordered with later ones.
    _mm_sfence();
  }
#endif
  if (at < to.size()) std::memcpy(to.data() + at, from.data() + at, to.size() - at);
}

}  // namespace di::transfer
