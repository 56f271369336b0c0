#include "kernels/dense/w4a16.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/dense/grouped_product.h"
#include "kernels/exact/w4a4_testing.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

namespace lockstep::kernels {
namespace {

struct Problem {
  std::int64_t rows = 0;
  std::vector<Bf16> x;
  std::vector<Codes> w;
  std::vector<std::int32_t> offsets, from, to;

  std::int64_t items() const { return static_cast<std::int64_t>(from.size()); }
  std::int64_t cols() const { return w[0].cols; }
  std::int64_t out() const { return w[0].rows; }
};

/// Items of each expert take rows at random; x has numbers of many binades.
Problem problem(std::int64_t rows, std::int64_t cols, std::int64_t out,
                const std::vector<std::int32_t>& counts, std::uint32_t seed,
                std::uint32_t least = 0) {
  Problem p;
  p.rows = rows;
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    const std::uint32_t bits = word(seed, static_cast<std::uint32_t>(i));
    // Sign and mantissa at random, exponents of six binades around 1.
    p.x.push_back(static_cast<Bf16>(
        static_cast<std::uint16_t>((bits & 0x807Fu) | (124u + (bits >> 16) % 6u) << 7)));
  }
  p.offsets = {0};
  for (std::size_t e = 0; e < counts.size(); ++e) {
    p.w.push_back(
        random_codes(out, cols, seed + 10 + static_cast<std::uint32_t>(e), 9, true, least));
    p.offsets.push_back(p.offsets.back() + counts[e]);
  }
  for (std::int32_t i = 0; i < p.offsets.back(); ++i) {
    p.from.push_back(static_cast<std::int32_t>(word(seed + 1, static_cast<std::uint32_t>(i)) %
                                               static_cast<std::uint32_t>(rows)));
    p.to.push_back(p.offsets.back() - 1 - i);
  }
  return p;
}

/// Rows of x in the order of the items.
std::vector<Bf16> sorted(const Problem& p) {
  std::vector<Bf16> x;
  for (const std::int32_t row : p.from) {
    x.insert(x.end(), p.x.begin() + row * p.cols(), p.x.begin() + (row + 1) * p.cols());
  }
  return x;
}

std::vector<float> run(const Problem& p, Device device, bool sorts = false) {
  const Buffer x = to_device(sorts ? sorted(p) : p.x, device);
  const Experts w(p.w, device);
  const Buffer offsets = to_device(p.offsets, device);
  const Buffer from = to_device(p.from, device);
  const Buffer to = to_device(p.to, device);
  const Buffer out =
      to_device(std::vector<float>(static_cast<std::size_t>(p.items() * p.out()), -7.0f), device);
  W4a16Args args = {
      .x = {x.as<const Bf16>(), {sorts ? p.items() : p.rows, p.cols()}, {p.cols(), 1}, device},
      .w = w.view,
      .offsets = index_view(offsets),
      .to = index_view(to),
      .out = {out.as<float>(), {p.items(), p.out()}, {p.out(), 1}, device}};
  if (!sorts) args.from = index_view(from);
  w4a16(args);
  return to_host<float>(out);
}

double weight(const Codes& w, std::int64_t row, std::int64_t k) {
  const int pair = w.codes[static_cast<std::size_t>((row * w.cols + k) / 2)];
  const auto code = static_cast<E2m1>(static_cast<std::uint8_t>(k % 2 ? pair >> 4 : pair & 15));
  const auto s8 = static_cast<E4m3>(w.scales[static_cast<std::size_t>((row * w.cols + k) / 16)]);
  return double{to_float(code)} * double{to_float(s8)} * double{w.global[0]};
}

class W4a16 : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, W4a16, testing::ValuesIn(devices()), name_of_device);

TEST_P(W4a16, StaysWithinItsBound) {
  const bool cpu = GetParam().kind == Device::Kind::kCpu;
  std::uint32_t seed = 50;
  for (const auto [cols, out] : {std::array{16, 16}, std::array{64, 33}, std::array{2048, 40},
                                 std::array{768, 70}, std::array{2192, 16}, std::array{48, 100}}) {
    if (cpu && cols > 100) continue;  // std::fma takes its time there
    const Problem p = problem(9, cols, out, {0, 1, 3, 8, 0, 9, 20}, seed += 100);
    const std::vector<float> y = run(p, GetParam());
    const double k = static_cast<double>(cols);
    const double bound = cpu ? k * 0x1p-24 : (k / 8 + 4) * 0x1p-23;
    double worst = 0.0;
    for (std::size_t e = 0; e < p.w.size(); ++e) {
      for (std::int32_t i = p.offsets[e]; i < p.offsets[e + 1]; ++i) {
        const auto at = static_cast<std::size_t>(i);
        for (std::int64_t row = 0; row < out; ++row) {
          double sum = 0.0;
          double size = 0.0;
          for (std::int64_t j = 0; j < cols; ++j) {
            const double product =
                weight(p.w[e], row, j) *
                double{to_float(p.x[static_cast<std::size_t>(p.from[at] * cols + j)])};
            sum += product;
            size += std::abs(product);
          }
          const double got = y[static_cast<std::size_t>(p.to[at] * out + row)];
          worst = std::max(worst, size == 0.0 ? std::abs(got) : std::abs(got - sum) / size);
        }
      }
    }
    EXPECT_LE(worst, bound) << cols << " x " << out;
  }
}

