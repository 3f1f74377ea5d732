// From a prefill rank's pages to a decode rank's seat.
#include "host/handover.h"

#include "tests/unit/host/world.h"

namespace di::host {
namespace {

class HandoverTest : public World {
 protected:
  HandoverTest() { usual_peers(); }
  explicit HandoverTest(std::uint64_t units) : World(units) { usual_peers(); }

  const std::vector<Key> keys = test_keys(1, 0, 6);
  const wire::Scope scope{test_request(1), 1, 3, 0};

  // What prefill does until it can hand over.
  wire::SlotRef prefilled() {
    seal(prefill, scope, {keys.begin(), keys.begin() + 4});
    seal(prefill, scope, {keys.begin() + 4, keys.end()});
    tail = seal(prefill, scope, {});
    return tail;
  }
  std::uint32_t expected(std::uint64_t seat) {
    say(decode, scope, wire::kv_expect{seat, keys, Key{}, 3});
    const auto answer = heard<wire::kv_expected>(decode);
    EXPECT_TRUE(answer && answer->code == 0 && answer->seat == seat);
    return answer ? answer->entry : 0;
  }
  wire::kv_handover handover(std::uint64_t seat) const {
    wire::kv_handover message;
    message.seat = seat;
    message.decode = decode.instance;
    message.decode_generation = decode.generation;
    message.host = core->self().instance;
    message.keys = keys;
    message.tail = tail;
    message.token = {42, {}};
    message.index = 5;
    message.sampler = {std::byte{9}};
    return message;
  }
  std::optional<Code> handed() {
    const auto answer = heard<wire::kv_handed>(prefill);
    if (answer) handed_to = answer->decode;
    return answer ? std::optional(static_cast<Code>(answer->code)) : std::nullopt;
  }

  static wire::Scope test_scope_of(std::uint32_t number) { return {test_request(number), 1, 3, 0}; }

  wire::SlotRef tail;
  std::string handed_to;
};

TEST_F(HandoverTest, ARequestMovesFromPrefillToDecode) {
  const std::uint32_t entry = expected(8);
  prefilled();
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::ok);
  wire::Scope heard_scope;
  const auto seated = heard<wire::kv_seated>(decode, &heard_scope);
  ASSERT_TRUE(seated);
  EXPECT_EQ(heard_scope.request, scope.request);
  EXPECT_EQ(heard_scope.rank, 3);
  EXPECT_EQ(seated->seat, 8u);
  ASSERT_EQ(seated->slots.size(), 3u);
  EXPECT_EQ(seated->slots[0].count + seated->slots[1].count, 6u);
  EXPECT_EQ(seated->slots[2].slot, tail.slot);
  EXPECT_EQ(seated->slots[2].count, 1u);
  EXPECT_EQ(seated->token.id, 42u);
  EXPECT_EQ(seated->index, 5u);
  EXPECT_EQ(seated->sampler, (Bytes{std::byte{9}}));
  EXPECT_EQ(arena.entries.at(entry).groups, 4u);
  EXPECT_EQ(gauge("holds"), 0u);
  EXPECT_EQ(gauge("reserved_bytes"), 0u);

  // Prefill lets go; the seat has pins of its own, also of the tail.
  settle_puts();
  say(prefill, scope, wire::kv_release{});
  EXPECT_TRUE(arena.current(seated->slots[0]));
  EXPECT_TRUE(arena.current(tail));
  say(decode, scope, wire::kv_release{});
  EXPECT_FALSE(arena.current(tail));
  EXPECT_TRUE(idle());
}

TEST_F(HandoverTest, APromptShorterThanABlockHasOnlyATail) {
  say(decode, scope, wire::kv_expect{8, {}, Key{}, 3});
  ASSERT_TRUE(heard<wire::kv_expected>(decode));
  tail = seal(prefill, scope, {});
  wire::kv_handover message = handover(8);
  message.keys.clear();
  say(prefill, scope, message);
  EXPECT_EQ(handed(), Code::ok);
  EXPECT_EQ(heard<wire::kv_seated>(decode)->slots.size(), 1u);
}

TEST_F(HandoverTest, APromptOfWholeBlocksHasNoTail) {
  say(decode, scope, wire::kv_expect{8, keys, Key{}, 0});
  ASSERT_TRUE(heard<wire::kv_expected>(decode));
  prefilled();
  wire::kv_handover message = handover(8);
  message.tail = {};
  say(prefill, scope, message);
  EXPECT_EQ(handed(), Code::ok);
  EXPECT_EQ(heard<wire::kv_seated>(decode)->slots.size(), 2u);
}

TEST_F(HandoverTest, AnUnknownSeatIsSaidAndAnotherCanBeTried) {
  prefilled();
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::not_found);
  EXPECT_EQ(gauge("holds"), 0u);
  expected(9);
  say(prefill, scope, handover(9));
  EXPECT_EQ(handed(), Code::ok);
}

