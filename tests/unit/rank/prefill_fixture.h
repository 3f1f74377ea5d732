// A prefill rank's core, and a request brought to where a test begins.
#pragma once

#include "rank/prefill.h"
#include "tests/unit/rank/peers.h"

namespace di::rank {

class PrefillTest : public CoreTest<PrefillCore> {
 protected:
  PrefillTest() { begin(); }

  static wire::prefill_bind bind_of(std::uint32_t tokens, std::uint32_t hit_blocks = 0) {
    wire::prefill_bind bind;
    bind.bind = 1;
    bind.tokens = test_tokens(tokens);
    bind.keys = kv::chain_keys(Key{}, bind.tokens, 4);
    bind.hit_blocks = hit_blocks;
    bind.sampling.max_tokens = 20;
    bind.cost_us = 100;
    bind.tenant = test_tenant;
    return bind;
  }
  // Answers the newest kv_open; slots are numbered from `first`.
  void grant(const wire::Scope& scope, std::uint32_t first = 0) {
    const auto open = heard<wire::kv_open>();
    ASSERT_TRUE(open);
    wire::kv_opened opened{0, open->tag, {}};
    for (std::size_t i = 0; i < open->page_blocks.size(); ++i) {
      opened.slots.push_back(slot(first + static_cast<std::uint32_t>(i), open->page_blocks[i]));
    }
    from_kvd(scope, opened);
  }
  // Bound, and in the engine.
  void run(const wire::Scope& scope, std::uint32_t tokens, std::uint32_t hit_blocks = 0) {
    from_router(scope, bind_of(tokens, hit_blocks));
    if (hit_blocks > 0) {
      ASSERT_TRUE(heard<wire::kv_fetch>());
      from_kvd(scope, wire::kv_fetching{0, 77, hit_blocks, {slot(50, hit_blocks)}});
    }
    grant(scope);
    ASSERT_TRUE(take());
    ASSERT_EQ(batch->admissions.size(), 1U);
    give();
  }
  void ready(const wire::Scope& scope, std::uint32_t groups, std::uint32_t failed_block = wire::block_none) {
    from_kvd(scope, wire::kv_ready{77, groups, failed_block, groups == 4, {}, {}});
  }
  // The row of the batch in hand computed everything and chose a token.
  void token(std::uint32_t tokens, engine::Finish finish = engine::Finish::none) {
    engine::RowResult& row = done.step.rows.at(0);
    row.computed_tokens = tokens;
    row.has_token = true;
    row.token.id = 42;
    row.finish = finish;
  }
  // Up to its token; pages are not sealed yet.
  void choose(const wire::Scope& scope, std::uint32_t tokens) {
    run(scope, tokens);
    ASSERT_TRUE(take());
    ASSERT_EQ(batch->plan.rows.size(), 1U);
    token(tokens);
    give();
    ASSERT_TRUE(heard<wire::token_batch>());
  }
  // Everything sealed, no seat.
  void wait(const wire::Scope& scope, std::uint32_t tokens) {
    choose(scope, tokens);
    ASSERT_TRUE(take());
    give();
    ASSERT_TRUE(heard<wire::kv_sealed>());
    ASSERT_EQ(gauge("holds"), 1U);
  }
  static wire::prefill_target target_of(std::uint64_t seat, std::string decode = "di-decode.0") {
    return {seat, std::move(decode), 0, 9, kvd};
  }
  void handed(const wire::Scope& scope, std::uint64_t seat, Code code = Code::ok,
              const std::string& decode = "di-decode.0") {
    from_kvd(scope, wire::kv_handed{seat, static_cast<wire::U16>(code), decode});
  }
  void acknowledge(const wire::Scope& scope) { from_router(scope, wire::done_ack{0}); }
  void expect_end(Code code) {
    const auto ended = heard<wire::request_done>();
    ASSERT_TRUE(ended);
    EXPECT_EQ(ended->code, static_cast<wire::U16>(code)) << ended->reason;
    EXPECT_EQ(ended->leg, 0);
    EXPECT_TRUE(heard<wire::kv_release>());
  }

  const wire::Scope one = test_scope(1);
  const wire::Scope two = test_scope(2);
};

}  // namespace di::rank
