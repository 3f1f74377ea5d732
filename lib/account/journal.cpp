#include "account/journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace di::account {

namespace {

std::string journal_path(const std::string& dir) {
  return dir + "/charges.jsonl";
}

}  // namespace

Result<Journal> Journal::open(const std::string& dir) {
  if (::mkdir(dir.c_str(), 0750) != 0 && errno != EEXIST) return errno_error("make " + dir);
  std::string path = journal_path(dir);
  Fd fd(::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0640));
  if (!fd.valid()) return errno_error("open " + path);
  const off_t length = ::lseek(fd.get(), 0, SEEK_END);
  if (length < 0) return errno_error("open " + path);
  char last = '\n';
  if (length > 0 && ::pread(fd.get(), &last, 1, length - 1) != 1) return errno_error("read " + path);
  return Journal(std::move(fd), dir, std::move(path), last != '\n');
}

Status Journal::append(const Charge& charge) {
  struct stat info {};
  if (::fstat(fd_.get(), &info) == 0 && info.st_nlink == 0) {
    // Nobody would ever read what is written to it.
    auto again = open(dir_);
    if (!again) return again.error();
    *this = *std::move(again);
  }
  std::string line = cut_ ? "\n" : "";
  line += charge_json(charge);
  line += '\n';
  ssize_t written = 0;
  do {
    written = ::write(fd_.get(), line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  if (written < 0) return errno_error("write " + path_);
  if (static_cast<std::size_t>(written) == line.size()) {
    cut_ = false;
    return {};
  }
  // Half a line would be no JSON to anybody.
  cut_ = ::ftruncate(fd_.get(), info.st_size) != 0;
  return Error{Code::no_space, 0, "write " + path_ + ": cut short"};
}

Result<JournalCounts> journal_read(const std::string& dir, const std::function<void(const Charge&)>& take) {
  const std::string path = journal_path(dir);
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return errno_error("open " + path);
  JournalCounts counts;
  std::string line;
  bool too_long = false;
  std::array<char, 64 << 10> buffer;
  for (;;) {
    const ssize_t got = ::read(fd.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error("read " + path);
    if (got == 0) return counts;
    for (const char c : std::string_view(buffer.data(), static_cast<std::size_t>(got))) {
      if (c != '\n') {
        too_long = too_long || line.size() >= charge_line_bytes_max;
        if (!too_long) line += c;
        continue;
      }
      const auto charge = too_long ? Result<Charge>(Error{Code::invalid, 0, "too long"}) : charge_parse(line);
      if (charge) {
        ++counts.records;
        take(*charge);
      } else {
        ++counts.damaged;
      }
      line.clear();
      too_long = false;
    }
  }
}

}  // namespace di::account
