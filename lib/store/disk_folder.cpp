#include "store/disk_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <memory>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/file.h"
#include "store/disk_access.h"

namespace di::store {

namespace {

constexpr std::string_view part_prefix = "part.";
constexpr std::string_view lock_name = "lock";

std::string part_path(const std::string& folder, std::size_t number) {
  return folder + "/" + std::string(part_prefix) + std::to_string(number);
}

// A quota is a file system without room, too.
Error folder_error(const std::string& what, int os_errno) {
  Error error = errno_error(what, os_errno);
  if (os_errno == EDQUOT) error.code = Code::no_space;
  if (os_errno == EEXIST) error.code = Code::exists;
  return error;
}
Error folder_error(const std::string& what) {
  return folder_error(what, errno);
}

struct Part {
  Fd fd;
  std::string path;
  std::atomic<bool> written{false};  // since it was last flushed
};

class FolderDisk final : public Disk {
 public:
  FolderDisk(Fd lock, std::string folder, std::vector<std::unique_ptr<Part>> parts, std::uint64_t part_bytes,
             std::uint64_t bytes)
      : lock_(std::move(lock)),
        path_(std::move(folder)),
        parts_(std::move(parts)),
        part_bytes_(part_bytes),
        bytes_(bytes),
        length_(bytes) {}

  [[nodiscard]] std::uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] Result<std::uint64_t> bytes_now() const override {
    if (removed_.load()) return Error{Code::not_found, ENOENT, "a file of " + path_ + " was removed"};
    return length_.load();
  }
  [[nodiscard]] std::string_view path() const override { return path_; }

  Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) override {
    return looked_at(each_part(
        offset, to, [](Part& part, std::uint64_t at, std::span<const MutableByteView> there) -> Status {
          for (DiskVector left(there); left.count() > 0;) {
            const ssize_t got = ::preadv(part.fd.get(), left.data(), left.count(), static_cast<off_t>(at));
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) return folder_error("read " + part.path);
            if (got == 0)
              return Error{Code::io, 0, "read " + part.path + ": the file is shorter than it was"};
            left.advance(static_cast<std::size_t>(got));
            at += static_cast<std::uint64_t>(got);
          }
          return {};
        }));
  }

  Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) override {
    return looked_at(
        each_part(offset, from, [](Part& part, std::uint64_t at, std::span<const ByteView> there) -> Status {
          // Before: a flush that runs meanwhile may miss the write, and must not be the last one.
          part.written.store(true);
          for (DiskVector left(there); left.count() > 0;) {
            const ssize_t put = ::pwritev(part.fd.get(), left.data(), left.count(), static_cast<off_t>(at));
            if (put < 0 && errno == EINTR) continue;
            if (put < 0) return folder_error("write " + part.path);
            if (put == 0) return Error{Code::io, 0, "write " + part.path + ": a write was cut short"};
            left.advance(static_cast<std::size_t>(put));
            at += static_cast<std::uint64_t>(put);
          }
          // A flush may have begun and ended since, in the middle of it.
          part.written.store(true);
          return {};
        }));
  }

  // Errors of writes that were cached come here.
  Status flush() override {
    Status status;
    for (const auto& part : parts_) {
      if (!part->written.exchange(false) || ::fdatasync(part->fd.get()) == 0) continue;
      part->written.store(true);
      if (status.ok()) status = folder_error("fdatasync " + part->path);
    }
    look();
    return status;
  }

 private:
  Status looked_at(Status status) {
    if (!status.ok()) look();
    return status;
  }
  // How long it is: to the end of the first part that is not as long as it was.
  void look() {
    std::uint64_t length = bytes_;
    for (std::size_t i = 0; i < parts_.size() && length == bytes_; ++i) {
      struct stat status {};
      if (::fstat(parts_[i]->fd.get(), &status) != 0) return;
      if (status.st_nlink == 0) removed_.store(true);
      const std::uint64_t begin = i * part_bytes_;
      const auto there = static_cast<std::uint64_t>(std::max<off_t>(status.st_size, 0));
      if (there < std::min(part_bytes_, bytes_ - begin)) length = begin + there;
    }
    length_.store(length);
  }

  // Calls `access` with what of the pieces lies in each part.
  template <class View, class Access>
  Status each_part(std::uint64_t offset, std::span<const View> pieces, Access access) {
    std::uint64_t left = disk_check(offset, pieces, bytes_);
    std::size_t piece = 0;
    std::size_t used = 0;  // of pieces[piece]
    while (left > 0) {
      const std::uint64_t at = offset % part_bytes_;
      std::uint64_t room = std::min(left, part_bytes_ - at);
      left -= room;
      std::array<View, disk_pieces_max> there;
      std::size_t count = 0;
      Part& part = *parts_[offset / part_bytes_];
      offset += room;
      while (room > 0) {
        const auto bytes =
            static_cast<std::size_t>(std::min<std::uint64_t>(room, pieces[piece].size() - used));
        if (bytes > 0) there[count++] = pieces[piece].subspan(used, bytes);
        room -= bytes;
        used += bytes;
        if (used == pieces[piece].size()) {
          ++piece;
          used = 0;
        }
      }
      DI_TRY(access(part, at, std::span<const View>(there).first(count)));
    }
    return {};
  }

  const Fd lock_;
  const std::string path_;
  const std::vector<std::unique_ptr<Part>> parts_;
  const std::uint64_t part_bytes_;
  const std::uint64_t bytes_;
  std::atomic<std::uint64_t> length_;
  std::atomic<bool> removed_{false};
};

