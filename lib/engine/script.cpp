#include "engine/script.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/crypto.h"
#include "base/fd.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "kv/chain.h"

namespace di::engine {

namespace {

constexpr std::int64_t delay_ms_max = 24LL * 3'600'000;

Error invalid(std::string message) {
  return Error{Code::invalid, 0, std::move(message)};
}

// A member that must be a non-negative integer up to `max`.
Result<std::uint32_t> whole_number(const Json& value, std::string_view key, std::int64_t min,
                                   std::int64_t max) {
  if (!value.is_integer() || value.as_i64() < min || value.as_i64() > max) {
    return invalid("'" + std::string(key) + "': want an integer from " + std::to_string(min) + " to " +
                   std::to_string(max));
  }
  return static_cast<std::uint32_t>(value.as_i64());
}

Result<ScriptPiece> piece_parse(const Json& json) {
  if (!json.is_object())
    return invalid("a piece is a JSON " + std::string(json.type_name()) + ", want an object");
  ScriptPiece piece;
  int contents = 0;
  for (const auto& [key, value] : json.as_object()) {
    if (key == "text" || key == "hex") {
      if (!value.is_string()) return invalid("'" + key + "': want a string");
      if (key == "text") {
        const ByteView bytes = as_bytes(value.as_string());
        piece.bytes.assign(bytes.begin(), bytes.end());
      } else if (!from_hex(value.as_string(), piece.bytes)) {
        return invalid("'hex': want an even number of hexadecimal digits");
      }
      ++contents;
    } else if (key == "delay_ms") {
      const auto delay = whole_number(value, key, 0, delay_ms_max);
      if (!delay) return delay.error();
      piece.delay = milliseconds(*delay);
    } else if (key == "step") {
      const auto step = whole_number(value, key, 0, INT32_MAX);
      if (!step) return step.error();
      piece.step = *step;
    } else {
      return invalid("unknown key '" + key + "' of a piece, want text, hex, delay_ms or step");
    }
  }
  if (contents != 1) return invalid("a piece needs one of 'text' and 'hex'");
  return piece;
}

template <class Enum, std::size_t count>
Result<Enum> name_parse(const Json& value, std::string_view key,
                        const std::array<std::pair<std::string_view, Enum>, count>& names) {
  std::string wanted;
  for (const auto& [name, meaning] : names) {
    if (value.is_string() && value.as_string() == name) return meaning;
    wanted.append(wanted.empty() ? "" : ", ").append(name);
  }
  return invalid("'" + std::string(key) + "': want one of " + wanted);
}

constexpr std::array<std::pair<std::string_view, ScriptFinish>, 5> finish_names{
    {{"stop", ScriptFinish::stop},
     {"length", ScriptFinish::length},
     {"stall", ScriptFinish::stall},
     {"crash", ScriptFinish::crash},
     {"refuse", ScriptFinish::refuse}}};
constexpr std::array<std::pair<std::string_view, ScriptLeg>, 3> leg_names{
    {{"prefill", ScriptLeg::prefill}, {"decode", ScriptLeg::decode}, {"any", ScriptLeg::any}}};

Result<ScriptLine> line_parse(std::string_view text, std::uint32_t number) {
  const auto json = Json::parse(text);
  if (!json) return json.error();
  if (!json->is_object()) return invalid("is a JSON " + std::string(json->type_name()) + ", want an object");
  ScriptLine line;
  line.number = number;
  line.mark = std::to_string(number) + "-" + to_hex(ByteView(sha256(as_bytes(text))).first(8));
  bool has_match = false;
  bool has_times = false;
  for (const auto& [key, value] : json->as_object()) {
    if (key == "match") {
      if (!value.is_string()) return invalid("'match': want a string");
      line.match = value.as_string();
      has_match = true;
    } else if (key == "pieces") {
      if (!value.is_array()) return invalid("'pieces': want an array");
      for (const Json& item : value.as_array()) {
        auto piece = piece_parse(item);
        if (!piece) return piece.error();
        const bool same_step = piece->step && !line.pieces.empty() && line.pieces.back().step == piece->step;
        if (same_step && piece->delay > Duration{})
          return invalid("'delay_ms' of a piece that is not the first of its step");
        line.pieces.push_back(std::move(*piece));
      }
    } else if (key == "finish") {
      const auto finish = name_parse(value, key, finish_names);
      if (!finish) return finish.error();
      line.finish = *finish;
    } else if (key == "leg") {
      const auto leg = name_parse(value, key, leg_names);
      if (!leg) return leg.error();
      line.leg = *leg;
    } else if (key == "times") {
      const auto times = whole_number(value, key, 1, script_times_max);
      if (!times) return times.error();
      line.times = *times;
      has_times = true;
    } else if (key == "lag") {
      const auto lag = whole_number(value, key, 0, INT32_MAX);
      if (!lag) return lag.error();
      line.lag_tokens = *lag;
    } else {
      return invalid("unknown key '" + key + "', want match, pieces, finish, leg, times or lag");
    }
  }
  if (!has_match) return invalid("'match' is missing");
  if (!has_times && (line.finish == ScriptFinish::crash || line.finish == ScriptFinish::stall ||
                     line.finish == ScriptFinish::refuse)) {
    line.times = 1;
  }
  return line;
}

// SplitMix64's finalizer.
std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// Bytes of one block in all planes of a group.
std::uint64_t group_block_bytes(const kv::Layout& layout, std::uint32_t group) {
  std::uint64_t bytes = 0;
  for (std::uint32_t plane = layout.group_first_plane(group); plane < layout.group_last_plane(group);
       ++plane) {
    bytes += layout.plane_block_bytes(plane);
  }
  return bytes;
}

// A block of `tokens` tokens in one group: derived bytes, zeros behind the last whole entry.
void block_fill(const kv::Layout& layout, const Key& key, std::uint32_t group, std::uint32_t tokens,
                Bytes& out) {
  out.resize(group_block_bytes(layout, group));
  script_kv_fill(key, group, out);
  std::uint64_t at = 0;
  for (std::uint32_t plane = layout.group_first_plane(group); plane < layout.group_last_plane(group);
       ++plane) {
    const kv::Plane& entry = layout.planes()[plane];
    const std::uint64_t filled = std::uint64_t{tokens / entry.tokens_per_entry} * entry.bytes_per_entry;
    const std::uint64_t bytes = layout.plane_block_bytes(plane);
    std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(at + filled), bytes - filled, std::byte{0});
    at += bytes;
  }
}

// Calls part(plane's bytes of block `block` inside a segment of `page_blocks` blocks, the same inside a
// block of block_fill).
template <class Segment, class Part>
void for_each_plane(const kv::Layout& layout, std::uint32_t group, Segment segment, std::uint32_t page_blocks,
                    std::uint32_t block, ByteView filled, Part&& part) {
  std::uint64_t at = 0;
  for (std::uint32_t plane = layout.group_first_plane(group); plane < layout.group_last_plane(group);
       ++plane) {
    const std::uint64_t bytes = layout.plane_block_bytes(plane);
    part(segment.subspan(layout.plane_offset(plane, page_blocks) + block * bytes, bytes),
         filled.subspan(at, bytes));
    at += bytes;
  }
}

}  // namespace

