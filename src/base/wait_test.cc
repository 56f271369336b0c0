#include "base/wait.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/folder_testing.h"

namespace lockstep {
namespace {

std::vector<std::string> told;

class Waiting : public testing::Test {
 protected:
  void SetUp() override {
    told.clear();
    tell_of_waiting([](const std::string& line) { told.push_back(line); });
  }
  void TearDown() override {
    ::unsetenv("LOCKSTEP_WAIT");
    set_default_wait(10);
  }
};

TEST_F(Waiting, EndsWithTheAnswerAndTellsOnce) {
  ::setenv("LOCKSTEP_WAIT", "3600", 1);
  int asked = 0;
  EXPECT_TRUE(wait_for("a thing", [&] { return ++asked == 4; }));
  EXPECT_EQ(asked, 4);
  EXPECT_EQ(told, std::vector<std::string>{"waiting up to 3600 s for a thing"});
  EXPECT_TRUE(wait_for("what is there", [] { return true; }));
  EXPECT_EQ(told.size(), 1u);
}

TEST_F(Waiting, HasAnEnd) {
  for (const char* seconds : {"0", "0.2"}) {
    ::setenv("LOCKSTEP_WAIT", seconds, 1);
    EXPECT_FALSE(wait_for("what never comes", [] { return false; }));
  }
  EXPECT_EQ(told, std::vector<std::string>{"waiting up to 0.2 s for what never comes"});
}

TEST_F(Waiting, TakesALockThatIsGivenUpMeanwhile) {
  const TestFolder folder;
  const std::string path = folder.path() / "lock";
  const int theirs = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  const int ours = ::open(path.c_str(), O_RDWR);
  ASSERT_EQ(::flock(theirs, LOCK_EX), 0);
  ::setenv("LOCKSTEP_WAIT", "0", 1);
  EXPECT_FALSE(wait_for_lock(ours, "it"));
  ::setenv("LOCKSTEP_WAIT", "3600", 1);
  static int held;  // given up once the wait has begun
  held = theirs;
  tell_of_waiting([](const std::string& line) {
    told.push_back(line);
    ::close(held);
  });
  EXPECT_TRUE(wait_for_lock(ours, "it"));
  EXPECT_EQ(told, std::vector<std::string>{
                      "waiting up to 3600 s for it, which another process has locked"});
  ::close(ours);
}

TEST_F(Waiting, ItsLengthIsANumberOfSeconds) {
  EXPECT_EQ(longest_wait(), 10);
  set_default_wait(0);
  EXPECT_EQ(longest_wait(), 0);
  ::setenv("LOCKSTEP_WAIT", "3", 1);
  EXPECT_EQ(longest_wait(), 3);
  for (const char* wrong : {"soon", "-1", "nan", "1e9", "5 s"}) {
    ::setenv("LOCKSTEP_WAIT", wrong, 1);
    EXPECT_THROW(longest_wait(), Usage) << wrong;
  }
}

}  // namespace
}  // namespace lockstep
