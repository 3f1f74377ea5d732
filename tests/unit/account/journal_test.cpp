#include "account/journal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <vector>

namespace di::account {
namespace {

std::string scratch(const std::string& name) {
  const std::string dir = testing::TempDir() + "di-journal-" + std::to_string(getpid()) + "-" + name;
  unlink((dir + "/charges.jsonl").c_str());
  return dir;
}

Charge charge(std::int64_t tokens) {
  Charge out = charge_open(5);
  out.tenant = "a\"b";
  out.output_tokens = tokens;
  return out;
}

std::vector<std::int64_t> tokens_in(const std::string& dir, std::uint64_t damaged = 0) {
  std::vector<std::int64_t> out;
  const auto counts = journal_read(dir, [&](const Charge& c) { out.push_back(c.output_tokens); });
  EXPECT_TRUE(counts);
  if (!counts) return out;
  EXPECT_EQ(counts->records, out.size());
  EXPECT_EQ(counts->damaged, damaged);
  return out;
}

TEST(Journal, KeepsRecordsAcrossReopening) {
  const std::string dir = scratch("reopen");
  for (int i = 0; i < 2; ++i) {
    auto journal = Journal::open(dir);
    ASSERT_TRUE(journal) << journal.error().message;
    ASSERT_TRUE(journal->append(charge(7 + i)));
  }
  EXPECT_EQ(tokens_in(dir), (std::vector<std::int64_t>{7, 8}));
}

TEST(Journal, RemovedFileIsMadeAgain) {
  const std::string dir = scratch("removed");
  auto journal = Journal::open(dir);
  ASSERT_TRUE(journal);
  ASSERT_TRUE(journal->append(charge(1)));
  ASSERT_EQ(unlink((dir + "/charges.jsonl").c_str()), 0);
  ASSERT_EQ(rmdir(dir.c_str()), 0);
  ASSERT_TRUE(journal->append(charge(2)));
  ASSERT_TRUE(journal->append(charge(3)));
  EXPECT_EQ(tokens_in(dir), (std::vector<std::int64_t>{2, 3}));
}

// Appends while files may only grow so far: a write beyond is cut short, as on a disk that fills.
Status append_within(Journal& journal, const Charge& charge, std::int64_t bytes) {
  rlimit limit{};
  EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{static_cast<rlim_t>(bytes), limit.rlim_max};
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto old = signal(SIGXFSZ, SIG_IGN);
  Status status = journal.append(charge);
  signal(SIGXFSZ, old);
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  return status;
}

TEST(Journal, AFullDiskLeavesWholeLines) {
  const std::string dir = scratch("full");
  auto journal = Journal::open(dir);
  ASSERT_TRUE(journal);
  ASSERT_TRUE(journal->append(charge(1)));
  const std::string path = dir + "/charges.jsonl";
  struct stat before {};
  ASSERT_EQ(stat(path.c_str(), &before), 0);
  const Status full = append_within(*journal, charge(2), before.st_size + 10);
  EXPECT_EQ(full.error().code, Code::no_space);
  struct stat after {};
  ASSERT_EQ(stat(path.c_str(), &after), 0);
  EXPECT_EQ(after.st_size, before.st_size);
  ASSERT_TRUE(journal->append(charge(3)));
  EXPECT_EQ(tokens_in(dir), (std::vector<std::int64_t>{1, 3}));
}

TEST(Journal, AFileThatWasRemovedHadItsOldSizeOnAFullDisk) {
  const std::string dir = scratch("removed-full");
  auto journal = Journal::open(dir);
  ASSERT_TRUE(journal);
  ASSERT_TRUE(journal->append(charge(1)));
  ASSERT_EQ(unlink((dir + "/charges.jsonl").c_str()), 0);
  EXPECT_EQ(append_within(*journal, charge(2), 10).error().code, Code::no_space);
  ASSERT_TRUE(journal->append(charge(3)));
  EXPECT_EQ(tokens_in(dir), (std::vector<std::int64_t>{3}));
}

TEST(Journal, AFileThatWasMovedAwayTookAllRecordsFromThenOn) {
  const std::string dir = scratch("moved");
  const std::string moved = scratch("moved-to");
  auto journal = Journal::open(dir);
  ASSERT_TRUE(journal);
  ASSERT_TRUE(Journal::open(moved));
  ASSERT_TRUE(journal->append(charge(1)));
  ASSERT_EQ(rename((dir + "/charges.jsonl").c_str(), (moved + "/charges.jsonl").c_str()), 0);
  ASSERT_TRUE(journal->append(charge(2)));
  ASSERT_TRUE(journal->append(charge(3)));
  EXPECT_EQ(tokens_in(moved), (std::vector<std::int64_t>{1}));
  EXPECT_EQ(tokens_in(dir), (std::vector<std::int64_t>{2, 3}));
  // Somebody else has made a new one meanwhile.
  ASSERT_EQ(rename((dir + "/charges.jsonl").c_str(), (moved + "/charges.jsonl").c_str()), 0);
  auto other = Journal::open(dir);
  ASSERT_TRUE(other);
  ASSERT_TRUE(other->append(charge(4)));
  ASSERT_TRUE(journal->append(charge(5)));
  EXPECT_EQ(tokens_in(dir), (std::vector<std::int64_t>{4, 5}));
}

TEST(Journal, AFullDiskCutTheRecordOfAnotherRouter) {
  const std::string dir = scratch("two");
  auto a = Journal::open(dir);
  auto b = Journal::open(dir);
  ASSERT_TRUE(a);
  ASSERT_TRUE(b);
  ASSERT_TRUE(a->append(charge(1)));
  ASSERT_TRUE(b->append(charge(2)));
  const std::string path = dir + "/charges.jsonl";
  struct stat before {};
  ASSERT_EQ(stat(path.c_str(), &before), 0);
  // While another router writes, half a record stays, and whoever comes next ends it.
  const Fd writer(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(writer.get(), LOCK_EX), 0);
  EXPECT_EQ(append_within(*a, charge(3), before.st_size + 10).error().code, Code::no_space);
  struct stat after {};
  ASSERT_EQ(stat(path.c_str(), &after), 0);
  EXPECT_EQ(after.st_size, before.st_size + 10);
  ASSERT_TRUE(b->append(charge(4)));
  ASSERT_EQ(flock(writer.get(), LOCK_UN), 0);
  ASSERT_TRUE(a->append(charge(5)));
  EXPECT_EQ(tokens_in(dir, 1), (std::vector<std::int64_t>{1, 2, 4, 5}));
}

TEST(Journal, CutLineHarmsNoOther) {
  const std::string dir = scratch("cut");
  {
    auto journal = Journal::open(dir);
    ASSERT_TRUE(journal);
    ASSERT_TRUE(journal->append(charge(1)));
    ASSERT_TRUE(journal->append(charge(2)));
  }
  const std::string path = dir + "/charges.jsonl";
  std::ifstream in(path);
  const std::string whole((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  // A crash after some byte of the second record, near its end after each.
  const std::size_t first = whole.find('\n') + 1;
  for (std::size_t keep = first; keep < whole.size(); keep += keep + 12 < whole.size() ? 11 : 1) {
    ASSERT_EQ(truncate(path.c_str(), 0), 0);
    std::ofstream(path) << whole.substr(0, keep);
    EXPECT_EQ(tokens_in(dir), (std::vector<std::int64_t>{1})) << keep;
    auto journal = Journal::open(dir);
    ASSERT_TRUE(journal);
    ASSERT_TRUE(journal->append(charge(3)));
    const bool only_newline_missing = keep + 1 == whole.size();
    const auto expected =
        only_newline_missing ? std::vector<std::int64_t>{1, 2, 3} : std::vector<std::int64_t>{1, 3};
    EXPECT_EQ(tokens_in(dir, keep > first && !only_newline_missing ? 1 : 0), expected) << keep;
  }
}

TEST(Journal, EndlessLineIsOneDamagedRecord) {
  const std::string dir = scratch("endless");
  ASSERT_TRUE(Journal::open(dir));
  std::ofstream(dir + "/charges.jsonl") << std::string(300'000, 'x') << "\n"
                                        << charge_json(charge(4)) << "\n";
  EXPECT_EQ(tokens_in(dir, 1), (std::vector<std::int64_t>{4}));
}

TEST(Journal, ErrorsNameThePath) {
  EXPECT_NE(Journal::open("/proc/no/such").error().message.find("/proc/no/such"), std::string::npos);
  EXPECT_EQ(journal_read("/no/such", [](const Charge&) {}).error().code, Code::not_found);
}

}  // namespace
}  // namespace di::account
