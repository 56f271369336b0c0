#include "kernels/exact/residual.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/testing.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kRule = testing::kToken;
using testing::view;

struct Packed {
  std::int64_t rows;
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;
  std::vector<float> global;
  Packed(std::int64_t r, std::int64_t c)
      : rows(r),
        codes(static_cast<std::size_t>(r * c / 2), 0xEE),
        scales(static_cast<std::size_t>(r * c / 16), 0xEE),
        global(static_cast<std::size_t>(r)) {}
  PackedView<std::uint8_t> view() {
    return {testing::view<std::uint8_t>(codes, rows),
            testing::view<std::uint8_t>(scales, rows),
            {global.data(), {rows}, {1}}};
  }
  double value(std::int64_t row, std::int64_t cols, std::int64_t c) const {
    const auto i = static_cast<std::size_t>(row * cols + c);
    const auto code =
        static_cast<E2m1>(static_cast<std::uint8_t>(codes[i / 2] >> (i % 2 * 4) & 15));
    return static_cast<double>(to_float(code)) * to_float(static_cast<E4m3>(scales[i / 16])) *
           global[static_cast<std::size_t>(row)];
  }
};

struct Case {
  std::int64_t rows;
  std::int64_t cols;
  std::vector<Bf16> x;
  Packed q;
  Packed r;

  Case(std::int64_t n, std::int64_t c, std::uint32_t seed) : rows(n), cols(c), q(n, c), r(n, c) {
    for (std::int64_t i = 0; i < n * c; ++i) {
      const PhiloxWords w = philox(seed, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
      double v = unit(w[0], w[1]) + unit(w[1], w[2]) + unit(w[2], w[3]) - 1.5;
      if (i % c == 5) v *= 1000;  // an outlier channel
      x.push_back(
          to_bf16(static_cast<float>(std::ldexp(v, static_cast<int>(i / c % 5) * 20 - 40))));
    }
  }
  void quantize_x() {
    QuantizeArgs args;
    args.x = view<const Bf16>(x, rows);
    args.rule = kRule;
    args.out = q.view();
    quantize(args);
  }
  ResidualArgs args() {
    ResidualArgs a;
    a.x = view<const Bf16>(x, rows);
    a.q = q.view();
    a.out = r.view();
    return a;
  }
  /// Error of the plain and of the compensated row.
  std::pair<double, double> errors(std::int64_t row) const {
    double plain = 0;
    double compensated = 0;
    for (std::int64_t c = 0; c < cols; ++c) {
      const double want = to_float(x[static_cast<std::size_t>(row * cols + c)]);
      const double e = q.value(row, cols, c) - want;
      plain += e * e;
      const double f = e - r.value(row, cols, c);
      compensated += f * f;
    }
    return {plain, compensated};
  }
};

class ResidualIsa : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!has_isa(GetParam())) GTEST_SKIP() << "this machine does not have these instructions";
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, ResidualIsa, ::testing::ValuesIn(kAllIsas));

