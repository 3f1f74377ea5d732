// store/disk_folder.h: a disk that is a folder of files, for file systems of other machines (3FS, CephFS, NFS).
//
// The bytes lie one after the other in part.0, part.1, ..., all as long as the first one but the last.  None is
// longer than folder_part_bytes_max, unless that made more than folder_parts_max: such file systems spread and
// recover whole files.  Nothing here wants O_DIRECT, one length for all, or a single writer's cache: flush() asks
// each file that was written to.  A folder gets its name when it is whole, and a lock on the file
// `lock` in it, and one on the first part, keep a second process out, where the file system passes locks on to other
// machines on those, too.
//
// Threads: as of store/disk.h.  Bounds: folder_parts_max open files.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"
#include "store/disk.h"

namespace di::store {

inline constexpr std::uint64_t folder_part_bytes_max = std::uint64_t{1} << 30;
inline constexpr std::size_t folder_parts_max = 256;

// Errors: as of disk_open; not_found also for a folder with nothing in it, invalid for one with something else.
Result<DiskFile> folder_open(const std::string& folder);
// Errors: as of disk_create.
Result<DiskFile> folder_create(const std::string& folder, std::uint64_t bytes, bool prewrite,
                               const std::function<void(std::uint64_t)>& progress = {},
                               std::uint64_t part_bytes_max = folder_part_bytes_max);
// The parts, the lock and the folder, if there is one; what else is in it stays, and with it the folder.  Errors: busy.
Status folder_remove(const std::string& folder);
// `to` must not exist, or be an empty folder; the name is durable afterwards.
Status folder_rename(const std::string& from, const std::string& to);

}  // namespace di::store
