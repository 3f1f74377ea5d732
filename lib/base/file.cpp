#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/fd.h"

namespace di {

Result<std::string> file_read(const std::string& path, std::size_t bytes_max) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO must not hang us
  if (!fd.valid()) return errno_error(path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(path);
  if (!S_ISREG(info.st_mode)) return Error{Code::invalid, 0, path + ": is not a regular file"};
  if (static_cast<std::uint64_t>(info.st_size) > bytes_max) {
    return Error{Code::invalid, 0,
                 path + ": holds " + std::to_string(info.st_size) + " bytes, more than the limit of " +
                     std::to_string(bytes_max)};
  }
  std::string text(static_cast<std::size_t>(info.st_size), '\0');
  std::size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got = ::read(fd.get(), text.data() + filled, text.size() - filled);
    if (got < 0) {
      if (errno == EINTR) continue;
      return errno_error(path);
    }
    if (got == 0) break;  // it shrank meanwhile: what is left of it is what it says
    filled += static_cast<std::size_t>(got);
  }
  text.resize(filled);
  return text;
}

Status file_write(const std::string& path, std::string_view text) {
  const std::string beside = path + ".new";
  const Fd fd(::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd.valid()) return errno_error(beside);
  while (!text.empty()) {
    const ssize_t put = ::write(fd.get(), text.data(), text.size());
    if (put < 0) {
      if (errno == EINTR) continue;
      return errno_error(beside);
    }
    text.remove_prefix(static_cast<std::size_t>(put));
  }
  if (::rename(beside.c_str(), path.c_str()) != 0) return errno_error(path);
  return {};
}

Status names_flush(const std::string& folder) {
  const Fd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return errno_error("open " + folder);
  // Some file systems have nothing to flush there.
  if (::fsync(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP) return errno_error("fsync " + folder);
  return {};
}

Status name_flush(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return names_flush(".");
  return names_flush(slash == 0 ? "/" : path.substr(0, slash));
}

}  // namespace di
