#include "store/disk.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/fd.h"
#include "base/file.h"
#include "base/time.h"
#include "store/disk_access.h"

namespace di::store {

namespace {

Error neither(const std::string& path) {
  return Error{Code::invalid, 0, path + ": neither a regular file nor a block device"};
}

// Of what is open, a file or a device.  Errors: invalid (neither), not_found (removed meanwhile), io.
Result<std::uint64_t> length_of(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return errno_error("stat " + path);
  if (S_ISREG(status.st_mode) && status.st_nlink == 0)
    return Error{Code::not_found, ENOENT, path + " was removed"};
  if (S_ISREG(status.st_mode)) return static_cast<std::uint64_t>(std::max<off_t>(status.st_size, 0));
  if (!S_ISBLK(status.st_mode)) return neither(path);
  std::uint64_t bytes = 0;
  if (::ioctl(fd, BLKGETSIZE64, &bytes) != 0) return errno_error("length of " + path);
  return bytes - bytes % disk_align_bytes;
}

class FileDisk final : public Disk {
 public:
  FileDisk(Fd fd, std::string path, std::uint64_t bytes)
      : fd_(std::move(fd)), path_(std::move(path)), bytes_(bytes) {}
  // A ring that had the file registered may keep it open for a while.
  ~FileDisk() override { ::flock(fd_.get(), LOCK_UN); }
  FileDisk(const FileDisk&) = delete;
  FileDisk& operator=(const FileDisk&) = delete;

  [[nodiscard]] std::uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] Result<std::uint64_t> bytes_now() const override { return length_of(fd_.get(), path_); }
  [[nodiscard]] int descriptor() const override { return fd_.get(); }
  [[nodiscard]] std::string_view path() const override { return path_; }

  Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) override {
    disk_check(offset, to, bytes_);
    for (DiskVector left(to); left.count() > 0;) {
      const ssize_t got = ::preadv(fd_.get(), left.data(), left.count(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno_error("read " + path_);
      // A rest that is not aligned cannot be asked for with O_DIRECT: only the end of the file gives one.
      if (got == 0 || !disk_aligned(static_cast<std::uint64_t>(got))) {
        return Error{Code::io, 0, "read " + path_ + ": the file is shorter than it was"};
      }
      left.advance(static_cast<std::size_t>(got));
      offset += static_cast<std::uint64_t>(got);
    }
    return {};
  }

  Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) override {
    disk_check(offset, from, bytes_);
    for (DiskVector left(from); left.count() > 0;) {
      const ssize_t put = ::pwritev(fd_.get(), left.data(), left.count(), static_cast<off_t>(offset));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return errno_error("write " + path_);
      if (put == 0 || !disk_aligned(static_cast<std::uint64_t>(put))) {
        return Error{Code::io, 0, "write " + path_ + ": a write was cut short"};
      }
      left.advance(static_cast<std::size_t>(put));
      offset += static_cast<std::uint64_t>(put);
    }
    return {};
  }

  Status flush() override {
    if (::fdatasync(fd_.get()) != 0) return errno_error("fdatasync " + path_);
    return {};
  }

 private:
  Fd fd_;
  std::string path_;
  std::uint64_t bytes_;
};

// True when O_DIRECT works with what we give it; `fd` was opened with it.  Errors: unsupported.
Result<bool> direct_works(int fd, const std::string& path) {
  struct statx status {};
  // Where the kernel or the file system does not say, that the open succeeded has to do.
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return true;
  if ((status.stx_mask & STATX_DIOALIGN) == 0) return true;
  if (status.stx_dio_mem_align == 0 || status.stx_dio_offset_align == 0) return false;
  const std::uint32_t align = std::max(status.stx_dio_mem_align, status.stx_dio_offset_align);
  if (align <= disk_align_bytes) return true;
  return Error{Code::unsupported, 0,
               path + ": direct I/O here wants an alignment of " + std::to_string(align) +
                   " bytes, a volume has 4096"};
}

Status direct_end(int fd, const std::string& path) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags & ~O_DIRECT) != 0) return errno_error("open " + path);
  return {};
}

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
    if (errno == EBUSY)
      return Error{Code::busy, EBUSY, path + ": the device is mounted, or in use otherwise"};
    Error error = errno_error("open " + path);
    if (error.os_errno == EEXIST) error.code = Code::exists;
    return error;
  }
  if (direct) {
    const Result<bool> works = direct_works(fd.get(), path);
    if (!works) return works.error();
    direct = *works;
    if (!direct) DI_TRY(direct_end(fd.get(), path));
  }
  return fd;
}

}  // namespace

