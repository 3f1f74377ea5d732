// Two hosts' cores and the data plane between them: hand-over by push, reads out of another arena, and
// stores on other machines.
#include "tests/unit/host/world.h"

namespace di::host {
namespace {

// Host A of the prefill rank and host B of the decode rank.  Messages between them are carried at once;
// bytes move when the test says so.
class TwoHosts : public ::testing::Test {
 protected:
  struct Host {
    Host(const std::string& name, std::uint32_t generation)
        : peer{name, generation}, core(options(name, generation), arena, data) {
      EXPECT_TRUE(core.set_layout(test_layout()).ok());
    }
    static Core::Options options(const std::string& name, std::uint32_t generation) {
      Core::Options options;
      options.self = {name, generation};
      options.arena = {.payload_bytes = 64 * test_layout().page_bytes(1), .slots_max = 256};
      options.entries_max = 16;
      return options;
    }
    Peer peer;
    test::FakeArena arena;
    test::FakeData data;
    Core core;
    std::deque<wire::Envelope> out;
  };

  TwoHosts() {
    a.core.on_peer_up(b.peer, PeerKind::host, true, now);
    b.core.on_peer_up(a.peer, PeerKind::host, true, now);
    a.core.on_peer_up(prefill, PeerKind::rank, false, now);
    b.core.on_peer_up(decode, PeerKind::rank, false, now);
    for (Host* host : {&a, &b}) {
      host->core.on_peer_up(meta, PeerKind::meta, true, now);
      host->core.on_peer_up(store, PeerKind::store, true, now);
    }
    turn();
    a.out.clear();
    b.out.clear();
  }

  void turn() {
    for (bool more = true; more;) {
      more = false;
      for (auto [from, to] : {std::pair{&a, &b}, std::pair{&b, &a}}) {
        from->core.flush(now);
        for (wire::Envelope& message : from->core.take_outgoing()) {
          more = true;
          if (message.peer == to->peer.instance && message.number == drop) {
            drop = 0;
          } else if (message.peer == to->peer.instance && linked) {
            message.peer = from->peer.instance;
            message.peer_generation = from->peer.generation;
            to->core.on_message(message, now);
          } else {
            from->out.push_back(std::move(message));
          }
        }
      }
    }
    for (Host* host : {&a, &b}) {
      const Status status = host->core.check();
      ASSERT_TRUE(status.ok()) << host->peer.instance << ": " << status.error().message;
    }
  }
  template <class M>
  void say(Host& to, const Peer& from, const M& message, const wire::Scope& with) {
    to.core.on_message(wire::Envelope::make(from.instance, from.generation, with, message), now);
    turn();
  }
  template <class M>
  std::optional<M> heard(Host& host, wire::Scope* with = nullptr) {
    for (auto message = host.out.begin(); message != host.out.end(); ++message) {
      if (message->number != M::number) continue;
      const M body = *message->as<M>();
      if (with != nullptr) *with = message->scope;
      host.out.erase(message);
      return body;
    }
    return std::nullopt;
  }
  // The oldest segment arrives, is refused, or was cancelled.
  void move_one(Host& from, Host& to, bool flip = false) {
    ASSERT_FALSE(from.data.pushes.empty());
    const test::FakeData::Push push = from.data.pushes.front();
    from.data.pushes.pop_front();
    Code code = Code::cancelled;
    if (!push.cancelled) {
      code = test::FakeData::arrive(push, to.data, from.peer, from.arena, to.arena) ? Code::ok : Code::stale;
      if (flip) to.arena.written[to.arena.slots.at(push.to.slot.slot).assigned.offset + push.to.offset] ^= 1;
    }
    from.core.on_pushed(push.number, code, now);
    turn();
  }
  void move_all(Host& from, Host& to) {
    while (!from.data.pushes.empty()) move_one(from, to);
  }
  void conceal_all(Host& host) {
    while (!host.data.concealing.empty()) {
      const auto [peer, transfer] = host.data.take_concealed();
      host.core.on_concealed(peer, transfer, now);
    }
    turn();
  }
  void advance(Duration by) {
    now.product = now.product + by;
    now.liveness = now.liveness + by;
    a.core.on_time(now);
    b.core.on_time(now);
    turn();
  }
  wire::SlotRef seal(Host& host, const Peer& rank, const std::vector<Key>& page) {
    const std::uint32_t blocks = page.empty() ? 1 : static_cast<std::uint32_t>(page.size());
    say(host, rank, wire::kv_open{{blocks}, 5}, scope);
    const auto opened = heard<wire::kv_opened>(host);
    EXPECT_TRUE(opened && opened->code == 0);
    const std::vector<std::uint32_t> crcs = test_crcs(page);
    for (std::uint32_t g = 0; g < 4; ++g) host.arena.write(test_layout(), opened->slots[0], g, crcs[g]);
    say(host, rank, wire::kv_sealed{opened->slots[0], Key{}, page, crcs, 0}, scope);
    return opened->slots[0];
  }
  wire::kv_push early() const { return {8, decode.instance, decode.generation, b.peer.instance, keys, true}; }
  wire::kv_handover final(const wire::SlotRef& tail) const {
    wire::kv_handover message;
    message.seat = 8;
    message.decode = decode.instance;
    message.decode_generation = decode.generation;
    message.host = b.peer.instance;
    message.keys = keys;
    message.tail = {tail.slot, tail.generation, 1, 0, 1};
    message.token = {42, {}};
    message.index = 0;
    return message;
  }
  std::optional<Code> handed() {
    const auto answer = heard<wire::kv_handed>(a);
    return answer ? std::optional(static_cast<Code>(answer->code)) : std::nullopt;
  }
  // The store has everything already, nothing is asked of it.
  void settle_puts(Host& host) {
    wire::Scope asked;
    while (heard<wire::meta_put_open>(host, &asked)) {
      wire::meta_put_opened exists;
      exists.code = static_cast<std::uint16_t>(Code::exists);
      say(host, meta, exists, asked);
    }
  }
  void expect_idle() {
    settle_puts(a);
    settle_puts(b);
    for (Host* host : {&a, &b}) {
      for (const Gauge& gauge : host->core.gauges())
        EXPECT_EQ(gauge.count, 0u) << host->peer.instance << " " << gauge.name;
      EXPECT_TRUE(host->data.exposures.empty()) << host->peer.instance;
    }
  }
  void release_all() {
    say(a, prefill, wire::kv_release{}, scope);
    say(b, decode, wire::kv_release{}, scope);
    conceal_all(a);
    conceal_all(b);
  }

