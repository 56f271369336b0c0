#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "device/testing.h"
#include "kernels/dense/add_norm.h"
#include "kernels/dense/check.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

class AddNormOn : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, AddNormOn, testing::ValuesIn(devices()), name_of_device);

constexpr std::int64_t kSumRows = 37;

/// Rows, and what the op or its parts leave of them.
struct SumCase {
  explicit SumCase(std::int64_t cols, float sigma, std::int64_t slots = 0,
                   std::int64_t num_rows = kSumRows)
      : num_rows(num_rows),
        cols(cols),
        slots(slots),
        sigma(sigma),
        x(random_bf16(num_rows * cols, 5, 2.0f)),
        h(random_bf16(num_rows * cols, 6, 2.0f)),
        y(x.size()),
        weight(random_bf16(cols, 7)) {
    for (const Bf16 value : random_bf16(num_rows * slots * cols, 8)) {
      outputs.push_back(to_float(value) * 1.1f);
    }
    for (const Bf16 value : random_bf16(num_rows * slots, 9)) gates.push_back(to_float(value));
    if (slots > 0) std::fill(x.begin(), x.end(), to_bf16(NAN));
    h[static_cast<std::size_t>(30 * cols + cols / 2)] = to_bf16(INFINITY);
    for (std::int64_t i = 0; i < num_rows; ++i) {
      streams.push_back(static_cast<std::uint64_t>(i) * 0x123456789ABCDEFull);
      positions.push_back(static_cast<std::int32_t>(1000 + i));
    }
  }

  void by_parts(bool norms) {
    const auto rows = [&](std::vector<Bf16>& of) { return rows_of(of.data(), num_rows, cols); };
    if (slots > 0) {
      combine({.y = rows_of<const float>(outputs.data(), num_rows * slots, cols),
               .gates = rows_of<const float>(gates.data(), num_rows, slots),
               .out = rows(x)},
              {});
    }
    if (sigma != 0.0f) {
      drift_noise({.x = rows(x),
                   .sigma = sigma,
                   .seed = 11,
                   .streams = streams,
                   .positions = positions,
                   .site = 6},
                  {});
    }
    residual_add(rows(x), rows(h), &bad, {});
    if (!norms) return;
    rms_norm({.x = rows(h), .weight = weight, .y = rows(y)}, {});
    first_nonfinite(rows(y), &bad_y, {});
  }

  void at_once(Device device, bool norms) {
    const Buffer of_x = to_device(x, device), of_h = to_device(h, device),
                 of_y = to_device(y, device), of_weight = to_device(weight, device),
                 of_streams = to_device(streams, device), of_places = to_device(positions, device),
                 of_bad = to_device(std::vector<std::int32_t>{bad, bad_y}, device),
                 of_outputs = to_device(outputs, device), of_gates = to_device(gates, device);
    const auto rows = [&](const Buffer& of) {
      return rows_of(of.as<Bf16>(), num_rows, cols, device);
    };
    AddNormArgs args = {.x = rows(of_x),
                        .h = rows(of_h),
                        .bad = of_bad.as<std::int32_t>(),
                        .sigma = sigma,
                        .seed = 11,
                        .streams = {of_streams.as<std::uint64_t>(), streams.size()},
                        .positions = {of_places.as<std::int32_t>(), positions.size()},
                        .site = 6};
    if (slots > 0) {
      args.outputs = rows_of(of_outputs.as<const float>(), num_rows * slots, cols, device);
      args.gates = rows_of(of_gates.as<const float>(), num_rows, slots, device);
    }
    if (norms) {
      args.weight = {of_weight.as<const Bf16>(), weight.size()};
      args.y = rows(of_y);
      args.bad_y = args.bad + 1;
    }
    add_norm(args, {});
    h = to_host<Bf16>(of_h);
    y = to_host<Bf16>(of_y);
    bad = to_host<std::int32_t>(of_bad)[0];
    bad_y = to_host<std::int32_t>(of_bad)[1];
  }

