#include "http/parse.h"

#include <algorithm>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <limits>

#include "base/assert.h"
#include "base/json.h"

namespace di::http {

namespace beast = boost::beast;

namespace {

std::string_view view(beast::string_view text) {
  return {text.data(), text.size()};
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

std::string lowered(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), lower);
  return out;
}

bool digits_only(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::string_view failure_type(int status) {
  if (status == 413 || status == 431) return "request_too_large";
  if (status == 503) return "service_unavailable_error";
  if (status == 408) return "timeout";
  if (status >= 500 && status != 501 && status != 505) return "server_error";
  return "invalid_request_error";
}

// From anywhere in a chunked body at least "0 CR LF CR LF" is still to come, and Beast 1.81 asserts
// (basic_parser.ipp, `n >= 5`) that it is never called again with less once it has seen the last size.
constexpr std::size_t chunk_bytes_min = 5;

// Whether a chunk may begin like this: [CR LF] 1*HEXDIG, then an extension or CR LF.  `later` is false for the
// first chunk, which has no CR LF of another before it.
bool chunk_start_sane(std::string_view bytes, bool later) {
  const auto skip = [&bytes](std::string_view line_end) {
    const std::string_view part = bytes.substr(0, line_end.size());
    bytes.remove_prefix(part.size());
    return line_end.starts_with(part);
  };
  if (later && !skip("\r\n")) return false;
  const std::size_t digits = std::min(bytes.find_first_not_of("0123456789abcdefABCDEF"), bytes.size());
  bytes.remove_prefix(digits);
  if (bytes.empty()) return true;
  if (digits == 0) return false;
  return bytes[0] == ';' || bytes[0] == ' ' || bytes[0] == '\t' || skip("\r\n");
}

// What a name or an address may hold; a comma would be two Host fields that a proxy has joined.
bool host_sane(std::string_view host) {
  return std::none_of(host.begin(), host.end(), [](char c) {
    return c <= ' ' || static_cast<unsigned char>(c) >= 0x7f ||
           std::string_view(",/\\@?#<>\"").find(c) != std::string_view::npos;
  });
}

// Collects the request straight from the parser's events; Beast's own containers are not used.
class Collector final : public beast::http::basic_parser<true> {
 public:
  Request request;
  std::optional<Failure> refused;  // our own verdict, when ec only says that there is one
  std::size_t body_bytes_max = 0;
  std::size_t body_bytes = 0;
  bool keep_body = true;
  int hosts = 0;
  int transfer_encodings = 0;
  bool transfer_chunked = false;
  int content_lengths = 0;
  std::uint64_t chunk_left = 0;  // of the chunk being read
  bool chunk_seen = false;

 private:
  using Ec = beast::error_code;

  void refuse(int status, std::string_view message, Ec& ec) {
    refused = failure_make(status, message);
    ec = beast::http::error::bad_value;
  }

  void on_request_impl(beast::http::verb, beast::string_view method, beast::string_view target, int version,
                       Ec& ec) override {
    request.method = view(method);
    request.version_minor = version % 10;
    std::string_view rest = view(target);
    if (std::any_of(rest.begin(), rest.end(),
                    [](char c) { return c == '#' || static_cast<unsigned char>(c) >= 0x80; })) {
      return refuse(400, "the request target holds a character that must be encoded", ec);
    }
    if (rest[0] != '/' && rest != "*" && request.method != "CONNECT") {
      const std::size_t scheme = rest.find("://");
      const std::string name = lowered(rest.substr(0, scheme == std::string_view::npos ? 0 : scheme));
      if (name != "http" && name != "https") return refuse(400, "the request target is not a path", ec);
      rest.remove_prefix(scheme + 3);
      const std::size_t end = rest.find_first_of("/?");
      rest.remove_prefix(end == std::string_view::npos ? rest.size() : end);
      if (rest.empty() || rest[0] == '?') request.path = "/";
    }
    const std::size_t mark = rest.find('?');
    request.path.append(rest.substr(0, mark));
    if (mark != std::string_view::npos) request.query = rest.substr(mark + 1);
  }
  void on_response_impl(int, beast::string_view, int, Ec&) override {}

  void on_field_impl(beast::http::field field, beast::string_view name, beast::string_view value,
                     Ec& ec) override {
    if (head_done_) return;  // a trailer
    if (request.headers.size() >= header_count_max) return refuse(431, "too many header fields", ec);
    if (field == beast::http::field::host) {
      ++hosts;
      if (!host_sane(view(value))) return refuse(400, "the Host header is malformed", ec);
    } else if (field == beast::http::field::content_length) {
      // Beast takes lists of equal lengths; two readers may still differ on them.
      if (++content_lengths > 1 || !digits_only(view(value))) {
        return refuse(400, "the Content-Length header is malformed", ec);
      }
    } else if (field == beast::http::field::transfer_encoding) {
      ++transfer_encodings;
      transfer_chunked = lowered(view(value)) == "chunked";
    }
    request.headers.emplace_back(lowered(view(name)), std::string(view(value)));
  }

  void on_header_impl(Ec&) override {
    head_done_ = true;
    request.keep_alive = keep_alive();
    if (const auto length = content_length()) request.content_length = *length;
  }

  void on_body_init_impl(const boost::optional<std::uint64_t>&, Ec&) override {}
  std::size_t on_body_impl(beast::string_view bytes, Ec&) override { return take(bytes); }
  void on_chunk_header_impl(std::uint64_t bytes, beast::string_view extension, Ec& ec) override {
    extension_bytes_ += extension.size();
    if (extension_bytes_ > chunk_extension_bytes_max) return refuse(400, "too many chunk extensions", ec);
    if (bytes > body_bytes_max - body_bytes) ec = beast::http::error::body_limit;
    chunk_left = bytes;
    chunk_seen = true;
  }
  std::size_t on_chunk_body_impl(std::uint64_t, beast::string_view bytes, Ec&) override {
    chunk_left -= bytes.size();
    return take(bytes);
  }
  void on_finish_impl(Ec&) override {}

  std::size_t take(beast::string_view bytes) {
    body_bytes += bytes.size();
    if (keep_body) request.body.append(bytes.data(), bytes.size());
    return bytes.size();
  }

  std::size_t extension_bytes_ = 0;
  bool head_done_ = false;
};

}  // namespace

std::optional<std::string_view> header_find(const Headers& headers, std::string_view name) {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return std::nullopt;
}

Failure failure_make(int status, std::string_view message) {
  JsonWriter writer;
  writer.open_object();
  writer.key("error");
  writer.open_object();
  writer.key("message");
  writer.string(message);
  writer.key("type");
  writer.string(failure_type(status));
  writer.key("param");
  writer.null();
  writer.key("code");
  writer.null();
  writer.close_object();
  writer.close_object();
  return Failure{status, writer.take()};
}

struct RequestParser::Impl {
  explicit Impl(std::size_t bytes_max) : header_bytes_max(bytes_max) { reset(); }

