#include "model/weights.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/rng.h"

namespace di::model {
namespace {

constexpr const char* two_tensors =
    R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}})";

std::string safetensors(std::string header, const std::string& data) {
  header.resize(align_up(header.size(), 8), ' ');
  std::byte length[8];
  put_le(length, std::uint64_t{header.size()});
  return std::string(as_text(length)) + header + data;
}

std::string data_of(std::size_t bytes) {
  std::string out(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<char>(i * 7);
  return out;
}

// A folder of the test's own, gone afterwards.
class Folder {
 public:
  Folder() {
    std::string name = ::testing::TempDir() + "di-weights-XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path_ = name;
    write("config.json", "{}");
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << text;
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Error parse_error(const std::string& file) {
  const auto header = safetensors_parse(as_bytes(file));
  EXPECT_FALSE(header.ok());
  return header.ok() ? Error{Code::ok, 0, ""} : header.error();
}

TEST(Weights, tensors_are_where_the_header_says) {
  const Folder folder;
  folder.write("model.safetensors", safetensors(two_tensors, data_of(32)));
  const auto weights = Weights::open(folder.path());
  ASSERT_TRUE(weights.ok()) << weights.error().message;
  const auto a = weights->tensor("a", {2, 3});
  ASSERT_TRUE(a.ok()) << a.error().message;
  EXPECT_EQ(a->dtype, Dtype::f32);
  EXPECT_EQ(a->count(), 6u);
  const auto b = weights->tensor("b", {4});
  ASSERT_TRUE(b.ok());
  EXPECT_EQ(b->dtype, Dtype::bf16);
  EXPECT_EQ(b->bf16()[0], static_cast<std::uint16_t>((static_cast<std::uint8_t>(25 * 7) << 8) | (24 * 7)));
  EXPECT_EQ(weights->data_bytes(), 32u);
}

TEST(Weights, a_missing_or_misshapen_tensor_names_file_and_tensor) {
  const Folder folder;
  folder.write("model.safetensors", safetensors(R"({"h":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},
                               "w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                                                data_of(8)));
  const auto weights = Weights::open(folder.path());
  ASSERT_TRUE(weights.ok()) << weights.error().message;
  EXPECT_EQ(weights->tensor("x", {1}).error().message, folder.path() + ": no tensor x");
  EXPECT_EQ(weights->tensor("w", {1, 2}).error().message,
            folder.path() + "/model.safetensors: w: shape [1], config.json asks for [1, 2]");
  EXPECT_EQ(weights->tensor("h", {2}).error().code, Code::unsupported);
}

TEST(Weights, a_missing_file_is_named) {
  const Folder folder;
  const auto weights = Weights::open(folder.path());
  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.error().code, Code::not_found);
  EXPECT_EQ(weights.error().message, folder.path() + "/model.safetensors: No such file or directory");
}

TEST(Weights, a_file_cut_anywhere_is_refused) {
  const std::string whole = safetensors(two_tensors, data_of(32));
  ASSERT_TRUE(safetensors_parse(as_bytes(whole)).ok());
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const Error error = parse_error(whole.substr(0, bytes));
    EXPECT_EQ(error.code, Code::corrupt) << bytes;
    EXPECT_NE(error.message.find("truncated?"), std::string::npos) << bytes << ": " << error.message;
  }
  EXPECT_EQ(parse_error(whole + "x").code, Code::corrupt);
}

TEST(Weights, hostile_headers_are_refused) {
  const std::string data = data_of(32);
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  for (const std::string& header :
       {entry("\"F32\"", "[8]", "[0,36]"),                        // past the end
        entry("\"F32\"", "[8]", "[32,0]"),                        // backwards
        entry("\"F32\"", "[8]", "[-4,28]"),                       //
        entry("\"F32\"", "[8]", "[0,18446744073709551615]"),      //
        entry("\"F32\"", "[8]", "[0]"),                           //
        entry("\"F32\"", "[8]", "[0,32,64]"),                     //
        entry("\"F32\"", "[7]", "[0,32]"),                        // shape and bytes disagree
        entry("\"F32\"", "[4294967296,4294967296]", "[0,32]"),    // the product wraps to 0
        entry("\"F32\"", "[4611686018427387904,4,2]", "[0,32]"),  //
        entry("\"F32\"", "[-8]", "[0,32]"),                       //
        entry("\"F32\"", "[8.0]", "[0,32]"),                      //
        entry("\"F32\"", "[1,1,1,1,1,1,1,1,8]", "[0,32]"),        // too many dimensions
        entry("\"F99\"", "[8]", "[0,32]"),                        //
        entry("4", "[8]", "[0,32]"),                              //
        entry("\"F32\"", "8", "[0,32]"),                          //
        entry("\"F32\"", "[7]", "[4,32]"),                        // a hole
        entry("\"F32\"", "[7]", "[0,28]"),                        // bytes left over
        std::string(R"({"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},
                           "b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})"),    // overlap
        std::string(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},
                           "a":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}})"),  // twice
        std::string(R"({"a":3})"),
        std::string(R"({"a":null})"),
        std::string("[]"),
        std::string("{"),
        std::string("{\"a\":\xff}")}) {
    EXPECT_EQ(parse_error(safetensors(header, data)).code, Code::corrupt) << header;
  }
  std::string huge = safetensors(two_tensors, data);
  for (int i = 0; i < 8; ++i) huge[static_cast<std::size_t>(i)] = '\xff';
  EXPECT_EQ(parse_error(huge).code, Code::corrupt);
  EXPECT_TRUE(safetensors_parse(as_bytes(safetensors("{}", ""))).ok());
  EXPECT_TRUE(safetensors_parse(as_bytes(safetensors(R"({"__metadata__":{"format":"pt"},
      "e":{"dtype":"F32","shape":[0,9],"data_offsets":[0,0]}})",
                                                     "")))
                  .ok());
}

