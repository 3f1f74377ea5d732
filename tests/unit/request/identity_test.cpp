#include "request/identity.h"

#include <gtest/gtest.h>

namespace di::request {
namespace {

wire::Member rank(const std::string& instance, std::uint8_t revision, std::uint32_t block_tokens = 4) {
  wire::Member member;
  member.instance = instance;
  member.layout = kv::layout_mla("test", block_tokens, 2, 16)->descriptor();
  member.revision.raw[0] = static_cast<std::byte>(revision);
  return member;
}

using Joined = Identity::Joined;

TEST(Identity, TheFirstRankSaysWhatItIs) {
  Identity identity;
  EXPECT_TRUE(identity.alone());
  EXPECT_EQ(*identity.join(rank("p.0", 1)), Joined::first);
  EXPECT_EQ(*identity.join(rank("d.0", 1)), Joined::same);
  EXPECT_EQ(identity.layout().block_tokens(), 4U);
  EXPECT_EQ(identity.revision().raw[0], std::byte{1});
  EXPECT_FALSE(identity.script());
  EXPECT_FALSE(identity.alone());
}

TEST(Identity, NewWeightsAfterAllRanksWereAwayHadTheNamesOfTheOldOnes) {
  Identity identity;
  ASSERT_TRUE(identity.join(rank("p.0", 1)));
  ASSERT_TRUE(identity.join(rank("d.0", 1)));
  identity.leave("p.0");
  EXPECT_EQ(identity.join(rank("p.0", 2)).error().code, Code::exists);  // d.0 still has the old ones
  EXPECT_EQ(identity.revision().raw[0], std::byte{1});
  identity.leave("d.0");
  EXPECT_TRUE(identity.alone());
  EXPECT_EQ(*identity.join(rank("p.0", 2)), Joined::other);
  EXPECT_EQ(identity.revision().raw[0], std::byte{2});
  EXPECT_EQ(identity.join(rank("d.0", 1)).error().code, Code::exists);
  EXPECT_EQ(*identity.join(rank("d.0", 2)), Joined::same);
}

TEST(Identity, TheSameModelComesBackAsTheSame) {
  Identity identity;
  ASSERT_TRUE(identity.join(rank("p.0", 1)));
  identity.leave("p.0");
  EXPECT_EQ(*identity.join(rank("p.0", 1)), Joined::same);
  EXPECT_EQ(*identity.join(rank("p.0", 1)), Joined::same);   // another connection
  EXPECT_EQ(*identity.join(rank("p.0", 2)), Joined::other);  // another process under the name
  EXPECT_FALSE(identity.alone());
}

TEST(Identity, ALayoutCountsToo) {
  Identity identity;
  ASSERT_TRUE(identity.join(rank("p.0", 1)));
  EXPECT_EQ(identity.join(rank("p.1", 1, 8)).error().code, Code::exists);
  identity.leave("p.0");
  wire::Member unread = rank("p.1", 1);
  unread.layout.resize(3);
  EXPECT_EQ(identity.join(unread).error().code, Code::invalid);
  EXPECT_EQ(*identity.join(rank("p.1", 1, 8)), Joined::other);
  EXPECT_EQ(identity.layout().block_tokens(), 8U);
  identity.leave("p.1");
  wire::Member script = rank("p.1", 1, 8);
  script.role = "script";
  EXPECT_EQ(*identity.join(script), Joined::other);
  EXPECT_TRUE(identity.script());
}

}  // namespace
}  // namespace di::request
