#include "kernels/dense/grouped_product.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "device/testing.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"

namespace lockstep::kernels {
namespace {

std::uint32_t word(std::uint32_t seed, std::size_t index) {
  return philox(seed, philox_counter(index, 0, 0))[0];
}

/// Codes times E4M3 scales in [low, high], one a block of 16.
std::vector<Bf16> values(std::size_t count, std::uint32_t seed, std::uint32_t low,
                         std::uint32_t high, bool positive = false) {
  std::vector<Bf16> x(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t s8 = low + word(seed + 1, i / 16) % (high - low + 1);
    const std::uint32_t code = word(seed, i) & (positive ? 7u : 15u);
    x[i] = to_bf16(to_float(static_cast<E2m1>(static_cast<std::uint8_t>(code))) *
                   to_float(static_cast<E4m3>(static_cast<std::uint8_t>(s8))));
  }
  return x;
}

struct Problem {
  std::int64_t k, out;
  std::vector<std::int32_t> offsets;
  std::vector<std::int32_t> to;  // empty: in order
  std::vector<Bf16> x, w;
  bool turned = false;  // w is given as [groups, K, out]

  std::int64_t items() const { return offsets.back(); }
  std::int64_t groups() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
};

Problem problem(std::int64_t k, std::int64_t out, const std::vector<std::int32_t>& counts,
                std::uint32_t seed, std::uint32_t low, std::uint32_t high, bool positive = false) {
  Problem p{k, out, {0}, {}, {}, {}};
  for (const std::int32_t count : counts) p.offsets.push_back(p.offsets.back() + count);
  for (std::int32_t i = 0; i < p.items(); ++i) {
    p.to.push_back(static_cast<std::int32_t>(p.items()) - 1 - i);
  }
  p.x = values(static_cast<std::size_t>(p.items() * k), seed, low, high, positive);
  p.w = values(static_cast<std::size_t>(p.groups() * out * k), seed + 10, low, high, positive);
  return p;
}

/// [groups, out, K] -> [groups, K, out]
std::vector<Bf16> turn(const Problem& p) {
  std::vector<Bf16> turned(p.w.size());
  for (std::int64_t i = 0; i < std::ssize(p.w); ++i) {
    const std::int64_t group = i / (p.out * p.k), o = i / p.k % p.out, j = i % p.k;
    turned[static_cast<std::size_t>((group * p.k + j) * p.out + o)] =
        p.w[static_cast<std::size_t>(i)];
  }
  return turned;
}

std::vector<float> run(const Problem& p, Device device) {
  const Buffer x = to_device(p.x, device);
  const Buffer w = to_device(p.turned ? turn(p) : p.w, device);
  const Buffer offsets = to_device(p.offsets, device);
  const Buffer to = to_device(p.to, device);
  const Buffer y =
      to_device(std::vector<float>(static_cast<std::size_t>(p.items() * p.out), -7.0f), device);
  GroupedProductArgs args;
  args.x = {x.as<const Bf16>(), {p.items(), p.k}, {p.k, 1}, device};
  const std::int64_t rows = p.turned ? p.k : p.out, cols = p.turned ? p.out : p.k;
  args.w = {w.as<const Bf16>(), {p.groups(), rows, cols}, {rows * cols, cols, 1}, device};
  args.turned = p.turned;
  args.offsets = {offsets.as<const std::int32_t>(), {p.groups() + 1}, {1}, device};
  if (!p.to.empty()) args.to = {to.as<const std::int32_t>(), {p.items()}, {1}, device};
  args.y = {y.as<float>(), {p.items(), p.out}, {p.out, 1}, device};
  grouped_product(args);
  return to_host<float>(y);
}

/// Calls `check(got, exact, sum |x w|)` for some of the outputs: all where there are few.
template <typename Check>
void for_outputs(const Problem& p, const std::vector<float>& y, const Check& check) {
  const std::int64_t all = p.items() * p.out;
  const std::int64_t step = std::max<std::int64_t>(1, all * p.k / 20'000'000) * 2 - 1;
  for (std::int64_t group = 0; group < p.groups(); ++group) {
    const std::int64_t begin = p.offsets[static_cast<std::size_t>(group)] * p.out;
    const std::int64_t end = p.offsets[static_cast<std::size_t>(group) + 1] * p.out;
    for (std::int64_t i = begin; i < end; i += step) {
      const Bf16* x = p.x.data() + i / p.out * p.k;
      const Bf16* w = p.w.data() + (group * p.out + i % p.out) * p.k;
      double sum = 0.0;
      double size = 0.0;
      for (std::int64_t j = 0; j < p.k; ++j) {
        const double product = double{to_float(x[j])} * double{to_float(w[j])};
        sum += product;
        size += std::abs(product);
      }
      const std::int64_t item = i / p.out;
      const std::int64_t row = p.to.empty() ? item : p.to[static_cast<std::size_t>(item)];
      check(y[static_cast<std::size_t>(row * p.out + i % p.out)], sum, size);
    }
  }
}

class GroupedProduct : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, GroupedProduct, testing::ValuesIn(devices()), name_of_device);

const std::vector<std::int32_t> kCounts = {0, 1, 64, 65, 0, 128, 129, 2, 0};

TEST_P(GroupedProduct, EqualsTheExactSumWhereItFits) {
  for (const auto [k, out] :
       {std::array{16, 8}, std::array{64, 256}, std::array{200, 100}, std::array{512, 300}}) {
    // Scales of one binade: units of 2^-2, products below 2^6.
    const Problem p = problem(k, out, kCounts, 3, 0x38, 0x3F);
    std::int64_t wrong = 0;
    for_outputs(p, run(p, GetParam()), [&](float got, double sum, double size) {
      ASSERT_LT(size, 0x1p24 * 0x1p-8);
      wrong += double{got} != sum;
    });
    EXPECT_EQ(wrong, 0) << k << " " << out;
  }
}

TEST_P(GroupedProduct, StaysWithinItsBound) {
  const bool cpu = GetParam().kind == Device::Kind::kCpu;
  for (const bool positive : {false, true}) {
    for (const auto [wide, out] :
         {std::array{2048, 96}, std::array{768, 264}, std::array{72, 33}}) {
      const std::int64_t k = cpu ? wide / 8 : wide;  // there it takes its time
      const Problem p = problem(k, out, {3, 0, 70, 129}, 5, 0x01, 0x7E, positive);
      // A chain of FP32 additions has another bound than the tensor core's.
      const double steps = static_cast<double>(k);
      const double bound = cpu ? steps * 0x1p-24 : (steps / 8 + 1) * 0x1p-23;
      double worst = 0.0;
      for_outputs(p, run(p, GetParam()), [&](float got, double sum, double size) {
        worst = std::max(
            worst, size == 0.0 ? (got == 0.0f ? 0.0 : 1.0) : std::abs(double{got} - sum) / size);
      });
      EXPECT_LE(worst, bound) << k << " " << out;
      RecordProperty("worst", std::to_string(worst));
    }
  }
}

TEST_P(GroupedProduct, ARowDoesNotDependOnItsCompany) {
  const bool cpu = GetParam().kind == Device::Kind::kCpu;
  const Problem all = problem(cpu ? 96 : 768, cpu ? 40 : 272, {5, 200, 90}, 7, 0x10, 0x7E);
  const std::vector<float> y = run(all, GetParam());
  for (const std::int64_t item : {0, 4, 5, 130, 204, 205, 294}) {
    const std::size_t group = item < 5 ? 0 : item < 205 ? 1 : 2;
    Problem one{all.k, all.out, {0, 1}, {}, {}, {}};
    one.x.assign(all.x.begin() + item * all.k, all.x.begin() + (item + 1) * all.k);
    one.w.assign(all.w.begin() + static_cast<std::int64_t>(group) * all.out * all.k,
                 all.w.begin() + static_cast<std::int64_t>(group + 1) * all.out * all.k);
    const std::vector<float> alone = run(one, GetParam());
    const std::int64_t row = all.to[static_cast<std::size_t>(item)];
    EXPECT_EQ(std::memcmp(alone.data(), y.data() + row * all.out, alone.size() * sizeof(float)), 0)
        << item;
  }
  EXPECT_EQ(std::memcmp(run(all, GetParam()).data(), y.data(), y.size() * sizeof(float)), 0);
}

/// The same sums in the same order, whichever way the weights lie.
TEST_P(GroupedProduct, TurnedWeightsGiveTheSameBits) {
  for (const auto [k, out] : {std::array{16, 8}, std::array{64, 256}, std::array{200, 104},
                              std::array{136, 320}, std::array{512, 264}}) {
    Problem p = problem(k, out, kCounts, 13, 0x10, 0x7E);
    const std::vector<float> y = run(p, GetParam());
    p.turned = true;
    const std::vector<float> turned = run(p, GetParam());
    EXPECT_EQ(std::memcmp(turned.data(), y.data(), y.size() * sizeof(float)), 0) << k << " " << out;
  }
}

std::vector<float> sums(const Problem& p, std::int64_t rows, Device device) {
  const Buffer a = to_device(p.x, device);
  const Buffer b = to_device(p.w, device);
  const Buffer offsets = to_device(p.offsets, device);
  std::vector<float> before(static_cast<std::size_t>(p.groups() * rows * p.out));
  for (std::size_t i = 0; i < before.size(); ++i) before[i] = static_cast<float>(i % 7);
  const Buffer sum = to_device(before, device);
  grouped_sums(
      {.a = {a.as<const Bf16>(), {p.items(), rows}, {rows, 1}, device},
       .b = {b.as<const Bf16>(), {p.items(), p.out}, {p.out, 1}, device},
       .offsets = {offsets.as<const std::int32_t>(), {p.groups() + 1}, {1}, device},
       .sum = {sum.as<float>(), {p.groups(), rows, p.out}, {rows * p.out, p.out, 1}, device}});
  return to_host<float>(sum);
}

/// a is `x` [items, rows] and b is `w` [items, out].
TEST_P(GroupedProduct, SumsOverItemsAreExactWhereTheyFitAndNobodyElses) {
  for (const auto [rows, cols] :
       {std::array{8, 8}, std::array{64, 256}, std::array{200, 104}, std::array{264, 320}}) {
    Problem p{rows, cols, {0}, {}, {}, {}};
    for (const std::int32_t count : {0, 1, 64, 65, 0, 128, 321, 2, 63, 0}) {
      p.offsets.push_back(p.offsets.back() + count);
    }
    p.x = values(static_cast<std::size_t>(p.items() * rows), 21, 0x38, 0x3F);
    p.w = values(static_cast<std::size_t>(p.items() * cols), 22, 0x38, 0x3F);
    const std::vector<float> got = sums(p, rows, GetParam());
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < std::ssize(got); i += 3) {
      const std::int64_t group = i / (rows * cols), row = i / cols % rows, col = i % cols;
      double sum = 0.0;
      for (std::int64_t item = p.offsets[static_cast<std::size_t>(group)];
           item < p.offsets[static_cast<std::size_t>(group) + 1]; ++item) {
        sum += double{to_float(p.x[static_cast<std::size_t>(item * rows + row)])} *
               double{to_float(p.w[static_cast<std::size_t>(item * cols + col)])};
      }
      ASSERT_LT(std::abs(sum), 0x1p16);
      wrong +=
          got[static_cast<std::size_t>(i)] != static_cast<float>(i % 7) + static_cast<float>(sum);
    }
    EXPECT_EQ(wrong, 0) << rows << " " << cols;
    EXPECT_EQ(sums(p, rows, GetParam()), got);
  }
}

