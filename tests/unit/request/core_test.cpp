#include "request/core.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "kv/chain.h"

namespace di::request {
namespace {

const std::string meta = "di-meta.0";
const std::string kvd = "di-kvd.host0";
const std::string prefill0 = "di-prefill.0";
const std::string prefill1 = "di-prefill.1";
const std::string decode0 = "di-decode.0";
const std::string decode1 = "di-decode.1";

class RouterTest : public ::testing::Test {
 protected:
  RouterTest() { begin(); }

  static RouterCore::Options options() {
    RouterCore::Options options;
    options.block_tokens = 4;
    options.attempts_max = 4;
    return options;
  }
  void begin(RouterCore::Options with = options()) {
    core.emplace(with);
    generations.clear();
    for (const std::string& name : {meta, kvd, prefill0, prefill1, decode0, decode1}) up(name);
    listen();
    out.clear();
  }
  // A peer comes, with credit when it is a rank.
  void up(const std::string& instance, std::uint16_t ranks = 1) {
    const std::uint32_t generation = ++generations[instance];
    join(instance, generation, ranks);
  }
  void join(const std::string& instance, std::uint32_t generation, std::uint16_t ranks = 1) {
    wire::Member member;
    member.instance = instance;
    member.program = instance.substr(0, instance.find('.'));
    member.role = instance == kvd ? "host" : "";
    const auto label = labels.find(instance);
    member.host = label == labels.end() ? "here" : label->second;
    member.generation = generation;
    const bool rank = member.program == "di-prefill" || member.program == "di-decode";
    if (rank) {
      member.ranks = ranks;
      member.model = "m";
    }
    core->on_peer_up(member, now);
    for (std::uint16_t r = 0; rank && r < ranks; ++r) grant(instance, 8, false, r);
    listen();
  }
  void grant(const std::string& instance, std::uint64_t requests, bool draining = false,
             std::uint16_t rank = 0) {
    wire::rank_credit credit;
    credit.seq = ++seq;
    credit.granted_requests = requests;
    credit.granted_us = 100000000;
    credit.kv_tokens_max = 100000;
    credit.host = kvd;
    credit.draining = draining;
    credit.cost_token_us = 1;
    say(instance, {{}, 0, rank, 0}, credit);
  }
  void lose(const std::string& instance) {
    core->on_peer_lost(instance, now);
    listen();
  }
  template <class M>
  void say(const std::string& from, const wire::Scope& scope, const M& message) {
    core->on_message(wire::Envelope::make(from, generations.at(from), scope, message), now);
    listen();
  }
  void advance(Duration by) {
    now = now + by;
    core->on_time(now);
    listen();
  }
  void listen() {
    for (wire::Envelope& message : core->take_outgoing()) out.push_back(std::move(message));
    for (Emission& emission : core->take_emissions()) emissions.push_back(std::move(emission));
    for (Ending& ending : core->take_endings()) endings.push_back(std::move(ending));
  }
  // The first message of this type, taken out.
  template <class M>
  std::optional<M> heard(const std::string& peer, wire::Scope* scope = nullptr) {
    for (auto message = out.begin(); message != out.end(); ++message) {
      if (message->number != M::number || message->peer != peer) continue;
      auto body = message->as<M>();
      EXPECT_TRUE(static_cast<bool>(body));
      if (scope != nullptr) *scope = message->scope;
      out.erase(message);
      return *body;
    }
    return std::nullopt;
  }
  template <class M>
  int count() const {
    int found = 0;
    for (const wire::Envelope& message : out) found += message.number == M::number ? 1 : 0;
    return found;
  }

  RequestId submit(std::uint32_t tokens = 18, std::uint32_t max_tokens = 10) {
    NewRequest request;
    put_le<std::uint32_t>(request.id.raw.data(), ++submitted);
    request.model = "m";
    for (std::uint32_t i = 0; i < tokens; ++i) request.prompt.push_back(i);
    request.keys = kv::chain_keys(Key{}, request.prompt, 4);
    request.sampling.max_tokens = max_tokens;
    request.tenant = 7;
    const RequestId id = request.id;
    EXPECT_TRUE(core->submit(std::move(request), now).ok());
    listen();
    return id;
  }
  wire::Scope scope(const RequestId& id, std::uint16_t attempt = 1) const { return {id, attempt, 0, 0}; }
  void matched(const RequestId& id, std::uint32_t hit, std::uint16_t attempt = 1) {
    say(meta, scope(id, attempt), wire::meta_matched{hit, {}, 0});
  }
  // Bound to prefill0 and seated at decode0, seat 5.
  RequestId seated(std::uint32_t max_tokens = 10) {
    const RequestId id = submit(18, max_tokens);
    matched(id, 0);
    EXPECT_TRUE(heard<wire::prefill_bind>(prefill0));
    EXPECT_TRUE(heard<wire::decode_seat>(decode0));
    say(decode0, scope(id), wire::seat_granted{5, kvd});
    EXPECT_EQ(heard<wire::prefill_target>(prefill0)->seat, 5U);
    return id;
  }
  void token(const std::string& from, const RequestId& id, std::uint32_t index, std::uint16_t attempt = 1,
             wire::Finish finish = wire::Finish::none) {
    wire::TokenEvent event;
    event.request = id;
    event.attempt = attempt;
    event.index = index;
    event.token.id = 1000 + index;
    event.finish = static_cast<wire::U8>(finish);
    say(from, {}, wire::token_batch{{event}});
  }
  void done(const std::string& from, const RequestId& id, Code code = Code::ok, std::uint16_t attempt = 1) {
    wire::request_done message;
    message.leg = from.find("decode") != std::string::npos ? 1 : 0;
    message.code = static_cast<wire::U16>(code);
    say(from, scope(id, attempt), message);
  }
  // Prefill could not hand over to that seat.
  void hand_over_failed(const RequestId& id, Code code, std::uint64_t seat = 5,
                        const std::string& decode = decode0) {
    say(prefill0, scope(id),
        wire::prefill_refused{1, static_cast<wire::U16>(code), "hand-over failed", seat, decode});
  }
  // Decoding: prefill is through, two tokens came.
  RequestId decoding() {
    const RequestId id = seated();
    token(prefill0, id, 0);
    say(decode0, scope(id), wire::decode_started{5, 4});
    done(prefill0, id);
    token(decode0, id, 1);
    EXPECT_EQ(state(id), FlightState::decoding);
    out.clear();
    return id;
  }
  FlightState state(const RequestId& id) const { return core->find(id)->state; }
  std::uint16_t attempt(const RequestId& id) const { return core->find(id)->attempt; }
  void expect_nothing_held() {
    EXPECT_TRUE(core->flights().empty());
    EXPECT_EQ(core->ranks().outstanding(), 0U);
    EXPECT_EQ(core->queued(), 0U);
    EXPECT_EQ(core->next_due(), instant_never);
    std::set<RequestId> ended;
    for (const Ending& ending : endings) EXPECT_TRUE(ended.insert(ending.id).second);
  }
  std::vector<std::uint32_t> indexes() const {
    std::vector<std::uint32_t> all;
    for (const Emission& emission : emissions) all.push_back(emission.index);
    return all;
  }

