#include "transfer/seal.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/rng.h"

namespace di::transfer {
namespace {

SealKey key_of(std::uint8_t first) {
  SealKey key{};
  key[0] = first;
  return key;
}

struct Sealed {
  Bytes text;
  SealTag tag;
};

Sealed seal(Sealer& sealer, ByteView authenticated, ByteView text, std::size_t piece) {
  Sealed sealed{Bytes(text.size()), {}};
  sealer.begin(authenticated);
  for (std::size_t at = 0; at < text.size(); at += piece) {
    const std::size_t bytes = std::min(piece, text.size() - at);
    sealer.update(text.subspan(at, bytes), MutableByteView(sealed.text).subspan(at, bytes));
  }
  sealed.tag = sealer.finish();
  return sealed;
}

bool open(Opener& opener, ByteView authenticated, const Sealed& sealed, Bytes& text) {
  text.resize(sealed.text.size());
  opener.begin(authenticated);
  opener.update(sealed.text, text);
  return opener.finish(sealed.tag);
}

TEST(SealTest, what_is_sealed_opens_in_whatever_pieces) {
  Rng rng(7);
  Sealer sealer(key_of(1), SealDirection::from_dialler);
  Opener opener(key_of(1), SealDirection::from_dialler);
  for (const std::size_t bytes : {0u, 1u, 16u, 64u, 1000u, 70000u}) {
    Bytes text(bytes);
    for (std::byte& each : text) each = static_cast<std::byte>(rng.next());
    const Bytes head(24, std::byte{3});
    const Sealed sealed = seal(sealer, head, text, bytes % 2 == 0 ? 48 : 7);
    if (bytes >= 16) {
      EXPECT_NE(sealed.text, text);
    }
    Bytes got;
    EXPECT_TRUE(open(opener, head, sealed, got));
    EXPECT_EQ(got, text);
  }
}

// Whichever library did it: key 01 00..., nonce (1, 0), 3 bytes of 03 beside, the text "sealed".
TEST(SealTest, bytes_on_the_wire_are_these) {
  Sealer sealer(key_of(1), SealDirection::from_dialler);
  const Sealed sealed = seal(sealer, Bytes(3, std::byte{3}), as_bytes("sealed"), 4);
  EXPECT_EQ(to_hex(sealed.text), "79da9413cedc");
  EXPECT_EQ(to_hex(sealed.tag), "a432d8bd1bd39ae0d66e746c4ff2a7d2");
}

TEST(SealTest, any_flipped_bit_is_seen) {
  const Bytes text(40, std::byte{9});
  const Bytes head(64, std::byte{3});
  for (std::size_t bit = 0; bit < (64 + 40 + 16) * 8; bit += 5) {
    Sealer sealer(key_of(1), SealDirection::from_dialler);
    Opener opener(key_of(1), SealDirection::from_dialler);
    Sealed sealed = seal(sealer, head, text, 40);
    Bytes seen = head;
    const std::size_t at = bit / 8;
    const auto flip = static_cast<std::byte>(1u << (bit % 8));
    if (at < 64) {
      seen[at] ^= flip;
    } else if (at < 104) {
      sealed.text[at - 64] ^= flip;
    } else {
      sealed.tag[at - 104] ^= flip;
    }
    Bytes got;
    EXPECT_FALSE(open(opener, seen, sealed, got)) << bit;
  }
}

TEST(SealTest, repeated_swapped_reflected_and_foreign_messages_are_seen) {
  const Bytes text(40, std::byte{9});
  Sealer sealer(key_of(1), SealDirection::from_dialler);
  const Sealed first = seal(sealer, {}, text, 40);
  const Sealed second = seal(sealer, {}, text, 40);
  EXPECT_NE(first.text, second.text) << "a nonce was used twice";
  Bytes got;
  {
    Opener opener(key_of(1), SealDirection::from_dialler);
    EXPECT_FALSE(open(opener, {}, second, got));
  }
  {
    Opener opener(key_of(1), SealDirection::from_dialler);
    EXPECT_TRUE(open(opener, {}, first, got));
    EXPECT_FALSE(open(opener, {}, first, got));
  }
  {
    Opener opener(key_of(1), SealDirection::from_acceptor);
    EXPECT_FALSE(open(opener, {}, first, got));
  }
  {
    Opener opener(key_of(2), SealDirection::from_dialler);
    EXPECT_FALSE(open(opener, {}, first, got));
  }
}

}  // namespace
}  // namespace di::transfer
