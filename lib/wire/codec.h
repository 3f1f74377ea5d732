// wire/codec.h: message structs to bytes and back, derived from messages.def.
//
// Integers little-endian; Flag one byte 0 or 1; Text and Blob a U32 length and the bytes; List a U32
// count and the items.  The decoder never allocates more than the bytes it was given justify: a count
// is checked against what is left before anything is reserved.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "wire/header.h"
#include "wire/messages.h"

namespace di::wire {

// Its bytes in memory are those on the wire: lists of it are copied whole.
template <class T>
inline constexpr bool same_in_memory = std::same_as<T, Key> || std::same_as<T, RequestId> ||
                                       (std::unsigned_integral<T> && !std::same_as<T, Flag> &&
                                        std::endian::native == std::endian::little);
static_assert(std::is_trivially_copyable_v<Key> && sizeof(Key) == sizeof(Key::raw));
static_assert(std::is_trivially_copyable_v<RequestId> && sizeof(RequestId) == sizeof(RequestId::raw));

class Encoder {
 public:
  explicit Encoder(Bytes& out) : out_(out) {}

  void field(std::string_view, U8 v) { integer(v); }
  void field(std::string_view, U16 v) { integer(v); }
  void field(std::string_view, U32 v) { integer(v); }
  void field(std::string_view, U64 v) { integer(v); }
  void field(std::string_view, F32 v) { integer(std::bit_cast<U32>(v)); }
  void field(std::string_view, F64 v) { integer(std::bit_cast<U64>(v)); }
  void field(std::string_view, Flag v) { integer(static_cast<U8>(v ? 1 : 0)); }
  void field(std::string_view, const Text& v) { counted(as_bytes(v)); }
  void field(std::string_view, const Blob& v) { counted(v); }
  void field(std::string_view, const Key& v) { raw(v.raw); }
  void field(std::string_view, const RequestId& v) { raw(v.raw); }
  template <class T>
  requires(!std::same_as<T, std::byte>) void field(std::string_view name, const List<T>& v) {
    integer(static_cast<U32>(v.size()));
    if constexpr (same_in_memory<T>) {
      raw(std::as_bytes(std::span(v)));
    } else {
      for (const T& item : v) field(name, item);
    }
  }
  template <class R>
  requires std::is_class_v<R>
  void field(std::string_view, const R& record) { visit_fields(*this, record); }

 private:
  template <std::unsigned_integral T>
  void integer(T v) {
    std::byte raw_bytes[sizeof(T)];
    put_le<T>(raw_bytes, v);
    out_.insert(out_.end(), raw_bytes, raw_bytes + sizeof(T));
  }
  void counted(ByteView v) {
    integer(static_cast<U32>(v.size()));
    raw(v);
  }
  void raw(ByteView v) { out_.insert(out_.end(), v.begin(), v.end()); }

  Bytes& out_;
};

// After the first failure every later field is left as it is and ok() stays false.
class Decoder {
 public:
  explicit Decoder(ByteView in) : in_(in) {}

  [[nodiscard]] bool ok() const { return ok_; }
  [[nodiscard]] std::size_t left() const { return in_.size(); }

  void field(std::string_view, U8& v) { integer(v); }
  void field(std::string_view, U16& v) { integer(v); }
  void field(std::string_view, U32& v) { integer(v); }
  void field(std::string_view, U64& v) { integer(v); }
  void field(std::string_view, F32& v) {
    U32 bits = 0;
    integer(bits);
    v = std::bit_cast<F32>(bits);
  }
  void field(std::string_view, F64& v) {
    U64 bits = 0;
    integer(bits);
    v = std::bit_cast<F64>(bits);
  }
  void field(std::string_view, Flag& v) {
    U8 byte = 0;
    integer(byte);
    if (byte > 1) ok_ = false;
    v = byte == 1;
  }
  void field(std::string_view, Text& v) {
    const ByteView bytes = counted();
    v.assign(as_text(bytes));
  }
  void field(std::string_view, Blob& v) {
    const ByteView bytes = counted();
    v.assign(bytes.begin(), bytes.end());
  }
  void field(std::string_view, Key& v) { raw(v.raw); }
  void field(std::string_view, RequestId& v) { raw(v.raw); }
  template <class T>
  requires(!std::same_as<T, std::byte>) void field(std::string_view name, List<T>& v) {
    U32 count = 0;
    integer(count);
    // Every item takes at least one byte, so a count above what is left is a lie.
    if (!ok_ || count > in_.size()) {
      ok_ = false;
      return;
    }
    if constexpr (same_in_memory<T>) {
      const ByteView bytes = count <= in_.size() / sizeof(T) ? take(count * sizeof(T)) : ByteView{};
      ok_ = ok_ && bytes.size() == count * sizeof(T);
      if (!ok_) return;
      v.resize(count);
      if (count > 0) std::memcpy(v.data(), bytes.data(), bytes.size());
      return;
    }
    v.clear();
    // Reserving is limited: a hostile count of large records must not multiply its bytes.
    v.reserve(std::min<std::size_t>(count, 4096));
    for (U32 i = 0; i < count && ok_; ++i) {
      T item{};
      field(name, item);
      if (ok_) v.push_back(std::move(item));
    }
  }
  template <class R>
  requires std::is_class_v<R>
  void field(std::string_view, R& record) { visit_fields(*this, record); }

 private:
  ByteView take(std::size_t count) {
    if (!ok_ || count > in_.size()) {
      ok_ = false;
      return {};
    }
    const ByteView out = in_.first(count);
    in_ = in_.subspan(count);
    return out;
  }
  template <std::unsigned_integral T>
  void integer(T& v) {
    const ByteView bytes = take(sizeof(T));
    if (ok_) v = get_le<T>(bytes.data());
  }
  ByteView counted() {
    U32 count = 0;
    integer(count);
    return take(count);
  }
  template <std::size_t N>
  void raw(std::array<std::byte, N>& v) {
    const ByteView bytes = take(N);
    if (ok_) std::copy(bytes.begin(), bytes.end(), v.begin());
  }

  ByteView in_;
  bool ok_ = true;
};

template <class M>
[[nodiscard]] Bytes body_encode(const M& message) {
  Bytes body;
  Encoder encoder(body);
  visit_fields(encoder, message);
  return body;
}

template <class M>
[[nodiscard]] Decoded<M> body_decode(ByteView body) {
  Decoder decoder(body);
  M message{};
  visit_fields(decoder, message);
  if (!decoder.ok()) return Fault::field_range;
  if (decoder.left() != 0) return Fault::trailing_bytes;
  return message;
}

// "meta_match{root=00.. keys=[..]}": for debug logs and tests.  Token ids and text are not printed
// (prompts are never logged): lists and blobs show their length only.
[[nodiscard]] std::string describe(U16 number, ByteView body);

// Decodes `body` as message `number` and encodes it again; Fault::number for an unknown one.  The
// fuzz target and the golden test hold encode(decode(x)) == x against it.
[[nodiscard]] Decoded<Bytes> reencode(U16 number, ByteView body);

}  // namespace di::wire
