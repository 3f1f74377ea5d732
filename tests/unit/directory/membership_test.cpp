#include "directory/membership.h"

#include <gtest/gtest.h>

#include "kv/layout.h"

namespace di::directory {
namespace {

Instant at_ms(int ms) {
  return Instant{} + milliseconds(ms);
}

wire::meta_register router(const std::string& name, std::uint64_t boot) {
  wire::meta_register message;
  message.self.instance = "di-router." + name;
  message.self.program = "di-router";
  message.self.host = "a.example";
  message.self.control = "ipc:///run/di/router.sock";
  message.boot = boot;
  return message;
}

wire::meta_register prefill(const std::string& name, std::uint64_t boot) {
  wire::meta_register message = router(name, boot);
  message.self.instance = "di-prefill." + name;
  message.self.program = "di-prefill";
  message.self.ranks = 1;
  message.self.model = "demo";
  const kv::Layout layout = kv::layout_v41();
  message.self.layout = layout.descriptor();
  message.self.fingerprint = layout.fingerprint();
  message.self.revision.raw[0] = std::byte{1};
  return message;
}

// What the shell does between judge and admit.
std::uint32_t enter(Membership& members, std::vector<InstanceRow>& rows, const wire::meta_register& message,
                    Instant now, Membership::Change* change = nullptr) {
  const auto admission = members.judge(message);
  EXPECT_TRUE(admission) << admission.error().message;
  if (!admission) return 0;
  if (admission->row_changed) {
    std::erase_if(rows, [&](const InstanceRow& row) { return row.instance == admission->row.instance; });
    rows.push_back(admission->row);
  }
  const Membership::Change result = members.admit(*admission, now);
  if (change != nullptr) *change = result;
  return admission->row.generation;
}

void lose(Membership& members, const std::string& instance) {
  for (const wire::Member& member : members.members()) {
    if (member.instance == instance) members.lost(member.id, member.generation);
  }
}

std::string reason(const Membership& members, const wire::meta_register& message) {
  const auto admission = members.judge(message);
  return admission ? "" : admission.error().message;
}

// G13: who returns under its old name is another process.
TEST(Membership, GenerationsGrowAndTheOldProcessDoesNotTakeOver) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  EXPECT_EQ(enter(members, rows, router("0", 11), at_ms(0)), 1U);
  const std::uint64_t epoch = members.epoch();
  EXPECT_EQ(members.lost(members.members().front().id, 1).lost, (std::vector<Holder>{{"di-router.0", 1}}));
  EXPECT_EQ(enter(members, rows, router("0", 22), at_ms(1)), 2U);
  EXPECT_GT(members.epoch(), epoch);
  EXPECT_EQ(members.count(), 1U);

  // The replaced process is still alive and comes back with what it was told: it does not take over.
  wire::meta_register replaced = router("0", 11);
  replaced.self.generation = 1;
  const auto refused = members.judge(replaced);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::stale);
}

// A second process that was started under the name ended the one that served, and its streams with it.
TEST(Membership, ANameIsTakenUntilItsProcessIsLostOrLeaves) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  enter(members, rows, router("0", 11), at_ms(0));
  const wire::Member holder = members.members().front();
  const std::uint64_t epoch = members.epoch();
  const auto refused = [&](const wire::meta_register& message) {
    const auto admission = members.judge(message);
    return !admission && admission.error().code == Code::busy &&
           admission.error().message ==
               "di-router.0 is taken by a process on a.example at ipc:///run/di/router.sock";
  };
  EXPECT_TRUE(refused(router("0", 22)));
  EXPECT_EQ(members.epoch(), epoch);
  // One that drains has work to end.
  members.set_state(holder.id, holder.generation, MemberState::draining);
  EXPECT_TRUE(refused(router("0", 22)));
  // The holder itself is welcome.
  EXPECT_EQ(enter(members, rows, router("0", 11), at_ms(10)), 1U);
  members.set_state(holder.id, holder.generation, MemberState::leaves);
  EXPECT_EQ(enter(members, rows, router("0", 22), at_ms(20)), 2U);
  // A frozen one is silent.
  EXPECT_TRUE(refused(router("0", 33)));
  members.step(at_ms(20) + member_lost_after);
  EXPECT_EQ(enter(members, rows, router("0", 33), at_ms(4000)), 3U);
  // A broken connection is known at once.
  members.lost(holder.id, 3);
  EXPECT_EQ(enter(members, rows, router("0", 44), at_ms(4001)), 4U);
}

