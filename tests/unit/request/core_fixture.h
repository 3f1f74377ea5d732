// The router's core between peers that the test plays.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kv/chain.h"
#include "request/core.h"

namespace di::request {

inline const std::string meta = "di-meta.0";
inline const std::string kvd = "di-kvd.host0";
inline const std::string prefill0 = "di-prefill.0";
inline const std::string prefill1 = "di-prefill.1";
inline const std::string decode0 = "di-decode.0";
inline const std::string decode1 = "di-decode.1";

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
  // The arena of the rank's host, or its own pool, is too small.
  void bind_never_fits(const std::string& rank, const RequestId& id) {
    const auto bind = heard<wire::prefill_bind>(rank);
    ASSERT_TRUE(bind);
    say(rank, scope(id),
        wire::prefill_refused{
            bind->bind, static_cast<wire::U16>(Code::invalid), "longer than the arena", 0, {}});
  }
  void seat_never_fits(const std::string& rank, const RequestId& id) {
    say(rank, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::invalid), "longer than the arena"});
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

}  // namespace di::request
