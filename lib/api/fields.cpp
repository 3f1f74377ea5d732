#include "api/fields.h"

#include <algorithm>
#include <limits>

namespace di::api {

const Json* FieldReader::object(std::string_view body) {
  auto json = Json::parse(body, request_values_max);
  if (!json) {
    fail("", "the request body is not valid JSON: " + json.error().message);
    return nullptr;
  }
  if (!json->is_object()) {
    fail("", "the request body must be a JSON object, not " + std::string(json->type_name()));
    return nullptr;
  }
  json_ = *std::move(json);
  return &json_;
}

bool FieldReader::string(const Json& top, std::string_view name, std::size_t bytes_max, std::string& out) {
  const Json* json = top.find(name);
  if (json == nullptr || json->is_null()) return true;
  if (!json->is_string()) return wrong_type(name, "a string", *json);
  if (json->as_string().empty() || json->as_string().size() > bytes_max) {
    return fail(name, "'" + std::string(name) + "' must be 1 to " + std::to_string(bytes_max) + " bytes");
  }
  out = json->as_string();
  return true;
}

bool FieldReader::token_id(const Json& json, const std::string& at, std::uint32_t& out) {
  if (!json.is_integer()) return wrong_type(at, "an integer", json);
  if (json.as_i64() < 0 || json.as_i64() > std::numeric_limits<std::int32_t>::max()) {
    return fail(at, "'" + at + "' is not a token id");
  }
  out = static_cast<std::uint32_t>(json.as_i64());
  return true;
}

bool FieldReader::neutral_all(const Json& top, std::span<const NeutralRow> rows) {
  return std::all_of(rows.begin(), rows.end(), [&](const NeutralRow& row) { return neutral(top, "", row); });
}

bool FieldReader::neutral(const Json& object, std::string_view prefix, const NeutralRow& row) {
  const Json* json = object.find(row.name);
  if (json == nullptr || json->is_null()) return true;
  const std::string at = std::string(prefix) + std::string(row.name);
  switch (row.neutral) {
    case Neutral::number_zero:
    case Neutral::number_one: {
      if (!json->is_number()) return wrong_type(at, "a number", *json);
      const bool zero = row.neutral == Neutral::number_zero;
      if (json->as_double() == (zero ? 0.0 : 1.0)) return true;
      return unsupported(at, zero ? "0" : "1");
    }
    case Neutral::integer_zero:
    case Neutral::integer_one: {
      if (!json->is_integer()) return wrong_type(at, "an integer", *json);
      const bool zero = row.neutral == Neutral::integer_zero;
      if (json->as_i64() == (zero ? 0 : 1)) return true;
      return unsupported(at, zero ? "0" : "1");
    }
    case Neutral::only_false:
    case Neutral::only_true: {
      if (!json->is_bool()) return wrong_type(at, "a boolean", *json);
      const bool wanted = row.neutral == Neutral::only_true;
      if (json->as_bool() == wanted) return true;
      return unsupported(at, wanted ? "true" : "false");
    }
    case Neutral::empty_string:
      if (!json->is_string()) return wrong_type(at, "a string", *json);
      if (json->as_string().empty()) return true;
      return unsupported(at, "an empty string");
    case Neutral::empty_array:
      if (!json->is_array()) return wrong_type(at, "an array", *json);
      if (json->as_array().empty()) return true;
      return unsupported(at, "[]");
    case Neutral::empty_object:
      if (!json->is_object()) return wrong_type(at, "an object", *json);
      if (json->as_object().empty()) return true;
      return unsupported(at, "{}");
    case Neutral::only_null:
      return unsupported(at, "null");
    case Neutral::none_or_auto:
      if (!json->is_string() && !json->is_object()) return wrong_type(at, "a string or an object", *json);
      if (json->is_string() && (json->as_string() == "none" || json->as_string() == "auto")) return true;
      return unsupported(at, "none or auto");
    case Neutral::any_bool:
      if (!json->is_bool()) return wrong_type(at, "a boolean", *json);
      return true;
    case Neutral::any_string:
      if (!json->is_string()) return wrong_type(at, "a string", *json);
      return true;
    case Neutral::any_object:
      if (!json->is_object()) return wrong_type(at, "an object", *json);
      return true;
  }
  return true;
}

bool FieldReader::required_string(const Json& top, std::string_view name, std::string& out) {
  const Json* json = top.find(name);
  if (json == nullptr || json->is_null()) return fail(name, "'" + std::string(name) + "' is required");
  if (!json->is_string()) return wrong_type(name, "a string", *json);
  out = json->as_string();
  return true;
}

bool FieldReader::boolean(const Json& object, std::string_view prefix, std::string_view name, bool& out) {
  const Json* json = object.find(name);
  if (json == nullptr || json->is_null()) return true;
  if (!json->is_bool()) return wrong_type(std::string(prefix) + std::string(name), "a boolean", *json);
  out = json->as_bool();
  return true;
}

bool FieldReader::integer(const Json& top, std::string_view name, std::int64_t min, std::int64_t max,
                          std::int64_t& out) {
  const Json* json = top.find(name);
  if (json == nullptr || json->is_null()) return true;
  if (!json->is_integer()) return wrong_type(name, "an integer", *json);
  const std::int64_t value = json->as_i64();
  if (value < min || value > max || !json->is_i64()) {
    if (value < min) {
      return fail(name, "'" + std::string(name) + "' must be at least " + std::to_string(min));
    }
    return fail(name, "'" + std::string(name) + "' must be at most " + std::to_string(max));
  }
  out = value;
  return true;
}

bool FieldReader::number(const Json& top, std::string_view name, int min, int max, double& out) {
  const Json* json = top.find(name);
  if (json == nullptr || json->is_null()) return true;
  if (!json->is_number()) return wrong_type(name, "a number", *json);
  const double value = json->as_double();
  if (value < min || value > max) {
    return fail(name, "'" + std::string(name) + "' must be from " + std::to_string(min) + " to " +
                          std::to_string(max));
  }
  out = value;
  return true;
}

bool FieldReader::fail(std::string_view param, std::string_view message) {
  error_ = error_invalid(param, message);
  return false;
}

bool FieldReader::wrong_type(std::string_view param, std::string_view want, const Json& got) {
  return fail(param, "'" + std::string(param) + "' must be " + std::string(want) + ", not " +
                         std::string(got.type_name()));
}

bool FieldReader::unsupported(std::string_view param, std::string_view only) {
  return fail(param, "'" + std::string(param) + "' is not supported by this service: only " +
                         std::string(only) + " is accepted");
}

}  // namespace di::api
