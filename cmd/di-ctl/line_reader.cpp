#include "line_reader.h"

#include <histedit.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <cwchar>

namespace di::ctl {

namespace {

class PlainReader final : public LineReader {
 public:
  LineOutcome read(std::string& line) override {
    line.clear();
    bool too_long = false;
    for (;;) {
      if (at_ == count_) {
        const ssize_t count = ::read(STDIN_FILENO, buffer_, sizeof buffer_);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0)
          return too_long ? LineOutcome::too_long : line.empty() ? LineOutcome::end : LineOutcome::line;
        at_ = 0;
        count_ = static_cast<std::size_t>(count);
      }
      const char c = buffer_[at_++];
      if (c == '\n') return too_long ? LineOutcome::too_long : LineOutcome::line;
      too_long = too_long || line.size() >= line_bytes_max;
      if (!too_long) line.push_back(c);
    }
  }

 private:
  char buffer_[4096];
  std::size_t at_ = 0;
  std::size_t count_ = 0;
};

class TerminalReader final : public LineReader {
 public:
  TerminalReader(const std::string& prompt, int interrupt_fd)
      : prompt_(prompt),
        interrupt_fd_(interrupt_fd),
        edit_(::el_init("di-ctl", stdin, stdout, stderr)),
        history_(::history_init()) {
    if (edit_ == nullptr || history_ == nullptr) return;
    ::el_set(edit_, EL_CLIENTDATA, this);
    ::el_set(edit_, EL_PROMPT, &prompt_of);
    ::el_set(edit_, EL_GETCFN, &next_character);
    ::el_set(edit_, EL_EDITOR, "emacs");
    HistEvent event;
    ::history(history_, &event, H_SETSIZE, history_lines);
    ::history(history_, &event, H_SETUNIQUE, 1);
    ::el_set(edit_, EL_HIST, history, history_);
  }
  ~TerminalReader() override {
    if (edit_ != nullptr) ::el_end(edit_);
    if (history_ != nullptr) ::history_end(history_);
  }
  TerminalReader(const TerminalReader&) = delete;
  TerminalReader& operator=(const TerminalReader&) = delete;

  [[nodiscard]] bool usable() const { return edit_ != nullptr && history_ != nullptr; }

  LineOutcome read(std::string& line) override {
    line.clear();
    interrupted_ = false;
    int count = 0;
    const char* text = ::el_gets(edit_, &count);
    if (interrupted_) {
      ::el_reset(edit_);
      return LineOutcome::interrupted;
    }
    if (text == nullptr || count <= 0) return LineOutcome::end;
    line.assign(text, static_cast<std::size_t>(count));
    while (line.ends_with('\n') || line.ends_with('\r')) line.pop_back();
    if (line.size() > line_bytes_max) return LineOutcome::too_long;
    if (line.find_first_not_of(" \t") != std::string::npos) {
      HistEvent event;
      ::history(history_, &event, H_ENTER, line.c_str());
    }
    return LineOutcome::line;
  }

 private:
  static TerminalReader* of(EditLine* edit) {
    void* self = nullptr;
    ::el_get(edit, EL_CLIENTDATA, &self);
    return static_cast<TerminalReader*>(self);
  }
  static char* prompt_of(EditLine* edit) { return of(edit)->prompt_.data(); }

  // libedit's own reader goes on after a signal; this one ends, so that Ctrl-C drops the line.
  static int next_character(EditLine* edit, wchar_t* out) {
    TerminalReader* const self = of(edit);
    std::mbstate_t state{};
    for (;;) {
      pollfd look[] = {{STDIN_FILENO, POLLIN, 0}, {self->interrupt_fd_, POLLIN, 0}};
      if (::poll(look, 2, -1) < 0 && errno != EINTR) return -1;
      if (look[1].revents != 0) {
        self->interrupted_ = true;
        return -1;
      }
      if (look[0].revents == 0) continue;
      char byte = 0;
      const ssize_t count = ::read(STDIN_FILENO, &byte, 1);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return static_cast<int>(count);
      const std::size_t made = std::mbrtowc(out, &byte, 1, &state);
      if (made == static_cast<std::size_t>(-2)) continue;  // a character of several bytes
      if (made != static_cast<std::size_t>(-1)) return 1;
      state = {};  // what is no character is dropped
    }
  }

  std::string prompt_;
  int interrupt_fd_;
  EditLine* edit_;
  History* history_;
  bool interrupted_ = false;
};

}  // namespace

std::unique_ptr<LineReader> make_plain_reader() {
  return std::make_unique<PlainReader>();
}

std::unique_ptr<LineReader> make_terminal_reader(const std::string& prompt, int interrupt_fd) {
  // A terminal whose locale says nothing speaks UTF-8.
  if (std::setlocale(LC_CTYPE, "") == nullptr || MB_CUR_MAX == 1) std::setlocale(LC_CTYPE, "C.UTF-8");
  auto reader = std::make_unique<TerminalReader>(prompt, interrupt_fd);
  if (reader->usable()) return reader;
  return make_plain_reader();
}

}  // namespace di::ctl
