#include "directory/catalogue.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace di::directory {
namespace {

std::string scratch(const std::string& name) {
  const std::string path = testing::TempDir() + "di-catalogue-" + std::to_string(getpid()) + "-" + name;
  for (const char* suffix : {"", "-wal", "-shm", ".lock"}) unlink((path + suffix).c_str());
  return path;
}

TEST(Catalogue, RemembersWhatMustNotBeForgotten) {
  const std::string path = scratch("remembers");
  Bytes secret;
  std::uint32_t cluster = 0;
  std::uint64_t run = 0;
  const InstanceRow kvd{"di-kvd.host0", 3, 2, 0xffffffffffffffffULL};
  {
    auto catalogue = Catalogue::open(path);
    ASSERT_TRUE(catalogue) << catalogue.error().message;
    secret = catalogue->secret();
    cluster = catalogue->cluster();
    run = catalogue->run();
    EXPECT_EQ(secret.size(), 32U);
    EXPECT_NE(cluster, 0U);
    ASSERT_TRUE(catalogue->save({"di-kvd.host0", 3, 1, 5}));
    ASSERT_TRUE(catalogue->save(kvd));
    ASSERT_TRUE(catalogue->save({"di-router.0", 4, 1, 6}));
  }
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue) << catalogue.error().message;
  EXPECT_EQ(catalogue->secret(), secret);
  EXPECT_EQ(catalogue->cluster(), cluster);
  EXPECT_EQ(catalogue->run(), run + 1);
  const auto rows = catalogue->instances();
  ASSERT_TRUE(rows);
  ASSERT_EQ(rows->size(), 2U);
  EXPECT_EQ(rows->front(), kvd);
}

TEST(Catalogue, SecretsDiffer) {
  const auto a = Catalogue::open(scratch("a"));
  const auto b = Catalogue::open(scratch("b"));
  ASSERT_TRUE(a && b);
  EXPECT_NE(a->secret(), b->secret());
  EXPECT_NE(a->secret(), Bytes(32));
}

TEST(Catalogue, OneDirectoryAtATime) {
  const std::string path = scratch("one");
  {
    const auto first = Catalogue::open(path);
    ASSERT_TRUE(first);
    const auto second = Catalogue::open(path);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code, Code::busy);
    EXPECT_EQ(second.error().message, "catalogue " + path + ": another di-meta has it open");
  }
  EXPECT_TRUE(Catalogue::open(path));
}

TEST(Catalogue, NewerSchemaIsRefusedAndLeftAlone) {
  const std::string path = scratch("newer");
  ASSERT_TRUE(Catalogue::open(path));
  {
    auto database = sqlite::Database::open(path, sqlite::Synchronous::full);
    ASSERT_TRUE(database);
    ASSERT_TRUE(database->exec("PRAGMA user_version=9"));
  }
  const auto refused = Catalogue::open(path);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::unsupported);
  EXPECT_EQ(refused.error().message,
            "catalogue " + path + ": schema version 9 is newer than this program's 1");
}

TEST(Catalogue, ForeignAndDamagedFilesAreCorrupt) {
  const std::string text = scratch("text");
  std::ofstream(text) << std::string(8192, 'x');
  const auto not_database = Catalogue::open(text);
  ASSERT_FALSE(not_database);
  EXPECT_EQ(not_database.error().code, Code::corrupt);

  const std::string foreign = scratch("foreign");
  {
    auto database = sqlite::Database::open(foreign, sqlite::Synchronous::full);
    ASSERT_TRUE(database);
    ASSERT_TRUE(database->exec("CREATE TABLE other(x)"));
  }
  const auto other = Catalogue::open(foreign);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Code::corrupt);
  EXPECT_EQ(other.error().message, "catalogue " + foreign + ": not a catalogue of di-meta");

  const std::string missing = scratch("missing");
  ASSERT_TRUE(Catalogue::open(missing));
  {
    auto database = sqlite::Database::open(missing, sqlite::Synchronous::full);
    ASSERT_TRUE(database);
    ASSERT_TRUE(database->exec("DELETE FROM fleet WHERE name='secret'"));
  }
  const auto half = Catalogue::open(missing);
  ASSERT_FALSE(half);
  EXPECT_EQ(half.error().code, Code::corrupt);
}

TEST(Catalogue, DamagedPagesAreFoundAtTheStart) {
  const std::string path = scratch("damaged");
  {
    auto catalogue = Catalogue::open(path);
    ASSERT_TRUE(catalogue);
    for (std::uint32_t i = 0; i < 100; ++i) {
      ASSERT_TRUE(catalogue->save({std::to_string(i) + std::string(1000, 'x'), i + 1, 1, i + 1}));
    }
  }
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(4 * 4096);
  const std::string noise(3 * 4096, '\x5a');
  file.write(noise.data(), static_cast<std::streamsize>(noise.size()));
  file.close();
  const auto refused = Catalogue::open(path);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::corrupt) << refused.error().message;
}

TEST(Catalogue, UnreachablePathIsOneClearError) {
  const auto refused = Catalogue::open(testing::TempDir() + "no-such-folder/catalogue");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::not_found);
  EXPECT_NE(refused.error().message.find("no-such-folder/catalogue: No such file or directory"),
            std::string::npos);
}

}  // namespace
}  // namespace di::directory
