// request/flight.h: one client request inside the router's core, across its attempts.
//
// States of an attempt (see spec/path.md section 5); cancel and re-entry are possible in each:
//   matching   meta_match is out             -> queued at the answer or after match_wait (cold)
//   queued     waits for credit              -> prefill when bound
//   prefill    bound; a seat is asked for    -> handover at its token
//   handover   waits for decode_started      -> decoding; or asks for another seat
//   decoding   tokens come from decode       -> closing at the last one
//   closing    the client has its answer; legs still owe their final counts (at most kill_after)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/time.h"
#include "request/emit.h"
#include "request/first_and_last.h"
#include "request/rank_table.h"
#include "wire/messages.h"

namespace di::request {

// What the shell submits; everything about text is behind it.
struct NewRequest {
  RequestId id;
  std::string model;
  std::vector<std::uint32_t> prompt;
  wire::Sampling sampling;
  Key root;
  std::vector<Key> keys;     // of the full blocks of the prompt
  std::uint64_t tenant = 0;  // kv::tenant_number
  std::string debug;         // last user message, for script engines
};

enum class FlightState : std::uint8_t { matching, queued, prefill, handover, decoding, closing };
[[nodiscard]] std::string_view flight_state_name(FlightState state);

// One line of `di-ctl explain`.
struct TimelineRow {
  Instant at;
  std::uint16_t attempt = 0;
  std::string event;   // "matched", "bound", "seat_granted", ...
  std::string detail;  // "rank=di-prefill.0/0 hit_blocks=62"
};
// Work a rank reported; times are on that rank's clock.
struct SpanRow {
  std::uint16_t attempt = 0;
  std::string rank;
  wire::Span span;
};
// Of either the first half and the last is kept: a request that went wrong has its reason at the end.
inline constexpr std::size_t timeline_rows_max = 256;
inline constexpr std::size_t span_rows_max = 1024;

// The part of an attempt that lives in one rank.
struct LegState {
  bool open = false;  // the rank has, or may have, something of this attempt
  RankName rank;
  std::uint32_t generation = 0;
  std::uint64_t bind = 0;
  std::uint64_t cost_us = 0;
  std::uint64_t tokens = 0;
};

struct Flight {
  NewRequest request;
  std::uint16_t attempt = 1;
  FlightState state = FlightState::matching;
  // Of this attempt: the prompt with everything produced before it.
  std::vector<std::uint32_t> tokens;
  std::vector<Key> keys;
  std::uint32_t first_index = 0;
  std::uint32_t hit_blocks = 0;
  double predicted_us = 0;
  double left_us = 0;
  LegState prefill;
  LegState decode;
  std::uint64_t seat = 0;      // granted
  bool seat_asked = false;     // and no answer yet
  bool started = false;        // decode_started came
  bool prefill_token = false;  // prefill's token of this attempt came
  std::optional<RankName> seat_avoid;
  Wish wish;      // near_host and never outlive the attempt
  Error refusal;  // what the last of wish.never said
  std::uint32_t seats_failed = 0;
  std::string prefetch_host;  // holds a hint's pins there

  InOrder in_order;
  std::vector<wire::TokenValue> produced;
  bool ended = false;               // the client's ending was reported
  std::uint32_t cached_blocks = 0;  // really swapped in at attempt 1
  std::uint32_t read_tokens = 0;    // of the prompt, that some rank has read or swapped in

  Instant submitted;
  Instant match_until = instant_never;
  Instant reenter_at = instant_never;  // waits before matching again
  Instant back_until = instant_never;  // queued, and only a lost rank that comes back may take it
  Instant seat_again = instant_never;
  Instant seat_answer_until = instant_never;  // while seat_asked
  Instant gap_until = instant_never;
  Instant first_until = instant_never;  // the attempt's first token: queue and prefill together
  Instant token_until = instant_never;  // the next token; after the first ever also word from prefill
  Instant kill_at = instant_never;      // closing
  bool killed = false;

  // The core's books.
  std::uint64_t queue_number = 0;  // among those submitted at the same time; 0: was in no queue yet
  bool touched = false;            // listed in touched_
  Instant listed = instant_never;  // in dues_

  FirstAndLast<TimelineRow> timeline{timeline_rows_max};
  FirstAndLast<SpanRow> spans{span_rows_max};
};

}  // namespace di::request
