// config/param.h: one row per parameter; from the rows come parsing, range errors, `-nv` output,
// reload checks and the check of di.toml(5).
//
// A program has a plain struct and one function that binds rows to its members:
//
//   struct Config { daemon::CommonConfig common; std::uint64_t arena_bytes; Duration hold; };
//   void params(config::Params& p, Config& c) {
//     daemon::common_params(p, c.common);
//     p.size("kv.arena", c.arena_bytes, {.def = 256_MiB, .min = 1_MiB, .help = "arena of this host"});
//     p.duration("kv.hold", c.hold, {.def = seconds(60), .min = seconds(1), .help = "..."});
//   }
//
// Binding writes the default into the member.  A key whose last word is a unit (`_ms`, `_us`, `_s`,
// `_bytes`) is a bare number in that unit; every other duration or size is a string with its unit
// ("250ms", "64GiB").  Two rows with one path, or a default out of range, are bugs and panic.
// Owner: whoever parses, one thread; the struct outlives the Params.  Bounds: rows are literals in
// the source; files by `config_bytes_max`, lists by `list_max`, table arrays by their `max`.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"
#include "base/time.h"

namespace di::config {

inline constexpr std::size_t config_bytes_max = 4 << 20;
inline constexpr std::size_t list_max = 1024;

namespace literals {
constexpr std::uint64_t operator""_KiB(unsigned long long n) {
  return std::uint64_t{n} << 10;
}
constexpr std::uint64_t operator""_MiB(unsigned long long n) {
  return std::uint64_t{n} << 20;
}
constexpr std::uint64_t operator""_GiB(unsigned long long n) {
  return std::uint64_t{n} << 30;
}
constexpr std::uint64_t operator""_TiB(unsigned long long n) {
  return std::uint64_t{n} << 40;
}
}  // namespace literals

enum class Type : std::uint8_t { boolean, integer, real, size, duration, string, choice, list };
[[nodiscard]] std::string_view type_name(Type type);

// A value as the file or an override gave it, before its row looked at it.
using Value = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

struct BoolOptions {
  bool def = false;
  bool reloadable = false;
  std::string_view help = {};
};
struct IntOptions {
  std::int64_t def = 0;
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
  std::string_view unit = {};  // for the manual: "tokens", "requests"
  bool reloadable = false;
  bool required = false;
  std::string_view help = {};
};
struct RealOptions {
  double def = 0;
  double min = 0;
  double max = 1e300;
  std::string_view unit = {};
  bool reloadable = false;
  std::string_view help = {};
};
struct SizeOptions {
  std::uint64_t def = 0;
  std::uint64_t min = 0;
  std::uint64_t max = std::uint64_t{1} << 60;
  bool reloadable = false;
  bool required = false;
  std::string_view help = {};
};
struct DurationOptions {
  Duration def{0};
  Duration min{0};
  Duration max = std::chrono::hours(24 * 365);
  bool reloadable = false;
  std::string_view help = {};
};
struct StringOptions {
  std::string_view def = {};
  bool reloadable = false;
  bool required = false;
  bool secret = false;  // printed as "(set)" by control commands, in full by -nv
  bool path = false;    // of a file: a relative one in a file is relative to that file's folder
  std::size_t bytes_max = 4096;
  std::function<Status(const std::string&)> check = {};  // a further condition; its message is shown
  std::string_view help = {};
};
struct ListOptions {
  std::vector<std::string> def = {};
  bool reloadable = false;
  std::function<Status(const std::vector<std::string>&)> check = {};  // a further condition
  std::string_view help = {};
};
template <class E>
struct ChoiceOptions {
  E def{};
  bool reloadable = false;
  std::string_view help = {};
};
struct TablesOptions {
  std::size_t max = 1024;
  bool reloadable = false;
  std::string_view unique = {};  // row of which no two elements give the same value
  std::string_view help = {};
};

struct Row {
  std::string path;
  Type type = Type::boolean;
  std::string unit;      // "ms" for a bare number of milliseconds, "tokens", or empty
  std::string def_text;  // as TOML text
  std::string min_text;  // empty: no bound
  std::string max_text;
  std::vector<std::string> choices;
  bool reloadable = false;
  bool required = false;
  bool secret = false;
  bool is_path = false;
  std::string help;
  std::function<Status(const Value&)> set;
  std::function<std::string()> print;  // the present value as TOML text
  bool given = false;                  // by the file or an override
  // Where the present value was given, for checks over several rows: "FILE:LINE:COLUMN", "-o ASSIGNMENT",
  // or empty for the default.
  std::string at;
};

class Params;

// An array of tables ([[keys]]): each element has rows of its own.
struct Tables {
  std::string path;
  std::size_t max = 0;
  bool reloadable = false;
  std::string unique;
  std::string help;
  std::function<void()> clear;
  std::function<Params()> append;             // rows bound to a new element
  std::function<std::vector<Params>()> each;  // rows bound to the present elements
};

class Params {
 public:
  Params();
  ~Params();
  Params(Params&&) noexcept;
  Params& operator=(Params&&) noexcept;

