// rank/core.h: what the cores of a prefill and of a decode rank have in common: requests by name and by
// sequence, routers with their credits and endings, the own di-kvd, and the batch that is out.
//
// RankCore is what a shell drives; CoreOf<Request> is the common part, from which PrefillCore and DecodeCore
// derive.  A Request derives from RankRequest.  Pure: events in, messages and engine batches out.
// Owner: the loop thread of the rank's process.  Bound: requests_max requests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "balance/cost.h"
#include "rank/batch.h"
#include "rank/credit.h"
#include "rank/ending.h"
#include "rank/gauge.h"

namespace di::rank {

class RankCore {
 public:
  virtual ~RankCore() = default;

  // From routers and from the own di-kvd.
  virtual void on_message(const wire::Envelope& message, Instant now) = 0;
  virtual void on_router_up(const std::string& router, std::uint32_t generation) = 0;
  virtual void on_router_lost(const std::string& router) = 0;
  // The own host daemon is there and its arena is mapped, or it is gone (empty name).
  virtual void on_arena(const std::string& kvd, std::uint32_t generation, Instant now) = 0;
  virtual void on_batch_done(BatchDone done, Instant now) = 0;
  virtual void on_time(Instant now) = 0;
  virtual void set_draining(bool draining) = 0;

  // Work for the engine thread; none while a batch is out or nothing is to be done at `now`.
  [[nodiscard]] virtual std::optional<Batch> next_batch(Instant now) = 0;
  // Messages to send, in order.  Credits are written here, once per turn.
  [[nodiscard]] virtual std::vector<wire::Envelope> take_outgoing() = 0;
  [[nodiscard]] virtual Instant next_due() const = 0;

  // Fitted costs, as lines of text that outlive the process.  Errors of restore_costs(): invalid, and some of
  // the costs may stay what they were.
  [[nodiscard]] virtual std::string costs() const = 0;
  virtual Status restore_costs(std::string_view text) = 0;

  [[nodiscard]] virtual std::vector<Gauge> gauges() const = 0;
  [[nodiscard]] virtual bool idle() const = 0;
  [[nodiscard]] virtual std::size_t running() const = 0;
};

// What every request of a rank has.
struct RankRequest {
  Handle handle = 0;
  std::string router;
  std::uint32_t router_generation = 0;
  wire::Scope scope;
  bool in_engine = false;
  bool stepping = false;  // a row is in the batch that is out
  bool cancel_asked = false;
  bool cancel_sent = false;
  Code cancel_code = Code::cancelled;
  engine::SequenceId sequence = 0;
  std::uint32_t computed_tokens = 0;
  std::uint32_t swapped_blocks = 0;
  Instant not_before{};
  engine::Finish finish = engine::Finish::none;
};

[[nodiscard]] inline std::uint32_t blocks_of(std::uint32_t tokens, std::uint32_t block_tokens) {
  return (tokens + block_tokens - 1) / block_tokens;
}

template <class Request>
class CoreOf : public RankCore {
 public:
  void on_router_up(const std::string& router, std::uint32_t generation) final {
    credits_.open(router, generation);
    for (wire::Envelope& again : endings_.of(router)) outgoing_.push_back(std::move(again));
  }
  void on_router_lost(const std::string& router) final {
    credits_.close(router);
    endings_.forget(router);
    std::vector<Handle> gone;
    for (const auto& [handle, request] : requests_) {
      if (request.router == router) gone.push_back(handle);
    }
    for (const Handle handle : gone) forget(handle);
  }
  void set_draining(bool draining) final {
    draining_ = draining;
    credits_.touch();
  }
  [[nodiscard]] std::vector<wire::Envelope> take_outgoing() final {
    const bool open = !draining_ && !kvd_.empty();
    const Load load = this->load();
    if (open) {
      const std::size_t taken = std::min<std::size_t>(requests_max_, requests_.size());
      credits_.grant(requests_max_ - static_cast<std::uint32_t>(taken), load.free_us);
    }
    // In front of everything else: a router that hears of an end must not turn to a rank that has closed.
    std::vector<wire::Envelope> all;
    credits_.take_changed([&](const std::string& router, std::uint32_t generation, wire::rank_credit credit) {
      credit.running = static_cast<wire::U32>(requests_.size());
      credit.kv_tokens = load.kv_tokens;
      credit.kv_tokens_max = std::uint64_t{description_.pool_blocks} * description_.layout.block_tokens();
      credit.queue_us = load.queue_us;
      credit.draining = !open;
      credit.host = kvd_;
      credit.cost_base_us = cost_.base_us();
      credit.cost_token_us = cost_.token_us();
      credit.cost_context_us = cost_.context_us();
      all.push_back(wire::Envelope::make(router, generation, wire::Scope{{}, 0, rank_, 0}, credit));
    });
    for (wire::Envelope& message : outgoing_) all.push_back(std::move(message));
    outgoing_.clear();
    return all;
  }
  [[nodiscard]] std::string costs() const override { return cost_.to_text(); }
  Status restore_costs(std::string_view text) override { return cost_.restore(text); }
  [[nodiscard]] bool idle() const final { return requests_.empty() && endings_.count() == 0; }
  [[nodiscard]] std::size_t running() const final { return requests_.size(); }
  [[nodiscard]] std::uint64_t steps() const { return steps_; }