  std::optional<RouterCore> core;
  Instant now{1'000'000'000};
  std::map<std::string, std::uint32_t> generations;
  std::map<std::string, std::string> labels;  // host labels; "here" without
  std::vector<wire::Envelope> out;
  std::vector<Emission> emissions;
  std::vector<Ending> endings;
  std::uint32_t submitted = 0;
  std::uint64_t seq = 0;
};

TEST_F(RouterTest, ARequestGoesFromMatchToItsLastToken) {
  const RequestId id = submit();
  EXPECT_EQ(heard<wire::meta_match>(meta)->keys.size(), 4U);
  matched(id, 3);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  EXPECT_EQ(bind->hit_blocks, 3U);
  EXPECT_EQ(bind->bind, 1U);
  EXPECT_EQ(bind->tenant, 7U);
  const auto ask = heard<wire::decode_seat>(decode0);
  ASSERT_TRUE(ask);
  EXPECT_EQ(ask->tokens.size(), 18U);
  EXPECT_EQ(ask->tenant, 7U);
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  const auto target = heard<wire::prefill_target>(prefill0);
  ASSERT_TRUE(target);
  EXPECT_EQ(target->decode, decode0);
  EXPECT_EQ(target->host, kvd);
  wire::prefill_progress progress;
  progress.swapped_blocks = 3;
  say(prefill0, scope(id), progress);
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::decode_started{5, 4});
  wire::request_done prefill_done;
  prefill_done.swapped_blocks = 3;
  say(prefill0, scope(id), prefill_done);
  EXPECT_TRUE(heard<wire::done_ack>(prefill0));
  token(decode0, id, 1);
  token(decode0, id, 2, 1, wire::Finish::stop);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::ok);
  EXPECT_EQ(endings[0].finish, wire::Finish::stop);
  EXPECT_EQ(endings[0].output_tokens, 3U);
  EXPECT_EQ(endings[0].cached_tokens, 12U);
  EXPECT_EQ(core->flights().size(), 1U);  // decode still owes its counts
  done(decode0, id);
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1, 2}));
  expect_nothing_held();
  EXPECT_NE(core->find(id), nullptr);  // for `explain`
}

TEST_F(RouterTest, SubmitSaysWhatIsInTheWay) {
  RouterCore::Options few = options();
  few.flights_max = 1;
  begin(few);
  const RequestId id = submit();
  NewRequest again;
  again.id = id;
  again.model = "m";
  again.prompt = {1};
  EXPECT_EQ(core->submit(again, now).error().code, Code::busy);
  core->cancel(id, Code::cancelled, now);
  again.model = "other";
  EXPECT_EQ(core->submit(again, now).error().code, Code::unreachable);
  again.model = "m";
  EXPECT_TRUE(core->submit(again, now).ok());
}

TEST_F(RouterTest, RequestsWaitAWhileForTheLastRankOfAKind) {
  const RequestId id = submit();
  lose(prefill0);
  lose(prefill1);
  matched(id, 0);
  const RequestId later = submit();
  EXPECT_EQ(state(id), FlightState::queued);
  matched(later, 0);
  EXPECT_EQ(core->next_due(), now + seconds(15));
  advance(seconds(14));
  up(prefill0);
  EXPECT_EQ(count<wire::prefill_bind>(), 2);
  lose(prefill0);  // both re-enter and wait again
  advance(seconds(15));
  ASSERT_EQ(endings.size(), 2U);
  EXPECT_EQ(endings[0].code, Code::busy);
  NewRequest refused;
  refused.model = "m";
  EXPECT_EQ(core->submit(refused, now).error().code, Code::unreachable);
}

TEST_F(RouterTest, WithoutDirectoryEverythingIsCold) {
  lose(meta);
  submit();
  EXPECT_EQ(count<wire::meta_match>(), 0);
  EXPECT_EQ(heard<wire::prefill_bind>(prefill0)->hit_blocks, 0U);
}

