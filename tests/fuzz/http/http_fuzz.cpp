// The request parser on any bytes: it ends in a defined state, keeps its bounds, and reads the same
// requests however the bytes are cut.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/assert.h"
#include "base/json.h"
#include "http/parse.h"

namespace {

using di::http::RequestParser;
using State = RequestParser::State;

constexpr std::size_t header_bytes_max = 1024;
constexpr std::size_t body_bytes_max = 2048;

struct Seen {
  std::vector<std::string> requests;
  int failed = 0;  // the status of the failure that ended it
  State last = State::head;
};

// The same, or one of the two still waits for bytes to see what the other has seen: the end of a
// chunk is looked at only once five bytes are there.
bool agree(const Seen& a, const Seen& b) {
  if (a.requests != b.requests) return false;
  if (a.last == State::failed && b.last == State::failed) return a.failed == b.failed;
  return a.last == b.last || (a.last == State::failed && b.last == State::body) ||
         (a.last == State::body && b.last == State::failed);
}

// `piece(n)` gives the length of the n-th piece.
template <class Piece>
Seen read(std::string_view bytes, Piece piece) {
  RequestParser parser(header_bytes_max);
  Seen seen;
  std::size_t count = 0;
  while (!bytes.empty()) {
    std::string_view next = bytes.substr(0, piece(count++));
    bytes.remove_prefix(next.size());
    while (!next.empty()) {
      const State before = parser.state();
      const std::size_t taken = parser.feed(next);
      DI_ASSERT(taken <= next.size());
      next.remove_prefix(taken);
      if (parser.state() == State::head_done) parser.accept_body(body_bytes_max);
      if (parser.state() == State::failed) {
        seen.failed = parser.failure().status;
        seen.last = State::failed;
        DI_ASSERT(seen.failed >= 400 && di::Json::parse(parser.failure().body).ok());
        return seen;
      }
      if (parser.state() == State::done) {
        const di::http::Request& request = parser.request();
        DI_ASSERT(!request.method.empty() && !request.path.empty());
        DI_ASSERT(request.body.size() <= body_bytes_max);
        DI_ASSERT(request.headers.size() <= di::http::header_count_max);
        std::string all = request.method + " " + request.path + "?" + request.query + "\n";
        for (const auto& [name, value] : request.headers) {
          DI_ASSERT(value.find_first_of(std::string_view("\0\r\n", 3)) == std::string::npos);
          all += name + ":" + value + "\n";
        }
        seen.requests.push_back(all + "\n" + request.body + (request.keep_alive ? "+" : "-"));
        parser.reset();
      } else {
        DI_ASSERT(next.empty() || parser.state() != before);
      }
    }
  }
  seen.last = parser.state();
  return seen;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  const std::string_view input(reinterpret_cast<const char*>(data), bytes);
  const Seen whole = read(input, [](std::size_t) { return std::string_view::npos; });
  DI_ASSERT(agree(read(input, [](std::size_t) { return 1U; }), whole));
  std::uint32_t state = static_cast<std::uint32_t>(bytes) * 2654435761U + 1;
  const Seen cut = read(input, [&](std::size_t) {
    state = state * 1664525U + 1013904223U;
    return 1 + (state >> 16) % 64;
  });
  DI_ASSERT(agree(cut, whole));
  return 0;
}
