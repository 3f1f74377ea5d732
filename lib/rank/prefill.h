// rank/prefill.h: the core of one prefill rank.  Pure: events in, messages and engine batches out.
//
// Owner: the loop thread of di-prefill.  Bounds: Options::requests_max requests; the engine's pool.
//
// A request passes through these states; any other pair of state and event is dropped as late:
//   fetching   kv_fetch was sent            -> opening at kv_fetching, cold after fetch_wait
//   opening    kv_open was sent             -> admitting at kv_opened (busy: asked again until open_wait;
//                                              what would never fit: refused)
//   admitting  waits for pool room          -> running when the engine took it
//   running    chunks are computed          -> sealing when a token was chosen
//   sealing    pages are exported, sealed   -> waiting, or the end when the token is final or a stop came
//   waiting    no seat is known             -> handing at prefill_target; the end after `hold`
//   handing    kv_handover was sent         -> the end at kv_handed, at the latest `hold` after its sending;
//                                              a new target hands over again; said again without an answer
// Ends: request_done is kept in Endings until done_ack; kv_release drops everything at the own di-kvd.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "rank/core.h"
#include "rank/fetch_watch.h"

namespace di::rank {

enum class PrefillState : std::uint8_t { fetching, opening, admitting, running, sealing, waiting, handing };

struct PrefillPage {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  bool tail = false;
  bool granted = false;
  bool exporting = false;
  bool sealed = false;
  wire::SlotRef slot;
  std::vector<std::uint32_t> crcs;
};

struct PrefillRequest : RankRequest {
  wire::prefill_bind bind;
  PrefillState state = PrefillState::fetching;
  std::uint32_t cached_blocks = 0;
  std::uint32_t entry = 0;
  std::vector<wire::SlotRef> cached_slots;
  std::uint32_t groups_ready = 0;
  std::uint32_t failed_block = wire::block_none;
  std::uint32_t groups_wanted = 0;  // runnable when groups_ready reaches it
  std::vector<PrefillPage> pages;
  std::uint64_t open_tag = 0;        // of the newest kv_open
  std::uint64_t open_since = 0;      // of the first one of which no answer was used; 0: all were
  std::vector<std::size_t> opening;  // pages that kv_open was sent for
  Instant open_again{};              // when to ask again after busy
  Instant open_until{};
  Instant fetch_asked{};
  Instant fetch_until{};           // while fetching
  std::vector<wire::Span> untold;  // of choices between fetching and computing, a few
  bool admitting = false;          // an admission is in the batch that is out
  bool computed_any = false;
  std::uint32_t overtaken = 0;  // admissions of later requests while it waits for room
  bool has_token = false;
  engine::TokenValue token;
  std::uint32_t index = 0;
  std::optional<wire::prefill_target> target;
  std::optional<wire::prefill_target> handing;  // seat numbers are unique within one decode instance only
  Instant hold_until = instant_never;
  Instant handover_again{};  // while handing
};

class PrefillCore final : public CoreOf<PrefillRequest> {
 public:
  struct Options {
    std::uint16_t rank = 0;
    std::uint32_t requests_max = 16;        // bound requests, waiting ones included
    std::uint32_t chunk_tokens = 512;       // tokens of one step, over all rows
    Duration swap_wait = milliseconds(20);  // kv.swap_wait
    bool overlap = true;                    // kv.overlap: start when layer group 0 is there
    bool arbiter = false;                   // kv.arbiter: compute what comes more slowly
    Duration hold = seconds(60);
    Duration fetch_wait = seconds(5);  // for the answer to kv_fetch; then the request is cold
    Duration open_wait = seconds(10);
    Duration work_window = seconds(4);  // predicted work granted ahead
    balance::StepCost::Shape cost;
  };

  PrefillCore(Options options, engine::Description description);

  void on_message(const wire::Envelope& message, Instant now) override;
  void on_arena(const std::string& kvd, std::uint32_t generation, Instant now) override;
  void on_batch_done(BatchDone done, Instant now) override;
  void on_time(Instant now) override;
  [[nodiscard]] std::optional<Batch> next_batch(Instant now) override;
  [[nodiscard]] Instant next_due() const override;
  [[nodiscard]] std::string costs() const override;
  Status restore_costs(std::string_view text) override;
  [[nodiscard]] std::vector<Gauge> gauges() const override;

  // Swapped-in ones are none of these.
  [[nodiscard]] std::uint64_t tokens_computed() const { return tokens_computed_; }
  [[nodiscard]] std::uint64_t blocks_swapped() const { return blocks_swapped_; }
  [[nodiscard]] double queue_us() const;
  [[nodiscard]] const FetchWatch& watch() const { return watch_; }

 private:
  using Request = PrefillRequest;
  using State = PrefillState;
  using Page = PrefillPage;

  [[nodiscard]] Load load() const override;
  void forget(Handle handle) override;
  void bind(const wire::Envelope& message, Instant now);
  void fetched(Request& request, const wire::kv_fetching& answer, Instant now);
  void opened(Request& request, const wire::kv_opened& answer, Instant now);
  void ready_moved(Request& request, const wire::kv_ready& ready, Instant now);
  void handed(Request& request, const wire::kv_handed& answer, Instant now);
  void stop(Request& request, Code code, Instant now);
  void row_computed(Request& request, const engine::RowResult& row);
  void row_done(Request& request, const engine::RowResult& row, Instant now);
  void apply_step(const engine::StepResult& step, Instant now);
  // Splits blocks [first, last) into pages and asks for slots for them.
  void open_pages(Request& request, std::uint32_t first, std::uint32_t last, bool tail, Instant now);
  void ask_open(Request& request, Instant now);
  void truncate(Request& request, std::uint32_t blocks, Instant now);
  [[nodiscard]] bool waits_for_blocks(const Request& request) const;
  // Gives up the fetches that are not worth waiting for.
  void look_at_fetches(Instant now);
  [[nodiscard]] double left_us(const Request& request) const;
  void advance_sealing(Request& request, Instant now);
  // Pages may go to another host's seat while later chunks compute.
  void push_early(const Request& request);
  void hand_over(Request& request, Instant now);
  void say_handover(Request& request, Instant now);
  void end(Handle handle, Code code, std::string reason, Instant now);
  void refuse(Handle handle, Code code, std::string reason, Instant now);
  [[nodiscard]] std::uint32_t blocks_needed(const Request& request) const;
  [[nodiscard]] bool runnable(const Request& request, Instant now) const;
  [[nodiscard]] std::uint32_t known_tokens(const Request& request) const {
    return static_cast<std::uint32_t>(request.bind.tokens.size());
  }

  const Options options_;
  FetchWatch watch_;
  std::map<Handle, std::uint32_t> pool_by_request_;
  std::vector<std::pair<engine::SequenceId, std::uint32_t>> truncations_;
  std::uint64_t tokens_computed_ = 0;
  std::uint64_t blocks_swapped_ = 0;
};

}  // namespace di::rank