TEST_F(RouterTest, ADirectoryThatGoesWhileMatchingIsNotWaitedFor) {
  submit();
  lose(meta);
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill0));
}

TEST_F(RouterTest, ADirectoryThatDoesNotAnswerIsNotWaitedFor) {
  const RequestId id = submit();
  EXPECT_EQ(core->next_due(), now + milliseconds(200));
  advance(milliseconds(200));
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill0));
  matched(id, 3);  // late
  EXPECT_EQ(count<wire::prefill_bind>(), 0);
}

TEST_F(RouterTest, AHitIsNeverMoreThanUsable) {
  const RequestId id = submit(16);
  matched(id, 99);
  EXPECT_EQ(heard<wire::prefill_bind>(prefill0)->hit_blocks, 3U);
}

TEST_F(RouterTest, WithoutCreditItWaitsAndHintsAPrefetch) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId id = submit();
  matched(id, 3);
  EXPECT_EQ(state(id), FlightState::queued);
  EXPECT_EQ(heard<wire::kv_prefetch>(kvd)->keys.size(), 3U);
  grant(prefill1, 1);
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill1));
  say(prefill1, scope(id), wire::prefill_progress{});
  EXPECT_TRUE(heard<wire::kv_release>(kvd));
}

TEST_F(RouterTest, TheQueueIsServedInOrder) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId first = submit();
  const RequestId second = submit();
  matched(second, 0);
  matched(first, 0);
  grant(prefill0, 1);
  wire::Scope bound;
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill0, &bound));
  EXPECT_EQ(bound.request, second);  // as they came from match
  EXPECT_EQ(core->queued(), 1U);
}

TEST_F(RouterTest, ARequestThatReentersWaitedBehindYoungerOnes) {
  const RequestId old = decoding();
  now = now + seconds(30);
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId younger = submit();
  matched(younger, 0);
  lose(decode0);
  matched(old, 0, 2);
  EXPECT_EQ(core->queued(), 2U);
  grant(prefill1, 1);
  wire::Scope bound;
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill1, &bound));
  EXPECT_EQ(bound.request, old);
}

TEST_F(RouterTest, AReentryHadTheTimeBetweenTwoTokensForQueueAndPrefillTogether) {
  const RequestId id = decoding();
  grant(prefill0, 0);
  grant(prefill1, 0);
  lose(decode0);
  matched(id, 0, 2);
  advance(seconds(599));
  EXPECT_EQ(attempt(id), 2);
  EXPECT_EQ(state(id), FlightState::queued);
  grant(prefill1, 1);
  EXPECT_EQ(state(id), FlightState::prefill);
  token(prefill1, id, 2, 2);
  advance(seconds(59));
  EXPECT_EQ(attempt(id), 2);
  advance(seconds(1));  // after its first token it is silence
  EXPECT_EQ(attempt(id), 3);
}

TEST_F(RouterTest, ARankThatReadsAReentryWithoutAWordIsGivenUpAndOneThatGetsOnIsNot) {
  const RequestId id = decoding();
  lose(decode0);
  matched(id, 0, 2);
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill0));
  for (std::uint32_t i = 1; i < 4; ++i) {
    advance(seconds(50));
    say(prefill0, scope(id, 2), wire::prefill_progress{1000, i, 0, {}});
  }
  EXPECT_EQ(attempt(id), 2);
  advance(seconds(60));
  EXPECT_EQ(attempt(id), 3);
}

TEST_F(RouterTest, AReentryThatFindsNoRankInTimeEndsAndDoesNotQueueAgain) {
  const RequestId id = decoding();
  grant(prefill0, 0);
  grant(prefill1, 0);
  lose(decode0);
  matched(id, 0, 2);
  advance(seconds(600));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::timeout);
  EXPECT_EQ(endings[0].attempts, 2);
  expect_nothing_held();
}

// A credit that takes back what another router filled crossed with the bind.
TEST_F(RouterTest, ABindThatCrossedWithItsCreditGoesToTheNextRankInTheSameAttempt) {
  const RequestId id = submit();
  matched(id, 0);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_TRUE(heard<wire::prefill_target>(prefill0));
  grant(prefill0, 1);  // as many as were sent
  say(prefill0, scope(id), wire::prefill_refused{bind->bind, static_cast<wire::U16>(Code::busy), "no place"});
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill1));
  EXPECT_EQ(attempt(id), 1);
  // The seat is told to who has the request now; what the first one says to its target is over.
  EXPECT_EQ(heard<wire::prefill_target>(prefill1)->seat, 5U);
  say(prefill0, scope(id),
      wire::prefill_refused{0, static_cast<wire::U16>(Code::not_found), "the request is not here any more"});
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  token(prefill1, id, 0);
  say(decode0, scope(id), wire::decode_started{5, 4});
  done(prefill1, id);
  token(decode0, id, 1, 1, wire::Finish::stop);
  done(decode0, id);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::ok);
  EXPECT_EQ(endings[0].attempts, 1);
  expect_nothing_held();
}