TEST(Membership, RegisteringAgainIsHarmless) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  enter(members, rows, router("0", 11), at_ms(0));
  const std::uint64_t epoch = members.epoch();
  Membership::Change change;
  EXPECT_EQ(enter(members, rows, router("0", 11), at_ms(500), &change), 1U);
  EXPECT_FALSE(change.changed);
  EXPECT_TRUE(change.lost.empty());
  EXPECT_EQ(members.epoch(), epoch);
  wire::meta_register moved = router("0", 11);
  moved.self.control = "tcp://10.0.0.1:7000";
  EXPECT_EQ(enter(members, rows, moved, at_ms(600), &change), 1U);
  EXPECT_TRUE(change.changed);
  EXPECT_GT(members.epoch(), epoch);
}

TEST(Membership, RestartOfTheDirectoryKeepsGenerationsOfLiveProcesses) {
  std::vector<InstanceRow> rows;
  std::uint32_t id = 0;
  std::uint64_t epoch = 0;
  {
    Membership members({}, 1);
    enter(members, rows, router("0", 11), at_ms(0));
    lose(members, "di-router.0");
    enter(members, rows, router("0", 12), at_ms(0));
    enter(members, rows, router("1", 13), at_ms(0));
    id = members.members().front().id;
    epoch = members.epoch();
  }
  Membership members(rows, 2);
  EXPECT_GT(members.epoch(), epoch);
  wire::meta_register again = router("0", 12);
  again.self.generation = 2;
  EXPECT_EQ(enter(members, rows, again, at_ms(0)), 2U);
  EXPECT_EQ(members.members().front().id, id);
  // A process that was started while the directory was away.
  EXPECT_EQ(enter(members, rows, router("1", 99), at_ms(0)), 2U);
  // A new name never gets a number that was handed out before.
  enter(members, rows, router("2", 100), at_ms(0));
  std::set<std::uint32_t> ids;
  for (const wire::Member& member : members.members()) ids.insert(member.id);
  EXPECT_EQ(ids.size(), 3U);
}

TEST(Membership, LostCatalogueKeepsTheGenerationThatIsInUse) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  wire::meta_register again = router("0", 12);
  again.self.generation = 7;
  EXPECT_EQ(enter(members, rows, again, at_ms(0)), 7U);
  lose(members, "di-router.0");
  EXPECT_EQ(enter(members, rows, router("0", 13), at_ms(0)), 8U);
}

TEST(Membership, SilenceOfThreeSecondsIsLoss) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  enter(members, rows, router("0", 11), at_ms(0));
  enter(members, rows, router("1", 12), at_ms(1000));
  EXPECT_EQ(members.next_due(), at_ms(3000));
  EXPECT_FALSE(members.step(at_ms(2999)).changed);
  // Idle for long, but heard: no traffic is needed to stay (G10).
  const std::uint32_t id = members.members().back().id;
  members.heard(id, 1, at_ms(2500));
  const Membership::Change change = members.step(at_ms(3000));
  EXPECT_EQ(change.lost, (std::vector<Holder>{{"di-router.0", 1}}));
  EXPECT_FALSE(members.step(at_ms(5499)).changed);
  EXPECT_EQ(members.step(at_ms(5500)).lost, (std::vector<Holder>{{"di-router.1", 1}}));
  EXPECT_EQ(members.next_due(), instant_never);
  // It comes back with the generation it has.
  EXPECT_EQ(enter(members, rows, router("0", 11), at_ms(6000)), 1U);
}