Result<std::vector<ScriptLine>> script_parse(std::string_view text, std::string_view path) {
  std::vector<ScriptLine> lines;
  std::uint32_t number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line_text = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (!line_text.empty() && line_text.back() == '\r') line_text.remove_suffix(1);
    if (line_text.find_first_not_of(" \t") == std::string_view::npos) continue;
    const std::string where = std::string(path) + ":" + std::to_string(number);
    if (lines.size() == script_lines_max) {
      return invalid("more than " + std::to_string(script_lines_max) + " lines").in(where);
    }
    auto line = line_parse(line_text, number);
    if (!line) return line.error().in(where);
    lines.push_back(std::move(*line));
  }
  if (lines.empty()) return invalid(std::string(path) + ": has no line");
  return lines;
}

Result<std::vector<ScriptLine>> script_load(const std::string& path) {
  const auto text = file_read(path, script_bytes_max);
  if (!text) return text.error();
  return script_parse(*text, path);
}

kv::Layout script_layout() {
  auto layout = kv::layout_mla("script-0", 32, 6, 160);
  DI_ASSERT(layout.ok());
  return *std::move(layout);
}

void script_kv_fill(const Key& key, std::uint32_t group, MutableByteView out) {
  std::uint64_t state = group;
  for (std::size_t word = 0; word < 4; ++word)
    state = mix(state ^ get_le<std::uint64_t>(key.raw.data() + 8 * word));
  std::size_t at = 0;
  for (; at + 8 <= out.size(); at += 8) {
    state += 0x9e3779b97f4a7c15ULL;
    put_le(out.data() + at, mix(state));
  }
  std::uint64_t rest = mix(state + 0x9e3779b97f4a7c15ULL);
  for (; at < out.size(); ++at, rest >>= 8) out[at] = static_cast<std::byte>(rest & 0xff);
}

