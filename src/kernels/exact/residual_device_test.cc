// residual() on every device against its definition: every pattern and choice, byte for byte.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/philox.h"
#include "device/testing.h"
#include "kernels/exact/packed_matrix.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/residual.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kRule = {.element = Element::kE2m1,
                             .scale = ScaleFormat::kE4m3,
                             .global = GlobalScale::kPerToken,
                             .global_is_power_of_two = true};

/// Codes and scales on a device; what was there before must be overwritten.
struct Packed {
  Buffer codes, scales, global;
  std::int64_t rows, cols;

  Packed(std::int64_t r, std::int64_t c, Device device)
      : codes(device, r * c / 2),
        scales(device, r * c / 16),
        global(device, 4 * r),
        rows(r),
        cols(c) {
    fill_bytes(codes.as<void>(), device, 0xEE, codes.bytes());
    fill_bytes(scales.as<void>(), device, 0xEE, scales.bytes());
    fill_bytes(global.as<void>(), device, 0xEE, global.bytes());
  }
  PackedView<std::uint8_t> view() {
    const Device device = codes.device();
    return {{codes.as<std::uint8_t>(), {rows, cols / 2}, {cols / 2, 1}, device},
            {scales.as<std::uint8_t>(), {rows, cols / 16}, {cols / 16, 1}, device},
            {global.as<float>(), {rows}, {1}, device}};
  }
};

struct Case {
  std::int64_t rows, cols;
  std::int64_t stride = cols;
  std::vector<Bf16> x{};
  std::vector<std::uint8_t> chosen{};
};

/// Rows of different sizes and outliers; `kinds` numbers only, so that scores tie.
Case make_case(std::int64_t rows, std::int64_t cols, std::uint32_t kinds, std::int64_t stride) {
  Case c{rows, cols, stride};
  c.x.resize(static_cast<std::size_t>(rows * stride), to_bf16(9.0f));
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    const PhiloxWords w = philox(3, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
    double v = kinds > 0 ? static_cast<double>(w[0] % kinds) - 1.0
                         : unit(w[0], w[1]) + unit(w[1], w[2]) + unit(w[2], w[3]) - 1.5;
    if (i % cols == 5) v *= 1000;
    if (i / cols % 6 == 4 && kinds > 0) v = 0;
    const int power = kinds > 0 ? 0 : static_cast<int>(i / cols % 5) * 20 - 40;
    c.x[static_cast<std::size_t>(i / cols * stride + i % cols)] =
        to_bf16(static_cast<float>(std::ldexp(v, power)));
  }
  for (std::int64_t g = 0; g < cols / 16; ++g) c.chosen.push_back(g % 3 == 1);
  return c;
}

struct Outcome {
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> global;
};

Outcome run(const Case& c, ResidualPattern pattern, ResidualChoice choice, std::int32_t per_mille,
            Device device, bool with_workspace) {
  const Buffer x = to_device(c.x, device);
  const Buffer chosen = to_device(c.chosen, device);
  Packed q(c.rows, c.cols, {});
  QuantizeArgs quantized;
  quantized.x = {c.x.data(), {c.rows, c.cols}, {c.stride, 1}};
  quantized.rule = kRule;
  quantized.out = q.view();
  quantize(quantized);
  Packed there(c.rows, c.cols, device);
  copy_bytes(there.codes.as<void>(), device, q.codes.as<void>(), {}, q.codes.bytes());
  copy_bytes(there.scales.as<void>(), device, q.scales.as<void>(), {}, q.scales.bytes());
  copy_bytes(there.global.as<void>(), device, q.global.as<void>(), {}, q.global.bytes());
  Packed out(c.rows, c.cols, device);
  ResidualArgs args;
  args.x = {x.as<const Bf16>(), {c.rows, c.cols}, {c.stride, 1}, device};
  args.q = there.view();
  args.out = out.view();
  args.pattern = pattern;
  args.choice = choice;
  args.per_mille = per_mille;
  args.chosen = {chosen.as<const std::uint8_t>(), {c.cols / 16}, {1}, device};
  const std::int64_t numbers = residual_workspace(args);
  const Buffer workspace(device, 4 * numbers);
  if (with_workspace) args.workspace = {workspace.as<float>(), {numbers}, {1}, device};
  residual(args);
  return {to_host<std::uint8_t>(out.codes), to_host<std::uint8_t>(out.scales),
          to_host<float>(out.global)};
}