TEST_F(HandoverTest, TheSeatOfAnotherAttemptIsNotOurs) {
  wire::Scope earlier = scope;
  earlier.attempt = 0;
  say(decode, earlier, wire::kv_expect{8, keys, Key{}, 3});
  ASSERT_TRUE(heard<wire::kv_expected>(decode));
  prefilled();
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::not_found);
}

// Two ranks of one process gave their seats the same numbers: the second request ended as if its client were
// wrong.
TEST_F(HandoverTest, ASeatWhoseNameIsInUseIsNoFaultOfTheRequest) {
  expected(8);
  wire::Scope other = scope;
  other.request = test_request(2);
  say(decode, other, wire::kv_expect{8, keys, Key{}, 3});
  EXPECT_EQ(heard<wire::kv_expected>(decode)->code, static_cast<wire::U16>(Code::exists));
  say(decode, other, wire::kv_expect{9, keys, Key{}, 3});
  EXPECT_EQ(heard<wire::kv_expected>(decode)->code, 0);
}

// The first rank's word that it is through comes after the router has turned to the second.
TEST_F(HandoverTest, WhatOneRankLetsGoOfIsNotTheSeatOfAnother) {
  expected(8);
  wire::Scope there = scope;
  there.rank = 1;
  say(decode, there, wire::kv_expect{9, keys, Key{}, 3});
  EXPECT_EQ(heard<wire::kv_expected>(decode)->code, 0);
  say(decode, scope, wire::kv_release{});
  prefilled();
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::not_found);
  say(prefill, scope, handover(9));
  EXPECT_EQ(handed(), Code::ok);
  wire::Scope heard_scope;
  EXPECT_EQ(heard<wire::kv_seated>(decode, &heard_scope)->seat, 9u);
  EXPECT_EQ(heard_scope.rank, 1);
}

TEST_F(HandoverTest, ASeatThatNeverFitsIsSaid) {
  say(decode, scope, wire::kv_expect{8, test_keys(1, 0, 64), Key{}, 3});  // 64 units, and the tail
  EXPECT_EQ(heard<wire::kv_expected>(decode)->code, static_cast<wire::U16>(Code::invalid));
  say(decode, scope, wire::kv_expect{8, test_keys(1, 0, 64), Key{}, 0});
  EXPECT_EQ(heard<wire::kv_expected>(decode)->code, 0);
}

TEST_F(HandoverTest, OnlySealedPagesAndTheOwnTailAreHandedOver) {
  expected(8);
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::invalid);  // nothing is there
  prefilled();
  wire::kv_handover foreign = handover(8);
  wire::Scope other = scope;
  other.request = test_request(2);
  say(prefill, other, foreign);
  EXPECT_EQ(handed(), Code::invalid);  // the tail belongs to another request
  wire::kv_handover stale = handover(8);
  ++stale.tail.generation;
  say(prefill, scope, stale);
  EXPECT_EQ(handed(), Code::invalid);
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::ok);
}

TEST_F(HandoverTest, ATailWhoseBytesChangedIsRefusedAndTheSeatStays) {
  expected(8);
  prefilled();
  const std::uint32_t good = test_crcs({})[1];
  arena.write(layout, tail, 1, good + 1);
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::corrupt);
  EXPECT_FALSE(heard<wire::kv_seated>(decode));
  EXPECT_EQ(gauge("expectations"), 1u);
  arena.write(layout, tail, 1, good);
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::ok);
  EXPECT_TRUE(heard<wire::kv_seated>(decode));
}

