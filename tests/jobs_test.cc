// Processes side by side: this test starts itself, as compare starts the program.
#include "cli/jobs.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "base/folder_testing.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolder = "LOCKSTEP_JOBS_TEST";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "none" : value;
}

/// Says what it was given, in a file of its own, once `others` processes have come as far: it is
/// they that run at once.
void say(int job, int others) {
  const fs::path folder = variable(kFolder);
  std::ofstream(folder / ("here_" + std::to_string(job))).close();
  for (int i = 0; i < others; ++i) {
    for (int tries = 0; !fs::exists(folder / ("here_" + std::to_string(i))); ++tries) {
      ASSERT_LT(tries, 3000) << "alone";
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  std::ofstream(folder / std::to_string(job))
      << variable("CUDA_VISIBLE_DEVICES") << " " << variable("LOCKSTEP_THREADS");
}

/// What a process of the name does.
class Child : public testing::Test {
 public:
  explicit Child(std::string name) : name_(std::move(name)) {}
  void TestBody() override {
    if (name_ == "First") return say(0, 2);
    if (name_ == "Second") return say(1, 2);
    if (name_ == "Third") return say(2, 0);
    if (name_ == "IsKilled") std::abort();
    std::fputs("error: the reason\n", stderr);
    std::_Exit(1);
  }

 private:
  std::string name_;
};

// Tests of the processes alone.
const bool kRegistered = [] {
  if (std::getenv(kFolder) == nullptr) return false;
  for (const char* name : {"First", "Second", "Third", "Fails", "IsKilled"}) {
    testing::RegisterTest("Child", name, nullptr, nullptr, __FILE__, __LINE__,
                          [name]() -> testing::Test* { return new Child(name); });
  }
  return true;
}();

Job child(const std::string& name) { return {name, {"--gtest_filter=Child." + name}}; }

class Jobs : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv(kFolder, folder_.path().c_str(), 1);
    ::unsetenv("LOCKSTEP_THREADS");
    ::unsetenv("CUDA_VISIBLE_DEVICES");
  }
  void TearDown() override { ::unsetenv(kFolder); }

  std::string said(int job) const {
    std::ifstream in(folder_.path() / std::to_string(job));
    std::string line;
    std::getline(in, line);
    return line;
  }

  const TestFolder folder_;
};

TEST_F(Jobs, TwoRunAtOnceAndShareOutTheCards) {
  ::setenv("LOCKSTEP_THREADS", "3", 1);
  const auto failed = run_jobs({child("First"), child("Second"), child("Third")}, 2, {"4", "7"});
  EXPECT_EQ(failed, std::vector<std::string>(3));
  EXPECT_EQ(said(0), "4 3");
  EXPECT_EQ(said(1), "7 3");
  EXPECT_TRUE(said(2) == "4 3" || said(2) == "7 3") << said(2);  // whichever was free
  ::unsetenv("LOCKSTEP_THREADS");
}

TEST_F(Jobs, OneCardIsLeftAsItIs) {
  ::setenv("CUDA_VISIBLE_DEVICES", "5", 1);
  EXPECT_EQ(gpus(), std::vector<std::string>{"5"});
  EXPECT_EQ(run_jobs({child("Third")}, 4, gpus()), std::vector<std::string>(1));
  EXPECT_TRUE(said(2).starts_with("5 ")) << said(2);
  ::setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc", 1);
  EXPECT_EQ(gpus(), (std::vector<std::string>{"2", "GPU-abc"}));
}

TEST_F(Jobs, WhatFailsIsToldAndEndsNothingElse) {
  const auto failed = run_jobs({child("Fails"), child("IsKilled"), child("Third")}, 1, {});
  ASSERT_EQ(failed.size(), 3u);
  EXPECT_EQ(failed[0], "the reason");
  EXPECT_NE(failed[1].find("signal 6"), std::string::npos) << failed[1];
  EXPECT_EQ(failed[2], "");
  EXPECT_NE(said(2), "");
}

}  // namespace
}  // namespace lockstep::cli