class ResidualDevice : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, ResidualDevice, testing::ValuesIn(devices()), name_of_device);

void expect_the_definition(const Case& c, Device device) {
  for (const ResidualPattern pattern :
       {ResidualPattern::kChannels, ResidualPattern::kBlocks, ResidualPattern::kTwoOfFour}) {
    for (const ResidualChoice choice :
         {ResidualChoice::kPerToken, ResidualChoice::kBatch, ResidualChoice::kStatic}) {
      for (const int per_mille : {0, 125, 500, 1000}) {
        const Outcome want = run(c, pattern, choice, per_mille, {}, false);
        const Outcome got = run(c, pattern, choice, per_mille, device, per_mille > 200);
        const std::string what = std::to_string(static_cast<int>(pattern)) + " " +
                                 std::to_string(static_cast<int>(choice)) + " " +
                                 std::to_string(per_mille) + " of " + std::to_string(c.rows) +
                                 " x " + std::to_string(c.cols);
        EXPECT_TRUE(got.scales == want.scales) << what;
        EXPECT_TRUE(got.codes == want.codes) << what;
        EXPECT_TRUE(got.global == want.global) << what;
      }
    }
  }
}

TEST_P(ResidualDevice, EveryPatternAndChoiceIsTheDefinition) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{23, 144},
                                   {1, 16},
                                   {9, 160},
                                   {70, 128},
                                   {33, 2048},
                                   {5, 4112},
                                   {6, 8208},
                                   {2, 16384},
                                   {256, 768}}) {
    expect_the_definition(make_case(rows, cols, 0, cols), GetParam());
  }
}

TEST_P(ResidualDevice, TiesGoToTheLowerIndex) {
  expect_the_definition(make_case(40, 512, 3, 512), GetParam());
  expect_the_definition(make_case(11, 4128, 3, 4128), GetParam());
}

TEST_P(ResidualDevice, AnyStrideAndRowsThatAreNotFinite) {
  Case c = make_case(37, 208, 0, 211);
  for (const std::size_t row : {3u, 20u, 36u}) {
    c.x[row * 211 + 100 + row] = to_bf16(row == 20 ? std::numeric_limits<float>::quiet_NaN()
                                                   : std::numeric_limits<float>::infinity());
  }
  expect_the_definition(c, GetParam());
}

TEST_P(ResidualDevice, BlocksTooSmallForAScaleCountAndRowsThatAreNotFiniteDoNot) {
  Case c = make_case(600, 256, 0, 256);
  for (std::size_t row = 0; row < 600; row += 7) {
    for (std::size_t i = row * 256 + 48; i < row * 256 + 64; ++i) {
      c.x[i] = to_bf16(std::ldexp(to_float(c.x[i]), -24));
    }
  }
  for (const std::size_t row : {5u, 7u, 263u, 599u}) {
    c.x[row * 256 + 200] = to_bf16(std::numeric_limits<float>::infinity());
  }
  expect_the_definition(c, GetParam());
}

