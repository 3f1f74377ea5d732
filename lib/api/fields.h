// api/fields.h: reading the known fields of a request's JSON, and the words with which a wrong one is
// refused.
//
// Internal to lib/api; one FieldReader per request, any one thread.  Bounds: those of the JSON.
//
// Each function returns false once the error is set; the first error counts.  A field that is absent or
// null leaves the output as it is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "api/error.h"
#include "base/json.h"

namespace di::api {

// JSON values of one request, all counted: hundreds of thousands of messages, or a million token ids.
inline constexpr std::size_t request_values_max = 1 << 20;

// What a field that the engine does not serve may hold.
enum class Neutral : std::uint8_t {
  number_zero,
  integer_zero,
  number_one,
  integer_one,
  only_false,
  only_true,
  empty_string,
  empty_array,
  empty_object,
  only_null,
  none_or_auto,
  any_bool,
  any_string,
  any_object,
};

struct NeutralRow {
  std::string_view name;
  Neutral neutral;
};

class FieldReader {
 public:
  // The body as an object, or null with the error set.
  const Json* object(std::string_view body);

  bool required_string(const Json& top, std::string_view name, std::string& out);
  // 1 to `bytes_max` bytes.
  bool string(const Json& top, std::string_view name, std::size_t bytes_max, std::string& out);
  // `prefix` goes in front of the name where it is shown: "stream_options.".
  bool boolean(const Json& object, std::string_view prefix, std::string_view name, bool& out);
  bool integer(const Json& top, std::string_view name, std::int64_t min, std::int64_t max, std::int64_t& out);
  bool number(const Json& top, std::string_view name, int min, int max, double& out);
  // `at` is how the place is shown: "stop_token_ids[3]".
  bool token_id(const Json& json, const std::string& at, std::uint32_t& out);
  bool neutral(const Json& object, std::string_view prefix, const NeutralRow& row);
  bool neutral_all(const Json& top, std::span<const NeutralRow> rows);

  bool fail(std::string_view param, std::string_view message);
  bool wrong_type(std::string_view param, std::string_view want, const Json& got);
  bool unsupported(std::string_view param, std::string_view only);

  [[nodiscard]] const ApiError& error() const { return *error_; }

 private:
  Json json_;
  std::optional<ApiError> error_;
};

}  // namespace di::api
