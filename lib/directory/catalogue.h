// directory/catalogue.h: what di-meta must not forget, in one SQLite file.
//
// Generations of every instance, the namespace secret, the cluster number, the number of starts ("run", which
// keeps stripe, lease and epoch numbers of two starts apart), when the last of them were, and the stores that the
// operator drains.  They are written with synchronous=FULL before they are used: by a RowWriter, many in one
// transaction.
//
// Beside them a row per committed stripe, so that a start finds what is cached before the stores have told
// what they hold.  The rows are a copy: the truth is on the stores, what they do not confirm goes, and the
// last batches may be missing after a crash.
//
// The writers and the copier have connections of their own and belong to the threads that use them: a disk that
// hangs, or a file that somebody has locked, holds up nobody else.
//
// Schema 1 had no stripes and no drained stores, schema 2 no tenants of stripes, schema 3 no times: what is there
// then is as old as the migration.  All are migrated at open, in one transaction.
//
// Owner: the directory's thread, which reads it when it starts.  One process at a
// time: PATH.lock is locked for as long as it is open.  The file holds a secret: mode 0600.
// Bounds: membership's instance_rows_max rows; a row per stripe of the index; run_starts_max starts.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "base/result.h"
#include "base/sqlite.h"
#include "directory/membership.h"
#include "directory/stripes.h"

namespace di::directory {

inline constexpr std::int64_t catalogue_schema_version = 4;
// Of so many starts it is known when they were; those before them count as the first.
inline constexpr std::uint64_t run_starts_max = 1024;

// Writes the rows of stripes, a batch in a transaction.  Owner: one thread, not that of the catalogue.
class StripeWriter {
 public:
  // Errors: io, no_space, busy; the batch may be written again.
  Status write(std::span<const StripeChange> changes);

  // Used again for each row.
  struct Scratch {
    Bytes pages;
    Bytes keys;
    Bytes crcs;
    Bytes columns;
  };

 private:
  friend class Catalogue;
  StripeWriter(sqlite::Database database, sqlite::Statement put, sqlite::Statement erase)
      : database_(std::move(database)), put_(std::move(put)), erase_(std::move(erase)) {}
  sqlite::Database database_;
  sqlite::Statement put_;
  sqlite::Statement erase_;
  Scratch scratch_;
};

// The row of a name that is given up.  What has been issued goes with it, so that its numbers are not given out
// again.
struct RowGone {
  std::string instance;
  std::uint32_t id = 0;
  Issued issued;
};
// The operator drains a store, or does not any more.
struct StoreLeaves {
  std::string instance;
  bool leaves = false;
};
using RowChange = std::variant<InstanceRow, RowGone, StoreLeaves>;

// Writes what must not be forgotten.  Owner: one thread.
class RowWriter {
 public:
  // In this order, in one transaction; durable when it returns.  Errors: io, no_space, busy (after five seconds);
  // then nothing of it is written.
  Status write(std::span<const RowChange> changes);

 private:
  friend class Catalogue;
  explicit RowWriter(sqlite::Database database) : database_(std::move(database)) {}
  sqlite::Database database_;
};

// Copies the catalogue while it is used.  Owner: one thread.
class CatalogueCopier {
 public:
  // The whole catalogue, as of now, into a file that is not there yet, with mode 0600; the bytes of the copy.  It is
  // one to start from: the run, the numbers and the generations of a start from it are above all that may have been
  // issued between the copy and the loss of the original.  Errors: exists, io, no_space, cancelled; then there is no
  // file.
  Result<std::uint64_t> copy(const std::string& path);
  // Any thread.
  void interrupt() { database_.interrupt(); }

 private:
  friend class Catalogue;
  explicit CatalogueCopier(sqlite::Database database) : database_(std::move(database)) {}
  Result<std::uint64_t> fill(const std::string& path);
  sqlite::Database database_;
};

class Catalogue {
 public:
  // Opens `path`, or makes it with a new secret and cluster number, and counts this start.
  // Errors carry the path: corrupt (not a catalogue, or SQLite's integrity check failed), unsupported
  // (a newer schema), busy (another di-meta has it), io, denied, no_space.
  static Result<Catalogue> open(const std::string& path);

  [[nodiscard]] const Bytes& secret() const { return secret_; }  // 32 bytes
  [[nodiscard]] std::uint32_t cluster() const { return cluster_; }
  [[nodiscard]] std::uint64_t run() const { return run_; }
  // Second by the wall, by run; this one is among them, and 0: when the first time was kept.
  [[nodiscard]] const std::map<std::uint64_t, std::uint32_t>& run_starts() const { return run_starts_; }
  [[nodiscard]] Result<std::vector<InstanceRow>> instances();
  // What the rows that were given up leave behind.
  [[nodiscard]] Result<Issued> issued();

  // Stores that the operator drains, in order.
  [[nodiscard]] Result<std::vector<std::string>> leaving();

  // Every stripe in the order of ids; a row that cannot be read is passed over and counted.
  struct Loaded {
    std::uint64_t rows = 0;
    std::uint64_t malformed = 0;
  };
  Result<Loaded> load_stripes(const std::function<void(const StripeRow&)>& each);
  Result<StripeWriter> stripe_writer();
  Result<RowWriter> row_writer();
  Result<CatalogueCopier> copier();

 private:
  Catalogue(std::string path, Fd lock, sqlite::Database database);
  static Status create_or_check(sqlite::Database& database);

  std::string path_;
  Fd lock_;
  sqlite::Database database_;
  Bytes secret_;
  std::uint32_t cluster_ = 0;
  std::uint64_t run_ = 0;
  std::map<std::uint64_t, std::uint32_t> run_starts_;
};

}  // namespace di::directory