  void boolean(std::string_view path, bool& to, BoolOptions options);
  template <std::integral T>
  requires(!std::same_as<T, bool>) void integer(std::string_view path, T& to, IntOptions options) {
    constexpr std::int64_t highest =
        std::cmp_less(std::numeric_limits<T>::max(), std::numeric_limits<std::int64_t>::max())
            ? static_cast<std::int64_t>(std::numeric_limits<T>::max())
            : std::numeric_limits<std::int64_t>::max();
    options.max = std::min(options.max, highest);
    if constexpr (std::unsigned_integral<T>) options.min = std::max<std::int64_t>(options.min, 0);
    add_integer(
        path, std::move(options), [&to](std::int64_t v) { to = static_cast<T>(v); },
        [&to] { return static_cast<std::int64_t>(to); });
  }
  void real(std::string_view path, double& to, RealOptions options);
  void size(std::string_view path, std::uint64_t& to, SizeOptions options);
  void duration(std::string_view path, Duration& to, DurationOptions options);
  void string(std::string_view path, std::string& to, StringOptions options);
  void list(std::string_view path, std::vector<std::string>& to, ListOptions options);
  // `names[i].second` is the spelling of `names[i].first`; all values of E that may be set are listed.
  template <class E>
  void choice(std::string_view path, E& to, std::vector<std::pair<E, std::string_view>> names,
              ChoiceOptions<E> options) {
    std::vector<std::string> words;
    std::size_t def = names.size();
    for (std::size_t i = 0; i < names.size(); ++i) {
      words.emplace_back(names[i].second);
      if (names[i].first == options.def) def = i;
    }
    add_choice(
        path, std::move(words), def, options.reloadable, options.help,
        [&to, names](std::size_t i) { to = names[i].first; },
        [&to, names] {
          std::size_t i = 0;
          while (i < names.size() && names[i].first != to) ++i;
          return i;
        });
  }
  // `bind(Params&, T&)` binds the rows of one element, with paths relative to it.
  template <class T>
  void tables(std::string_view path, std::vector<T>& to, void (*bind)(Params&, T&), TablesOptions options) {
    add_tables(
        path, options, [&to] { to.clear(); },
        [&to, bind] {
          Params p;
          bind(p, to.emplace_back());
          return p;
        },
        [&to, bind] {
          std::vector<Params> all;
          for (T& element : to) {
            // Binding writes defaults, so the rows of a present element come from a copy of it.
            T present = element;
            bind(all.emplace_back(), element);
            element = std::move(present);
          }
          return all;
        });
  }

  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
  [[nodiscard]] std::vector<Row>& rows() { return rows_; }
  [[nodiscard]] const std::vector<Tables>& table_arrays() const { return tables_; }
  [[nodiscard]] Row* find(std::string_view path);
  [[nodiscard]] const Row* find(std::string_view path) const;
  [[nodiscard]] const Tables* find_tables(std::string_view path) const;

 private:
  void add_integer(std::string_view path, IntOptions options, std::function<void(std::int64_t)> set,
                   std::function<std::int64_t()> get);
  void add_choice(std::string_view path, std::vector<std::string> words, std::size_t def, bool reloadable,
                  std::string_view help, std::function<void(std::size_t)> set,
                  std::function<std::size_t()> get);
  void add_tables(std::string_view path, const TablesOptions& options, std::function<void()> clear,
                  std::function<Params()> append, std::function<std::vector<Params>()> each);
  Row& add(std::string_view path, Type type);

  std::vector<Row> rows_;
  std::vector<Tables> tables_;
};

// "250ms" <-> Duration (ns us ms s m h d), "64GiB" <-> bytes (B KiB MiB GiB TiB).  Whole numbers only.
// Errors: invalid, with the forms that are accepted.
[[nodiscard]] Result<Duration> duration_parse(std::string_view text);
[[nodiscard]] std::string duration_print(Duration value);
[[nodiscard]] Result<std::uint64_t> size_parse(std::string_view text);
[[nodiscard]] std::string size_print(std::uint64_t bytes);

// What is wrong between rows, for checks after parsing: "FILE:LINE:COLUMN: PATH: WHAT", with the place of the first of
// `paths` that was given ("default" when none was).
[[nodiscard]] Error wrong(const Params& params, std::initializer_list<std::string_view> paths,
                          const std::string& what);

// print.cpp.  All rows as TOML that parses back to the same struct; `describe` adds each row's help,
// range and default as comments (-nv).
[[nodiscard]] std::string print(const Params& params, bool describe);
// Paths whose values differ between two bindings of the same rows.
[[nodiscard]] std::vector<std::string> changed(const Params& running, const Params& fresh);

}  // namespace di::config
