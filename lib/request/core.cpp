#include "request/core.h"

#include <algorithm>

#include "kv/chain.h"

namespace di::request {

std::string_view flight_state_name(FlightState state) {
  switch (state) {
    case FlightState::matching:
      return "matching";
    case FlightState::queued:
      return "queued";
    case FlightState::prefill:
      return "prefill";
    case FlightState::handover:
      return "handover";
    case FlightState::decoding:
      return "decoding";
    case FlightState::closing:
      return "closing";
  }
  return "unknown";
}

Status RouterCore::submit(NewRequest request, Instant now) {
  if (flights_.size() >= options_.flights_max) return Error{Code::busy, 0, "too many requests in flight"};
  if (flights_.contains(request.id)) return Error{Code::exists, 0, "the request id is in use"};
  watch_absence(now);
  const auto absent = absent_since_.find(request.model);
  if (absent == absent_since_.end() || now - options_.absence_wait >= absent->second) {
    settle(now);
    return Error{Code::unreachable, 0, absence(request.model)};
  }
  DI_ASSERT(!request.prompt.empty() && request.keys.size() == request.prompt.size() / options_.block_tokens);
  const RequestId id = request.id;
  Flight& flight = flights_[id];
  flight.request = std::move(request);
  flight.submitted = now;
  flight.first_until = now + options_.first_token_wait;
  touch(flight);
  note(flight, "submitted", "prompt_tokens=" + std::to_string(flight.request.prompt.size()), now);
  start_attempt(flight, now);
  settle(now);
  return {};
}

void RouterCore::cancel(const RequestId& id, Code reason, Instant now) {
  const auto found = flights_.find(id);
  if (found == flights_.end() || found->second.ended) return;
  end(found->second, reason, reason == Code::ok ? "" : "cancelled", wire::Finish::cancelled, now);
  settle(now);
}

void RouterCore::end_all(Code code, std::string_view why, Instant now) {
  for (auto& [id, flight] : flights_) {
    if (!flight.ended) end(flight, code, std::string(why), wire::Finish::error, now);
  }
  settle(now);
}

void RouterCore::start_over(std::uint32_t block_tokens, std::string_view why, Instant now) {
  for (auto& [id, flight] : flights_) {
    touch(flight);
    if (!flight.ended) end(flight, Code::busy, std::string(why), wire::Finish::error, now);
    close_leg(flight.prefill);
    close_leg(flight.decode);
  }
  settle(now);
  DI_ASSERT(flights_.empty());
  options_.block_tokens = block_tokens;
}

namespace {

// The message comes from the rank, and the start of it, that the leg is at.
bool is_from(const wire::Envelope& message, const LegState& leg) {
  return leg.open && message.peer == leg.rank.instance && message.scope.rank == leg.rank.rank &&
         message.peer_generation == leg.generation;
}

// What happened here, and what the rank said of it.
std::string because(std::string_view what, std::string_view why) {
  return why.empty() ? std::string(what) : std::string(what) + ": " + std::string(why);
}

}  // namespace

wire::Scope RouterCore::scope_of(const Flight& flight, std::uint16_t rank) const {
  return wire::Scope{flight.request.id, flight.attempt, rank, 0};
}

Flight* RouterCore::current(const wire::Envelope& message) {
  const auto found = flights_.find(message.scope.request);
  if (found == flights_.end() || found->second.attempt != message.scope.attempt) return nullptr;
  touch(found->second);
  return &found->second;
}

void RouterCore::note(Flight& flight, std::string_view event, std::string detail, Instant now) {
  flight.timeline.add({now, flight.attempt, std::string(event), std::move(detail)});
}

void RouterCore::note_spans(Flight& flight, const std::string& rank, const std::vector<wire::Span>& spans) {
  for (const wire::Span& span : spans) flight.spans.add({flight.attempt, rank, span});
}

void RouterCore::start_attempt(Flight& flight, Instant now) {
  flight.tokens = flight.request.prompt;
  for (const wire::TokenValue& token : flight.produced) flight.tokens.push_back(token.id);
  flight.keys = flight.request.keys;
  while (flight.keys.size() < flight.tokens.size() / options_.block_tokens) {
    const std::size_t block = flight.keys.size();
    const Key& parent = block == 0 ? flight.request.root : flight.keys[block - 1];
    flight.keys.push_back(
        kv::block_key(parent, std::span<const std::uint32_t>(flight.tokens)
                                  .subspan(block * options_.block_tokens, options_.block_tokens)));
  }
  flight.first_index = static_cast<std::uint32_t>(flight.produced.size());
  flight.hit_blocks = 0;
  flight.prefill = {};
  flight.decode = {};
  flight.seat = 0;
  flight.seat_asked = false;
  flight.started = false;
  flight.prefill_token = false;
  flight.seat_avoid.reset();
  flight.wish.held.clear();
  flight.seats_failed = 0;
  flight.seat_again = Instant{};
  flight.gap_until = instant_never;
  flight.reenter_at = instant_never;
  flight.in_order.drop_early();
  const std::uint32_t usable = kv::usable_blocks(flight.tokens.size(), options_.block_tokens);
  if (meta_.empty() || usable == 0) {
    enqueue(flight, 0, now);
    return;
  }
  flight.state = FlightState::matching;
  flight.match_until = now + options_.match_wait;
  wire::meta_match match;
  match.root = flight.request.root;
  match.keys.assign(flight.keys.begin(), flight.keys.begin() + usable);
  send(meta_, 0, scope_of(flight, 0), match);
}

void RouterCore::enqueue(Flight& flight, std::uint32_t hit_blocks, Instant now) {
  flight.match_until = instant_never;
  flight.hit_blocks = std::min(hit_blocks, kv::usable_blocks(flight.tokens.size(), options_.block_tokens));
  matched_blocks_ += flight.hit_blocks;
  note(flight, "queued", "hit_blocks=" + std::to_string(flight.hit_blocks), now);
  join_queue(flight);
}

void RouterCore::join_queue(Flight& flight) {
  touch(flight);
  flight.state = FlightState::queued;
  if (flight.queue_number == 0) flight.queue_number = next_queue_number_++;
  queues_[flight.request.model].emplace(std::pair{flight.submitted, flight.queue_number}, flight.request.id);
  dispatch_due_ = true;
}

void RouterCore::leave_queue(Flight& flight) {
  if (flight.state == FlightState::queued)
    queues_[flight.request.model].erase({flight.submitted, flight.queue_number});
  flight.back_until = instant_never;
}

void RouterCore::dispatch(Instant now) {
  if (!std::exchange(dispatch_due_, false)) return;
  for (auto& [model, queue] : queues_) {
    for (auto next = queue.begin(); next != queue.end();) {
      Flight& flight = flights_.at((next++)->second);  // which may leave the queue here
      if (const auto rank = ranks_.choose_prefill(model, flight.wish)) {
        bind(flight, *rank, now);
      } else if (flight.wish.never.empty()) {
        break;
      } else {
        end_if_never_taken(flight, false, now);  // those behind it may be taken by ranks that it leaves out
      }
    }
    hint_prefetch(queue, model, now);
  }
}

// Whoever has to wait gets a hint, within a window of the queue.
void RouterCore::hint_prefetch(const Queue& queue, const std::string& model, Instant now) {
  std::uint32_t hinted = 0;
  for (const auto& [place, id] : queue) {
    if (hinted++ >= options_.prefetch_queue_max) return;
    Flight& flight = flights_.at(id);
    if (flight.hit_blocks == 0 || !flight.prefetch_host.empty()) continue;
    const std::string host = ranks_.choose_host(model, flight.wish);
    if (!kvd_hosts_.contains(host)) {
      if (!flight.wish.never.empty()) continue;
      return;  // most likely it is the one for the others too
    }
    flight.prefetch_host = host;
    wire::kv_prefetch hint;
    hint.keys.assign(flight.keys.begin(), flight.keys.begin() + flight.hit_blocks);
    hint.priority = 1;
    send(flight.prefetch_host, 0, scope_of(flight, 0), hint);
    note(flight, "prefetch", "host=" + flight.prefetch_host, now);
  }
}

void RouterCore::bind(Flight& flight, const RankName& rank, Instant now) {
  touch(flight);
  leave_queue(flight);
  const RankInfo& info = *ranks_.find(rank);
  const balance::StepCost cost(
      {info.credit.cost_base_us, info.credit.cost_token_us, info.credit.cost_context_us});
  const auto total = static_cast<std::uint32_t>(flight.tokens.size());
  flight.predicted_us =
      cost.predict_prompt_us(total, flight.hit_blocks * options_.block_tokens, options_.chunk_tokens);
  flight.left_us = flight.predicted_us;
  flight.prefill.open = true;
  flight.prefill.rank = rank;
  flight.prefill.generation = info.generation;
  flight.prefill.cost_us = static_cast<std::uint64_t>(flight.predicted_us);
  flight.prefill.tokens = total;
  flight.prefill.bind = ranks_.sent(rank, flight.prefill.cost_us, total);
  flight.state = FlightState::prefill;
  if (!flight.produced.empty()) flight.token_until = now + options_.next_token_wait;
  wire::prefill_bind bind;
  bind.bind = flight.prefill.bind;
  bind.tokens = flight.tokens;
  bind.root = flight.request.root;
  bind.keys = flight.keys;
  bind.hit_blocks = flight.hit_blocks;
  bind.first_index = flight.first_index;
  bind.sampling = flight.request.sampling;
  bind.debug = flight.request.debug;
  bind.tenant = flight.request.tenant;
  for (const wire::TokenValue& token : flight.produced) {
    if (token.id >= wire::script_token_base) bind.resume.push_back(token.bytes);
  }
  bind.cost_us = flight.prefill.cost_us;
  send(rank.instance, info.generation, scope_of(flight, rank.rank), bind);
  note(flight, "bound", "rank=" + rank.text() + " predicted_us=" + std::to_string(flight.prefill.cost_us),
       now);
  // A seat that was asked for before another rank refused the bind.
  send_target(flight, now);
  maybe_ask_seat(flight, now);
}

bool RouterCore::wants_seat(const Flight& flight) const {
  if (flight.state != FlightState::prefill && flight.state != FlightState::handover) return false;
  if (flight.decode.open || flight.ended) return false;
  if (flight.left_us > options_.seat_ahead_us && !flight.prefill_token) return false;
  // Otherwise the token of prefill is the only one left.
  return flight.request.sampling.max_tokens > flight.first_index + 1;
}

void RouterCore::maybe_ask_seat(Flight& flight, Instant now) {
  if (wants_seat(flight) && now >= flight.seat_again) ask_seat(flight, now);
}

namespace {

// Of the attempt, when it has got to its end.
std::uint64_t known_tokens(const Flight& flight) {
  return flight.tokens.size() + std::uint64_t{flight.request.sampling.max_tokens} - flight.first_index;
}

}  // namespace

void RouterCore::ask_seat(Flight& flight, Instant now) {
  const std::uint64_t known = known_tokens(flight);
  const RankInfo* prefill = ranks_.find(flight.prefill.rank);
  const auto rank =
      ranks_.choose_decode(flight.request.model, known, prefill == nullptr ? Place{} : prefill->place,
                           flight.wish, flight.seat_avoid);
  if (!rank.has_value()) {
    flight.seat_again = now + options_.seat_retry;
    end_if_never_taken(flight, true, now);
    return;
  }
  const RankInfo& info = *ranks_.find(*rank);
  flight.decode.open = true;
  flight.decode.rank = *rank;
  flight.decode.generation = info.generation;
  flight.decode.tokens = known;
  flight.decode.cost_us = 0;
  flight.decode.bind = ranks_.sent(*rank, 0, known);
  flight.seat_asked = true;
  flight.seat = 0;
  flight.started = false;
  say_seat(flight, now);
  note(flight, "seat_asked", "rank=" + rank->text(), now);
}

void RouterCore::say_seat(Flight& flight, Instant now) {
  flight.seat_answer_until = now + options_.seat_answer_wait;
  wire::decode_seat ask;
  ask.bind = flight.decode.bind;
  ask.tokens = flight.tokens;
  ask.root = flight.request.root;
  ask.keys = flight.keys;
  ask.first_index = flight.first_index;
  ask.sampling = flight.request.sampling;
  ask.debug = flight.request.debug;
  ask.tenant = flight.request.tenant;
  // Only tokens of earlier attempts: prefill's token of this one travels with the hand-over.
  for (std::uint32_t i = 0; i < flight.first_index; ++i) {
    if (flight.produced[i].id >= wire::script_token_base) ask.resume.push_back(flight.produced[i].bytes);
  }
  send(flight.decode.rank.instance, flight.decode.generation, scope_of(flight, flight.decode.rank.rank), ask);
}

void RouterCore::send_target(Flight& flight, Instant now) {
  if (!flight.prefill.open || flight.seat == 0) return;
  const RankInfo* info = ranks_.find(flight.decode.rank);
  if (info == nullptr) return;
  wire::prefill_target target;
  target.seat = flight.seat;
  target.decode = flight.decode.rank.instance;
  target.decode_rank = flight.decode.rank.rank;
  target.decode_generation = flight.decode.generation;
  target.host = info->credit.host;
  send(flight.prefill.rank.instance, flight.prefill.generation, scope_of(flight, flight.prefill.rank.rank),
       target);
  note(flight, "target", "rank=" + flight.decode.rank.text() + " seat=" + std::to_string(flight.seat), now);
}

void RouterCore::close_leg(LegState& leg) {
  if (!leg.open) return;
  leg.open = false;
  ranks_.returned(leg.rank, leg.generation, leg.cost_us, leg.tokens);
}

void RouterCore::release_prefetch(Flight& flight) {
  if (flight.prefetch_host.empty()) return;
  send(flight.prefetch_host, 0, scope_of(flight, 0), wire::kv_release{});
  flight.prefetch_host.clear();
}

void RouterCore::seat_lost(Flight& flight, std::string_view why, Instant now) {
  flight.seat_avoid = flight.decode.rank;
  close_leg(flight.decode);
  flight.seat = 0;
  flight.seat_asked = false;
  flight.started = false;
  if (flight.ended || flight.state == FlightState::queued) return;
  if (!flight.prefill.open)
    return reenter(flight, because("the seat was lost after the hand-over", why), now);
  if (++flight.seats_failed > options_.seats_failed_max)
    return reenter(flight, because("no seat was granted", why), now);
  flight.seat_again = flight.seats_failed == 1 ? now : now + options_.seat_retry;
  maybe_ask_seat(flight, now);
}

void RouterCore::handover_failed(Flight& flight, const wire::prefill_refused& refused, Instant now) {
  const auto code = static_cast<Code>(refused.code);
  note(flight, "handover_failed",
       "rank=" + flight.decode.rank.text() + " code=" + std::string(code_name(code)), now);
  const RankInfo* prefill = ranks_.find(flight.prefill.rank);
  const RankInfo* decode = ranks_.find(flight.decode.rank);
  if (flight.decode.open) {
    send(flight.decode.rank.instance, flight.decode.generation, scope_of(flight, flight.decode.rank.rank),
         wire::seat_release{flight.seat});
  }
  // The rule of links that are too slow (kv.handover_wait) or broken: a seat where the pages are, if there is
  // one; else the prompt is read again where the seat was, if somebody reads there.  Where nobody does, another
  // attempt would only meet the same link: the pages are held, and are handed to another seat or the same.
  const bool link_failed = (code == Code::timeout || code == Code::unreachable) && prefill != nullptr &&
                           decode != nullptr && distance(prefill->place, decode->place) > 0;
  if (!link_failed) return seat_lost(flight, refused.reason, now);
  const Place from = prefill->place;
  flight.wish.near_host = from.host;
  const auto closer =
      ranks_.choose_decode(flight.request.model, flight.decode.tokens, from, flight.wish, flight.decode.rank);
  if (closer.has_value() && distance(from, ranks_.find(*closer)->place) == 0)
    return seat_lost(flight, refused.reason, now);
  if (!ranks_.reads_at(flight.request.model, decode->place.host))
    return seat_lost(flight, refused.reason, now);
  flight.wish.near_host = decode->place.host;
  reenter(flight, "the link to the seat is too slow or broken", now);
}

void RouterCore::bind_refused(Flight& flight, const wire::prefill_refused& refused, Instant now) {
  const RankInfo* rank = ranks_.find(flight.prefill.rank);
  // Its credit, which came in front of the refusal, says why: another router was first, or it takes nothing now.
  // It is not chosen again before a newer one.  Where the credit has room the refusal has another cause.
  const bool crossed = rank != nullptr && !rank->takes_bind();
  close_leg(flight.prefill);
  const bool never = leave_out(flight, flight.prefill, refused.code, refused.reason);
  if (never) {
    release_prefetch(flight);
    end_if_never_taken(flight, false, now);
  }
  if (flight.ended) return;
  if (never || (static_cast<Code>(refused.code) == Code::busy && crossed)) {
    // What it says to a target of before is of no interest: it knows nothing of the request.
    flight.prefill = {};
    flight.token_until = instant_never;
    join_queue(flight);
  } else {
    reenter(flight, because("the bind was refused", refused.reason), now);
  }
}

void RouterCore::seat_refused(Flight& flight, const wire::seat_refused& refused, Instant now) {
  close_leg(flight.decode);
  if (leave_out(flight, flight.decode, refused.code, refused.reason)) {
    flight.seats_failed = 0;  // the next one is asked at once
    end_if_never_taken(flight, true, now);
  }
  seat_lost(flight, refused.reason, now);
}

bool RouterCore::leave_out(Flight& flight, const LegState& leg, std::uint16_t code,
                           const std::string& reason) {
  if (static_cast<Code>(code) != Code::invalid && static_cast<Code>(code) != Code::unsupported) return false;
  flight.wish.never[leg.rank] = leg.generation;
  flight.refusal = Error{static_cast<Code>(code), 0, reason};
  return true;
}

void RouterCore::end_if_never_taken(Flight& flight, bool decode, Instant now) {
  if (!decode) flight.back_until = instant_never;
  if (flight.wish.never.empty() || flight.ended) return;
  if (!ranks_.never_taken(flight.request.model, decode, known_tokens(flight), flight.wish)) return;
  // A supervisor may bring back the one that can.
  const auto lost = lost_at_.find({flight.request.model, decode});
  if (lost == lost_at_.end() || lost->second + options_.absence_wait <= now) {
    end(flight, flight.refusal.code, flight.refusal.message, wire::Finish::error, now);
  } else if (!decode) {
    touch(flight);
    flight.back_until = lost->second + options_.absence_wait;
  }
}

void RouterCore::on_message(const wire::Envelope& message, Instant now) {
  switch (message.number) {
    case wire::meta_matched::number:
      if (auto matched = message.as<wire::meta_matched>()) {
        Flight* flight = current(message);
        if (flight == nullptr || flight->state != FlightState::matching) break;
        for (const wire::TierHit& tier : matched->tiers) {
          if (!tier.instance.empty()) flight->wish.held[tier.instance] = tier.blocks;
        }
        note(*flight, "matched",
             "hit_blocks=" + std::to_string(matched->hit_blocks) +
                 " fetch_us=" + std::to_string(matched->fetch_us),
             now);
        enqueue(*flight, matched->hit_blocks, now);
      }
      break;
    case wire::rank_credit::number:
      if (auto credit = message.as<wire::rank_credit>()) {
        const RankName name{message.peer, message.scope.rank};
        const RankInfo* rank = ranks_.find(name);
        const bool took_some = rank != nullptr && !rank->credit.draining;
        if (!ranks_.credit(name, message.peer_generation, *credit)) break;
        if (took_some && rank->credit.draining) may_come_back(*rank, now);
        dispatch_due_ = dispatch_due_ || rank->takes_bind();
        watch_absence(now);
      }
      break;
    case wire::prefill_refused::number:
      if (auto refused = message.as<wire::prefill_refused>()) {
        Flight* flight = current(message);
        if (flight == nullptr) break;
        // A seat number alone is another decode instance's, too.
        const bool of_this_seat =
            refused->seat == flight->seat && refused->decode == flight->decode.rank.instance;
        if (!flight->prefill.open && refused->bind == 0 && message.peer == flight->prefill.rank.instance) {
          if (!of_this_seat) break;  // the target of this one is still to be answered
          // A target that found nothing: the pages went to a seat that is lost, and this one gets none.
          if (!flight->ended && !flight->started)
            reenter(*flight, "the seat was lost after the hand-over", now);
          break;
        }
        if (!is_from(message, flight->prefill) || refused->bind != flight->prefill.bind) break;
        note(*flight, "refused", "rank=" + flight->prefill.rank.text() + " reason=" + refused->reason, now);
        if (flight->started) {
          // The answer about the hand-over was lost, not the hand-over: nobody needs the pages any more.
          send(flight->prefill.rank.instance, flight->prefill.generation,
               scope_of(*flight, flight->prefill.rank.rank),
               wire::request_stop{static_cast<wire::U16>(Code::stale)});
          break;
        }
        if (flight->prefill_token) {
          if (!of_this_seat) break;  // of a seat before this one
          handover_failed(*flight, *refused, now);
          break;
        }
        bind_refused(*flight, *refused, now);
      }
      break;
    case wire::prefill_progress::number:
      if (auto progress = message.as<wire::prefill_progress>()) {
        Flight* flight = current(message);
        if (flight == nullptr || flight->state != FlightState::prefill || !is_from(message, flight->prefill))
          break;
        flight->left_us = static_cast<double>(progress->left_us);
        saw_read(*flight, progress->computed_tokens);
        if (!flight->produced.empty()) flight->token_until = now + options_.next_token_wait;
        if (flight->attempt == 1) flight->cached_blocks = progress->swapped_blocks;
        note_spans(*flight, flight->prefill.rank.text(), progress->spans);
        release_prefetch(*flight);
        maybe_ask_seat(*flight, now);
      }
      break;
    case wire::seat_granted::number:
      if (auto granted = message.as<wire::seat_granted>()) {
        Flight* flight = current(message);
        if (flight == nullptr || !is_from(message, flight->decode)) {
          // The answer to a question that was asked again after all: nobody waits for this seat.
          send(message.peer, message.peer_generation, message.scope, wire::seat_release{granted->seat});
          break;
        }
        if (flight->seat == granted->seat) break;  // said twice
        flight->seat_asked = false;
        flight->seat = granted->seat;
        note(*flight, "seat_granted", "rank=" + flight->decode.rank.text() + " host=" + granted->host, now);
        send_target(*flight, now);
      }
      break;
    case wire::seat_refused::number:
      if (auto refused = message.as<wire::seat_refused>()) {
        Flight* flight = current(message);
        if (flight == nullptr || !is_from(message, flight->decode)) break;
        note(*flight, "seat_refused", "rank=" + flight->decode.rank.text() + " reason=" + refused->reason,
             now);
        seat_refused(*flight, *refused, now);
      }
      break;
    case wire::decode_started::number:
      if (auto started = message.as<wire::decode_started>()) {
        Flight* flight = current(message);
        if (flight == nullptr || !is_from(message, flight->decode) || started->seat != flight->seat ||
            flight->ended)
          break;
        flight->started = true;
        if (flight->state == FlightState::prefill || flight->state == FlightState::handover) {
          flight->state = FlightState::decoding;
        }
        note(*flight, "decode_started", "rank=" + flight->decode.rank.text(), now);
      }
      break;
    case wire::token_batch::number:
      if (auto batch = message.as<wire::token_batch>()) {
        for (const wire::TokenEvent& event : batch->events) {
          const auto found = flights_.find(event.request);
          if (found == flights_.end() || found->second.attempt != event.attempt) continue;
          Flight& flight = found->second;
          touch(flight);
          const bool from_prefill = flight.prefill.rank.instance == message.peer && !flight.prefill_token &&
                                    event.index == flight.first_index;
          on_token(flight, event, RankName{message.peer, message.scope.rank}.text(), from_prefill, now);
        }
      }
      break;
    case wire::request_done::number:
      if (auto done = message.as<wire::request_done>()) on_done(message, *done, now);
      break;
    default:
      break;
  }
  settle(now);
}

void RouterCore::saw_read(Flight& flight, std::uint64_t tokens) {
  const std::uint64_t prompt = flight.request.prompt.size();
  flight.read_tokens = std::max(flight.read_tokens, static_cast<std::uint32_t>(std::min(tokens, prompt)));
}

void RouterCore::on_token(Flight& flight, const wire::TokenEvent& event, const std::string& rank,
                          bool from_prefill, Instant now) {
  if (flight.ended) return;
  note_spans(flight, rank, event.spans);
  if (from_prefill) {
    flight.prefill_token = true;
    flight.left_us = 0;
    saw_read(flight, flight.tokens.size());
    if (flight.attempt == 1) flight.cached_blocks = event.swapped_blocks;
    if (flight.state == FlightState::prefill) flight.state = FlightState::handover;
    note(flight, "token",
         "index=" + std::to_string(event.index) + " swapped_blocks=" + std::to_string(event.swapped_blocks),
         now);
    release_prefetch(flight);
  }
  auto due = flight.in_order.take({event.index, event.token, static_cast<wire::Finish>(event.finish)});
  if (!due) return reenter(flight, due.error().message, now);
  for (InOrder::Item& item : *due) {
    flight.first_until = instant_never;
    flight.token_until = now + options_.next_token_wait;
    flight.produced.push_back(item.token);
    wire::Finish finish = item.finish;
    // The engine counts too; this one is the router's own bound.
    if (finish == wire::Finish::none && flight.produced.size() >= flight.request.sampling.max_tokens) {
      finish = wire::Finish::length;
    }
    emissions_.push_back({flight.request.id, item.index, item.token, finish});
    if (finish != wire::Finish::none) {
      end(flight, Code::ok, "", finish, now);
      return;
    }
  }
  if (!flight.in_order.has_gap()) {
    flight.gap_until = instant_never;
  } else if (flight.gap_until == instant_never) {
    flight.gap_until = now + options_.gap_wait;
  }
  maybe_ask_seat(flight, now);
}

void RouterCore::on_done(const wire::Envelope& message, const wire::request_done& done, Instant now) {
  // Always acknowledged: counts of an attempt that nobody waits for any more are of no use to the worker.
  send(message.peer, message.peer_generation, message.scope, wire::done_ack{done.leg});
  Flight* flight = current(message);
  if (flight == nullptr) return;
  const bool prefill = done.leg == static_cast<wire::U8>(wire::Leg::prefill);
  LegState& leg = prefill ? flight->prefill : flight->decode;
  if (!is_from(message, leg)) return;
  close_leg(leg);
  if (prefill) {
    saw_read(*flight, done.computed_tokens + std::uint64_t{done.swapped_blocks} * options_.block_tokens);
    if (flight->attempt == 1) flight->cached_blocks = done.swapped_blocks;
  }
  note(*flight, prefill ? "prefill_done" : "decode_done",
       "code=" + std::string(code_name(static_cast<Code>(done.code))) + " computed_tokens=" +
           std::to_string(done.computed_tokens) + " swapped_blocks=" + std::to_string(done.swapped_blocks),
       now);
  if (flight->ended) return;
  if (prefill) {
    if (flight->started) return;
    if (done.code != 0) {
      reenter(*flight, because("prefill ended", done.reason), now);
    } else if (flight->seat == 0) {
      // It was handed to a seat that is lost meanwhile, and nobody has the pages any more for another.
      reenter(*flight, "the seat was lost after the hand-over", now);
    }
    return;
  }
  if (done.code != 0) {
    if (!flight->started && (flight->prefill.open || flight->state == FlightState::queued)) {
      seat_lost(*flight, done.reason, now);
    } else {
      reenter(*flight, because("decode ended", done.reason), now);
    }
    return;
  }
  // All tokens of decode came before; what is missing is prefill's.
  if (flight->gap_until == instant_never) flight->gap_until = now + options_.gap_wait;
}

void RouterCore::stop_legs(Flight& flight, Code reason) {
  if (flight.prefill.open) {
    send(flight.prefill.rank.instance, flight.prefill.generation, scope_of(flight, flight.prefill.rank.rank),
         wire::request_stop{static_cast<wire::U16>(reason)});
  }
  if (flight.decode.open) {
    send(flight.decode.rank.instance, flight.decode.generation, scope_of(flight, flight.decode.rank.rank),
         wire::request_stop{static_cast<wire::U16>(reason)});
  }
}

void RouterCore::reenter(Flight& flight, std::string_view why, Instant now) {
  if (flight.ended) return;
  touch(flight);
  note(flight, "reentry", "why=" + std::string(why), now);
  leave_queue(flight);
  stop_legs(flight, Code::stale);
  close_leg(flight.prefill);
  close_leg(flight.decode);
  release_prefetch(flight);
  // Nothing of this attempt may end the next one, which may have to wait before it starts.
  flight.prefill = {};
  flight.decode = {};
  flight.seat = 0;
  flight.started = false;
  flight.prefill_token = false;
  flight.gap_until = instant_never;
  if (flight.attempt >= options_.attempts_max) {
    end(flight, Code::unreachable, std::string(why), wire::Finish::error, now);
    return;
  }
  ++reentries_;
  ++flight.attempt;
  // It queues once more, which may take longer than the silence between tokens may last.
  if (!flight.produced.empty()) flight.first_until = now + options_.first_token_wait;
  flight.token_until = instant_never;
  if (flight.attempt <= 2) {
    start_attempt(flight, now);
    return;
  }
  // Repeated losses: give the fleet time, doubling.
  flight.state = FlightState::matching;
  flight.match_until = instant_never;
  flight.reenter_at = now + options_.reenter_wait * (1 << std::min(flight.attempt - 2, 10));
}

void RouterCore::end(Flight& flight, Code code, std::string reason, wire::Finish finish, Instant now) {
  if (flight.ended) return;
  touch(flight);
  leave_queue(flight);
  flight.ended = true;
  flight.match_until = instant_never;
  flight.reenter_at = instant_never;
  const bool natural = code == Code::ok && finish != wire::Finish::cancelled;
  if (!natural) stop_legs(flight, code == Code::ok ? Code::cancelled : code);
  if (natural && flight.decode.open && !flight.started) {
    // The last token came from prefill: the seat goes back.
    send(flight.decode.rank.instance, flight.decode.generation, scope_of(flight, flight.decode.rank.rank),
         wire::seat_release{flight.seat});
    close_leg(flight.decode);
  }
  release_prefetch(flight);
  flight.state = FlightState::closing;
  flight.kill_at = now + options_.kill_after;
  Ending ending;
  ending.id = flight.request.id;
  ending.code = code;
  ending.reason = reason;
  ending.finish = finish;
  ending.output_tokens = static_cast<std::uint32_t>(flight.produced.size());
  ending.cached_tokens = std::min(flight.cached_blocks * options_.block_tokens,
                                  static_cast<std::uint32_t>(flight.request.prompt.size()));
  ending.read_tokens = flight.read_tokens;
  ending.attempts = flight.attempt;
  note(flight, "end",
       "code=" + std::string(code_name(code)) + " output_tokens=" + std::to_string(ending.output_tokens) +
           (ending.reason.empty() ? "" : " reason=\"" + ending.reason + "\""),
       now);
  endings_.push_back(std::move(ending));
}

void RouterCore::on_peer_up(const wire::Member& member, Instant now) {
  if (member.program == "di-meta") {
    meta_ = member.instance;
  } else if (member.program == "di-kvd" && member.role == "host") {
    kvd_hosts_.insert(member.instance);
  } else if (member.program == "di-prefill" || member.program == "di-decode") {
    ranks_.add(member.instance, member.generation, member.ranks, member.program == "di-decode", member.model,
               {member.host, member.rack, member.zone});
    // Away since ever, until it has said that it takes requests.
    absent_since_.try_emplace(member.model, Instant{});
    watch_absence(now);
  }
  dispatch_due_ = true;
  settle(now);
}

// It was lost, or takes nothing now.
void RouterCore::may_come_back(const RankInfo& rank, Instant now) {
  lost_at_[{rank.model, rank.decode}] = now;
  dispatch_due_ = true;  // whoever waits for it alone waits no longer than absence_wait
}

void RouterCore::on_peer_lost(const std::string& instance, Instant now) {
  if (const RankInfo* rank = ranks_.find({instance, 0})) may_come_back(*rank, now);
  ranks_.remove(instance);  // first: what is lost here looks for a place elsewhere
  if (instance == meta_) {
    meta_.clear();
    for (auto& [id, flight] : flights_) {
      if (flight.state == FlightState::matching && flight.match_until != instant_never)
        enqueue(flight, 0, now);
    }
  }
  kvd_hosts_.erase(instance);
  for (auto& [id, flight] : flights_) {
    touch(flight);
    if (flight.prefetch_host == instance) flight.prefetch_host.clear();
    const bool lost_prefill = flight.prefill.open && flight.prefill.rank.instance == instance;
    if (!flight.prefill.open && flight.prefill_token && !flight.started &&
        flight.prefill.rank.instance == instance) {
      // Its end was heard, but not whether the seat of now is the one it handed over to.
      reenter(flight, "prefill was lost before decode started", now);
    }
    const bool lost_decode = flight.decode.open && flight.decode.rank.instance == instance;
    if (lost_prefill) {
      close_leg(flight.prefill);
      if (!flight.started || !flight.prefill_token) reenter(flight, "prefill was lost", now);
    }
    if (lost_decode && flight.decode.open) {
      if (flight.started) {
        close_leg(flight.decode);
        reenter(flight, "decode was lost", now);
      } else {
        seat_lost(flight, "decode was lost", now);
      }
    }
  }
  watch_absence(now);
  settle(now);
}

// For a prefill rank, or, with its token out, for a seat that no rank can give.
bool RouterCore::waits_for_rank(const Flight& flight) const {
  return flight.state == FlightState::matching || flight.state == FlightState::queued ||
         (flight.state == FlightState::handover && wants_seat(flight) &&
          !ranks_.serves(flight.request.model, true));
}

std::string RouterCore::absence(const std::string& model) const {
  const bool prefill = ranks_.serves(model, false);
  const bool decode = ranks_.serves(model, true);
  const std::string_view what = prefill ? "decode" : decode ? "prefill" : "prefill and no decode";
  return "no " + std::string(what) + " rank is up that takes requests";
}

void RouterCore::watch_absence(Instant now) {
  for (auto& [model, since] : absent_since_) {
    const bool away = !serves(model);
    if (away == (since != instant_never)) continue;
    since = away ? now : instant_never;
    for (auto& [id, flight] : flights_) {
      if (flight.request.model == model) touch(flight);
    }
  }
}

Instant RouterCore::absent_until(const Flight& flight) const {
  if (flight.ended || !waits_for_rank(flight)) return instant_never;
  const auto absent = absent_since_.find(flight.request.model);
  const bool away = absent != absent_since_.end() && absent->second != instant_never;
  return away ? absent->second + options_.absence_wait : instant_never;
}

void RouterCore::on_time(Instant now) {
  watch_absence(now);
  std::vector<RequestId> due;
  for (const auto& [at, id] : dues_) {
    if (at > now) break;
    due.push_back(id);
  }
  for (const RequestId& id : due) on_due(flights_.at(id), now);
  settle(now);
}

void RouterCore::on_due(Flight& flight, Instant now) {
  touch(flight);
  if (absent_until(flight) <= now)
    end(flight, Code::busy, absence(flight.request.model), wire::Finish::error, now);
  if (flight.match_until <= now) {
    note(flight, "match_timeout", "", now);
    enqueue(flight, 0, now);
  }
  if (flight.reenter_at <= now) start_attempt(flight, now);
  if (flight.back_until <= now) end_if_never_taken(flight, false, now);
  if (!flight.ended) {
    if (now >= flight.submitted + options_.total_wait) {
      end(flight, Code::timeout, "the request took too long", wire::Finish::error, now);
    } else if (flight.first_until <= now) {
      end(flight, Code::timeout, "no token in time", wire::Finish::error, now);
    } else if (flight.token_until <= now) {
      reenter(flight, "no token in time", now);
    } else if (flight.gap_until <= now) {
      reenter(flight, "a token is missing", now);
    }
  }
  if (flight.seat_again <= now) maybe_ask_seat(flight, now);
  if (waits_for_seat(flight) && flight.seat_answer_until <= now) say_seat(flight, now);
  if (flight.ended && flight.kill_at <= now && !flight.killed) {
    flight.killed = true;
    for (LegState* leg : {&flight.prefill, &flight.decode}) {
      if (!leg->open) continue;
      send(leg->rank.instance, leg->generation, scope_of(flight, leg->rank.rank), wire::request_kill{});
      close_leg(*leg);
    }
  }
}

Instant RouterCore::due_of(const Flight& flight) const {
  if (flight.ended) return flight.kill_at;
  Instant due = std::min({flight.match_until, flight.reenter_at, flight.back_until,
                          flight.submitted + options_.total_wait, flight.first_until, flight.token_until,
                          flight.gap_until, absent_until(flight)});
  if (wants_seat(flight)) due = std::min(due, flight.seat_again);
  if (waits_for_seat(flight)) due = std::min(due, flight.seat_answer_until);
  return due;
}

void RouterCore::touch(Flight& flight) {
  if (flight.touched) return;
  flight.touched = true;
  touched_.push_back(flight.request.id);
}

void RouterCore::settle(Instant now) {
  dispatch(now);
  for (const RequestId& id : std::exchange(touched_, {})) {
    const auto found = flights_.find(id);
    Flight& flight = found->second;
    ++visits_;
    flight.touched = false;
    const bool over = flight.ended && !flight.prefill.open && !flight.decode.open;
    const Instant due = over ? instant_never : due_of(flight);
    if (due != flight.listed) {
      if (flight.listed != instant_never) dues_.erase({flight.listed, id});
      if (due != instant_never) dues_.emplace(due, id);
      flight.listed = due;
    }
    if (!over) continue;
    // Only what `explain` shows is kept.
    flight.tokens = {};
    flight.keys = {};
    flight.request.prompt = {};
    flight.request.keys = {};
    flight.request.debug = {};
    flight.produced = {};
    if (finished_order_.size() >= options_.explain_max && !finished_order_.empty()) {
      finished_.erase(finished_order_.front());
      finished_order_.pop_front();
    }
    finished_order_.push_back(id);
    finished_.insert_or_assign(id, std::move(flight));
    flights_.erase(found);
  }
}

const Flight* RouterCore::find(const RequestId& id) const {
  if (const auto found = flights_.find(id); found != flights_.end()) return &found->second;
  if (const auto found = finished_.find(id); found != finished_.end()) return &found->second;
  return nullptr;
}

std::size_t RouterCore::queued() const {
  std::size_t count = 0;
  for (const auto& [model, queue] : queues_) count += queue.size();
  return count;
}

}  // namespace di::request
