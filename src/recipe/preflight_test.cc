#include "recipe/preflight.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace lockstep::recipe {
namespace {

TEST(Preflight, AutoTellsWhatWasInTheWayAndNoRemedyThatItHasTaken) {
  EXPECT_EQ(why_not_cuda("device is cuda: there is no NVIDIA driver on this machine; use device = "
                         "\"cpu\""),
            "there is no NVIDIA driver on this machine");
  EXPECT_EQ(
      why_not_cuda("device = \"cuda\": the driver is old; update it, or use device = \"cpu\""),
      "the driver is old; update it");
  EXPECT_EQ(why_not_cuda("hidden is 40, and that is too little; use device = \"cpu\""),
            "hidden is 40, and that is too little");
  const std::string full = "device is cuda, which has 1 GiB of 2 GiB free; 3 GiB are needed";
  EXPECT_EQ(why_not_cuda(full), full);
  if (!why_unusable({Device::Kind::kCuda, 0}).empty()) {
    const std::string why = settle_device(kAutoDevice, Budget{}, [](Device) {}).why;
    EXPECT_EQ(why.empty(), !std::filesystem::exists("/dev/nvidiactl"));
    EXPECT_EQ(why.find("device"), why.find("device on this machine")) << why;
  }
}

TEST(Preflight, ATrainerTakesMoreOfAGpu) {
  EXPECT_EQ(trainer_bytes("cpu", false), 16);
  EXPECT_EQ(trainer_bytes("cuda", true), 18);
  EXPECT_EQ(trainer_bytes("cuda:1", false), 20);
}

TEST(Preflight, ATrainersMemoryHoldsItsWeights) {
  EXPECT_NO_THROW(check_trainer_memory({}, 1 << 20));
  EXPECT_NO_THROW(check_trainer_memory({.memory_bytes = (18 << 20) + 1}, 1 << 20));
  try {
    check_trainer_memory({.memory_bytes = 18 << 20}, 1 << 20);
    FAIL() << "no room for an activation";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "trainer.memory is 18 MiB, and weights, gradients and moments of 1048576 parameters "
              "take 18 MiB of it before a token is read: raise it, or set it to 0 for what is "
              "free");
  }
}

}  // namespace
}  // namespace lockstep::recipe