TEST_P(ResidualIsa, EqualsAnIndependentReading) {
  for (const ResidualChoice choice :
       {ResidualChoice::kPerToken, ResidualChoice::kBatch, ResidualChoice::kStatic}) {
    Case c(23, 144, 1);
    c.quantize_x();
    ResidualArgs args = c.args();
    args.choice = choice;
    args.per_mille = 500;  // 5 of 9 groups
    std::vector<std::uint8_t> kept = {1, 0, 0, 1, 0, 1, 1, 0, 1};
    args.chosen = {kept.data(), {9}, {1}};
    residual_on(args, GetParam());

    std::vector<std::vector<float>> scores(23, std::vector<float>(9));
    std::vector<float> sums(9);
    for (std::int64_t row = 0; row < 23; ++row) {
      const float global = c.q.global[static_cast<std::size_t>(row)];
      for (std::size_t g = 0; g < 9; ++g) {
        for (std::size_t i = 0; i < 16; ++i) {
          const std::size_t at = g * 16 + i;
          const double r = c.q.value(row, 144, static_cast<std::int64_t>(at)) -
                           to_float(c.x[static_cast<std::size_t>(row) * 144 + at]);
          ASSERT_EQ(to_float(to_bf16(static_cast<float>(r))), r);  // exact in BF16
          const float scaled = static_cast<float>(r / global);
          scores[static_cast<std::size_t>(row)][g] += scaled * scaled;
        }
        sums[g] += scores[static_cast<std::size_t>(row)][g];
      }
    }
    for (std::int64_t row = 0; row < 23; ++row) {
      const auto& by =
          choice == ResidualChoice::kBatch ? sums : scores[static_cast<std::size_t>(row)];
      for (std::int64_t g = 0; g < 9; ++g) {
        const auto at = static_cast<std::size_t>(g);
        int above = 0;
        for (std::size_t h = 0; h < 9; ++h) above += by[h] > by[at] || (by[h] == by[at] && h < at);
        const bool chosen = choice == ResidualChoice::kStatic ? kept[at] != 0 : above < 5;
        const int n = exponent_of(c.q.global[static_cast<std::size_t>(row)]) - 2;
        ASSERT_EQ(c.r.global[static_cast<std::size_t>(row)], power_of_two(n));
        double amax = 0;
        for (std::int64_t i = 0; i < 16; ++i) {
          const std::int64_t col = g * 16 + i;
          amax = std::max(amax, std::abs(c.q.value(row, 144, col) -
                                         to_float(c.x[static_cast<std::size_t>(row * 144 + col)])));
        }
        const E4m3 s8 = to_e4m3(static_cast<float>(amax * std::ldexp(1.0, -n) / 6));
        ASSERT_EQ(c.r.scales[static_cast<std::size_t>(row * 9 + g)], chosen ? bits_of(s8) : 0);
        const double scale = static_cast<double>(to_float(s8)) * std::ldexp(1.0, n);
        for (std::int64_t i = 0; i < 16; ++i) {
          const std::int64_t col = g * 16 + i;
          const double r =
              c.q.value(row, 144, col) - to_float(c.x[static_cast<std::size_t>(row * 144 + col)]);
          const double want =
              chosen ? to_float(to_e2m1(static_cast<float>(r / scale))) * scale : 0.0;
          ASSERT_EQ(c.r.value(row, 144, col), scale == 0 ? 0.0 : want) << row << " " << col;
        }
      }
    }
  }
}

TEST_P(ResidualIsa, MakesTheErrorSmaller) {
  // Eq. 20 and 21: the sign is right if and only if ||X~ - X|| < ||Q(X) - X||.
  for (const int per_mille : {125, 500, 1000}) {
    Case c(40, 128, 2);
    c.quantize_x();
    ResidualArgs args = c.args();
    args.per_mille = per_mille;
    residual_on(args, GetParam());
    for (std::int64_t row = 0; row < 40; ++row) {
      const auto [plain, compensated] = c.errors(row);
      EXPECT_LT(compensated, plain) << "row " << row << " per mille " << per_mille;
      if (per_mille == 1000) {
        EXPECT_LT(compensated, 0.05 * plain);
      }
    }
  }
}

TEST_P(ResidualIsa, CountsGroupsUpAndBreaksTiesByIndex) {
  // Equal groups: the lower ones are chosen. 1 of 1000 of 8 groups is one, none is none.
  for (const auto& [per_mille, want] : {std::pair{0, 0}, std::pair{1, 1}, std::pair{125, 1},
                                        std::pair{126, 2}, std::pair{500, 4}, std::pair{1000, 8}}) {
    Case c(2, 128, 3);
    for (std::size_t i = 0; i < c.x.size(); ++i) {
      c.x[i] = to_bf16(1.0f + 0.078125f * static_cast<float>(i % 16));
    }
    c.quantize_x();
    ResidualArgs args = c.args();
    args.per_mille = per_mille;
    residual_on(args, GetParam());
    for (std::size_t g = 0; g < 16; ++g) {
      EXPECT_EQ(c.r.scales[g] != 0, static_cast<int>(g % 8) < want) << g << " of " << per_mille;
    }
  }
}

