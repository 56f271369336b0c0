#include "device/memory.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>

#include "base/error.h"
#include "device/testing.h"

namespace lockstep {
namespace {

class Memory : public testing::TestWithParam<Device> {};

TEST_P(Memory, KeepsWhatWasCopied) {
  std::vector<std::int32_t> values(100'003);
  std::iota(values.begin(), values.end(), -7);
  const Buffer first = to_device(values, GetParam());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.as<void>()) % 256, 0u);
  const Buffer second(GetParam(), first.bytes());
  copy_bytes(second.as<void>(), GetParam(), first.as<void>(), GetParam(), first.bytes());
  EXPECT_EQ(to_host<std::int32_t>(second), values);
  fill_bytes(second.as<void>(), GetParam(), 0x5A, 8);
  EXPECT_EQ(to_host<std::int32_t>(second)[1], 0x5A5A5A5A);
  EXPECT_EQ(to_host<std::int32_t>(second)[2], values[2]);
}

TEST_P(Memory, OwnsOnce) {
  Buffer a(GetParam(), 64);
  void* const data = a.as<void>();
  Buffer b = std::move(a);
  EXPECT_EQ(b.as<void>(), data);
  b.reset();
  EXPECT_EQ(b.as<void>(), nullptr);
  EXPECT_EQ(b.bytes(), 0);
  EXPECT_EQ(Buffer(GetParam(), 0).as<void>(), nullptr);
  EXPECT_THROW(Buffer(GetParam(), -1), Error);
}

TEST_P(Memory, SaysHowMuchIsThere) {
  const DeviceMemory memory = device_memory(GetParam());
  EXPECT_GT(memory.free, 0);
  EXPECT_GE(memory.total, memory.free);
}

TEST_P(Memory, APoolGivesBackWhatNobodyOwns) {
  constexpr std::int64_t kBytes = 256 << 20;
  const Device device = GetParam();
  const bool cuda = device.kind == Device::Kind::kCuda;
  bool held = false, given_back = false;
  // What is free is the whole GPU's: another process may take some, or leave, between two looks.
  for (int attempt = 0; attempt < (cuda ? 20 : 1) && !(held && given_back); ++attempt) {
    trim_pool(device);
    const std::int64_t before = device_memory(device).for_others;
    Buffer kept(device, 1 << 20);
    Buffer(device, kBytes).reset();
    synchronize(device);
    const DeviceMemory slack = device_memory(device);
    // It is the pool's, and would be a Buffer's.
    held = slack.for_others < before - kBytes / 2 && slack.free >= slack.for_others + kBytes;
    fill_bytes(kept.as<void>(), device, 0x5A, 1 << 20);
    trim_pool(device);
    given_back = device_memory(device).for_others > before - kBytes / 2;
    EXPECT_EQ(to_host<std::uint8_t>(kept).back(), 0x5A);
  }
  if (cuda) {  // a CPU has no pool, and nothing to give back
    EXPECT_TRUE(held);
    EXPECT_TRUE(given_back);
  }
  EXPECT_FALSE(is_short_of_memory({}));
}

TEST_P(Memory, PinnedIsThereForBoth) {
  const PinnedBuffer pinned(4096, GetParam());
  const Buffer buffer(GetParam(), 4096);
  fill_bytes(buffer.as<void>(), GetParam(), 7, 4096);
  copy_bytes(pinned.as<void>(), {}, buffer.as<void>(), GetParam(), 4096);
  synchronize(GetParam());
  EXPECT_EQ(pinned.as<std::uint8_t>()[4095], 7);
}

/// In a process of its own: this one has looked at more.
TEST(Devices, ToAskWhetherOneCanBeUsedTakesNoPlaceThere) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto look = [] {
    const bool usable = why_unusable(kFirstCuda).empty();
    if (usable == holds_context(kFirstCuda)) std::exit(1);
    if (usable) device_memory(kFirstCuda);
    std::exit(usable == holds_context(kFirstCuda) ? 0 : 2);
  };
  if (devices().size() > 1) {
    EXPECT_EXIT(look(), testing::ExitedWithCode(0), "");
  }
  EXPECT_FALSE(holds_context({}));
}

TEST(Devices, AreNamed) {
  EXPECT_EQ(device_named("cpu"), Device{});
  EXPECT_EQ(device_named("cuda:3"), (Device{Device::Kind::kCuda, 3}));
  unsetenv("LOCAL_RANK");
  EXPECT_EQ(device_named("cuda"), (Device{Device::Kind::kCuda, 0}));
  setenv("LOCAL_RANK", "5", 1);
  EXPECT_EQ(device_named("cuda"), (Device{Device::Kind::kCuda, 5}));
  EXPECT_EQ(device_named("cuda:1"), (Device{Device::Kind::kCuda, 1}));
  setenv("LOCAL_RANK", "x", 1);
  EXPECT_THROW(device_named("cuda"), Error);
  unsetenv("LOCAL_RANK");
  for (const char* name :
       {"", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:1x", "cuda:128", "cuda:999999999999"}) {
    try {
      device_named(name);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("device is '") + name + "'"),
                std::string::npos)
          << error.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Memory, testing::ValuesIn(devices()), name_of_device);

TEST(Devices, ACudaDeviceIsThereOrSaysWhyNot) {
  const Device far{Device::Kind::kCuda, 99};
  EXPECT_NE(why_unusable(far), "");
  EXPECT_EQ(why_unusable({}), "");
  EXPECT_THROW(PinnedBuffer(64, far), Error);
  if (devices().size() > 1) {
    try {
      Buffer(devices()[1], 1ll << 46);
      FAIL() << "64 TiB";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("70368744177664 bytes"), std::string::npos);
    }
    EXPECT_NO_THROW(Buffer(devices()[1], 1 << 20));  // and nothing is left of the failure
  }
}

}  // namespace
}  // namespace lockstep