  const Peer meta{"di-meta.0", 1};
  const Peer store{"di-kvd.store0", 2};
  const Peer prefill{"di-prefill.0", 3};
  const Peer decode{"di-decode.0", 4};
  Host a{"di-kvd.hostA", 11};
  Host b{"di-kvd.hostB", 12};
  bool linked = true;
  std::uint16_t drop = 0;  // number of a message between them, the next of which is lost
  Now now{{1'000'000'000}, {1'000'000'000}};
  wire::Scope scope{test_request(1), 1, 0, 0};
  const std::vector<Key> keys = test_keys(1, 0, 8);
  const std::vector<Key> first{keys.begin(), keys.begin() + 4};
  const std::vector<Key> second{keys.begin() + 4, keys.end()};
};

TEST_F(TwoHosts, PagesGoWhileLaterChunksCompute) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  EXPECT_EQ(heard<wire::kv_expected>(b)->code, 0);
  EXPECT_GT(b.core.handovers().reserved_bytes(), 0u);
  say(a, prefill, early(), scope);
  EXPECT_TRUE(a.data.pushes.empty());  // nothing is computed yet
  seal(a, prefill, first);
  EXPECT_EQ(a.data.pushes.size(), 4u);  // its segments are on their way before the second page exists
  move_all(a, b);
  EXPECT_TRUE(b.core.pages().has(keys[3]));  // and the page can be used by others
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  move_all(a, b);
  EXPECT_FALSE(heard<wire::kv_seated>(b));
  say(a, prefill, final(tail), scope);
  EXPECT_EQ(a.data.pushes.size(), 4u);  // the tail only
  EXPECT_EQ(a.data.pushes.front().to.bytes, test_layout().segment_bytes(0, 1));
  move_all(a, b);
  const auto seated = heard<wire::kv_seated>(b);
  ASSERT_TRUE(seated);
  EXPECT_EQ(seated->token.id, 42u);
  ASSERT_EQ(seated->slots.size(), 3u);
  EXPECT_EQ(seated->slots[0].count + seated->slots[1].count, 8u);
  EXPECT_EQ(seated->slots[2].page_blocks, 1u);
  EXPECT_EQ(handed(), Code::ok);
  EXPECT_EQ(b.core.handovers().reserved_bytes(), 0u);
  release_all();
  expect_idle();
}

TEST_F(TwoHosts, AllAtTheEndWorksTooAndWhatBHasStaysWhereItIs) {
  seal(b, decode, first);
  say(b, decode, wire::kv_release{}, scope);
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  seal(a, prefill, first);
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  say(a, prefill, final(tail), scope);
  EXPECT_EQ(a.data.pushes.size(), 8u);  // one page and the tail
  move_all(a, b);
  EXPECT_TRUE(heard<wire::kv_seated>(b));
  EXPECT_EQ(handed(), Code::ok);
  release_all();
  expect_idle();
}

TEST_F(TwoHosts, BytesThatChangeOnTheWayAreNotSeated) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  say(a, prefill, early(), scope);
  seal(a, prefill, first);
  move_one(a, b, true);
  move_all(a, b);
  EXPECT_FALSE(b.core.pages().has(keys[0]));
  EXPECT_EQ(b.core.handovers().counters().pages_corrupt, 1u);
  conceal_all(b);
  // The final hand-over asks again and goes well.
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  say(a, prefill, final(tail), scope);
  move_all(a, b);
  EXPECT_TRUE(heard<wire::kv_seated>(b));
  EXPECT_EQ(handed(), Code::ok);
  release_all();
  expect_idle();
}

