#include "directory/catalogue.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>

#include "base/clock.h"
#include "base/crypto.h"
#include "base/file.h"

namespace di::directory {

namespace {

// "DICT" in SQLite's application_id: a database of something else is not written to.
constexpr std::int64_t application_id = 0x44494354;

Result<std::int64_t> one_value(sqlite::Database& database, std::string_view sql) {
  auto statement = database.prepare(sql);
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

// A row of the fleet that is not there before the first name is given up.
Result<Issued> read_issued(sqlite::Database& database) {
  const auto rows = one_value(database, "SELECT count(*) FROM fleet WHERE name = 'issued'");
  if (!rows) return rows.error();
  if (*rows == 0) return Issued{};
  const auto value = read_fleet(database, "issued", 8);
  if (!value) return value.error();
  return Issued{get_le<std::uint32_t>(value->data()), get_le<std::uint32_t>(value->data() + 4)};
}

Status write_issued(sqlite::Database& database, const Issued& issued) {
  std::array<std::byte, 8> value;
  put_le<std::uint32_t>(value.data(), issued.next_id);
  put_le<std::uint32_t>(value.data() + 4, issued.generation);
  auto statement = database.prepare("INSERT OR REPLACE INTO fleet(name, value) VALUES('issued', ?)");
  if (!statement) return statement.error();
  return statement->bind(1, ByteView(value)).run();
}

// More than there may be between a copy and the loss of the original.  A run has 24 bits, the others 32.
constexpr std::uint64_t copy_run_step = 1 << 14;
constexpr std::uint32_t copy_issued_step = 1 << 20;

// In a copy: what a start from it issues is above what the original may have issued since.
Status step_over(sqlite::Database& copy) {
  auto run = read_fleet(copy, "run", 8);
  if (!run) return run.error();
  put_le<std::uint64_t>(run->data(), get_le<std::uint64_t>(run->data()) + copy_run_step);
  auto set_run = copy.prepare("UPDATE fleet SET value = ? WHERE name = 'run'");
  if (!set_run) return set_run.error();
  DI_TRY(set_run->bind(1, ByteView(*run)).run());
  auto issued = read_issued(copy);
  if (!issued) return issued.error();
  const auto id = one_value(copy, "SELECT coalesce(max(id), 0) FROM instance");
  if (!id) return id.error();
  const auto generation = one_value(copy, "SELECT coalesce(max(generation), 0) FROM instance");
  if (!generation) return generation.error();
  issued->next_id = std::max(issued->next_id, static_cast<std::uint32_t>(*id) + 1) + copy_issued_step;
  issued->generation =
      std::max(issued->generation, static_cast<std::uint32_t>(*generation)) + copy_issued_step;
  return write_issued(copy, *issued);
}

constexpr const char* schema_1 =
    "CREATE TABLE fleet(name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE instance(name TEXT PRIMARY KEY, id INTEGER NOT NULL UNIQUE,"
    " generation INTEGER NOT NULL, boot INTEGER NOT NULL) WITHOUT ROWID;";
// pages: blocks u32, segments u32, bytes u64 of each; crcs: u32 each, those of the pages, then those of the
// code; columns: column u16, volume u16, length u16 and name of the store.  Little-endian.
constexpr const char* schema_2 =
    "CREATE TABLE stripe(id INTEGER PRIMARY KEY, layout BLOB NOT NULL, k INTEGER NOT NULL, m INTEGER NOT "
    "NULL,"
    " parent BLOB NOT NULL, pages BLOB NOT NULL, keys BLOB NOT NULL, crcs BLOB NOT NULL,"
    " columns BLOB NOT NULL);"
    "CREATE TABLE leaving(name TEXT PRIMARY KEY) WITHOUT ROWID;";
// Bits of an unsigned number.
constexpr const char* schema_3 = "ALTER TABLE stripe ADD COLUMN tenant INTEGER NOT NULL DEFAULT 0;";
// Seconds since 1970; 0: of a row of before.
constexpr const char* schema_4 =
    "ALTER TABLE stripe ADD COLUMN born INTEGER NOT NULL DEFAULT 0;"
    "CREATE TABLE run(number INTEGER PRIMARY KEY, began INTEGER NOT NULL);";

Status set_version(sqlite::Database& database) {
  return database.exec("PRAGMA user_version=" + std::to_string(catalogue_schema_version));
}

// ---- Starts ------------------------------------------------------------------------------------

Status insert_run(sqlite::Database& database, std::uint64_t run) {
  auto insert = database.prepare("INSERT OR REPLACE INTO run(number, began) VALUES(?, ?)");
  if (!insert) return insert.error();
  return insert->bind(1, static_cast<std::int64_t>(run)).bind(2, wall_clock_ms() / 1000).run();
}

Status migrate_to_4(sqlite::Database& database) {
  DI_TRY(database.exec(schema_4));
  return insert_run(database, 0);
}

// Counts this one, and forgets the oldest but for 0.
Result<std::map<std::uint64_t, std::uint32_t>> note_run(sqlite::Database& database, std::uint64_t run) {
  if (const Status s = insert_run(database, run); !s) return s.error();
  auto erase = database.prepare(
      "DELETE FROM run WHERE number > 0 AND number NOT IN (SELECT number FROM run ORDER BY number DESC LIMIT "
      "?)");
  if (!erase) return erase.error();
  if (const Status s = erase->bind(1, std::int64_t{run_starts_max}).run(); !s) return s.error();
  auto select = database.prepare("SELECT number, began FROM run");
  if (!select) return select.error();
  std::map<std::uint64_t, std::uint32_t> starts;
  for (;;) {
    const auto row = select->step();
    if (!row) return row.error();
    if (!*row) return starts;
    starts.emplace(static_cast<std::uint64_t>(select->column_i64(0)),
                   static_cast<std::uint32_t>(select->column_i64(1)));
  }
}

// ---- Rows of stripes ---------------------------------------------------------------------------

// Puts values behind each other; the bytes are there.
class Filler {
 public:
  explicit Filler(Bytes& out, std::size_t bytes) : at_((out.resize(bytes), out.data())) {}
  template <class T>
  Filler& number(T value) {
    put_le<T>(at_, value);
    at_ += sizeof(T);
    return *this;
  }
  Filler& raw(ByteView bytes) {
    std::copy(bytes.begin(), bytes.end(), at_);
    at_ += bytes.size();
    return *this;
  }

 private:
  std::byte* at_;
};

// Takes values off the front; false, for good, when there are too few bytes.
class Reader {
 public:
  explicit Reader(ByteView bytes) : bytes_(bytes) {}
  template <class T>
  T number() {
    const ByteView raw = take(sizeof(T));
    return ok_ ? get_le<T>(raw.data()) : T{};
  }
  ByteView take(std::size_t count) {
    if (count > bytes_.size()) ok_ = false;
    if (!ok_) return {};
    const ByteView raw = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return raw;
  }
  [[nodiscard]] bool ok() const { return ok_; }
  [[nodiscard]] bool at_end() const { return ok_ && bytes_.empty(); }
  [[nodiscard]] std::size_t left() const { return bytes_.size(); }

 private:
  ByteView bytes_;
  bool ok_ = true;
};

bool read_key(ByteView raw, Key& key) {
  if (raw.size() != key.raw.size()) return false;
  std::copy(raw.begin(), raw.end(), key.raw.begin());
  return true;
}

Status bind_row(sqlite::Statement& put, const StripeRow& row, StripeWriter::Scratch& scratch) {
  std::size_t blocks = 0;
  std::size_t crc_count = row.code.crcs.size();
  std::size_t names = 0;
  for (const wire::PutPage& page : row.pages) {
    blocks += page.keys.size();
    crc_count += page.crcs.size();
  }
  for (const wire::Column& column : row.columns) names += column.instance.size();
  Filler pages(scratch.pages, row.pages.size() * 16);
  Filler keys(scratch.keys, blocks * sizeof(Key));
  Filler crcs(scratch.crcs, crc_count * sizeof(std::uint32_t));
  Filler columns(scratch.columns, row.columns.size() * 6 + names);
  for (const wire::PutPage& page : row.pages) {
    pages.number(static_cast<std::uint32_t>(page.keys.size()));
    pages.number(static_cast<std::uint32_t>(page.crcs.size()));
    pages.number(page.bytes);
    for (const Key& key : page.keys) keys.raw(key.raw);
    for (const std::uint32_t crc : page.crcs) crcs.number(crc);
  }
  for (const std::uint32_t crc : row.code.crcs) crcs.number(crc);
  for (const wire::Column& column : row.columns) {
    columns.number(column.column).number(column.volume);
    columns.number(static_cast<std::uint16_t>(column.instance.size())).raw(as_bytes(column.instance));
  }
  return put.bind(1, static_cast<std::int64_t>(row.id))
      .bind(2, ByteView(row.fingerprint.raw))
      .bind(3, std::int64_t{row.code.data_columns})
      .bind(4, std::int64_t{row.code.parity_columns})
      .bind(5, ByteView(row.pages.front().parent.raw))
      .bind(6, ByteView(scratch.pages))
      .bind(7, ByteView(scratch.keys))
      .bind(8, ByteView(scratch.crcs))
      .bind(9, ByteView(scratch.columns))
      .bind(10, static_cast<std::int64_t>(row.tenant))
      .bind(11, std::int64_t{row.born_s})
      .run();
}

// What the index makes of the values is its business; here only the lengths have to agree.
std::optional<StripeRow> read_row(const sqlite::Statement& select) {
  StripeRow row;
  row.id = static_cast<std::uint64_t>(select.column_i64(0));
  const std::int64_t k = select.column_i64(2);
  const std::int64_t m = select.column_i64(3);
  if (k < 0 || k > UINT16_MAX || m < 0 || m > UINT16_MAX) return std::nullopt;
  row.code.data_columns = static_cast<std::uint16_t>(k);
  row.code.parity_columns = static_cast<std::uint16_t>(m);
  row.tenant = static_cast<std::uint64_t>(select.column_i64(9));
  row.born_s = static_cast<std::uint32_t>(std::clamp<std::int64_t>(select.column_i64(10), 0, UINT32_MAX));
  Key parent;
  if (!read_key(select.column_blob(1), row.fingerprint) || !read_key(select.column_blob(4), parent)) {
    return std::nullopt;
  }
  const Bytes page_bytes = select.column_blob(5);
  const Bytes key_bytes = select.column_blob(6);
  const Bytes crc_bytes = select.column_blob(7);
  const Bytes column_bytes = select.column_blob(8);
  Reader pages(page_bytes);
  Reader keys(key_bytes);
  Reader crcs(crc_bytes);
  Reader columns(column_bytes);
  while (pages.left() > 0) {
    wire::PutPage page;
    page.parent = parent;
    const auto blocks = pages.number<std::uint32_t>();
    const auto segments = pages.number<std::uint32_t>();
    page.bytes = pages.number<std::uint64_t>();
    if (!pages.ok() || blocks == 0 || blocks > page_keys_max || segments > page_segments_max)
      return std::nullopt;
    for (std::uint32_t i = 0; i < blocks; ++i) {
      if (!read_key(keys.take(sizeof(Key)), page.keys.emplace_back())) return std::nullopt;
    }
    for (std::uint32_t i = 0; i < segments; ++i) page.crcs.push_back(crcs.number<std::uint32_t>());
    parent = page.keys.back();
    row.pages.push_back(std::move(page));
  }
  while (crcs.ok() && crcs.left() > 0) row.code.crcs.push_back(crcs.number<std::uint32_t>());
  while (columns.ok() && columns.left() > 0) {
    wire::Column column;
    column.column = columns.number<std::uint16_t>();
    column.volume = columns.number<std::uint16_t>();
    column.instance = as_text(columns.take(columns.number<std::uint16_t>()));
    row.columns.push_back(std::move(column));
  }
  if (!keys.at_end() || !crcs.at_end() || !columns.at_end()) return std::nullopt;
  return row;
}

Status create(sqlite::Database& database) {
  Bytes secret(32);
  random_bytes(secret);
  // From 1 up: an unset field must not look like a cluster.
  std::array<std::byte, 4> cluster;
  put_le<std::uint32_t>(cluster.data(), static_cast<std::uint32_t>(random_u64() >> 33) + 1);
  std::array<std::byte, 8> run{};
  DI_TRY(database.exec(schema_1));
  DI_TRY(database.exec(schema_2));
  DI_TRY(database.exec(schema_3));
  DI_TRY(migrate_to_4(database));
  DI_TRY(insert_fleet(database, "secret", secret));
  DI_TRY(insert_fleet(database, "cluster", cluster));
  DI_TRY(insert_fleet(database, "run", run));
  DI_TRY(database.exec("PRAGMA application_id=" + std::to_string(application_id)));
  return set_version(database);
}

}  // namespace

Catalogue::Catalogue(std::string path, Fd lock, sqlite::Database database)
    : path_(std::move(path)), lock_(std::move(lock)), database_(std::move(database)) {}

Status Catalogue::create_or_check(sqlite::Database& database) {
  const auto application = one_value(database, "PRAGMA application_id");
  if (!application) return application.error();
  const auto version = one_value(database, "PRAGMA user_version");
  if (!version) return version.error();
  const auto tables = one_value(database, "SELECT count(*) FROM sqlite_master");
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
  if (*version == catalogue_schema_version) return {};
  if (*version < 2) DI_TRY(database.exec(schema_2));
  if (*version < 3) DI_TRY(database.exec(schema_3));
  if (*version < 4) DI_TRY(migrate_to_4(database));
  return set_version(database);
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
  auto starts = note_run(*database, number);
  if (!starts) return fail(starts.error());
  if (const Status s = database->exec("COMMIT"); !s) return fail(s.error());

  Catalogue catalogue(path, std::move(lock), std::move(*database));
  catalogue.secret_ = *secret;
  catalogue.cluster_ = get_le<std::uint32_t>(cluster->data());
  catalogue.run_ = number;
  catalogue.run_starts_ = *std::move(starts);
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

Result<Issued> Catalogue::issued() {
  auto read = read_issued(database_);
  if (!read) return read.error().in("catalogue " + path_);
  return read;
}

// ---- Drained stores ----------------------------------------------------------------------------

Result<std::vector<std::string>> Catalogue::leaving() {
  auto select = database_.prepare("SELECT name FROM leaving ORDER BY name");
  if (!select) return select.error().in("catalogue " + path_);
  std::vector<std::string> names;
  for (;;) {
    const auto row = select->step();
    if (!row) return row.error().in("catalogue " + path_);
    if (!*row) return names;
    names.push_back(select->column_text(0));
  }
}

// ---- What must not be forgotten ----------------------------------------------------------------

Result<RowWriter> Catalogue::row_writer() {
  auto database = sqlite::Database::open(path_, sqlite::Synchronous::full);
  if (!database) return database.error().in("catalogue");
  return RowWriter(std::move(*database));
}

Status RowWriter::write(std::span<const RowChange> changes) {
  const auto run = [this](std::string_view sql, const auto& bind) -> Status {
    auto statement = database_.prepare(sql);
    if (!statement) return statement.error();
    return bind(*statement).run();
  };
  const auto one = [&](const RowChange& change) -> Status {
    if (const auto* row = std::get_if<InstanceRow>(&change)) {
      // Whatever the file has under this name or number: memory is right.
      return run("INSERT OR REPLACE INTO instance(name, id, generation, boot) VALUES(?, ?, ?, ?)",
                 [&](sqlite::Statement& put) -> sqlite::Statement& {
                   return put.bind(1, row->instance)
                       .bind(2, static_cast<std::int64_t>(row->id))
                       .bind(3, static_cast<std::int64_t>(row->generation))
                       .bind(4, static_cast<std::int64_t>(row->boot));
                 });
    }
    if (const auto* gone = std::get_if<RowGone>(&change)) {
      DI_TRY(write_issued(database_, gone->issued));
      return run("DELETE FROM instance WHERE name = ? AND id = ?",
                 [&](sqlite::Statement& erase) -> sqlite::Statement& {
                   return erase.bind(1, gone->instance).bind(2, static_cast<std::int64_t>(gone->id));
                 });
    }
    const auto& store = std::get<StoreLeaves>(change);
    return run(
        store.leaves ? "INSERT OR IGNORE INTO leaving(name) VALUES(?)" : "DELETE FROM leaving WHERE name = ?",
        [&](sqlite::Statement& set) -> sqlite::Statement& { return set.bind(1, store.instance); });
  };
  DI_TRY(database_.exec("BEGIN IMMEDIATE"));
  Status written;
  for (const RowChange& change : changes) {
    if (written) written = one(change);
  }
  if (written) written = database_.exec("COMMIT");
  if (!written) static_cast<void>(database_.exec("ROLLBACK"));
  return written;
}

// ---- Stripes -----------------------------------------------------------------------------------

Result<Catalogue::Loaded> Catalogue::load_stripes(const std::function<void(const StripeRow&)>& each) {
  auto select = database_.prepare(
      "SELECT id, layout, k, m, parent, pages, keys, crcs, columns, tenant, born FROM stripe ORDER BY id");
  if (!select) return select.error().in("catalogue " + path_);
  Loaded loaded;
  for (;;) {
    const auto row = select->step();
    if (!row) return row.error().in("catalogue " + path_);
    if (!*row) return loaded;
    const auto stripe = read_row(*select);
    if (!stripe) {
      ++loaded.malformed;
      continue;
    }
    ++loaded.rows;
    each(*stripe);
  }
}

Result<StripeWriter> Catalogue::stripe_writer() {
  // What a crash of the machine takes with it the inventories bring back: no flush per batch.
  auto database = sqlite::Database::open(path_, sqlite::Synchronous::normal);
  if (!database) return database.error().in("catalogue");
  auto put = database->prepare(
      "INSERT OR REPLACE INTO stripe(id, layout, k, m, parent, pages, keys, crcs, columns, tenant, born)"
      " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
  if (!put) return put.error().in("catalogue " + path_);
  auto erase = database->prepare("DELETE FROM stripe WHERE id = ?");
  if (!erase) return erase.error().in("catalogue " + path_);
  return StripeWriter(std::move(*database), std::move(*put), std::move(*erase));
}

Status StripeWriter::write(std::span<const StripeChange> changes) {
  DI_TRY(database_.exec("BEGIN IMMEDIATE"));
  const auto one = [this](const StripeChange& change) {
    if (change.row) return bind_row(put_, *change.row, scratch_);
    return erase_.bind(1, static_cast<std::int64_t>(change.id)).run();
  };
  for (const StripeChange& change : changes) {
    if (const Status written = one(change); !written) {
      static_cast<void>(database_.exec("ROLLBACK"));
      return written;
    }
  }
  const Status committed = database_.exec("COMMIT");
  if (!committed) static_cast<void>(database_.exec("ROLLBACK"));
  return committed;
}

// ---- Copies ------------------------------------------------------------------------------------

Result<CatalogueCopier> Catalogue::copier() {
  auto database = sqlite::Database::open(path_, sqlite::Synchronous::normal);
  if (!database) return database.error().in("catalogue");
  return CatalogueCopier(std::move(*database));
}

Result<std::uint64_t> CatalogueCopier::copy(const std::string& path) {
  const std::string what = "backup " + path;
  // Made first, so that it has its mode before there is anything in it.
  Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid() && errno == EEXIST) return Error{Code::exists, errno, what + ": it is there"};
  if (!file.valid()) return errno_error(what);
  file.reset();
  const auto bytes = fill(path);
  if (bytes) return bytes;
  for (const char* suffix : {"", "-journal", "-wal", "-shm"}) ::unlink((path + suffix).c_str());
  return bytes.error().in(what);
}

Result<std::uint64_t> CatalogueCopier::fill(const std::string& path) {
  {
    auto vacuum = database_.prepare("VACUUM INTO ?");
    if (!vacuum) return vacuum.error();
    DI_TRY(vacuum->bind(1, path).run());
  }
  {
    auto copy = sqlite::Database::open(path, sqlite::Synchronous::full);
    if (!copy) return copy.error();
    DI_TRY(copy->exec("BEGIN IMMEDIATE"));
    DI_TRY(step_over(*copy));
    DI_TRY(copy->exec("COMMIT"));
    // Or closing it does so, which tells nobody of an error and leaves the rows in a file beside it.
    DI_TRY(copy->exec("PRAGMA wal_checkpoint(TRUNCATE)"));
  }
  struct stat status {};
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid() || ::fsync(file.get()) != 0 || ::fstat(file.get(), &status) != 0)
    return errno_error("sync");
  DI_TRY(name_flush(path));
  return static_cast<std::uint64_t>(status.st_size);
}

}  // namespace di::directory
