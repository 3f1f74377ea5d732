#include "base/bytes.h"

#include <gtest/gtest.h>

#include <array>

namespace di {
namespace {

TEST(Bytes, LittleEndianRoundTrip) {
  std::array<std::byte, 8> raw{};
  put_le<std::uint64_t>(raw.data(), 0x0102030405060708ULL);
  EXPECT_EQ(std::to_integer<int>(raw[0]), 8);
  EXPECT_EQ(get_le<std::uint64_t>(raw.data()), 0x0102030405060708ULL);
  EXPECT_EQ(get_le<std::uint16_t>(raw.data()), 0x0708);
}

TEST(Bytes, HexRefusesOddAndForeign) {
  Bytes out;
  EXPECT_FALSE(from_hex("abc", out));
  EXPECT_FALSE(from_hex("zz", out));
  ASSERT_TRUE(from_hex("f09F", out));
  EXPECT_EQ(to_hex(out), "f09f");
}

TEST(Bytes, AlignUp) {
  EXPECT_EQ(align_up(0, 4096), 0U);
  EXPECT_EQ(align_up(1, 4096), 4096U);
  EXPECT_EQ(align_up(4096, 4096), 4096U);
}

}  // namespace
}  // namespace di
