#include <gtest/gtest.h>

#include "tests/unit/net/fleet.h"

namespace di::net {
namespace {

TEST(Linked, IsSymmetricAndOneSideConnects) {
  std::vector<Member> all;
  PeerId id = 0;
  for (const char* host : {"a", "b"}) {
    const std::string h(host);
    all.push_back(member(++id, 1, "di-router." + h, "", h));
    all.push_back(member(++id, 1, "di-prefill." + h, "", h));
    all.push_back(member(++id, 1, "di-decode." + h, "", h));
    all.push_back(member(++id, 1, "di-kvd.host" + h, "host", h));
    all.push_back(member(++id, 1, "di-kvd.store" + h, "store", h));
  }
  all.push_back(member(++id, 1, "di-meta.0"));
  for (const Member& a : all) {
    EXPECT_FALSE(linked(a, a));
    for (const Member& b : all) {
      EXPECT_EQ(linked(a, b), linked(b, a)) << a.instance << " " << b.instance;
      if (a.id == b.id) continue;
      EXPECT_NE(connects(a, b), connects(b, a)) << a.instance << " " << b.instance;
      if (a.program == "di-meta" || b.program == "di-meta") {
        EXPECT_TRUE(linked(a, b)) << a.instance << " " << b.instance;
      }
    }
  }
}

TEST(Linked, RanksTalkToTheHostDaemonOfTheirOwnHost) {
  const Member decode = member(1, 1, "di-decode.0", "", "a");
  EXPECT_TRUE(linked(decode, member(2, 1, "di-kvd.host0", "host", "a")));
  EXPECT_FALSE(linked(decode, member(3, 1, "di-kvd.host1", "host", "b")));
  EXPECT_FALSE(linked(decode, member(4, 1, "di-kvd.store0", "store", "a")));
  EXPECT_FALSE(linked(decode, member(5, 1, "di-prefill.0", "", "a")));
  EXPECT_TRUE(linked(decode, member(6, 1, "di-router.0", "", "b")));
}

}  // namespace
}  // namespace di::net
