#include "daemon/faults.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>

#include "base/assert.h"
#include "base/fd.h"
#include "base/log.h"

namespace di::daemon {

namespace {

enum class Effect : std::uint8_t { none, kill, stop, drop, delay };
constexpr std::array<std::pair<std::string_view, Effect>, 4> effects{
    {{"kill", Effect::kill}, {"stop", Effect::stop}, {"drop", Effect::drop}, {"delay", Effect::delay}}};

struct Place {
  std::string_view name;
  std::string_view program;
  std::string_view sentence;
};
constexpr Place places[] = {
#define DI_FAULT(name, program, sentence) {#name, program, sentence},
#include "daemon/faults.def"
#undef DI_FAULT
};
constexpr std::size_t place_count = std::size(places);

struct Cell {
  std::atomic<std::uint64_t> hits{0};
  std::atomic<Effect> effect{Effect::none};  // none: not armed, or fired
  std::atomic<bool> fired{false};
  // Written before any thread hits.
  std::uint64_t at = 0;
  std::string mark;  // RUNDIR/faults/INSTANCE.NAME
  std::string armed;
};
std::array<Cell, place_count> cells;

struct Item {
  std::size_t place = 0;
  std::uint64_t at = 1;
  Effect effect = Effect::none;
  std::string_view effect_name;
};

Error invalid(std::string message) {
  return Error{Code::invalid, 0, std::move(message)};
}

Result<Item> parse_item(std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos) {
    return invalid("'" + std::string(text) + "': want NAME[:n]=kill|stop|drop|delay");
  }
  std::string_view name = text.substr(0, equals);
  const std::string_view action = text.substr(equals + 1);
  Item item;
  if (const std::size_t colon = name.find(':'); colon != std::string_view::npos) {
    const std::string_view digits = name.substr(colon + 1);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), item.at);
    if (error != std::errc{} || end != digits.data() + digits.size() || item.at == 0) {
      return invalid("'" + std::string(digits) + "' is not a count of hits: want 1 or more");
    }
    name = name.substr(0, colon);
  }
  while (item.place < place_count && places[item.place].name != name) ++item.place;
  if (item.place == place_count) return invalid("unknown fault point '" + std::string(name) + "'");
  for (const auto& [word, effect] : effects) {
    if (word == action) {
      item.effect = effect;
      item.effect_name = word;
    }
  }
  if (item.effect == Effect::none) {
    return invalid("unknown action '" + std::string(action) + "': want kill, stop, drop or delay");
  }
  return item;
}

Result<std::vector<Item>> parse_all(std::string_view spec) {
  std::vector<Item> items;
  while (!spec.empty()) {
    const std::size_t comma = spec.find(',');
    Result<Item> item = parse_item(spec.substr(0, comma));
    if (!item) return item.error();
    items.push_back(*item);
    if (comma == std::string_view::npos) break;
    spec.remove_prefix(comma + 1);
  }
  return items;
}

}  // namespace

FaultAction fault(FaultPoint point) {
  Cell& cell = cells[static_cast<std::size_t>(point)];
  const std::uint64_t hit = cell.hits.fetch_add(1, std::memory_order_relaxed) + 1;
  const Effect effect = cell.effect.load(std::memory_order_relaxed);
  if (effect == Effect::none || hit != cell.at) return FaultAction::none;
  cell.effect.store(Effect::none, std::memory_order_relaxed);
  cell.fired.store(true, std::memory_order_relaxed);
  // The mark comes first: the instance that is started next must not die here again.
  const Fd mark(::open(cell.mark.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
  if (!mark.valid()) {
    log_error("fault", "cannot mark a fault as fired", {{"file", cell.mark}, {"error", errno_error("open")}});
    return FaultAction::none;
  }
  log_warn("fault", "fault fires",
           {{"at", places[static_cast<std::size_t>(point)].name}, {"does", cell.armed}});
  switch (effect) {
    case Effect::none:
      return FaultAction::none;
    case Effect::kill:
      ::kill(::getpid(), SIGKILL);
      return FaultAction::none;
    case Effect::stop:
      ::kill(::getpid(), SIGSTOP);
      return FaultAction::none;
    case Effect::drop:
      return FaultAction::drop;
    case Effect::delay:
      return FaultAction::delay;
  }
  return FaultAction::none;
}

Status fault_check(const std::string& spec) {
  const Result<std::vector<Item>> items = parse_all(spec);
  if (!items) return items.error();
  return {};
}

Status fault_arm(const std::string& spec, const std::string& run_dir, const std::string& instance) {
  Result<std::vector<Item>> items = parse_all(spec);
  if (!items) return items.error();
  if (items->empty()) return {};
  const std::string folder = run_dir + "/faults";
  if (::mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) return errno_error("mkdir " + folder);
  for (const Item& item : *items) {
    Cell& cell = cells[item.place];
    cell.at = item.at;
    cell.mark = folder + "/" + instance + "." + std::string(places[item.place].name);
    cell.armed = std::string(item.effect_name) + ":" + std::to_string(item.at);
    const bool fired_before = ::access(cell.mark.c_str(), F_OK) == 0;
    cell.fired.store(fired_before, std::memory_order_relaxed);
    cell.effect.store(fired_before ? Effect::none : item.effect, std::memory_order_relaxed);
  }
  return {};
}

bool fault_armed(FaultPoint point) {
  return !cells[static_cast<std::size_t>(point)].armed.empty();
}

std::vector<FaultState> fault_states() {
  std::vector<FaultState> all;
  for (std::size_t i = 0; i < place_count; ++i) {
    const Cell& cell = cells[i];
    all.push_back({places[i].name, places[i].program, places[i].sentence,
                   cell.hits.load(std::memory_order_relaxed), cell.armed,
                   cell.fired.load(std::memory_order_relaxed)});
  }
  return all;
}

void test_fault_reset() {
  for (Cell& cell : cells) {
    cell.hits = 0;
    cell.effect = Effect::none;
    cell.fired = false;
    cell.at = 0;
    cell.mark.clear();
    cell.armed.clear();
  }
}

}  // namespace di::daemon
