#include "chat.h"

#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/file.h"
#include "base/json.h"
#include "daemon/exit.h"
#include "http/client.h"
#include "http/sse.h"
#include "line_reader.h"

namespace di::ctl {

namespace {

// A prompt may wait for a place and be long; whoever does not want to wait presses Ctrl-C.
constexpr Duration answer_wait = std::chrono::minutes(10);
constexpr Duration models_wait = seconds(10);
constexpr std::size_t key_file_bytes_max = 4096;
constexpr std::size_t error_bytes_max = 64 << 10;

constexpr std::string_view help =
    "A line is a question.  Ctrl-C stops an answer, Ctrl-D ends.\n"
    "/new   forget the conversation\n"
    "/help  this\n"
    "/quit  end\n";

void say(std::string_view text) {
  std::fprintf(stderr, "di-ctl: %.*s\n", static_cast<int>(text.size()), text.data());
}

// Ctrl-C as something to poll for; without a terminal it ends the program as usual.
class Interrupts {
 public:
  explicit Interrupts(bool wanted) {
    if (!wanted) return;
    sigset_t set;
    ::sigemptyset(&set);
    ::sigaddset(&set, SIGINT);
    ::sigprocmask(SIG_BLOCK, &set, nullptr);
    fd_ = Fd(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
  }
  [[nodiscard]] int fd() const { return fd_.get(); }
  // Forgets those that came.
  void clear() {
    signalfd_siginfo info;
    while (fd_.valid() && ::read(fd_.get(), &info, sizeof info) > 0) continue;
  }

 private:
  Fd fd_;
};

struct Service {
  std::string address;
  std::string base;  // path in front of /chat/completions
  http::Headers headers;
  bool has_key = false;
};

std::string first_word(const std::string& text) {
  const std::size_t start = text.find_first_not_of(" \t\r\n");
  if (start == std::string::npos) return {};
  return text.substr(start, text.find_first_of(" \t\r\n", start) - start);
}

// "http://HOST:PORT", with or without "/v1", "HOST:PORT" or "unix:PATH".
Result<Service> service_of_url(std::string url) {
  Service service;
  if (url.starts_with("https://")) return Error{Code::unsupported, 0, url + ": there is no TLS: use http://"};
  if (url.starts_with("http://")) url.erase(0, 7);
  service.base = "/v1";
  service.address = url;
  if (!url.starts_with("unix:")) {
    const std::size_t slash = std::min(url.find('/'), url.size());
    service.address = url.substr(0, slash);
    std::string path = url.substr(slash);
    while (path.ends_with('/')) path.pop_back();
    if (!path.empty()) service.base = path;
    if (service.address.find(':', service.address.rfind(']') + 1) == std::string::npos)
      service.address += ":80";
  }
  return service;
}

// Where the routers of the fleet listen, in the order of their names.
Result<std::vector<std::string>> router_addresses(const std::string& run_dir) {
  std::error_code error;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(run_dir, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("di-router.") && name.ends_with(".listen")) names.push_back(entry.path().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return Error{Code::denied, error.value(), "cannot read " + run_dir + ": " + error.message()};
  }
  std::sort(names.begin(), names.end());
  std::vector<std::string> addresses;
  for (const std::string& name : names) {
    auto text = file_read(name, 4096);
    if (!text && text.error().code == Code::not_found) continue;  // it has just stopped
    if (!text) return text.error();
    addresses.push_back(first_word(*text));
  }
  if (addresses.empty()) {
    return Error{Code::not_found, 0,
                 "no fleet in " + run_dir + ": start one with scripts/di-up, or name a service with -u"};
  }
  return addresses;
}

Result<Service> service_find(const daemon::ControlFlags& flags) {
  std::string url = flags.url;
  if (url.empty()) {
    const auto addresses = router_addresses(flags.run_dir);
    if (!addresses) return addresses.error();
    // A router that was killed leaves its address behind: the first that somebody listens at.
    const auto answers = [](const std::string& address) {
      return http::Client::connect(address, models_wait).ok();
    };
    auto found = addresses->begin();
    if (addresses->size() > 1) found = std::find_if(addresses->begin(), addresses->end(), answers);
    url = found != addresses->end() ? *found : addresses->front();
  }
  auto service = service_of_url(url);
  if (!service) return service;
  // The fleet's own key is for the fleet: it is not sent to a service that was named.
  std::string key_file = flags.key_file;
  if (key_file.empty() && flags.url.empty() && ::access((flags.run_dir + "/key").c_str(), F_OK) == 0) {
    key_file = flags.run_dir + "/key";
  }
  if (key_file.empty()) return service;
  auto text = file_read(key_file, key_file_bytes_max);
  if (!text) return text.error();
  const std::string key = first_word(*text);
  if (key.empty()) return Error{Code::invalid, 0, key_file + ": there is no key in it"};
  service->headers.emplace_back("Authorization", "Bearer " + key);
  service->has_key = true;
  return service;
}

// What a service says when it does not answer.
std::string refusal(const Service& service, const http::ClientReply& reply, const std::string& body) {
  std::string message = "it does not say why";
  if (const auto json = Json::parse(body)) {
    const Json* error = json->find("error");
    const Json* text = error != nullptr ? error->find("message") : nullptr;
    if (text != nullptr && text->is_string()) message = text->as_string();
  }
  std::string out = std::to_string(reply.status) + ": " + message;
  if (reply.status == 401)
    out += service.has_key ? " (another key: -k KEYFILE)" : " (no key was sent: -k KEYFILE)";
  if (const auto wait = reply.header("retry-after")) out += " (try again in " + std::string(*wait) + " s)";
  return out;
}

Result<http::Client> connect(const Service& service, Duration timeout, int cancel_fd = -1) {
  auto client = http::Client::connect(service.address, timeout, cancel_fd);
  if (client) return client;
  Error error = client.error();
  error.message = "nobody answers at " + service.address + ": " + error.message;
  return error;
}

Result<std::string> model_find(const Service& service) {
  auto client = connect(service, models_wait);
  if (!client) return client.error();
  const auto reply = client->get(service.base + "/models", service.headers);
  if (!reply) return reply.error().in(service.address);
  if (reply->status != 200) return Error{Code::denied, 0, refusal(service, *reply, reply->body)};
  if (const auto json = Json::parse(reply->body)) {
    const Json* data = json->find("data");
    if (data != nullptr && data->is_array() && !data->as_array().empty()) {
      const Json* id = data->as_array()[0].find("id");
      if (id != nullptr && id->is_string()) return id->as_string();
    }
  }
  return Error{Code::invalid, 0, service.address + " lists no model: name one with -m"};
}

struct Turn {
  std::string_view role;
  std::string content;
};

// One answer as it comes.
class Answer {
 public:
  Answer(bool on_terminal, Instant start) : on_terminal_(on_terminal), start_(start) {}

