#include "account/journal.h"

#include <fcntl.h>
#include <sys/file.h>
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
  return Journal(std::move(fd), dir, std::move(path));
}

bool Journal::is_current() const {
  struct stat mine {};
  struct stat found {};
  return ::fstat(fd_.get(), &mine) == 0 && ::stat(path_.c_str(), &found) == 0 &&
         mine.st_dev == found.st_dev && mine.st_ino == found.st_ino;
}

Status Journal::append(const Charge& charge) {
  if (!is_current()) {
    // Nobody would look for it where the old file is.
    auto again = open(dir_);
    if (!again) return again.error();
    *this = *std::move(again);
  }
  // Lines stay whole without it; it is for the end of the file, below.  A writer that was stopped in between
  // is not waited for.
  const bool alone = ::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0;
  const Status written = append_line(charge_json(charge) + '\n', alone);
  if (alone) ::flock(fd_.get(), LOCK_UN);
  return written;
}

Status Journal::append_line(std::string line, bool alone) {
  struct stat before {};
  if (::fstat(fd_.get(), &before) != 0) return errno_error("look at " + path_);
  char last = '\n';
  if (before.st_size > 0 && ::pread(fd_.get(), &last, 1, before.st_size - 1) < 0)
    return errno_error("read " + path_);
  if (last != '\n') line.insert(line.begin(), '\n');
  ssize_t written = 0;
  do {
    written = ::write(fd_.get(), line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  if (written < 0) return errno_error("write " + path_);
  if (static_cast<std::size_t>(written) == line.size()) return {};
  // Half a line would be no JSON to anybody.  It stays when somebody else may have written behind it: then the
  // next record ends it.
  struct stat after {};
  const bool whole = alone && ::fstat(fd_.get(), &after) == 0 && after.st_size == before.st_size + written &&
                     ::ftruncate(fd_.get(), before.st_size) == 0;
  return Error{Code::no_space, 0,
               "write " + path_ + (whole ? ": cut short" : ": cut short, half a line stays")};
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
