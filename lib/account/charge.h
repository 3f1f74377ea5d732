// account/charge.h: one charge record per request, written at its end.
//
// The record as a value and as a line of JSON; the file is account/journal.h.  Pure but for the random
// bits of an id; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace di::account {

struct Charge {
  std::string charge_id;  // UUIDv7, made at admission and kept across attempts
  std::string request_id;
  std::string tenant;
  std::string key_id;
  std::string model;
  std::string status;  // ok, cancelled, failed
  std::int64_t cached_tokens = 0;
  std::int64_t uncached_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t attempts = 1;
  std::int64_t admitted_ms = 0;  // since the Unix epoch
  std::int64_t finished_ms = 0;

  bool operator==(const Charge&) const = default;
};

// A record with its charge id and time of admission.
[[nodiscard]] Charge charge_open(std::int64_t now_ms);
// RFC 9562, version 7: 48 bits of milliseconds, then random bits.
[[nodiscard]] std::string uuid_v7(std::int64_t now_ms);
// One line of JSON, without the newline.
[[nodiscard]] std::string charge_json(const Charge& charge);
// Errors: invalid, naming what is missing or of a wrong type.  Unknown members are ignored.
[[nodiscard]] Result<Charge> charge_parse(std::string_view line);

}  // namespace di::account
