// base/file.h: a whole file in memory, for files that are read once at start.
#pragma once

#include <cstddef>
#include <string>

#include "base/result.h"

namespace di {

// Reads the regular file at `path`.  Blocks.  Errors carry the path: what open and read say, and
// `invalid` when it is no regular file or holds more than `bytes_max`.
[[nodiscard]] Result<std::string> file_read(const std::string& path, std::size_t bytes_max);

}  // namespace di
