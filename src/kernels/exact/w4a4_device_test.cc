/// The product on every device against the portable CPU code, byte for byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/exact/w4a4_testing.h"

namespace lockstep::kernels {
namespace {

struct Case {
  std::vector<std::int32_t> counts;  // items of each expert; empty: all rows, one expert
  std::int64_t out_rows = 0;
  std::vector<std::int32_t> offsets, from, to;
};

/// Items of each expert take rows of `a` at random; outputs go to rows in another order.
Case dispatch(const std::vector<std::int32_t>& counts, std::int64_t rows, std::uint32_t seed) {
  Case c;
  c.counts = counts;
  c.offsets = {0};
  for (const std::int32_t n : counts) c.offsets.push_back(c.offsets.back() + n);
  const std::int32_t items = c.offsets.back();
  for (std::int32_t i = 0; i < items; ++i) {
    c.from.push_back(static_cast<std::int32_t>(word(seed, static_cast<std::uint32_t>(i)) %
                                               static_cast<std::uint32_t>(rows)));
    c.to.push_back(items - i);  // row 0 stays
  }
  c.out_rows = items + 1;
  return c;
}

std::vector<float> product(const Codes& a, const std::vector<Codes>& w, const Case& c,
                           const Codes* residual, int halvings, Device device, bool reference) {
  const OnDevice a_on(a, device);
  const OnDevice residual_on(residual == nullptr ? a : *residual, device);
  const Experts experts(w, device);
  const bool grouped = !c.counts.empty();
  const Buffer offsets = to_device(c.offsets, device);
  const Buffer from = to_device(c.from, device);
  const Buffer to = to_device(c.to, device);
  const std::int64_t rows = grouped ? c.out_rows : a.rows;
  const std::int64_t cols = w[0].rows;
  const Buffer out =
      to_device(std::vector<float>(static_cast<std::size_t>(rows * cols), -7.0f), device);
  W4a4Args args;
  args.a = a_on.view;
  if (residual != nullptr) args.residual = residual_on.view;
  args.w = experts.view;
  if (grouped) {
    args.offsets = index_view(offsets);
    args.from = index_view(from);
    args.to = index_view(to);
  }
  args.out = {out.as<float>(), {rows, cols}, {cols, 1}, device};
  args.residual_halvings = halvings;
  if (reference) {
    w4a4_on(args, Isa::kPortable);
  } else {
    w4a4(args);
  }
  return to_host<float>(out);
}

void expect_equal(const std::vector<float>& got, const std::vector<float>& want, std::int64_t cols,
                  const std::string& where) {
  ASSERT_EQ(got.size(), want.size());
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], 4) == 0) continue;
    if (wrong++ == 0) {
      ADD_FAILURE() << where << ": row " << static_cast<std::int64_t>(i) / cols << " output "
                    << static_cast<std::int64_t>(i) % cols << " is " << got[i] << ", must be "
                    << want[i];
    }
  }
  EXPECT_EQ(wrong, 0) << where << ": of " << got.size();
}