// An arena without room was taken for a crossing when the rank was full as well, and asked again for ever.
TEST_F(RouterTest, ARefusalForWantOfRoomInTheArenaIsAnAttempt) {
  const RequestId id = submit();
  matched(id, 0);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  grant(prefill0, 1);  // as many as were sent
  const auto no_space = static_cast<wire::U16>(Code::no_space);
  say(prefill0, scope(id), wire::prefill_refused{bind->bind, no_space, "no room in the arena"});
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, BindsThatCrossWithTheirCreditsDoNotUseUpTheAttempts) {
  const RequestId id = submit(18, 1);
  const RequestId younger = submit(18, 1);
  matched(id, 0);
  grant(prefill0, 0);
  grant(prefill1, 0);
  matched(younger, 0);
  std::uint64_t granted = 1;
  for (int i = 0; i < 20; ++i) {
    const auto bind = heard<wire::prefill_bind>(prefill0);
    ASSERT_TRUE(bind) << i;
    grant(prefill0, bind->bind);
    say(prefill0, scope(id),
        wire::prefill_refused{bind->bind, static_cast<wire::U16>(Code::busy), "no place"});
    EXPECT_EQ(state(id), FlightState::queued);
    EXPECT_EQ(count<wire::prefill_bind>(), 0);
    grant(prefill0, ++granted);  // in front of the younger one again
    EXPECT_EQ(state(id), FlightState::prefill);
    EXPECT_EQ(state(younger), FlightState::queued);
  }
  EXPECT_EQ(attempt(id), 1);
  EXPECT_TRUE(endings.empty());
  EXPECT_EQ(core->ranks().outstanding(), 1U);
}

TEST_F(RouterTest, ASeatThatLapsesWhileItsRequestWaitsAgainIsNoLoss) {
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  grant(prefill1, 0);
  grant(prefill0, 1);
  say(prefill0, scope(id), wire::prefill_refused{1, static_cast<wire::U16>(Code::busy), "no place"});
  EXPECT_EQ(state(id), FlightState::queued);
  // What it says to the target that it was told before, and the end of the seat.
  say(prefill0, scope(id),
      wire::prefill_refused{0, static_cast<wire::U16>(Code::not_found), "the request is not here any more"});
  EXPECT_EQ(state(id), FlightState::queued);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::timeout), "the seat lapsed"});
  EXPECT_EQ(state(id), FlightState::queued);
  EXPECT_EQ(attempt(id), 1);
  out.clear();
  grant(prefill0, 2);
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill0));
  EXPECT_TRUE(heard<wire::decode_seat>(decode1));
  core->cancel(id, Code::cancelled, now);
  listen();
  done(prefill0, id, Code::cancelled);
  done(decode1, id, Code::cancelled);
  expect_nothing_held();
}

TEST_F(RouterTest, ARequestThatEndedWhileItWaitedWasBoundAgain) {
  RouterCore::Options slow = options();
  slow.match_wait = seconds(20);
  begin(slow);
  const RequestId id = submit();
  core->end_all(Code::busy, "the service stops", now);
  listen();
  EXPECT_EQ(core->find(id)->match_until, instant_never);
  expect_nothing_held();
  // At the same time its match is over and nobody has come back.
  slow.match_wait = seconds(15);
  endings.clear();
  begin(slow);
  submit();
  lose(prefill0);
  lose(prefill1);
  advance(seconds(15));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(core->queued(), 0U);
  up(prefill0);
  EXPECT_EQ(count<wire::prefill_bind>(), 0);
  expect_nothing_held();
}

TEST_F(RouterTest, AnEndingSaysHowMuchOfThePromptWasRead) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId waits = submit();
  matched(waits, 3);
  core->cancel(waits, Code::cancelled, now);
  listen();
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].read_tokens, 0U);
  grant(prefill0, 8);
  const RequestId bound = submit();
  matched(bound, 0);
  core->cancel(bound, Code::cancelled, now);
  listen();
  EXPECT_EQ(endings.back().read_tokens, 0U);
  const auto over = [&](const RequestId& id) {
    for (const std::string& rank : {prefill0, decode0, decode1}) done(rank, id, Code::cancelled);
  };
  over(bound);
  const RequestId begun = submit();
  matched(begun, 2);
  wire::prefill_progress progress;
  progress.computed_tokens = 12;
  progress.swapped_blocks = 2;
  say(prefill0, scope(begun), progress);
  core->cancel(begun, Code::cancelled, now);
  listen();
  EXPECT_EQ(endings.back().read_tokens, 12U);
  EXPECT_EQ(endings.back().cached_tokens, 8U);
  over(begun);
  const RequestId failed = submit();
  matched(failed, 0);
  wire::request_done counts;
  counts.code = static_cast<wire::U16>(Code::unreachable);
  counts.computed_tokens = 6;
  say(prefill0, scope(failed), counts);
  core->cancel(failed, Code::cancelled, now);
  listen();
  EXPECT_EQ(endings.back().read_tokens, 6U);
  grant(prefill0, 100);
  out.clear();
  const RequestId answered = decoding();
  lose(decode0);
  core->cancel(answered, Code::cancelled, now);
  listen();
  EXPECT_EQ(endings.back().read_tokens, 18U);  // the prompt, without what was produced
}

TEST_F(RouterTest, AMessageCostTheFlightsOfEverybodyElse) {
  RouterCore::Options many = options();
  many.flights_max = 5000;
  begin(many);
  grant(prefill0, 1);
  grant(prefill1, 0);
  const RequestId id = decoding();
  for (int i = 0; i < 2000; ++i) matched(submit(), 0);
  EXPECT_EQ(core->queued(), 2000U);
  const std::uint64_t before = core->visits();
  for (std::uint32_t index = 2; index < 9; ++index) token(decode0, id, index);
  for (int i = 0; i < 100; ++i) grant(prefill1, 0);
  advance(milliseconds(10));
  EXPECT_EQ(core->visits() - before, 7U);
  EXPECT_EQ(core->next_due(), now - milliseconds(10) + seconds(60));  // its next token
  grant(prefill1, 3);
  EXPECT_EQ(core->visits() - before, 10U);
}