Key script_tail_key(const Key& parent, std::span<const std::uint32_t> tokens) {
  Bytes bytes;
  const ByteView tag = as_bytes("di script tail");
  bytes.assign(tag.begin(), tag.end());
  bytes.insert(bytes.end(), parent.raw.begin(), parent.raw.end());
  for (const std::uint32_t token : tokens) {
    std::array<std::byte, 4> raw{};
    put_le(raw.data(), token);
    bytes.insert(bytes.end(), raw.begin(), raw.end());
  }
  return Key{sha256(bytes)};
}

Result<std::unique_ptr<ScriptEngine>> ScriptEngine::create(Options options) {
  if (options.lines.empty()) return invalid("the script has no line");
  if (options.description.sequences_max == 0 || options.description.pool_blocks == 0) {
    return invalid("the script engine needs room for a sequence");
  }
  if (!options.state_dir.empty()) {
    if (::mkdir(options.state_dir.c_str(), 0755) != 0 && errno != EEXIST)
      return errno_error(options.state_dir);
    if (::access(options.state_dir.c_str(), W_OK | X_OK) != 0) return errno_error(options.state_dir);
  }
  options.description.wants_debug_text = true;
  if (!options.on_crash) {
    options.on_crash = [] { ::kill(::getpid(), SIGKILL); };
  }
  return std::unique_ptr<ScriptEngine>(new ScriptEngine(std::move(options)));
}

ScriptEngine::Sequence& ScriptEngine::at(SequenceId id) {
  const auto entry = sequences_.find(id);
  DI_ASSERT(entry != sequences_.end());
  return entry->second;
}

Instant ScriptEngine::span_now() const {
  return options_.clock != nullptr ? options_.clock->now() : Instant{};
}

bool ScriptEngine::line_usable(const ScriptLine& line) const {
  if (line.times == 0) return true;
  if (options_.state_dir.empty()) {
    const auto entry = uses_.find(line.number);
    return entry == uses_.end() || entry->second < line.times;
  }
  // The uses are files 0, 1, ... made in this order; the last one says whether any is left.
  const std::string last = options_.state_dir + "/" + line.mark + "." + std::to_string(line.times - 1);
  return ::access(last.c_str(), F_OK) != 0;
}

Result<bool> ScriptEngine::line_claim(const ScriptLine& line) {
  if (line.times == 0) return true;
  if (options_.state_dir.empty()) {
    std::uint32_t& uses = uses_[line.number];
    if (uses >= line.times) return false;
    ++uses;
    return true;
  }
  // Exclusive creation makes the count right between processes and after a kill, with no lock.
  for (std::uint32_t use = 0; use < line.times; ++use) {
    const std::string path = options_.state_dir + "/" + line.mark + "." + std::to_string(use);
    const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (fd.valid()) return true;
    if (errno != EEXIST) {
      const Error error = errno_error(path);
      log_warn("script", "cannot count the use of a line", {{"line", line.number}, {"error", error}});
      return error;
    }
  }
  return false;
}

