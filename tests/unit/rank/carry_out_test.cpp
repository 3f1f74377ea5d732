#include "rank/carry_out.h"

#include <gtest/gtest.h>

#include "engine/script.h"
#include "kv/chain.h"
#include "tests/unit/rank/peers.h"

namespace di::rank {
namespace {

class CarryOutTest : public ::testing::Test {
 protected:
  CarryOutTest() {
    kv::ArenaOwner::Options options;
    options.name = "test";
    options.payload_bytes = 32 * layout.page_bytes(1);
    options.slots_max = 16;
    options.entries_max = 4;
    owner = *kv::ArenaOwner::create(options);
    owner->set_generation(1);
    arena = *kv::ArenaClient::map(owner->fd(), owner->bytes());
    auto lines =
        engine::script_parse(R"({"match":"","pieces":[{"text":"a"},{"text":"b"}],"finish":"stop"})", "test");
    engine::ScriptEngine::Options made{.description = test_description(), .lines = *std::move(lines)};
    engine = *engine::ScriptEngine::create(std::move(made));
  }
  // A slot of `blocks` blocks at unit `at`.
  wire::SlotRef granted(std::uint32_t number, std::uint32_t blocks, std::uint32_t at) {
    owner->slot_assign({.slot = number,
                        .generation = 1,
                        .page_blocks = blocks,
                        .offset = at * layout.page_bytes(1),
                        .bytes = layout.page_bytes(blocks),
                        .state = kv::SlotState::granted});
    return {number, 1, blocks, 0, blocks};
  }

  const kv::Layout layout = test_description().layout;
  std::unique_ptr<kv::ArenaOwner> owner;
  std::shared_ptr<kv::ArenaClient> arena;
  std::unique_ptr<engine::ScriptEngine> engine;
  ManualClock clock;
};

TEST_F(CarryOutTest, WhatOneRankExportsAnotherSwapsIn) {
  Batch batch;
  AdmitCommand admit;
  admit.handle = 7;
  admit.spec.tokens = test_tokens(10);
  admit.spec.known_tokens_max = 11;
  admit.spec.keys = kv::chain_keys(Key{}, admit.spec.tokens, 4);
  admit.spec.sampling.max_tokens = 9;
  batch.admissions.push_back(admit);
  BatchDone done = carry_out(std::move(batch), arena, *engine, clock);
  ASSERT_EQ(done.admitted.size(), 1U);
  EXPECT_EQ(done.admitted[0].handle, 7U);
  const engine::SequenceId sequence = *done.admitted[0].sequence;
  Batch step;
  step.plan.rows.push_back({sequence, 10});
  done = carry_out(std::move(step), arena, *engine, clock);
  ASSERT_TRUE(done.step.rows[0].has_token);
  const wire::SlotRef page = granted(1, 2, 0);
  const wire::SlotRef tail = granted(2, 1, 2);
  Batch exports;
  exports.exports.push_back({7, sequence, 0, 2, false, page});
  exports.exports.push_back({7, sequence, 2, 1, true, tail});
  done = carry_out(std::move(exports), arena, *engine, clock);
  ASSERT_TRUE(done.exported[0].crcs && done.exported[1].crcs);
  EXPECT_EQ(done.exported[0].crcs->size(), layout.groups());
  for (const std::uint32_t number : {1U, 2U}) {
    owner->slot_segments(number, 15);
    owner->slot_state(number, kv::SlotState::sealed);
  }
  Batch other;
  other.releases.push_back(sequence);
  admit.spec.leg = wire::Leg::decode;
  admit.spec.cached_tokens = 10;
  admit.spec.tokens.push_back(wire::script_token_base);
  admit.spec.known_tokens_max = 12;
  admit.spec.first_index = 1;
  admit.slots = {page, tail};
  other.admissions.push_back(admit);
  done = carry_out(std::move(other), arena, *engine, clock);
  Batch next;
  next.plan.rows.push_back({*done.admitted[0].sequence, 1});
  done = carry_out(std::move(next), arena, *engine, clock);  // the engine panics when a byte differs
  EXPECT_TRUE(done.step.rows[0].has_token);
  EXPECT_EQ(done.step.rows[0].swapped_blocks, 2U);
}

TEST_F(CarryOutTest, WithoutAnArenaNothingIsExported) {
  Batch batch;
  batch.exports.push_back({7, 1, 0, 2, false, {1, 1, 2, 0, 2}});
  const BatchDone done = carry_out(std::move(batch), nullptr, *engine, clock);
  ASSERT_FALSE(done.exported[0].crcs);
  EXPECT_EQ(done.exported[0].crcs.error().code, Code::unreachable);
}

TEST_F(CarryOutTest, ASlotThatWasTakenAwayIsNotWritten) {
  granted(1, 2, 0);
  Batch batch;
  batch.exports.push_back({7, 1, 0, 2, false, {1, 9, 2, 0, 2}});
  const BatchDone done = carry_out(std::move(batch), arena, *engine, clock);
  ASSERT_FALSE(done.exported[0].crcs);
  EXPECT_EQ(done.exported[0].crcs.error().code, Code::stale);
}

TEST_F(CarryOutTest, PagesBehindAFailedBlockWereAskedFor) {
  const wire::SlotRef first = granted(1, 2, 0);
  const wire::SlotRef second = granted(2, 2, 2);
  owner->slot_segments(1, 15);
  owner->entry_open((1U << 16) | 1U);
  owner->entry_set((1U << 16) | 1U, {4, 2});
  const ArenaSource source(arena, layout, {first, second}, (1U << 16) | 1U, false);
  EXPECT_EQ(source.blocks(), 4U);
  EXPECT_EQ(source.readiness().failed_block, 2U);
  const auto runs = source.segments(3);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_EQ(runs[0].count, 2U);
}

}  // namespace
}  // namespace di::rank