  void reset() {
    state = State::head;
    head.clear();
    line_bytes = 0;
    pending.clear();
    parser.emplace();
    parser->eager(true);
    // The head comes in one piece, measured here; the body is measured in accept_body() and the chunks.
    parser->header_limit(std::numeric_limits<std::uint32_t>::max());
    parser->body_limit(boost::none);
  }

  void fail(int status, std::string_view message) {
    state = State::failed;
    failure = failure_make(status, message);
  }

  std::size_t feed_head(std::string_view bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const char c = bytes[i];
      const char before = head.empty() ? '\0' : head.back();
      if ((c == '\n') != (before == '\r')) {
        fail(400, "a line of the request head ends without CR LF");
        return i;
      }
      if ((static_cast<unsigned char>(c) < 0x20 && c != '\t' && c != '\r' && c != '\n') || c == 0x7f) {
        fail(400, "the request head holds a control character");
        return i;
      }
      if (line_bytes == 0 && !head.empty() && (c == ' ' || c == '\t')) {
        fail(400, "a header field is folded over two lines");
        return i;
      }
      if (head.size() >= header_bytes_max) {
        fail(431, "the request head is larger than " + std::to_string(header_bytes_max) + " bytes");
        return i;
      }
      head.push_back(c);
      ++line_bytes;
      if (c != '\n') continue;
      if (line_bytes == 2) {
        // Some clients send an empty line after a body; RFC 9112 2.2 asks servers to skip it.
        if (head.size() == 2) {
          head.clear();
          line_bytes = 0;
          continue;
        }
        head_complete();
        return i + 1;
      }
      line_bytes = 0;
    }
    return bytes.size();
  }

  void head_complete() {
    beast::error_code ec;
    const std::size_t count = parser->put(boost::asio::buffer(head), ec);
    if (ec && ec != beast::http::error::need_more) return parser_failed(ec);
    if (!parser->is_header_done() || count != head.size()) return fail(400, "the request head is malformed");
    const bool old = parser->request.version_minor == 0;
    if (parser->hosts > 1 || (parser->hosts == 0 && !old)) {
      return fail(400, "the request must have exactly one Host header");
    }
    if (parser->transfer_encodings > 0) {
      if (parser->transfer_encodings > 1 || parser->content_lengths > 0 || old) {
        return fail(400, "the Transfer-Encoding header does not go with the rest of the request");
      }
      if (!parser->transfer_chunked) return fail(501, "the only Transfer-Encoding known here is chunked");
    }
    const auto coding = parser->request.header("content-encoding");
    if (coding && lowered(*coding) != "identity") {
      return fail(415, "the request body must not be compressed");
    }
    if (const auto expect = parser->request.header("expect"); expect && !old) {
      if (lowered(*expect) != "100-continue")
        return fail(417, "the only expectation known here is 100-continue");
      parser->request.expects_continue = !parser->is_done();
    }
    state = State::head_done;
  }