bool ScriptEngine::line_claimed(const ScriptLine& line) {
  const Result<bool> claimed = line_claim(line);
  return claimed.ok() && *claimed;
}

bool ScriptEngine::line_matches(const ScriptLine& line, const SequenceSpec& spec) {
  if (line.leg == ScriptLeg::prefill && spec.leg != wire::Leg::prefill) return false;
  if (line.leg == ScriptLeg::decode && spec.leg != wire::Leg::decode) return false;
  return spec.debug_text.find(line.match) != std::string::npos;
}

// The first line after line number `after_number` that matches and has uses left, or null.
const ScriptLine* ScriptEngine::line_for(const SequenceSpec& spec, std::uint32_t after_number) const {
  for (const ScriptLine& line : options_.lines) {
    if (line.number > after_number && line_matches(line, spec) && line_usable(line)) return &line;
  }
  return nullptr;
}

Result<SequenceId> ScriptEngine::admit(SequenceSpec spec) {
  const Description& description = options_.description;
  const std::uint32_t block_tokens = description.layout.block_tokens();
  if (spec.tokens.empty()) return invalid("no tokens");
  if (spec.tokens.size() > description.context_tokens_max ||
      spec.known_tokens_max > description.context_tokens_max || spec.known_tokens_max < spec.tokens.size()) {
    return invalid("longer than the context of " + std::to_string(description.context_tokens_max) +
                   " tokens");
  }
  for (const std::uint32_t token : spec.tokens) {
    if (token >= description.vocab && token < wire::script_token_base) {
      return invalid("token id " + std::to_string(token) + " is out of range");
    }
  }
  if (spec.keys.size() > spec.tokens.size() / block_tokens) return invalid("more keys than full blocks");
  if (spec.cached_tokens >= spec.tokens.size())
    return invalid("every token is cached: nothing left to compute");
  if (spec.cached_tokens > 0) {
    const std::uint32_t blocks = (spec.cached_tokens + block_tokens - 1) / block_tokens;
    if (spec.source == nullptr || spec.source->blocks() < blocks)
      return invalid("the source has too few blocks");
  }
  const ScriptLine* line = line_for(spec, 0);
  while (line != nullptr && line->finish == ScriptFinish::refuse) {
    // A use that another request took meanwhile makes the line unusable, so this ends.
    const Result<bool> claimed = line_claim(*line);
    if (!claimed) return claimed.error();
    if (*claimed)
      return Error{Code::busy, 0, "the script refuses (line " + std::to_string(line->number) + ")"};
    line = line_for(spec, 0);
  }
  if (line == nullptr) return invalid("no line of the script matches the last user message");
  const std::uint32_t blocks = (spec.known_tokens_max + block_tokens - 1) / block_tokens;
  if (sequences_.size() >= description.sequences_max) return Error{Code::busy, 0, "no sequence is free"};
  if (blocks > description.pool_blocks - pool_blocks_used_) return Error{Code::busy, 0, "the pool is full"};
  Sequence sequence;
  sequence.keys = spec.keys;
  sequence.blocks_taken = blocks;
  sequence.next_index = spec.first_index;
  sequence.line = line;
  sequence.spec = std::move(spec);
  pool_blocks_used_ += blocks;
  const SequenceId id = next_id_++;
  sequences_.emplace(id, std::move(sequence));
  return id;
}

const Key& ScriptEngine::full_key(Sequence& sequence, std::uint32_t block) {
  const std::uint32_t block_tokens = options_.description.layout.block_tokens();
  while (sequence.keys.size() <= block) {
    const Key& parent = sequence.keys.empty() ? sequence.spec.root : sequence.keys.back();
    const std::span<const std::uint32_t> tokens(sequence.spec.tokens);
    sequence.keys.push_back(
        kv::block_key(parent, tokens.subspan(sequence.keys.size() * block_tokens, block_tokens)));
  }
  return sequence.keys[block];
}