 protected:
  using Name = std::pair<RequestId, std::uint16_t>;

  CoreOf(std::uint16_t rank, std::uint32_t requests_max, const balance::StepCost::Shape& cost,
         engine::Description description)
      : rank_(rank), requests_max_(requests_max), description_(std::move(description)), cost_(cost) {}

  // What the next credit says, and grants when the rank is open.
  struct Load {
    std::uint64_t free_us = 0;
    std::uint64_t kv_tokens = 0;
    std::uint64_t queue_us = 0;
  };
  [[nodiscard]] virtual Load load() const = 0;
  // The request is gone, without a word to its router.
  virtual void forget(Handle handle) = 0;

  [[nodiscard]] Request* find(const wire::Scope& scope) {
    const auto found = by_name_.find(Name{scope.request, scope.attempt});
    return found == by_name_.end() ? nullptr : &requests_.at(found->second);
  }
  // A new request, as a router's message brought it.
  Request& add(const wire::Envelope& message, Request request) {
    request.handle = next_handle_++;
    request.router = message.peer;
    request.router_generation = message.peer_generation;
    request.scope = message.scope;
    request.scope.rank = rank_;
    request.scope.deadline_ms = 0;
    by_name_.emplace(Name{message.scope.request, message.scope.attempt}, request.handle);
    return requests_.emplace(request.handle, std::move(request)).first->second;
  }
  // The common part of forget().  `copies`: the batch that is out reads or writes pages of it, which di-kvd
  // must not give to others yet.
  void remove(Request& request, bool copies) {
    if (!copies) {
      to_kvd(request.scope, wire::kv_release{});
    } else if (!kvd_.empty()) {
      kv_releases_.push_back(request.scope);
    }
    if (request.in_engine) {
      releases_.push_back(request.sequence);
      by_sequence_.erase(request.sequence);
    }
    by_name_.erase(Name{request.scope.request, request.scope.attempt});
    requests_.erase(request.handle);
  }
  // The final counts go out and are kept until they are acknowledged.
  void tell_ending(const Request& request, wire::request_done done, Instant now) {
    done.finish = static_cast<wire::U8>(request.finish);
    done.swapped_blocks = request.swapped_blocks;
    outgoing_.push_back(endings_.add(request.router, request.router_generation, request.scope, done, now));
  }