TEST(Membership, WhoIsGoneIsRememberedUntilItIsBackOrForgotten) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  for (const char* name : {"0", "1", "2", "3"}) enter(members, rows, router(name, 11), at_ms(0));
  const auto id_of = [&](const std::string& name) {
    for (const wire::Member& member : members.members()) {
      if (member.instance == name) return member.id;
    }
    return 0U;
  };
  members.heard(id_of("di-router.0"), 1, at_ms(500));
  members.lost(id_of("di-router.0"), 1);
  members.set_state(id_of("di-router.1"), 1, MemberState::leaves);
  members.set_state(id_of("di-router.3"), 1, MemberState::draining);
  members.lost(id_of("di-router.3"), 1);
  EXPECT_TRUE(members.away().at("di-router.3").stopped);
  const auto kept = members.forget("di-router.3");
  ASSERT_TRUE(kept);
  EXPECT_FALSE(members.forget("di-router.3"));
  members.restore(*kept);
  EXPECT_EQ(members.away().size(), 3U);
  EXPECT_TRUE(members.forget("di-router.3")) << "the first time it stayed in the catalogue";
  ASSERT_EQ(members.away().size(), 2U);
  const Membership::Away& killed = members.away().at("di-router.0");
  EXPECT_EQ(killed.member.host, "a.example");
  EXPECT_EQ(killed.since, at_ms(500));
  EXPECT_FALSE(killed.stopped);
  EXPECT_TRUE(members.away().at("di-router.1").stopped);
  members.step(at_ms(3000));  // the third one was silent
  EXPECT_EQ(members.away().size(), 3U);
  EXPECT_EQ(members.count(), 0U);

  enter(members, rows, router("0", 12), at_ms(4000));
  EXPECT_FALSE(members.away().contains("di-router.0")) << "it is back";
  EXPECT_FALSE(members.forget("di-router.0"));
  EXPECT_TRUE(members.forget("di-router.1"));
  EXPECT_FALSE(members.forget("di-router.1"));
  members.heard(id_of("di-router.0"), 2, Instant{} + away_forgotten_after);
  members.step(Instant{} + away_forgotten_after - milliseconds(1));
  EXPECT_EQ(members.away().size(), 1U);
  members.step(Instant{} + away_forgotten_after);
  EXPECT_TRUE(members.away().empty());
}

TEST(Membership, WhatTheCatalogueHasSomethingOfIsAwayUntilItComes) {
  Membership members({{"di-kvd.store0", 7, 3, 11}}, 1);
  members.expect("di-kvd.store0", "store", at_ms(5));
  members.expect("di-kvd.store1", "store", at_ms(5));  // never had a number
  ASSERT_EQ(members.away().size(), 1U);
  const Membership::Away& expected = members.away().at("di-kvd.store0");
  EXPECT_EQ(expected.member.program, "di-kvd");
  EXPECT_EQ(expected.member.role, "store");
  EXPECT_EQ(expected.member.id, 7U);
  EXPECT_EQ(expected.member.generation, 3U);
  EXPECT_EQ(expected.since, at_ms(5));
  EXPECT_FALSE(expected.stopped);
}

TEST(Membership, OfTooManyThatAreGoneTheOldestAreForgotten) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  for (std::size_t i = 0; i <= away_max; ++i) {
    const int ms = static_cast<int>(i);
    enter(members, rows, router(std::to_string(i), i + 1), at_ms(ms));
    const wire::Member member = members.members().front();
    members.lost(member.id, member.generation);
  }
  EXPECT_EQ(members.away().size(), away_max);
  EXPECT_FALSE(members.away().contains("di-router.0"));
  EXPECT_TRUE(members.away().contains("di-router.1"));
}

TEST(Membership, ReconnectedMemberRejoinsWithItsGenerationOnly) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  enter(members, rows, router("0", 11), at_ms(0));
  const wire::Member first = members.members().front();
  members.lost(first.id, 1);
  EXPECT_TRUE(members.rejoin(first, at_ms(1)).changed);
  EXPECT_EQ(members.members().front(), first);
  EXPECT_FALSE(members.rejoin(first, at_ms(2)).changed);
  members.lost(first.id, 1);
  enter(members, rows, router("0", 12), at_ms(3));
  EXPECT_FALSE(members.rejoin(first, at_ms(4)).changed);
  EXPECT_EQ(members.members().front().generation, 2U);
  wire::Member stranger = first;
  stranger.instance = "di-router.9";
  EXPECT_FALSE(members.rejoin(stranger, at_ms(5)).changed);
}

TEST(Membership, TheDirectoryItselfIsNeverSilent) {
  Membership members({}, 1);
  wire::meta_register self = router("0", 11);
  self.self.instance = "di-meta.0";
  self.self.program = "di-meta";
  const auto admission = members.judge(self);
  ASSERT_TRUE(admission);
  members.admit_self(*admission);
  EXPECT_EQ(members.next_due(), instant_never);
  EXPECT_FALSE(members.step(at_ms(1000000)).changed);
}