  std::int64_t num_rows, cols, slots;
  float sigma;
  std::vector<Bf16> x, h, y, weight;
  std::vector<float> outputs, gates;
  std::vector<std::uint64_t> streams;
  std::vector<std::int32_t> positions;
  std::int32_t bad = kNoRow, bad_y = 31;
};

/// A NaN's bits are the device's own.
bool same_numbers(const std::vector<Bf16>& a, const std::vector<Bf16>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](Bf16 x, Bf16 y) {
    return bits_of(x) == bits_of(y) || (std::isnan(to_float(x)) && std::isnan(to_float(y)));
  });
}

TEST_P(AddNormOn, LeavesWhatItsPartsLeave) {
  // With drift 12,288 are the most, and 48 KiB of shared memory.
  for (const std::int64_t cols : {2, 33, 96, 256, 770, 2048, 5120, 12000, 12288, 16384}) {
    for (const float sigma : {0.0f, 0.3f}) {
      for (const bool norms : {true, false}) {
        SumCase expected(cols, sigma), op(cols, sigma);
        expected.by_parts(norms);
        op.at_once(GetParam(), norms);
        const auto name = testing::Message() << cols << " columns, drift " << sigma;
        EXPECT_EQ(op.bad, 30) << name;
        EXPECT_EQ(expected.bad, 30) << name;
        EXPECT_EQ(op.bad_y, norms ? 30 : 31) << name;
        EXPECT_EQ(expected.bad_y, op.bad_y) << name;
        EXPECT_TRUE(same_numbers(op.h, expected.h)) << name;
        EXPECT_TRUE(same_numbers(op.y, expected.y)) << name;
      }
    }
  }
}

TEST_P(AddNormOn, AddsSlotsUpAsCombineDoes) {
  for (const std::int64_t cols : {33, 770, 2048}) {
    for (const std::int64_t slots : {3, 8}) {
      for (const std::int64_t rows : {kSumRows, kSlotSumRows + 3}) {
        const bool norms = slots != 3;
        const float sigma = rows == kSumRows && cols == 770 ? 0.3f : 0.0f;
        SumCase expected(cols, sigma, slots, rows), op(cols, sigma, slots, rows);
        expected.by_parts(norms);
        op.at_once(GetParam(), norms);
        const auto name = testing::Message() << rows << " rows of " << slots << " x " << cols;
        EXPECT_EQ(op.bad, 30) << name;
        EXPECT_EQ(op.bad_y, expected.bad_y) << name;
        EXPECT_TRUE(same_numbers(op.h, expected.h)) << name;
        EXPECT_TRUE(same_numbers(op.y, expected.y)) << name;
      }
    }
  }
}

TEST(AddNorm, RefusesWhatDoesNotFit) {
  SumCase c(32, 0.0f);
  AddNormArgs args = {.x = rows_of(c.x.data(), kSumRows, 32),
                      .h = rows_of(c.h.data(), kSumRows, 32),
                      .bad = &c.bad,
                      .weight = c.weight,
                      .y = rows_of(c.y.data(), kSumRows, 32)};
  args.bad = nullptr;
  EXPECT_THROW(add_norm(args, {}), Error);
  args.bad = &c.bad;
  args.weight = args.weight.first(31);
  EXPECT_THROW(add_norm(args, {}), Error);
  args.weight = c.weight;
  args.outputs = rows_of<const float>(reinterpret_cast<const float*>(c.h.data()), 8, 32);
  args.gates = rows_of<const float>(reinterpret_cast<const float*>(c.h.data()), kSumRows, 8);
  EXPECT_THROW(add_norm(args, {}), Error);
  args.outputs = {};
  args.h = rows_of(c.h.data(), kSumRows - 1, 32);
  EXPECT_THROW(add_norm(args, {}), Error);
}

}  // namespace
}  // namespace lockstep::kernels