TEST_F(TwoHosts, SlotsOfASeatThatIsGivenUpWaitForTheDataPlane) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  say(a, prefill, early(), scope);
  seal(a, prefill, first);
  ASSERT_EQ(a.data.pushes.size(), 4u);
  const std::uint64_t free = b.core.pages().bytes_free();
  say(b, decode, wire::kv_release{}, scope);
  EXPECT_EQ(b.core.pages().bytes_free(), free);  // in quarantine: A may be in the middle of a write
  EXPECT_EQ(b.core.handovers().closing(), 1u);
  move_one(a, b);  // a late write: lost, and in nobody's slot
  conceal_all(b);
  EXPECT_EQ(b.core.handovers().closing(), 0u);
  EXPECT_GT(b.core.pages().bytes_free(), free);
  move_one(a, b);  // refused now
  move_all(a, b);
  say(a, prefill, wire::kv_release{}, scope);
  expect_idle();
}

TEST_F(TwoHosts, ALinkThatIsTooSlowIsGivenUp) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  seal(a, prefill, first);
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  a.data.bytes_per_s = 1e9;
  say(a, prefill, final(tail), scope);
  move_one(a, b);
  advance(seconds(1));
  EXPECT_FALSE(handed());  // it waits for a link that moves
  a.data.bytes_per_s = 1000;
  advance(seconds(1));
  EXPECT_EQ(handed(), Code::timeout);
  EXPECT_EQ(a.core.handovers().counters().gave_up, 1u);
  move_all(a, b);
  release_all();
  expect_idle();
}

TEST_F(TwoHosts, ALinkThatDoesNotMoveIsGivenUp) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  seal(a, prefill, first);
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  say(a, prefill, final(tail), scope);
  advance(seconds(9));
  EXPECT_FALSE(handed());
  advance(seconds(1));
  EXPECT_EQ(handed(), Code::timeout);
  move_all(a, b);
  release_all();
  expect_idle();
}

// E02: the hold ends while the other side still takes the pages: nothing is reused under it, and it gets nothing.
TEST_F(TwoHosts, AHoldThatEndsDuringAPushKeepsThePagesUntilNobodyReadsThem) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  seal(a, prefill, first);
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  a.data.bytes_per_s = 1e9;
  say(a, prefill, final(tail), scope);
  say(a, prefill, wire::kv_release{}, scope);  // prefill is gone: the source's hold is all there is
  settle_puts(a);
  move_one(a, b);
  now.product = now.product + seconds(60);
  a.core.on_time(now);
  turn();
  EXPECT_EQ(handed(), Code::timeout);
  const std::uint64_t evictable = a.core.pages().bytes_evictable();
  move_all(a, b);  // cancelled, every one of them
  EXPECT_GT(a.core.pages().bytes_evictable(), evictable);
  EXPECT_FALSE(heard<wire::kv_seated>(b));
  EXPECT_FALSE(b.core.pages().has(keys[0]));
  say(b, decode, wire::kv_release{}, scope);
  conceal_all(b);
  expect_idle();
}

