#include "base/sqlite.h"

#include <sqlite3.h>

#include "base/assert.h"

namespace di::sqlite {

namespace {

Error sqlite_error(sqlite3* db, int rc, std::string_view what) {
  Code code = Code::io;
  const int primary = rc & 0xff;
  if (primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB) code = Code::corrupt;
  if (primary == SQLITE_FULL) code = Code::no_space;
  if (primary == SQLITE_PERM || primary == SQLITE_READONLY || primary == SQLITE_AUTH) code = Code::denied;
  if (primary == SQLITE_BUSY || primary == SQLITE_LOCKED) code = Code::busy;
  if (primary == SQLITE_CONSTRAINT) code = Code::exists;
  if (primary == SQLITE_INTERRUPT) code = Code::cancelled;
  std::string message(what);
  message.append(": ").append(db != nullptr ? sqlite3_errmsg(db) : sqlite3_errstr(rc));
  return Error{code, 0, std::move(message)};
}

}  // namespace

struct Statement::State {
  sqlite3* db = nullptr;
  sqlite3_stmt* stmt = nullptr;
  ~State() { sqlite3_finalize(stmt); }
};

Statement::Statement(std::unique_ptr<State> state) : state_(std::move(state)) {}
Statement::~Statement() = default;
Statement::Statement(Statement&&) noexcept = default;
Statement& Statement::operator=(Statement&&) noexcept = default;

Statement& Statement::bind(int position, std::int64_t value) {
  DI_ASSERT(sqlite3_bind_int64(state_->stmt, position, value) == SQLITE_OK);
  return *this;
}

Statement& Statement::bind(int position, std::string_view value) {
  DI_ASSERT(sqlite3_bind_text64(state_->stmt, position, value.data(), value.size(), SQLITE_TRANSIENT,
                                SQLITE_UTF8) == SQLITE_OK);
  return *this;
}

Statement& Statement::bind(int position, ByteView value) {
  // A null pointer would bind NULL instead of an empty blob.
  const void* data = value.empty() ? static_cast<const void*>("") : value.data();
  DI_ASSERT(sqlite3_bind_blob64(state_->stmt, position, data, value.size(), SQLITE_TRANSIENT) == SQLITE_OK);
  return *this;
}

Statement& Statement::bind_null(int position) {
  DI_ASSERT(sqlite3_bind_null(state_->stmt, position) == SQLITE_OK);
  return *this;
}

Result<bool> Statement::step() {
  const int rc = sqlite3_step(state_->stmt);
  if (rc == SQLITE_ROW) return true;
  Error error;
  if (rc != SQLITE_DONE) error = sqlite_error(state_->db, rc, "sqlite");
  sqlite3_reset(state_->stmt);
  sqlite3_clear_bindings(state_->stmt);
  if (rc != SQLITE_DONE) return error;
  return false;
}

Status Statement::run() {
  for (;;) {
    const auto row = step();
    if (!row) return row.error();
    if (!*row) return {};
  }
}

std::int64_t Statement::column_i64(int position) const {
  return sqlite3_column_int64(state_->stmt, position);
}

std::string Statement::column_text(int position) const {
  const auto* text = reinterpret_cast<const char*>(sqlite3_column_text(state_->stmt, position));
  const int bytes = sqlite3_column_bytes(state_->stmt, position);
  return text == nullptr ? std::string() : std::string(text, static_cast<std::size_t>(bytes));
}

Bytes Statement::column_blob(int position) const {
  const auto* data = static_cast<const std::byte*>(sqlite3_column_blob(state_->stmt, position));
  const int bytes = sqlite3_column_bytes(state_->stmt, position);
  return data == nullptr ? Bytes() : Bytes(data, data + bytes);
}

bool Statement::column_is_null(int position) const {
  return sqlite3_column_type(state_->stmt, position) == SQLITE_NULL;
}

struct Database::State {
  sqlite3* db = nullptr;
  ~State() { sqlite3_close_v2(db); }
};

Database::Database(std::unique_ptr<State> state) : state_(std::move(state)) {}
Database::~Database() = default;
Database::Database(Database&&) noexcept = default;
Database& Database::operator=(Database&&) noexcept = default;

Result<Database> Database::open(const std::string& path, Synchronous synchronous) {
  auto state = std::make_unique<State>();
  const int rc = sqlite3_open_v2(path.c_str(), &state->db,
                                 SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  if (rc != SQLITE_OK) return sqlite_error(state->db, rc, path);
  sqlite3_busy_timeout(state->db, 5000);
  Database database(std::move(state));
  for (const char* pragma : {"PRAGMA journal_mode=WAL", "PRAGMA foreign_keys=ON"}) {
    if (const Status set = database.exec(pragma); !set) return set.error().in(path);
  }
  const char* level =
      synchronous == Synchronous::full ? "PRAGMA synchronous=FULL" : "PRAGMA synchronous=NORMAL";
  if (const Status set = database.exec(level); !set) return set.error().in(path);
  return database;
}

Status Database::exec(const std::string& sql) {
  const int rc = sqlite3_exec(state_->db, sql.c_str(), nullptr, nullptr, nullptr);
  if (rc != SQLITE_OK) return sqlite_error(state_->db, rc, "sqlite");
  return {};
}

void Database::interrupt() {
  sqlite3_interrupt(state_->db);
}

Result<Statement> Database::prepare(std::string_view sql) {
  auto statement = std::make_unique<Statement::State>();
  statement->db = state_->db;
  const int rc =
      sqlite3_prepare_v2(state_->db, sql.data(), static_cast<int>(sql.size()), &statement->stmt, nullptr);
  if (rc != SQLITE_OK) return sqlite_error(state_->db, rc, "sqlite");
  return Statement(std::move(statement));
}

}  // namespace di::sqlite
