// engine/script.h: the engine that plays a file instead of computing, so that the service is tested
// without a model: given pieces with given delays, stalls, refusals and crashes (di-script(5)).
//
// Owner: the engine thread of a rank's process.  Bounds: those of every engine, and the file's
// (`script_bytes_max`).  It never sleeps: a delay is told to the rank's core as an instant of the
// clock that step() is called with.
//
// Which piece comes next is the absolute index of the token, so a request that re-enters goes on after
// the pieces it already has.  A line ends (finish, stall, crash) at the first index past its pieces.
//
// Its KV is checked, so that caching and transfer tests prove something: the bytes of a block are
// derived from (key of the block, layer group, offset), and those of a tail from (key of the block
// before it, token ids).  Swap-in compares every byte and a difference aborts the process.  The pool
// itself is only counted; export derives the bytes again.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"

namespace di::engine {

inline constexpr std::size_t script_bytes_max = std::size_t{64} << 20;
inline constexpr std::size_t script_lines_max = 65'536;
inline constexpr std::uint32_t script_times_max = 10'000;

enum class ScriptFinish : std::uint8_t { stop, length, stall, crash, refuse };
enum class ScriptLeg : std::uint8_t { prefill, decode, any };

struct ScriptPiece {
  Bytes bytes;
  Duration delay{};                   // before it
  std::optional<std::uint32_t> step;  // pieces of one step follow each other without the step delay
};

struct ScriptLine {
  std::uint32_t number = 0;  // in the file, from 1
  std::string match;
  std::vector<ScriptPiece> pieces;
  ScriptFinish finish = ScriptFinish::stop;
  ScriptLeg leg = ScriptLeg::any;
  std::uint32_t times = 0;  // 0: without a limit
  std::uint32_t lag_tokens = 0;
  std::string mark;  // names the line in the state directory: changes with its text
};

// Errors: `path:line: what`, code invalid.
[[nodiscard]] Result<std::vector<ScriptLine>> script_parse(std::string_view text, std::string_view path);
// The same from a file; errors of reading it as well.
[[nodiscard]] Result<std::vector<ScriptLine>> script_load(const std::string& path);

// The layout a script engine has when no row says otherwise: sizes of the demo model (32 tokens a
// block, 6 layers, 960 bytes per token), under a name of its own, since the bits are not a model's.
[[nodiscard]] kv::Layout script_layout();

// The bytes of one block in one layer group: its planes one after the other, `out` is all of them.
void script_kv_fill(const Key& key, std::uint32_t group, MutableByteView out);
// What stands for a key where a block is not full: a digest of the key before it and the token ids.
[[nodiscard]] Key script_tail_key(const Key& parent, std::span<const std::uint32_t> tokens);

class ScriptEngine final : public Engine {
 public:
  struct Options {
    Description description;  // as it is to be served; wants_debug_text is set here
    std::vector<ScriptLine> lines{};
    Duration step_delay{};  // engine.step_delay_ms
    // Uses of lines with `times` are counted here (RUNDIR/script), so that restarts remember.  Empty:
    // counted in this object.
    std::string state_dir{};
    const Clock* clock = nullptr;  // for spans only (null: no spans); outlives the engine
    // What `crash` does; the default is SIGKILL to the own process.  A simulation gives its own; when it
    // returns, the sequence stalls.
    std::function<void()> on_crash{};
  };

  // Makes the state directory when it is not there.  Errors: invalid for no lines or an empty pool; what
  // making or writing the directory says.
  static Result<std::unique_ptr<ScriptEngine>> create(Options options);

  [[nodiscard]] const Description& describe() const override { return options_.description; }
  Result<SequenceId> admit(SequenceSpec spec) override;
  StepResult step(const StepPlan& plan, Instant now) override;
  void truncate_cached(SequenceId sequence, std::uint32_t blocks) override;
  void export_page(SequenceId sequence, std::uint32_t first, std::uint32_t count,
                   MutableByteView page) override;
  void export_tail(SequenceId sequence, MutableByteView page) override;
  bool cancel(SequenceId sequence) override;
  void release(SequenceId sequence) override;
  [[nodiscard]] std::uint32_t pool_blocks_used() const override { return pool_blocks_used_; }

 private:
  struct Sequence {
    SequenceSpec spec;
    std::vector<Key> keys;  // of full blocks, those that filled here included
    const ScriptLine* line = nullptr;
    std::uint32_t blocks_taken = 0;
    std::uint32_t computed = 0;  // tokens with KV; the cached ones count once all of them are swapped in
    std::uint32_t groups_swapped = 0;
    std::uint32_t swapped_blocks = 0;
    std::uint32_t next_index = 0;           // absolute index of the next piece
    bool spoke = false;                     // chose a token here
    bool stalled = false;                   // says nothing more
    bool over = false;                      // its last token was chosen
    Instant last_piece_at{};                // when the piece before the next one counted, if it spoke
    std::optional<Instant> due;             // of the next piece, once asked for
    std::optional<std::uint32_t> lag_left;  // set by cancel
  };

  explicit ScriptEngine(Options options) : options_(std::move(options)) {}

  Sequence& at(SequenceId id);

  [[nodiscard]] static bool line_matches(const ScriptLine& line, const SequenceSpec& spec);
  [[nodiscard]] bool line_usable(const ScriptLine& line) const;
  // Takes one of the line's uses; false when none is left.  Errors, which are logged: what making a file says.
  Result<bool> line_claim(const ScriptLine& line);
  // The same; with an error the line's end does not happen.
  bool line_claimed(const ScriptLine& line);
  [[nodiscard]] const ScriptLine* line_for(const SequenceSpec& spec, std::uint32_t after_number) const;
  void line_settle(Sequence& sequence);
  void crash(Sequence& sequence);
  void crash_if_due(Sequence& sequence);

  void step_row(Sequence& sequence, const StepRow& row, Duration swap_wait, Instant now, RowResult& result,
                bool& continued);
  bool swap_in(Sequence& sequence, Duration swap_wait, RowResult& result);
  void verify_group(Sequence& sequence, std::uint32_t group);
  void export_blocks(Sequence& sequence, std::uint32_t first, std::uint32_t count, std::uint32_t tokens,
                     MutableByteView page);
  const Key& full_key(Sequence& sequence, std::uint32_t block);
  Key key_of(Sequence& sequence, std::uint32_t block, std::uint32_t tokens);

  [[nodiscard]] Instant span_now() const;
  void span_add(RowResult& result, wire::SpanKind kind, std::uint32_t group, Instant start) const;

  Options options_;
  std::map<SequenceId, Sequence> sequences_;
  SequenceId next_id_ = 1;
  std::uint32_t pool_blocks_used_ = 0;
  std::map<std::uint32_t, std::uint32_t> uses_;  // by line number, without a state directory
};

}  // namespace di::engine
