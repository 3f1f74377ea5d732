// base/json.h: JSON in and out (simdjson DOM underneath; spec/api.md 1.7 has the measurements).
//
// A Json value is ours and owns its strings, so nothing of the library shows.  Bounds: text up to
// `json_bytes_max`, depth `json_depth_max`, and the caller's bound of values: two bytes of text can be a value,
// which takes twenty times as many bytes here.  Duplicate keys: the first wins, as simdjson reads them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"

namespace di {

inline constexpr std::size_t json_bytes_max = std::size_t{256} << 20;  // a large tokenizer.json is 8 MB
inline constexpr int json_depth_max = 128;
// the index of a large model has a million
inline constexpr std::size_t json_values_max = std::size_t{16} << 20;

class Json {
 public:
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;  // in the order of the text

  Json() = default;
  Json(std::nullptr_t) {}  // NOLINT: implicit on purpose
  explicit Json(bool value) : value_(value) {}
  explicit Json(std::int64_t value) : value_(value) {}
  explicit Json(std::uint64_t value);
  explicit Json(double value) : value_(value) {}
  explicit Json(std::string value) : value_(std::move(value)) {}
  explicit Json(Array value) : value_(std::move(value)) {}
  explicit Json(Object value) : value_(std::move(value)) {}

  // Errors: invalid, with what is wrong and, where the library tells, the byte offset.
  static Result<Json> parse(std::string_view text, std::size_t values_max = json_values_max);

  [[nodiscard]] bool is_null() const { return value_.index() == 0; }
  [[nodiscard]] bool is_bool() const { return std::holds_alternative<bool>(value_); }
  [[nodiscard]] bool is_integer() const {
    return std::holds_alternative<std::int64_t>(value_) || std::holds_alternative<std::uint64_t>(value_);
  }
  [[nodiscard]] bool is_i64() const { return std::holds_alternative<std::int64_t>(value_); }
  [[nodiscard]] bool is_number() const { return is_integer() || std::holds_alternative<double>(value_); }
  [[nodiscard]] bool is_string() const { return std::holds_alternative<std::string>(value_); }
  [[nodiscard]] bool is_array() const { return std::holds_alternative<Array>(value_); }
  [[nodiscard]] bool is_object() const { return std::holds_alternative<Object>(value_); }
  // "null", "boolean", "integer", "number", "string", "array" or "object": for error messages.
  [[nodiscard]] std::string_view type_name() const;

  // Asserted to be of the type asked for: check first.  as_i64 saturates where is_i64 is false.
  [[nodiscard]] bool as_bool() const;
  [[nodiscard]] std::int64_t as_i64() const;
  [[nodiscard]] double as_double() const;
  [[nodiscard]] const std::string& as_string() const;
  [[nodiscard]] const Array& as_array() const;
  [[nodiscard]] const Object& as_object() const;

  // The member of an object, or null when this is no object or has no such member.
  [[nodiscard]] const Json* find(std::string_view key) const;

 private:
  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string, Array, Object> value_;
};

// Appends JSON text; the caller opens and closes in order.  Commas are placed by the writer.
//   JsonWriter w; w.open_object(); w.key("a"); w.number(1); w.close_object(); -> {"a":1}
class JsonWriter {
 public:
  void open_object();
  void close_object();
  void open_array();
  void close_array();
  void key(std::string_view name);
  void string(std::string_view value);  // must be UTF-8; escapes what JSON requires
  void number(std::int64_t value);
  void number(std::uint64_t value);
  void number(int value) { number(static_cast<std::int64_t>(value)); }
  void number(std::uint32_t value) { number(static_cast<std::uint64_t>(value)); }
  // shortest form that reads back equal; NaN and infinities become null
  void number(double value);
  void boolean(bool value);
  void null();
  void raw(std::string_view json);  // already JSON
  void value(const Json& value);

  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  void separate();
  std::string text_;
  bool need_comma_ = false;
};

}  // namespace di
