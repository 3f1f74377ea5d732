// base/sqlite.h: the little of SQLite that the catalogue and the accounts need.
//
// Owner: one thread per Database.  WAL, foreign keys on, busy time-out 5 s.  Errors carry SQLite's text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/result.h"

namespace di::sqlite {

class Database;

// A prepared statement.  bind() positions are 1-based, column() positions 0-based, as in SQLite.
class Statement {
 public:
  ~Statement();
  Statement(Statement&&) noexcept;
  Statement& operator=(Statement&&) noexcept;

  Statement& bind(int position, std::int64_t value);
  Statement& bind(int position, std::string_view value);
  Statement& bind(int position, ByteView value);
  Statement& bind_null(int position);

  // True when a row is there, false at the end.  After the end the statement is reset and its
  // bindings are cleared.
  [[nodiscard]] Result<bool> step();
  // For statements without rows.
  [[nodiscard]] Status run();

  [[nodiscard]] std::int64_t column_i64(int position) const;
  [[nodiscard]] std::string column_text(int position) const;
  [[nodiscard]] Bytes column_blob(int position) const;
  [[nodiscard]] bool column_is_null(int position) const;

 private:
  friend class Database;
  struct State;
  explicit Statement(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

enum class Synchronous { normal, full };

class Database {
 public:
  ~Database();
  Database(Database&&) noexcept;
  Database& operator=(Database&&) noexcept;

  // Opens or creates.  Errors: io, denied, corrupt (not a database).
  static Result<Database> open(const std::string& path, Synchronous synchronous);
  // Runs one or more statements without parameters.
  [[nodiscard]] Status exec(const std::string& sql);
  [[nodiscard]] Result<Statement> prepare(std::string_view sql);
  // Any thread: what runs ends with `cancelled`; what begins later is not meant.
  void interrupt();

 private:
  struct State;
  explicit Database(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace di::sqlite
