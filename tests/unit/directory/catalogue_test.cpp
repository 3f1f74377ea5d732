#include "directory/catalogue.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "base/clock.h"

namespace di::directory {
namespace {

std::string scratch(const std::string& name) {
  const std::string path = testing::TempDir() + "di-catalogue-" + std::to_string(getpid()) + "-" + name;
  for (const char* suffix : {"", "-wal", "-shm", ".lock"}) unlink((path + suffix).c_str());
  return path;
}

Status write(Catalogue& catalogue, const RowChange& change) {
  auto writer = catalogue.row_writer();
  if (!writer) return writer.error();
  return writer->write({&change, 1});
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
    ASSERT_TRUE(write(*catalogue, InstanceRow{"di-kvd.host0", 3, 1, 5}));
    ASSERT_TRUE(write(*catalogue, kvd));
    ASSERT_TRUE(write(*catalogue, InstanceRow{"di-router.0", 4, 1, 6}));
  }
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue) << catalogue.error().message;
  EXPECT_EQ(catalogue->secret(), secret);
  EXPECT_EQ(catalogue->cluster(), cluster);
  EXPECT_EQ(catalogue->run(), run + 1);
  const auto& starts = catalogue->run_starts();
  ASSERT_EQ(starts.size(), 3U);  // the making of it and two starts
  EXPECT_TRUE(starts.contains(0) && starts.contains(run) && starts.contains(run + 1));
  EXPECT_LE(starts.at(run), starts.at(run + 1));
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

// G09.
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
            "catalogue " + path + ": schema version 9 is newer than this program's 4");
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
    auto writer = catalogue->row_writer();
    ASSERT_TRUE(writer);
    std::vector<RowChange> rows;
    for (std::uint32_t i = 0; i < 100; ++i) {
      rows.push_back(InstanceRow{std::to_string(i) + std::string(1000, 'x'), i + 1, 1, i + 1});
    }
    ASSERT_TRUE(writer->write(rows));
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

StripeRow stripe_row(std::uint64_t id, int pages) {
  StripeRow row;
  row.id = id;
  row.fingerprint.raw[0] = std::byte{7};
  row.tenant = 0xf000000000000000 + id;  // above what a signed number holds
  row.born_s = 0xf0000000U + static_cast<std::uint32_t>(id);
  Key parent;
  parent.raw[1] = std::byte{9};
  for (int p = 0; p < pages; ++p) {
    wire::PutPage page;
    page.parent = parent;
    for (int b = 0; b < 3; ++b) {
      Key key;
      key.raw[0] = static_cast<std::byte>(id);
      key.raw[1] = static_cast<std::byte>(p);
      key.raw[2] = static_cast<std::byte>(b + 1);
      page.keys.push_back(key);
    }
    page.crcs = {1, static_cast<std::uint32_t>(p)};
    page.bytes = 8192;
    parent = page.keys.back();
    row.pages.push_back(page);
  }
  row.code = {4, 2, {11, 12, 13, 14}};
  row.columns = {{"di-kvd.store0", 1, 0}, {"di-kvd.store5", 0, 4}};
  return row;
}

TEST(Catalogue, KeepsARowPerStripe) {
  const std::string path = scratch("stripes");
  {
    auto catalogue = Catalogue::open(path);
    ASSERT_TRUE(catalogue) << catalogue.error().message;
    auto writer = catalogue->stripe_writer();
    ASSERT_TRUE(writer) << writer.error().message;
    std::vector<StripeChange> batch;
    for (std::uint64_t id = 1; id <= 4; ++id) batch.push_back({id, stripe_row(id, static_cast<int>(id))});
    ASSERT_TRUE(writer->write(batch));
    StripeRow moved = stripe_row(2, 2);
    moved.columns[1].instance = "di-kvd.store9";
    ASSERT_TRUE(writer->write(std::vector<StripeChange>{{1, std::nullopt}, {2, moved}, {99, std::nullopt}}));
    ASSERT_TRUE(write(*catalogue, InstanceRow{"di-kvd.host0", 3, 1, 5}));  // the other connection
  }
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue);
  std::vector<StripeRow> rows;
  const auto loaded = catalogue->load_stripes([&](const StripeRow& row) { rows.push_back(row); });
  ASSERT_TRUE(loaded) << loaded.error().message;
  EXPECT_EQ(loaded->rows, 3U);
  EXPECT_EQ(loaded->malformed, 0U);
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0].columns[1].instance, "di-kvd.store9");
  EXPECT_EQ(rows[1], stripe_row(3, 3));
  EXPECT_EQ(rows[2], stripe_row(4, 4));
}

