/// The experts in four launches against the ops of a CPU one after another, byte for byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/stream.h"
#include "device/testing.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/exact/moe_w4a4.h"
#include "kernels/exact/w4a4_testing.h"

namespace lockstep::kernels {
namespace {

struct Shape {
  std::int64_t rows, slots, experts, hidden, width;
};

/// All that a layer's experts read, on the host.
struct Layer {
  Shape shape;
  Codes a;
  std::vector<Codes> gate_up, down;
  std::vector<std::int32_t> offsets, rows_of, slots_of;
  std::vector<float> gates;
};

/// Experts of random choice, none twice a row; the later experts are chosen by few.
Layer random_layer(const Shape& shape, std::uint32_t seed, int n_up = -8) {
  Layer layer{
      shape, random_codes(shape.rows, shape.hidden, seed, 2, false, 0x28), {}, {}, {}, {}, {}, {}};
  for (std::int64_t e = 0; e < shape.experts; ++e) {
    const auto at = static_cast<std::uint32_t>(e);
    layer.gate_up.push_back(
        random_codes(2 * shape.width, shape.hidden, seed + 100 + at, 0, true, 0x28));
    layer.down.push_back(random_codes(shape.hidden, shape.width, seed + 300 + at, 1, true, 0x28));
    for (auto& g : layer.gate_up.back().global) g = power_of_two(n_up);
  }
  std::vector<std::vector<std::int32_t>> of(static_cast<std::size_t>(shape.experts));
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    std::vector<std::int32_t> chosen;
    for (std::uint32_t i = 0; static_cast<std::int64_t>(chosen.size()) < shape.slots; ++i) {
      const std::uint32_t bits = word(seed + 7, static_cast<std::uint32_t>(row) * 1000 + i);
      const auto e =
          static_cast<std::int32_t>(bits % static_cast<std::uint32_t>(shape.experts) %
                                    (1 + (bits >> 16) % static_cast<std::uint32_t>(shape.experts)));
      if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) chosen.push_back(e);
    }
    for (std::size_t k = 0; k < chosen.size(); ++k) {
      of[static_cast<std::size_t>(chosen[k])].push_back(
          static_cast<std::int32_t>(row * shape.slots + static_cast<std::int64_t>(k)));
    }
  }
  layer.offsets.push_back(0);
  for (const auto& items : of) {
    for (const std::int32_t item : items) {
      layer.slots_of.push_back(item);
      layer.rows_of.push_back(item / static_cast<std::int32_t>(shape.slots));
    }
    layer.offsets.push_back(static_cast<std::int32_t>(layer.slots_of.size()));
  }
  for (std::int64_t i = 0; i < shape.rows * shape.slots; ++i) {
    layer.gates.push_back(static_cast<float>(word(seed + 9, static_cast<std::uint32_t>(i)) >> 8) *
                          0x1p-24f);
  }
  return layer;
}

struct Result {
  std::vector<float> up, global, y;
  std::vector<std::uint8_t> codes, scales;
  std::vector<Bf16> out;
  std::vector<std::int32_t> bad;
};

/// Gives what makes `a`, right before the op.
using Before = std::function<void(MoeW4a4Args& args)>;