class W4a4Device : public testing::TestWithParam<Device> {
 protected:
  void check(const Codes& a, const std::vector<Codes>& w, const Case& c, const std::string& where,
             const Codes* residual = nullptr, int halvings = 0) {
    expect_equal(product(a, w, c, residual, halvings, GetParam(), false),
                 product(a, w, c, residual, halvings, Device{}, true), w[0].rows, where);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, W4a4Device, testing::ValuesIn(devices()), name_of_device);

TEST_P(W4a4Device, EqualsTheDefinitionForAnyShape) {
  std::uint32_t seed = 1;
  for (const auto [rows, cols, out] :
       {std::array{1, 16, 1}, std::array{3, 32, 16}, std::array{8, 48, 17}, std::array{9, 128, 160},
        std::array{37, 160, 5}, std::array{33, 64, 128}, std::array{2, 2048, 33},
        std::array{5, 768, 70}, std::array{7, 2064, 32}, std::array{12, 4112, 40},
        std::array{3, 8192, 33}}) {
    const Codes a = random_codes(rows, cols, ++seed, 40, false);
    const Codes w = random_codes(out, cols, ++seed, 40, true);
    check(a, {w}, {},
          std::to_string(rows) + "x" + std::to_string(cols) + "x" + std::to_string(out));
  }
}

TEST_P(W4a4Device, GroupsOfAnySizeAndEmptyExperts) {
  std::vector<std::int32_t> counts = {0, 1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 0, 17, 30, 0};
  for (int i = 0; i < 40; ++i) counts.push_back(i % 3);  // past one warp's look at the offsets
  for (const auto [cols, out] : {std::array{128, 72}, std::array{320, 100}}) {
    std::vector<Codes> w;
    for (std::size_t e = 0; e < counts.size(); ++e) {
      w.push_back(random_codes(out, cols, 100 + static_cast<std::uint32_t>(e), 8, true));
    }
    const Codes a = random_codes(50, cols, 99, 8, false);
    check(a, w, dispatch(counts, 50, 7), "cols " + std::to_string(cols));
    const Codes residual = random_codes(50, cols, 98, 8, false);
    for (const int halvings : {0, 1, 2}) {
      check(a, w, dispatch(counts, 50, 8), "residual, cols " + std::to_string(cols), &residual,
            halvings);
    }
  }
}

TEST_P(W4a4Device, HoldsTheWorstSumsAndTheirCancellation) {
  const std::int64_t cols = 8192;
  Codes a = random_codes(5, cols, 1, 0, true);
  Codes w = random_codes(34, cols, 2, 0, true);
  std::fill(a.scales.begin(), a.scales.end(), std::uint8_t{0x7E});
  std::fill(w.scales.begin(), w.scales.end(), std::uint8_t{0x7E});
  for (std::size_t i = 0; i < w.codes.size(); ++i) {
    w.codes[i] = i / 4096 % 2 == 0 ? 0x77 : 0xFF;
  }
  for (std::size_t i = 0; i < 4096; ++i) {
    a.codes[i] = 0x77;                            // the greatest sums
    a.codes[4096 + i] = i < 2048 ? 0x77 : 0xFF;   // halves that cancel
    a.codes[2 * 4096 + i] = i % 2 ? 0x77 : 0xFF;  // blocks that cancel within
  }
  // Row 3: cancels but for one smallest unit.
  std::copy_n(a.codes.begin() + 4096, 4096, a.codes.begin() + 3 * 4096);
  a.codes[3 * 4096 + 9] = 0x76;
  a.scales[3 * 512 + 100] = 1;
  std::fill_n(a.codes.begin() + 4 * 4096, 4096, std::uint8_t{0});  // a row of zeros
  check(a, {w}, {}, "worst sums");
  Codes greater = a;
  std::fill(greater.codes.begin(), greater.codes.end(), std::uint8_t{0xFF});
  check(a, {w}, {}, "worst sums with a residual", &greater);
}

TEST_P(W4a4Device, RoundsOnceFarBelowAndAboveFloat) {
  Codes a = random_codes(48, 64, 77, 116, false);
  for (std::size_t r = 0; r < 48; ++r) {
    a.global[r] =
        power_of_two(r < 32 ? -116 + static_cast<int>(r) / 4 : 116 - static_cast<int>(r) / 16);
  }
  for (const int n_w : {-116, -38, -34, -30, 10, 20, 116}) {
    Codes w = random_codes(16, 64, 78, 1, true);
    std::fill(w.global.begin(), w.global.end(), power_of_two(n_w));
    check(a, {w}, {}, "n_w " + std::to_string(n_w));
  }
}

TEST_P(W4a4Device, ManyItemsOfWideExperts) {
  std::vector<Codes> w;
  for (std::uint32_t e = 0; e < 3; ++e) w.push_back(random_codes(272, 768, 200 + e, 4, true, 0x20));
  const Codes a = random_codes(40, 768, 300, 4, false, 0x20);
  check(a, w, dispatch({70, 0, 33}, 40, 9), "wide");
}

TEST_P(W4a4Device, RowsMayLieApartAndUnaligned) {
  const Codes a = random_codes(6, 96, 400, 4, false);
  const Codes w = random_codes(40, 96, 401, 4, true);
  const std::vector<float> want = product(a, {w}, {}, nullptr, 0, Device{}, true);
  const Device device = GetParam();
  std::vector<std::uint8_t> codes(6 * 51 + 1);
  std::vector<std::uint8_t> scales(6 * 9);
  for (std::size_t r = 0; r < 6; ++r) {
    std::copy_n(a.codes.begin() + static_cast<std::ptrdiff_t>(r) * 48, 48,
                codes.begin() + 1 + static_cast<std::ptrdiff_t>(r) * 51);
    std::copy_n(a.scales.begin() + static_cast<std::ptrdiff_t>(r) * 6, 6,
                scales.begin() + static_cast<std::ptrdiff_t>(r) * 9);
  }
  const Buffer codes_on = to_device(codes, device);
  const Buffer scales_on = to_device(scales, device);
  const Buffer global_on = to_device(a.global, device);
  const Experts experts({w}, device);
  const Buffer out = to_device(std::vector<float>(6 * 64, -7.0f), device);
  w4a4({.a = {{codes_on.as<const std::uint8_t>() + 1, {6, 48}, {51, 1}, device},
              {scales_on.as<const std::uint8_t>(), {6, 6}, {9, 1}, device},
              {global_on.as<const float>(), {6}, {1}, device}},
        .w = experts.view,
        .out = {out.as<float>(), {6, 40}, {64, 1}, device}});
  const std::vector<float> got = to_host<float>(out);
  for (std::size_t r = 0; r < 6; ++r) {
    for (std::size_t j = 0; j < 64; ++j) {
      EXPECT_EQ(got[r * 64 + j], j < 40 ? want[r * 40 + j] : -7.0f) << r << " " << j;
    }
  }
}

TEST_P(W4a4Device, RefillChangesTheRowsItNamesAlone) {
  const Codes gate = random_codes(24, 80, 500, 0, true);
  const Codes up = random_codes(24, 80, 501, 0, true);
  const Codes a = random_codes(5, 80, 502, 3, false);
  Codes both = gate;
  both.rows = 48;
  both.codes.insert(both.codes.end(), up.codes.begin(), up.codes.end());
  both.scales.insert(both.scales.end(), up.scales.begin(), up.scales.end());
  both.global.resize(48, gate.global[0]);
  const Device device = GetParam();
  Codes other = both;
  for (auto& c : other.codes) c ^= 0x35;
  const Experts experts({other, other}, device);
  const OnDevice gate_on(gate, device);
  const OnDevice up_on(up, device);
  w4a4_fill(experts.view, 1, 24, up_on.view);
  w4a4_fill(experts.view, 1, 0, gate_on.view);
  const OnDevice a_on(a, device);
  const std::vector<std::int32_t> offsets = {0, 0, 5};
  const Buffer offsets_on = to_device(offsets, device);
  const Buffer out = to_device(std::vector<float>(5 * 48, -7.0f), device);
  w4a4({.a = a_on.view,
        .w = experts.view,
        .offsets = index_view(offsets_on),
        .out = {out.as<float>(), {5, 48}, {48, 1}, device}});
  expect_equal(to_host<float>(out), product(a, {both}, {}, nullptr, 0, Device{}, true), 48,
               "gate and up");
}

TEST_P(W4a4Device, SaysWhereThingsLie) {
  if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "a mixture needs two devices";
  const Codes a = random_codes(2, 32, 600, 0, true);
  const Codes w = random_codes(16, 32, 601, 0, true);
  const Experts experts({w}, GetParam());
  std::vector<float> out(32);
  try {
    w4a4({.a = a.view(), .w = experts.view, .out = {out.data(), {2, 16}, {16, 1}}});
    FAIL() << "took operands of two devices";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("one device"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lockstep::kernels