/// The dense second pass of an MXFP4 matrix and both sums with it, and NVFP4's.
TEST_P(ResidualDevice, TheDensePassAndItsSumsAreTheDefinition) {
  const Device device = GetParam();
  const Quantizer mx = {.element = Element::kE2m1,
                        .block = 32,
                        .scale = ScaleFormat::kE8m0,
                        .scale_rule = ScaleRule::kMxRceil};
  for (const Quantizer& rule : {mx, kRule}) {
    for (const auto& [rows, cols, stride] :
         {std::array<std::int64_t, 3>{1, 32, 32}, {37, 96, 96}, {64, 2048, 2048}, {5, 768, 800}}) {
      const Case c = make_case(rows, cols, 0, stride);
      const auto outcome = [&](Device on) {
        const auto n = static_cast<std::int64_t>(rows);
        const Buffer x = to_device(c.x, on);
        const TensorView<const Bf16, 2> view = {x.as<const Bf16>(), {rows, cols}, {stride, 1}, on};
        std::vector<Buffer> owned;
        const auto packed = [&] {
          const auto bytes = [&](std::int64_t width) {
            owned.emplace_back(on, n * width);
            return TensorView<std::uint8_t, 2>{
                owned.back().as<std::uint8_t>(), {n, width}, {width, 1}, on};
          };
          PackedView<std::uint8_t> p{
              bytes(rule.code_bytes(cols)), bytes(rule.scale_cols(cols)), {}};
          owned.emplace_back(on, n * 4);
          p.global = {owned.back().as<float>(), {n}, {1}, on};
          return p;
        };
        const PackedView<std::uint8_t> q = packed(), rest = packed();
        const Buffer room(on, n * cols * 4), sum(on, n * cols * 2);
        const TensorView<float, 2> lost = {room.as<float>(), {n, cols}, {cols, 1}, on};
        quantize({.x = view, .rule = rule, .out = q});
        if (rule.is_mx()) {
          residual_of(view, rule, q, rest, lost);
        } else {
          residual({.x = view, .q = q, .per_mille = 1000, .out = rest});
        }
        add_residual(q, rest, rule, -0.5f, {sum.as<Bf16>(), {n, cols}, {cols, 1}, on});
        std::vector<std::uint8_t> seen;
        const Buffer a =
            to_device(std::vector<float>(static_cast<std::size_t>(n * cols), 0.3f), on);
        Buffer b = to_device(std::vector<float>(static_cast<std::size_t>(n * cols), 1e7f), on);
        add_product({a.as<float>(), {n, cols}, {cols, 1}, on}, 0.7f,
                    {b.as<float>(), {n, cols}, {cols, 1}, on});
        synchronize(on);
        owned.push_back(std::move(b));
        for (const Buffer& buffer : owned) {
          const auto more = to_host<std::uint8_t>(buffer);
          seen.insert(seen.end(), more.begin(), more.end());
        }
        const auto more = to_host<std::uint8_t>(sum);
        seen.insert(seen.end(), more.begin(), more.end());
        return seen;
      };
      EXPECT_TRUE(outcome(device) == outcome({})) << rows << " x " << cols << " " << rule.is_mx();
    }
  }
}

// A grid has 65535 blocks along its second dimension: longer rows take several launches.
TEST_P(ResidualDevice, SumsOfRowsLongerThanAGrid) {
  const Device on = GetParam();
  const Quantizer rule = mx_rule(ScaleRule::kMxEven);
  const std::int64_t edge = std::int64_t{65535} * 256, cols = edge + 512;
  const Buffer codes(on, cols / 2), scales(on, cols / 32), sum(on, cols * 2);
  fill_bytes(codes.as<void>(), on, 0x22, codes.bytes());   // 1
  fill_bytes(scales.as<void>(), on, 127, scales.bytes());  // 1
  fill_bytes(sum.as<void>(), on, 0xFF, sum.bytes());
  for (const std::int64_t block : {edge / 32, cols / 32 - 1}) {
    const std::uint8_t four = 129;
    copy_bytes(scales.as<std::uint8_t>() + block, on, &four, {}, 1);
  }
  synchronize(on);
  const PackedView<const std::uint8_t> q = {
      {codes.as<const std::uint8_t>(), {1, cols / 2}, {cols / 2, 1}, on},
      {scales.as<const std::uint8_t>(), {1, cols / 32}, {cols / 32, 1}, on},
      {}};
  add_residual(q, q, rule, 0.5f, {sum.as<Bf16>(), {1, cols}, {cols, 1}, on});
  synchronize(on);
  for (const std::int64_t col : {std::int64_t{0}, edge - 1, edge, edge + 32, cols - 33, cols - 1}) {
    Bf16 value{};
    copy_bytes(&value, {}, sum.as<Bf16>() + col, on, sizeof(value));
    synchronize(on);
    const bool other = col == edge || col == cols - 1;
    EXPECT_EQ(to_float(value), other ? 6.0f : 1.5f) << col;
  }
}

}  // namespace
}  // namespace lockstep::kernels
