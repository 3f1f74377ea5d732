// A copy whose syncs the test holds up or fails: this program's own fsync() and fdatasync(), which SQLite calls too.
#include "backup.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <string>

#include "tests/support/manual_loop.h"

namespace di::meta {
namespace {

// What happens to the syncs of files below `folder`, and of it.
class Syncs {
 public:
  void begin(const std::string& folder) {
    const std::scoped_lock lock(mutex_);
    folder_ = folder;
    count_ = fails_ = 0;
    held_ = false;
    changed_.notify_all();
  }
  // The n-th from now, counted from one, fails; 0: none.
  void fail(int n) {
    const std::scoped_lock lock(mutex_);
    count_ = 0;
    fails_ = n;
  }
  void hold(bool on) {
    const std::scoped_lock lock(mutex_);
    held_ = on;
    changed_.notify_all();
  }
  [[nodiscard]] bool waits() {
    const std::scoped_lock lock(mutex_);
    return waiting_ > 0;
  }
  // The file or the folder of the last one.
  [[nodiscard]] std::string last() {
    const std::scoped_lock lock(mutex_);
    return last_;
  }
  [[nodiscard]] int count() {
    const std::scoped_lock lock(mutex_);
    return count_;
  }

  int sync(int fd, long call) {
    std::unique_lock lock(mutex_);
    std::string name = name_of(fd);
    if (!concerns(fd, call, name)) {
      lock.unlock();
      return static_cast<int>(::syscall(call, fd));
    }
    last_ = std::move(name);
    ++count_;
    ++waiting_;
    changed_.wait(lock, [this] { return !held_; });
    --waiting_;
    if (count_ != fails_) return static_cast<int>(::syscall(call, fd));
    errno = EIO;
    return -1;
  }

 private:
  static std::string name_of(int fd) {
    std::array<char, 4096> name;
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = ::readlink(link.c_str(), name.data(), name.size());
    return {name.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
  }
  [[nodiscard]] bool concerns(int fd, long call, const std::string& name) const {
    // That of the names of SQLite's journals, whose errors it passes over: no copy that is whole needs them.
    struct stat status {};
    if (call == SYS_fdatasync && ::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode)) return false;
    return !folder_.empty() && name.starts_with(folder_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string folder_;
  std::string last_;
  int count_ = 0;
  int fails_ = 0;
  int waiting_ = 0;
  bool held_ = false;
};

Syncs& syncs() {
  static Syncs all;
  return all;
}

}  // namespace
}  // namespace di::meta

extern "C" int fsync(int fd) {
  return di::meta::syncs().sync(fd, SYS_fsync);
}
extern "C" int fdatasync(int fd) {
  return di::meta::syncs().sync(fd, SYS_fdatasync);
}

namespace di::meta {
namespace {

class BackupTest : public loop::ManualLoopTest {
 protected:
  BackupTest() {
    std::string made = testing::TempDir() + "di-backup-XXXXXX";
    folder = std::filesystem::canonical(::mkdtemp(made.data()));
    std::filesystem::create_directory(folder + "/copies");
    copy = folder + "/copies/copy";
    auto opened = directory::Catalogue::open(folder + "/catalogue");
    EXPECT_TRUE(opened) << opened.error().message;
    catalogue.emplace(*std::move(opened));
    backup.emplace(loop_, *catalogue->copier());
    syncs().begin(folder + "/copies");
  }
  ~BackupTest() override {
    syncs().begin("");
    backup.reset();
    std::filesystem::remove_all(folder);
  }
  void start() {
    end.reset();
    ASSERT_TRUE(backup->start(copy, [this](const Result<std::uint64_t>& bytes) { end = bytes; }));
  }
  [[nodiscard]] std::size_t files() const {
    const auto all = std::filesystem::directory_iterator(folder + "/copies");
    return static_cast<std::size_t>(std::distance(begin(all), std::filesystem::end(all)));
  }

  std::string folder;
  std::string copy;
  std::optional<directory::Catalogue> catalogue;
  std::optional<Backup> backup;
  std::optional<Result<std::uint64_t>> end;
};

TEST_F(BackupTest, WhileADiskHangsTheLoopAndTheCatalogueGoOn) {
  syncs().hold(true);
  start();
  ASSERT_TRUE(until([] { return syncs().waits(); }));
  EXPECT_EQ(backup->start(copy + "-2", nullptr).error().code, Code::busy);
  auto writer = catalogue->row_writer();
  ASSERT_TRUE(writer);
  const std::array<directory::RowChange, 1> rows{directory::InstanceRow{"di-router.0", 1, 1, 1}};
  EXPECT_TRUE(writer->write(rows)) << "its own disk does not hang";
  EXPECT_FALSE(end.has_value());
  syncs().hold(false);
  ASSERT_TRUE(until([&] { return end.has_value(); }));
  ASSERT_TRUE(*end) << end->error().message;
  EXPECT_EQ(**end, std::filesystem::file_size(copy));
  start();
  ASSERT_TRUE(until([&] { return end.has_value(); }));
  EXPECT_EQ(end->error().code, Code::exists);
}

TEST_F(BackupTest, NobodyIsToldOfACopyThatAStopWaitedFor) {
  syncs().hold(true);
  start();
  ASSERT_TRUE(until([] { return syncs().waits(); }));
  syncs().hold(false);
  backup->stop();
  advance(seconds(1));
  EXPECT_FALSE(end.has_value());
}

// It was called a copy without its last rows, which were in a file beside it.
TEST_F(BackupTest, EachSyncThatFailsIsAnErrorAndLeavesNoFile) {
  int failed = 0;
  for (;; ++failed) {
    syncs().fail(failed + 1);
    start();
    ASSERT_TRUE(until([&] { return end.has_value(); }));
    if (syncs().count() <= failed) break;  // it is whole
    ASSERT_FALSE(*end) << "sync " << failed + 1 << " failed and nobody said so";
    EXPECT_EQ(end->error().code, Code::io) << end->error().message;
    EXPECT_TRUE(end->error().message.starts_with("backup " + copy + ": ")) << end->error().message;
    EXPECT_EQ(files(), 0U);
  }
  syncs().fail(0);
  EXPECT_GT(failed, 0);
  EXPECT_EQ(syncs().last(), folder + "/copies") << "or a power cut takes the name";
  ASSERT_TRUE(*end) << end->error().message;
  EXPECT_EQ(files(), 1U);
  const auto restored = directory::Catalogue::open(copy);
  ASSERT_TRUE(restored) << restored.error().message;
  EXPECT_GT(restored->run(), catalogue->run() + 10000);
}

}  // namespace
}  // namespace di::meta
