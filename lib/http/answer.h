// http/answer.h: the text of answers (RFC 9112).
//
// Pure but for the wall clock of the Date field.
#pragma once

#include <cstddef>
#include <ctime>
#include <optional>
#include <string>
#include <string_view>

#include "http/parse.h"

namespace di::http {

[[nodiscard]] bool same_word(std::string_view a, std::string_view lower);
// Whether the fields say that the connection ends with the answer.
[[nodiscard]] bool wants_close(const Headers& headers);

struct AnswerHead {
  int status = 200;
  const Headers& headers;                  // but for Connection, which is below
  std::string_view content_type = {};      // unless `headers` have one; empty: none
  std::optional<std::size_t> length = {};  // of the body
  std::string_view connection = {};        // empty: as the version of HTTP has it
  bool chunked = false;
};

class AnswerText {
 public:
  // The head and the empty line.
  [[nodiscard]] std::string head(const AnswerHead& head);

 private:
  [[nodiscard]] std::string_view date();  // of this second

  std::string date_;
  std::time_t date_s_ = 0;
};

// A piece of a chunked body; nothing for an empty one, which would end it.
void append_chunk(std::string& out, std::string_view bytes);

}  // namespace di::http
