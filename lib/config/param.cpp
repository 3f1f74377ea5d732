#include "config/param.h"

#include <array>
#include <charconv>
#include <cmath>

#include "base/assert.h"

namespace di::config {

namespace {

struct Unit {
  std::string_view name;
  std::int64_t factor;
};
// Longest first would matter only for suffix matching; the text is split at its first letter.
constexpr std::array<Unit, 7> duration_units{{{"ns", 1},
                                              {"us", 1'000},
                                              {"ms", 1'000'000},
                                              {"s", 1'000'000'000},
                                              {"m", 60'000'000'000},
                                              {"h", 3'600'000'000'000},
                                              {"d", 86'400'000'000'000}}};
constexpr std::array<Unit, 5> size_units{{{"B", 1},
                                          {"KiB", std::int64_t{1} << 10},
                                          {"MiB", std::int64_t{1} << 20},
                                          {"GiB", std::int64_t{1} << 30},
                                          {"TiB", std::int64_t{1} << 40}}};

Error invalid(std::string message) {
  return Error{Code::invalid, 0, std::move(message)};
}

// "250ms" -> 250 * factor of ms; nullopt-like false on any other form or on overflow.
template <std::size_t N>
bool parse_with_unit(std::string_view text, const std::array<Unit, N>& units, std::int64_t& out) {
  std::uint64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return false;
  const std::string_view unit(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  for (const Unit& known : units) {
    if (unit != known.name) continue;
    const unsigned __int128 product =
        static_cast<unsigned __int128>(number) * static_cast<unsigned __int128>(known.factor);
    if (product > static_cast<unsigned __int128>(std::numeric_limits<std::int64_t>::max())) return false;
    out = static_cast<std::int64_t>(product);
    return true;
  }
  return false;
}

template <std::size_t N>
std::string print_with_unit(std::int64_t value, const std::array<Unit, N>& units) {
  const Unit* best = &units[0];
  for (const Unit& unit : units) {
    if (value % unit.factor == 0 && (value != 0 || unit.factor == 1)) best = &unit;
  }
  return std::to_string(value / best->factor) + std::string(best->name);
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          static constexpr char digits[] = "0123456789ABCDEF";
          out += "\\u00";
          out += digits[static_cast<unsigned char>(c) >> 4];
          out += digits[static_cast<unsigned char>(c) & 15];
        } else {
          out += c;
        }
    }
  }
  return out + '"';
}

// TOML wants a fraction or an exponent in a float.
std::string real_text(double value) {
  std::array<char, 40> buffer;
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  DI_ASSERT(error == std::errc{});
  std::string text(buffer.data(), end);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string list_text(const std::vector<std::string>& items) {
  std::string text = "[";
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0) text += ", ";
    text += quoted(items[i]);
  }
  return text + "]";
}

std::string_view kind_of(const Value& value) {
  switch (value.index()) {
    case 0:
      return "a boolean";
    case 1:
      return "an integer";
    case 2:
      return "a number with a fraction";
    case 3:
      return "a string";
    default:
      return "a list";
  }
}

Error want(std::string_view what, const Value& value) {
  return invalid("want " + std::string(what) + ", got " + std::string(kind_of(value)));
}

Error out_of_range(const std::string& value, const std::string& min, const std::string& max) {
  return invalid(value + " is out of range: want " + min + " to " + max);
}

// The unit a key's name ends in: "kv.fetch_delay_ms" -> "ms".
std::string_view name_unit(std::string_view path) {
  const std::size_t under = path.rfind('_');
  return under == std::string_view::npos ? std::string_view{} : path.substr(under + 1);
}

std::int64_t bare_duration_factor(std::string_view path) {
  const std::string_view unit = name_unit(path);
  if (unit == "us") return 1'000;
  if (unit == "ms") return 1'000'000;
  if (unit == "s") return 1'000'000'000;
  return 0;
}

}  // namespace

std::string_view type_name(Type type) {
  switch (type) {
    case Type::boolean:
      return "boolean";
    case Type::integer:
      return "integer";
    case Type::real:
      return "number";
    case Type::size:
      return "size";
    case Type::duration:
      return "duration";
    case Type::string:
      return "string";
    case Type::choice:
      return "word";
    case Type::list:
      return "list of strings";
  }
  return "unknown";
}

Result<Duration> duration_parse(std::string_view text) {
  std::int64_t ns = 0;
  if (!parse_with_unit(text, duration_units, ns)) {
    return invalid("'" + std::string(text) +
                   "' is not a duration: want a whole number with ns, us, ms, s, m, h or d, as in \"250ms\"");
  }
  return Duration(ns);
}

std::string duration_print(Duration value) {
  return print_with_unit(value.count(), duration_units);
}

Result<std::uint64_t> size_parse(std::string_view text) {
  std::int64_t bytes = 0;
  if (!parse_with_unit(text, size_units, bytes)) {
    return invalid("'" + std::string(text) +
                   "' is not a size: want a whole number with B, KiB, MiB, GiB or TiB, as in \"64MiB\"");
  }
  return static_cast<std::uint64_t>(bytes);
}

std::string size_print(std::uint64_t bytes) {
  return print_with_unit(static_cast<std::int64_t>(bytes), size_units);
}

Params::Params() = default;
Params::~Params() = default;
Params::Params(Params&&) noexcept = default;
Params& Params::operator=(Params&&) noexcept = default;

const Row* Params::find(std::string_view path) const {
  for (const Row& row : rows_) {
    if (row.path == path) return &row;
  }
  return nullptr;
}

Row* Params::find(std::string_view path) {
  return const_cast<Row*>(std::as_const(*this).find(path));
}

const Tables* Params::find_tables(std::string_view path) const {
  for (const Tables& tables : tables_) {
    if (tables.path == path) return &tables;
  }
  return nullptr;
}

Row& Params::add(std::string_view path, Type type) {
  DI_ASSERT(find(path) == nullptr && find_tables(path) == nullptr);
  Row& row = rows_.emplace_back();
  row.path = path;
  row.type = type;
  return row;
}

void Params::boolean(std::string_view path, bool& to, BoolOptions options) {
  Row& row = add(path, Type::boolean);
  row.reloadable = options.reloadable;
  row.help = options.help;
  row.set = [&to](const Value& value) -> Status {
    const bool* given = std::get_if<bool>(&value);
    if (given == nullptr) return want("true or false", value);
    to = *given;
    return {};
  };
  row.print = [&to] { return std::string(to ? "true" : "false"); };
  to = options.def;
  row.def_text = row.print();
}

void Params::add_integer(std::string_view path, IntOptions options, std::function<void(std::int64_t)> set,
                         std::function<std::int64_t()> get) {
  DI_ASSERT(options.required || (options.def >= options.min && options.def <= options.max));
  Row& row = add(path, Type::integer);
  row.unit = options.unit;
  row.reloadable = options.reloadable;
  row.required = options.required;
  row.help = options.help;
  row.min_text = std::to_string(options.min);
  row.max_text = std::to_string(options.max);
  row.set = [set, min = options.min, max = options.max](const Value& value) -> Status {
    const std::int64_t* given = std::get_if<std::int64_t>(&value);
    if (given == nullptr) return want("an integer", value);
    if (*given < min || *given > max) {
      return out_of_range(std::to_string(*given), std::to_string(min), std::to_string(max));
    }
    set(*given);
    return {};
  };
  row.print = [get] { return std::to_string(get()); };
  set(options.def);
  row.def_text = row.print();
}

void Params::real(std::string_view path, double& to, RealOptions options) {
  DI_ASSERT(options.def >= options.min && options.def <= options.max);
  Row& row = add(path, Type::real);
  row.unit = options.unit;
  row.reloadable = options.reloadable;
  row.help = options.help;
  row.min_text = real_text(options.min);
  row.max_text = real_text(options.max);
  row.set = [&to, min = options.min, max = options.max](const Value& value) -> Status {
    double given = 0;
    if (const double* real = std::get_if<double>(&value)) {
      given = *real;
    } else if (const std::int64_t* integer = std::get_if<std::int64_t>(&value)) {
      given = static_cast<double>(*integer);
    } else {
      return want("a number", value);
    }
    if (!(given >= min && given <= max))
      return out_of_range(real_text(given), real_text(min), real_text(max));
    to = given;
    return {};
  };
  row.print = [&to] { return real_text(to); };
  to = options.def;
  row.def_text = row.print();
}

void Params::size(std::string_view path, std::uint64_t& to, SizeOptions options) {
  DI_ASSERT(options.required || (options.def >= options.min && options.def <= options.max));
  const bool bare = name_unit(path) == "bytes";
  const auto text = [bare](std::uint64_t bytes) { return bare ? std::to_string(bytes) : size_print(bytes); };
  Row& row = add(path, Type::size);
  row.unit = bare ? "bytes" : "";
  row.reloadable = options.reloadable;
  row.required = options.required;
  row.help = options.help;
  row.min_text = text(options.min);
  row.max_text = text(options.max);
  row.set = [&to, bare, text, min = options.min, max = options.max](const Value& value) -> Status {
    std::uint64_t bytes = 0;
    if (bare) {
      const std::int64_t* given = std::get_if<std::int64_t>(&value);
      if (given == nullptr) return want("a bare number of bytes", value);
      if (*given < 0) return out_of_range(std::to_string(*given), text(min), text(max));
      bytes = static_cast<std::uint64_t>(*given);
    } else {
      const std::string* given = std::get_if<std::string>(&value);
      if (given == nullptr) return want("a size with its unit, as in \"64MiB\"", value);
      const Result<std::uint64_t> parsed = size_parse(*given);
      if (!parsed) return parsed.error();
      bytes = *parsed;
    }
    if (bytes < min || bytes > max) return out_of_range(text(bytes), text(min), text(max));
    to = bytes;
    return {};
  };
  row.print = [&to, bare, text] { return bare ? text(to) : quoted(text(to)); };
  to = options.def;
  row.def_text = row.print();
}

void Params::duration(std::string_view path, Duration& to, DurationOptions options) {
  DI_ASSERT(options.def >= options.min && options.def <= options.max);
  const std::int64_t factor = bare_duration_factor(path);
  const auto text = [factor](Duration d) {
    return factor != 0 ? std::to_string(d.count() / factor) : duration_print(d);
  };
  Row& row = add(path, Type::duration);
  row.unit = factor != 0 ? std::string(name_unit(path)) : "";
  row.reloadable = options.reloadable;
  row.help = options.help;
  row.min_text = text(options.min);
  row.max_text = text(options.max);
  row.set = [&to, factor, text, unit = row.unit, min = options.min,
             max = options.max](const Value& value) -> Status {
    Duration given{0};
    if (factor != 0) {
      const std::int64_t* number = std::get_if<std::int64_t>(&value);
      if (number == nullptr) return want("a bare number of " + unit, value);
      if (*number < 0 || *number > max.count() / factor) {
        return out_of_range(std::to_string(*number), text(min), text(max));
      }
      given = Duration(*number * factor);
    } else {
      const std::string* words = std::get_if<std::string>(&value);
      if (words == nullptr) return want("a duration with its unit, as in \"250ms\"", value);
      const Result<Duration> parsed = duration_parse(*words);
      if (!parsed) return parsed.error();
      given = *parsed;
    }
    if (given < min || given > max) return out_of_range(text(given), text(min), text(max));
    to = given;
    return {};
  };
  row.print = [&to, factor, text] { return factor != 0 ? text(to) : quoted(text(to)); };
  to = options.def;
  row.def_text = row.print();
}

void Params::string(std::string_view path, std::string& to, StringOptions options) {
  Row& row = add(path, Type::string);
  row.reloadable = options.reloadable;
  row.required = options.required;
  row.secret = options.secret;
  row.is_path = options.path;
  row.help = options.help;
  row.set = [&to, check = options.check, bytes_max = options.bytes_max](const Value& value) -> Status {
    const std::string* given = std::get_if<std::string>(&value);
    if (given == nullptr) return want("a string", value);
    if (given->size() > bytes_max) {
      return invalid("a string of " + std::to_string(given->size()) + " bytes is too long: at most " +
                     std::to_string(bytes_max));
    }
    if (check) DI_TRY(check(*given));
    to = *given;
    return {};
  };
  row.print = [&to] { return quoted(to); };
  to = options.def;
  row.def_text = row.print();
}

void Params::list(std::string_view path, std::vector<std::string>& to, ListOptions options) {
  Row& row = add(path, Type::list);
  row.reloadable = options.reloadable;
  row.help = options.help;
  row.set = [&to, check = options.check](const Value& value) -> Status {
    const auto* given = std::get_if<std::vector<std::string>>(&value);
    if (given == nullptr) return want("a list of strings", value);
    if (given->size() > list_max) return invalid("more than " + std::to_string(list_max) + " items");
    if (check) DI_TRY(check(*given));
    to = *given;
    return {};
  };
  row.print = [&to] { return list_text(to); };
  to = options.def;
  row.def_text = row.print();
}

void Params::add_choice(std::string_view path, std::vector<std::string> words, std::size_t def,
                        bool reloadable, std::string_view help, std::function<void(std::size_t)> set,
                        std::function<std::size_t()> get) {
  DI_ASSERT(def < words.size());
  Row& row = add(path, Type::choice);
  row.reloadable = reloadable;
  row.help = help;
  row.choices = words;
  row.set = [words, set](const Value& value) -> Status {
    const std::string* given = std::get_if<std::string>(&value);
    if (given == nullptr) return want("a string", value);
    std::string known;
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (words[i] == *given) {
        set(i);
        return {};
      }
      if (i > 0) known += i + 1 == words.size() ? " or " : ", ";
      known += quoted(words[i]);
    }
    return invalid("unknown word " + quoted(*given) + ": want " + known);
  };
  row.print = [words, get] {
    const std::size_t i = get();
    DI_ASSERT(i < words.size());
    return quoted(words[i]);
  };
  set(def);
  row.def_text = row.print();
}

void Params::add_tables(std::string_view path, const TablesOptions& options, std::function<void()> clear,
                        std::function<Params()> append, std::function<std::vector<Params>()> each) {
  DI_ASSERT(find(path) == nullptr && find_tables(path) == nullptr);
  tables_.push_back({std::string(path), options.max, options.reloadable, std::string(options.unique),
                     std::string(options.help), std::move(clear), std::move(append), std::move(each)});
}

Error wrong(const Params& params, std::initializer_list<std::string_view> paths, const std::string& what) {
  DI_ASSERT(paths.size() > 0);
  const Row* shown = nullptr;
  for (const std::string_view path : paths) {
    const Row* row = params.find(path);
    DI_ASSERT(row != nullptr);
    if (shown == nullptr || (shown->at.empty() && !row->at.empty())) shown = row;
  }
  return invalid((shown->at.empty() ? "default" : shown->at) + ": " + shown->path + ": " + what);
}

}  // namespace di::config
