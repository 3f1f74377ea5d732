#include "base/crypto.h"

#include <gtest/gtest.h>

namespace di {
namespace {

TEST(Crypto, Sha256Vectors) {
  EXPECT_EQ(to_hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(to_hex(sha256(as_bytes("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Crypto, IncrementalAndReuse) {
  Sha256 hash;
  hash.update(as_bytes("a"));
  hash.update(as_bytes("bc"));
  EXPECT_EQ(hash.finish(), sha256(as_bytes("abc")));
  hash.update(as_bytes("abc"));
  EXPECT_EQ(hash.finish(), sha256(as_bytes("abc")));
}

TEST(Crypto, HmacVector) {  // RFC 4231, case 2
  EXPECT_EQ(to_hex(hmac_sha256(as_bytes("Jefe"), as_bytes("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(Crypto, RandomDiffers) {
  EXPECT_NE(random_u64(), random_u64());
}

}  // namespace
}  // namespace di
