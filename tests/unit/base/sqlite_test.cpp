#include "base/sqlite.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace di::sqlite {
namespace {

std::string scratch(const std::string& name) {
  const std::string path = testing::TempDir() + "di-sqlite-" + std::to_string(getpid()) + "-" + name;
  for (const char* suffix : {"", "-wal", "-shm"}) unlink((path + suffix).c_str());
  return path;
}

TEST(Sqlite, RowsAndBlobsRoundTrip) {
  auto db = Database::open(scratch("rows"), Synchronous::normal);
  ASSERT_TRUE(db);
  ASSERT_TRUE(db->exec("CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT, raw BLOB)"));
  auto insert = db->prepare("INSERT INTO t VALUES(?,?,?)");
  ASSERT_TRUE(insert);
  ASSERT_TRUE(
      insert->bind(1, std::int64_t{1}).bind(2, "one").bind(3, ByteView(Bytes(3, std::byte{7}))).run());
  ASSERT_TRUE(insert->bind(1, std::int64_t{2}).bind_null(2).bind(3, ByteView()).run());
  const Status twice = insert->bind(1, std::int64_t{2}).bind_null(2).bind_null(3).run();
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().code, Code::exists);
  auto select = db->prepare("SELECT id, name, raw FROM t ORDER BY id");
  ASSERT_TRUE(select);
  ASSERT_TRUE(*select->step());
  EXPECT_EQ(select->column_text(1), "one");
  EXPECT_EQ(select->column_blob(2).size(), 3U);
  ASSERT_TRUE(*select->step());
  EXPECT_TRUE(select->column_is_null(1));
  EXPECT_FALSE(select->column_is_null(2));
  EXPECT_FALSE(*select->step());
}

TEST(Sqlite, ForeignFileIsCorrupt) {
  const std::string path = scratch("foreign");
  std::ofstream(path) << std::string(8192, 'x');
  const auto db = Database::open(path, Synchronous::full);
  ASSERT_FALSE(db);
  EXPECT_EQ(db.error().code, Code::corrupt);
}

}  // namespace
}  // namespace di::sqlite