TEST(Catalogue, RowsThatCannotBeReadArePassedOver) {
  const std::string path = scratch("malformed");
  {
    auto catalogue = Catalogue::open(path);
    ASSERT_TRUE(catalogue);
    auto writer = catalogue->stripe_writer();
    ASSERT_TRUE(writer);
    std::vector<StripeChange> batch;
    for (std::uint64_t id = 1; id <= 6; ++id) batch.push_back({id, stripe_row(id, 2)});
    ASSERT_TRUE(writer->write(batch));
  }
  {
    auto database = sqlite::Database::open(path, sqlite::Synchronous::full);
    ASSERT_TRUE(database);
    ASSERT_TRUE(database->exec("UPDATE stripe SET keys = x'00' WHERE id = 1"));
    ASSERT_TRUE(database->exec("UPDATE stripe SET pages = x'ffffffff01000000' WHERE id = 2"));
    ASSERT_TRUE(database->exec("UPDATE stripe SET columns = x'0000000009' WHERE id = 3"));
    ASSERT_TRUE(database->exec("UPDATE stripe SET layout = x'' WHERE id = 4"));
    ASSERT_TRUE(database->exec("UPDATE stripe SET k = 70000 WHERE id = 5"));
  }
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue);
  const auto loaded = catalogue->load_stripes([](const StripeRow& row) { EXPECT_EQ(row.id, 6U); });
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->rows, 1U);
  EXPECT_EQ(loaded->malformed, 5U);
}

TEST(Catalogue, DrainedStoresAreKept) {
  const std::string path = scratch("leaving");
  {
    auto catalogue = Catalogue::open(path);
    ASSERT_TRUE(catalogue);
    for (const char* name : {"di-kvd.store2", "di-kvd.store1", "di-kvd.store1"}) {
      ASSERT_TRUE(write(*catalogue, StoreLeaves{name, true}));
    }
    ASSERT_TRUE(write(*catalogue, StoreLeaves{"di-kvd.store2", false}));
  }
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue);
  EXPECT_EQ(*catalogue->leaving(), (std::vector<std::string>{"di-kvd.store1"}));
}

TEST(Catalogue, IsCopiedWhileItIsUsed) {
  const std::string path = scratch("original");
  const std::string copy = scratch("copy");
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue);
  auto writer = catalogue->stripe_writer();
  ASSERT_TRUE(writer);
  ASSERT_TRUE(writer->write(std::vector<StripeChange>{{5, stripe_row(5, 2)}}));
  auto copier = catalogue->copier();
  ASSERT_TRUE(copier);
  const auto bytes = copier->copy(copy);
  ASSERT_TRUE(bytes) << bytes.error().message;
  struct stat status {};
  ASSERT_EQ(stat(copy.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
  EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), *bytes);
  const auto again = copier->copy(copy);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, Code::exists);
  ASSERT_TRUE(writer->write(std::vector<StripeChange>{{5, std::nullopt}}));
  auto restored = Catalogue::open(copy);
  ASSERT_TRUE(restored) << restored.error().message;
  EXPECT_EQ(restored->secret(), catalogue->secret());
  const auto loaded = restored->load_stripes([](const StripeRow& row) { EXPECT_EQ(row, stripe_row(5, 2)); });
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->rows, 1U);
}

TEST(Catalogue, AStartFromACopyIssuesWhatTheOriginalCannotHaveIssuedSince) {
  const std::string path = scratch("lost");
  const std::string copy = scratch("older");
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue);
  EXPECT_EQ(*catalogue->issued(), Issued{});
  ASSERT_TRUE(write(*catalogue, InstanceRow{"di-router.0", 7, 3, 5}));
  ASSERT_TRUE(write(*catalogue, InstanceRow{"di-router.1", 9, 2, 6}));
  ASSERT_TRUE(write(*catalogue, RowGone{"di-router.1", 9, {12, 5}}));
  EXPECT_EQ(*catalogue->issued(), (Issued{12, 5}));
  ASSERT_EQ(catalogue->instances()->size(), 1U);
  auto copier = catalogue->copier();
  ASSERT_TRUE(copier);
  ASSERT_TRUE(copier->copy(copy));
  EXPECT_EQ(*catalogue->issued(), (Issued{12, 5}));
  auto restored = Catalogue::open(copy);
  ASSERT_TRUE(restored) << restored.error().message;
  EXPECT_GT(restored->run(), catalogue->run() + 10000);
  EXPECT_LT(restored->run(), 1U << 24);  // what the index takes
  EXPECT_GT(restored->issued()->next_id, 1000000U);
  EXPECT_GT(restored->issued()->generation, 1000000U);
  EXPECT_EQ(restored->instances()->front(), (InstanceRow{"di-router.0", 7, 3, 5}));
}