Result<Fd> folder_lock(const std::string& folder) {
  const std::string path = folder + "/" + std::string(lock_name);
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640));
  if (!fd.valid()) return folder_error("open " + path);
  DI_TRY(disk_lock(fd.get(), folder));
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return folder_error("stat " + path);
  if (status.st_nlink == 0) return Error{Code::busy, 0, folder + ": another process has removed it"};
  return fd;
}

// How many parts there are.  Errors: not_found, invalid (something else is in it), corrupt (one is missing), io.
Result<std::size_t> parts_of(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::opendir(folder.c_str()), ::closedir);
  if (!listing) {
    if (errno == ENOTDIR) return Error{Code::invalid, ENOTDIR, folder + ": not a folder"};
    return folder_error("open " + folder);
  }
  std::vector<std::size_t> numbers;
  bool others = false;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(listing.get());
    if (entry == nullptr && errno != 0) return folder_error("read " + folder);
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name == "." || name == ".." || name == lock_name) continue;
    std::size_t number = 0;
    const std::string_view digits = name.starts_with(part_prefix) ? name.substr(part_prefix.size()) : "";
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (digits.empty() || error != std::errc{} || end != digits.data() + digits.size()) {
      others = true;
    } else {
      numbers.push_back(number);
    }
  }
  if (numbers.empty()) {
    if (others) return Error{Code::invalid, 0, folder + ": the folder has something in it that is no volume"};
    return Error{Code::not_found, ENOENT, folder + ": the folder is empty"};
  }
  std::sort(numbers.begin(), numbers.end());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] != i) return Error{Code::corrupt, 0, part_path(folder, i) + " is missing"};
  }
  return numbers.size();
}

}  // namespace

Result<DiskFile> folder_open(const std::string& folder) {
  const Result<std::size_t> count = parts_of(folder);
  if (!count) return count.error();
  Result<Fd> lock = folder_lock(folder);
  if (!lock) return lock.error();
  std::vector<std::unique_ptr<Part>> parts;
  std::uint64_t part_bytes = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < *count; ++i) {
    auto part = std::make_unique<Part>();
    part->path = part_path(folder, i);
    part->fd = Fd(::open(part->path.c_str(), O_RDWR | O_CLOEXEC));
    if (!part->fd.valid()) return folder_error("open " + part->path);
    // Somebody may have removed the other lock.
    if (i == 0) DI_TRY(disk_lock(part->fd.get(), folder));
    struct stat status {};
    if (::fstat(part->fd.get(), &status) != 0) return folder_error("stat " + part->path);
    const auto length = static_cast<std::uint64_t>(std::max<off_t>(status.st_size, 0));
    if (i == 0) part_bytes = length;
    const bool last = i + 1 == *count;
    if (!S_ISREG(status.st_mode) || length == 0 || !disk_aligned(length) || length > part_bytes ||
        (!last && length != part_bytes)) {
      return Error{Code::corrupt, 0, part->path + ": not the length of a part: it was cut short, or is none"};
    }
    bytes += length;
    parts.push_back(std::move(part));
  }
  DiskFile file;
  file.disk = std::make_unique<FolderDisk>(*std::move(lock), folder, std::move(parts), part_bytes, bytes);
  return file;
}

Result<DiskFile> folder_create(const std::string& folder, std::uint64_t bytes, bool prewrite,
                               const std::function<void(std::uint64_t)>& progress,
                               std::uint64_t part_bytes_max) {
  DI_ASSERT(bytes > 0 && disk_aligned(bytes) && part_bytes_max > 0 && disk_aligned(part_bytes_max));
  if (::mkdir(folder.c_str(), 0750) != 0) return folder_error("make " + folder);
  const auto make = [&]() -> Result<DiskFile> {
    Result<Fd> lock = folder_lock(folder);
    if (!lock) return lock.error();
    const std::uint64_t part_bytes =
        std::max(std::min(bytes, part_bytes_max),
                 align_up((bytes + folder_parts_max - 1) / folder_parts_max, disk_align_bytes));
    std::vector<std::unique_ptr<Part>> parts;
    for (std::uint64_t at = 0; at < bytes; at += part_bytes) {
      auto part = std::make_unique<Part>();
      part->path = part_path(folder, parts.size());
      part->fd = Fd(::open(part->path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0640));
      if (!part->fd.valid()) return folder_error("open " + part->path);
      if (at == 0) DI_TRY(disk_lock(part->fd.get(), folder));
      // Space is taken now, as far as the file system has a notion of that.
      const auto length = static_cast<off_t>(std::min(part_bytes, bytes - at));
      if (const int failed = ::posix_fallocate(part->fd.get(), 0, length); failed != 0) {
        return folder_error("allocate " + part->path, failed);
      }
      part->written.store(true);  // its length is to be durable
      parts.push_back(std::move(part));
    }
    DiskFile file;
    file.disk = std::make_unique<FolderDisk>(*std::move(lock), folder, std::move(parts), part_bytes, bytes);
    if (prewrite) DI_TRY(disk_prewrite(*file.disk, progress));
    DI_TRY(file.disk->flush());
    DI_TRY(names_flush(folder));
    return file;
  };
  Result<DiskFile> made = make();
  if (!made) static_cast<void>(folder_remove(folder));
  return made;
}

Status folder_remove(const std::string& folder) {
  const Result<Fd> lock = folder_lock(folder);
  if (!lock && lock.error().code == Code::not_found) return {};
  if (!lock) return lock.error();
  // Whatever its numbers are: an attempt may have ended anywhere.
  for (std::size_t number = 0; ::unlink(part_path(folder, number).c_str()) == 0; ++number) {
  }
  ::unlink((folder + "/" + std::string(lock_name)).c_str());
  ::rmdir(folder.c_str());
  return {};
}

Status folder_rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) return folder_error("rename " + from);
  return name_flush(to);
}

}  // namespace di::store