void ScriptEngine::verify_group(Sequence& sequence, std::uint32_t group) {
  const kv::Layout& layout = options_.description.layout;
  const std::uint32_t cached = sequence.spec.cached_tokens;
  std::uint32_t block = 0;
  Bytes want;
  for (const SegmentRun& run : sequence.spec.source->segments(group)) {
    DI_ASSERT(run.count > 0 && run.first + run.count <= run.page_blocks);
    DI_ASSERT(run.segment.size() >= layout.segment_bytes(group, run.page_blocks));
    for (std::uint32_t i = 0; i < run.count; ++i, ++block) {
      const std::uint32_t first_token = block * layout.block_tokens();
      if (first_token >= cached) return;  // cut off by truncate_cached
      const std::uint32_t tokens = std::min(cached - first_token, layout.block_tokens());
      block_fill(layout, key_of(sequence, block, tokens), group, tokens, want);
      for_each_plane(layout, group, run.segment, run.page_blocks, run.first + i, want,
                     [&](ByteView got, ByteView expected) {
                       if (!std::equal(got.begin(), got.end(), expected.begin())) {
                         DI_PANIC("swap-in of request " + sequence.spec.request.text() + ": block " +
                                  std::to_string(block) + " has wrong bytes in layer group " +
                                  std::to_string(group));
                       }
                     });
    }
  }
  DI_ASSERT(block * layout.block_tokens() >= cached);
}

// The key that the bytes of a block with `tokens` tokens come from.
Key ScriptEngine::key_of(Sequence& sequence, std::uint32_t block, std::uint32_t tokens) {
  const std::uint32_t block_tokens = options_.description.layout.block_tokens();
  if (tokens == block_tokens) return full_key(sequence, block);
  const Key parent = block == 0 ? sequence.spec.root : full_key(sequence, block - 1);
  return script_tail_key(
      parent, std::span<const std::uint32_t>(sequence.spec.tokens).subspan(block * block_tokens, tokens));
}

// True when the cached prefix is in the pool; otherwise `result` says what is missing.
bool ScriptEngine::swap_in(Sequence& sequence, Duration swap_wait, RowResult& result) {
  const kv::Layout& layout = options_.description.layout;
  if (sequence.computed > 0 || sequence.spec.cached_tokens == 0) return true;
  KvSource& source = *sequence.spec.source;
  const std::uint32_t blocks =
      (sequence.spec.cached_tokens + layout.block_tokens() - 1) / layout.block_tokens();
  for (; sequence.groups_swapped < layout.groups(); ++sequence.groups_swapped) {
    const std::uint32_t group = sequence.groups_swapped;
    const Instant start = span_now();
    KvSource::Readiness readiness = source.readiness();
    if (readiness.groups <= group && readiness.failed_block >= blocks) {
      source.wait(group, swap_wait);
      readiness = source.readiness();
    }
    if (readiness.failed_block < blocks) {
      result.state = RowState::kv_failed;
      result.failed_block = readiness.failed_block;
      return false;
    }
    if (readiness.groups <= group) {
      result.state = RowState::late;
      result.late_group = group;
      return false;
    }
    verify_group(sequence, group);
    span_add(result, wire::SpanKind::swap_in, group, start);
  }
  sequence.swapped_blocks = sequence.spec.cached_tokens / layout.block_tokens();
  sequence.computed = sequence.spec.cached_tokens;
  sequence.spec.source.reset();
  return true;
}

void ScriptEngine::span_add(RowResult& result, wire::SpanKind kind, std::uint32_t group,
                            Instant start) const {
  if (options_.clock == nullptr || result.spans.size() >= spans_per_row_max) return;
  Span span;
  span.kind = static_cast<std::uint8_t>(kind);
  span.group = static_cast<std::uint16_t>(group);
  span.start_us = static_cast<std::uint64_t>(start.ns / 1000);
  span.length_us = static_cast<std::uint64_t>(to_us(span_now() - start));
  result.spans.push_back(span);
}