TEST(Catalogue, ACopyThatFailsLeavesNoFile) {
  const std::string path = scratch("too-large");
  const std::string copy = scratch("no-copy");
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue);
  ASSERT_TRUE(write(*catalogue, InstanceRow{"di-router." + std::string(60000, 'x'), 1, 1, 1}));
  auto copier = catalogue->copier();
  ASSERT_TRUE(copier);
  // A file may not be larger than a page.
  const auto before = signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit page = limit;
  page.rlim_cur = 4096;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &page), 0);
  const auto failed = copier->copy(copy);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  signal(SIGXFSZ, before);
  ASSERT_FALSE(failed);
  EXPECT_TRUE(failed.error().message.starts_with("backup " + copy + ": ")) << failed.error().message;
  struct stat status {};
  EXPECT_NE(stat(copy.c_str(), &status), 0);
  const auto made = copier->copy(copy);
  EXPECT_TRUE(made) << made.error().message;
}

// All or nothing, and whoever held the number before gives way.
TEST(Catalogue, RowsAreWrittenTogether) {
  const std::string path = scratch("together");
  auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue);
  auto writer = catalogue->row_writer();
  ASSERT_TRUE(writer);
  ASSERT_TRUE(writer->write(
      std::vector<RowChange>{InstanceRow{"di-router.0", 1, 1, 5}, InstanceRow{"di-router.1", 2, 1, 6},
                             RowGone{"di-router.0", 1, {3, 1}}, InstanceRow{"di-router.2", 2, 2, 7}}));
  const auto rows = catalogue->instances();
  ASSERT_TRUE(rows);
  EXPECT_EQ(*rows, (std::vector<InstanceRow>{{"di-router.2", 2, 2, 7}}));
  // A row that was written anew since stays.
  ASSERT_TRUE(write(*catalogue, RowGone{"di-router.2", 1, {3, 2}}));
  EXPECT_EQ(catalogue->instances()->size(), 1U);
  {
    auto other = sqlite::Database::open(path, sqlite::Synchronous::full);
    ASSERT_TRUE(other);
    ASSERT_TRUE(
        other->exec("CREATE TRIGGER no BEFORE INSERT ON leaving BEGIN SELECT RAISE(ABORT, 'no'); END"));
  }
  EXPECT_FALSE(writer->write(
      std::vector<RowChange>{InstanceRow{"di-router.3", 3, 3, 8}, StoreLeaves{"di-kvd.store0", true}}));
  EXPECT_EQ(catalogue->instances()->size(), 1U);
  ASSERT_TRUE(write(*catalogue, InstanceRow{"di-router.3", 3, 3, 8}));
}

// G07: a file as schema 1 left it.
TEST(Catalogue, SchemaOneIsMigrated) {
  const std::string path = scratch("one-to-two");
  std::ifstream golden(std::string(DI_SOURCE_DIR) + "/tests/golden/catalogue/schema1.sqlite",
                       std::ios::binary);
  ASSERT_TRUE(golden.good());
  std::ofstream(path, std::ios::binary) << golden.rdbuf();
  {
    auto catalogue = Catalogue::open(path);
    ASSERT_TRUE(catalogue) << catalogue.error().message;
    EXPECT_EQ(catalogue->cluster(), 0x01020304U);
    EXPECT_EQ(catalogue->run(), 8U);
    EXPECT_EQ(catalogue->secret(), Bytes(32, std::byte{0xab}));
    const auto rows = catalogue->instances();
    ASSERT_TRUE(rows);
    ASSERT_EQ(rows->size(), 2U);
    EXPECT_EQ(rows->back(), (InstanceRow{"di-kvd.store0", 4, 9, 0xfedcba9876543210ULL}));
    auto writer = catalogue->stripe_writer();
    ASSERT_TRUE(writer) << writer.error().message;
    ASSERT_TRUE(writer->write(std::vector<StripeChange>{{5, stripe_row(5, 2)}}));
  }
  auto again = Catalogue::open(path);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->run(), 9U);
}