TEST_F(HandoverTest, TheSourceHoldsItsPagesUntilTheAckWhateverHappensToPrefill) {
  expected(8);
  prefilled();
  settle_puts();
  hold_back_self = true;
  say(prefill, scope, handover(8));
  ASSERT_EQ(held.size(), 1u);
  say(prefill, scope, wire::kv_release{});
  lose(prefill);
  EXPECT_EQ(gauge("holds"), 1u);
  EXPECT_TRUE(arena.current(tail));
  hold_back_self = false;
  core->on_message(held.front(), now);
  turn();
  EXPECT_TRUE(heard<wire::kv_seated>(decode));
  say(decode, scope, wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(HandoverTest, AHoldEnds) {
  expected(8);
  prefilled();
  hold_back_self = true;
  say(prefill, scope, handover(8));
  EXPECT_EQ(core->next_due().product, now.product + seconds(60));
  advance(seconds(60));
  EXPECT_EQ(handed(), Code::timeout);
  EXPECT_EQ(gauge("holds"), 0u);
  EXPECT_EQ(gauge("expectations"), 0u);  // of the same age
  // Whatever comes now finds nobody.
  hold_back_self = false;
  for (const wire::Envelope& message : held) core->on_message(message, now);
  turn();
  EXPECT_FALSE(handed());
}

TEST_F(HandoverTest, ASecondTargetReplacesTheFirst) {
  const Peer decode2{"di-decode.1", 6};
  up(decode2, PeerKind::rank);
  expected(8);
  say(decode2, scope, wire::kv_expect{8, keys, Key{}, 3});
  ASSERT_TRUE(heard<wire::kv_expected>(decode2));
  prefilled();
  hold_back_self = true;
  say(prefill, scope, handover(8));
  wire::kv_handover second = handover(9);
  second.decode = decode2.instance;
  say(decode2, scope, wire::kv_release{});
  say(decode2, scope, wire::kv_expect{9, keys, Key{}, 3});
  say(prefill, scope, second);
  EXPECT_EQ(gauge("holds"), 1u);
  // The first one's messages arrive late and in the way of the second's.
  hold_back_self = false;
  while (!held.empty()) {
    const wire::Envelope message = held.front();
    held.pop_front();
    core->on_message(message, now);
    turn();
  }
  EXPECT_EQ(handed(), Code::ok);
  EXPECT_EQ(handed_to, decode2.instance);
  EXPECT_FALSE(handed());
  EXPECT_FALSE(heard<wire::kv_seated>(decode));
  EXPECT_EQ(heard<wire::kv_seated>(decode2)->seat, 9u);
}

// E07: a repeated hand-over.
TEST_F(HandoverTest, RepeatedMessagesChangeNothing) {
  expected(8);
  expected(8);
  EXPECT_EQ(gauge("expectations"), 1u);
  prefilled();
  hold_back_self = true;
  say(prefill, scope, handover(8));
  say(prefill, scope, handover(8));
  ASSERT_EQ(held.size(), 1u);
  const auto deliver_twice = [&] {
    const wire::Envelope message = held.front();
    held.pop_front();
    core->on_message(message, now);
    core->on_message(message, now);
    turn();
  };
  // Opened twice: the second transfer counts, and A says sealed to the first answer it hears.
  deliver_twice();
  ASSERT_EQ(held.size(), 2u);
  const wire::Envelope first = held.front();
  held.pop_front();
  core->on_message(held.front(), now);
  core->on_message(first, now);
  held.pop_front();
  turn();
  ASSERT_EQ(held.size(), 1u);
  deliver_twice();
  EXPECT_TRUE(heard<wire::kv_seated>(decode));
  EXPECT_FALSE(heard<wire::kv_seated>(decode));
  ASSERT_EQ(held.size(), 2u);
  deliver_twice();
  EXPECT_EQ(handed(), Code::ok);
  EXPECT_FALSE(handed());
}

TEST_F(HandoverTest, ALostDecodeTakesItsSeatAlong) {
  expected(8);
  prefilled();
  settle_puts();
  lose(decode);
  EXPECT_EQ(gauge("expectations"), 0u);
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::not_found);
  say(prefill, scope, wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(HandoverTest, AnotherHostIsAskedAndSaysWhatItCannot) {
  const Peer other{"di-kvd.host1", 12};
  prefilled();
  wire::kv_handover away = handover(8);
  away.host = other.instance;
  say(prefill, scope, away);
  EXPECT_EQ(handed(), Code::unreachable);
  up(other, PeerKind::host);
  say(prefill, scope, away);
  const auto open = heard<wire::handover_open>(other);
  ASSERT_TRUE(open);
  EXPECT_EQ(open->keys, keys);
  EXPECT_TRUE(open->tail);
  wire::handover_opened missing{8, 0, 1, {4, 400}, {{3, 1, 1, 0, 1}}};
  say(other, scope, missing);
  EXPECT_EQ(handed(), Code::invalid);

  say(prefill, scope, away);
  lose(other);
  EXPECT_EQ(handed(), Code::unreachable);
  EXPECT_EQ(gauge("holds"), 0u);
}

TEST_F(HandoverTest, WhatIsHereNeedsNoPush) {
  const Peer other{"di-kvd.host1", 12};
  up(other, PeerKind::host);
  cached({keys.begin(), keys.begin() + 4});
  cached({keys.begin() + 4, keys.end()});
  say(decode, scope, wire::kv_expect{9, keys, Key{}, 0});
  say(other, scope, wire::handover_open{9, decode.instance, keys, false});
  const auto opened = heard<wire::handover_opened>(other);
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened->code, 0);
  wire::handover_sealed message;
  message.seat = 9;
  message.transfer = opened->transfer + 1;
  say(other, scope, message);
  EXPECT_EQ(heard<wire::handover_ack>(other)->code, static_cast<std::uint16_t>(Code::not_found));
  message.transfer = opened->transfer;
  say(other, scope, message);
  EXPECT_EQ(heard<wire::handover_ack>(other)->code, 0);
  EXPECT_TRUE(heard<wire::kv_seated>(decode));
}

TEST_F(HandoverTest, ASeatFetchesWhatTheStoreHas) {
  const std::vector<Key> first(keys.begin(), keys.begin() + 4);
  expected(8);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_plan>(meta, &asked));
  say(meta, asked, wire::meta_planned{3, 9000, {planned(10, first, 0, 4)}});
  const auto read = heard<wire::kv_read>(store);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->priority, 1);
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*read, first, g);
  EXPECT_EQ(gauge("pins"), 1u);
  EXPECT_FALSE(heard<wire::kv_ready>(decode));
  seal(prefill, scope, {keys.begin() + 4, keys.end()});
  tail = seal(prefill, scope, {});
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::ok);
  EXPECT_EQ(heard<wire::kv_seated>(decode)->slots.size(), 3u);
  EXPECT_EQ(gauge("fetches"), 0u);
}