  std::size_t feed_body(std::string_view bytes) {
    // Body bytes are taken as they come; only a chunk's header that is not whole is kept for later.
    std::string_view rest = bytes;
    if (!pending.empty()) {
      pending.append(bytes);
      rest = pending;
    }
    while (!rest.empty() && state == State::body) {
      if (parser->transfer_chunked && parser->chunk_left == 0 && rest.size() < chunk_bytes_min) break;
      beast::error_code ec;
      rest.remove_prefix(parser->put(boost::asio::buffer(rest.data(), rest.size()), ec));
      if (ec == beast::http::error::need_more) break;
      if (ec) {
        parser_failed(ec);
      } else if (parser->is_done()) {
        state = State::done;
      }
    }
    // Beast looks at a chunk's header when it is whole, at the last one when the trailers are: what can be none
    // already would wait for bytes that never come.
    if (state == State::body && parser->transfer_chunked && parser->chunk_left == 0 &&
        !chunk_start_sane(rest, parser->chunk_seen)) {
      parser_failed(beast::http::error::bad_chunk);
    }
    if (state == State::body) {
      if (rest.size() > header_bytes_max) {
        fail(400, "a chunk's header or the trailers are too large");
      } else {
        pending = std::string(rest);
        return bytes.size();
      }
    }
    // Of a failed request some of what was kept before may be left as well.
    return bytes.size() - std::min(bytes.size(), rest.size());
  }

  void parser_failed(beast::error_code ec) {
    if (parser->refused) {
      state = State::failed;
      failure = *parser->refused;
    } else if (ec == beast::http::error::body_limit) {
      body_too_large();
    } else if (ec == beast::http::error::bad_version && version_readable()) {
      fail(505, "the only HTTP versions known here are 1.0 and 1.1");
    } else {
      fail(400, "the request is malformed: " + ec.message());
    }
  }

  void body_too_large() {
    fail(413,
         "the request body is larger than the limit of " + std::to_string(parser->body_bytes_max) + " bytes");
  }

  // Whether the first line ends in " HTTP/d.d".
  bool version_readable() const {
    const std::string_view line = std::string_view(head).substr(0, head.find('\r'));
    if (line.size() < 9) return false;
    const std::string_view version = line.substr(line.size() - 9);
    return version.substr(0, 6) == " HTTP/" && digits_only(version.substr(6, 1)) && version[7] == '.' &&
           digits_only(version.substr(8));
  }

  std::size_t header_bytes_max;
  State state = State::head;
  std::string head;
  std::size_t line_bytes = 0;  // of the line being read
  std::string pending;
  std::optional<Collector> parser;
  Failure failure;
};

RequestParser::RequestParser(std::size_t header_bytes_max)
    : impl_(std::make_unique<Impl>(header_bytes_max)) {}
RequestParser::~RequestParser() = default;
RequestParser::RequestParser(RequestParser&&) noexcept = default;
RequestParser& RequestParser::operator=(RequestParser&&) noexcept = default;

std::size_t RequestParser::feed(std::string_view bytes) {
  if (impl_->state == State::head) return impl_->feed_head(bytes);
  if (impl_->state == State::body) return impl_->feed_body(bytes);
  return 0;
}

void RequestParser::accept_body(std::size_t body_bytes_max, bool keep) {
  DI_ASSERT(impl_->state == State::head_done);
  Collector& parser = *impl_->parser;
  parser.body_bytes_max = body_bytes_max;
  parser.keep_body = keep;
  const std::uint64_t length = parser.request.content_length.value_or(0);
  if (length > body_bytes_max) return impl_->body_too_large();
  impl_->state = parser.is_done() ? State::done : State::body;
  if (!keep) return;
  // More is taken as bytes come, so that a promise of a large body costs the client something.
  constexpr std::size_t reserve_bytes_max = 256 << 10;
  parser.request.body.reserve(std::min<std::size_t>(static_cast<std::size_t>(length), reserve_bytes_max));
}

void RequestParser::reset() {
  impl_->reset();
}
RequestParser::State RequestParser::state() const {
  return impl_->state;
}
bool RequestParser::started() const {
  return impl_->state != State::head || !impl_->head.empty();
}

Request& RequestParser::request() {
  DI_ASSERT(impl_->state != State::head);
  return impl_->parser->request;
}

std::size_t RequestParser::body_bytes() const {
  return impl_->parser->body_bytes;
}

const Failure& RequestParser::failure() const {
  DI_ASSERT(impl_->state == State::failed);
  return impl_->failure;
}

}  // namespace di::http
