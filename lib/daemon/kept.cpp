#include "daemon/kept.h"

#include <utility>

#include "base/file.h"
#include "base/log.h"

namespace di::daemon {

namespace {

constexpr Duration save_period = seconds(60);

}  // namespace

Kept::Kept(Daemon& daemon, std::string_view suffix, std::function<std::string()> text,
           const std::function<Status(std::string_view)>& restore)
    : path_(daemon.path(suffix)),
      text_(std::move(text)),
      timer_(daemon.loop(), loop::TimerKind::liveness, "kept text", [this] { save(); }) {
  if (const Result<std::string> kept = file_read(path_, kept_bytes_max)) {
    if (const Status restored = restore(*kept); !restored.ok())
      log_warn("daemon", "what the last run learnt is not readable",
               {{"file", path_}, {"reason", restored.error().message}});
  }
  timer_.start_every(save_period);
}

void Kept::save() const {
  if (const Status written = file_write(path_, text_()); !written.ok())
    DI_LOG_DEBUG("daemon", "what was learnt is not written",
                 {{"file", path_}, {"reason", written.error().message}});
}

}  // namespace di::daemon