  void event(std::string_view data) {
    if (data == "[DONE]") {
      done_ = true;
      return;
    }
    const auto json = Json::parse(data);
    if (!json) return;
    if (const Json* error = json->find("error")) {
      const Json* message = error->find("message");
      error_ = message != nullptr && message->is_string() ? message->as_string() : "it does not say why";
      return;
    }
    const Json* choices = json->find("choices");
    if (choices != nullptr && choices->is_array() && !choices->as_array().empty()) {
      const Json& choice = choices->as_array()[0];
      const Json* delta = choice.find("delta");
      const Json* content = delta != nullptr ? delta->find("content") : nullptr;
      if (content != nullptr && content->is_string() && !content->as_string().empty())
        piece(content->as_string());
      const Json* finish = choice.find("finish_reason");
      if (finish != nullptr && finish->is_string()) cut_short_ = finish->as_string() == "length";
    }
    const Json* usage = json->find("usage");
    if (usage == nullptr || !usage->is_object()) return;
    prompt_tokens_ = count_of(usage, "prompt_tokens");
    output_tokens_ = count_of(usage, "completion_tokens");
    cached_tokens_ = count_of(usage->find("prompt_tokens_details"), "cached_tokens");
  }

  [[nodiscard]] bool done() const { return done_; }
  [[nodiscard]] bool begun() const { return first_.has_value(); }
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] const std::optional<std::string>& error() const { return error_; }