TEST_F(RouterTest, AnotherModelBehindTheNameEndsWhatWasBegunAndCountsItsOwnBlocks) {
  const RequestId streams = decoding();
  for (const std::string& name : {prefill0, prefill1, decode0, decode1}) lose(name);
  const RequestId waits = submit();
  core->start_over(8, "the model is another one now", now);
  listen();
  ASSERT_EQ(endings.size(), 2U);
  for (const Ending& ending : endings) EXPECT_EQ(ending.code, Code::busy);
  EXPECT_NE(core->find(streams), nullptr);
  EXPECT_NE(core->find(waits), nullptr);
  expect_nothing_held();
  up(prefill0);
  up(decode0);
  out.clear();
  NewRequest request;
  request.model = "m";
  request.prompt.resize(18);
  request.keys.resize(2);
  EXPECT_TRUE(core->submit(std::move(request), now).ok());
  listen();
  EXPECT_EQ(heard<wire::meta_match>(meta)->keys.size(), 2U);
}

TEST_F(RouterTest, ACancelledRequestStayedInTheQueue) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId first = submit();
  matched(first, 0);
  for (int i = 0; i < 5; ++i) {
    const RequestId id = submit();
    matched(id, 3);
    core->cancel(id, Code::cancelled, now);
    listen();
    EXPECT_TRUE(heard<wire::kv_release>(kvd));
  }
  EXPECT_EQ(core->queued(), 1U);
  EXPECT_EQ(core->flights().size(), 1U);
}

TEST_F(RouterTest, TokenZeroMayComeAfterTokensOfDecode) {
  const RequestId id = seated();
  say(decode0, scope(id), wire::decode_started{5, 4});
  token(decode0, id, 1);
  token(decode0, id, 2, 1, wire::Finish::stop);
  EXPECT_TRUE(emissions.empty());
  done(decode0, id);
  token(prefill0, id, 0);
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1, 2}));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].finish, wire::Finish::stop);
  done(prefill0, id);
  expect_nothing_held();
}

TEST_F(RouterTest, AGapReentersWithWhatWasProduced) {
  const RequestId id = decoding();
  token(decode0, id, 3);
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(core->next_due(), now + seconds(3));
  advance(seconds(3));
  EXPECT_EQ(attempt(id), 2);
  EXPECT_EQ(heard<wire::request_stop>(decode0)->reason, static_cast<wire::U16>(Code::stale));
  EXPECT_TRUE(heard<wire::meta_match>(meta));
  matched(id, 4, 2);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  EXPECT_EQ(bind->tokens.size(), 20U);
  EXPECT_EQ(bind->tokens.back(), 1001U);
  EXPECT_EQ(bind->first_index, 2U);
  EXPECT_EQ(bind->keys.size(), 5U);
  token(decode0, id, 2);  // of the attempt that is over
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1}));
  token(prefill0, id, 2, 2);
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1, 2}));
}

TEST_F(RouterTest, AFilledGapIsForgotten) {
  const RequestId id = decoding();
  token(decode0, id, 3);
  token(decode0, id, 2);
  advance(seconds(4));
  EXPECT_EQ(attempt(id), 1);
}

TEST_F(RouterTest, AGapOfAnAttemptThatIsOverEndedTheNextOne) {
  const RequestId id = decoding();
  lose(decode0);
  EXPECT_EQ(attempt(id), 2);
  matched(id, 0, 2);
  token(prefill0, id, 4, 2);  // nonsense, but a gap
  advance(seconds(3));
  EXPECT_EQ(attempt(id), 3);  // waits before it starts
  EXPECT_EQ(core->next_due(), now + milliseconds(100));
  advance(milliseconds(50));
  EXPECT_EQ(attempt(id), 3);
  advance(milliseconds(50));
  EXPECT_EQ(attempt(id), 3);
  EXPECT_EQ(count<wire::meta_match>(), 2);
}

TEST_F(RouterTest, AttemptsAreCounted) {
  const RequestId id = submit();
  const auto busy = static_cast<wire::U16>(Code::busy);
  for (std::uint16_t attempt = 1; attempt <= 4; ++attempt) {
    if (attempt > 2) {
      EXPECT_EQ(core->next_due(), now + milliseconds(50) * (1 << (attempt - 2)));
      advance(milliseconds(50) * (1 << (attempt - 2)));
    }
    matched(id, 0, attempt);
    auto bind = heard<wire::prefill_bind>(prefill0);
    const std::string rank = bind ? prefill0 : prefill1;
    if (!bind) bind = heard<wire::prefill_bind>(prefill1);
    ASSERT_TRUE(bind) << attempt;
    say(rank, scope(id, attempt), wire::prefill_refused{bind->bind, busy, "no place", 0, {}});
  }
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::unreachable);
  EXPECT_EQ(endings[0].attempts, 4);
  for (std::uint16_t attempt = 1; attempt <= 4; ++attempt) done(decode0, id, Code::stale, attempt);
  expect_nothing_held();
}

TEST_F(RouterTest, AnInvalidBindIsAnErrorAtOnce) {
  const RequestId id = submit();
  matched(id, 0);
  say(prefill0, scope(id),
      wire::prefill_refused{1, static_cast<wire::U16>(Code::invalid), "too long", 0, {}});
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::invalid);
  EXPECT_EQ(endings[0].reason, "too long");
}

