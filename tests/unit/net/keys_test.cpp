#include "net/keys.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

namespace di::net {
namespace {

const std::string key_a = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7";
const std::string key_b = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID";
const std::string key_c = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs";

class KeysTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/di-keys-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    folder = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  std::string file(const std::string& name, const std::string& text, mode_t mode) const {
    const std::string path = folder + "/" + name;
    std::ofstream(path) << text;
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }
  std::string folder;
};

TEST_F(KeysTest, RingReadsKeysNamesAndComments) {
  std::vector<std::string> errors;
  const KeyRing ring = KeyRing::parse(
      "# room 2\n\n  " + key_a + "\tdi-decode.0  # the old one\r\n" + key_b + " di-decode.0\n" + key_c,
      "keys", errors);
  EXPECT_TRUE(errors.empty()) << errors.front();
  EXPECT_EQ(ring.count(), 3u);
  EXPECT_TRUE(ring.may_be(key_a, "di-decode.0"));
  EXPECT_TRUE(ring.may_be(key_b, "di-decode.0")) << "a name may have two keys";
  EXPECT_FALSE(ring.may_be(key_a, "di-decode.1"));
  EXPECT_TRUE(ring.may_be(key_c, "di-prefill.0")) << "a key without a name";
  EXPECT_FALSE(ring.may_be(key_c, "di-decode.0")) << "the name is another key's";
  EXPECT_TRUE(ring.may_be(key_a, "")) << "listed";
  EXPECT_FALSE(ring.may_be("", ""));
  EXPECT_FALSE(ring.may_be(key_a.substr(1), ""));
}

TEST_F(KeysTest, EverythingWrongIsReportedWithItsPlace) {
  std::vector<std::string> errors;
  const KeyRing ring = KeyRing::parse(key_a + "\n  short di-decode.0\n" + key_b + " decode\n" + key_c +
                                          " di-decode.0 more\n" + key_a + "\n#" + key_b + "\n",
                                      "keys", errors);
  EXPECT_EQ(errors, (std::vector<std::string>{
                        "keys:2:3: want a public key of 40 characters",
                        "keys:3:42: want the name of an instance, as in di-decode.0",
                        "keys:4:54: want a key and a name only",
                        "keys:5:1: this key stands in the file already",
                    }));
  EXPECT_EQ(ring.count(), 1u);
}

TEST_F(KeysTest, RingIsBounded) {
  std::string text;
  std::string key = key_a;
  for (std::size_t i = 0; i <= keys_max; ++i) {
    const std::string number = std::to_string(100000 + i);
    key.replace(10, number.size(), number);
    text += key + "\n";
  }
  std::vector<std::string> errors;
  EXPECT_EQ(KeyRing::parse(text, "keys", errors).count(), keys_max);
  EXPECT_EQ(errors, (std::vector<std::string>{"keys:8193:1: more than 8192 keys"}));
  errors.clear();
  EXPECT_EQ(KeyRing::read(folder + "/missing", errors).count(), 0u);
  EXPECT_EQ(errors.size(), 1u);
}

TEST_F(KeysTest, MadePairsAreKeysAndFitTogether) {
  for (int i = 0; i < 200; ++i) {
    const KeyPair pair = key_pair_make();
    ASSERT_TRUE(is_key(pair.public_key)) << pair.public_key;
    const Result<KeyPair> again = key_pair_of(pair.secret_key);
    ASSERT_TRUE(again.ok()) << again.error().message;
    EXPECT_EQ(again->public_key, pair.public_key);
  }
  EXPECT_EQ(key_pair_of("short").error().code, Code::invalid);
}

TEST_F(KeysTest, SecretIsReadFromAFileOrAFolderThatOnlyItsOwnerMayUse) {
  const KeyPair pair = key_pair_make();
  const std::string path = file("di-decode.0.secret", "# made for a test\n" + pair.secret_key + "\n", 0600);
  EXPECT_EQ(key_pair_read(path, "di-decode.1")->public_key, pair.public_key);
  EXPECT_EQ(key_pair_read(folder, "di-decode.0")->public_key, pair.public_key);
  EXPECT_EQ(key_pair_read(folder, "di-decode.1").error().code, Code::not_found);
  for (const mode_t mode : {0640, 0604, 0620}) {
    const Error error = key_pair_read(file("open", pair.secret_key, mode), "di-decode.0").error();
    EXPECT_EQ(error.code, Code::denied);
    EXPECT_EQ(error.message, folder + "/open: others than its owner may use it: chmod 600");
  }
  for (const std::string& text :
       {std::string(), pair.secret_key + "\n" + pair.secret_key, std::string("short\n")}) {
    EXPECT_EQ(key_pair_read(file("wrong", text, 0600), "di-decode.0").error().code, Code::invalid);
  }
}

}  // namespace
}  // namespace di::net
