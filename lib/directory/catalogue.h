// directory/catalogue.h: what di-meta must not forget, in one SQLite file.
//
// Generations of every instance, the namespace secret, the cluster number, and the number of starts
// ("run", which keeps stripe, lease and epoch numbers of two starts apart).  Everything is written
// with synchronous=FULL before it is used.  Blocks and stripes are not here: the directory is rebuilt
// from the stores' inventories.
//
// Owner: the directory's thread; calls block on the disk for a few milliseconds.  One process at a
// time: PATH.lock is locked for as long as it is open.  The file holds a secret: mode 0600.
// Bound: membership's instance_rows_max rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "base/result.h"
#include "base/sqlite.h"
#include "directory/membership.h"

namespace di::directory {

inline constexpr std::int64_t catalogue_schema_version = 1;

class Catalogue {
 public:
  // Opens `path`, or makes it with a new secret and cluster number, and counts this start.
  // Errors carry the path: corrupt (not a catalogue, or SQLite's integrity check failed), unsupported
  // (a newer schema), busy (another di-meta has it), io, denied, no_space.
  static Result<Catalogue> open(const std::string& path);

  [[nodiscard]] const Bytes& secret() const { return secret_; }  // 32 bytes
  [[nodiscard]] std::uint32_t cluster() const { return cluster_; }
  [[nodiscard]] std::uint64_t run() const { return run_; }
  [[nodiscard]] Result<std::vector<InstanceRow>> instances();
  // Durable when it returns.
  Status save(const InstanceRow& row);

 private:
  Catalogue(std::string path, Fd lock, sqlite::Database database, sqlite::Statement upsert);
  static Status create_or_check(sqlite::Database& database);

  std::string path_;
  Fd lock_;
  sqlite::Database database_;
  sqlite::Statement upsert_;
  Bytes secret_;
  std::uint32_t cluster_ = 0;
  std::uint64_t run_ = 0;
};

}  // namespace di::directory