TEST_P(ResidualIsa, RowsThatAreNotFiniteAndZerosHaveNone) {
  Case c(3, 32, 4);
  c.x[35] = to_bf16(std::numeric_limits<float>::infinity());
  std::fill(c.x.begin() + 64, c.x.end(), Bf16{0});
  c.quantize_x();
  residual_on(c.args(), GetParam());
  for (std::size_t i = 16; i < 48; ++i) EXPECT_EQ(c.r.codes[i], 0);
  for (std::size_t g = 2; g < 6; ++g) EXPECT_EQ(c.r.scales[g], 0);
  EXPECT_NE(c.r.scales[0] + c.r.scales[1], 0);
}

TEST_P(ResidualIsa, PerTokenDoesNotSeeTheBatch) {
  Case all(16, 64, 5);
  all.quantize_x();
  residual_on(all.args(), GetParam());
  for (std::int64_t row = 0; row < 16; ++row) {
    Case one(1, 64, 5);
    std::copy_n(all.x.begin() + row * 64, 64, one.x.begin());
    one.quantize_x();
    residual_on(one.args(), GetParam());
    EXPECT_TRUE(std::equal(one.r.codes.begin(), one.r.codes.end(), all.r.codes.begin() + row * 32));
    EXPECT_TRUE(
        std::equal(one.r.scales.begin(), one.r.scales.end(), all.r.scales.begin() + row * 4));
  }
}

TEST_P(ResidualIsa, KeepsTwoOfEveryFour) {
  Case c(12, 96, 8);
  c.quantize_x();
  ResidualArgs args = c.args();
  args.per_mille = 1000;
  residual_on(args, GetParam());
  const Packed dense = c.r;
  args.pattern = ResidualPattern::kTwoOfFour;
  args.per_mille = 0;  // not read
  residual_on(args, GetParam());
  EXPECT_EQ(c.r.scales, dense.scales);  // the largest of a block is always kept
  for (std::int64_t row = 0; row < 12; ++row) {
    for (std::int64_t first = 0; first < 96; first += 4) {
      double size[4];
      for (std::int64_t i = 0; i < 4; ++i) {
        const double x = to_float(c.x[static_cast<std::size_t>(row * 96 + first + i)]);
        size[i] = std::abs(c.q.value(row, 96, first + i) - x);
      }
      for (std::int64_t i = 0; i < 4; ++i) {
        int before = 0;
        for (std::int64_t j = 0; j < 4; ++j) {
          before += size[j] > size[i] || (size[j] == size[i] && j < i);
        }
        const double want = before < 2 ? dense.value(row, 96, first + i) : 0.0;
        ASSERT_EQ(c.r.value(row, 96, first + i), want) << row << " " << first + i;
      }
    }
    const auto [plain, compensated] = c.errors(row);
    EXPECT_LT(compensated, plain);
  }
}

TEST_P(ResidualIsa, BlocksAre64ChannelsOfAToken) {
  Case c(9, 160, 9);  // blocks of 64, 64 and 32
  c.quantize_x();
  ResidualArgs args = c.args();
  args.pattern = ResidualPattern::kBlocks;
  args.per_mille = 334;  // two of three
  residual_on(args, GetParam());
  for (std::int64_t row = 0; row < 9; ++row) {
    double score[3] = {0, 0, 0};
    for (std::int64_t col = 0; col < 160; ++col) {
      const double r =
          c.q.value(row, 160, col) - to_float(c.x[static_cast<std::size_t>(row * 160 + col)]);
      score[col / 64] += r * r;
    }
    const int least = static_cast<int>(std::min_element(score, score + 3) - score);
    for (std::int64_t g = 0; g < 10; ++g) {
      const bool chosen = g / 4 != least;
      EXPECT_EQ(c.r.scales[static_cast<std::size_t>(row * 10 + g)] != 0, chosen) << row << " " << g;
    }
    const auto [plain, compensated] = c.errors(row);
    EXPECT_LT(compensated, plain);
  }
}