// E04: a transfer that failed on one side is heard of on the other at once.
TEST_F(TwoHosts, TheLossOfTheOtherHostEndsAHandOver) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  seal(a, prefill, first);
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  say(a, prefill, final(tail), scope);
  linked = false;
  a.core.on_peer_lost(b.peer, now);
  turn();
  EXPECT_EQ(handed(), Code::unreachable);
  b.core.on_peer_lost(a.peer, now);
  turn();
  while (!a.data.pushes.empty()) {
    a.core.on_pushed(a.data.pushes.front().number, Code::unreachable, now);
    a.data.pushes.pop_front();
  }
  release_all();
  expect_idle();
}

// E07: a hand-over with a number that is under way, or over, changes nothing.
TEST_F(TwoHosts, ARepeatedHandOverIsTheSameOne) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  say(a, prefill, early(), scope);
  say(a, prefill, early(), scope);
  seal(a, prefill, first);
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  say(a, prefill, final(tail), scope);
  say(a, prefill, final(tail), scope);
  EXPECT_EQ(a.core.handovers().counters().sources, 1u);
  EXPECT_EQ(a.data.pushes.size(), 12u);  // two pages and the tail, once
  move_all(a, b);
  EXPECT_TRUE(heard<wire::kv_seated>(b));
  EXPECT_FALSE(heard<wire::kv_seated>(b));
  EXPECT_EQ(handed(), Code::ok);
  EXPECT_FALSE(handed());
  release_all();
  expect_idle();
}

// Each was healed by the end of the hold only.
TEST_F(TwoHosts, ALostWordAboutTheEndIsSaidAgain) {
  for (const std::uint16_t lost : {wire::handover_sealed::number, wire::handover_ack::number}) {
    for (const bool taken : {false, true}) {
      SCOPED_TRACE(std::string(wire::message_name(lost)) + (taken ? " of a seat that has its pages" : ""));
      scope.attempt++;
      say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
      seal(a, prefill, first);
      seal(a, prefill, second);
      const wire::SlotRef tail = seal(a, prefill, {});
      say(a, prefill, final(tail), scope);
      drop = lost;
      move_all(a, b);
      EXPECT_EQ(drop, 0);
      EXPECT_FALSE(handed());
      if (taken && lost == wire::handover_ack::number) say(b, decode, wire::kv_release{}, scope);
      advance(seconds(2));
      EXPECT_EQ(handed(), Code::ok);
      EXPECT_TRUE(heard<wire::kv_seated>(b));
      EXPECT_FALSE(heard<wire::kv_seated>(b));
      // The rank did not hear it either: another source would find a seat that is taken.
      say(a, prefill, final(tail), scope);
      EXPECT_EQ(handed(), Code::ok);
      EXPECT_EQ(a.core.handovers().sources(), 0u);
      release_all();
    }
  }
  expect_idle();
  EXPECT_EQ(a.core.next_due().liveness, instant_never);
}

// A fleet refused frames that nobody had falsified: pages of a prompt are in the directory before the hand-over
// that brings them, and the seat's own reads of them are given up in their middle.
TEST_F(TwoHosts, WhatASeatReadsByItselfIsGivenUpWhenTheHandOverBegins) {
  seal(a, prefill, first);
  settle_puts(a);
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_plan>(b, &asked));
  wire::PlannedPage page;
  page.count = page.page_blocks = 4;
  page.keys = first;
  page.crcs = test_crcs(first);
  page.arenas = {"di-kvd.hostA"};
  say(b, meta, wire::meta_planned{3, 9000, {page}}, asked);
  move_one(a, b);
  ASSERT_EQ(a.data.pushes.size(), 3u);
  say(a, prefill, early(), scope);
  EXPECT_EQ(b.core.reads().counters().cancelled, 1u);
  EXPECT_EQ(b.data.concealing.size(), 1u);
  conceal_all(b);
  // Those three had left before A heard of it.
  EXPECT_FALSE(test::FakeData::arrive(a.data.pushes.front(), b.data, a.peer, a.arena, b.arena));
  move_all(a, b);
  seal(a, prefill, second);
  const wire::SlotRef tail = seal(a, prefill, {});
  say(a, prefill, final(tail), scope);
  move_all(a, b);
  EXPECT_TRUE(heard<wire::kv_seated>(b));
  EXPECT_EQ(handed(), Code::ok);
  release_all();
  expect_idle();
}