/// The same over BF16 copies of the weights.
std::vector<float> run_copies(const Problem& p, Device device) {
  std::vector<Bf16> w;
  for (const Codes& codes : p.w) {
    for (std::int64_t i = 0; i < p.out() * p.cols(); ++i) {
      const double value = weight(codes, i / p.cols(), i % p.cols());
      w.push_back(to_bf16(static_cast<float>(value)));
      EXPECT_EQ(double{to_float(w.back())}, value);
    }
  }
  const Buffer rows = to_device(sorted(p), device);
  const Buffer copies = to_device(w, device);
  const Buffer offsets = to_device(p.offsets, device);
  const Buffer to = to_device(p.to, device);
  const Buffer out =
      to_device(std::vector<float>(static_cast<std::size_t>(p.items() * p.out()), -7.0f), device);
  const auto experts = static_cast<std::int64_t>(p.w.size());
  grouped_product({.x = {rows.as<const Bf16>(), {p.items(), p.cols()}, {p.cols(), 1}, device},
                   .w = {copies.as<const Bf16>(),
                         {experts, p.out(), p.cols()},
                         {p.out() * p.cols(), p.cols(), 1},
                         device},
                   .offsets = index_view(offsets),
                   .to = index_view(to),
                   .y = {out.as<float>(), {p.items(), p.out()}, {p.out(), 1}, device}});
  return to_host<float>(out);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// One order of sums: over codes or copies, for few rows or many, whatever the tile.
TEST_P(W4a16, HasTheBitsOfTheProductOverCopies) {
  const bool cpu = GetParam().kind == Device::Kind::kCpu;
  const std::vector<std::int32_t> few = {0, 1, 3, 8, 0, 9, 20, 17, 33, 16, 7};
  const std::vector<std::int32_t> many = {0, 1, 300, 65, 0, 520, 257, 2, 129, 31, 1000, 176, 0};
  std::uint32_t seed = 1000;
  for (const auto [cols, out] :
       {std::array{16, 16}, std::array{64, 128}, std::array{208, 100}, std::array{2048, 260},
        std::array{768, 144}, std::array{1040, 33}}) {
    if (cpu && cols > 100) continue;
    for (const auto* const counts : {&few, &many}) {
      if (cpu && counts == &many) continue;
      Problem p = problem(60, cols, out, *counts, seed += 100);
      // Scales at their extremes: none, subnormal, the least normal and the largest.
      for (std::size_t e = 0; e < p.w.size(); e += 3) {
        const std::array<std::uint8_t, 6> bytes = {0x00, 0x01, 0x07, 0x08, 0x7D, 0x7E};
        for (std::size_t i = 0; i < p.w[e].scales.size(); ++i) {
          p.w[e].scales[i] = bytes[word(seed, static_cast<std::uint32_t>(i)) % 6];
        }
      }
      const std::vector<float> y = run(p, GetParam());
      EXPECT_TRUE(same_bits(y, run_copies(p, GetParam()))) << cols << " x " << out;
      EXPECT_TRUE(same_bits(y, run(p, GetParam())));
      EXPECT_TRUE(same_bits(y, run(p, GetParam(), true))) << cols << " x " << out;
    }
  }
}

/// Each count of items has its own division into tiles.
TEST_P(W4a16, HasTheSameBitsForAnyNumberOfItems) {
  if (GetParam().kind == Device::Kind::kCpu) GTEST_SKIP() << "one row after the other there";
  std::vector<std::int32_t> counts;
  for (std::int32_t n = 1; n < 600; n += n < 40 ? 1 : 13) counts.push_back(n);
  Problem p = problem(40, 256, 144, counts, 77);
  for (std::size_t e = 1; e < p.w.size(); ++e) p.w[e] = p.w[0];
  const std::vector<float> y = run(p, GetParam());
  // What each row makes of the one matrix, by itself.
  Problem one = problem(40, 256, 144, {40}, 77);
  one.x = p.x, one.w = {p.w[0]};
  std::int64_t wrong = 0;
  for (std::int32_t row = 0; row < 40; ++row) one.from[static_cast<std::size_t>(row)] = row;
  const std::vector<float> rows = run(one, GetParam());
  for (std::size_t i = 0; i < p.from.size(); ++i) {
    const auto at = static_cast<std::size_t>(one.to[static_cast<std::size_t>(p.from[i])]);
    wrong += std::memcmp(&y[static_cast<std::size_t>(p.to[i]) * 144], &rows[at * 144],
                         144 * sizeof(float)) != 0;
  }
  EXPECT_EQ(wrong, 0);
}

/// Rows that start anywhere, and without numbers of others' rows that are none.
TEST_P(W4a16, TakesRowsThatStartAnywhere) {
  const Device device = GetParam();
  const bool cpu = device.kind == Device::Kind::kCpu;
  Problem p = problem(9, cpu ? 48 : 336, 72, {3, 0, cpu ? 9 : 90, 1}, 5);
  for (std::int64_t k = 0; k < p.cols(); k += 5) {
    p.x[static_cast<std::size_t>(p.cols() + k)] = Bf16{0x7FC0};
  }
  const std::vector<float> y = run(p, device);
  const std::int64_t stride = p.cols() + 3, out_stride = p.out() + 1;
  std::vector<Bf16> x(static_cast<std::size_t>(p.rows * stride));
  for (std::int64_t i = 0; i < p.rows; ++i) {
    std::copy_n(p.x.begin() + i * p.cols(), p.cols(), x.begin() + i * stride);
  }
  const Buffer apart = to_device(x, device);
  const Experts w(p.w, device);
  const Buffer offsets = to_device(p.offsets, device);
  const Buffer from = to_device(p.from, device);
  const Buffer to = to_device(p.to, device);
  const Buffer out = to_device(
      std::vector<float>(static_cast<std::size_t>(p.items() * out_stride), -7.0f), device);
  w4a16({.x = {apart.as<const Bf16>(), {p.rows, p.cols()}, {stride, 1}, device},
         .w = w.view,
         .offsets = index_view(offsets),
         .from = index_view(from),
         .to = index_view(to),
         .out = {out.as<float>(), {p.items(), p.out()}, {out_stride, 1}, device}});
  const std::vector<float> got = to_host<float>(out);
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < p.items(); ++i) {
    const auto at = static_cast<std::size_t>(p.to[static_cast<std::size_t>(i)]);
    const float* const row = &got[at * static_cast<std::size_t>(out_stride)];
    if (p.from[static_cast<std::size_t>(i)] == 1) {
      wrong += !std::isnan(row[0]);
    } else {
      wrong += std::memcmp(row, &y[at * 72], 72 * sizeof(float)) != 0 || std::isnan(row[0]);
    }
    wrong += row[72] != -7.0f;
  }
  EXPECT_EQ(wrong, 0);
}

