#include "transfer/verbs_message.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace di::transfer {
namespace {

VerbsSetup some_setup() {
  VerbsSetup setup;
  setup.peer = {"di-kvd.host0", 7};
  VerbsAddress lane;
  lane.qpn = 0x123456;
  lane.psn = 0xabcdef;
  lane.lid = 9;
  lane.mtu = 5;
  lane.reads_max = 16;
  lane.gid[15] = 3;
  setup.rails = 3;
  setup.lanes = {{0, lane}, {2, lane}};
  setup.lanes[1].address.global = false;
  setup.memories = {{0x7f0000000000, 2ull << 30, {1, 2}}, {0x7f0080000000, 4096, {3, 4}}};
  return setup;
}

VerbsMessage some_message() {
  VerbsMessage message;
  message.kind = VerbsKind::write;
  message.tag = 0x01020304;
  message.transfer = 0x1112131415161718;
  message.slot = {5, 6};
  message.offset = 4096;
  message.memory_offset = 1 << 20;
  message.memory = 2;
  message.bytes = 65536;
  return message;
}

TEST(VerbsMessage, set_up_comes_back) {
  const VerbsSetup setup = some_setup();
  const auto decoded = verbs_setup_decode(verbs_setup_encode(setup));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(*decoded, setup);
}

TEST(VerbsMessage, set_up_of_another_length_is_corrupt) {
  Bytes bytes = verbs_setup_encode(some_setup());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(verbs_setup_decode(ByteView(bytes).first(length)).ok()) << length;
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(verbs_setup_decode(bytes).ok());
}

TEST(VerbsMessage, set_up_out_of_range_is_corrupt) {
  const auto refused = [](auto change) {
    VerbsSetup setup = some_setup();
    change(setup);
    return !verbs_setup_decode(verbs_setup_encode(setup)).ok();
  };
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.lanes[0].address.qpn = 1 << 24; }));
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.lanes[1].address.psn = 1 << 24; }));
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.lanes[1].address.mtu = 6; }));
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.rails = 1; })) << "fewer than lanes";
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.rails = verbs_lanes_max + 1; }));
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.lanes[1].rail = 3; })) << "no such rail";
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.lanes[1].rail = 0; })) << "twice the same";
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.memories[0].bytes = 0; }));
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.memories[0].bytes = verbs_region_bytes_max + 1; }));
  EXPECT_TRUE(refused([](VerbsSetup& s) { s.memories[1].address = UINT64_MAX - 1; }));
}

TEST(VerbsMessage, damaged_set_up_never_does_harm) {
  const std::uint64_t seed = 20261130;
  RecordProperty("seed", std::to_string(seed));
  Rng rng(seed);
  const Bytes whole = verbs_setup_encode(some_setup());
  for (int i = 0; i < 20000; ++i) {
    Bytes bytes = whole;
    for (std::uint64_t n = 1 + rng.below(4); n > 0; --n)
      bytes[rng.below(bytes.size())] = std::byte(rng.below(256));
    bytes.resize(rng.below(bytes.size() + 1));
    const auto decoded = verbs_setup_decode(bytes);
    if (decoded) {
      EXPECT_LE(decoded->memories.size(), verbs_memories_max);
    }
  }
}

TEST(VerbsMessage, message_comes_back_and_has_its_bytes_where_the_header_says) {
  const VerbsMessage message = some_message();
  const auto bytes = verbs_message_encode(message);
  EXPECT_EQ(to_hex(bytes),
            "0200000004030201181716151413121105000000060000000010000000000000"
            "00001000000000000200000000000100");
  const auto decoded = verbs_message_decode(bytes);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(*decoded, message);
}

TEST(VerbsMessage, message_that_is_none_is_corrupt) {
  const auto whole = verbs_message_encode(some_message());
  EXPECT_FALSE(verbs_message_decode(ByteView(whole).first(47)).ok());
  const auto refused = [&](std::size_t at, int value) {
    auto bytes = whole;
    bytes[at] = std::byte(value);
    return !verbs_message_decode(bytes).ok();
  };
  EXPECT_TRUE(refused(0, 0));
  EXPECT_TRUE(refused(0, 4));
  EXPECT_TRUE(refused(0, 3)) << "an answer that asks for something";
  EXPECT_TRUE(refused(1, 1));
  EXPECT_TRUE(refused(2, 1)) << "a request with a code";
  EXPECT_TRUE(refused(3, 200)) << "a code that nobody knows";
  VerbsMessage nothing = some_message();
  nothing.bytes = 0;
  EXPECT_FALSE(verbs_message_decode(verbs_message_encode(nothing)).ok());
}

}  // namespace
}  // namespace di::transfer