void ScriptEngine::crash(Sequence& sequence) {
  options_.on_crash();
  sequence.stalled = true;
}

// A crash strikes with the first call after the last piece went out.
void ScriptEngine::crash_if_due(Sequence& sequence) {
  if (sequence.stalled || sequence.over || !sequence.spoke) return;
  if (sequence.line->finish != ScriptFinish::crash || sequence.next_index < sequence.line->pieces.size())
    return;
  if (line_claimed(*sequence.line)) crash(sequence);
}

// Leaves a line whose end another request has used up, for the next one that matches.
void ScriptEngine::line_settle(Sequence& sequence) {
  while (!sequence.stalled && sequence.next_index >= sequence.line->pieces.size()) {
    const ScriptLine& line = *sequence.line;
    if (line.finish == ScriptFinish::stop || line.finish == ScriptFinish::length) return;
    if (line.finish != ScriptFinish::refuse && line_claimed(line)) {
      if (line.finish == ScriptFinish::crash) {
        crash(sequence);
      } else {
        sequence.stalled = true;
      }
      return;
    }
    const ScriptLine* next = line_for(sequence.spec, line.number);
    if (next == nullptr) {
      sequence.stalled = true;  // nothing is left to say: as visible as a stall, and cancelled like one
      return;
    }
    sequence.line = next;
    sequence.due.reset();
  }
}

StepResult ScriptEngine::step(const StepPlan& plan, Instant now) {
  StepResult result;
  bool delayed = false;
  std::vector<Sequence*> spoke;
  for (const StepRow& row : plan.rows) {
    Sequence& sequence = at(row.sequence);
    bool continued = false;
    RowResult row_result;
    row_result.sequence = row.sequence;
    step_row(sequence, row, plan.swap_wait, now, row_result, continued);
    row_result.computed_tokens = sequence.computed;
    row_result.swapped_blocks = sequence.swapped_blocks;
    if (row_result.state == RowState::computed && !continued) delayed = true;
    if (row_result.has_token) spoke.push_back(&sequence);
    result.rows.push_back(std::move(row_result));
  }
  result.ready_at = delayed ? now + options_.step_delay : now;
  for (Sequence* sequence : spoke) sequence->last_piece_at = result.ready_at;
  return result;
}

void ScriptEngine::step_row(Sequence& sequence, const StepRow& row, Duration swap_wait, Instant now,
                            RowResult& result, bool& continued) {
  DI_ASSERT(!sequence.over);
  crash_if_due(sequence);
  const auto stall = [&] {
    result.state = RowState::not_before;
    result.not_before = instant_never;
  };
  if (sequence.stalled) return stall();
  const Instant start = span_now();
  if (!swap_in(sequence, swap_wait, result)) return;
  const auto known = static_cast<std::uint32_t>(sequence.spec.tokens.size());
  DI_ASSERT(row.tokens > 0 && row.tokens <= known - sequence.computed);
  if (row.tokens < known - sequence.computed) {
    sequence.computed += row.tokens;
    span_add(result, wire::SpanKind::compute, 0, start);
    return;
  }
  line_settle(sequence);
  if (sequence.stalled) return stall();
  const ScriptLine& line = *sequence.line;
  const bool has_piece = sequence.next_index < line.pieces.size();
  const ScriptPiece silent;  // a line without pieces left still has to say that it ends
  const ScriptPiece& piece = has_piece ? line.pieces[sequence.next_index] : silent;
  if (piece.delay > Duration{}) {
    if (!sequence.due) sequence.due = (sequence.spoke ? sequence.last_piece_at : now) + piece.delay;
    if (now < *sequence.due) {
      result.state = RowState::not_before;
      result.not_before = *sequence.due;
      return;
    }
    sequence.due.reset();
  }
  sequence.computed = known;
  span_add(result, wire::SpanKind::compute, 0, start);
  result.has_token = true;
  result.token.id = wire::script_token_base + sequence.next_index;
  result.token.bytes = piece.bytes;
  result.index = sequence.next_index;
  continued = has_piece && sequence.next_index > 0 && piece.step.has_value() &&
              line.pieces[sequence.next_index - 1].step == piece.step;
  ++sequence.next_index;
  sequence.spoke = true;
  sequence.spec.tokens.push_back(result.token.id);

  const bool last = sequence.next_index >= line.pieces.size();
  if (last && (line.finish == ScriptFinish::stop || line.finish == ScriptFinish::length)) {
    static_cast<void>(line_claimed(line));
    result.finish = line.finish == ScriptFinish::stop ? Finish::stop : Finish::length;
  } else if (sequence.next_index >= sequence.spec.sampling.max_tokens ||
             sequence.spec.tokens.size() >= options_.description.context_tokens_max) {
    result.finish = Finish::length;
  } else if (sequence.lag_left && --*sequence.lag_left == 0) {
    result.finish = Finish::cancelled;
  }
  sequence.over = result.finish != Finish::none;
}