TEST_P(ResidualIsa, BlocksOfABatchAre32TokensHigh) {
  Case c(70, 128, 10);  // 3 x 2 blocks, the last of 6 rows
  c.quantize_x();
  ResidualArgs args = c.args();
  args.pattern = ResidualPattern::kBlocks;
  args.choice = ResidualChoice::kBatch;
  residual_on(args, GetParam());
  std::vector<float> score(6);
  for (std::int64_t row = 0; row < 70; ++row) {
    const double global = c.q.global[static_cast<std::size_t>(row)];
    for (std::int64_t col = 0; col < 128; ++col) {
      const double r =
          (c.q.value(row, 128, col) - to_float(c.x[static_cast<std::size_t>(row * 128 + col)])) /
          global;
      score[static_cast<std::size_t>(row / 32 * 2 + col / 64)] += static_cast<float>(r * r);
    }
  }
  for (std::size_t unit = 0; unit < 6; ++unit) {
    int above = 0;
    for (std::size_t other = 0; other < 6; ++other) above += score[other] > score[unit];
    for (std::size_t row = unit / 2 * 32; row < std::min<std::size_t>(70, unit / 2 * 32 + 32);
         ++row) {
      EXPECT_EQ(c.r.scales[row * 8 + unit % 2 * 4] != 0, above < 3) << unit << " " << row;
    }
  }
}

TEST(Residual, BatchChoiceCanBeKept) {
  Case batch(9, 96, 6);
  batch.quantize_x();
  ResidualArgs args = batch.args();
  args.choice = ResidualChoice::kBatch;
  residual(args);
  std::vector<std::uint8_t> groups =
      choose_groups(residual_scores(args), args.pattern, args.per_mille);
  EXPECT_EQ(std::count(groups.begin(), groups.end(), 1), 3);
  Case kept(9, 96, 6);
  kept.quantize_x();
  args = kept.args();
  args.choice = ResidualChoice::kStatic;
  args.chosen = {groups.data(), {6}, {1}};
  residual(args);
  EXPECT_EQ(kept.r.codes, batch.r.codes);
  EXPECT_EQ(kept.r.scales, batch.r.scales);
}

TEST(Residual, NamesWhatIsWrong) {
  Case c(2, 32, 7);
  c.quantize_x();
  const auto message = [](const ResidualArgs& args) -> std::string {
    try {
      residual(args);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  ResidualArgs args = c.args();
  args.per_mille = 1001;
  EXPECT_EQ(message(args), "residual: per_mille is 1001, must be in [0, 1000]");
  args = c.args();
  args.choice = ResidualChoice::kStatic;
  EXPECT_NE(message(args).find("one for each of 2 groups"), std::string::npos);
  c.q.global[1] = 0.3f;
  EXPECT_NE(message(c.args()).find("row 1 of q"), std::string::npos);
}

// The views hold no address that could be read: the device that they name is enough.
TEST(Residual, TheSecondPassRefusesViewsOfTwoDevices) {
  constexpr Device kCpu{}, kCuda{Device::Kind::kCuda, 0};
  const auto packed = [](std::array<Device, 4> on) {
    return PackedView<std::uint8_t>{{nullptr, {2, 16}, {16, 1}, on[0]},
                                    {nullptr, {2, 1}, {1, 1}, on[1]},
                                    {nullptr, {2}, {0}, on[2]},
                                    {nullptr, {2, 1}, {1, 1}, on[3]}};
  };
  const auto message = [](const auto& op) -> std::string {
    try {
      op();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const std::string tail = ": every view must be on one device";
  for (std::size_t at = 0; at < 9; ++at) {
    std::array<Device, 9> on{};
    on[at] = kCuda;
    const TensorView<Bf16, 2> x = {nullptr, {2, 32}, {32, 1}, on[0]};
    const auto a = packed({on[1], on[2], on[3], on[4]}), b = packed({on[5], on[6], on[7], on[8]});
    EXPECT_EQ(message([&] { residual_of(x, kRule, a, b); }), "residual_of" + tail) << at;
    EXPECT_EQ(message([&] { add_residual(a, b, kRule, 1.0f, x); }), "add_residual" + tail) << at;
  }
  const TensorView<Bf16, 2> nothing = {nullptr, {0, 32}, {32, 1}, kCpu};
  EXPECT_EQ(message([&] { residual_of(nothing, kRule, {}, {}); }).find("every view"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep::kernels
