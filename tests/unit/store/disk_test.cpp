#include "store/disk.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>

#include "base/crypto.h"
#include "base/fd.h"
#include "base/rng.h"
#include "store/disk_folder.h"
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

enum class Kind : std::uint8_t { file, folder };

// What every kind of disk that is made of files has to do; the parts of the folder are short.
struct EachDiskTest : DiskTest, testing::WithParamInterface<Kind> {
  static constexpr std::uint64_t part_bytes = 68 << 10;
  Result<DiskFile> create(std::uint64_t bytes, bool prewrite,
                          const std::function<void(std::uint64_t)>& progress = {}) const {
    if (GetParam() == Kind::file) return disk_create(path, bytes, prewrite, progress);
    return folder_create(path, bytes, prewrite, progress, part_bytes);
  }
  [[nodiscard]] Result<DiskFile> open() const {
    return GetParam() == Kind::file ? disk_open(path) : folder_open(path);
  }
  // Bytes that the file system has given.
  [[nodiscard]] std::uint64_t taken() const {
    std::uint64_t sum = 0;
    const auto add = [&](const std::string& file) {
      struct stat status {};
      EXPECT_EQ(::stat(file.c_str(), &status), 0);
      sum += static_cast<std::uint64_t>(status.st_blocks) * 512;
    };
    if (GetParam() == Kind::file) {
      add(path);
    } else {
      for (const auto& entry : std::filesystem::directory_iterator(path)) add(entry.path());
    }
    return sum;
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, EachDiskTest, testing::Values(Kind::file, Kind::folder),
                         [](const auto& param) { return param.param == Kind::file ? "file" : "folder"; });

TEST_P(EachDiskTest, accesses_in_pieces_go_to_their_places) {
  constexpr std::uint64_t bytes = 1 << 20;
  Bytes image(bytes);
  Rng rng(7);
  std::printf("seed=7\n");
  auto made = create(bytes, true);
  ASSERT_TRUE(made.ok()) << made.error().message;
  AlignedBuffer buffer(bytes);
  for (int round = 0; round < 200; ++round) {
    // A few pieces beside each other on the disk and apart in memory, over any number of parts.
    std::vector<std::uint64_t> lengths(1 + rng.below(disk_pieces_max));
    std::uint64_t length = 0;
    for (std::uint64_t& each : lengths) {
      each = 4096 * rng.below(12);
      length += each;
    }
    const std::uint64_t offset = 4096 * rng.below((bytes - length) / 4096 + 1);
    std::vector<MutableByteView> pieces;
    std::uint64_t at = 0;
    for (const std::uint64_t each : lengths) {
      pieces.push_back(buffer.first(bytes).subspan(at, each));
      at += each + 4096;
    }
    if (rng.chance(0.5)) {
      std::uint64_t to = offset;
      std::vector<ByteView> from;
      for (const MutableByteView piece : pieces) {
        for (std::byte& b : piece) b = static_cast<std::byte>(rng.next());
        std::copy(piece.begin(), piece.end(), image.begin() + static_cast<std::ptrdiff_t>(to));
        to += piece.size();
        from.emplace_back(piece);
      }
      ASSERT_TRUE(made->disk->write_pieces(offset, from).ok());
    } else {
      ASSERT_TRUE(made->disk->read_pieces(offset, pieces).ok());
      std::uint64_t from = offset;
      for (const MutableByteView piece : pieces) {
        ASSERT_TRUE(
            std::equal(piece.begin(), piece.end(), image.begin() + static_cast<std::ptrdiff_t>(from)));
        from += piece.size();
      }
    }
  }
  ASSERT_TRUE(made->disk->flush().ok());
  made->disk.reset();
  auto opened = open();
  ASSERT_TRUE(opened.ok()) << opened.error().message;
  ASSERT_EQ(opened->disk->bytes(), bytes);
  ASSERT_TRUE(opened->disk->read(0, buffer.first(bytes)).ok());
  EXPECT_TRUE(std::equal(image.begin(), image.end(), buffer.first(bytes).begin()));
}

TEST_P(EachDiskTest, is_allocated_written_and_read) {
  {
    auto made = create(1 << 20, true);
    ASSERT_TRUE(made.ok()) << made.error().message;
    EXPECT_EQ(made->disk->bytes(), 1u << 20);
    EXPECT_GE(taken(), 1u << 20);
    AlignedBuffer buffer(8192);
    buffer.first(8192)[5] = std::byte{55};
    ASSERT_TRUE(made->disk->write(4096, buffer.first(8192)).ok());
    ASSERT_TRUE(made->disk->flush().ok());
  }
  auto opened = open();
  ASSERT_TRUE(opened.ok()) << opened.error().message;
  AlignedBuffer buffer(8192);
  ASSERT_TRUE(opened->disk->read(4096, buffer.first(8192)).ok());
  EXPECT_EQ(buffer.first(8192)[5], std::byte{55});
}

TEST_P(EachDiskTest, existing_one_is_not_replaced) {
  ASSERT_TRUE(create(1 << 20, false).ok());
  EXPECT_EQ(create(1 << 20, false).error().code, Code::exists);
}

TEST_P(EachDiskTest, second_process_is_kept_out) {
  const auto first = create(1 << 20, false);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(open().error().code, Code::busy);
}

TEST_F(DiskTest, wrong_files_are_refused) {
  EXPECT_EQ(disk_open(path).error().code, Code::not_found);
  EXPECT_EQ(disk_open(directory).error().code, Code::invalid);  // no disk makes a directory of a file
  // No file system has a file of 8 EiB.
  constexpr std::uint64_t longest = (std::uint64_t{1} << 63) - disk_align_bytes;
  EXPECT_EQ(disk_create(path, longest, false, {}).error().code, Code::no_space);
  std::FILE* file = std::fopen(path.c_str(), "w");
  std::fputs("not a volume", file);
  std::fclose(file);
  EXPECT_EQ(disk_open(path).error().code, Code::corrupt);  // no volume has that length: it was cut short
}

TEST_P(EachDiskTest, that_shrank_is_an_error_not_a_crash) {
  auto made = create(1 << 20, false);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(*made->disk->bytes_now(), 1u << 20);
  ASSERT_EQ(::truncate((GetParam() == Kind::file ? path : path + "/part.0").c_str(), 8192 + 512), 0);
  AlignedBuffer buffer(8192);
  EXPECT_EQ(made->disk->read(4096, buffer.first(8192)).error().code, Code::io);
  EXPECT_EQ(*made->disk->bytes_now(), 8192u + 512u);
  EXPECT_EQ(made->disk->bytes(), 1u << 20);
  EXPECT_EQ(made->disk->read(16384, buffer.first(8192)).error().code, Code::io);
}

TEST_P(EachDiskTest, whose_file_was_removed_has_no_length) {
  auto made = create(1 << 20, false);
  ASSERT_TRUE(made.ok());
  std::filesystem::remove(GetParam() == Kind::file ? path : path + "/part.1");
  EXPECT_TRUE(made->disk->flush().ok());
  EXPECT_EQ(made->disk->bytes_now().error().code, Code::not_found);
  AlignedBuffer buffer(4096);
  EXPECT_TRUE(made->disk->read(part_bytes, buffer.first(4096)).ok());  // as long as it is open
}

// Asked each second by a loop that must not wait for a file system that is away.
TEST_F(DiskTest, of_a_folder_nobody_is_asked_for_its_length) {
  const auto made = folder_create(path, 1 << 20, false);
  ASSERT_TRUE(made.ok());
  ASSERT_EQ(::truncate((path + "/part.0").c_str(), 8192), 0);
  EXPECT_EQ(*made->disk->bytes_now(), 1u << 20);
  EXPECT_TRUE(made->disk->flush().ok());
  EXPECT_EQ(*made->disk->bytes_now(), 8192u);
}

TEST_F(DiskTest, what_somebody_is_making_is_not_removed) {
  EXPECT_TRUE(disk_remove(path).ok());
  {
    const auto made = disk_create(path, 1 << 20, false);
    ASSERT_TRUE(made.ok());
    EXPECT_EQ(disk_remove(path).error().code, Code::busy);
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(disk_remove(path).ok());
  EXPECT_FALSE(std::filesystem::exists(path));
}

// It waits for the lock of what an attempt has left; meanwhile that goes, and another begins.
TEST_F(DiskTest, what_was_made_in_place_of_a_leftover_is_not_removed) {
  const auto opened = [&] {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (std::filesystem::read_symlink(entry.path(), gone).string().starts_with(path)) ++count;
    }
    return count;
  };
  std::optional<Result<DiskFile>> leftover = disk_create(path, 1 << 20, false);
  ASSERT_TRUE(leftover->ok());
  ASSERT_EQ(opened(), 1U);
  Status removed;
  std::thread other([&] { removed = disk_remove(path); });
  while (opened() < 2) std::this_thread::yield();
  std::filesystem::remove(path);
  const auto fresh = disk_create(path, 1 << 20, false);
  leftover.reset();
  other.join();
  EXPECT_TRUE(fresh.ok());
  EXPECT_EQ(removed.error().code, Code::busy);
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(DiskTest, a_new_volume_takes_no_other_ones_name) {
  ASSERT_TRUE(disk_create(path + ".new", 1 << 20, false).ok());
  ASSERT_TRUE(disk_rename(path + ".new", path).ok());
  ASSERT_TRUE(disk_create(path + ".new", 2 << 20, false).ok());
  EXPECT_EQ(disk_rename(path + ".new", path).error().code, Code::exists);
  EXPECT_EQ(std::filesystem::file_size(path), 1U << 20);
  EXPECT_EQ(std::filesystem::file_size(path + ".new"), 2U << 20);
}

// ---- folders

TEST_F(DiskTest, folder_has_short_files_and_a_name_when_it_is_whole) {
  {
    auto made = folder_create(path + ".new", 1 << 20, false, {}, 300 << 10);
    ASSERT_TRUE(made.ok()) << made.error().message;
    std::map<std::string, std::uint64_t> files;
    for (const auto& entry : std::filesystem::directory_iterator(path + ".new"))
      files[entry.path().filename()] = entry.file_size();
    EXPECT_EQ(files, (std::map<std::string, std::uint64_t>{{"lock", 0},
                                                           {"part.0", 300 << 10},
                                                           {"part.1", 300 << 10},
                                                           {"part.2", 300 << 10},
                                                           {"part.3", 124 << 10}}));
    std::filesystem::create_directory(path);  // the operator has made it
    EXPECT_EQ(folder_open(path).error().code, Code::not_found);
    EXPECT_EQ(folder_remove(path + ".new").error().code, Code::busy);
    ASSERT_TRUE(folder_rename(path + ".new", path).ok());
    EXPECT_EQ(folder_open(path).error().code, Code::busy);
    AlignedBuffer buffer(4096);
    EXPECT_TRUE(made->disk->write(0, buffer.first(4096)).ok());  // still the same one
    std::filesystem::remove(path + "/lock");
    EXPECT_EQ(folder_open(path).error().code, Code::busy);
  }
  EXPECT_TRUE(folder_open(path).ok());
  EXPECT_TRUE(folder_remove(path).ok());
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(DiskTest, folder_has_a_bounded_number_of_files) {
  auto made = folder_create(path, (16 << 20) + 4096, false, {}, 4096);
  ASSERT_TRUE(made.ok()) << made.error().message;
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(path)) ++files;
  EXPECT_LE(files, folder_parts_max + 1);
  EXPECT_EQ(made->disk->bytes(), (16u << 20) + 4096);
}

TEST_F(DiskTest, wrong_folders_are_refused) {
  EXPECT_EQ(folder_open(path).error().code, Code::not_found);
  { ASSERT_TRUE(folder_create(path, 1 << 20, false, {}, 300 << 10).ok()); }
  std::filesystem::rename(path + "/part.1", path + "/1");
  EXPECT_EQ(folder_open(path).error().code, Code::corrupt);
  std::filesystem::rename(path + "/1", path + "/part.1");
  EXPECT_TRUE(folder_open(path).ok());
  for (const char* part : {"/part.0", "/part.1", "/part.3"}) {
    const auto length = std::filesystem::file_size(path + part);
    std::filesystem::resize_file(path + part, length - 4);
    EXPECT_EQ(folder_open(path).error().code, Code::corrupt) << part;
    std::filesystem::resize_file(path + part, length);
  }
  EXPECT_TRUE(folder_open(path).ok());
  EXPECT_TRUE(folder_remove(path).ok());
  std::filesystem::create_directories(path + "/photos");
  EXPECT_EQ(folder_open(path).error().code, Code::invalid);
  EXPECT_TRUE(folder_remove(path).ok());
  EXPECT_TRUE(std::filesystem::exists(path + "/photos"));
  std::filesystem::remove_all(path);
  { ASSERT_TRUE(disk_create(path, 1 << 20, false).ok()); }
  EXPECT_EQ(folder_open(path).error().code, Code::invalid);
}

TEST_F(DiskTest, folder_on_a_file_system_without_room_is_no_space_and_leaves_nothing) {
  // No file system is that large.
  const auto made = folder_create(path, std::uint64_t{1} << 50, false);
  ASSERT_FALSE(made.ok());
  EXPECT_TRUE(made.error().code == Code::no_space || made.error().code == Code::io) << made.error().message;
  EXPECT_FALSE(std::filesystem::exists(path));
}

// ---- files and devices

// F09: room is taken when a volume is made, so another user of the file system cannot take it later.
TEST_F(DiskTest, file_system_without_room_is_no_space) {
  // No file system is that large.
  const auto made = disk_create(path, std::uint64_t{1} << 50, false);
  ASSERT_FALSE(made.ok());
  EXPECT_TRUE(made.error().code == Code::no_space || made.error().code == Code::io) << made.error().message;
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_P(EachDiskTest, prewriting_tells_how_far_it_is) {
  std::vector<std::uint64_t> told;
  ASSERT_TRUE(create(10 << 20, true, [&](std::uint64_t bytes) { told.push_back(bytes); }).ok());
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
  if (!loop.valid() || ::ioctl(loop.get(), LOOP_SET_FD, file.get()) != 0)
    GTEST_SKIP() << "no loop devices here";
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

TEST_P(EachDiskTest, volume_lives_in_it) {
  const kv::Layout layout = kv::layout_v41();
  AlignedBuffer scratch;
  bool broken = false;
  {
    auto made = create(16 << 20, false);
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
  auto opened = open();
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
