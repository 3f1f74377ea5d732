#include "store/disk.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/assert.h"
#include "base/fd.h"

namespace di::store {

namespace {

bool aligned(std::uint64_t value) {
  return value % disk_align_bytes == 0;
}

class FileDisk final : public Disk {
 public:
  FileDisk(Fd fd, std::string path, std::uint64_t bytes)
      : fd_(std::move(fd)), path_(std::move(path)), bytes_(bytes) {}

  [[nodiscard]] std::uint64_t bytes() const override { return bytes_; }

  Status read(std::uint64_t offset, MutableByteView to) override {
    check(offset, to.size(), to.data());
    while (!to.empty()) {
      const ssize_t got = ::pread(fd_.get(), to.data(), to.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno_error("read " + path_);
      // A rest that is not aligned cannot be asked for with O_DIRECT: only the end of the file gives one.
      if (got == 0 || !aligned(static_cast<std::uint64_t>(got))) {
        return Error{Code::io, 0, "read " + path_ + ": the file is shorter than it was"};
      }
      to = to.subspan(static_cast<std::size_t>(got));
      offset += static_cast<std::uint64_t>(got);
    }
    return {};
  }

  Status write(std::uint64_t offset, ByteView from) override {
    check(offset, from.size(), from.data());
    while (!from.empty()) {
      const ssize_t put = ::pwrite(fd_.get(), from.data(), from.size(), static_cast<off_t>(offset));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return errno_error("write " + path_);
      if (put == 0 || !aligned(static_cast<std::uint64_t>(put))) {
        return Error{Code::io, 0, "write " + path_ + ": a write was cut short"};
      }
      from = from.subspan(static_cast<std::size_t>(put));
      offset += static_cast<std::uint64_t>(put);
    }
    return {};
  }

  Status flush() override {
    if (::fdatasync(fd_.get()) != 0) return errno_error("fdatasync " + path_);
    return {};
  }

 private:
  void check(std::uint64_t offset, std::size_t length, const std::byte* memory) const {
    DI_ASSERT(aligned(offset) && aligned(length) && aligned(reinterpret_cast<std::uintptr_t>(memory)));
    DI_ASSERT(offset <= bytes_ && length <= bytes_ - offset);
  }

  Fd fd_;
  std::string path_;
  std::uint64_t bytes_;
};

// Takes O_DIRECT when the file system has it.
Result<Fd> open_direct(const std::string& path, int flags, bool& direct) {
  direct = true;
  Fd fd(::open(path.c_str(), flags | O_DIRECT | O_CLOEXEC, 0640));
  if (!fd.valid() && errno == EINVAL) {
    // The refused open may have created the file.
    direct = false;
    fd = Fd(::open(path.c_str(), (flags & ~O_EXCL) | O_CLOEXEC, 0640));
  }
  if (!fd.valid()) {
    Error error = errno_error("open " + path);
    if (errno == EEXIST) error.code = Code::exists;
    return error;
  }
  return fd;
}

Status lock(int fd, const std::string& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return {};
  if (errno == EWOULDBLOCK)
    return Error{Code::busy, EWOULDBLOCK, path + ": another process has this volume open"};
  return errno_error("lock " + path);
}

}  // namespace

void AlignedBuffer::Free::operator()(std::byte* memory) const {
  std::free(memory);
}

void AlignedBuffer::reserve(std::size_t bytes) {
  bytes = align_up(std::max<std::size_t>(bytes, 1), disk_align_bytes);
  if (bytes <= bytes_) return;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(disk_align_bytes, bytes)));
  DI_ASSERT(memory_ != nullptr);
  std::memset(memory_.get(), 0, bytes);
  bytes_ = bytes;
}

MutableByteView AlignedBuffer::first(std::size_t bytes) {
  reserve(bytes);
  return {memory_.get(), bytes};
}

Result<DiskFile> disk_open(const std::string& path) {
  bool direct = false;
  Result<Fd> fd = open_direct(path, O_RDWR, direct);
  if (!fd) return fd.error();
  struct stat status {};
  if (::fstat(fd->get(), &status) != 0) return errno_error("stat " + path);
  if (!S_ISREG(status.st_mode)) return Error{Code::invalid, 0, path + ": not a regular file"};
  if (status.st_size <= 0 || !aligned(static_cast<std::uint64_t>(status.st_size))) {
    return Error{Code::invalid, 0, path + ": the length is no multiple of 4 KiB"};
  }
  DI_TRY(lock(fd->get(), path));
  DiskFile file;
  file.direct = direct;
  file.disk = std::make_unique<FileDisk>(*std::move(fd), path, static_cast<std::uint64_t>(status.st_size));
  return file;
}

Result<DiskFile> disk_create(const std::string& path, std::uint64_t bytes, bool prewrite) {
  DI_ASSERT(bytes > 0 && aligned(bytes));
  bool direct = false;
  Result<Fd> fd = open_direct(path, O_RDWR | O_CREAT | O_EXCL, direct);
  if (!fd) return fd.error();
  DI_TRY(lock(fd->get(), path));
  // Space is taken now: a volume never meets a full file system later.
  if (const int failed = ::posix_fallocate(fd->get(), 0, static_cast<off_t>(bytes)); failed != 0) {
    ::unlink(path.c_str());
    return errno_error("allocate " + path, failed);
  }
  DiskFile file;
  file.direct = direct;
  file.disk = std::make_unique<FileDisk>(*std::move(fd), path, bytes);
  if (prewrite) {
    AlignedBuffer zeros(std::size_t{1} << 20);
    for (std::uint64_t offset = 0; offset < bytes;) {
      const std::size_t part = static_cast<std::size_t>(std::min<std::uint64_t>(bytes - offset, 1u << 20));
      if (Status status = file.disk->write(offset, zeros.first(part)); !status.ok()) {
        ::unlink(path.c_str());
        return status.error();
      }
      offset += part;
    }
  }
  return file;
}

}  // namespace di::store
