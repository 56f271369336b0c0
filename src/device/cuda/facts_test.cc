#include "device/cuda/facts.h"

#include <gtest/gtest.h>

namespace lockstep::cuda {
namespace {

Facts h200() {
  return {.driver_version = 13000,
          .runtime_version = 13000,
          .devices = 1,
          .major = 9,
          .minor = 0,
          .architectures = "90a-real;100a-real"};
}

void expect_says(const Facts& facts, const std::vector<std::string>& parts) {
  const std::string line = why_unusable(facts);
  for (const std::string& part : parts) {
    EXPECT_NE(line.find(part), std::string::npos) << line << "\nlacks: " << part;
  }
  EXPECT_EQ(line.find('\n'), std::string::npos) << line;
}

TEST(CudaFacts, OfADeviceThatCanBeUsedSayNothing) {
  EXPECT_EQ(why_unusable(h200()), "");
  Facts one = h200();
  one.architectures = "90a-real";
  EXPECT_EQ(why_unusable(one), "");
  one.architectures = "90a";
  EXPECT_EQ(why_unusable(one), "");
  one.devices = 8;
  one.index = 7;
  EXPECT_EQ(why_unusable(one), "");
}

TEST(CudaFacts, WithoutADriverOrADeviceLeaveTheCpu) {
  Facts none = h200();
  none.runtime = Facts::Runtime::kOldDriver;
  none.driver_version = 0;
  expect_says(none, {"there is no NVIDIA driver", "device = \"cpu\""});
  none.runtime = Facts::Runtime::kNoDevice;
  expect_says(none, {"there is no CUDA device on this machine", "device = \"cpu\""});
  none.runtime = Facts::Runtime::kStarts;
  none.devices = 0;
  expect_says(none, {"there is no CUDA device on this machine"});
}

TEST(CudaFacts, OfADriverThatIsTooOldNameBothVersions) {
  Facts old = h200();
  old.runtime = Facts::Runtime::kOldDriver;
  old.driver_version = 12020;
  expect_says(old, {"CUDA 12.2", "needs 13.0", "update the driver"});
}

TEST(CudaFacts, OfARuntimeThatFailsGiveItsWords) {
  Facts sick = h200();
  sick.runtime = Facts::Runtime::kFails;
  sick.said = "system not yet initialized";
  expect_says(sick, {"system not yet initialized", "device = \"cpu\""});
}

TEST(CudaFacts, OfADeviceThatIsNotThereSayHowManyAre) {
  Facts far = h200();
  far.index = 3;
  expect_says(far, {"no CUDA device 3, only 1 is there", "a lower number", "device = \"cpu\""});
  far.devices = 2;
  expect_says(far, {"only 2 are there"});
  far.index = -1;
  expect_says(far, {"no CUDA device -1"});
}

TEST(CudaFacts, OfAProhibitedDeviceNameTheModeAndHowToLeaveIt) {
  Facts closed = h200();
  closed.devices = 2;
  closed.index = 1;
  closed.is_prohibited = true;
  expect_says(closed, {"CUDA device 1 is in compute mode prohibited", "nvidia-smi -i 1 -c DEFAULT",
                       "device = \"cpu\""});
}

TEST(CudaFacts, OfAnotherArchitectureNameItAndOurs) {
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 9}, {10, 0}, {12, 0}, {9, 1}}) {
    Facts other = h200();
    other.major = major;
    other.minor = minor;
    expect_says(other, {"capability " + std::to_string(major) + "." + std::to_string(minor),
                        "made for 9.0", "device = \"cpu\""});
  }
}

TEST(CudaFacts, OfABuildForAnotherArchitectureSayHowToBuild) {
  for (const char* built : {"100a-real", "100a-real;90-real", "", "190a-real"}) {
    Facts other = h200();
    other.architectures = built;
    expect_says(other,
                {std::string("compiled for ") + built, "-DCMAKE_CUDA_ARCHITECTURES=90a-real"});
  }
}

}  // namespace
}  // namespace lockstep::cuda
