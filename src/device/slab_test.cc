#include "device/slab.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "base/error.h"
#include "base/wait.h"
#include "device/stream.h"
#include "device/testing.h"

namespace lockstep {
namespace {

class Slabs : public testing::TestWithParam<Device> {
 protected:
  bool on_cuda() const { return GetParam().kind == Device::Kind::kCuda; }
  std::uint8_t last(const Slab& slab) const {
    std::uint8_t value = 0;
    copy_bytes(&value, {}, slab.as<std::uint8_t>() + slab.bytes() - 1, GetParam(), 1);
    synchronize(GetParam());
    return value;
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, Slabs, testing::ValuesIn(devices()), name_of_device);

TEST_P(Slabs, KeepItsAddressWhileTheMemoryIsAway) {
  constexpr std::int64_t kBytes = (64 << 20) + 12'345;
  Slab slab(GetParam(), kBytes);
  void* const address = slab.as<void>();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(address) % 256, 0u);
  EXPECT_EQ(slab.bytes(), kBytes);
  EXPECT_EQ(slab.owed(), 0);
  slab.take();  // it is there
  for (int round = 0; round < 3; ++round) {
    fill_bytes(address, GetParam(), static_cast<std::uint8_t>(7 + round), kBytes);
    EXPECT_EQ(last(slab), 7 + round);
    slab.give_back();
    slab.give_back();
    if (on_cuda()) {
      EXPECT_GE(slab.owed(), kBytes);
      EXPECT_EQ(slab.owed() % (2 << 20), 0);
    } else {
      EXPECT_EQ(slab.owed(), 0);
      EXPECT_EQ(last(slab), 7 + round);
    }
    slab.take();
    EXPECT_EQ(slab.as<void>(), address);
  }
  const Slab moved = std::move(slab);
  EXPECT_EQ(moved.as<void>(), address);
  EXPECT_EQ(slab.as<void>(), nullptr);
  EXPECT_EQ(Slab(GetParam(), 0).as<void>(), nullptr);
  EXPECT_THROW(Slab(GetParam(), -1), Error);
}

TEST_P(Slabs, GiveTheDeviceItsMemory) {
  constexpr std::int64_t kBytes = 2ll << 30;
  if (!on_cuda()) return;  // nothing is given back there, see above
  bool away = false, back = false;
  Slab slab(GetParam(), kBytes);
  // What is free is the whole GPU's: another process may take some, or leave, between two looks.
  for (int attempt = 0; attempt < 20 && !(away && back); ++attempt) {
    const std::int64_t before = device_memory(GetParam()).for_others;
    slab.give_back();
    const std::int64_t between = device_memory(GetParam()).for_others;
    slab.take();
    const std::int64_t after = device_memory(GetParam()).for_others;
    away = between - before > kBytes / 2;
    back = between - after > kBytes / 2;
  }
  EXPECT_TRUE(away);
  EXPECT_TRUE(back);
}

/// The memory that a graph writes is another than the one it was made for, at the same address.
TEST_P(Slabs, LeaveGraphsGood) {
  if (!on_cuda()) return;  // there are none
  Slab slab(GetParam(), 8 << 20);
  const OwnedStream stream(GetParam());
  const Graph graph = Graph::of(GetParam(), stream, [&] {
    fill_bytes(slab.as<void>(), GetParam(), 0x5A, slab.bytes(), stream);
  });
  for (int round = 0; round < 2; ++round) {
    fill_bytes(slab.as<void>(), GetParam(), 1, slab.bytes(), stream);
    graph.launch(stream);
    stream.wait();
    EXPECT_EQ(last(slab), 0x5A);
    slab.give_back();
    slab.take();
  }
}

TEST_P(Slabs, SayWhatIsMissing) {
  if (!on_cuda()) return;
  try {
    Slab(GetParam(), 1ll << 46);
    FAIL() << "64 TiB";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("70368744177664 bytes"), std::string::npos)
        << error.what();
  }
  // Somebody else has taken it: the address stays, and a later call finds memory there.
  Slab slab(GetParam(), 4ll << 30);
  slab.give_back();
  trim_pool(GetParam());
  std::string refused;
  {
    const Buffer others(GetParam(), device_memory(GetParam()).free - (1ll << 30));
    ::setenv("LOCKSTEP_WAIT", "0.2", 1);
    try {
      slab.take();
    } catch (const Error& error) {
      refused = error.what();
    }
    EXPECT_GT(slab.owed(), 0);
    ::unsetenv("LOCKSTEP_WAIT");
  }
  EXPECT_NE(refused.find("4294967296 bytes were asked for"), std::string::npos) << refused;
  synchronize(GetParam());
  slab.take();  // of the pool's, which it gives up
  fill_bytes(slab.as<void>(), GetParam(), 3, slab.bytes());
  EXPECT_EQ(last(slab), 3);
}

/// A neighbour gives it up once it is waited for.
TEST_P(Slabs, WaitForMemoryThatIsBeingFreed) {
  if (!on_cuda()) return;
  Slab slab(GetParam(), 4ll << 30);
  slab.give_back();
  trim_pool(GetParam());
  static Slab others;
  static int waits;
  waits = 0;
  others = Slab(GetParam(), device_memory(GetParam()).for_others - (1ll << 30));
  ::setenv("LOCKSTEP_WAIT", "3600", 1);
  tell_of_waiting([](const std::string&) {
    ++waits;
    others = Slab();
  });
  slab.take();
  ::unsetenv("LOCKSTEP_WAIT");
  EXPECT_EQ(slab.owed(), 0);
  EXPECT_EQ(waits, 1);
}

/// Any number of times, at one address; how long it takes is told, not judged.
TEST_P(Slabs, ComeAndGoAtOneAddress) {
  if (!on_cuda()) return;
  using Clock = std::chrono::steady_clock;
  for (const std::int64_t bytes : {256ll << 20, 40ll << 30}) {
    if (device_memory(GetParam()).for_others < bytes * 5 / 4) continue;
    Slab slab(GetParam(), bytes);
    const void* const address = slab.as<void>();
    double away = 0, back = 0;
    for (int round = 0; round < 3; ++round) {
      const auto begin = Clock::now();
      slab.give_back();
      const auto middle = Clock::now();
      EXPECT_GE(slab.owed(), bytes);
      slab.take();
      EXPECT_EQ(slab.owed(), 0);
      away = std::chrono::duration<double, std::milli>(middle - begin).count();
      back = std::chrono::duration<double, std::milli>(Clock::now() - middle).count();
    }
    std::printf("a slab of %lld bytes: %.2f ms to give back, %.2f ms to take\n",
                static_cast<long long>(bytes), away, back);
    EXPECT_EQ(slab.as<void>(), address);
  }
}

}  // namespace
}  // namespace lockstep