void ScriptEngine::truncate_cached(SequenceId id, std::uint32_t blocks) {
  Sequence& sequence = at(id);
  const std::uint32_t tokens = blocks * options_.description.layout.block_tokens();
  DI_ASSERT(sequence.computed == 0 && tokens <= sequence.spec.cached_tokens);
  sequence.spec.cached_tokens = tokens;
  if (tokens == 0) sequence.spec.source.reset();
}

void ScriptEngine::export_blocks(Sequence& sequence, std::uint32_t first, std::uint32_t count,
                                 std::uint32_t tokens, MutableByteView page) {
  const kv::Layout& layout = options_.description.layout;
  DI_ASSERT(page.size() == layout.page_bytes(count));
  std::fill(page.begin(), page.end(), std::byte{0});
  Bytes filled;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Key key = key_of(sequence, first + i, tokens);
    for (std::uint32_t group = 0; group < layout.groups(); ++group) {
      block_fill(layout, key, group, tokens, filled);
      const MutableByteView segment =
          page.subspan(layout.segment_offset(group, count), layout.segment_bytes(group, count));
      for_each_plane(layout, group, segment, count, i, filled, [](MutableByteView to, ByteView from) {
        std::copy(from.begin(), from.end(), to.begin());
      });
    }
  }
}

void ScriptEngine::export_page(SequenceId id, std::uint32_t first, std::uint32_t count,
                               MutableByteView page) {
  Sequence& sequence = at(id);
  crash_if_due(sequence);
  const std::uint32_t block_tokens = options_.description.layout.block_tokens();
  DI_ASSERT(count > 0 && (first + count) * block_tokens <= sequence.computed);
  export_blocks(sequence, first, count, block_tokens, page);
}

void ScriptEngine::export_tail(SequenceId id, MutableByteView page) {
  Sequence& sequence = at(id);
  crash_if_due(sequence);
  const std::uint32_t block_tokens = options_.description.layout.block_tokens();
  const std::uint32_t tokens = sequence.computed % block_tokens;
  if (tokens == 0) {
    std::fill(page.begin(), page.end(), std::byte{0});
    return;
  }
  export_blocks(sequence, sequence.computed / block_tokens, 1, tokens, page);
}

bool ScriptEngine::cancel(SequenceId id) {
  Sequence& sequence = at(id);
  crash_if_due(sequence);
  if (sequence.over || sequence.stalled || sequence.line->lag_tokens == 0) {
    sequence.over = true;
    return true;
  }
  if (!sequence.lag_left) sequence.lag_left = sequence.line->lag_tokens;
  return false;
}

void ScriptEngine::release(SequenceId id) {
  Sequence& sequence = at(id);
  crash_if_due(sequence);
  DI_ASSERT(pool_blocks_used_ >= sequence.blocks_taken);
  pool_blocks_used_ -= sequence.blocks_taken;
  sequences_.erase(id);
}

}  // namespace di::engine