Result run(const Layer& layer, Device device, int times, const Before& before = {},
           Stream stream = {}) {
  const Shape& s = layer.shape;
  const std::int64_t items = s.rows * s.slots;
  const OnDevice a(layer.a, device);
  const Experts gate_up(layer.gate_up, device);
  const Experts down(layer.down, device);
  const Buffer offsets = to_device(layer.offsets, device);
  const Buffer rows_of = to_device(layer.rows_of, device);
  const Buffer slots_of = to_device(layer.slots_of, device);
  const Buffer gates = to_device(layer.gates, device);
  const auto poisoned = [&](std::int64_t bytes) {
    return to_device(std::vector<std::uint8_t>(static_cast<std::size_t>(bytes), 0xA5), device);
  };
  const Buffer up = poisoned(items * 2 * s.width * 4);
  const Buffer codes = poisoned(items * s.width / 2);
  const Buffer scales = poisoned(items * s.width / 16);
  const Buffer global = poisoned(items * 4);
  const Buffer y = poisoned(items * s.hidden * 4);
  const Buffer out = poisoned(s.rows * s.hidden * 2);
  const Buffer bad = to_device(std::vector<std::int32_t>{0x7FFFFFFF}, device);
  MoeW4a4Args args = {
      .a = a.view,
      .gate_up = gate_up.view,
      .down = down.view,
      .offsets = index_view(offsets),
      .rows_of = index_view(rows_of),
      .slots_of = index_view(slots_of),
      .gates = {gates.as<const float>(), {s.rows, s.slots}, {s.slots, 1}, device},
      .up = {up.as<float>(), {items, 2 * s.width}, {2 * s.width, 1}, device},
      .w2_in = {{codes.as<std::uint8_t>(), {items, s.width / 2}, {s.width / 2, 1}, device},
                {scales.as<std::uint8_t>(), {items, s.width / 16}, {s.width / 16, 1}, device},
                {global.as<float>(), {items}, {1}, device}},
      .y = {y.as<float>(), {items, s.hidden}, {s.hidden, 1}, device},
      .out = {out.as<Bf16>(), {s.rows, s.hidden}, {s.hidden, 1}, device},
      .bad = bad.as<std::int32_t>()};
  for (int i = 0; i < times; ++i) {
    if (before) before(args);
    moe_w4a4(args, stream);
    args.settled = true;  // the next time
  }
  synchronize(device, stream);
  Result r{to_host<float>(up),           to_host<float>(global),        to_host<float>(y),
           to_host<std::uint8_t>(codes), to_host<std::uint8_t>(scales), to_host<Bf16>(out),
           to_host<std::int32_t>(bad)};
  return r;
}

template <typename T>
void expect_same(const std::vector<T>& got, const std::vector<T>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  std::size_t wrong = 0;
  std::size_t first = 0;
  for (std::size_t i = got.size(); i-- > 0;) {
    if (std::memcmp(&got[i], &want[i], sizeof(T)) == 0) continue;
    ++wrong;
    first = i;
  }
  EXPECT_EQ(wrong, 0u) << what << " of " << got.size() << ", the first at " << first;
}

void expect_same(const Result& got, const Result& want, const std::string& where) {
  expect_same(got.up, want.up, where + ": up");
  expect_same(got.codes, want.codes, where + ": codes");
  expect_same(got.scales, want.scales, where + ": scales");
  expect_same(got.global, want.global, where + ": global");
  expect_same(got.y, want.y, where + ": y");
  expect_same(got.out, want.out, where + ": out");
  expect_same(got.bad, want.bad, where + ": bad");
}

class MoeW4a4 : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, MoeW4a4, testing::ValuesIn(devices()), name_of_device);

TEST_P(MoeW4a4, EqualsTheOpsOneAfterAnother) {
  if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "there these are the ops";
  std::uint32_t seed = 1000;
  for (const Shape& shape :
       {Shape{1, 2, 4, 64, 32}, Shape{3, 2, 5, 128, 48}, Shape{1, 8, 16, 256, 96},
        Shape{9, 4, 8, 160, 80}, Shape{40, 8, 40, 128, 64}, Shape{2, 4, 6, 2048, 768},
        Shape{70, 2, 3, 64, 1056}, Shape{96, 8, 48, 2048, 64}, Shape{21, 1, 1, 512, 256},
        Shape{1, 1, 3, 256, 16}, Shape{30, 8, 24, 1024, 256}}) {
    const Layer layer = random_layer(shape, seed += 1000);
    const Result want = run(layer, Device{}, 1);
    EXPECT_GT(std::count_if(want.codes.begin(), want.codes.end(), [](int c) { return c != 0; }), 0);
    expect_same(run(layer, GetParam(), 3), want,
                std::to_string(shape.rows) + " rows of " + std::to_string(shape.hidden));
  }
}

