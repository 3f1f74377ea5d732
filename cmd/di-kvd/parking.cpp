#include "parking.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/fd_packet.h"
#include "base/log.h"
#include "daemon/ready.h"

extern char** environ;

namespace di::kvd {

namespace {

constexpr std::string_view stored_name = "arena";
constexpr std::size_t answer_bytes_max = 64;
constexpr Duration replace_after = seconds(1);
// The listening socket in the holder.
constexpr int holder_listen_fd = 3;

std::string holder_name(const std::string& instance) {
  return "di-hold" + instance.substr(instance.find('.'));
}

Result<Fd> make_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return errno_error("socket");
  return fd;
}

}  // namespace

Parking::Parking(Park mode, std::string run_dir, std::string instance, Duration answer_wait)
    : mode_(mode),
      run_dir_(std::move(run_dir)),
      instance_(std::move(instance)),
      socket_path_(run_dir_ + "/" + holder_name(instance_) + ".sock"),
      answer_wait_(answer_wait) {
  if (mode_ == Park::automatic) mode_ = daemon::supervisor_stores_fds() ? Park::systemd : Park::holder;
}

Parking::~Parking() = default;

std::string_view Parking::keeper() const {
  switch (mode_) {
    case Park::systemd:
      return "systemd";
    case Park::holder:
      return "holder";
    case Park::automatic:
    case Park::off:
      return "nobody";
  }
  return "nobody";
}

Fd Parking::take() {
  if (mode_ == Park::systemd) return daemon::supervisor_stored_fd(stored_name);
  if (mode_ != Park::holder) return {};
  if (Result<Fd> there = connect_holder()) holder_ = *std::move(there);
  if (!holder_.valid()) return {};
  Fd kept;
  if (const Result<bool> found = ask("get", -1, &kept); !found)
    log_warn("arena", "the holder does not answer", {{"error", found.error()}});
  return kept;
}

Status Parking::put(int fd) {
  switch (mode_) {
    case Park::automatic:
    case Park::off:
      return {};
    case Park::systemd:
      daemon::supervisor_drop_fd(stored_name);
      return daemon::supervisor_store_fd(stored_name, fd);
    case Park::holder:
      break;
  }
  DI_TRY(reach_holder());
  const Result<bool> done = ask("put", fd, nullptr);
  if (!done) return done.error();
  if (*done) return {};
  holder_.reset();
  return Error{Code::io, 0, "the holder refused the descriptor"};
}

void Parking::drop() {
  if (mode_ == Park::systemd) daemon::supervisor_drop_fd(stored_name);
  if (mode_ != Park::holder) return;
  if (!holder_.valid()) {
    if (Result<Fd> there = connect_holder()) holder_ = *std::move(there);
  }
  if (!holder_.valid()) return;
  if (const Result<bool> done = ask("drop", -1, nullptr); !done)
    log_warn("arena", "the holder does not answer", {{"error", done.error()}});
}

void Parking::watch(loop::Loop& loop, int fd) {
  if (mode_ != Park::holder) return;
  loop_ = &loop;
  fd_ = fd;
  retry_ =
      std::make_unique<loop::Timer>(loop, loop::TimerKind::liveness, "arena holder", [this] { on_retry(); });
  if (!holder_.valid()) return retry_->start_after(replace_after);
  watch_holder();
}

void Parking::watch_holder() {
  watch_ = std::make_unique<loop::Watch>(*loop_, holder_.get(), "arena holder");
  watch_->on_readable([this] { holder_readable(); });
}

void Parking::holder_readable() {
  const Result<FdPacket> packet = fd_packet_receive(holder_.get(), answer_bytes_max);
  if (packet && putting_) {
    if (as_text(packet->bytes) != "ok")
      return not_parked(Error{Code::io, 0, "the holder refused the descriptor"});
    putting_ = false;
    retry_->cancel();
    return log_info("arena", "parked again");
  }
  if (packet || packet.error().code == Code::busy) return;
  if (putting_) return not_parked(packet.error());
  log_warn("arena", "the holder ended");
  let_go();
  retry_->start_after(replace_after);
}