TEST(Membership, StaleLossesAndStatesAreIgnored) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  enter(members, rows, router("0", 11), at_ms(0));
  lose(members, "di-router.0");
  enter(members, rows, router("0", 12), at_ms(0));
  const std::uint32_t id = members.members().front().id;
  EXPECT_FALSE(members.lost(id, 1).changed);
  EXPECT_FALSE(members.set_state(id, 1, MemberState::leaves).changed);
  EXPECT_TRUE(members.set_state(id, 2, MemberState::draining).changed);
  EXPECT_FALSE(members.set_state(id, 2, MemberState::draining).changed);
  EXPECT_EQ(members.members().front().state, 1);
  EXPECT_EQ(members.set_state(id, 2, MemberState::leaves).lost, (std::vector<Holder>{{"di-router.0", 2}}));
  EXPECT_EQ(members.count(), 0U);
  EXPECT_FALSE(members.lost(id, 2).changed);
}

TEST(Membership, AForgottenNameGivesItsRowBackAndNothingTwice) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  enter(members, rows, router("0", 11), at_ms(0));
  for (std::uint64_t boot = 12; boot < 16; ++boot) {
    lose(members, "di-router.1");
    enter(members, rows, router("1", boot), at_ms(0));
  }
  const wire::Member gone = members.members().back();
  EXPECT_EQ(gone.generation, 4U);
  EXPECT_FALSE(members.forget("di-router.1")) << "it is here";
  members.lost(gone.id, gone.generation);
  const auto forgotten = members.forget("di-router.1");
  ASSERT_TRUE(forgotten);
  EXPECT_EQ(forgotten->row, (InstanceRow{"di-router.1", gone.id, 4, 15}));
  EXPECT_TRUE(members.away().empty());
  std::erase_if(rows, [](const InstanceRow& row) { return row.instance == "di-router.1"; });
  EXPECT_EQ(members.issued(), (Issued{gone.id + 1, 4}));

  // After a restart too: another number, and a generation above those that the name has had.
  Membership restarted(rows, 2, members.issued());
  for (Membership* one : {&members, &restarted}) {
    const auto again = one->judge(router("1", 16));
    ASSERT_TRUE(again);
    EXPECT_EQ(again->row, (InstanceRow{"di-router.1", gone.id + 1, 5, 16}));
  }
  // The process itself, should it still be there, goes on with what it was told.
  wire::meta_register alive = router("1", 15);
  alive.self.id = gone.id;
  alive.self.generation = 4;
  ASSERT_TRUE(restarted.judge(alive));
  EXPECT_EQ(restarted.judge(alive)->row, forgotten->row);
  // Not with a number that is another's, or that was never issued.
  alive.self.id = restarted.judge(router("0", 11))->row.id;
  EXPECT_EQ(restarted.judge(alive)->row.id, gone.id + 1);
  alive.self.id = gone.id + 50;
  EXPECT_EQ(restarted.judge(alive)->row.id, gone.id + 1);
  alive.self.generation = said_generation_max + 1;
  EXPECT_NE(reason(restarted, alive), "");
}

// Pods with random names.
TEST(Membership, OfTooManyNamesThoseThatCameFirstGo) {
  std::vector<InstanceRow> rows;
  for (std::uint32_t i = 0; i < instance_rows_max; ++i)
    rows.push_back({"di-router." + std::to_string(i), 10 + i, 3, 1});
  Membership members(rows, 1);
  enter(members, rows, router("0", 1), at_ms(0));
  members.expect("di-router.1", "", at_ms(0));
  std::set<std::uint32_t> ids;
  for (int i = 0; i < 3; ++i) {
    const auto admission = members.judge(router("new" + std::to_string(i), 7));
    ASSERT_TRUE(admission) << admission.error().message;
    ASSERT_TRUE(admission->dropped);
    EXPECT_EQ(admission->dropped->instance, "di-router." + std::to_string(i + 2));
    EXPECT_EQ(admission->row.generation, i == 0 ? 1U : 4U);
    members.hold(*admission);
    EXPECT_TRUE(ids.insert(admission->row.id).second);
    EXPECT_GE(admission->row.id, 10 + instance_rows_max);
    // While the row is written, the name is not one to be dropped or forgotten.
    EXPECT_FALSE(members.forget(admission->row.instance));
    members.keep(admission->row);
    const auto again = members.judge(router("new" + std::to_string(i), 7));
    ASSERT_TRUE(again);
    EXPECT_FALSE(again->row_changed);
    members.admit(*again, at_ms(0));
  }
}

