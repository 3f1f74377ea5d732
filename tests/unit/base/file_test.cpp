#include "base/file.h"

#include <gtest/gtest.h>

#include <fstream>

namespace di {
namespace {

TEST(File, ReadsWholeFileWithinTheBound) {
  const std::string path = testing::TempDir() + "file_read_test";
  std::ofstream(path, std::ios::binary) << std::string("a\0b", 3);
  const auto text = file_read(path, 3);
  ASSERT_TRUE(text);
  EXPECT_EQ(*text, std::string("a\0b", 3));
  const auto over = file_read(path, 2);
  ASSERT_FALSE(over);
  EXPECT_EQ(over.error().code, Code::invalid);
  EXPECT_NE(over.error().message.find(path), std::string::npos);
}

TEST(File, SaysWhatIsWrong) {
  const auto missing = file_read("/nonexistent/x", 10);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::not_found);
  EXPECT_EQ(missing.error().message, "/nonexistent/x: No such file or directory");
  const auto folder = file_read("/", 10);
  ASSERT_FALSE(folder);
  EXPECT_EQ(folder.error().code, Code::invalid);
}

TEST(FileWrite, ReplacesAsAWhole) {
  const std::string path = testing::TempDir() + "di-file-write";
  ASSERT_TRUE(file_write(path, "first, longer text"));
  ASSERT_TRUE(file_write(path, "second"));
  EXPECT_EQ(*file_read(path, 100), "second");
  EXPECT_EQ(file_write("/nonexistent/x", "").error().code, Code::not_found);
}

TEST(File, TheFolderOfANameIsFlushed) {
  EXPECT_TRUE(names_flush(testing::TempDir()).ok());
  EXPECT_EQ(names_flush("/nonexistent").error().code, Code::not_found);
  EXPECT_TRUE(name_flush("no-folder").ok());
  EXPECT_TRUE(name_flush("/of-the-root").ok());
  EXPECT_TRUE(name_flush(testing::TempDir() + "x").ok());
  EXPECT_EQ(name_flush("/nonexistent/x").error().message, "open /nonexistent: No such file or directory");
}

}  // namespace
}  // namespace di
