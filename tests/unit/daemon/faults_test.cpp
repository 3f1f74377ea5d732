#include "daemon/faults.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>

namespace di::daemon {
namespace {

struct Faults : testing::Test {
  void SetUp() override {
    char pattern[] = "/tmp/di-faults-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    folder = pattern;
    test_fault_reset();
  }
  void TearDown() override {
    test_fault_reset();
    std::filesystem::remove_all(folder);
  }
  std::string folder;
};

TEST_F(Faults, NothingArmedDoesNothingAndCounts) {
  EXPECT_EQ(fault(FaultPoint::decode_mid_step), FaultAction::none);
  const std::vector<FaultState> states = fault_states();
  const auto found = std::find_if(states.begin(), states.end(),
                                  [](const FaultState& s) { return s.name == "decode_mid_step"; });
  ASSERT_NE(found, states.end());
  EXPECT_EQ(found->hits, 1u);
  EXPECT_EQ(found->armed, "");
}

TEST_F(Faults, FiresAtTheNthHitAndOnlyOnce) {
  ASSERT_TRUE(fault_arm("decode_mid_step:3=drop", folder, "di-decode.0").ok());
  EXPECT_TRUE(fault_armed(FaultPoint::decode_mid_step));
  EXPECT_FALSE(fault_armed(FaultPoint::decode_after_seat));
  std::string seen;
  for (int i = 0; i < 6; ++i) seen += fault(FaultPoint::decode_mid_step) == FaultAction::drop ? 'd' : '.';
  EXPECT_EQ(seen, "..d...");
}

TEST_F(Faults, AFaultThatFiredStaysOffForTheNextProcess) {
  ASSERT_TRUE(fault_arm("decode_mid_step=delay", folder, "di-decode.0").ok());
  EXPECT_EQ(fault(FaultPoint::decode_mid_step), FaultAction::delay);
  test_fault_reset();
  ASSERT_TRUE(fault_arm("decode_mid_step=delay", folder, "di-decode.0").ok());
  EXPECT_EQ(fault(FaultPoint::decode_mid_step), FaultAction::none);
  test_fault_reset();
  ASSERT_TRUE(fault_arm("decode_mid_step=delay", folder, "di-decode.1").ok());
  EXPECT_EQ(fault(FaultPoint::decode_mid_step), FaultAction::delay) << "another instance has its own";
}

TEST_F(Faults, KillLeavesItsMarkBehind) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (!fault_arm("kvd_before_handover_ack=kill,decode_mid_step=drop", folder, "di-kvd.host0").ok())
      ::_exit(3);
    fault(FaultPoint::kvd_before_handover_ack);
    ::_exit(4);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(folder + "/faults/di-kvd.host0.kvd_before_handover_ack"));
}

TEST_F(Faults, WrongSpecificationsSayWhy) {
  EXPECT_EQ(fault_check("nowhere=kill").error().message, "unknown fault point 'nowhere'");
  EXPECT_EQ(fault_check("decode_mid_step=explode").error().message,
            "unknown action 'explode': want kill, stop, drop or delay");
  EXPECT_EQ(fault_check("decode_mid_step:0=kill").error().message,
            "'0' is not a count of hits: want 1 or more");
  EXPECT_EQ(fault_check("decode_mid_step").error().message,
            "'decode_mid_step': want NAME[:n]=kill|stop|drop|delay");
  EXPECT_TRUE(fault_check("").ok());
}

TEST_F(Faults, NamesAreUniqueAndBelongToPrograms) {
  std::set<std::string_view> names;
  for (const FaultState& state : fault_states()) {
    EXPECT_TRUE(names.insert(state.name).second) << state.name;
    EXPECT_TRUE(state.program.starts_with("di-")) << state.name;
    EXPECT_FALSE(state.sentence.empty()) << state.name;
  }
  EXPECT_GE(names.size(), 15u);
}

}  // namespace
}  // namespace di::daemon
