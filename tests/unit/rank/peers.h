// Messages to and from a rank's core, and the engine's answers, as a test says them.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "kv/chain.h"
#include "rank/batch.h"
#include "rank/gauge.h"
#include "wire/envelope.h"

namespace di::rank {

inline const std::string router = "di-router.0";
inline const std::string kvd = "di-kvd.host0";
constexpr std::uint64_t test_tenant = 7;
constexpr std::uint32_t router_generation = 3;
constexpr std::uint32_t kvd_generation = 5;

// Four tokens a block, four blocks a page, four groups.
inline engine::Description test_description() {
  return {.model = "test",
          .layout = *kv::layout_mla("test-1", 4, 4, 16384),
          .revision = {},
          .context_tokens_max = 1000,
          .vocab = 1000,
          .pool_blocks = 40,
          .sequences_max = 8,
          .wants_debug_text = true};
}

inline std::vector<std::uint32_t> test_tokens(std::uint32_t count, std::uint32_t first = 0) {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

inline wire::Scope test_scope(std::uint32_t number, std::uint16_t attempt = 1) {
  RequestId id;
  put_le<std::uint32_t>(id.raw.data(), number);
  return {id, attempt, 0, 0};
}

template <class Core>
class CoreTest : public ::testing::Test {
 protected:
  void begin(typename Core::Options options = {}) {
    core.emplace(options, test_description());
    core->on_router_up(router, router_generation);
    core->on_arena(kvd, kvd_generation, now);
    listen();
    out.clear();
  }
  void listen() {
    for (wire::Envelope& message : core->take_outgoing()) out.push_back(std::move(message));
  }
  template <class M>
  void from_router(const wire::Scope& scope, const M& message) {
    core->on_message(wire::Envelope::make(router, router_generation, scope, message), now);
    listen();
  }
  template <class M>
  void from_kvd(const wire::Scope& scope, const M& message) {
    core->on_message(wire::Envelope::make(kvd, kvd_generation, scope, message), now);
    listen();
  }
  // The first message of this type that was said, taken out; nothing when there is none.
  template <class M>
  std::optional<M> heard() {
    for (auto message = out.begin(); message != out.end(); ++message) {
      if (message->number != M::number) continue;
      auto body = message->as<M>();
      EXPECT_TRUE(static_cast<bool>(body));
      const bool to_kvd = message->peer == kvd;
      EXPECT_EQ(message->peer_generation, to_kvd ? kvd_generation : router_generation);
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
  // Work for the engine; the answer is begun, with a row per row of the plan.
  bool take() {
    batch = core->next_batch(now);
    listen();
    done = {};
    if (!batch.has_value()) return false;
    for (const AdmitCommand& admit : batch->admissions) {
      Admitted& admitted = done.admitted.emplace_back();
      admitted.handle = admit.handle;
      admitted.sequence = next_sequence++;
    }
    for (const ExportCommand& page : batch->exports) {
      Exported& exported = done.exported.emplace_back();
      exported.handle = page.handle;
      exported.first = page.first;
      exported.tail = page.tail;
      exported.crcs = std::vector<std::uint32_t>{1, 2, 3, 4};
    }
    for (const auto& [handle, sequence] : batch->cancels) done.cancelled.emplace_back(handle, true);
    for (const engine::StepRow& row : batch->plan.rows) {
      engine::RowResult result;
      result.sequence = row.sequence;
      done.step.rows.push_back(result);
    }
    done.step.ready_at = now;
    done.step_took = milliseconds(1);
    return true;
  }
  void give() {
    core->on_batch_done(std::move(done), now);
    listen();
  }
  void advance(Duration by) {
    now = now + by;
    core->on_time(now);
    listen();
  }
  [[nodiscard]] std::uint64_t gauge(const std::string& name) const {
    for (const Gauge& gauge : core->gauges()) {
      if (gauge.name == name) return gauge.count;
    }
    ADD_FAILURE() << "no gauge " << name;
    return 0;
  }
  // Nothing is held once the engine was told and the router has acknowledged.
  void expect_nothing_held() {
    while (take()) give();
    for (const Gauge& gauge : core->gauges()) EXPECT_EQ(gauge.count, 0U) << gauge.name;
    EXPECT_TRUE(core->idle());
  }
  static wire::SlotRef slot(std::uint32_t number, std::uint32_t blocks) {
    return {number, 1, blocks, 0, blocks};
  }

  std::optional<Core> core;
  Instant now{1'000'000'000};
  std::vector<wire::Envelope> out;
  std::optional<Batch> batch;
  BatchDone done;
  engine::SequenceId next_sequence = 100;
};

}  // namespace di::rank
