#include "account/charge.h"

#include <array>

#include "base/bytes.h"
#include "base/crypto.h"
#include "base/json.h"

namespace di::account {

std::string uuid_v7(std::int64_t now_ms) {
  std::array<std::byte, 16> raw;
  random_bytes(raw);
  for (std::size_t i = 0; i < 6; ++i) raw[i] = static_cast<std::byte>((now_ms >> (8 * (5 - i))) & 0xff);
  raw[6] = (raw[6] & std::byte{0x0f}) | std::byte{0x70};
  raw[8] = (raw[8] & std::byte{0x3f}) | std::byte{0x80};
  std::string text = to_hex(raw);
  for (const std::size_t at : {20u, 16u, 12u, 8u}) text.insert(at, "-");
  return text;
}

Charge charge_open(std::int64_t now_ms) {
  Charge charge;
  charge.charge_id = uuid_v7(now_ms);
  charge.admitted_ms = now_ms;
  return charge;
}

std::string charge_json(const Charge& charge) {
  JsonWriter w;
  w.open_object();
  const auto text = [&](std::string_view name, const std::string& value) {
    w.key(name);
    w.string(value);
  };
  const auto number = [&](std::string_view name, std::int64_t value) {
    w.key(name);
    w.number(value);
  };
  text("charge_id", charge.charge_id);
  text("request_id", charge.request_id);
  text("tenant", charge.tenant);
  text("key_id", charge.key_id);
  text("model", charge.model);
  text("status", charge.status);
  number("cached_tokens", charge.cached_tokens);
  number("uncached_tokens", charge.uncached_tokens);
  number("output_tokens", charge.output_tokens);
  number("attempts", charge.attempts);
  number("admitted_ms", charge.admitted_ms);
  number("finished_ms", charge.finished_ms);
  w.close_object();
  return w.take();
}

Result<Charge> charge_parse(std::string_view line) {
  const auto json = Json::parse(line);
  if (!json) return json.error();
  Charge charge;
  std::string bad;
  const auto text = [&](std::string_view name, std::string& to) {
    const Json* value = json->find(name);
    if (value != nullptr && value->is_string()) {
      to = value->as_string();
    } else if (bad.empty()) {
      bad = name;
    }
  };
  const auto number = [&](std::string_view name, std::int64_t& to) {
    const Json* value = json->find(name);
    if (value != nullptr && value->is_integer() && value->as_i64() >= 0) {
      to = value->as_i64();
    } else if (bad.empty()) {
      bad = name;
    }
  };
  text("charge_id", charge.charge_id);
  text("request_id", charge.request_id);
  text("tenant", charge.tenant);
  text("key_id", charge.key_id);
  text("model", charge.model);
  text("status", charge.status);
  number("cached_tokens", charge.cached_tokens);
  number("uncached_tokens", charge.uncached_tokens);
  number("output_tokens", charge.output_tokens);
  number("attempts", charge.attempts);
  number("admitted_ms", charge.admitted_ms);
  number("finished_ms", charge.finished_ms);
  if (!bad.empty()) return Error{Code::invalid, 0, "charge record without a usable '" + bad + "'"};
  return charge;
}

}  // namespace di::account