/// Codes that a norm of long rows leaves: it lets W13 begin at once and takes its time.
TEST_P(MoeW4a4, WaitsForALaunchThatIsUnderWay) {
  constexpr std::int64_t kLong = 1 << 15;
  const Device device = GetParam();
  const OwnedStream stream(device);
  for (const Shape& shape : {Shape{1, 8, 16, 2048, 256}, Shape{8, 4, 16, 2048, 256}}) {
    const Layer layer = random_layer(shape, 4321);
    std::vector<Bf16> numbers;
    for (std::int64_t i = 0; i < shape.rows * kLong; ++i) {
      numbers.push_back(to_bf16(static_cast<float>(word(5, static_cast<std::uint32_t>(i)) >> 8)));
    }
    const Buffer from = to_device(numbers, device), to(device, from.bytes());
    const Buffer norm = to_device(std::vector<Bf16>(kLong, to_bf16(1.0f)), device);
    const auto make = [&](MoeW4a4Args& args, bool beside) {
      fill_bytes(to.as<void>(), device, 0, to.bytes(), stream);
      rms_norm({.x = {from.as<const Bf16>(), {shape.rows, kLong}, {kLong, 1}, device},
                .weight = {norm.as<const Bf16>(), kLong},
                .y = {to.as<Bf16>(), {shape.rows, kLong}, {kLong, 1}, device}},
               stream);
      if (!beside) stream.wait();
      args.a.codes = {
          to.as<const std::uint8_t>(), {shape.rows, shape.hidden / 2}, {2 * kLong, 1}, device};
      args.settled = beside;
    };
    const Result alone = run(
        layer, device, 1, [&](MoeW4a4Args& args) { make(args, false); }, stream);
    EXPECT_GT(std::ranges::count_if(alone.out, [](Bf16 x) { return to_float(x) != 0.0f; }), 0);
    for (int time = 0; time < 20 && !HasFailure(); ++time) {
      expect_same(run(
                      layer, device, 1, [&](MoeW4a4Args& args) { make(args, true); }, stream),
                  alone, std::to_string(shape.rows) + " rows, time " + std::to_string(time));
    }
  }
}

TEST_P(MoeW4a4, NamesTheFirstRowThatIsNotFinite) {
  Layer layer = random_layer({6, 2, 4, 64, 32}, 77);
  for (const std::size_t row : {4u, 3u}) layer.a.global[row] = power_of_two(116);
  for (auto& w : layer.gate_up) {
    for (auto& g : w.global) g = power_of_two(20);
  }
  const Result got = run(layer, GetParam(), 1);
  EXPECT_EQ(got.bad[0], 3);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(got.codes[3 * 2 * 16 + i], 0);
  EXPECT_EQ(got.global[3 * 2], 1.0f);
  expect_same(got, run(layer, Device{}, 1), "with rows that are not finite");
}

TEST_P(MoeW4a4, ARowDoesNotDependOnItsCompany) {
  const Layer all = random_layer({12, 3, 6, 128, 64}, 123);
  const Result together = run(all, GetParam(), 1);
  for (const std::int64_t row : {0, 5, 11}) {
    Layer one = all;
    one.shape.rows = 1;
    one.a = {1, 128, {}, {}, {all.a.global[static_cast<std::size_t>(row)]}};
    one.a.codes.assign(all.a.codes.begin() + row * 64, all.a.codes.begin() + (row + 1) * 64);
    one.a.scales.assign(all.a.scales.begin() + row * 8, all.a.scales.begin() + (row + 1) * 8);
    one.gates.assign(all.gates.begin() + row * 3, all.gates.begin() + (row + 1) * 3);
    one.offsets = {0};
    one.rows_of.clear();
    one.slots_of.clear();
    for (std::size_t e = 0; e < 6; ++e) {
      for (std::int32_t i = all.offsets[e]; i < all.offsets[e + 1]; ++i) {
        if (all.rows_of[static_cast<std::size_t>(i)] != row) continue;
        one.rows_of.push_back(0);
        one.slots_of.push_back(all.slots_of[static_cast<std::size_t>(i)] % 3);
      }
      one.offsets.push_back(static_cast<std::int32_t>(one.rows_of.size()));
    }
    const Result alone = run(one, GetParam(), 1);
    const std::vector<Bf16> part(together.out.begin() + row * 128,
                                 together.out.begin() + (row + 1) * 128);
    expect_same(alone.out, part, "row " + std::to_string(row));
  }
}

TEST_P(MoeW4a4, NamesWhatDoesNotFit) {
  MoeW4a4Args args;
  args.gate_up = {nullptr, 4, 64, 32};
  args.down = {nullptr, 4, 32, 48};
  try {
    moe_w4a4(args);
    FAIL() << "took weights that do not belong together";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("gate_up must be [2F, D]"), std::string::npos);
  }
  args.gate_up.out = 2 * args.down.cols;
  args.gate_up.cols = args.down.out;
  args.offsets.shape[0] = 5;
  args.down.scaled = true;
  try {
    moe_w4a4(args);
    FAIL() << "took weights whose scales have mantissas";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no powers of two"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::kernels