  // After the answer, however it ended: the prompt of the terminal and the figures begin on a line of their
  // own.
  void end_line() const {
    if (text_.empty() || (on_terminal_ && text_.ends_with('\n'))) return;
    std::fputc('\n', stdout);
    std::fflush(stdout);
  }

  [[nodiscard]] std::string figures() const {
    std::string out =
        "[TTFT " + fixed(first_ ? static_cast<double>(to_us(*first_ - start_)) / 1e3 : 0, 0) + " ms";
    const double rest_s = first_ ? static_cast<double>(to_us(last_ - *first_)) / 1e6 : 0;
    if (output_tokens_ > 1 && rest_s > 0) {
      out += ", " + fixed(static_cast<double>(output_tokens_ - 1) / rest_s, 1) + " tokens/s";
    }
    out += ", " + std::to_string(output_tokens_) + " tokens, cached " + std::to_string(cached_tokens_) +
           " of " + std::to_string(prompt_tokens_) + " prompt tokens";
    return out + (cut_short_ ? ", cut at the limit]" : "]");
  }

 private:
  static std::string fixed(double value, int digits) {
    char text[64];
    std::snprintf(text, sizeof text, "%.*f", digits, value);
    return text;
  }

  static std::int64_t count_of(const Json* object, std::string_view name) {
    const Json* count = object != nullptr ? object->find(name) : nullptr;
    return count != nullptr && count->is_integer() ? count->as_i64() : 0;
  }

  void piece(const std::string& text) {
    last_ = clock_.now();
    if (!first_) first_ = last_;
    text_ += text;
    std::string shown = text;
    // What a model writes does not steer the terminal.
    if (on_terminal_) {
      std::replace_if(
          shown.begin(), shown.end(),
          [](unsigned char c) { return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f; }, '?');
    }
    std::fwrite(shown.data(), 1, shown.size(), stdout);
    std::fflush(stdout);
  }

  bool on_terminal_;
  MonotonicClock clock_;
  Instant start_;
  std::optional<Instant> first_;
  Instant last_{};
  std::string text_;
  std::optional<std::string> error_;
  std::int64_t prompt_tokens_ = 0;
  std::int64_t cached_tokens_ = 0;
  std::int64_t output_tokens_ = 0;
  bool done_ = false;
  bool cut_short_ = false;
};

class Conversation {
 public:
  Conversation(Service service, std::string model, bool on_terminal, Interrupts& interrupts)
      : service_(std::move(service)),
        model_(std::move(model)),
        on_terminal_(on_terminal),
        interrupts_(interrupts) {}

  void forget() {
    turns_.clear();
    bytes_ = 0;
  }

  // False when there is no answer, or only a part of one that nobody stopped.
  bool ask(std::string question) {
    if (bytes_ + question.size() > conversation_bytes_max) {
      say("the conversation is too long: /new begins another");
      return false;
    }
    turns_.push_back({"user", std::move(question)});
    const std::string body = request_body();
    if (!Json::parse(body)) {
      say("the question is not UTF-8");
      turns_.pop_back();
      return false;
    }
    interrupts_.clear();
    const MonotonicClock clock;
    Answer answer(on_terminal_, clock.now());
    const bool answered = receive(body, answer);
    if (answered && answer.begun()) {
      // Also what was stopped: the next question may be about it, and its cache is warm.
      bytes_ += turns_.back().content.size() + answer.text().size();
      turns_.push_back({"assistant", answer.text()});
    } else {
      turns_.pop_back();
    }
    return answered;
  }