TEST_F(TwoHosts, APageThatIsInNoStoreIsReadOutOfTheOtherArena) {
  seal(a, prefill, first);
  say(a, prefill, wire::kv_release{}, scope);
  settle_puts(a);
  say(b, decode, wire::kv_fetch{first}, scope);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_plan>(b, &asked));
  wire::PlannedPage page;
  page.count = page.page_blocks = 4;
  page.keys = first;
  page.crcs = test_crcs(first);
  page.arenas = {"di-kvd.hostA", "di-kvd.hostB"};
  say(b, meta, wire::meta_planned{3, 9000, {page}}, asked);
  const auto fetching = heard<wire::kv_fetching>(b);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 4u);
  move_one(a, b);
  EXPECT_EQ(heard<wire::kv_ready>(b)->groups, 1u);  // group by group
  move_all(a, b);
  EXPECT_TRUE(b.core.pages().has(first[0]));
  EXPECT_EQ(b.core.reads().counters().arena_reads, 1u);
  EXPECT_EQ(a.core.serves().counters().served, 1u);
  release_all();
  expect_idle();
}

TEST_F(TwoHosts, APageThatWentMeanwhileIsSaidToBeGone) {
  say(b, decode, wire::kv_fetch{first}, scope);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_plan>(b, &asked));
  wire::PlannedPage page;
  page.count = page.page_blocks = 4;
  page.keys = first;
  page.crcs = test_crcs(first);
  page.arenas = {"di-kvd.hostA"};
  say(b, meta, wire::meta_planned{3, 9000, {page}}, asked);
  EXPECT_EQ(heard<wire::kv_ready>(b)->failed_block, 0u);
  EXPECT_EQ(a.core.serves().counters().not_found, 1u);
  EXPECT_EQ(b.core.pages().bytes_free(), b.core.pages().bytes_total() - test_layout().page_bytes(4));
  release_all();
  EXPECT_EQ(b.core.pages().bytes_free(), b.core.pages().bytes_total());
  expect_idle();
}

TEST_F(TwoHosts, AStoreOnAnotherMachineReachesOnlyWhatIsExposedToIt) {
  seal(a, prefill, first);
  say(a, prefill, wire::kv_release{}, scope);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(a, &asked));
  wire::meta_put_opened opened;
  opened.stripe = 9;
  opened.data_columns = 1;
  opened.columns = {{store.instance, 0, 0}};
  opened.ttl_ms = 30000;
  opened.pages = 1;
  say(a, meta, opened, asked);
  const auto put = heard<wire::kv_put>(a);
  ASSERT_TRUE(put && put->transfer != 0);
  const auto exposed = a.data.exposures.find({store, put->transfer});
  ASSERT_TRUE(exposed != a.data.exposures.end());
  EXPECT_EQ(exposed->second.access, transfer::Access::read);
  EXPECT_TRUE(exposed->second.slots.contains({put->slot.slot, put->slot.generation}));
  say(a, store, wire::kv_put_done{9, 0, 0}, {});
  ASSERT_TRUE(heard<wire::meta_put_commit>(a, &asked));
  say(a, meta, wire::meta_put_committed{0, 9}, asked);
  conceal_all(a);

  // And back out of the store, on the other host: a failure half way.
  say(b, decode, wire::kv_fetch{first}, scope);
  ASSERT_TRUE(heard<wire::meta_plan>(b, &asked));
  wire::PlannedPage page;
  page.page = 9 << 8;
  page.count = page.page_blocks = 4;
  page.keys = first;
  page.crcs = test_crcs(first);
  page.columns = {{store.instance, 0, 0}};
  say(b, meta, wire::meta_planned{3, 9000, {page}}, asked);
  const auto read = heard<wire::kv_read>(b);
  ASSERT_TRUE(read && b.data.exposures.contains({store, read->transfer}));
  b.arena.write(test_layout(), read->slot, 0, test_crcs(first)[0]);
  say(b, store, wire::kv_read_done{read->transfer, 0, 0}, {});
  say(b, store, wire::kv_read_done{read->transfer, static_cast<std::uint16_t>(Code::io), 0}, {});
  EXPECT_EQ(b.core.reads().count(), 1u);  // until nothing can be written any more
  release_all();
  EXPECT_EQ(b.core.reads().count(), 0u);
  expect_idle();
}

TEST_F(TwoHosts, ARankThatDiesBeforeItIsDoneHandsNothingOver) {
  say(b, decode, wire::kv_expect{8, keys, Key{}, 3}, scope);
  say(a, prefill, early(), scope);
  seal(a, prefill, first);
  a.core.on_peer_lost(prefill, now);
  turn();
  EXPECT_EQ(a.core.handovers().sources(), 0u);
  move_all(a, b);
  say(b, decode, wire::kv_release{}, scope);
  conceal_all(b);
  expect_idle();
}

}  // namespace
}  // namespace di::host
