#include "holder.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/fd_packet.h"

namespace di::hold {

namespace {

// "di-hold.host0" for "di-kvd.host0".
std::string name_of(const std::string& instance) {
  return "di-hold" + instance.substr(instance.find('.'));
}

}  // namespace

Holder::Holder(std::string instance, Duration alone, Fd listening, int signals, const Clock& clock)
    : instance_(std::move(instance)),
      alone_(alone),
      listening_(std::move(listening)),
      signals_(signals),
      clock_(clock),
      alone_since_(clock.now()) {}

Result<bool> Holder::round() {
  std::vector<pollfd> waits{{signals_, POLLIN, 0}, {listening_.get(), POLLIN, 0}};
  for (const Fd& connection : connections_) waits.push_back({connection.get(), POLLIN, 0});
  int wait_ms = -1;
  const bool was_alone = connections_.empty();
  if (was_alone) {
    const Duration left = alone_since_ + alone_ - clock_.now();
    if (left.count() <= 0) return false;
    wait_ms = static_cast<int>(std::min<std::int64_t>(to_ms(left) + 1, 60'000));
  }
  if (::poll(waits.data(), waits.size(), wait_ms) < 0) {
    if (errno == EINTR) return true;
    return errno_error("poll");
  }
  if (waits[0].revents != 0) return false;
  std::vector<Fd> open;
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    if (waits[i + 2].revents == 0 || answer(connections_[i].get()))
      open.push_back(std::move(connections_[i]));
  }
  connections_ = std::move(open);
  if (waits[1].revents != 0) accept_one();
  // From the end of the last connection, which may have been silent since it came.
  if (!was_alone && connections_.empty()) alone_since_ = clock_.now();
  return true;
}

void Holder::accept_one() {
  Fd fd(::accept4(listening_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd.valid() || connections_.size() >= connections_max || !check_same_user(fd.get()).ok()) return;
  connections_.push_back(std::move(fd));
}

// False: the connection is over.
bool Holder::answer(int connection) {
  Result<FdPacket> packet = fd_packet_receive(connection, packet_bytes_max);
  if (!packet) return packet.error().code == Code::busy;
  const std::string_view line = as_text(packet->bytes);
  if (line == "put " + instance_ && packet->fd.valid()) {
    kept_ = std::move(packet->fd);
    return fd_packet_send(connection, as_bytes("ok"), -1).ok();
  }
  if (line == "get " + instance_) {
    return fd_packet_send(connection, as_bytes(kept_.valid() ? "ok" : "none"), kept_.get()).ok();
  }
  if (line == "drop " + instance_) {
    kept_.reset();
    return fd_packet_send(connection, as_bytes("ok"), -1).ok();
  }
  return false;
}

Status run(const Options& options) {
  // What stops a terminal's programs does not stop this one.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  ::sigprocmask(SIG_SETMASK, &ends, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGHUP, SIG_IGN);
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  const Fd signals(::signalfd(-1, &ends, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals.valid()) return errno_error("signalfd");
  Fd listening(options.listen_fd);
  ::fcntl(listening.get(), F_SETFD, FD_CLOEXEC);
  ::fcntl(listening.get(), F_SETFL, O_NONBLOCK);

  const std::string path = options.run_dir + "/" + name_of(options.instance) + ".pid";
  const Fd pid(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!pid.valid()) return errno_error("open " + path);
  if (::flock(pid.get(), LOCK_EX | LOCK_NB) != 0)
    return Error{Code::exists, 0, "another holder serves " + options.instance};
  const std::string text = std::to_string(::getpid()) + "\n";
  if (::ftruncate(pid.get(), 0) != 0 || ::pwrite(pid.get(), text.data(), text.size(), 0) < 0)
    return errno_error("write " + path);

  const MonotonicClock clock;
  Holder holder(options.instance, options.alone, std::move(listening), signals.get(), clock);
  Result<bool> goes_on = true;
  while (goes_on && *goes_on) goes_on = holder.round();
  // Both names first: whoever comes now makes a holder of its own.
  ::unlink((options.run_dir + "/" + name_of(options.instance) + ".sock").c_str());
  ::unlink(path.c_str());
  return goes_on ? Status() : Status(goes_on.error());
}

}  // namespace di::hold
