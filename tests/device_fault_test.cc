// A CUDA device that fails in the middle of a run: the run stops with one line, and what it left is
// good. Each part runs in a process of its own, for none outlives its device.
#include "device_fault.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <stdexcept>

#include "base/build.h"
#include "base/folder_testing.h"
#include "base/text.h"
#include "cli/said.h"
#include "cli/session.h"
#include "cli/training.h"
#include "device/testing.h"
#include "store/store.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// The fault comes behind step 3, and checkpoints behind 2, 4 and 5: so it meets the next rollout,
// or what follows, and step 3 is done again.
constexpr std::int64_t kSteps = 5, kSaveEvery = 2, kFaultAfter = 3;
constexpr double kNever = -1;

std::string text_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

recipe::Recipe small_recipe() {
  return cli::load_recipe(
      "recipes/demo.toml",
      {"device=cuda", "arm=trace", cat({"schedule.steps=", kSteps}), "schedule.prompts=4",
       "schedule.samples=4", cat({"schedule.save_every=", kSaveEvery}), "trainer.lr=1e-3",
       "rl.kl_weight=0.001",      // so that every group trains
       "store.ram=\"64 KiB\""});  // less than a step records: the disk has a part
}

/// A run, or the rest of it, and the end of the process. `fault`: so many milliseconds into the
/// step behind kFaultAfter.
[[noreturn]] void run_and_exit(const fs::path& folder, double fault) {
  int status = 0;
  try {
    cli::run_training(small_recipe(), folder, [&](std::int64_t step, const Metrics&) {
      if constexpr (build::has_cuda) {
        if (fault != kNever && step == kFaultAfter) testing::plant_fault(0, fault);
      }
    });
  } catch (const std::exception& failed) {
    std::ofstream(folder / "said") << cli::said(failed) << "\n";
    status = 1;
  }
  std::fflush(nullptr);
  std::exit(status);
}

/// Lines of metrics.jsonl without what depends on the clock.
std::vector<std::string> steps_of(const fs::path& folder) {
  std::ifstream in(folder / "metrics.jsonl");
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    std::string kept;
    for (std::size_t at = 0; at < line.size();) {
      const std::size_t end = std::min(line.find(',', at), line.size());
      const std::string field = line.substr(at, end - at);
      if (field.find("timing_s/") == std::string::npos && field.find("perf/") == std::string::npos)
        kept += field + "\n";
      at = end + 1;
    }
    lines.push_back(kept);
  }
  return lines;
}

class DeviceFault : public ::testing::TestWithParam<double> {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // each in a new process, which comes here too
    if (std::getenv(kFolder) != nullptr) return;
    setenv(kFolder, make_test_folder().c_str(), 1);
  }
  void TearDown() override {
    if (!HasFailure()) fs::remove_all(folder());
    unsetenv(kFolder);
  }
  static fs::path folder() { return std::getenv(kFolder); }

 private:
  static constexpr const char* kFolder = "LOCKSTEP_FAULT_FOLDER";
};

TEST_P(DeviceFault, StopsTheRunInOneLineAndItGoesOnAsIfNothingHadBeen) {
  const fs::path whole = folder() / "whole", broken = folder() / "broken";
  EXPECT_EXIT(run_and_exit(whole, kNever), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(run_and_exit(broken, GetParam()), ::testing::ExitedWithCode(1), "");

  const std::string said = text_of(broken / "said");
  std::printf("%s", said.c_str());
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_NE(said.find("last checkpoint"), std::string::npos) << said;
  const std::size_t done = steps_of(broken).size();
  EXPECT_GE(done, static_cast<std::size_t>(kFaultAfter));
  EXPECT_LT(done, static_cast<std::size_t>(kSteps)) << "it came too late";
  std::size_t checkpoints = 0;
  for (std::size_t step = 1; step <= done; ++step) {
    const fs::path there = broken / cat({"checkpoints/step_", step});
    if (!fs::exists(there)) continue;
    EXPECT_TRUE(fs::exists(there / "training_state/trainer_state.bin")) << there;
    ++checkpoints;
  }
  EXPECT_GE(checkpoints, 1u);
  {
    const store::Store records({.folder = broken / "trace", .run = small_recipe().schedule.seed});
    EXPECT_EQ(records.dropped(), std::vector<std::string>{});
  }

  EXPECT_EXIT(run_and_exit(broken, kNever), ::testing::ExitedWithCode(0), "");
  EXPECT_EQ(steps_of(broken), steps_of(whole));
  for (const char* file : {"model.safetensors", "training_state/trainer_state.bin"}) {
    const fs::path last = cat({"checkpoints/step_", kSteps, "/", file});
    EXPECT_TRUE(text_of(whole / last) == text_of(broken / last)) << file;
    EXPECT_FALSE(text_of(whole / last).empty()) << file;
  }
}

/// Milliseconds behind step 3.
std::vector<double> moments() {
  return devices().size() > 1 ? std::vector<double>{0, 40, 105} : std::vector<double>{};
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceFault);
INSTANTIATE_TEST_SUITE_P(Moments, DeviceFault, ::testing::ValuesIn(moments()),
                         [](const auto& info) {
                           return cat({"cuda_", info.index});
                         });

std::string said_of(const char* what) { return cli::said(std::runtime_error(what)); }

TEST(Said, TorchsWordsOfAFailedDeviceAreOneLineWithARemedy) {
  const std::string line = said_of(
      "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegal'\n");
  EXPECT_EQ(line,
            cat({"the CUDA device failed: CUDA error: an illegal memory access was encountered; ",
                 kBeginAgain}));
  EXPECT_NE(said_of("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling x").find("checkpoint"),
            std::string::npos);
}

TEST(Said, TorchsWordsOfUsedUpMemoryKeepTheBytes) {
  const std::string line =
      said_of("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 3 GiB free.\nmore");
  EXPECT_NE(line.find("20.00 GiB"), std::string::npos) << line;
  EXPECT_NE(line.find("lower trainer.tokens_per_pass"), std::string::npos) << line;
  EXPECT_EQ(line.find('\n'), std::string::npos) << line;
}

TEST(Said, OfOthers) {
  EXPECT_NE(cli::said(std::bad_alloc()).find("doctor"), std::string::npos);
  EXPECT_EQ(cli::said(Error("x is 3; take 4")), "x is 3; take 4");
  EXPECT_EQ(said_of("odd\nthing"), "a fault of lockstep's own, which stopped it: odd");
  const fs::filesystem_error file("rename", "a", "b", std::make_error_code(std::errc::io_error));
  EXPECT_EQ(cli::said(file).find("a (to b): "), 0u) << cli::said(file);
}

}  // namespace
}  // namespace lockstep