TEST_F(RouterTest, ARefusedSeatIsAskedElsewhereAndLaterAgain) {
  const RequestId id = submit();
  matched(id, 0);
  const auto busy = static_cast<wire::U16>(Code::busy);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(decode0, scope(id), wire::seat_refused{busy, ""});
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode1, scope(id), wire::seat_refused{busy, ""});
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  advance(milliseconds(50));
  EXPECT_EQ(count<wire::decode_seat>(), 1);
  EXPECT_EQ(attempt(id), 1);
}

TEST_F(RouterTest, RequestsThatWaitForASeatWalkedOverAllRanksAgainAndAgain) {
  grant(decode0, 0);
  grant(decode1, 0);
  for (int i = 0; i < 12; ++i) matched(submit(), 0);
  EXPECT_EQ(count<wire::prefill_bind>(), 12);
  for (int i = 0; i < 20; ++i) {
    grant(decode1, 0);
    advance(milliseconds(50));
  }
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  EXPECT_EQ(core->ranks().seat_walks(), 0U);
  grant(decode0, 3);
  advance(milliseconds(50));
  EXPECT_EQ(count<wire::decode_seat>(), 3);
  EXPECT_EQ(core->ranks().seat_walks(), 3U);
  grant(decode1, 100);
  advance(milliseconds(50));
  EXPECT_EQ(count<wire::decode_seat>(), 12);
  EXPECT_EQ(core->ranks().seat_walks(), 12U);
}

// The answer was lost, or the question: only the client's patience knew.
TEST_F(RouterTest, ASeatWithoutAnAnswerIsAskedForAgain) {
  const RequestId id = submit();
  matched(id, 0);
  const auto first = heard<wire::decode_seat>(decode0);
  ASSERT_TRUE(first);
  const std::uint64_t outstanding = core->ranks().outstanding();
  EXPECT_EQ(core->next_due(), now + seconds(2));
  advance(seconds(2));
  EXPECT_EQ(heard<wire::decode_seat>(decode0), first);
  EXPECT_EQ(core->ranks().outstanding(), outstanding);
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_EQ(count<wire::prefill_target>(), 1);
  advance(seconds(2));
  EXPECT_EQ(count<wire::decode_seat>(), 0);
}

TEST_F(RouterTest, ASeatThatNobodyWaitsForIsGivenBack) {
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  advance(seconds(2));
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  // The refusal was only late, and the second question found room.
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::busy), ""});
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  EXPECT_EQ(core->find(id)->seat, 0U);
}

TEST_F(RouterTest, AnInvalidSeatIsAnErrorAtOnce) {
  const RequestId id = submit();
  matched(id, 0);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::invalid), "too long"});
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::invalid);
  EXPECT_TRUE(heard<wire::request_stop>(prefill0));
}

TEST_F(RouterTest, NoSeatIsAskedFarAheadNorForASingleToken) {
  RouterCore::Options near = options();
  near.seat_ahead_us = 5;
  begin(near);
  const RequestId far = submit();
  matched(far, 0);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  EXPECT_EQ(core->next_due(), now + seconds(600));
  say(prefill0, scope(far), wire::prefill_progress{4, 10, 0, {}});
  EXPECT_EQ(count<wire::decode_seat>(), 1);
  out.clear();
  begin();
  const RequestId single = submit(18, 1);
  matched(single, 0);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  token(prefill0, single, 0);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].finish, wire::Finish::length);  // its own bound
}

TEST_F(RouterTest, ASeatThatIsLostFarAheadDidNotSpinTheTimer) {
  RouterCore::Options near = options();
  near.seat_ahead_us = 100;
  begin(near);
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(prefill0, scope(id), wire::prefill_progress{5000, 10, 0, {}});  // slower than it looked
  lose(decode0);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  EXPECT_GT(core->next_due(), now);
}

TEST_F(RouterTest, ASeatWasAskedOfTheRankThatIsLost) {
  lose(decode1);
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  lose(decode0);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  join(decode0, generations.at(decode0));  // the same process, another connection
  advance(milliseconds(50));
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  lose(decode0);  // its accounts add up
}

TEST_F(RouterTest, TheLastTokenFromPrefillGivesTheSeatBack) {
  const RequestId id = seated();
  token(prefill0, id, 0, 1, wire::Finish::stop);
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  ASSERT_EQ(endings.size(), 1U);
  done(prefill0, id);
  expect_nothing_held();
}

TEST_F(RouterTest, AFailedHandOverAsksForAnotherSeat) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  hand_over_failed(id, Code::not_found);
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode1, scope(id), wire::seat_granted{5, kvd});
  EXPECT_EQ(heard<wire::prefill_target>(prefill0)->decode, decode1);
  EXPECT_EQ(attempt(id), 1);
}

// Seats of two decode instances may have the same number.
TEST_F(RouterTest, AFailedHandOverToAnEarlierSeatGaveUpTheSeatOfNow) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::timeout), "lapsed"});
  hand_over_failed(id, Code::not_found);  // nobody is seated
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode1, scope(id), wire::seat_granted{5, kvd});
  ASSERT_TRUE(heard<wire::prefill_target>(prefill0));
  hand_over_failed(id, Code::not_found);
  EXPECT_EQ(count<wire::seat_release>(), 0);
  hand_over_failed(id, Code::not_found, 5, decode1);
  EXPECT_EQ(heard<wire::seat_release>(decode1)->seat, 5U);
  EXPECT_EQ(attempt(id), 1);
}

