#include "rank/prefill.h"

#include <algorithm>

namespace di::rank {

namespace {

// Between two tries for slots when the arena has no room.
constexpr Duration open_retry = milliseconds(50);
// For the answer to kv_open; then it is sent again under a new tag.
constexpr Duration open_answer_wait = seconds(2);
// For the answer to kv_handover, which takes as long as the pages do; to say it twice is harmless.
constexpr Duration handed_answer_wait = seconds(2);
// Requests that may be admitted before an earlier one for which the pool has no room yet: enough to keep the
// engine busy meanwhile, and few, since each of them keeps the room that it takes for a while.
constexpr std::uint32_t overtakers_max = 8;

std::vector<wire::Span> spans_of(PrefillRequest& request, const engine::RowResult& row) {
  std::vector<wire::Span> spans = row.spans;
  for (const wire::Span& span : request.untold) {
    if (spans.size() < engine::spans_per_row_max) spans.push_back(span);
  }
  request.untold.clear();
  return spans;
}

}  // namespace

PrefillCore::PrefillCore(Options options, engine::Description description)
    : CoreOf(options.rank, options.requests_max, options.cost, std::move(description)),
      options_(options),
      watch_({.enabled = options.arbiter,
              .block_bytes = description_.layout.block_bytes(),
              .groups = description_.layout.groups(),
              .block_tokens = description_.layout.block_tokens(),
              .chunk_tokens = options.chunk_tokens,
              .overlap = options.overlap}) {}

std::uint32_t PrefillCore::blocks_needed(const Request& request) const {
  // One more than the prompt: the token that prefill chooses is known, though never computed here.
  return blocks_of(known_tokens(request) + 1, description_.layout.block_tokens());
}

double PrefillCore::left_us(const Request& request) const {
  if (request.has_token) return 0;
  const std::uint32_t done =
      std::max(request.computed_tokens, request.cached_blocks * description_.layout.block_tokens());
  return cost_.predict_prompt_us(known_tokens(request), std::min(done, known_tokens(request)),
                                 options_.chunk_tokens);
}

double PrefillCore::queue_us() const {
  double total = 0;
  for (const auto& [handle, request] : requests_) total += left_us(request);
  return total;
}

void PrefillCore::on_message(const wire::Envelope& message, Instant now) {
  if (message.number == wire::prefill_bind::number) {
    bind(message, now);
    return;
  }
  if (message.number == wire::done_ack::number) {
    endings_.acknowledge(message.peer, message.scope);
    return;
  }
  Request* request = find(message.scope);
  if (request == nullptr) {
    // Late: the request is over.
    if (message.number == wire::request_stop::number)
      outgoing_.push_back(ending_of_unknown(message, wire::Leg::prefill));
    if (message.number == wire::prefill_target::number) {
      // Its pages went to an earlier seat: the router must not wait for this one.
      if (auto target = message.as<wire::prefill_target>()) {
        outgoing_.push_back(wire::Envelope::make(
            message.peer, message.peer_generation, message.scope,
            wire::prefill_refused{0, static_cast<wire::U16>(Code::not_found),
                                  "the request is not here any more", target->seat, target->decode}));
      }
    }
    return;
  }
  switch (message.number) {
    case wire::prefill_target::number:
      if (auto target = message.as<wire::prefill_target>()) {
        request->target = std::move(*target);
        if (request->state == State::waiting || request->state == State::handing) {
          hand_over(*request, now);
        } else {
          push_early(*request);
        }
      }
      break;
    case wire::request_stop::number:
      if (auto reason = message.as<wire::request_stop>())
        stop(*request, static_cast<Code>(reason->reason), now);
      break;
    case wire::request_kill::number:
      forget(request->handle);
      break;
    case wire::kv_fetching::number:
      if (auto answer = message.as<wire::kv_fetching>()) fetched(*request, *answer, now);
      break;
    case wire::kv_ready::number:
      if (auto ready = message.as<wire::kv_ready>()) ready_moved(*request, *ready, now);
      break;
    case wire::kv_opened::number:
      if (auto answer = message.as<wire::kv_opened>()) opened(*request, *answer, now);
      break;
    case wire::kv_handed::number:
      if (auto answer = message.as<wire::kv_handed>()) handed(*request, *answer, now);
      break;
    default:
      break;
  }
}

void PrefillCore::bind(const wire::Envelope& message, Instant now) {
  auto decoded = message.as<wire::prefill_bind>();
  if (!decoded) return;
  wire::prefill_bind& bind = *decoded;
  credits_.take(message.peer, bind.bind, bind.cost_us);
  const std::uint32_t block_tokens = description_.layout.block_tokens();
  const auto tokens = static_cast<std::uint32_t>(bind.tokens.size());

  const auto refuse_now = [&](Code code, std::string reason) {
    outgoing_.push_back(wire::Envelope::make(
        message.peer, message.peer_generation, message.scope,
        wire::prefill_refused{bind.bind, static_cast<wire::U16>(code), std::move(reason), 0, {}}));
  };
  if (tokens == 0 || bind.keys.size() != tokens / block_tokens) {
    return refuse_now(Code::invalid, "the keys do not fit the tokens");
  }
  if (tokens >= description_.context_tokens_max)
    return refuse_now(Code::invalid, "longer than the model's context");
  if (bind.hit_blocks > (tokens - 1) / block_tokens) {
    return refuse_now(Code::invalid, "the hit leaves nothing to compute");
  }
  if (blocks_of(tokens + 1, block_tokens) > description_.pool_blocks) {
    return refuse_now(Code::invalid, "longer than the rank's pool");
  }
  const Name name{message.scope.request, message.scope.attempt};
  if (by_name_.contains(name)) return;  // a duplicate: the first one counts
  if (draining_) return refuse_now(Code::busy, "draining");
  if (kvd_.empty()) return refuse_now(Code::busy, "the host's di-kvd is away");
  if (requests_.size() >= options_.requests_max) return refuse_now(Code::busy, "no place");
  Request request;
  request.bind = std::move(bind);
  Request& kept = add(message, std::move(request));
  if (kept.bind.hit_blocks > 0) {
    kept.state = State::fetching;
    kept.fetch_asked = now;
    kept.fetch_until = now + options_.fetch_wait;
    wire::kv_fetch fetch;
    fetch.keys.assign(kept.bind.keys.begin(), kept.bind.keys.begin() + kept.bind.hit_blocks);
    if (options_.arbiter) {
      fetch.compute.push_back({.tokens = tokens,
                               .chunk_tokens = options_.chunk_tokens,
                               .groups = options_.overlap ? description_.layout.groups() : 1,
                               .queue_us = static_cast<wire::U64>(queue_us() - left_us(kept)),
                               .base_us = cost_.base_us(),
                               .token_us = cost_.token_us(),
                               .context_us = cost_.context_us()});
    }
    to_kvd(kept.scope, fetch);
  } else {
    open_pages(kept, 0, static_cast<std::uint32_t>(kept.bind.keys.size()), tokens % block_tokens != 0, now);
  }
}

void PrefillCore::fetched(Request& request, const wire::kv_fetching& answer, Instant now) {
  if (request.state != State::fetching) return;
  if (answer.computed_blocks > 0) {
    watch_.cut(answer.computed_blocks);
    request.untold.push_back(
        {.kind = static_cast<wire::U8>(wire::SpanKind::cut),
         .group = static_cast<wire::U16>(std::min<std::uint32_t>(answer.computed_blocks, UINT16_MAX)),
         .start_us = static_cast<wire::U64>(request.fetch_asked.ns / 1000),
         .length_us = static_cast<wire::U64>(to_us(now - request.fetch_asked))});
  }
  if (answer.code == 0) {
    request.cached_blocks = std::min(answer.blocks, request.bind.hit_blocks);
    request.entry = answer.entry;
    request.cached_slots = answer.slots;
    request.groups_wanted = options_.overlap ? 1 : description_.layout.groups();
    if (request.cached_blocks > 0) {
      watch_.begin(request.handle, request.cached_blocks, known_tokens(request), request.fetch_asked, now);
    }
  }
  const std::uint32_t tokens = known_tokens(request);
  open_pages(request, request.cached_blocks, static_cast<std::uint32_t>(request.bind.keys.size()),
             tokens % description_.layout.block_tokens() != 0, now);
}

void PrefillCore::open_pages(Request& request, std::uint32_t first, std::uint32_t last, bool tail,
                             Instant now) {
  // Pages end at multiples of page_blocks, so that different writers cut a chain at the same places.
  const std::uint32_t page_blocks = description_.layout.page_blocks();
  for (std::uint32_t block = first; block < last;) {
    const std::uint32_t end = std::min(last, block / page_blocks * page_blocks + page_blocks);
    Page page;
    page.first = block;
    page.count = end - block;
    request.opening.push_back(request.pages.size());
    request.pages.push_back(std::move(page));
    block = end;
  }
  if (tail) {
    Page page;
    page.first = static_cast<std::uint32_t>(request.bind.keys.size());
    page.count = 1;
    page.tail = true;
    request.opening.push_back(request.pages.size());
    request.pages.push_back(std::move(page));
  }
  if (request.state == State::fetching) request.state = State::opening;
  request.open_until = now + options_.open_wait;
  if (request.opening.empty()) {
    if (request.state == State::opening) request.state = State::admitting;
    return;
  }
  // Pages of an earlier, unanswered kv_open are asked for again; its answer no longer has the tag, and what it brought
  // is given back.
  ask_open(request, now);
}

void PrefillCore::ask_open(Request& request, Instant now) {
  wire::kv_open open;
  for (const std::size_t page : request.opening) open.page_blocks.push_back(request.pages[page].count);
  open.tag = request.open_tag = next_tag_++;
  if (request.open_since == 0) request.open_since = open.tag;
  open.unheard = request.open_since;
  request.open_again = now + open_answer_wait;
  to_kvd(request.scope, open);
}

void PrefillCore::opened(Request& request, const wire::kv_opened& answer, Instant now) {
  if (answer.tag != request.open_tag) return;
  const auto code = static_cast<Code>(answer.code);
  if (code == Code::invalid || code == Code::unsupported) {
    // To ask again would hear the same.
    constexpr std::string_view why = "longer than the arena";
    if (request.in_engine || request.admitting) return end(request.handle, code, std::string(why), now);
    return refuse(request.handle, code, std::string(why), now);
  }
  if (code != Code::ok) {
    request.open_again = now + open_retry;
    return;
  }
  if (answer.slots.size() != request.opening.size())
    return end(request.handle, Code::invalid, "di-kvd granted other pages", now);
  for (std::size_t i = 0; i < request.opening.size(); ++i) {
    Page& page = request.pages[request.opening[i]];
    page.slot = answer.slots[i];
    page.granted = true;
  }
  request.opening.clear();
  request.open_since = 0;
  if (request.state == State::opening) request.state = State::admitting;
}

void PrefillCore::ready_moved(Request& request, const wire::kv_ready& ready, Instant now) {
  request.groups_ready = std::max(request.groups_ready, ready.groups);
  if (ready.failed_block == wire::block_none) return watch_.moved(request.handle, ready.groups, now);
  watch_.failed(request.handle);
  request.failed_block = std::min(request.failed_block, ready.failed_block);
  if (request.failed_block < request.cached_blocks && request.in_engine && !request.computed_any &&
      !request.stepping) {
    truncate(request, request.failed_block, now);
  }
}

void PrefillCore::truncate(Request& request, std::uint32_t blocks, Instant now) {
  const std::uint32_t lost_until = request.cached_blocks;
  request.cached_blocks = blocks;
  request.computed_tokens = blocks * description_.layout.block_tokens();
  if (blocks == 0) request.groups_wanted = 0;
  truncations_.emplace_back(request.sequence, blocks);
  open_pages(request, blocks, lost_until, false, now);
}

bool PrefillCore::waits_for_blocks(const Request& request) const {
  if (request.state != State::admitting && request.state != State::running) return false;
  if (request.stepping || request.computed_any || request.cancel_asked) return false;
  return request.failed_block >= request.cached_blocks && request.cached_blocks > 0;
}

void PrefillCore::look_at_fetches(Instant now) {
  for (auto& [handle, request] : requests_) {
    if (!waits_for_blocks(request) || watch_.next_look(handle) > now) continue;
    if (!watch_.give_up(handle, queue_us() - left_us(request), cost_, now)) continue;
    wire::Span span;
    span.kind = static_cast<wire::U8>(wire::SpanKind::wait);
    span.start_us = static_cast<wire::U64>(request.fetch_asked.ns / 1000);
    span.length_us = static_cast<wire::U64>(to_us(now - request.fetch_asked));
    request.untold.push_back(span);
    // From here as if di-kvd had said so.
    request.failed_block = 0;
    if (request.in_engine) truncate(request, 0, now);
  }
}

bool PrefillCore::runnable(const Request& request, Instant now) const {
  if (request.state != State::running || request.stepping || request.has_token) return false;
  if (request.cancel_asked && !request.cancel_sent) return false;
  if (request.not_before > now) return false;
  return request.computed_any || request.cached_blocks == 0 || request.groups_ready >= request.groups_wanted;
}

std::optional<Batch> PrefillCore::next_batch(Instant now) {
  if (!may_start_batch()) return std::nullopt;
  look_at_fetches(now);
  Batch batch;
  batch.releases = std::move(releases_);
  releases_.clear();
  batch.truncations = std::move(truncations_);
  truncations_.clear();
  std::uint32_t budget = options_.chunk_tokens;
  step_rows_.clear();
  Request* passed = nullptr;  // the first for which there is no room
  for (auto& [handle, request] : requests_) {
    if (cancel_row(request, batch)) continue;
    const bool barred = passed != nullptr && passed->overtaken >= overtakers_max;
    if (request.state == State::admitting && !request.admitting && !barred) {
      const std::uint32_t blocks = blocks_needed(request);
      if (pool_taken_ + blocks > description_.pool_blocks) {
        if (passed == nullptr) passed = &request;
      } else {
        if (passed != nullptr) ++passed->overtaken;
        pool_taken_ += blocks;
        pool_by_request_.emplace(handle, blocks);
        request.admitting = true;
        AdmitCommand admit;
        admit.handle = handle;
        admit.entry = request.entry;
        engine::SequenceSpec& spec = admit.spec;
        spec.request = request.scope.request;
        spec.attempt = request.scope.attempt;
        spec.tokens = request.bind.tokens;
        spec.first_index = request.bind.first_index;
        spec.sampling = request.bind.sampling;
        spec.known_tokens_max = known_tokens(request) + 1;
        spec.root = request.bind.root;
        spec.keys = request.bind.keys;
        // A failure that came before the engine had the sequence shortens the prefix right here.
        const std::uint32_t lost_until = request.cached_blocks;
        request.cached_blocks = std::min(request.cached_blocks, request.failed_block);
        if (request.cached_blocks < lost_until)
          open_pages(request, request.cached_blocks, lost_until, false, now);
        if (request.cached_blocks > 0) admit.slots = request.cached_slots;
        spec.cached_tokens = request.cached_blocks * description_.layout.block_tokens();
        spec.debug_text = request.bind.debug;
        spec.resume = request.bind.resume;
        spec.leg = wire::Leg::prefill;
        request.computed_tokens = spec.cached_tokens;
        batch.admissions.push_back(std::move(admit));
      }
    }
    if (request.in_engine && !request.cancel_asked) {
      for (Page& page : request.pages) {
        const std::uint32_t end = page.tail ? known_tokens(request)
                                            : (page.first + page.count) * description_.layout.block_tokens();
        if (!page.granted || page.exporting || page.sealed || request.computed_tokens < end) continue;
        if (!page.tail && !request.computed_any) continue;
        page.exporting = true;
        batch.exports.push_back({handle, request.sequence, page.first, page.count, page.tail, page.slot});
      }
    }
    if (budget > 0 && runnable(request, now)) {
      const std::uint32_t take = std::min(budget, known_tokens(request) - request.computed_tokens);
      if (take > 0) {
        budget -= take;
        request.stepping = true;
        batch.plan.rows.push_back({request.sequence, take});
        step_rows_.emplace_back(take, request.computed_tokens + take / 2.0);
      }
    }
  }
  batch.plan.swap_wait = options_.swap_wait;
  if (batch.empty()) return std::nullopt;
  batch_out_ = true;
  return batch;
}

void PrefillCore::on_batch_done(BatchDone done, Instant now) {
  batch_back(done);
  for (const Admitted& answer : done.admitted) {
    Request* request =
        admitted(answer, [&](const Error& error) { refuse(answer.handle, error.code, error.message, now); });
    if (request == nullptr) continue;
    request->admitting = false;
    request->state = State::running;
    if (request->failed_block < request->cached_blocks) truncate(*request, request->failed_block, now);
  }
  for (Exported& exported : done.exported) {
    const auto found = requests_.find(exported.handle);
    if (found == requests_.end()) continue;
    Request& request = found->second;
    if (!exported.crcs) {
      end(exported.handle, exported.crcs.error().code, exported.crcs.error().message, now);
      continue;
    }
    for (Page& page : request.pages) {
      if (!page.exporting || page.sealed || page.first != exported.first || page.tail != exported.tail)
        continue;
      page.crcs = *std::move(exported.crcs);
      page.sealed = true;
      wire::kv_sealed sealed;
      sealed.slot = page.slot;
      sealed.crcs = page.crcs;
      sealed.tenant = request.bind.tenant;
      if (!page.tail) {
        sealed.parent = page.first == 0 ? request.bind.root : request.bind.keys[page.first - 1];
        sealed.keys.assign(request.bind.keys.begin() + page.first,
                           request.bind.keys.begin() + page.first + page.count);
      }
      to_kvd(request.scope, sealed);
      break;
    }
    advance_sealing(request, now);
  }
  for (const auto& [handle, over] : done.cancelled) {
    const auto found = requests_.find(handle);
    if (found == requests_.end()) continue;
    // One that goes on for a while ends with its next token; here there is none after the first.
    if (over || found->second.has_token) end(handle, found->second.cancel_code, "stopped", now);
  }
  observe(done.step_took);
  if (const auto step = take_step(now)) apply_step(*step, now);
}

void PrefillCore::apply_step(const engine::StepResult& step, Instant now) {
  for (const engine::RowResult& row : step.rows) {
    if (Request* request = of_row(row)) row_done(*request, row, now);
  }
}

void PrefillCore::row_computed(Request& request, const engine::RowResult& row) {
  tokens_computed_ += row.computed_tokens - request.computed_tokens;
  blocks_swapped_ += row.swapped_blocks - request.swapped_blocks;
  request.computed_any = true;
  request.computed_tokens = row.computed_tokens;
  request.swapped_blocks = row.swapped_blocks;
}

void PrefillCore::row_done(Request& request, const engine::RowResult& row, Instant now) {
  request.stepping = false;
  switch (row.state) {
    case engine::RowState::late:
      request.groups_wanted = row.late_group + 1;
      // Said while the step was out, and by now nothing else may come.
      if (request.failed_block < request.cached_blocks) truncate(request, request.failed_block, now);
      break;
    case engine::RowState::kv_failed:
      watch_.failed(request.handle);
      request.failed_block = std::min(request.failed_block, row.failed_block);
      if (request.failed_block < request.cached_blocks) truncate(request, request.failed_block, now);
      break;
    case engine::RowState::not_before:
      request.not_before = row.not_before;
      // Its prefix may be in the pool all the same, and then nothing of that can be given up any more.
      if (row.computed_tokens > 0) row_computed(request, row);
      return;
    case engine::RowState::computed:
      row_computed(request, row);
      break;
  }
  if (row.has_token && request.cancel_asked) return end(request.handle, request.cancel_code, "stopped", now);
  if (row.has_token) {
    request.has_token = true;
    request.token = row.token;
    request.index = row.index;
    request.finish = row.finish;
    wire::TokenEvent event;
    event.request = request.scope.request;
    event.attempt = request.scope.attempt;
    event.index = row.index;
    event.token = row.token;
    event.finish = static_cast<wire::U8>(row.finish);
    event.swapped_blocks = request.swapped_blocks;
    event.spans = spans_of(request, row);
    to_router(request, wire::token_batch{{std::move(event)}});
    request.state = State::sealing;
    request.hold_until = now + options_.hold;
    advance_sealing(request, now);
    return;
  }
  if (row.finish == engine::Finish::cancelled)
    return end(request.handle, request.cancel_code, "stopped", now);
  wire::prefill_progress progress;
  progress.left_us = static_cast<wire::U64>(
      cost_.predict_prompt_us(known_tokens(request), request.computed_tokens, options_.chunk_tokens));
  // What the cache has promised is not read before it came.
  progress.computed_tokens = request.computed_any ? request.computed_tokens : 0;
  progress.swapped_blocks = request.swapped_blocks;
  progress.spans = spans_of(request, row);
  to_router(request, progress);
}

void PrefillCore::advance_sealing(Request& request, Instant now) {
  if (request.state != State::sealing) return;
  for (const Page& page : request.pages) {
    if (!page.sealed) return;
  }
  // Everything is in the arena: the pool room is free for the next request.
  releases_.push_back(request.sequence);
  by_sequence_.erase(request.sequence);
  request.in_engine = false;
  pool_taken_ -= pool_by_request_.at(request.handle);
  pool_by_request_.erase(request.handle);
  // A stop that came while the last pages were copied: no batch carries its cancel any more.
  if (request.cancel_asked) return end(request.handle, request.cancel_code, "stopped", now);
  if (request.finish != engine::Finish::none) return end(request.handle, Code::ok, "", now);
  request.state = State::waiting;
  if (request.target.has_value()) hand_over(request, now);
}

// Inside one arena nothing has to go anywhere.
void PrefillCore::push_early(const Request& request) {
  const wire::prefill_target& target = *request.target;
  if (target.host == kvd_ || request.cancel_asked) return;
  wire::kv_push push;
  push.seat = target.seat;
  push.decode = target.decode;
  push.decode_generation = target.decode_generation;
  push.host = target.host;
  push.keys = request.bind.keys;
  push.tail = known_tokens(request) % description_.layout.block_tokens() != 0;
  to_kvd(request.scope, push);
}

void PrefillCore::hand_over(Request& request, Instant now) {
  const wire::prefill_target& target = *request.target;
  if (request.state == State::handing && request.handing == target) return;
  request.state = State::handing;
  request.handing = target;
  request.hold_until = now + options_.hold;
  say_handover(request, now);
}

void PrefillCore::say_handover(Request& request, Instant now) {
  const wire::prefill_target& target = *request.handing;
  request.handover_again = now + handed_answer_wait;
  wire::kv_handover handover;
  handover.seat = target.seat;
  handover.decode = target.decode;
  handover.decode_generation = target.decode_generation;
  handover.host = target.host;
  handover.keys = request.bind.keys;
  for (const Page& page : request.pages) {
    if (page.tail) handover.tail = page.slot;
  }
  handover.token = request.token;
  handover.index = request.index;
  to_kvd(request.scope, handover);
}

void PrefillCore::handed(Request& request, const wire::kv_handed& answer, Instant now) {
  if (request.state != State::handing) return;
  if (answer.seat != request.handing->seat || answer.decode != request.handing->decode) return;
  if (answer.code == 0) return end(request.handle, Code::ok, "", now);
  // The pages are not there: no other seat would help.
  if (answer.code == static_cast<wire::U16>(Code::invalid)) {
    return end(request.handle, Code::invalid, "the pages of the hand-over are gone", now);
  }
  // The router chooses: another target within the hold, or re-entry.
  to_router(request, wire::prefill_refused{request.bind.bind, answer.code, "hand-over failed", answer.seat,
                                           answer.decode});
  request.state = State::waiting;
  request.target.reset();
  request.handing.reset();
}

void PrefillCore::stop(Request& request, Code code, Instant now) {
  if (request.cancel_asked) return;
  request.cancel_asked = true;
  request.cancel_code = code == Code::ok ? Code::cancelled : code;
  // Outside the engine it ends here; inside, the next batch carries the cancel.
  if (!request.in_engine && !request.admitting) end(request.handle, request.cancel_code, "stopped", now);
}

void PrefillCore::refuse(Handle handle, Code code, std::string reason, Instant now) {
  Request& request = requests_.at(handle);
  // It was to end, and does: who asked waits for that.
  if (request.cancel_asked) return end(handle, request.cancel_code, "stopped", now);
  to_router(request,
            wire::prefill_refused{request.bind.bind, static_cast<wire::U16>(code), std::move(reason), 0, {}});
  forget(handle);
}

void PrefillCore::end(Handle handle, Code code, std::string reason, Instant now) {
  const Request& request = requests_.at(handle);
  wire::request_done done;
  done.leg = static_cast<wire::U8>(wire::Leg::prefill);
  done.code = static_cast<wire::U16>(code);
  done.next_index = request.bind.first_index + (request.has_token ? 1 : 0);
  // Until something is, computed_tokens is what the cache has promised.
  if (request.computed_any) {
    done.computed_tokens =
        request.computed_tokens -
        std::min(request.computed_tokens, request.swapped_blocks * description_.layout.block_tokens());
  }
  done.reason = std::move(reason);
  tell_ending(request, std::move(done), now);
  forget(handle);
}

void PrefillCore::forget(Handle handle) {
  Request& request = requests_.at(handle);
  const bool copies =
      batch_out_ &&
      (request.stepping || std::any_of(request.pages.begin(), request.pages.end(),
                                       [](const Page& page) { return page.exporting && !page.sealed; }));
  watch_.end(handle);
  if (request.in_engine) {
    std::erase_if(truncations_, [&](const auto& truncation) { return truncation.first == request.sequence; });
  }
  if (const auto taken = pool_by_request_.find(handle); taken != pool_by_request_.end()) {
    pool_taken_ -= taken->second;
    pool_by_request_.erase(taken);
  }
  remove(request, copies);
}

void PrefillCore::on_arena(const std::string& kvd, std::uint32_t generation, Instant now) {
  if (kvd == kvd_ && generation == kvd_generation_) return;
  // The old arena is gone, and with it every page, pin and grant: the requests cannot be handed over.
  kvd_.clear();
  kv_releases_.clear();
  std::vector<Handle> gone;
  for (const auto& [handle, request] : requests_) gone.push_back(handle);
  for (const Handle handle : gone) end(handle, Code::unreachable, "the host's di-kvd is away", now);
  kvd_ = kvd;
  kvd_generation_ = generation;
  credits_.touch();
}

void PrefillCore::on_time(Instant now) {
  repeat_endings(now);
  if (const auto step = take_step(now)) apply_step(*step, now);
  std::vector<std::pair<Handle, std::string>> timed_out;
  for (auto& [handle, request] : requests_) {
    if (!request.opening.empty() && request.open_again <= now) {
      if (now >= request.open_until) {
        timed_out.emplace_back(handle, "no room in the arena");
      } else {
        ask_open(request, now);
      }
    }
    if (request.state == State::fetching && now >= request.fetch_until) {
      // An answer that comes later finds another state and is dropped; what it pinned is released here.
      to_kvd(request.scope, wire::kv_release{});
      fetched(request, wire::kv_fetching{static_cast<wire::U16>(Code::timeout), 0, 0, {}}, now);
    }
    if ((request.state == State::waiting || request.state == State::handing) && now >= request.hold_until) {
      timed_out.emplace_back(handle, "no seat within the hold");
    } else if (request.state == State::handing && now >= request.handover_again) {
      say_handover(request, now);
    }
  }
  for (const auto& [handle, reason] : timed_out) {
    if (!requests_.contains(handle)) continue;
    if (requests_.at(handle).state == State::opening) {
      // Not busy: it takes requests, and this one would wait here again.
      refuse(handle, Code::no_space, reason, now);
    } else {
      end(handle, Code::timeout, reason, now);
    }
  }
}

Instant PrefillCore::next_due() const {
  Instant due = common_due();
  for (const auto& [handle, request] : requests_) {
    if (!request.opening.empty()) due = std::min(due, request.open_again);
    if (request.state == State::fetching) due = std::min(due, request.fetch_until);
    if (request.state == State::waiting || request.state == State::handing)
      due = std::min(due, request.hold_until);
    if (request.state == State::handing) due = std::min(due, request.handover_again);
    if (request.state == State::running) due = std::min(due, row_due(request));
    if (may_start_batch() && waits_for_blocks(request)) due = std::min(due, watch_.next_look(handle));
  }
  return due;
}

PrefillCore::Load PrefillCore::load() const {
  const double queued = queue_us();
  const auto window = static_cast<double>(to_us(options_.work_window));
  Load load;
  // A rank with nothing to do takes any request, however long.
  load.free_us =
      static_cast<std::uint64_t>(requests_.empty() ? std::max(window, 1.0) : std::max(0.0, window - queued));
  for (const auto& [handle, request] : requests_) load.kv_tokens += request.computed_tokens;
  load.queue_us = static_cast<std::uint64_t>(queued);
  return load;
}

std::string PrefillCore::costs() const {
  return cost_.to_text() + watch_.cost().to_text();
}

Status PrefillCore::restore_costs(std::string_view text) {
  const std::size_t line = std::min(text.find('\n'), text.size());
  DI_TRY(cost_.restore(text.substr(0, line)));
  return watch_.cost().restore(text.substr(line));
}

std::vector<Gauge> PrefillCore::gauges() const {
  std::uint64_t slots = 0;
  std::uint64_t holds = 0;
  for (const auto& [handle, request] : requests_) {
    for (const Page& page : request.pages) slots += page.granted ? 1 : 0;
    if (request.state == State::waiting || request.state == State::handing) ++holds;
  }
  return {{"requests", requests_.size()},
          {"pool_blocks", pool_taken_},
          {"slots_granted", slots},
          {"holds", holds},
          {"endings_unacknowledged", endings_.count()}};
}

}  // namespace di::rank
