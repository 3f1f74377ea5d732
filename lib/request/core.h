// request/core.h: the router's core: from a submitted request to tokens in order and one ending.
//
// Pure.  Owner: the loop thread of di-router.  Bounds: Options::flights_max requests, the last
// Options::explain_max finished ones for `di-ctl explain`.
//
// It matches, queues, binds late to the rank with credit and the least outstanding cost, reserves a
// decode seat near the end of prefill, emits tokens in index order, and re-enters at match with what was
// produced when anything the request depends on is lost (spec/path.md section 6).
//
// The queue is in the order of submission, so a request that re-enters is in front of younger ones.  A bind
// that crossed with a credit that takes it back is no loss: the request is in the queue again, in the same attempt.
//
// A rank that can never take a request, because its host's arena or its own pool is too small, is left out for it;
// the request ends with that error when all said so.
//
// A message costs the flights that it is about, not all there are: whatever changes a flight touches it, and
// settle() looks at those that were touched, takes away the ones that are over and lists the next deadline of
// the others.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "balance/cost.h"
#include "request/flight.h"
#include "wire/envelope.h"

namespace di::request {

// Tokens for the client, in order.
struct Emission {
  RequestId id;
  std::uint32_t index = 0;
  wire::TokenValue token;
  wire::Finish finish = wire::Finish::none;
};

// Exactly one per submitted request.
struct Ending {
  RequestId id;
  Code code = Code::ok;  // ok, cancelled, or what went wrong
  std::string reason;
  wire::Finish finish = wire::Finish::none;
  std::uint32_t output_tokens = 0;
  std::uint32_t cached_tokens = 0;
  std::uint32_t read_tokens = 0;  // of the prompt, as far as ranks told: cached or computed
  std::uint16_t attempts = 1;
};

class RouterCore {
 public:
  struct Options {
    std::uint32_t flights_max = 4096;
    std::uint32_t explain_max = 1000;
    std::uint16_t attempts_max = 4;
    std::uint32_t block_tokens = 32;
    Duration match_wait = milliseconds(200);  // no answer in time = cold
    Duration first_token_wait = seconds(600);
    Duration next_token_wait = seconds(60);
    Duration total_wait = seconds(1800);
    Duration gap_wait = seconds(3);
    Duration seat_retry = milliseconds(50);
    Duration seat_answer_wait = seconds(2);    // then decode_seat is said again
    std::uint32_t seats_failed_max = 1000;     // within the prefill rank's hold
    Duration reenter_wait = milliseconds(50);  // doubles with each attempt after the second
    Duration kill_after = seconds(5);
    // How long requests wait for a rank when the last of a kind is lost: a supervisor brings it back.
    Duration absence_wait = seconds(15);
    double seat_ahead_us = 200000;          // ask for a seat when so much work is left
    std::uint32_t prefetch_queue_max = 16;  // requests of the queue that get a hint
    std::uint32_t chunk_tokens = 512;
  };

  explicit RouterCore(Options options) : options_(options) {}

  // Errors: busy (flights_max), exists (the id), unreachable (no rank of a kind is up, for absence_wait
  // already or since ever).
  Status submit(NewRequest request, Instant now);
  // The client left, a stop string matched, or a deadline passed.  The ending follows at once.
  void cancel(const RequestId& id, Code reason, Instant now);
  // The same for all of them, with a word to their clients: the service stops.
  void end_all(Code code, std::string_view why, Instant now);
  // The ranks that come have another model than those that were: blocks of so many tokens, and nothing that
  // was begun with the old one goes on.
  void start_over(std::uint32_t block_tokens, std::string_view why, Instant now);

  void on_message(const wire::Envelope& message, Instant now);
  void on_peer_up(const wire::Member& member, Instant now);
  void on_peer_lost(const std::string& instance, Instant now);
  void on_time(Instant now);
  [[nodiscard]] Instant next_due() const { return dues_.empty() ? instant_never : dues_.begin()->first; }

  [[nodiscard]] std::vector<wire::Envelope> take_outgoing() { return std::exchange(outgoing_, {}); }
  [[nodiscard]] std::vector<Emission> take_emissions() { return std::exchange(emissions_, {}); }
  [[nodiscard]] std::vector<Ending> take_endings() { return std::exchange(endings_, {}); }

  // The flight or, for a while after its end, what is kept of it; null when unknown.
  [[nodiscard]] const Flight* find(const RequestId& id) const;
  [[nodiscard]] const std::map<RequestId, Flight>& flights() const { return flights_; }
  [[nodiscard]] const RankTable& ranks() const { return ranks_; }
  [[nodiscard]] std::size_t queued() const;
  // One prefill and one decode rank are up and take work.
  [[nodiscard]] bool serves(const std::string& model) const {
    return ranks_.serves(model, false) && ranks_.serves(model, true);
  }
  [[nodiscard]] std::uint64_t reentries() const { return reentries_; }
  [[nodiscard]] std::uint64_t matched_blocks() const { return matched_blocks_; }
  // Flights that settle() has looked at.
  [[nodiscard]] std::uint64_t visits() const { return visits_; }