TEST_F(RouterTest, ASeatBehindASlowLinkIsGivenUpForOneNextToThePages) {
  labels = {{prefill0, "a"}, {decode0, "b"}, {decode1, "a"}, {prefill1, "b"}};
  begin();
  lose(decode1);
  const RequestId id = seated();
  token(prefill0, id, 0);
  up(decode1);
  out.clear();
  hand_over_failed(id, Code::timeout);
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  EXPECT_EQ(attempt(id), 1);
}

TEST_F(RouterTest, WithoutSuchASeatThePromptIsReadAgainNearTheFirstOne) {
  labels = {{prefill0, "a"}, {decode0, "b"}, {prefill1, "b"}};
  begin();
  lose(decode1);
  const RequestId id = seated();
  token(prefill0, id, 0);
  hand_over_failed(id, Code::timeout);
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  EXPECT_EQ(attempt(id), 2);
  matched(id, 0, 2);
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill1));  // not the first by name
  const std::vector<TimelineRow>& rows = core->find(id)->timeline;
  EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [](const TimelineRow& row) {
    return row.event == "handover_failed" && row.detail.find("code=timeout") != std::string::npos;
  }));
}

TEST_F(RouterTest, WhereNobodyReadsNearTheSeatThePagesWaitForTheLink) {
  labels = {{prefill0, "a"}, {prefill1, "a"}, {decode0, "b"}};
  begin();
  lose(decode1);
  const RequestId id = seated();
  token(prefill0, id, 0);
  // More often than a request may have attempts.
  for (std::uint64_t seat = 6; seat < 12; ++seat) {
    hand_over_failed(id, Code::timeout, seat - 1);
    advance(milliseconds(50));
    ASSERT_TRUE(heard<wire::decode_seat>(decode0));
    say(decode0, scope(id), wire::seat_granted{seat, kvd});
    EXPECT_EQ(heard<wire::prefill_target>(prefill0)->seat, seat);
  }
  EXPECT_EQ(attempt(id), 1);
  EXPECT_TRUE(endings.empty());
}

TEST_F(RouterTest, ARequestWithItsFirstTokenWaitedForASeatThatNobodyCouldGive) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  lose(decode0);
  lose(decode1);
  advance(seconds(14));
  EXPECT_TRUE(endings.empty());  // a supervisor may bring one back
  advance(seconds(1));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::busy);
  done(prefill0, id, Code::stale);
  expect_nothing_held();
}

TEST_F(RouterTest, ALostAnswerAboutTheHandOverStoppedARunningRequest) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::decode_started{5, 4});
  hand_over_failed(id, Code::timeout);
  EXPECT_EQ(count<wire::seat_release>(), 0);
  EXPECT_TRUE(heard<wire::request_stop>(prefill0));
  done(prefill0, id, Code::stale);
  EXPECT_EQ(attempt(id), 1);
  EXPECT_EQ(state(id), FlightState::decoding);
}

TEST_F(RouterTest, ASeatLostAfterTheHandOverReenters) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  done(prefill0, id);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::timeout), "lapsed"});
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, AnEndOfPrefillForASeatThatIsLostReenters) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::busy), "no"});
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  done(prefill0, id);  // it had handed over to the first
  EXPECT_EQ(attempt(id), 2);
  EXPECT_TRUE(heard<wire::request_stop>(decode1));
}

TEST_F(RouterTest, ATargetThatFindsNothingReenters) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::busy), "no"});
  say(decode1, scope(id), wire::seat_granted{5, kvd});
  ASSERT_TRUE(heard<wire::prefill_target>(prefill0));
  done(prefill0, id);
  EXPECT_EQ(attempt(id), 1);  // it may have been for this seat
  const auto not_found = static_cast<wire::U16>(Code::not_found);
  say(prefill0, scope(id), wire::prefill_refused{0, not_found, "not here", 5, decode0});
  EXPECT_EQ(attempt(id), 1);  // for the one before
  say(prefill0, scope(id), wire::prefill_refused{0, not_found, "not here", 5, decode1});
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, APrefillLostBeforeDecodeStartedReenters) {
  const RequestId waits = seated();
  token(prefill0, waits, 0);
  done(prefill0, waits);
  lose(prefill0);
  EXPECT_EQ(attempt(waits), 2);
  lose(prefill0);  // and only once
  EXPECT_EQ(attempt(waits), 2);
}

TEST_F(RouterTest, LossesReenterWhereTheyMatter) {
  const RequestId bound = submit();
  matched(bound, 0);
  lose(prefill0);
  EXPECT_EQ(attempt(bound), 2);
  begin();
  const RequestId decodes = decoding();
  lose(prefill0);  // it is through
  EXPECT_EQ(attempt(decodes), 1);
  lose(decode0);
  EXPECT_EQ(attempt(decodes), 2);
  begin();
  const RequestId early = seated();
  say(decode0, scope(early), wire::decode_started{5, 4});
  token(decode0, early, 1);
  lose(prefill0);  // token 0 never came
  EXPECT_EQ(attempt(early), 2);
}

TEST_F(RouterTest, EndsWithACodeReenter) {
  const RequestId bound = seated();
  done(prefill0, bound, Code::unreachable);
  EXPECT_EQ(attempt(bound), 2);
  begin();
  const RequestId decodes = decoding();
  done(decode0, decodes, Code::unreachable);
  EXPECT_EQ(attempt(decodes), 2);
}