// Its pages were made and waited for a seat, which waited for room that other seats had spoken for, whose pages had none:
// everybody waited until somebody's time was over.
TEST_F(HandoverTest, WhosePagesAreAllHereGetsASeatWhateverOthersWaitFor) {
  prefilled();
  settle_puts();
  // 57 of 64 units are left.
  const wire::Scope other{test_request(2), 1, 3, 0};
  say(decode, other, wire::kv_expect{9, test_keys(2, 0, 56), Key{}, 0});
  EXPECT_EQ(heard<wire::kv_expected>(decode)->code, 0);
  EXPECT_EQ(gauge("reserved_bytes"), 14 * layout.page_bytes(4));
  say(decode, test_scope_of(3), wire::kv_expect{10, test_keys(3, 0, 2), Key{}, 0});
  EXPECT_EQ(heard<wire::kv_expected>(decode)->code, static_cast<std::uint16_t>(Code::busy));
  expected(8);
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::ok);
}

// Its prefill is on another host: the tail needs room here.
TEST_F(HandoverTest, ASeatForATailFromElsewhereNeedsRoomThoughAllBlocksAreHere) {
  cached({keys.begin(), keys.begin() + 4});
  const std::vector<Key> here(keys.begin(), keys.begin() + 4);
  say(prefill, scope, wire::kv_open{std::vector<std::uint32_t>(15, 4), 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  say(prefill, test_scope_of(2), wire::kv_fetch{here});  // nothing is left that could be thrown out
  const auto seat = [&](std::uint32_t number, std::uint32_t tail_tokens) {
    say(decode, test_scope_of(number), wire::kv_expect{number, here, Key{}, tail_tokens});
    return heard<wire::kv_expected>(decode)->code;
  };
  EXPECT_EQ(seat(3, 3), static_cast<std::uint16_t>(Code::busy));
  EXPECT_EQ(seat(2, 3), 0);  // its prefill reads here, and will make the tail here
  EXPECT_EQ(seat(4, 0), 0);  // with more reserved than there is room: it needs none
}

// They were counted twice, once as pages and once as room for them.
TEST_F(HandoverTest, PagesThatAreMadeForASeatHereNeedNoMoreRoom) {
  expected(8);
  const std::uint64_t whole = gauge("reserved_bytes");
  seal(prefill, scope, {keys.begin(), keys.begin() + 4});
  EXPECT_EQ(gauge("reserved_bytes"), whole - layout.page_bytes(4));
  seal(prefill, test_scope_of(2), test_keys(2, 0, 2));     // another's
  seal(prefill, scope, {keys.begin(), keys.begin() + 4});  // brings nothing
  EXPECT_EQ(gauge("reserved_bytes"), whole - layout.page_bytes(4));
  seal(prefill, scope, {keys.begin() + 4, keys.end()});
  tail = seal(prefill, scope, {});
  EXPECT_EQ(gauge("reserved_bytes"), 0u);
  say(prefill, scope, handover(8));
  EXPECT_EQ(handed(), Code::ok);
}

TEST_F(HandoverTest, SeatsAreRefusedWhenTheirRoomIsSpokenFor) {
  // 64 units; a seat of 6 missing blocks and a tail counts 4 + 2 + 1.
  std::uint32_t granted = 0;
  for (std::uint32_t i = 0; i < 12; ++i) {
    const wire::Scope mine{test_request(100 + i), 1, 0, 0};
    say(decode, mine, wire::kv_expect{100 + i, test_keys(100 + i, 0, 6), Key{}, 3});
    if (heard<wire::kv_expected>(decode)->code == 0) ++granted;
  }
  EXPECT_EQ(granted, 9u);
  EXPECT_EQ(core->handovers().counters().seats_refused, 3u);
  // A writer is not refused for them: its grant is the room.
  say(prefill, scope, wire::kv_open{{4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  lose(prefill);
  lose(decode);
  EXPECT_TRUE(idle());
}

TEST_F(HandoverTest, ReadinessEntriesAreBounded) {
  Core::Options with = options(64);
  with.entries_max = 2;
  restart(with);
  usual_peers();
  cached(keys.size() > 4 ? std::vector<Key>(keys.begin(), keys.begin() + 4) : keys);
  for (std::uint32_t i = 0; i < 3; ++i) {
    const wire::Scope mine{test_request(100 + i), 1, 0, 0};
    say(decode, mine, wire::kv_expect{100 + i, {}, Key{}, 1});
    EXPECT_EQ(heard<wire::kv_expected>(decode)->code, i < 2 ? 0 : static_cast<std::uint16_t>(Code::busy));
  }
  say(prefill, scope, wire::kv_fetch{{keys.begin(), keys.begin() + 4}});
  EXPECT_EQ(heard<wire::kv_fetching>(prefill)->code, static_cast<std::uint16_t>(Code::busy));
  lose(decode);
  say(prefill, scope, wire::kv_fetch{{keys.begin(), keys.begin() + 4}});
  EXPECT_EQ(heard<wire::kv_fetching>(prefill)->code, 0);
}

}  // namespace
}  // namespace di::host
