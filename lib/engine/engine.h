// engine/engine.h: the narrow interface between a rank and whatever computes tokens.
//
// Owner: the engine thread of a rank's process; describe() alone may be called from any thread.
// Everything is asked for in batches: the rank's core (lib/rank) decides what runs in a step, the
// engine runs it.  Bounds: the pool (`pool_blocks` at creation) and `sequences_max`.
//
// Life of a sequence: admit -> step ... step -> (export_page, export_tail) -> release.
// A sequence knows its tokens; step() computes KV for the next ones and, when the last known token has
// been computed, chooses one more, which then is known too.
//
// Same bits (spec/path.md section 9): what is computed for a row does not depend on the other rows of
// the step, on how a prompt was cut into chunks, or on which prefix came from the cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/time.h"
#include "kv/layout.h"
#include "wire/messages.h"

namespace di::engine {

using SequenceId = std::uint32_t;
using wire::Finish;
using wire::Sampling;
using wire::Span;
using wire::TokenValue;

// What the engine serves; fixed at creation.
struct Description {
  std::string model;
  kv::Layout layout;
  Key revision;                      // weight revision
  std::uint32_t context_tokens_max;  // prompt plus output
  std::uint32_t vocab;
  std::uint32_t pool_blocks;  // blocks (of layout.block_tokens) in the pool
  std::uint32_t sequences_max;
  bool wants_debug_text;  // script engines: give the last user message to admit()
};

// A run of blocks inside one segment that lies in memory: blocks [first, first+count) of a page of
// page_blocks blocks.  `segment` is the whole segment of one layer group.
struct SegmentRun {
  ByteView segment;
  std::uint32_t page_blocks = 0;
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

// Where the KV of a sequence's cached prefix comes from: arena pages that are still being filled.
// Made by the rank's shell, used by the engine thread; the writer of the bytes is another process.
class KvSource {
 public:
  virtual ~KvSource() = default;

  // Blocks that the source has or will have; the last one may be partial (a tail).
  [[nodiscard]] virtual std::uint32_t blocks() const = 0;
  struct Readiness {
    std::uint32_t groups = 0;                       // layer groups of all blocks that are there
    std::uint32_t failed_block = wire::block_none;  // first block that will never come
  };
  [[nodiscard]] virtual Readiness readiness() const = 0;
  // Blocks the caller until readiness().groups > group, a block failed, or `at_most` has passed.
  virtual void wait(std::uint32_t group, Duration at_most) = 0;
  // Segments of layer group `group`, in chain order, blocks() blocks in all, or those in front of the
  // first failed one.  Only for ready groups.
  [[nodiscard]] virtual std::vector<SegmentRun> segments(std::uint32_t group) const = 0;
};

struct SequenceSpec {
  RequestId request;
  std::uint16_t attempt = 0;
  std::vector<std::uint32_t> tokens;  // prompt, then tokens produced earlier
  std::uint32_t first_index = 0;      // absolute index of the next token to be chosen
  Sampling sampling;
  std::uint32_t known_tokens_max = 0;  // pool room to take: tokens.size() + what may still be produced
  Key root;                            // root of the chain and keys of its full blocks: script engines
  std::vector<Key> keys;               // derive KV bytes from them, others ignore them
  std::uint32_t cached_tokens = 0;     // KV of so many first tokens comes from `source`; < tokens.size()
  std::shared_ptr<KvSource> source;    // null when cached_tokens is 0
  std::string debug_text;              // last user message, for script engines
  std::vector<Bytes> resume;           // bytes of script pieces at the end of `tokens`
  wire::Leg leg = wire::Leg::prefill;
};

struct StepRow {
  SequenceId sequence = 0;
  std::uint32_t tokens = 0;  // known, not yet computed tokens to compute; at least 1
};

struct StepPlan {
  std::vector<StepRow> rows;  // each sequence at most once
  Duration swap_wait{};       // kv.swap_wait: longest wait for one late layer group
};

enum class RowState : std::uint8_t {
  computed,    // all tokens of the row
  late,        // a layer group was not there in time: nothing of the row counts, ask again when it is
  kv_failed,   // `failed_block` will never come: call truncate_cached, then go on
  not_before,  // a script delay: nothing was computed; ask again at `not_before`
};

struct RowResult {
  SequenceId sequence = 0;
  RowState state = RowState::computed;
  std::uint32_t computed_tokens = 0;  // tokens of the sequence whose KV is in the pool now
  bool has_token = false;             // a token was chosen
  TokenValue token;
  std::uint32_t index = 0;           // its absolute index
  Finish finish = Finish::none;      // set together with the last token
  std::uint32_t late_group = 0;      // with late: group that was missing
  std::uint32_t failed_block = 0;    // with kv_failed
  std::uint32_t swapped_blocks = 0;  // full blocks really swapped in so far: a tail is none
  Instant not_before{};              // with not_before
  std::vector<Span> spans;           // at most spans_per_row_max
};
inline constexpr std::size_t spans_per_row_max = 64;

struct StepResult {
  std::vector<RowResult> rows;  // in the order of the plan
  // The result counts from here on: engine.step_delay_ms and script delays move it into the future of
  // the clock given to step(); the rank's core waits, the engine never sleeps.
  Instant ready_at{};
};

class Engine {
 public:
  virtual ~Engine() = default;

  [[nodiscard]] virtual const Description& describe() const = 0;

  // Takes pool room for known_tokens_max tokens; all or nothing.
  // Errors: busy (no room, or a script refuses), invalid (a token id out of range, too long); what counting the
  // use of a script line says.
  virtual Result<SequenceId> admit(SequenceSpec spec) = 0;

  virtual StepResult step(const StepPlan& plan, Instant now) = 0;

  // The cached prefix ends at `blocks` (a multiple of a block; not more than it was).  Groups already
  // swapped in stay; tokens from there on are computed.  The sequence must not have computed any token.
  virtual void truncate_cached(SequenceId sequence, std::uint32_t blocks) = 0;

  // Copies blocks [first, first+count) out of the pool into a page of `count` blocks (layout.page_bytes(count)
  // bytes, padding zeroed).  Every token of these blocks must be computed.
  virtual void export_page(SequenceId sequence, std::uint32_t first, std::uint32_t count,
                           MutableByteView page) = 0;
  // The partial last block as a page of one block; tokens past the last computed one are zeros.
  virtual void export_tail(SequenceId sequence, MutableByteView page) = 0;

  // Asks the sequence to end.  True: it is over, is stepped no more, and release() may follow; false (script
  // `lag`): it goes on in step() and ends there by itself with Finish::cancelled.
  virtual bool cancel(SequenceId sequence) = 0;
  virtual void release(SequenceId sequence) = 0;

  // Blocks of the pool that are taken.
  [[nodiscard]] virtual std::uint32_t pool_blocks_used() const = 0;
};

}  // namespace di::engine