TEST_F(RouterTest, AnEndOfDecodeWithoutItsTokensReenters) {
  const RequestId id = decoding();
  done(decode0, id);  // and the last token is missing
  advance(seconds(3));
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, CancelInEachState) {
  const RequestId matching = submit();
  core->cancel(matching, Code::cancelled, now);
  listen();
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId queued = submit();
  matched(queued, 0);
  core->cancel(queued, Code::cancelled, now);
  listen();
  EXPECT_TRUE(core->flights().empty());
  grant(prefill0, 8);
  grant(prefill1, 8);
  out.clear();
  const RequestId prefill = seated();
  core->cancel(prefill, Code::timeout, now);
  core->cancel(prefill, Code::cancelled, now);
  listen();
  EXPECT_EQ(heard<wire::request_stop>(prefill0)->reason, static_cast<wire::U16>(Code::timeout));
  EXPECT_TRUE(heard<wire::request_stop>(decode0));
  token(prefill0, prefill, 0);  // too late
  done(prefill0, prefill, Code::timeout);
  done(decode0, prefill, Code::timeout);
  EXPECT_TRUE(emissions.empty());
  const RequestId decodes = decoding();
  core->cancel(decodes, Code::cancelled, now);
  listen();
  EXPECT_TRUE(heard<wire::request_stop>(decode0));
  EXPECT_EQ(state(decodes), FlightState::closing);
  done(decode0, decodes, Code::cancelled);
  EXPECT_EQ(endings.size(), 4U);
  expect_nothing_held();
}

TEST_F(RouterTest, AStopStringEndsWell) {
  const RequestId id = decoding();
  core->cancel(id, Code::ok, now);
  listen();
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::ok);
  EXPECT_TRUE(heard<wire::request_stop>(decode0));
}

TEST_F(RouterTest, LegsThatDoNotEndAreKilled) {
  const RequestId id = decoding();
  core->cancel(id, Code::cancelled, now);
  EXPECT_EQ(core->next_due(), now + seconds(5));
  advance(seconds(5));
  EXPECT_TRUE(heard<wire::request_kill>(decode0));
  expect_nothing_held();
}

TEST_F(RouterTest, NoFirstTokenIsAnError) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  submit();
  advance(seconds(600));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::timeout);
  expect_nothing_held();
}

TEST_F(RouterTest, NoNextTokenReenters) {
  const RequestId id = decoding();
  advance(seconds(60));
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, TheWholeRequestIsBounded) {
  RouterCore::Options patient = options();
  patient.next_token_wait = seconds(3000);
  begin(patient);
  decoding();
  advance(seconds(1800));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::timeout);
}

TEST_F(RouterTest, AnswersOfOtherRanksAndGenerationsWereTaken) {
  up(decode0, 2);
  const RequestId id = submit();
  matched(id, 0);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::decode_seat>(decode0, &asked) || heard<wire::decode_seat>(decode1, &asked));
  const std::string rank = core->find(id)->decode.rank.instance;
  wire::Scope other = scope(id);
  other.rank = static_cast<wire::U16>(asked.rank + 1);
  say(rank, other, wire::seat_refused{static_cast<wire::U16>(Code::busy), ""});
  say(rank, other, wire::seat_granted{5, kvd});
  wire::request_done ended;
  ended.leg = 1;
  ended.code = static_cast<wire::U16>(Code::stale);
  say(rank, other, ended);
  EXPECT_TRUE(core->find(id)->decode.open);
  EXPECT_EQ(core->find(id)->seat, 0U);
  core->on_message(wire::Envelope::make(rank, generations.at(rank) + 1, asked, wire::seat_granted{5, kvd}),
                   now);
  EXPECT_EQ(core->find(id)->seat, 0U);
  say(rank, asked, wire::seat_granted{6, kvd});
  EXPECT_EQ(core->find(id)->seat, 6U);
}

TEST_F(RouterTest, EndsAreAcknowledgedWhoeverTheyAreOf) {
  RequestId unknown;
  unknown.raw[3] = std::byte{9};
  done(decode0, unknown);
  EXPECT_EQ(heard<wire::done_ack>(decode0)->leg, 1);
}

TEST_F(RouterTest, FinishedRequestsAreRememberedWithinABound) {
  RouterCore::Options few = options();
  few.explain_max = 2;
  begin(few);
  std::vector<RequestId> ids;
  for (int i = 0; i < 3; ++i) {
    ids.push_back(submit());
    core->cancel(ids.back(), Code::cancelled, now);
    listen();
  }
  EXPECT_EQ(core->find(ids[0]), nullptr);
  ASSERT_NE(core->find(ids[2]), nullptr);
  EXPECT_FALSE(core->find(ids[2])->timeline.empty());
  EXPECT_TRUE(core->find(ids[2])->request.prompt.empty());
}

TEST_F(RouterTest, ScriptPiecesTravelWithAReentry) {
  const RequestId id = seated();
  wire::TokenEvent event;
  event.request = id;
  event.attempt = 1;
  event.token.id = wire::script_token_base;
  event.token.bytes = {std::byte{'x'}};
  say(prefill0, {}, wire::token_batch{{event}});
  lose(prefill0);
  matched(id, 0, 2);
  const auto bind = heard<wire::prefill_bind>(prefill1);
  ASSERT_TRUE(bind);
  ASSERT_EQ(bind->resume.size(), 1U);
  EXPECT_EQ(bind->resume[0], Bytes{std::byte{'x'}});
  EXPECT_EQ(bind->first_index, 1U);
}

}  // namespace
}  // namespace di::request
