#include "keygen.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

#include "account/key.h"
#include "base/fd.h"
#include "config/param.h"
#include "daemon/exit.h"
#include "net/keys.h"

namespace di::ctl {

namespace {

int complain(const Error& error) {
  std::fprintf(stderr, "di-ctl: %s\n", error.message.c_str());
  return daemon::exit_failure;
}

// The whole text in one write, so that two callers do not mix their lines.
Status write_whole(int fd, const std::string& text, const std::string& path) {
  const ssize_t put = ::write(fd, text.data(), text.size());
  if (put == static_cast<ssize_t>(text.size()) && ::fsync(fd) == 0) return {};
  return put >= 0 && put < static_cast<ssize_t>(text.size())
             ? Error{Code::no_space, 0, path + ": written in part"}
             : errno_error(path);
}

}  // namespace

int make_keys(const std::string& instance, const std::string& folder) {
  if (!net::is_instance(instance)) {
    std::fprintf(stderr, "di-ctl: '%s' is no instance: want PROGRAM.NAME, as in di-decode.0\n",
                 instance.c_str());
    return daemon::exit_usage;
  }
  const net::KeyPair pair = net::key_pair_make();
  const std::string line = pair.public_key + " " + instance + "\n";
  if (::mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) return complain(errno_error(folder));
  const std::string secret_path = folder + "/" + instance + ".secret";
  const std::string public_path = folder + "/public_keys";
  const Fd secret(::open(secret_path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!secret.valid()) return complain(errno_error(secret_path));
  Status status =
      write_whole(secret.get(), "# secret key of " + instance + "\n" + pair.secret_key + "\n", secret_path);
  if (status.ok()) {
    const Fd list(::open(public_path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    status = list.valid() ? Status{} : errno_error(public_path);
    // A last line that somebody wrote without its end stays a line of its own.
    struct stat info {};
    char last = '\n';
    if (status.ok() && ::fstat(list.get(), &info) == 0 && info.st_size > 0) {
      status = ::pread(list.get(), &last, 1, info.st_size - 1) == 1 ? Status{} : errno_error(public_path);
    }
    if (status.ok()) status = write_whole(list.get(), (last == '\n' ? "" : "\n") + line, public_path);
  }
  if (!status.ok()) {
    ::unlink(secret_path.c_str());
    return complain(status.error());
  }
  std::fputs(line.c_str(), stdout);
  return daemon::exit_ok;
}

int make_api_key(const std::string& tenant) {
  const std::string key = account::key_generate();
  std::string hash;
  std::string of;
  config::Params row;
  row.string("key", hash, {});
  row.string("tenant", of, {});
  hash = account::key_hash_text(key);
  of = tenant;
  if (std::printf("%s\n", key.c_str()) < 0 || std::fflush(stdout) != 0) {
    return complain(errno_error("standard output"));
  }
  std::fprintf(stderr, "[[auth.keys]]\n%s", config::print(row, false).c_str());
  return daemon::exit_ok;
}

}  // namespace di::ctl