TEST(Membership, ANumberIsNobodyElsesWhileItsRowIsWritten) {
  Membership members({}, 1);
  const auto first = members.judge(router("0", 1));
  ASSERT_TRUE(first);
  members.hold(*first);
  EXPECT_EQ(members.count(), 0U);
  const auto second = members.judge(router("1", 2));
  ASSERT_TRUE(second);
  EXPECT_NE(second->row.id, first->row.id);
  wire::meta_register claims = router("2", 3);
  claims.self.id = first->row.id;
  claims.self.generation = 1;
  EXPECT_NE(members.judge(claims)->row.id, first->row.id);
}

// D03, D05: a rank that would hash or cut its blocks otherwise does not join.
TEST(Membership, OneModelHasOneLayoutAndOneRevision) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  enter(members, rows, prefill("0", 11), at_ms(0));
  wire::meta_register other = prefill("1", 12);
  EXPECT_EQ(reason(members, other), "");
  other.self.revision.raw[0] = std::byte{2};
  EXPECT_EQ(members.judge(other).error().code, Code::exists);
  EXPECT_EQ(
      reason(members, other),
      "model demo is served by di-prefill.0 already: this one has weight revision 0200000000000000, not "
      "0100000000000000 as di-prefill.0 has");
  wire::meta_register laid_out = prefill("1", 12);
  const auto layout = kv::layout_mla("mla-f32-1", 32, 4, 64);
  ASSERT_TRUE(layout);
  laid_out.self.layout = layout->descriptor();
  laid_out.self.fingerprint = layout->fingerprint();
  EXPECT_NE(reason(members, laid_out).find("this one has layout"), std::string::npos);
  // Another model may be laid out as it likes, and the model may change when nobody serves it.
  laid_out.self.model = "other";
  EXPECT_EQ(reason(members, laid_out), "");
  wire::meta_register upgraded = prefill("0", 11);
  upgraded.self.revision.raw[0] = std::byte{2};
  EXPECT_EQ(reason(members, upgraded), "");
  // Who was refused asks again, and may when the last of the others is gone.
  EXPECT_FALSE(members.judge(other));
  const std::uint32_t gone = rows.at(0).id;
  members.lost(gone, rows.at(0).generation);
  EXPECT_EQ(reason(members, other), "");
}

// G12.
TEST(Membership, MalformedRegistrationsAreRefusedWithTheRule) {
  Membership members({}, 1);
  const auto with = [](auto change) {
    wire::meta_register message = prefill("0", 11);
    change(message);
    return message;
  };
  for (const char* name : {"di-prefill.a/../b", "di-prefill.a/b", "di-prefill.a:b", "di-prefill.",
                           "di-prefill", "", "di-prefill.a\nb", "di-decode.0", "di-prefill.a.b"}) {
    EXPECT_NE(reason(members, with([&](auto& m) { m.self.instance = name; })), "") << name;
  }
  EXPECT_NE(reason(members, with([](auto& m) { m.self.instance = "di-prefill." + std::string(300, 'x'); })),
            "");
  for (const char* name : {"di-prefill.0", "di-prefill.host0", "di-prefill.a-b_C9"}) {
    EXPECT_EQ(reason(members, with([&](auto& m) { m.self.instance = name; })), "") << name;
  }
  EXPECT_NE(reason(members, with([](auto& m) { m.self.program = m.self.instance = "di-other"; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.role = "host"; })), "");
  EXPECT_EQ(reason(members, with([](auto& m) { m.self.role = "script"; })), "");
  wire::meta_register script = router("0", 11);
  script.self.role = "script";
  EXPECT_NE(reason(members, script), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.host = ""; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.host = "a b"; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.control = ""; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.control = "ipc:///a\nb"; })), "");
  EXPECT_EQ(reason(members, with([](auto& m) { m.self.control = "ipc:///home/josé/a b/x.sock"; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.ranks = 0; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.ranks = 2000; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.model = ""; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.state = 2; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.layout.pop_back(); })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.self.fingerprint.raw[0] ^= std::byte{1}; })), "");
  EXPECT_NE(reason(members, with([](auto& m) { m.boot = 0; })), "");
  EXPECT_EQ(members.count(), 0U);
}

TEST(Membership, TheFleetIsBounded) {
  Membership members({}, 1);
  std::vector<InstanceRow> rows;
  for (std::size_t i = 0; i < members_max; ++i) {
    const auto admission = members.judge(router(std::to_string(i), i + 1));
    ASSERT_TRUE(admission);
    members.admit(*admission, at_ms(0));
  }
  const auto refused = members.judge(router("more", 1));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::no_space);
  EXPECT_TRUE(members.judge(router("7", 8)));  // one that is in
}

}  // namespace
}  // namespace di::directory
