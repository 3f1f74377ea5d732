#include "directory/catalogue.h"

#include <fcntl.h>
#include <sys/file.h>

#include <array>
#include <cerrno>

#include "base/crypto.h"

namespace di::directory {

namespace {

// "DICT" in SQLite's application_id: a database of something else is not written to.
constexpr std::int64_t application_id = 0x44494354;

Result<std::int64_t> pragma_value(sqlite::Database& database, std::string_view pragma) {
  auto statement = database.prepare(pragma);
  if (!statement) return statement.error();
  const auto row = statement->step();
  if (!row) return row.error();
  return *row ? statement->column_i64(0) : 0;
}

Status insert_fleet(sqlite::Database& database, std::string_view name, ByteView value) {
  auto statement = database.prepare("INSERT INTO fleet(name, value) VALUES(?, ?)");
  if (!statement) return statement.error();
  return statement->bind(1, name).bind(2, value).run();
}

Result<Bytes> read_fleet(sqlite::Database& database, std::string_view name, std::size_t bytes) {
  auto statement = database.prepare("SELECT value FROM fleet WHERE name = ?");
  if (!statement) return statement.error();
  const auto row = statement->bind(1, name).step();
  if (!row) return row.error();
  if (!*row) return Error{Code::corrupt, 0, "no row '" + std::string(name) + "'"};
  Bytes value = statement->column_blob(0);
  if (value.size() != bytes)
    return Error{Code::corrupt, 0, "row '" + std::string(name) + "' has a wrong length"};
  return value;
}

Status create(sqlite::Database& database) {
  Bytes secret(32);
  random_bytes(secret);
  // From 1 up: an unset field must not look like a cluster.
  std::array<std::byte, 4> cluster;
  put_le<std::uint32_t>(cluster.data(), static_cast<std::uint32_t>(random_u64() >> 33) + 1);
  std::array<std::byte, 8> run{};
  DI_TRY(
      database.exec("CREATE TABLE fleet(name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;"
                    "CREATE TABLE instance(name TEXT PRIMARY KEY, id INTEGER NOT NULL UNIQUE,"
                    " generation INTEGER NOT NULL, boot INTEGER NOT NULL) WITHOUT ROWID;"));
  DI_TRY(insert_fleet(database, "secret", secret));
  DI_TRY(insert_fleet(database, "cluster", cluster));
  DI_TRY(insert_fleet(database, "run", run));
  DI_TRY(database.exec("PRAGMA application_id=" + std::to_string(application_id)));
  return database.exec("PRAGMA user_version=" + std::to_string(catalogue_schema_version));
}

}  // namespace

Catalogue::Catalogue(std::string path, Fd lock, sqlite::Database database, sqlite::Statement upsert)
    : path_(std::move(path)),
      lock_(std::move(lock)),
      database_(std::move(database)),
      upsert_(std::move(upsert)) {}

Status Catalogue::create_or_check(sqlite::Database& database) {
  const auto application = pragma_value(database, "PRAGMA application_id");
  if (!application) return application.error();
  const auto version = pragma_value(database, "PRAGMA user_version");
  if (!version) return version.error();
  const auto tables = pragma_value(database, "SELECT count(*) FROM sqlite_master");
  if (!tables) return tables.error();
  if (*application == 0 && *version == 0 && *tables == 0) return create(database);
  if (*application != application_id) return Error{Code::corrupt, 0, "not a catalogue of di-meta"};
  if (*version > catalogue_schema_version) {
    return Error{Code::unsupported, 0,
                 "schema version " + std::to_string(*version) + " is newer than this program's " +
                     std::to_string(catalogue_schema_version)};
  }
  auto check = database.prepare("PRAGMA quick_check(1)");
  if (!check) return check.error();
  const auto row = check->step();
  if (!row) return row.error();
  const std::string verdict = *row ? check->column_text(0) : "no answer";
  if (verdict != "ok") return Error{Code::corrupt, 0, "integrity check: " + verdict};
  return {};
}

Result<Catalogue> Catalogue::open(const std::string& path) {
  const std::string what = "catalogue " + path;
  // A file of its own for the lock: closing any descriptor of the database would drop SQLite's locks.
  Fd lock(::open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock.valid()) return errno_error(what);
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return Error{Code::busy, errno, what + ": another di-meta has it open"};
  }
  // SQLite gives its side files the mode of the main file, so that is made first.
  Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!file.valid()) return errno_error(what);
  file.reset();
  auto database = sqlite::Database::open(path, sqlite::Synchronous::full);
  if (!database) return database.error().in("catalogue");
  const auto fail = [&](const Error& error) { return error.in(what); };
  // One transaction makes or checks the file and counts the start: a half-made catalogue is never seen.
  if (const Status s = database->exec("BEGIN IMMEDIATE"); !s) return fail(s.error());
  if (const Status s = create_or_check(*database); !s) return fail(s.error());
  const auto secret = read_fleet(*database, "secret", 32);
  if (!secret) return fail(secret.error());
  const auto cluster = read_fleet(*database, "cluster", 4);
  if (!cluster) return fail(cluster.error());
  auto run = read_fleet(*database, "run", 8);
  if (!run) return fail(run.error());
  const std::uint64_t number = get_le<std::uint64_t>(run->data()) + 1;
  put_le<std::uint64_t>(run->data(), number);
  auto count = database->prepare("UPDATE fleet SET value = ? WHERE name = 'run'");
  if (!count) return fail(count.error());
  if (const Status s = count->bind(1, ByteView(*run)).run(); !s) return fail(s.error());
  if (const Status s = database->exec("COMMIT"); !s) return fail(s.error());

  auto upsert = database->prepare(
      "INSERT INTO instance(name, id, generation, boot) VALUES(?, ?, ?, ?)"
      " ON CONFLICT(name) DO UPDATE SET generation = excluded.generation, boot = excluded.boot");
  if (!upsert) return fail(upsert.error());
  Catalogue catalogue(path, std::move(lock), std::move(*database), std::move(*upsert));
  catalogue.secret_ = *secret;
  catalogue.cluster_ = get_le<std::uint32_t>(cluster->data());
  catalogue.run_ = number;
  return catalogue;
}

Result<std::vector<InstanceRow>> Catalogue::instances() {
  auto select = database_.prepare("SELECT name, id, generation, boot FROM instance ORDER BY name");
  if (!select) return select.error().in("catalogue " + path_);
  std::vector<InstanceRow> rows;
  for (;;) {
    const auto row = select->step();
    if (!row) return row.error().in("catalogue " + path_);
    if (!*row) return rows;
    rows.push_back({select->column_text(0), static_cast<std::uint32_t>(select->column_i64(1)),
                    static_cast<std::uint32_t>(select->column_i64(2)),
                    static_cast<std::uint64_t>(select->column_i64(3))});
  }
}

Status Catalogue::save(const InstanceRow& row) {
  const Status saved = upsert_.bind(1, row.instance)
                           .bind(2, static_cast<std::int64_t>(row.id))
                           .bind(3, static_cast<std::int64_t>(row.generation))
                           .bind(4, static_cast<std::int64_t>(row.boot))
                           .run();
  if (!saved) return saved.error().in("catalogue " + path_);
  return {};
}

}  // namespace di::directory