 private:
  [[nodiscard]] std::string request_body() const {
    JsonWriter writer;
    writer.open_object();
    writer.key("model");
    writer.string(model_);
    writer.key("messages");
    writer.open_array();
    for (const Turn& turn : turns_) {
      writer.open_object();
      writer.key("role");
      writer.string(turn.role);
      writer.key("content");
      writer.string(turn.content);
      writer.close_object();
    }
    writer.close_array();
    writer.key("stream");
    writer.boolean(true);
    writer.key("stream_options");
    writer.open_object();
    writer.key("include_usage");
    writer.boolean(true);
    writer.close_object();
    writer.close_object();
    return writer.take();
  }

  bool stopped() {
    interrupts_.clear();
    std::fputs("[stopped]\n", stderr);
    return true;
  }

  bool receive(const std::string& body, Answer& answer) {
    auto client = connect(service_, answer_wait, interrupts_.fd());
    if (!client && client.error().code == Code::cancelled) return stopped();
    if (!client) {
      say(client.error().message);
      return false;
    }
    Status events;
    std::string raw;  // of an answer that is no stream
    http::SseReader reader([&](std::string_view data) { answer.event(data); });
    const auto reply = client->request(
        "POST", service_.base + "/chat/completions", service_.headers, body, [&](std::string_view bytes) {
          raw.append(bytes.substr(0, error_bytes_max - std::min(error_bytes_max, raw.size())));
          events = reader.push(bytes);
          return events.ok();
        });
    answer.end_line();
    if (!reply && reply.error().code == Code::cancelled) return stopped();
    if (!reply) {
      say(service_.address + ": " + reply.error().message);
    } else if (reply->status != 200) {
      say(refusal(service_, *reply, raw));
    } else if (!events.ok()) {
      say(service_.address + ": " + events.error().message);
    } else if (answer.error()) {
      say("the answer broke off: " + *answer.error());
    } else if (!reply->complete || !answer.done()) {
      say("the answer broke off: the stream was cut");
    } else {
      std::fprintf(stderr, "%s\n", answer.figures().c_str());
      return true;
    }
    return false;
  }

  Service service_;
  std::string model_;
  bool on_terminal_;
  Interrupts& interrupts_;
  std::vector<Turn> turns_;
  std::size_t bytes_ = 0;
};

}  // namespace

int chat(const daemon::ControlFlags& flags) {
  auto service = service_find(flags);
  if (!service) {
    say(service.error().message);
    return daemon::exit_failure;
  }
  auto model = flags.model.empty() ? model_find(*service) : Result<std::string>(flags.model);
  if (!model) {
    say(model.error().message);
    return daemon::exit_failure;
  }
  const bool terminal = ::isatty(STDIN_FILENO) == 1 && ::isatty(STDOUT_FILENO) == 1;
  Interrupts interrupts(terminal);
  if (terminal)
    std::printf("%s at %s.  /help lists what else there is.\n", model->c_str(), service->address.c_str());
  const auto reader = terminal ? make_terminal_reader("> ", interrupts.fd()) : make_plain_reader();
  Conversation conversation(*std::move(service), *std::move(model), terminal, interrupts);
  std::string line;
  for (;;) {
    const LineOutcome outcome = reader->read(line);
    if (outcome == LineOutcome::end) {
      if (terminal) std::fputc('\n', stdout);
      return daemon::exit_ok;
    }
    if (outcome == LineOutcome::interrupted) {
      interrupts.clear();
      std::fputc('\n', stdout);
      continue;
    }
    if (outcome == LineOutcome::too_long) {
      say("a line has more than " + std::to_string(line_bytes_max) + " bytes");
      if (!terminal) return daemon::exit_failure;
      continue;
    }
    const std::string command = first_word(line);
    if (command.empty()) continue;
    if (command == "/quit") return daemon::exit_ok;
    if (command == "/new") {
      conversation.forget();
    } else if (command == "/help") {
      std::fwrite(help.data(), 1, help.size(), stderr);
    } else if (command.starts_with('/')) {
      say("there is no " + command + ": /help lists what there is");
      if (!terminal) return daemon::exit_failure;
    } else if (!conversation.ask(std::move(line)) && !terminal) {
      return daemon::exit_failure;
    }
    line.clear();
  }
}

}  // namespace di::ctl
