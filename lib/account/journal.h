// account/journal.h: the charge records of one router in a file of JSON lines, and reading them back.
//
// Each record is appended by one write to a file opened O_APPEND.  A crash or a full disk can cut the
// last line; the next record ends such a line, and reading skips and counts it.  A file that was removed or
// moved away is made again with the next record: that is how it is rotated.  Several routers may write into
// one directory.  Owner: the loop thread of
// di-router; readers are other processes.  Bound: the disk; a line is `charge_line_bytes_max`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "account/charge.h"
#include "base/fd.h"
#include "base/result.h"

namespace di::account {

inline constexpr std::size_t charge_line_bytes_max = 16 << 10;

class Journal {
 public:
  // Makes the directory when it is missing; appends to DIR/charges.jsonl.
  static Result<Journal> open(const std::string& dir);
  // In the file when it returns, not necessarily on the disk.  After an error the record may be there
  // in part; the next one starts a line of its own.
  Status append(const Charge& charge);

 private:
  Journal(Fd fd, std::string dir, std::string path)
      : fd_(std::move(fd)), dir_(std::move(dir)), path_(std::move(path)) {}
  // The descriptor is of the file that readers find under the path.
  [[nodiscard]] bool is_current() const;
  // `alone`: no other router writes now.
  Status append_line(std::string line, bool alone);

  Fd fd_;
  std::string dir_;
  std::string path_;
};

struct JournalCounts {
  std::uint64_t records = 0;
  std::uint64_t damaged = 0;  // lines that are no charge record
};
// Calls `take` for each record of DIR/charges.jsonl, oldest first.  Blocks; holds one line at a time.
// A line without its end is still being written and is left out.  Errors: not_found, io, denied.
[[nodiscard]] Result<JournalCounts> journal_read(const std::string& dir,
                                                 const std::function<void(const Charge&)>& take);

}  // namespace di::account