 private:
  // By submission, then by queue_number.
  using Queue = std::map<std::pair<Instant, std::uint64_t>, RequestId>;

  void start_attempt(Flight& flight, Instant now);
  void enqueue(Flight& flight, std::uint32_t hit_blocks, Instant now);
  void join_queue(Flight& flight);
  // Only when something came that may let a request go on: a credit, a rank, a request.
  void dispatch(Instant now);
  void hint_prefetch(const Queue& queue, const std::string& model, Instant now);
  void bind(Flight& flight, const RankName& rank, Instant now);
  void ask_seat(Flight& flight, Instant now);
  void say_seat(Flight& flight, Instant now);
  void seat_lost(Flight& flight, std::string_view why, Instant now);
  // The hand-over failed and the pages are still held.
  void handover_failed(Flight& flight, const wire::prefill_refused& refused, Instant now);
  void bind_refused(Flight& flight, const wire::prefill_refused& refused, Instant now);
  void seat_refused(Flight& flight, const wire::seat_refused& refused, Instant now);
  // "Do not repeat it", of one rank: others may have more room.  False: the rank said something else.
  static bool leave_out(Flight& flight, const LegState& leg, std::uint16_t code, const std::string& reason);
  // Ends the flight when every rank of the kind said that: with absence_wait for one that was lost just now.
  void end_if_never_taken(Flight& flight, bool decode, Instant now);
  void may_come_back(const RankInfo& rank, Instant now);
  void maybe_ask_seat(Flight& flight, Instant now);
  [[nodiscard]] bool wants_seat(const Flight& flight) const;
  [[nodiscard]] static bool waits_for_seat(const Flight& flight) {
    return flight.seat_asked && flight.decode.open && !flight.ended;
  }
  void leave_queue(Flight& flight);
  void send_target(Flight& flight, Instant now);
  void on_token(Flight& flight, const wire::TokenEvent& event, const std::string& rank, bool from_prefill,
                Instant now);
  void on_done(const wire::Envelope& message, const wire::request_done& done, Instant now);
  void reenter(Flight& flight, std::string_view why, Instant now);
  void end(Flight& flight, Code code, std::string reason, wire::Finish finish, Instant now);
  void stop_legs(Flight& flight, Code reason);
  void close_leg(LegState& leg);
  void release_prefetch(Flight& flight);
  void touch(Flight& flight);
  // The end of every event: dispatches, and settles the flights that were touched.  Nothing refers to a flight
  // any more.
  void settle(Instant now);
  void on_due(Flight& flight, Instant now);
  [[nodiscard]] Instant due_of(const Flight& flight) const;
  // Keeps absent_since_.
  void watch_absence(Instant now);
  [[nodiscard]] bool waits_for_rank(const Flight& flight) const;
  // When it has waited long enough for a rank of a kind that is away.
  [[nodiscard]] Instant absent_until(const Flight& flight) const;
  static void saw_read(Flight& flight, std::uint64_t tokens);
  void note(Flight& flight, std::string_view event, std::string detail, Instant now);
  void note_spans(Flight& flight, const std::string& rank, const std::vector<wire::Span>& spans);
  [[nodiscard]] Flight* current(const wire::Envelope& message);
  [[nodiscard]] wire::Scope scope_of(const Flight& flight, std::uint16_t rank) const;
  template <class M>
  void send(const std::string& peer, std::uint32_t generation, const wire::Scope& scope, const M& message) {
    outgoing_.push_back(wire::Envelope::make(peer, generation, scope, message));
  }

  Options options_;
  RankTable ranks_;
  balance::StepCost cost_;           // until a rank has reported its own fit
  std::string meta_;                 // empty while di-meta is away
  std::set<std::string> kvd_hosts_;  // host di-kvds that are up
  std::map<RequestId, Flight> flights_;
  std::map<std::string, Queue> queues_;  // by model
  std::uint64_t next_queue_number_ = 1;
  bool dispatch_due_ = false;
  std::vector<RequestId> touched_;
  std::set<std::pair<Instant, RequestId>> dues_;  // of each flight that has one, the next
  std::deque<RequestId> finished_order_;
  std::map<RequestId, Flight> finished_;
  std::vector<wire::Envelope> outgoing_;
  std::vector<Emission> emissions_;
  std::vector<Ending> endings_;
  [[nodiscard]] std::string absence(const std::string& model) const;
  // By model: since when no prefill or no decode rank is up.  A model that was never served is not here.
  std::map<std::string, Instant> absent_since_;
  std::map<std::pair<std::string, bool>, Instant> lost_at_;  // by model and kind: may_come_back() last
  std::uint64_t reentries_ = 0;
  std::uint64_t matched_blocks_ = 0;
  std::uint64_t visits_ = 0;
};

}  // namespace di::request
