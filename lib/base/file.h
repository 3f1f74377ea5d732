// base/file.h: small files as a whole: read once at start, written as one; and that names outlive a power cut.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/result.h"

namespace di {

// Reads the regular file at `path`.  Blocks.  Errors carry the path: what open and read say, and
// `invalid` when it is no regular file or holds more than `bytes_max`.
[[nodiscard]] Result<std::string> file_read(const std::string& path, std::size_t bytes_max);

// Replaces `path` by a file with this text: written beside it and renamed, so a reader sees the old text
// or the new one.  Blocks; not flushed to the disk.  Errors carry the path.
Status file_write(const std::string& path, std::string_view text);

// The names in a folder become durable, or those beside a path.  Blocks.  Errors: io; those of open.
Status names_flush(const std::string& folder);
Status name_flush(const std::string& path);

}  // namespace di
