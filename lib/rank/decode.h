// rank/decode.h: the core of one decode rank.  Pure: events in, messages and engine batches out.
//
// Owner: the loop thread of di-decode.  Bounds: Options::requests_max seats; the engine's pool, whose
// room is taken for a whole request (prompt plus all it may produce) when its seat is granted, so that a
// running request never has to be thrown out.
//
// A request passes through these states; any other pair of state and event is dropped as late:
//   expecting  kv_expect was sent           -> seated at kv_expected (busy: refused)
//   seated     seat_granted was sent        -> admitting at kv_seated; refused after `seat_ttl`
//   admitting  in the batch                 -> running; decode_started was sent
//   running    one token a step             -> closing at the last token
//   closing    full pages are exported      -> the end
// decode_seat said again before that: kv_expect or seat_granted again, whichever may have been lost.
// While running, a page is written to the arena whenever one is full, so that the next turn of a
// conversation hits; a page that finds no slot is given up, it is only a cache.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "rank/core.h"

namespace di::rank {

enum class DecodeState : std::uint8_t { expecting, seated, admitting, running, closing };
enum class DecodePage : std::uint8_t { none, opening, granted, exporting };

struct DecodeRequest : RankRequest {
  wire::decode_seat seat_request;
  std::uint64_t seat = 0;
  DecodeState state = DecodeState::expecting;
  Instant seat_until{};
  std::uint32_t entry = 0;
  std::uint32_t pool_blocks = 0;
  // Every known token: the prompt, the handed-over one, and what was produced here.
  std::vector<std::uint32_t> tokens;
  std::vector<Key> keys;  // of the full blocks of `tokens` so far computed
  std::optional<wire::kv_seated> seated;
  bool released_kv = false;      // kv_release after the swap-in was sent
  std::uint32_t next_index = 0;  // of the next token to be produced
  Code end_code = Code::ok;
  std::string end_reason;
  // The page being filled: blocks [page_first, ...) are computed here and not yet published.
  std::uint32_t page_first = 0;
  std::uint32_t page_count = 0;  // of the page that is being opened or exported
  DecodePage page_state = DecodePage::none;
  wire::SlotRef page_slot;
  std::uint64_t page_tag = 0;
  Instant page_until{};
};

class DecodeCore final : public CoreOf<DecodeRequest> {
 public:
  struct Options {
    std::uint16_t rank = 0;
    std::uint32_t requests_max = 128;
    Duration swap_wait = milliseconds(20);  // kv.swap_wait
    Duration seat_ttl = seconds(30);
    Duration open_wait = seconds(1);  // for slots of finished pages
    // Of another start of the process another one: hosts and ranks that have not heard of the start tell seats apart
    // by number and instance.  48 bits.
    std::uint64_t first_seat = 1;
    balance::StepCost::Shape cost;
  };

  DecodeCore(Options options, engine::Description description);

  void on_message(const wire::Envelope& message, Instant now) override;
  void on_arena(const std::string& kvd, std::uint32_t generation, Instant now) override;
  void on_batch_done(BatchDone done, Instant now) override;
  void on_time(Instant now) override;
  [[nodiscard]] std::optional<Batch> next_batch(Instant now) override;
  [[nodiscard]] Instant next_due() const override;
  [[nodiscard]] std::vector<Gauge> gauges() const override;

  [[nodiscard]] std::uint64_t tokens_produced() const { return tokens_produced_; }
  [[nodiscard]] std::uint64_t pages_given_up() const { return pages_given_up_; }

 private:
  using Request = DecodeRequest;
  using State = DecodeState;
  using PageState = DecodePage;

  [[nodiscard]] Load load() const override;
  void forget(Handle handle) override;
  void seat(const wire::Envelope& message, Instant now);
  void expect(const Request& request);
  void expected(Request& request, const wire::kv_expected& answer, Instant now);
  void seated(Request& request, wire::kv_seated answer, Instant now);
  void opened(Request& request, const wire::kv_opened& answer);
  void stop(Request& request, Code code, Instant now);
  void row_done(Request& request, const engine::RowResult& row, Instant now,
                std::map<std::string, std::pair<std::uint32_t, wire::token_batch>>& batches);
  void apply_step(const engine::StepResult& step, Instant now);
  void exported(Request& request, const Exported& page, Instant now);
  // Opens the next page when one is full, or, when closing, whatever is left of full blocks.
  void advance_page(Request& request, Instant now);
  void give_up_page(Request& request, Instant now);
  // Its pages are in the pool: di-kvd need not keep them.
  void swapped_in(Request& request, const engine::RowResult& row);
  void finish(Request& request, Code code, std::string reason, Instant now);
  void end(Handle handle, Instant now);
  void refuse(Handle handle, Code code, std::string reason, Instant now);
  [[nodiscard]] bool runnable(const Request& request, Instant now) const;

  // di-kvd names a seat by instance and number: the ranks of one process must not give the same one.
  [[nodiscard]] std::uint64_t new_seat() { return next_seat_++ << 16 | options_.rank; }

  const Options options_;
  std::uint64_t next_seat_ = options_.first_seat;
  std::uint64_t tokens_produced_ = 0;
  std::uint64_t pages_given_up_ = 0;
};

}  // namespace di::rank