/// Warps must not overtake each other by more than the stages that they share.
TEST_P(W4a16, ManyShortExpertsBesideLongOnes) {
  const bool cpu = GetParam().kind == Device::Kind::kCpu;
  std::vector<std::int32_t> counts;
  for (int e = 0; e < (cpu ? 6 : 400); ++e) {
    counts.push_back(e % 4 == 0 ? (cpu ? 9 : 290) : e % 4 == 1 ? 9 : e % 4 == 2 ? 0 : 1);
  }
  const Problem p = problem(30, 128, cpu ? 16 : 136, counts, 11);
  const std::vector<float> first = run(p, GetParam());
  EXPECT_TRUE(same_bits(first, run_copies(p, GetParam())));
  for (int again = 0; again < (cpu ? 1 : 20); ++again) {
    EXPECT_TRUE(same_bits(run(p, GetParam(), again % 2 == 1), first));
  }
}

TEST_P(W4a16, ARowDoesNotDependOnItsCompany) {
  const Problem all = problem(12, 768, 48, {5, 17, 1}, 7, 0x20);
  const std::vector<float> y = run(all, GetParam());
  for (const std::size_t item : {0u, 4u, 5u, 12u, 13u, 21u, 22u}) {
    Problem one = all;
    const std::size_t expert = item < 5 ? 0 : item < 22 ? 1 : 2;
    one.from = {all.from[item]};
    one.to = {0};
    one.offsets = {0, expert < 1 ? 1 : 0, expert < 2 ? 1 : 0, 1};
    const std::vector<float> alone = run(one, GetParam());
    EXPECT_EQ(std::memcmp(alone.data(), y.data() + static_cast<std::size_t>(all.to[item]) * 48,
                          48 * sizeof(float)),
              0)
        << item;
  }
  EXPECT_EQ(run(all, GetParam()), y);
}

TEST_P(W4a16, NamesWhatDoesNotFit) {
  std::vector<Bf16> x(32);
  std::byte bytes[64] = {};
  try {
    w4a16({.x = {x.data(), {1, 32}, {32, 1}}, .w = {bytes, 1, 16, 64}});
    FAIL() << "took rows of another width";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("as many columns"), std::string::npos);
  }
  try {
    w4a16({.x = {x.data(), {1, 32}, {32, 1}}, .w = {bytes, 1, 16, 32, {}, true}});
    FAIL() << "took weights whose scales have mantissas";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no powers of two"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::kernels