void Parking::on_retry() {
  if (child_ > 0 && ::waitpid(child_, nullptr, WNOHANG) == child_) child_ = 0;
  if (putting_) return not_parked(Error{Code::timeout, 0, "no answer"});
  if (const Status reached = reach_holder(); !reached.ok()) return not_parked(reached.error());
  if (const Status sent = fd_packet_send(holder_.get(), as_bytes(line_of("put")), fd_); !sent.ok())
    return not_parked(sent.error());
  putting_ = true;
  watch_holder();
  retry_->start_after(answer_wait_);
}

void Parking::not_parked(const Error& why) {
  log_warn("arena", "not parked", {{"error", why}});
  let_go();
  retry_->start_after(replace_after);
}

void Parking::let_go() {
  putting_ = false;
  watch_.reset();
  holder_.reset();
}

Status Parking::reach_holder() {
  if (holder_.valid()) return {};
  Result<Fd> there = connect_holder();
  if (!there && there.error().code == Code::unreachable) there = start_holder();
  if (!there) return there.error();
  holder_ = *std::move(there);
  return {};
}

Result<Fd> Parking::connect_holder() const {
  Result<sockaddr_un> address = unix_address(socket_path_);
  if (!address) return address.error();
  Result<Fd> fd = make_socket();
  if (!fd) return fd.error();
  if (::connect(fd->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    const int why = errno;
    Error error = errno_error("connect " + socket_path_, why);
    if (why == ENOENT || why == ECONNREFUSED) error.code = Code::unreachable;
    return error;
  }
  if (Status same = check_same_user(fd->get()); !same.ok()) return same.error();
  return fd;
}

// The socket is ours before the holder has it: nobody has to wait for it to be there.
Result<Fd> Parking::start_holder() {
  Result<sockaddr_un> address = unix_address(socket_path_);
  if (!address) return address.error();
  Result<Fd> listening = make_socket();
  if (!listening) return listening.error();
  ::unlink(socket_path_.c_str());
  if (::bind(listening->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0 ||
      ::chmod(socket_path_.c_str(), 0600) != 0 || ::listen(listening->get(), 8) != 0) {
    return errno_error("listen " + socket_path_);
  }
  std::error_code error;
  const std::string program =
      (std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "di-hold").string();
  const std::string alone =
      std::to_string(std::chrono::duration_cast<std::chrono::seconds>(holder_alone).count());
  std::vector<std::string> words{program, "-i", instance_, "-r", run_dir_, "-l", "3", "-t", alone};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  // A session of its own, no signal blocked, and no descriptor of ours: it must not keep a pipe open that
  // somebody waits on, nor its log.
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDWR, 0);
  posix_spawn_file_actions_adddup2(&files, 0, 1);
  posix_spawn_file_actions_adddup2(&files, 0, 2);
  posix_spawn_file_actions_adddup2(&files, listening->get(), holder_listen_fd);
  posix_spawn_file_actions_addclosefrom_np(&files, holder_listen_fd + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  const int failed = ::posix_spawn(&child_, program.c_str(), &files, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  if (failed != 0) {
    child_ = 0;
    ::unlink(socket_path_.c_str());
    return errno_error("start " + program, failed);
  }
  return connect_holder();
}

std::string Parking::line_of(std::string_view word) const {
  return std::string(word) + " " + instance_;
}

Result<bool> Parking::ask(std::string_view word, int fd, Fd* answer) {
  const auto failed = [this](Error why) {
    holder_.reset();
    return why;
  };
  if (const Status sent = fd_packet_send(holder_.get(), as_bytes(line_of(word)), fd); !sent.ok())
    return failed(sent.error());
  pollfd wait{holder_.get(), POLLIN, 0};
  if (::poll(&wait, 1, static_cast<int>(to_ms(answer_wait_))) <= 0)
    return failed(Error{Code::timeout, 0, "no answer"});
  Result<FdPacket> packet = fd_packet_receive(holder_.get(), answer_bytes_max);
  if (!packet) return failed(packet.error());
  if (answer != nullptr) *answer = std::move(packet->fd);
  return as_text(packet->bytes) == "ok";
}

}  // namespace di::kvd
