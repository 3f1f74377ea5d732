// model/mapped_file.h: a file's bytes where the kernel keeps them, for weights too large to read.
#pragma once

#include <cstddef>
#include <string>

#include "base/bytes.h"
#include "base/result.h"

namespace di::model {

// A file mapped read-only, private to the owner; unmapped on destruction.  Someone who shortens the
// file while it is mapped causes SIGBUS at the next access, so model folders are replaced, not edited.
class MappedFile {
 public:
  MappedFile() = default;
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Errors: not_found, denied, io; invalid for anything but a regular file.
  [[nodiscard]] static Result<MappedFile> open(const std::string& path);

  [[nodiscard]] ByteView bytes() const { return {data_, bytes_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace di::model