// The kernel takes a moment to let go of the ring, and with it of the file, of a process that was killed.
Status disk_lock(int fd, const std::string& path) {
  for (int tries = 0; ::flock(fd, LOCK_EX | LOCK_NB) != 0; ++tries) {
    if (errno != EWOULDBLOCK) return errno_error("lock " + path);
    if (tries == 100) return Error{Code::busy, EWOULDBLOCK, path + ": another process has this volume open"};
    std::this_thread::sleep_for(milliseconds(10));
  }
  return {};
}

Status disk_prewrite(Disk& disk, const std::function<void(std::uint64_t)>& progress) {
  constexpr std::uint64_t part_bytes_max = 4 << 20;
  AlignedBuffer zeros(part_bytes_max);
  for (std::uint64_t offset = 0; offset < disk.bytes();) {
    const std::uint64_t part = std::min(disk.bytes() - offset, part_bytes_max);
    DI_TRY(disk.write(offset, zeros.first(part)));
    offset += part;
    if (progress) progress(offset);
  }
  // Until here the file system may still count the extents as unwritten.
  return disk.flush();
}

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
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return errno_error("open " + path);
  // A folder cannot be opened for writing: that would look like a fault of the disk.
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) return neither(path);
  DiskFile file;
  file.device = S_ISBLK(status.st_mode);
  // On a device O_EXCL asks the kernel whether it is mounted or otherwise in use.
  Result<Fd> fd = open_direct(path, O_RDWR | (file.device ? O_EXCL : 0), file.direct);
  if (!fd) return fd.error();
  // Of what was opened, which may be another file than what was looked at.
  const Result<std::uint64_t> bytes = length_of(fd->get(), path);
  if (!bytes) return bytes.error();
  if (*bytes == 0 || !disk_aligned(*bytes)) {
    return Error{Code::corrupt, 0, path + ": the length is no multiple of 4 KiB"};
  }
  DI_TRY(disk_lock(fd->get(), path));
  file.disk = std::make_unique<FileDisk>(*std::move(fd), path, *bytes);
  return file;
}

Result<DiskFile> disk_create(const std::string& path, std::uint64_t bytes, bool prewrite,
                             const std::function<void(std::uint64_t)>& progress) {
  DI_ASSERT(bytes > 0 && disk_aligned(bytes));
  bool direct = false;
  Result<Fd> fd = open_direct(path, O_RDWR | O_CREAT | O_EXCL, direct);
  if (!fd) return fd.error();
  DI_TRY(disk_lock(fd->get(), path));
  struct stat named {};
  if (::fstat(fd->get(), &named) != 0) return errno_error("stat " + path);
  if (named.st_nlink == 0) return Error{Code::busy, 0, path + ": another process has removed it"};
  // Space is taken now: a volume never meets a full file system later.
  if (const int failed = ::posix_fallocate(fd->get(), 0, static_cast<off_t>(bytes)); failed != 0) {
    ::unlink(path.c_str());
    Error error = errno_error("allocate " + path, failed);
    if (failed == EFBIG) error.code = Code::no_space;  // longer than files are on this file system
    return error;
  }
  DiskFile file;
  file.direct = direct;
  file.disk = std::make_unique<FileDisk>(*std::move(fd), path, bytes);
  if (prewrite) {
    if (Status status = disk_prewrite(*file.disk, progress); !status.ok()) {
      ::unlink(path.c_str());
      return status.error();
    }
  }
  return file;
}

Status disk_remove(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.valid()) return errno == ENOENT ? Status() : errno_error("open " + path);
  DI_TRY(disk_lock(fd.get(), path));
  // While it waited for the lock another may have been made.
  struct stat locked {};
  struct stat named {};
  if (::fstat(fd.get(), &locked) != 0) return errno_error("stat " + path);
  if (::stat(path.c_str(), &named) != 0 || named.st_dev != locked.st_dev || named.st_ino != locked.st_ino)
    return Error{Code::busy, 0, path + ": another process is making this volume"};
  return ::unlink(path.c_str()) == 0 ? Status() : errno_error("remove " + path);
}

Status disk_rename(const std::string& from, const std::string& to) {
  int done = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE);
  // Not every file system knows how: a second name, and then without the first.
  if (done != 0 && (errno == EINVAL || errno == ENOSYS)) {
    done = ::link(from.c_str(), to.c_str());
    if (done == 0) done = ::unlink(from.c_str());
  }
  if (done == 0) return name_flush(to);  // or a power loss would leave what the next start removes
  Error error = errno_error("rename " + from + " to " + to);
  if (error.os_errno == EEXIST) error.code = Code::exists;
  return error;
}

Result<bool> disk_is_blank(Disk& disk) {
  const std::size_t bytes = std::min<std::uint64_t>(disk.bytes(), 1 << 20);
  AlignedBuffer buffer(bytes);
  const MutableByteView view = buffer.first(bytes);
  DI_TRY(disk.read(0, view));
  return std::all_of(view.begin(), view.end(), [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace di::store
