#include "wire/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "base/rng.h"

namespace di::wire {
namespace {

// Fills every field with values that depend on its place, so that swapped fields differ.
class Fill {
 public:
  void field(std::string_view, U8& v) { v = static_cast<U8>(next() % 200); }
  void field(std::string_view, U16& v) { v = static_cast<U16>(next()); }
  void field(std::string_view, U32& v) { v = static_cast<U32>(next() * 65537); }
  void field(std::string_view, U64& v) { v = next() * 0x100000001ULL; }
  void field(std::string_view, F32& v) { v = static_cast<F32>(next()) / 4; }
  void field(std::string_view, F64& v) { v = static_cast<F64>(next()) / 8; }
  void field(std::string_view, Flag& v) { v = next() % 2 == 1; }
  void field(std::string_view name, Text& v) { v = std::string(name) + std::to_string(next()); }
  void field(std::string_view, Blob& v) { v.assign(next() % 5 + 1, static_cast<std::byte>(next())); }
  void field(std::string_view, Key& v) { v.raw.fill(static_cast<std::byte>(next())); }
  void field(std::string_view, RequestId& v) { v.raw.fill(static_cast<std::byte>(next())); }
  template <class T>
  requires(!std::same_as<T, std::byte>) void field(std::string_view name, List<T>& v) {
    v.resize(2);
    for (T& item : v) field(name, item);
  }
  template <class R>
  requires std::is_class_v<R>
  void field(std::string_view, R& record) { visit_fields(*this, record); }

 private:
  U64 next() { return ++count_; }
  U64 count_ = 0;
};

template <class M>
M filled() {
  M message{};
  Fill fill;
  visit_fields(fill, message);
  return message;
}

Header sample_header(U16 number) {
  Header header;
  header.number = number;
  header.cluster = 7;
  header.sender = 3;
  header.sender_generation = 11;
  header.destination_generation = 12;
  header.request.raw.fill(std::byte{0xab});
  header.attempt = 2;
  header.rank = 5;
  header.deadline_ms = 1500;
  return header;
}

std::string golden_path(std::string_view name) {
  return std::string(DI_SOURCE_DIR) + "/tests/golden/wire/" + std::string(name) + ".hex";
}

template <class M>
void check_message() {
  SCOPED_TRACE(M::message_name);
  const M message = filled<M>();
  const Bytes body = body_encode(message);
  Decoded<M> back = body_decode<M>(body);
  ASSERT_TRUE(back);
  EXPECT_EQ(*back, message);

  // Golden frame: changing bytes without changing the version fails here.
  const auto header = header_encode(sample_header(M::number), body);
  const std::string text = to_hex(header) + "\n" + to_hex(body) + "\n";
  if (std::getenv("DI_GOLDEN_WRITE") != nullptr) std::ofstream(golden_path(M::message_name)) << text;
  std::ifstream in(golden_path(M::message_name));
  std::stringstream golden;
  golden << in.rdbuf();
  EXPECT_EQ(text, golden.str());

  // Every truncation is refused, and so is one byte more.
  for (std::size_t cut = 0; cut < body.size(); ++cut) {
    EXPECT_FALSE(body_decode<M>(ByteView(body).first(cut))) << cut;
  }
  Bytes longer = body;
  longer.push_back(std::byte{0});
  Decoded<M> trailing = body_decode<M>(longer);
  ASSERT_FALSE(trailing);
  EXPECT_EQ(trailing.fault(), Fault::trailing_bytes);
  EXPECT_NE(describe(M::number, body).find(M::message_name), std::string::npos);
}

TEST(Codec, EveryMessageRoundTripsAndMatchesItsGoldenFrame) {
#define DI_RECORD(name, sentence)
#define DI_MESSAGE(name, number_, since_, route, sentence) check_message<name>();
#define DI_FIELD(type, name, unit, sentence)
#define DI_END(name)
#include "wire/messages.def"
}

TEST(Codec, NumbersAndNamesAreUnique) {
  std::set<U16> numbers;
  std::set<std::string_view> names;
  for (const MessageInfo& info : message_table()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_TRUE(info.is_record || numbers.insert(info.number).second) << info.name;
    EXPECT_FALSE(info.sentence.empty());
    for (const FieldInfo& field : info.fields)
      EXPECT_FALSE(field.sentence.empty()) << info.name << field.name;
  }
  EXPECT_EQ(message_name(meta_match::number), "meta_match");
  EXPECT_EQ(message_name(0xfff0), "");
}

TEST(Header, RoundTripAndEveryBitFlipIsRefused) {
  const Bytes body = body_encode(filled<meta_match>());
  const auto raw = header_encode(sample_header(meta_match::number), body);
  Decoded<Header> back = header_decode(raw, body);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->request, sample_header(0).request);
  EXPECT_EQ(back->rank, 5);
  EXPECT_EQ(back->deadline_ms, 1500U);
  for (std::size_t bit = 0; bit < header_bytes * 8; ++bit) {
    auto flipped = raw;
    flipped[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(header_decode(flipped, body)) << bit;
  }
  Bytes other = body;
  other[0] ^= std::byte{1};
  Decoded<Header> wrong = header_decode(raw, other);
  ASSERT_FALSE(wrong);
  EXPECT_EQ(wrong.fault(), Fault::body_checksum);
  EXPECT_EQ(header_decode(ByteView(raw).first(63), body).fault(), Fault::header_short);
  EXPECT_EQ(header_decode(raw, ByteView(body).first(3)).fault(), Fault::body_length);
}

TEST(Codec, HostileCountAllocatesNothing) {
  Bytes body(4, std::byte{0xff});  // a list of 2^32-1 leases in four bytes
  EXPECT_EQ(body_decode<meta_release>(body).fault(), Fault::field_range);
}

TEST(Codec, UnknownNumber) {
  EXPECT_EQ(reencode(0x7777, {}).fault(), Fault::number);
  EXPECT_TRUE(reencode(meta_arena_resync::number, {}));
}

}  // namespace
}  // namespace di::wire
