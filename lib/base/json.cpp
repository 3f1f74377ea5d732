#include "base/json.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <charconv>
#include <cmath>
#include <optional>

namespace di {

namespace {

// A parser keeps its memory; what a text above this needs is given back.
constexpr std::size_t kept_bytes_max = 1 << 20;

// `left` is how many values may still come; none beyond it is looked at.
Json convert(simdjson::dom::element element, std::size_t& left) {
  --left;
  switch (element.type()) {
    case simdjson::dom::element_type::ARRAY: {
      Json::Array out;
      const simdjson::dom::array items = element.get_array().value_unsafe();
      for (const simdjson::dom::element item : items) {
        if (left == 0) break;
        out.push_back(convert(item, left));
      }
      return Json(std::move(out));
    }
    case simdjson::dom::element_type::OBJECT: {
      Json::Object out;
      const simdjson::dom::object members = element.get_object().value_unsafe();
      for (const simdjson::dom::key_value_pair member : members) {
        if (left == 0) break;
        out.emplace_back(std::string(member.key), convert(member.value, left));
      }
      return Json(std::move(out));
    }
    case simdjson::dom::element_type::INT64:
      return Json(element.get_int64().value_unsafe());
    case simdjson::dom::element_type::UINT64:
      return Json(element.get_uint64().value_unsafe());
    case simdjson::dom::element_type::DOUBLE:
      return Json(element.get_double().value_unsafe());
    case simdjson::dom::element_type::STRING:
      return Json(std::string(element.get_string().value_unsafe()));
    case simdjson::dom::element_type::BOOL:
      return Json(element.get_bool().value_unsafe());
    case simdjson::dom::element_type::NULL_VALUE:
      return Json();
  }
  return Json();
}

}  // namespace

Json::Json(std::uint64_t value) {
  if (value <= static_cast<std::uint64_t>(INT64_MAX)) {
    value_ = static_cast<std::int64_t>(value);
  } else {
    value_ = value;
  }
}

Result<Json> Json::parse(std::string_view text, std::size_t values_max) {
  if (text.size() > json_bytes_max) return Error{Code::invalid, 0, "JSON text is too long"};
  // The library copies from the pointer, which an empty view may not have.
  if (text.empty()) return Error{Code::invalid, 0, "JSON text is empty"};
  thread_local simdjson::dom::parser kept(json_bytes_max);
  std::optional<simdjson::dom::parser> once;
  if (text.size() > kept_bytes_max) once.emplace(json_bytes_max);
  simdjson::dom::parser& parser = once ? *once : kept;
  if (parser.max_depth() != json_depth_max) {
    if (parser.allocate(64 << 10, json_depth_max) != simdjson::SUCCESS) {
      return Error{Code::no_space, 0, "no memory for the JSON parser"};
    }
  }
  const auto parsed = parser.parse(text.data(), text.size());
  if (parsed.error() != simdjson::SUCCESS) {
    return Error{Code::invalid, 0, simdjson::error_message(parsed.error())};
  }
  std::size_t left = values_max + 1;
  Json json = convert(parsed.value_unsafe(), left);
  if (left == 0)
    return Error{Code::invalid, 0, "JSON text has more than " + std::to_string(values_max) + " values"};
  return json;
}

std::string_view Json::type_name() const {
  switch (value_.index()) {
    case 0:
      return "null";
    case 1:
      return "boolean";
    case 2:
    case 3:
      return "integer";
    case 4:
      return "number";
    case 5:
      return "string";
    case 6:
      return "array";
    default:
      return "object";
  }
}

bool Json::as_bool() const {
  DI_ASSERT(is_bool());
  return std::get<bool>(value_);
}

std::int64_t Json::as_i64() const {
  DI_ASSERT(is_integer());
  if (std::holds_alternative<std::uint64_t>(value_)) return INT64_MAX;
  return std::get<std::int64_t>(value_);
}

double Json::as_double() const {
  DI_ASSERT(is_number());
  if (const auto* integer = std::get_if<std::int64_t>(&value_)) return static_cast<double>(*integer);
  if (const auto* big = std::get_if<std::uint64_t>(&value_)) return static_cast<double>(*big);
  return std::get<double>(value_);
}

const std::string& Json::as_string() const {
  DI_ASSERT(is_string());
  return std::get<std::string>(value_);
}

const Json::Array& Json::as_array() const {
  DI_ASSERT(is_array());
  return std::get<Array>(value_);
}

const Json::Object& Json::as_object() const {
  DI_ASSERT(is_object());
  return std::get<Object>(value_);
}

const Json* Json::find(std::string_view key) const {
  const auto* object = std::get_if<Object>(&value_);
  if (object == nullptr) return nullptr;
  for (const Member& member : *object) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

void JsonWriter::separate() {
  if (need_comma_) text_.push_back(',');
  need_comma_ = true;
}

void JsonWriter::open_object() {
  separate();
  text_.push_back('{');
  need_comma_ = false;
}

void JsonWriter::close_object() {
  text_.push_back('}');
  need_comma_ = true;
}

void JsonWriter::open_array() {
  separate();
  text_.push_back('[');
  need_comma_ = false;
}

void JsonWriter::close_array() {
  text_.push_back(']');
  need_comma_ = true;
}

void JsonWriter::key(std::string_view name) {
  string(name);
  text_.push_back(':');
  need_comma_ = false;
}

void JsonWriter::string(std::string_view value) {
  separate();
  text_.push_back('"');
  std::size_t plain = 0;
  for (std::size_t i = 0; i < value.size(); ++i) {
    const auto c = static_cast<unsigned char>(value[i]);
    if (c >= 0x20 && c != '"' && c != '\\') continue;
    text_.append(value.substr(plain, i - plain));
    plain = i + 1;
    switch (c) {
      case '"':
        text_.append("\\\"");
        break;
      case '\\':
        text_.append("\\\\");
        break;
      case '\n':
        text_.append("\\n");
        break;
      case '\r':
        text_.append("\\r");
        break;
      case '\t':
        text_.append("\\t");
        break;
      default:
        text_.append(fmt::format("\\u{:04x}", c));
        break;
    }
  }
  text_.append(value.substr(plain));
  text_.push_back('"');
}

void JsonWriter::number(std::int64_t value) {
  separate();
  text_.append(std::to_string(value));
}

void JsonWriter::number(std::uint64_t value) {
  separate();
  text_.append(std::to_string(value));
}

void JsonWriter::number(double value) {
  separate();
  if (!std::isfinite(value)) {
    text_.append("null");
    return;
  }
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value);
  text_.append(buffer, end.ptr);
}

void JsonWriter::boolean(bool value) {
  separate();
  text_.append(value ? "true" : "false");
}

void JsonWriter::null() {
  separate();
  text_.append("null");
}

void JsonWriter::raw(std::string_view json) {
  separate();
  text_.append(json);
}

void JsonWriter::value(const Json& json) {
  if (json.is_null()) {
    null();
  } else if (json.is_bool()) {
    boolean(json.as_bool());
  } else if (json.is_integer()) {
    number(json.as_i64());
  } else if (json.is_number()) {
    number(json.as_double());
  } else if (json.is_string()) {
    string(json.as_string());
  } else if (json.is_array()) {
    open_array();
    for (const Json& item : json.as_array()) value(item);
    close_array();
  } else {
    open_object();
    for (const auto& [name, item] : json.as_object()) {
      key(name);
      value(item);
    }
    close_object();
  }
}

}  // namespace di
