#include "model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

#include "base/fd.h"

namespace di::model {

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), bytes_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return errno_error(path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(path);
  if (!S_ISREG(info.st_mode)) return Error{Code::invalid, 0, path + ": is not a regular file"};
  MappedFile file;
  if (info.st_size == 0) return file;  // mmap refuses an empty range
  const auto file_bytes = static_cast<std::size_t>(info.st_size);
  void* at = ::mmap(nullptr, file_bytes, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (at == MAP_FAILED) return errno_error(path + ": mmap");
  file.data_ = static_cast<const std::byte*>(at);
  file.bytes_ = file_bytes;
  return file;
}

}  // namespace di::model
