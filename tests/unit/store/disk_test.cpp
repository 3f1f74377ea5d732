#include "store/disk.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "base/crypto.h"
#include "base/fd.h"
#include "tests/unit/store/shelf.h"

namespace di::store {
namespace {

struct DiskTest : testing::Test {
  DiskTest() {
    std::string name = testing::TempDir() + "di-disk-XXXXXX";
    directory = ::mkdtemp(name.data());
    path = directory + "/0.vol";
  }
  ~DiskTest() override { std::filesystem::remove_all(directory); }
  std::string directory;
  std::string path;
};

TEST_F(DiskTest, file_is_allocated_written_and_read) {
  {
    auto made = disk_create(path, 1 << 20, true);
    ASSERT_TRUE(made.ok()) << made.error().message;
    EXPECT_EQ(made->disk->bytes(), 1u << 20);
    struct stat status {};
    ASSERT_EQ(::stat(path.c_str(), &status), 0);
    EXPECT_GE(status.st_blocks * 512, 1 << 20);
    AlignedBuffer buffer(8192);
    buffer.first(8192)[5] = std::byte{55};
    ASSERT_TRUE(made->disk->write(4096, buffer.first(8192)).ok());
    ASSERT_TRUE(made->disk->flush().ok());
  }
  auto opened = disk_open(path);
  ASSERT_TRUE(opened.ok()) << opened.error().message;
  AlignedBuffer buffer(8192);
  ASSERT_TRUE(opened->disk->read(4096, buffer.first(8192)).ok());
  EXPECT_EQ(buffer.first(8192)[5], std::byte{55});
}

TEST_F(DiskTest, existing_file_is_not_replaced) {
  ASSERT_TRUE(disk_create(path, 1 << 20, false).ok());
  EXPECT_EQ(disk_create(path, 1 << 20, false).error().code, Code::exists);
}

TEST_F(DiskTest, second_process_is_kept_out) {
  const auto first = disk_create(path, 1 << 20, false);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(disk_open(path).error().code, Code::busy);
}

TEST_F(DiskTest, wrong_files_are_refused) {
  EXPECT_EQ(disk_open(path).error().code, Code::not_found);
  EXPECT_EQ(disk_open(directory).error().code, Code::io);  // a directory cannot be opened for writing
  std::FILE* file = std::fopen(path.c_str(), "w");
  std::fputs("not a volume", file);
  std::fclose(file);
  EXPECT_EQ(disk_open(path).error().code, Code::corrupt);  // no volume has that length: it was cut short
}

TEST_F(DiskTest, file_that_shrank_is_an_error_not_a_crash) {
  auto made = disk_create(path, 1 << 20, false);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(*made->disk->bytes_now(), 1u << 20);
  ASSERT_EQ(::truncate(path.c_str(), 8192 + 512), 0);
  EXPECT_EQ(*made->disk->bytes_now(), 8192u + 512u);
  EXPECT_EQ(made->disk->bytes(), 1u << 20);
  AlignedBuffer buffer(8192);
  EXPECT_EQ(made->disk->read(4096, buffer.first(8192)).error().code, Code::io);
  EXPECT_EQ(made->disk->read(16384, buffer.first(8192)).error().code, Code::io);
}

TEST_F(DiskTest, file_system_without_room_is_no_space) {
  // No file system is that large.
  const auto made = disk_create(path, std::uint64_t{1} << 50, false);
  ASSERT_FALSE(made.ok());
  EXPECT_TRUE(made.error().code == Code::no_space || made.error().code == Code::io) << made.error().message;
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(DiskTest, prewriting_tells_how_far_it_is) {
  std::vector<std::uint64_t> told;
  ASSERT_TRUE(disk_create(path, 10 << 20, true, [&](std::uint64_t bytes) { told.push_back(bytes); }).ok());
  EXPECT_EQ(told, (std::vector<std::uint64_t>{4 << 20, 8 << 20, 10 << 20}));
}

TEST_F(DiskTest, blank_is_what_nobody_has_written_to) {
  auto made = disk_create(path, 4 << 20, false);
  ASSERT_TRUE(made.ok());
  EXPECT_FALSE(made->device);
  EXPECT_TRUE(*disk_is_blank(*made->disk));
  AlignedBuffer buffer(4096);
  buffer.first(4096)[4095] = std::byte{1};
  ASSERT_TRUE(made->disk->write(1 << 20, buffer.first(4096)).ok());
  EXPECT_TRUE(*disk_is_blank(*made->disk));  // behind the first MiB
  ASSERT_TRUE(made->disk->write((1 << 20) - 4096, buffer.first(4096)).ok());
  EXPECT_FALSE(*disk_is_blank(*made->disk));
}

TEST_F(DiskTest, block_device_is_a_disk) {
  Fd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
  const int number = control.valid() ? ::ioctl(control.get(), LOOP_CTL_GET_FREE) : -1;
  if (number < 0) GTEST_SKIP() << "no loop devices here";
  { ASSERT_TRUE(disk_create(path, (8 << 20) + 4096, false).ok()); }
  const std::string device = "/dev/loop" + std::to_string(number);
  Fd loop(::open(device.c_str(), O_RDWR | O_CLOEXEC));
  Fd file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!loop.valid() || ::ioctl(loop.get(), LOOP_SET_FD, file.get()) != 0) GTEST_SKIP() << "no loop devices here";
  {
    auto opened = disk_open(device);
    EXPECT_TRUE(opened.ok());
    if (opened) {
      EXPECT_TRUE(opened->device);
      EXPECT_EQ(opened->disk->bytes(), (8u << 20) + 4096);
      EXPECT_TRUE(Volume::format(*opened->disk, {1 << 20, {}}).ok());
      EXPECT_TRUE(Volume::open(*opened->disk).ok());
      EXPECT_EQ(disk_open(device).error().code, Code::busy);
    }
  }
  ::ioctl(loop.get(), LOOP_CLR_FD, 0);
}

TEST_F(DiskTest, volume_lives_in_a_real_file) {
  const kv::Layout layout = kv::layout_v41();
  AlignedBuffer scratch;
  bool broken = false;
  {
    auto made = disk_create(path, 16 << 20, false);
    ASSERT_TRUE(made.ok());
    ASSERT_TRUE(Volume::format(*made->disk, {4 << 20, {}}).ok());
    auto volume = Volume::open(*made->disk);
    ASSERT_TRUE(volume.ok());
    const auto put = (*volume)->put_begin(shard_of(layout, 5, 8));
    ASSERT_TRUE(put.ok());
    const PutOutcome outcome = put_run(
        *made->disk, *put,
        [&](MutableByteView to) -> Status {
          const Bytes payload = payload_of(layout, 5, 8);
          std::copy(payload.begin(), payload.end(), to.begin());
          return {};
        },
        scratch, broken);
    ASSERT_TRUE(outcome.status.ok());
    // No put_end, no sync: killed here.
  }
  auto opened = disk_open(path);
  ASSERT_TRUE(opened.ok());
  auto volume = Volume::open(*opened->disk);
  ASSERT_TRUE(volume.ok());
  const auto read = (*volume)->read_begin(5, 0);
  ASSERT_TRUE(read.ok());
  const auto header = read_header(*opened->disk, *read, scratch);
  ASSERT_TRUE(header.ok());
  const Bytes payload = payload_of(layout, 5, 8);
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    const MutableByteView to = scratch.first(layout.segment_bytes(group, 8));
    ASSERT_TRUE(read_segment(*opened->disk, *read, *header, group, to).ok());
    EXPECT_TRUE(std::equal(to.begin(), to.end(),
                           payload.begin() + static_cast<std::ptrdiff_t>(layout.segment_offset(group, 8))));
  }
}

}  // namespace
}  // namespace di::store