// A file as schema 2 left it, with one stripe: it is nobody's.
TEST(Catalogue, SchemaTwoIsMigrated) {
  const std::string path = scratch("two-to-three");
  std::ifstream golden(std::string(DI_SOURCE_DIR) + "/tests/golden/catalogue/schema2.sqlite",
                       std::ios::binary);
  ASSERT_TRUE(golden.good());
  std::ofstream(path, std::ios::binary) << golden.rdbuf();
  StripeRow before = stripe_row(5, 2);
  before.tenant = 0;
  before.born_s = 0;
  for (int start = 0; start < 2; ++start) {
    auto catalogue = Catalogue::open(path);
    ASSERT_TRUE(catalogue) << catalogue.error().message;
    EXPECT_EQ(*catalogue->leaving(), (std::vector<std::string>{"di-kvd.store2"}));
    std::vector<StripeRow> rows;
    ASSERT_TRUE(catalogue->load_stripes([&](const StripeRow& row) { rows.push_back(row); }));
    ASSERT_EQ(rows.size(), start == 0 ? 1U : 2U);
    EXPECT_EQ(rows[0], before);
    if (start > 0) {
      EXPECT_EQ(rows[1], stripe_row(6, 2));
      continue;
    }
    auto writer = catalogue->stripe_writer();
    ASSERT_TRUE(writer) << writer.error().message;
    ASSERT_TRUE(writer->write(std::vector<StripeChange>{{6, stripe_row(6, 2)}}));
  }
}

// A file as schema 3 left it: nothing says how old its stripe is, and it is not older than this.
TEST(Catalogue, SchemaThreeIsMigrated) {
  const std::string path = scratch("three-to-four");
  std::ifstream golden(std::string(DI_SOURCE_DIR) + "/tests/golden/catalogue/schema3.sqlite",
                       std::ios::binary);
  ASSERT_TRUE(golden.good());
  std::ofstream(path, std::ios::binary) << golden.rdbuf();
  StripeRow before = stripe_row(5, 2);
  before.born_s = 0;
  const auto now_s = static_cast<std::uint32_t>(wall_clock_ms() / 1000);
  for (int start = 0; start < 2; ++start) {
    auto catalogue = Catalogue::open(path);
    ASSERT_TRUE(catalogue) << catalogue.error().message;
    ASSERT_TRUE(catalogue->load_stripes([&](const StripeRow& row) { EXPECT_EQ(row, before); }));
    ASSERT_EQ(catalogue->run_starts().size(), 2U + static_cast<std::size_t>(start));
    EXPECT_EQ(catalogue->run_starts().begin()->first, 0U);
    EXPECT_GE(catalogue->run_starts().begin()->second, now_s);
    EXPECT_EQ(catalogue->run_starts().rbegin()->first, catalogue->run());
  }
}

TEST(Catalogue, OnlyTheLastStartsAreKnownAndTheFirst) {
  const std::string path = scratch("starts");
  ASSERT_TRUE(Catalogue::open(path));
  {
    auto database = sqlite::Database::open(path, sqlite::Synchronous::full);
    ASSERT_TRUE(database);
    for (std::uint64_t run = 2; run <= run_starts_max + 10; ++run) {
      ASSERT_TRUE(database->exec("INSERT INTO run VALUES(" + std::to_string(run) + ", 5)"));
    }
    ASSERT_TRUE(database->exec("UPDATE fleet SET value = x'0a04000000000000' WHERE name = 'run'"));
  }
  const auto catalogue = Catalogue::open(path);
  ASSERT_TRUE(catalogue) << catalogue.error().message;
  ASSERT_EQ(catalogue->run(), run_starts_max + 11);
  const auto& starts = catalogue->run_starts();
  EXPECT_EQ(starts.size(), run_starts_max + 1);
  EXPECT_EQ(starts.begin()->first, 0U);
  EXPECT_EQ(std::next(starts.begin())->first, 12U);
}

}  // namespace
}  // namespace di::directory
