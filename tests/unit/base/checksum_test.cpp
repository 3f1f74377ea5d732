#include "base/checksum.h"

#include <gtest/gtest.h>

namespace di {
namespace {

TEST(Checksum, PublishedVectors) {
  // RFC 3720, appendix B.4.
  EXPECT_EQ(crc32c(Bytes(32, std::byte{0})), 0x8a9136aaU);
  EXPECT_EQ(crc32c(Bytes(32, std::byte{0xff})), 0x62a8ab43U);
  EXPECT_EQ(crc32c(as_bytes("123456789")), 0xe3069283U);
  EXPECT_EQ(crc32c({}), 0U);
}

TEST(Checksum, ExtendEqualsWhole) {
  EXPECT_EQ(crc32c_extend(crc32c(as_bytes("12345")), as_bytes("6789")), crc32c(as_bytes("123456789")));
}

}  // namespace
}  // namespace di