/// Many tiles of which half of the threads have no rows, beside whole ones: the kernel's warps must
/// not overtake each other by more than its stages. It hung where they did.
TEST_P(GroupedProduct, ManyShortGroupsBesideLongOnes) {
  const bool cpu = GetParam().kind == Device::Kind::kCpu;
  std::vector<std::int32_t> counts;
  for (int group = 0; group < (cpu ? 12 : 900); ++group) {
    counts.push_back(group % 3 == 0 ? 128 : group % 3 == 1 ? 9 : 1);
  }
  const Problem p = problem(cpu ? 32 : 256, cpu ? 16 : 64, counts, 11, 0x38, 0x3F);
  const std::vector<float> first = run(p, GetParam());
  std::int64_t wrong = 0;
  for_outputs(p, first, [&](float got, double sum, double) { wrong += double{got} != sum; });
  EXPECT_EQ(wrong, 0);
  for (int again = 0; again < (cpu ? 1 : 20); ++again) EXPECT_EQ(run(p, GetParam()), first);
}

/// Groups of all sizes that a tile may have, and of one item more, over outputs of which a tile's
/// last may be in one half of it; rows of y that start at multiples of 16 bytes, and others.
TEST_P(GroupedProduct, DealsItemsToTilesOfEverySize) {
  const bool cpu = GetParam().kind == Device::Kind::kCpu;
  std::vector<std::int32_t> counts;
  for (std::int32_t count = 16; count <= 208; count += 16) {
    counts.insert(counts.end(), {count - 3, count, 0, count + 1});
  }
  counts.insert(counts.end(), {383, 384, 385, 500, 577, 1130});
  for (const std::int64_t out : {40, 384, 584, 601}) {
    const Problem p = problem(cpu ? 16 : 136, cpu ? out / 8 : out, counts, 31, 0x38, 0x3F);
    std::int64_t wrong = 0;
    for_outputs(p, run(p, GetParam()),
                [&](float got, double sum, double) { wrong += double{got} != sum; });
    EXPECT_EQ(wrong, 0) << out;
  }
}

TEST_P(GroupedProduct, NamesWhatDoesNotFit) {
  std::vector<Bf16> x(64);
  try {
    grouped_product({.x = {x.data(), {1, 64}, {64, 1}}, .w = {x.data(), {1, 2, 32}, {64, 32, 1}}});
    FAIL() << "took matrices of two widths";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("as many columns"), std::string::npos);
  }
  try {
    grouped_sums({.a = {x.data(), {1, 64}, {64, 1}}, .b = {x.data(), {2, 32}, {32, 1}}});
    FAIL() << "took operands of two lengths";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("the same items"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::kernels
