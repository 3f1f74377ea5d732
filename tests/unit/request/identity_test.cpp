#include "request/identity.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace di::request {
namespace {

std::uint32_t id_of(const std::string& instance) {
  static const std::vector<std::string> names{"p.0", "p.1", "d.0", "d.1"};
  return 1 + static_cast<std::uint32_t>(std::find(names.begin(), names.end(), instance) - names.begin());
}

wire::Member rank(const std::string& instance, std::uint8_t revision, std::uint32_t block_tokens = 4) {
  wire::Member member;
  member.instance = instance;
  member.id = id_of(instance);
  member.layout = kv::layout_mla("test", block_tokens, 2, 16)->descriptor();
  member.revision.raw[0] = static_cast<std::byte>(revision);
  return member;
}

using Joined = Identity::Joined;

TEST(Identity, TheFirstRankSaysWhatItIs) {
  Identity identity;
  EXPECT_EQ(*identity.join(rank("p.0", 1)), Joined::first);
  EXPECT_EQ(*identity.join(rank("d.0", 1)), Joined::same);
  EXPECT_EQ(identity.layout().block_tokens(), 4U);
  EXPECT_EQ(identity.revision().raw[0], std::byte{1});
  EXPECT_FALSE(identity.script());
}

TEST(Identity, NewWeightsAfterAllRanksWereAwayHadTheNamesOfTheOldOnes) {
  Identity identity;
  ASSERT_TRUE(identity.join(rank("p.0", 1)));
  ASSERT_TRUE(identity.join(rank("d.0", 1)));
  identity.leave(id_of("p.0"));
  EXPECT_EQ(identity.join(rank("p.0", 2)).error().code, Code::exists);  // d.0 still has the old ones
  EXPECT_EQ(identity.revision().raw[0], std::byte{1});
  identity.leave(id_of("d.0"));
  EXPECT_EQ(*identity.join(rank("p.0", 2)), Joined::other);
  EXPECT_EQ(identity.revision().raw[0], std::byte{2});
  EXPECT_EQ(identity.join(rank("d.0", 1)).error().code, Code::exists);
  EXPECT_EQ(*identity.join(rank("d.0", 2)), Joined::same);
}

// It was never used: it has said its credit and says none again before that changes.
TEST(Identity, WhoWasRefusedBesideOldRanksComesUpAnewWhenTheLastOfThemIsGone) {
  using Ids = std::vector<std::uint32_t>;
  Identity identity;
  ASSERT_TRUE(identity.join(rank("p.0", 1)));
  ASSERT_TRUE(identity.join(rank("d.0", 1)));
  for (const char* name : {"p.1", "d.1"}) {
    EXPECT_EQ(identity.join(rank(name, 2)).error().code, Code::exists);
    EXPECT_TRUE(identity.waits(id_of(name)));
  }
  EXPECT_EQ(identity.leave(id_of("p.0")), Ids{}) << "an old one is there";
  EXPECT_EQ(identity.leave(id_of("other")), Ids{});
  EXPECT_EQ(identity.leave(id_of("d.0")), (Ids{id_of("p.1"), id_of("d.1")}));
  // Each is lost and comes up.
  EXPECT_EQ(identity.leave(id_of("p.1")), Ids{});
  EXPECT_FALSE(identity.waits(id_of("p.1")));
  EXPECT_TRUE(identity.waits(id_of("d.1")));
  EXPECT_EQ(*identity.join(rank("p.1", 2)), Joined::other);
  EXPECT_EQ(identity.leave(id_of("d.1")), Ids{});
  EXPECT_EQ(*identity.join(rank("d.1", 2)), Joined::same);
  EXPECT_FALSE(identity.waits(id_of("d.1")));
  EXPECT_EQ(identity.join(rank("d.0", 1)).error().code, Code::exists) << "now the old ones wait";
  EXPECT_EQ(identity.leave(id_of("d.0")), Ids{});
  EXPECT_EQ(identity.leave(id_of("p.1")), Ids{});
  EXPECT_EQ(identity.leave(id_of("d.1")), Ids{}) << "whoever waited has left";
}

TEST(Identity, WhoWaitsAndComesWithAnotherModelIsJudgedAnew) {
  Identity identity;
  ASSERT_TRUE(identity.join(rank("p.0", 1)));
  EXPECT_FALSE(identity.join(rank("p.1", 2)));
  EXPECT_EQ(*identity.join(rank("p.1", 1)), Joined::same);
  EXPECT_FALSE(identity.waits(id_of("p.1")));
  EXPECT_FALSE(identity.join(rank("d.0", 2)));
  EXPECT_FALSE(identity.join(rank("d.1", 3)));
  identity.leave(id_of("p.0"));
  EXPECT_EQ(identity.leave(id_of("p.1")).size(), 2U);
  // The first of them decides.
  EXPECT_EQ(*identity.join(rank("d.1", 3)), Joined::other);
  EXPECT_EQ(identity.join(rank("d.0", 2)).error().code, Code::exists);
  EXPECT_EQ(identity.leave(id_of("d.1")), (std::vector<std::uint32_t>{id_of("d.0")}));
}

TEST(Identity, TheSameModelComesBackAsTheSame) {
  Identity identity;
  ASSERT_TRUE(identity.join(rank("p.0", 1)));
  identity.leave(id_of("p.0"));
  EXPECT_EQ(*identity.join(rank("p.0", 1)), Joined::same);
  EXPECT_EQ(*identity.join(rank("p.0", 1)), Joined::same);   // another connection
  EXPECT_EQ(*identity.join(rank("p.0", 2)), Joined::other);  // another process under the name
}

TEST(Identity, ALayoutCountsToo) {
  Identity identity;
  ASSERT_TRUE(identity.join(rank("p.0", 1)));
  EXPECT_EQ(identity.join(rank("p.1", 1, 8)).error().code, Code::exists);
  identity.leave(id_of("p.0"));
  wire::Member unread = rank("p.1", 1);
  unread.layout.resize(3);
  EXPECT_EQ(identity.join(unread).error().code, Code::invalid);
  EXPECT_EQ(*identity.join(rank("p.1", 1, 8)), Joined::other);
  EXPECT_EQ(identity.layout().block_tokens(), 8U);
  identity.leave(id_of("p.1"));
  wire::Member script = rank("p.1", 1, 8);
  script.role = "script";
  EXPECT_EQ(*identity.join(script), Joined::other);
  EXPECT_TRUE(identity.script());
}

}  // namespace
}  // namespace di::request
