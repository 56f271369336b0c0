#include "device/stream.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "base/error.h"
#include "device/testing.h"

namespace lockstep {
namespace {

class Streams : public testing::TestWithParam<Device> {};

INSTANTIATE_TEST_SUITE_P(Devices, Streams, testing::ValuesIn(devices()), name_of_device);

TEST_P(Streams, OneGoesOnBehindAPointOfAnother) {
  const OwnedStream first(GetParam()), second(GetParam());
  constexpr std::int64_t kBytes = 1 << 26;
  const Buffer from(GetParam(), kBytes, first), to(GetParam(), kBytes, first);
  const PinnedBuffer back(kBytes, GetParam());
  Event filled(GetParam()), copied(GetParam());
  fill_bytes(from.as<void>(), GetParam(), 3, kBytes, first);
  copy_bytes(to.as<void>(), GetParam(), from.as<void>(), GetParam(), kBytes, first);
  filled.record(first);
  filled.hold_back(second);
  copy_bytes(back.as<void>(), {}, to.as<void>(), GetParam(), kBytes, second);
  copied.record(second);
  copied.wait();
  EXPECT_EQ(back.as<std::uint8_t>()[kBytes - 1], 3);
  first.wait();
}

TEST_P(Streams, AGraphIsGivenAgain) {
  if (GetParam().kind == Device::Kind::kCpu) {
    EXPECT_THROW(Graph::of(GetParam(), {}, [] {}), Error);
    return;
  }
  const OwnedStream stream(GetParam());
  const Buffer buffer = to_device(std::vector<std::uint8_t>(64, 1), GetParam());
  EXPECT_THROW(Graph::of(GetParam(), stream, [] { throw std::runtime_error("no"); }),
               std::runtime_error);
  const Graph graph = Graph::of(GetParam(), stream,
                                [&] { fill_bytes(buffer.as<void>(), GetParam(), 9, 32, stream); });
  EXPECT_EQ(to_host<std::uint8_t>(buffer)[0], 1) << "it was noted, not done";
  graph.launch(stream);
  stream.wait();
  EXPECT_EQ(to_host<std::uint8_t>(buffer)[31], 9);
  fill_bytes(buffer.as<void>(), GetParam(), 5, 64, stream);
  graph.launch(stream);
  stream.wait();
  EXPECT_EQ(to_host<std::uint8_t>(buffer)[0], 9);
  EXPECT_EQ(to_host<std::uint8_t>(buffer)[32], 5);
}

}  // namespace
}  // namespace lockstep
