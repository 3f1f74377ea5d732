#include "rank/decode.h"

#include <algorithm>

#include "kv/chain.h"

namespace di::rank {

DecodeCore::DecodeCore(Options options, engine::Description description)
    : CoreOf(options.rank, options.requests_max, options.cost, std::move(description)), options_(options) {}

void DecodeCore::on_message(const wire::Envelope& message, Instant now) {
  if (message.number == wire::decode_seat::number) return seat(message, now);
  if (message.number == wire::done_ack::number) return endings_.acknowledge(message.peer, message.scope);
  Request* request = find(message.scope);
  if (request == nullptr) {
    if (message.number == wire::request_stop::number)
      outgoing_.push_back(ending_of_unknown(message, wire::Leg::decode));
    return;  // late: the request is over
  }
  switch (message.number) {
    case wire::seat_release::number:
      // The seat's request goes elsewhere or is over; one that has just started is stopped.
      if (request->state == State::expecting || request->state == State::seated) {
        forget(request->handle);
      } else {
        stop(*request, Code::cancelled, now);
      }
      break;
    case wire::request_stop::number:
      if (auto reason = message.as<wire::request_stop>())
        stop(*request, static_cast<Code>(reason->reason), now);
      break;
    case wire::request_kill::number:
      forget(request->handle);
      break;
    case wire::kv_expected::number:
      if (auto answer = message.as<wire::kv_expected>()) expected(*request, *answer, now);
      break;
    case wire::kv_seated::number:
      if (auto answer = message.as<wire::kv_seated>()) seated(*request, *std::move(answer), now);
      break;
    case wire::kv_opened::number:
      if (auto answer = message.as<wire::kv_opened>()) opened(*request, *answer);
      break;
    default:
      break;
  }
}

void DecodeCore::seat(const wire::Envelope& message, Instant now) {
  if (const Request* known = find(message.scope)) {
    if (known->router != message.peer) return;
    if (known->state == State::expecting) expect(*known);
    if (known->state == State::seated) to_router(*known, wire::seat_granted{known->seat, kvd_});
    return;
  }
  auto decoded = message.as<wire::decode_seat>();
  if (!decoded) return;
  wire::decode_seat& ask = *decoded;
  const std::uint32_t block_tokens = description_.layout.block_tokens();
  const auto tokens = static_cast<std::uint32_t>(ask.tokens.size());
  credits_.take(message.peer, ask.bind, 0);
  const auto refuse_now = [&](Code code, std::string reason) {
    outgoing_.push_back(
        wire::Envelope::make(message.peer, message.peer_generation, message.scope,
                             wire::seat_refused{static_cast<wire::U16>(code), std::move(reason)}));
  };
  if (tokens == 0 || ask.keys.size() != tokens / block_tokens) {
    return refuse_now(Code::invalid, "the keys do not fit the tokens");
  }
  if (ask.sampling.max_tokens <= ask.first_index)
    return refuse_now(Code::invalid, "nothing is left to produce");
  const std::uint64_t known = std::uint64_t{tokens} + (ask.sampling.max_tokens - ask.first_index);
  if (known > description_.context_tokens_max)
    return refuse_now(Code::invalid, "longer than the model's context");
  const std::uint32_t blocks = blocks_of(static_cast<std::uint32_t>(known), block_tokens);
  if (blocks > description_.pool_blocks) return refuse_now(Code::invalid, "longer than the rank's pool");
  if (draining_) return refuse_now(Code::busy, "draining");
  if (kvd_.empty()) return refuse_now(Code::busy, "the host's di-kvd is away");
  if (requests_.size() >= options_.requests_max) return refuse_now(Code::busy, "no seat");
  if (pool_taken_ + blocks > description_.pool_blocks) return refuse_now(Code::busy, "no room in the pool");
  Request request;
  request.seat = new_seat();
  request.seat_until = now + options_.seat_ttl;
  request.pool_blocks = blocks;
  request.tokens = ask.tokens;
  request.keys = ask.keys;
  request.next_index = ask.first_index;
  request.page_first = tokens / block_tokens;
  request.seat_request = std::move(ask);
  pool_taken_ += blocks;
  expect(add(message, std::move(request)));
}

void DecodeCore::expect(const Request& request) {
  wire::kv_expect question;
  question.seat = request.seat;
  question.keys = request.keys;
  question.root = request.seat_request.root;
  question.tail_tokens =
      static_cast<std::uint32_t>(request.tokens.size()) % description_.layout.block_tokens();
  to_kvd(request.scope, question);
}

void DecodeCore::expected(Request& request, const wire::kv_expected& answer, Instant now) {
  if (request.state != State::expecting || answer.seat != request.seat) return;
  if (const auto code = static_cast<Code>(answer.code); code != Code::ok) {
    return refuse(request.handle, code,
                  code == Code::invalid  ? "longer than the arena"
                  : code == Code::exists ? "di-kvd has another seat of the request"
                                         : "no room in the arena",
                  now);
  }
  request.state = State::seated;
  request.entry = answer.entry;
  to_router(request, wire::seat_granted{request.seat, kvd_});
}

void DecodeCore::seated(Request& request, wire::kv_seated answer, Instant now) {
  if (request.state != State::seated || answer.seat != request.seat) return;
  if (answer.index != request.next_index)
    return refuse(request.handle, Code::invalid, "the hand-over has another index", now);
  request.state = State::admitting;
  request.seated = std::move(answer);
}

void DecodeCore::opened(Request& request, const wire::kv_opened& answer) {
  if (request.page_state != PageState::opening || answer.tag != request.page_tag) return;
  if (answer.code != 0 || answer.slots.size() != 1) {
    request.page_until = Instant{};  // the next on_time gives it up
    return;
  }
  request.page_slot = answer.slots[0];
  request.page_state = PageState::granted;
}

bool DecodeCore::runnable(const Request& request, Instant now) const {
  return request.state == State::running && !request.stepping && request.not_before <= now &&
         (!request.cancel_asked || request.cancel_sent);
}

std::optional<Batch> DecodeCore::next_batch(Instant now) {
  if (!may_start_batch()) return std::nullopt;
  Batch batch;
  batch.releases = std::exchange(releases_, {});
  step_rows_.clear();
  for (auto& [handle, request] : requests_) {
    if (cancel_row(request, batch)) continue;
    if (request.state == State::admitting && request.seated.has_value()) {
      AdmitCommand admit;
      admit.handle = handle;
      admit.entry = request.entry;
      admit.slots = request.seated->slots;
      engine::SequenceSpec& spec = admit.spec;
      spec.request = request.scope.request;
      spec.attempt = request.scope.attempt;
      spec.cached_tokens = static_cast<std::uint32_t>(request.tokens.size());
      spec.resume = request.seat_request.resume;
      if (request.seated->token.id >= wire::script_token_base)
        spec.resume.push_back(request.seated->token.bytes);
      request.tokens.push_back(request.seated->token.id);
      spec.tokens = request.tokens;
      spec.first_index = request.seated->index + 1;
      request.next_index = spec.first_index;
      spec.sampling = request.seat_request.sampling;
      spec.known_tokens_max = static_cast<std::uint32_t>(request.seat_request.tokens.size()) +
                              request.seat_request.sampling.max_tokens - request.seat_request.first_index;
      spec.root = request.seat_request.root;
      spec.keys = request.keys;
      spec.debug_text = request.seat_request.debug;
      spec.leg = wire::Leg::decode;
      request.computed_tokens = spec.cached_tokens;
      request.seated.reset();
      batch.admissions.push_back(std::move(admit));
    }
    if (request.page_state == PageState::granted && request.in_engine) {
      request.page_state = PageState::exporting;
      batch.exports.push_back(
          {handle, request.sequence, request.page_first, request.page_count, false, request.page_slot});
    }
    if (runnable(request, now)) {
      request.stepping = true;
      batch.plan.rows.push_back({request.sequence, 1});
      step_rows_.emplace_back(1u, request.computed_tokens);
    }
  }
  batch.plan.swap_wait = options_.swap_wait;
  if (batch.empty()) return std::nullopt;
  batch_out_ = true;
  return batch;
}

void DecodeCore::on_batch_done(BatchDone done, Instant now) {
  batch_back(done);
  for (const Admitted& answer : done.admitted) {
    Request* request =
        admitted(answer, [&](const Error& error) { refuse(answer.handle, error.code, error.message, now); });
    if (request == nullptr) continue;
    request->state = State::running;
    to_router(*request, wire::decode_started{request->seat,
                                             request->computed_tokens / description_.layout.block_tokens()});
  }
  for (Exported& page : done.exported) {
    const auto found = requests_.find(page.handle);
    if (found != requests_.end()) exported(found->second, page, now);
  }
  for (const auto& [handle, over] : done.cancelled) {
    const auto found = requests_.find(handle);
    if (found != requests_.end() && over) finish(found->second, found->second.cancel_code, "stopped", now);
  }
  observe(done.step_took);
  if (const auto step = take_step(now)) apply_step(*step, now);
}

void DecodeCore::apply_step(const engine::StepResult& step, Instant now) {
  std::map<std::string, std::pair<std::uint32_t, wire::token_batch>> batches;
  for (const engine::RowResult& row : step.rows) {
    if (Request* request = of_row(row)) row_done(*request, row, now, batches);
  }
  for (auto& [router, batch] : batches) {
    outgoing_.push_back(
        wire::Envelope::make(router, batch.first, wire::Scope{{}, 0, options_.rank, 0}, batch.second));
  }
  // Ends after the tokens, so that a router sees the last token before the final counts.
  for (const engine::RowResult& row : step.rows) {
    Request* request = of_row(row);
    if (request == nullptr) continue;
    if (row.finish == engine::Finish::cancelled) {
      finish(*request, request->cancel_code, "stopped", now);
    } else if (row.finish != engine::Finish::none) {
      finish(*request, Code::ok, "", now);
    } else {
      advance_page(*request, now);
    }
  }
}

void DecodeCore::row_done(Request& request, const engine::RowResult& row, Instant now,
                          std::map<std::string, std::pair<std::uint32_t, wire::token_batch>>& batches) {
  request.stepping = false;
  if (request.state != State::running) return;
  if (row.state == engine::RowState::not_before) {
    request.not_before = row.not_before;
    if (row.computed_tokens > 0) swapped_in(request, row);
    return;
  }
  if (row.state != engine::RowState::computed) {
    // Every page of a seat was sealed before it was seated; that one is missing now means the arena died.
    finish(request, Code::unreachable, "the pages of the hand-over are gone", now);
    return;
  }
  swapped_in(request, row);
  if (!row.has_token) return;
  ++tokens_produced_;
  request.tokens.push_back(row.token.id);
  request.next_index = row.index + 1;
  request.finish = row.finish;
  wire::TokenEvent event;
  event.request = request.scope.request;
  event.attempt = request.scope.attempt;
  event.index = row.index;
  event.token = row.token;
  event.finish =
      static_cast<wire::U8>(row.finish == engine::Finish::cancelled ? engine::Finish::none : row.finish);
  event.swapped_blocks = row.swapped_blocks;
  event.spans = row.spans;
  auto& batch = batches[request.router];
  batch.first = request.router_generation;
  batch.second.events.push_back(std::move(event));
}

void DecodeCore::swapped_in(Request& request, const engine::RowResult& row) {
  request.computed_tokens = row.computed_tokens;
  request.swapped_blocks = row.swapped_blocks;
  if (std::exchange(request.released_kv, true)) return;
  to_kvd(request.scope, wire::kv_release{});
}

void DecodeCore::advance_page(Request& request, Instant now) {
  const bool closing = request.state == State::closing;
  if (request.page_state != PageState::none) return;
  const std::uint32_t block_tokens = description_.layout.block_tokens();
  const std::uint32_t page_blocks = description_.layout.page_blocks();
  const std::uint32_t full = request.computed_tokens / block_tokens;
  const std::uint32_t page_end = request.page_first / page_blocks * page_blocks + page_blocks;
  std::uint32_t count = 0;
  if (!kvd_.empty() && request.page_first != wire::block_none) {
    if (full >= page_end) {
      count = page_end - request.page_first;
    } else if (closing && full > request.page_first) {
      count = full - request.page_first;
    }
  }
  if (count == 0) {
    if (closing) end(request.handle, now);
    return;
  }
  while (request.keys.size() < request.page_first + count) {
    const std::size_t block = request.keys.size();
    const Key& parent = block == 0 ? request.seat_request.root : request.keys[block - 1];
    request.keys.push_back(kv::block_key(
        parent, std::span<const std::uint32_t>(request.tokens).subspan(block * block_tokens, block_tokens)));
  }
  request.page_count = count;
  request.page_state = PageState::opening;
  request.page_tag = next_tag_++;
  request.page_until = now + options_.open_wait;
  to_kvd(request.scope, wire::kv_open{{count}, request.page_tag});
}

void DecodeCore::give_up_page(Request& request, Instant now) {
  // Later pages of a chain with a hole could not be matched: nothing more is published.
  ++pages_given_up_;
  request.page_state = PageState::none;
  request.page_first = wire::block_none;
  advance_page(request, now);
}

void DecodeCore::exported(Request& request, const Exported& page, Instant now) {
  if (request.page_state != PageState::exporting || page.first != request.page_first) return;
  if (!page.crcs) return give_up_page(request, now);
  wire::kv_sealed sealed;
  sealed.slot = request.page_slot;
  sealed.parent = request.page_first == 0 ? request.seat_request.root : request.keys[request.page_first - 1];
  sealed.keys.assign(request.keys.begin() + request.page_first,
                     request.keys.begin() + request.page_first + request.page_count);
  sealed.crcs = *page.crcs;
  sealed.reuse = 1;
  sealed.tenant = request.seat_request.tenant;
  to_kvd(request.scope, sealed);
  request.page_first += request.page_count;
  request.page_state = PageState::none;
  // The pin of a sealed page is not needed by a running request: it reads its pool.
  to_kvd(request.scope, wire::kv_release{});
  advance_page(request, now);
}

void DecodeCore::stop(Request& request, Code code, Instant now) {
  if (request.cancel_asked || request.state == State::closing) return;
  request.cancel_asked = true;
  request.cancel_code = code == Code::ok ? Code::cancelled : code;
  if (request.in_engine) return;  // the next batch carries the cancel
  // so does the one after admission
  if (request.state == State::admitting && !request.seated.has_value()) return;
  request.end_code = request.cancel_code;
  request.end_reason = "stopped";
  end(request.handle, now);
}

void DecodeCore::finish(Request& request, Code code, std::string reason, Instant now) {
  if (request.state == State::closing) return;
  request.state = State::closing;
  request.end_code = code;
  request.end_reason = std::move(reason);
  advance_page(request, now);
}

void DecodeCore::refuse(Handle handle, Code code, std::string reason, Instant now) {
  Request& request = requests_.at(handle);
  if (request.cancel_asked) {
    // It was to end, and does: who asked waits for that.
    request.end_code = request.cancel_code;
    request.end_reason = "stopped";
    return end(handle, now);
  }
  to_router(request, wire::seat_refused{static_cast<wire::U16>(code), std::move(reason)});
  forget(handle);
}

void DecodeCore::end(Handle handle, Instant now) {
  const Request& request = requests_.at(handle);
  wire::request_done done;
  done.leg = static_cast<wire::U8>(wire::Leg::decode);
  done.code = static_cast<wire::U16>(request.end_code);
  done.next_index = request.next_index;
  const auto prompt = static_cast<std::uint32_t>(request.seat_request.tokens.size());
  done.computed_tokens = request.computed_tokens - std::min(request.computed_tokens, prompt);
  done.reason = request.end_reason;
  tell_ending(request, std::move(done), now);
  forget(handle);
}

void DecodeCore::forget(Handle handle) {
  Request& request = requests_.at(handle);
  pool_taken_ -= request.pool_blocks;
  remove(request, batch_out_ && (request.stepping || request.page_state == PageState::exporting));
}

void DecodeCore::on_arena(const std::string& kvd, std::uint32_t generation, Instant now) {
  if (kvd == kvd_ && generation == kvd_generation_) return;
  kvd_.clear();
  kv_releases_.clear();
  std::vector<Handle> waiting;
  std::vector<Handle> unswapped;
  std::vector<Handle> publishing;
  for (const auto& [handle, request] : requests_) {
    if (request.state == State::expecting || request.state == State::seated ||
        request.state == State::admitting) {
      waiting.push_back(handle);
    } else if (request.state == State::running && !request.released_kv && !request.stepping) {
      unswapped.push_back(handle);
    } else {
      publishing.push_back(handle);
    }
  }
  // Seats lose their pages; running requests go on from the pool and stop publishing.
  constexpr std::string_view why = "the host's di-kvd is away";
  for (const Handle handle : waiting) refuse(handle, Code::unreachable, std::string(why), now);
  // One whose step is out copies from a mapping that is kept until then; the next step's pages may be others'.
  for (const Handle handle : unswapped)
    finish(requests_.at(handle), Code::unreachable, std::string(why), now);
  for (const Handle handle : publishing) {
    Request& request = requests_.at(handle);
    if (request.page_state == PageState::none) continue;
    give_up_page(request, now);
  }
  for (const Handle handle : publishing) {
    const auto found = requests_.find(handle);
    if (found != requests_.end()) found->second.page_first = wire::block_none;
  }
  kvd_ = kvd;
  kvd_generation_ = generation;
  credits_.touch();
}

void DecodeCore::on_time(Instant now) {
  repeat_endings(now);
  if (const auto step = take_step(now)) apply_step(*step, now);
  std::vector<Handle> lapsed;
  std::vector<Handle> pages;
  for (const auto& [handle, request] : requests_) {
    if ((request.state == State::expecting || request.state == State::seated) && now >= request.seat_until) {
      lapsed.push_back(handle);
    }
    if (request.page_state == PageState::opening && now >= request.page_until) pages.push_back(handle);
  }
  for (const Handle handle : lapsed) refuse(handle, Code::timeout, "the seat lapsed", now);
  for (const Handle handle : pages) give_up_page(requests_.at(handle), now);
}

Instant DecodeCore::next_due() const {
  Instant due = common_due();
  for (const auto& [handle, request] : requests_) {
    if (request.state == State::expecting || request.state == State::seated)
      due = std::min(due, request.seat_until);
    if (request.page_state == PageState::opening) due = std::min(due, request.page_until);
    if (request.state == State::running) due = std::min(due, row_due(request));
  }
  return due;
}

DecodeCore::Load DecodeCore::load() const {
  std::uint64_t context = 0;
  for (const auto& [handle, request] : requests_) context += request.computed_tokens;
  const auto running = static_cast<std::uint32_t>(requests_.size());
  Load load;
  load.kv_tokens = std::uint64_t{pool_taken_} * description_.layout.block_tokens();
  load.queue_us = static_cast<std::uint64_t>(cost_.predict_us(
      running, running == 0 ? 0 : static_cast<double>(context) / static_cast<double>(running)));
  return load;
}

std::vector<Gauge> DecodeCore::gauges() const {
  std::uint64_t seats = 0;
  for (const auto& [handle, request] : requests_) {
    if (request.state == State::expecting || request.state == State::seated) ++seats;
  }
  return {{"requests", requests_.size()},
          {"seats", seats},
          {"pool_blocks", pool_taken_},
          {"endings_unacknowledged", endings_.count()}};
}

}  // namespace di::rank