// Whatever bytes change, a header that passes describes only bytes of the file.
TEST(Weights, mutated_headers_never_describe_bytes_outside_the_file) {
  constexpr std::uint64_t seed = 20260801;
  std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  const std::string whole = safetensors(two_tensors, data_of(32));
  constexpr std::string_view alphabet = "0123456789[]{},:\"-.eabF326B1 \\";
  int passed = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string file = whole;
    for (std::uint64_t change = rng.below(4) + 1; change > 0 && !file.empty(); --change) {
      const std::size_t at = rng.below(file.size());
      switch (rng.below(5)) {
        case 0:
          file[at] = static_cast<char>(rng.next());
          break;
        case 1:
          file[at] = alphabet[rng.below(alphabet.size())];
          break;
        case 2:
          file.erase(at, rng.below(9));
          break;
        case 3:
          file.insert(at, file.substr(rng.below(file.size()), rng.below(9)));
          break;
        default:
          file[at] = static_cast<char>(file[at] ^ (1 << rng.below(8)));
          break;
      }
    }
    const auto header = safetensors_parse(as_bytes(file));
    if (!header) {
      ASSERT_EQ(header.error().code, Code::corrupt);
      ASSERT_FALSE(header.error().message.empty());
      continue;
    }
    ++passed;
    ASSERT_LE(header->header_bytes, file.size());
    std::uint64_t sum_bytes = 0;
    for (const SafetensorsEntry& entry : header->entries) {
      ASSERT_LE(entry.begin, entry.end);
      ASSERT_LE(header->header_bytes + entry.end, file.size());
      sum_bytes += entry.end - entry.begin;
    }
    ASSERT_EQ(sum_bytes, file.size() - header->header_bytes);
  }
  EXPECT_GT(passed, 100);  // changes of data bytes alone pass
}

TEST(Weights, shards_are_found_through_the_index) {
  const Folder folder;
  folder.write("one.safetensors", safetensors(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
      "b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                                              std::string(8, '\1')));
  folder.write("two.safetensors", safetensors(R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                                              std::string(4, '\2')));
  folder.write("model.safetensors.index.json",
               R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  const auto weights = Weights::open(folder.path());
  ASSERT_TRUE(weights.ok()) << weights.error().message;
  EXPECT_EQ(std::to_integer<int>(weights->tensor("a", {1})->data[0]), 1);
  EXPECT_EQ(std::to_integer<int>(weights->tensor("b", {1})->data[0]), 2);

  folder.write("model.safetensors.index.json",
               R"({"weight_map":{"a":"one.safetensors","c":"two.safetensors"}})");
  EXPECT_EQ(Weights::open(folder.path()).error().message,
            folder.path() + "/two.safetensors: no tensor c, which the index puts there");
  folder.write("model.safetensors.index.json", R"({"weight_map":{"a":"../one.safetensors"}})");
  EXPECT_EQ(Weights::open(folder.path()).error().code, Code::corrupt);
  folder.write("model.safetensors.index.json", R"({"weight_map":{"a":"three.safetensors"}})");
  EXPECT_EQ(Weights::open(folder.path()).error().message,
            folder.path() + "/three.safetensors: No such file or directory");
  folder.write("model.safetensors.index.json", R"({"weight_map":[]})");
  EXPECT_EQ(Weights::open(folder.path()).error().code, Code::corrupt);
}

TEST(Weights, revision_changes_with_every_part_it_covers) {
  const Folder folder;
  const std::size_t data_bytes = (std::size_t{3} << 20);
  const std::string header = R"({"a":{"dtype":"U8","shape":[3145728],"data_offsets":[0,3145728]}})";
  const std::string original = safetensors(header, data_of(data_bytes));
  const auto revision = [&](const std::string& file) {
    folder.write("model.safetensors", file);
    const auto weights = Weights::open(folder.path());
    EXPECT_TRUE(weights.ok());
    return to_hex(weights->revision());
  };
  const std::string first = revision(original);
  EXPECT_EQ(revision(original), first);
  std::string changed = original;
  changed.back() = static_cast<char>(changed.back() + 1);
  EXPECT_NE(revision(changed), first) << "last MiB";
  changed = original;
  changed[200] = static_cast<char>(changed[200] + 1);
  EXPECT_NE(revision(changed), first) << "first MiB";
  changed = original;
  changed[changed.size() / 2] = static_cast<char>(changed[changed.size() / 2] + 1);
  EXPECT_EQ(revision(changed), first) << "the middle is not read, by design";
  changed = original;
  changed[changed.find('a')] = 'z';
  EXPECT_NE(revision(changed), first) << "header";
  folder.write("config.json", "{ }");
  EXPECT_NE(revision(original), first) << "config.json";
}

TEST(Weights, misaligned_data_are_refused) {
  const Folder folder;
  folder.write("model.safetensors", safetensors(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
      "b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
                                                std::string(6, '\0')));
  const auto weights = Weights::open(folder.path());
  ASSERT_TRUE(weights.ok()) << weights.error().message;
  EXPECT_EQ(weights->tensor("b", {1}).error().code, Code::corrupt);
}

}  // namespace
}  // namespace di::model