  // A request that the engine took, or null: it is gone meanwhile, or refused (refused() has been called).
  template <class Refused>
  Request* admitted(const Admitted& answer, Refused&& refused) {
    const auto found = requests_.find(answer.handle);
    if (found == requests_.end()) {  // killed meanwhile
      if (answer.sequence) releases_.push_back(*answer.sequence);
      return nullptr;
    }
    if (!answer.sequence) {
      refused(answer.sequence.error());
      return nullptr;
    }
    Request& request = found->second;
    request.in_engine = true;
    request.sequence = *answer.sequence;
    by_sequence_[request.sequence] = request.handle;
    return &request;
  }
  // The batch that was out is back: pages that it used go, and the step is held until it is ready.
  void batch_back(BatchDone& done) {
    DI_ASSERT(batch_out_);
    batch_out_ = false;
    for (const wire::Scope& scope : std::exchange(kv_releases_, {})) to_kvd(scope, wire::kv_release{});
    held_step_ = std::move(done.step);
  }
  void observe(Duration took) {
    double tokens = 0;
    double context = 0;
    for (const auto& [row_tokens, row_context] : step_rows_) {
      tokens += row_tokens;
      context += row_tokens * row_context;
    }
    if (tokens <= 0) return;
    ++steps_;
    // Computing is what is learnt: not waiting for pages, and nothing from a step that left a row out.
    double waited_us = 0;
    for (const engine::RowResult& row : held_step_->rows) {
      if (row.state != engine::RowState::computed) return;
      double row_us = 0;
      for (const wire::Span& span : row.spans) {
        if (span.kind == static_cast<wire::U8>(wire::SpanKind::wait))
          row_us += static_cast<double>(span.length_us);
      }
      waited_us = std::max(waited_us, row_us);
    }
    cost_.observe(static_cast<std::uint32_t>(tokens), context / tokens,
                  static_cast<double>(to_us(took)) - waited_us);
  }
  // The held step, when its time has come.
  [[nodiscard]] std::optional<engine::StepResult> take_step(Instant now) {
    if (!held_step_.has_value() || held_step_->ready_at > now) return std::nullopt;
    return std::exchange(held_step_, std::nullopt);
  }
  [[nodiscard]] Request* of_row(const engine::RowResult& row) {
    const auto handle = by_sequence_.find(row.sequence);
    return handle == by_sequence_.end() ? nullptr : &requests_.at(handle->second);
  }
  [[nodiscard]] bool may_start_batch() const { return !batch_out_ && !held_step_.has_value(); }
  // The common part of next_due().
  [[nodiscard]] Instant common_due() const {
    return held_step_.has_value() ? std::min(held_step_->ready_at, endings_.next_due()) : endings_.next_due();
  }
  // While a batch is out nothing can start; what follows its end looks again.
  [[nodiscard]] Instant row_due(const Request& request) const {
    return may_start_batch() && request.not_before > Instant{} ? request.not_before : instant_never;
  }
  void repeat_endings(Instant now) {
    for (wire::Envelope& again : endings_.due(now)) outgoing_.push_back(std::move(again));
  }
  // What the engine is told of a cancel; true when the request's row has to wait for the answer.
  [[nodiscard]] static bool cancel_row(Request& request, Batch& batch) {
    if (!request.cancel_asked || request.cancel_sent || !request.in_engine) return false;
    request.cancel_sent = true;
    batch.cancels.emplace_back(request.handle, request.sequence);
    return true;  // most likely it is over
  }

  template <class M>
  void to_kvd(const wire::Scope& scope, const M& message) {
    if (!kvd_.empty()) outgoing_.push_back(wire::Envelope::make(kvd_, kvd_generation_, scope, message));
  }
  template <class M>
  void to_router(const Request& request, const M& message) {
    outgoing_.push_back(
        wire::Envelope::make(request.router, request.router_generation, request.scope, message));
  }

  const std::uint16_t rank_;
  const std::uint32_t requests_max_;
  engine::Description description_;
  balance::StepCost cost_;
  CreditBook credits_;
  Endings endings_;
  std::map<Handle, Request> requests_;
  std::map<Name, Handle> by_name_;
  std::map<engine::SequenceId, Handle> by_sequence_;
  Handle next_handle_ = 1;
  std::uint64_t next_tag_ = 1;
  std::string kvd_;
  std::uint32_t kvd_generation_ = 0;
  bool draining_ = false;
  bool batch_out_ = false;
  std::uint32_t pool_taken_ = 0;  // blocks
  std::vector<engine::SequenceId> releases_;
  std::optional<engine::StepResult> held_step_;              // until ready_at
  std::vector<std::pair<std::uint32_t, double>> step_rows_;  // (tokens, context) of the step that is out
  std::vector<wire::Scope> kv_releases_;                     // when the batch that is out no longer copies
  std::vector<wire::Envelope> outgoing_;
  std::uint64_t steps_ = 0;
};

}  // namespace di::rank
