// daemon/kept.h: a short text that outlives the process, in a file beside the daemon's others: what it has
// learnt.
//
// Read when it is made, written once a minute and by save().  Only a start without it is lost with a file
// that cannot be written, or that says nothing any more: the next one takes its place, and a line of the log
// says so.
//
// Owner: a daemon, on its loop.  Bound: kept_bytes_max.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "daemon/daemon.h"
#include "loop/loop.h"

namespace di::daemon {

inline constexpr std::size_t kept_bytes_max = 4096;

class Kept {
 public:
  // RUNDIR/INSTANCE.SUFFIX.  `restore` is called at most once, at once.
  Kept(Daemon& daemon, std::string_view suffix, std::function<std::string()> text,
       const std::function<Status(std::string_view)>& restore);

  void save() const;

 private:
  std::string path_;
  std::function<std::string()> text_;
  loop::Timer timer_;
};

}  // namespace di::daemon
