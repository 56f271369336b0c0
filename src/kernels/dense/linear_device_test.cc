#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "device/testing.h"
#include "kernels/dense/check.h"
#include "kernels/dense/linear.h"
#include "kernels/dense/linear_rows.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

class LinearOnDevice : public testing::TestWithParam<Device> {
 protected:
  static bool on_cuda() { return GetParam().kind == Device::Kind::kCuda; }

  struct Weight {
    Buffer memory;
    PackedMatrix matrix;
  };

  static Weight pack(const std::vector<Bf16>& w, std::int64_t out, std::int64_t in,
                     std::int64_t groups = 1) {
    const std::int64_t each = packed_elements(out, in);
    Weight weight{Buffer(GetParam(), groups * each * 2), {}};
    fill_bytes(weight.memory.as<void>(), GetParam(), 0xFF, weight.memory.bytes());
    weight.matrix = {weight.memory.as<Bf16>(), out, in, GetParam()};
    for (std::int64_t g = 0; g < groups; ++g) {
      PackedMatrix one = weight.matrix;
      one.data += g * each;
      pack_rows(rows_of(w.data() + g * out * in, out, in), 0, one);
    }
    synchronize(GetParam());
    return weight;
  }

  static std::vector<float> multiply(const std::vector<Bf16>& x, std::int64_t first,
                                     std::int64_t rows, const Weight& w, bool split = false,
                                     bool of_warps = false) {
    const std::int64_t in = w.matrix.in, out = w.matrix.out;
    const Buffer from =
        to_device(std::vector(x.begin() + first * in, x.begin() + (first + rows) * in), GetParam());
    const Buffer to =
        to_device(std::vector<float>(static_cast<std::size_t>(rows * out), NAN), GetParam());
    const auto x_there = rows_of(from.as<const Bf16>(), rows, in, GetParam());
    const auto y_there = rows_of(to.as<float>(), rows, out, GetParam());
    if constexpr (build::has_cuda) {
      if (of_warps) {
        linear_of_warps_cuda(
            {.x = x_there, .offsets = {}, .weights = w.matrix, .y = y_there, .split_k = split},
            false, {}, {});
        return to_host<float>(to);
      }
    }
    linear_bf16({.x = x_there, .weight = w.matrix, .y = y_there, .split_k = split}, {});
    return to_host<float>(to);
  }
};

/// Numbers of 40 binades, so that what a product of tensor cores cuts off shows.
std::vector<Bf16> uneven_bf16(std::int64_t count, std::uint32_t seed) {
  std::vector<Bf16> values = random_bf16(count, seed);
  std::uint32_t state = seed;
  for (Bf16& value : values) {
    state = state * 1664525 + 1013904223;
    value = to_bf16(std::ldexp(to_float(value), static_cast<int>(state >> 16) % 40 - 20));
  }
  return values;
}

INSTANTIATE_TEST_SUITE_P(Devices, LinearOnDevice, testing::ValuesIn(devices()), name_of_device);

/// A chain of tensor core products loses at most an ulp of the sum of magnitudes for every 8 terms,
/// and each of the 8 parts is added once; the CPU's is one chain of K.
TEST_P(LinearOnDevice, IsWithinTheBoundOfTheExactSum) {
  for (const auto [rows, in, out] : {std::array<std::int64_t, 3>{1, 32, 1},
                                     {7, 64, 33},
                                     {13, 160, 300},
                                     {29, 2048, 64},
                                     {64, 96, 130},
                                     {65, 288, 40},
                                     {300, 512, 200}}) {
    const auto x = random_bf16(rows * in, 1), w = random_bf16(out * in, 2);
    const Weight packed = pack(w, out, in);
    const auto y = multiply(x, 0, rows, packed);
    const Buffer from = to_device(x, GetParam());
    const Buffer rounded(GetParam(), rows * out * 2);
    linear_bf16({.x = rows_of(from.as<const Bf16>(), rows, in, GetParam()),
                 .weight = packed.matrix,
                 .y_bf16 = rows_of(rounded.as<Bf16>(), rows, out, GetParam())},
                {});
    const auto y_bf16 = to_host<Bf16>(rounded);
    const auto k = static_cast<double>(in);
    const double error = on_cuda() ? (k / 8 + 10) * 0x1p-23 : k * 0x1p-24;
    for (std::int64_t row = 0; row<rows; row += rows> 100 ? 13 : 1) {
      for (std::int64_t o = 0; o < out; ++o) {
        double exact = 0, size = 0;
        for (std::int64_t i = 0; i < in; ++i) {
          const double term =
              static_cast<double>(to_float(x[static_cast<std::size_t>(row * in + i)])) *
              to_float(w[static_cast<std::size_t>(o * in + i)]);
          exact += term;
          size += std::abs(term);
        }
        const auto at = static_cast<std::size_t>(row * out + o);
        ASSERT_LE(std::abs(y[at] - exact), error * size) << row << " " << o << " of " << rows;
        ASSERT_EQ(bits_of(y_bf16[at]), bits_of(to_bf16(y[at])));
      }
    }
  }
}

/// BF16 outputs are those in FP32, rounded, in whatever shapes a product is cut.
TEST_P(LinearOnDevice, RoundsToBf16WhatItHas) {
  const bool cpu = !on_cuda();
  const std::int64_t in = cpu ? 64 : 1024;
  for (const std::int64_t out : {500, 900, 2048, 5120, 8000}) {
    const Weight w = pack(uneven_bf16(out * in, 3), out, in);
    for (const std::int64_t rows : {1, 9, 64, 65, 129}) {
      const auto x = uneven_bf16(rows * in, 4);
      const auto y = multiply(x, 0, rows, w);
      const Buffer from = to_device(x, GetParam());
      const Buffer rounded(GetParam(), rows * out * 2);
      linear_bf16({.x = rows_of(from.as<const Bf16>(), rows, in, GetParam()),
                   .weight = w.matrix,
                   .y_bf16 = rows_of(rounded.as<Bf16>(), rows, out, GetParam())},
                  {});
      const auto got = to_host<Bf16>(rounded);
      std::int64_t wrong = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        wrong += bits_of(got[i]) != bits_of(to_bf16(y[i]));
      }
      EXPECT_EQ(wrong, 0) << rows << " rows, " << out << " outputs";
    }
  }
}

/// A row alone and among any others gives the same bits, whichever kernel runs.
TEST_P(LinearOnDevice, RowsDoNotDependOnEachOther) {
  for (const bool split : {false, true}) {
    const std::int64_t rows = 300, in = split ? 448 : 480, out = 150;
    const auto x = uneven_bf16(rows * in, 5);
    const Weight w = pack(uneven_bf16(out * in, 6), out, in);
    const auto all = multiply(x, 0, rows, w, split);
    for (const std::int64_t first : {0, 1, 127, 129, 200}) {
      for (const std::int64_t count : {1, 3, 8, 9, 17, 33, 64, 65, 100}) {
        const auto some = multiply(x, first, count, w, split);
        const auto from = all.begin() + first * out;
        ASSERT_TRUE(some == std::vector<float>(from, from + count * out)) << first << " " << count;
      }
    }
  }
}

/// From one tile to many, in each of the shapes that a tile may have.
TEST_P(LinearOnDevice, RowsOfManyTilesDoNotDependOnEachOther) {
  const std::int64_t rows = on_cuda() ? 1100 : 110, in = 288;
  for (const std::int64_t out : {40, 500, 1030, 2050, 3500, 5000, 6000, 8000}) {
    if (!on_cuda() && out > 500) continue;
    const auto x = uneven_bf16(rows * in, 25);
    const Weight w = pack(uneven_bf16(out * in, 26), out, in);
    const auto all = multiply(x, 0, rows, w);
    for (const std::int64_t count : {1, 9, 16, 20, 64, 65, 129, 300}) {
      if (count > rows) continue;
      const auto some = multiply(x, 7, count, w);
      const auto from = all.begin() + 7 * out;
      ASSERT_TRUE(some == std::vector<float>(from, from + count * out)) << out << " " << count;
    }
  }
}

/// What devices other than Hopper's run is within the same bound, and rows do not depend there
/// either.
TEST_P(LinearOnDevice, WarpsGiveTheSameWithinTheirBounds) {
  if (!on_cuda()) GTEST_SKIP() << "of CUDA devices";
  const std::int64_t rows = 150, in = 512, out = 200;
  const auto x = random_bf16(rows * in, 35), w = random_bf16(out * in, 36);
  const Weight packed = pack(w, out, in);
  const auto mine = multiply(x, 0, rows, packed),
             theirs = multiply(x, 0, rows, packed, false, true);
  for (std::size_t i = 0; i < mine.size(); ++i) ASSERT_NEAR(mine[i], theirs[i], 1e-3) << i;
  const auto first = multiply(x, 0, 5, packed, false, true);
  ASSERT_TRUE(first == std::vector<float>(theirs.begin(), theirs.begin() + 5 * out));
}

/// So many outputs, as a vocabulary has, take another kernel.
TEST_P(LinearOnDevice, RowsOfAVocabularyDoNotDependOnEachOther) {
  const std::int64_t rows = 66, in = 544;
  const std::int64_t out = GetParam().kind == Device::Kind::kCuda ? 51'345 : 345;
  const auto x = random_bf16(rows * in, 15);
  auto some = random_bf16(345 * in, 16);
  const auto first_rows = some;
  while (std::ssize(some) < out * in) {
    some.insert(some.end(), first_rows.begin(),
                first_rows.begin() + std::min(std::ssize(first_rows), out * in - std::ssize(some)));
  }
  const Weight w = pack(some, out, in);
  const auto all = multiply(x, 0, rows, w);
  for (const std::int64_t count : {1, 9, 17, 64}) {
    const auto part = multiply(x, 2, count, w);
    const auto from = all.begin() + 2 * out;
    ASSERT_TRUE(part == std::vector<float>(from, from + count * out)) << count;
  }
}

/// A chain in which each launch writes what the next one reads, and only the weight is older: x of
/// the product before is overwritten, and y of it read, by launches that start beside each other.
TEST_P(LinearOnDevice, ASettledWeightChangesNothing) {
  if (!on_cuda()) GTEST_SKIP() << "there one op ends before the next";
  for (const auto [rows, size] :
       {std::array<std::int64_t, 2>{1, 256}, {8, 2048}, {64, 512}, {64, 2048}, {130, 512}}) {
    const auto x = random_bf16(rows * size, 41), w = random_bf16(size * size, 42);
    const auto norm = random_bf16(size, 43);
    const Weight packed = pack(w, size, size);
    const auto chain = [&, rows = rows, size = size](bool settled) {
      const Buffer from = to_device(x, GetParam()), weight = to_device(norm, GetParam());
      const Buffer normal(GetParam(), from.bytes()), to(GetParam(), from.bytes());
      const auto matrix = [&](const Buffer& buffer) {
        return rows_of(buffer.as<Bf16>(), rows, size, GetParam());
      };
      for (int i = 0; i < 12; ++i) {
        rms_norm({.x = matrix(i == 0 ? from : to),
                  .weight = {weight.as<Bf16>(), static_cast<std::size_t>(size)},
                  .y = matrix(normal)},
                 {});
        if (!settled) synchronize(GetParam());
        linear_bf16({.x = matrix(normal),
                     .weight = packed.matrix,
                     .y_bf16 = matrix(to),
                     .settled = settled},
                    {});
        if (!settled) synchronize(GetParam());
      }
      return to_host<Bf16>(to);
    };
    const std::vector<Bf16> want = chain(false);
    EXPECT_TRUE(std::any_of(want.begin(), want.end(), [](Bf16 v) { return to_float(v) > 0; }));
    for (int time = 0; time < 3; ++time) {
      EXPECT_TRUE(chain(true) == want) << rows << " rows of " << size;
    }
  }
}

TEST_P(LinearOnDevice, SplitHalvesAreRoundedToBf16) {
  for (const std::int64_t rows : {9, 90}) {
    const std::int64_t in = 128, out = 40;
    const auto x = random_bf16(rows * in, 7);
    const Weight w = pack(random_bf16(out * in, 8), out, in);
    std::vector<Bf16> first = x, second = x;
    for (std::int64_t i = 0; i < rows * in; ++i) {
      (i % in < in / 2 ? second : first)[static_cast<std::size_t>(i)] = Bf16{};
    }
    const auto a = multiply(first, 0, rows, w), b = multiply(second, 0, rows, w);
    const auto y = multiply(x, 0, rows, w, true);
    for (std::size_t i = 0; i < y.size(); ++i) {
      ASSERT_EQ(y[i], to_float(to_bf16(a[i])) + to_float(to_bf16(b[i])));
    }
  }
}

/// R44: groups may be empty, and a group's rows are what they are alone.
TEST_P(LinearOnDevice, R44_GroupsMayBeEmpty) {
  const std::int64_t in = 64, out = 48, groups = 40;
  for (const std::int64_t most : {5, 40, 400}) {
    std::vector<std::int32_t> offsets = {0};
    for (std::int32_t g = 0; g < groups; ++g) {
      const auto size = static_cast<std::int32_t>(g % 3 == 0 ? 0 : (g * 7919) % most);
      offsets.push_back(offsets.back() + size);
    }
    const std::int64_t rows = offsets.back();
    const auto x = random_bf16(rows * in, 9);
    const Weight weights = pack(random_bf16(groups * out * in, 10), out, in, groups);
    std::vector<std::int32_t> to(static_cast<std::size_t>(rows));
    std::iota(to.rbegin(), to.rend(), 0);
    const Buffer from = to_device(x, GetParam()), bounds = to_device(offsets, GetParam());
    const Buffer targets = to_device(to, GetParam());
    const Buffer y =
        to_device(std::vector<float>(static_cast<std::size_t>(rows * out), NAN), GetParam());
    grouped_linear_bf16({.x = rows_of(from.as<const Bf16>(), rows, in, GetParam()),
                         .offsets = {bounds.as<std::int32_t>(), offsets.size()},
                         .weights = weights.matrix,
                         .to = {targets.as<std::int32_t>(), to.size()},
                         .y = rows_of(y.as<float>(), rows, out, GetParam())},
                        {});
    const auto got = to_host<float>(y);
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t first = offsets[static_cast<std::size_t>(g)];
      const std::int64_t count = offsets[static_cast<std::size_t>(g) + 1] - first;
      if (count == 0) continue;
      Weight one{Buffer(), weights.matrix};
      one.matrix.data += g * packed_elements(out, in);
      const auto alone = multiply(x, first, count, one);
      for (std::int64_t i = 0; i < count; ++i) {
        for (std::int64_t o = 0; o < out; ++o) {
          ASSERT_EQ(got[static_cast<std::size_t>((rows - 1 - first - i) * out + o)],
                    alone[static_cast<std::size_t>(i * out + o)]);
        }
      }
    }
  }
}

TEST_P(LinearOnDevice, PacksAndGivesBack) {
  const std::int64_t in = 32, out = 45;
  const auto w = random_bf16(out * in, 11);
  const Weight packed = pack(w, out, in);
  std::vector<Bf16> row(static_cast<std::size_t>(in));
  for (std::int64_t o = 0; o < out; ++o) {
    unpack_row(packed.matrix, o, row);
    EXPECT_TRUE(row == std::vector<Bf16>(w.begin() + o * in, w.begin() + (o + 1) * in));
  }
  for (const Bf16 x : to_host<Bf16>(packed.memory)) ASSERT_NE(bits_of(x), 0xFFFF) << "padding";
}

}  // namespace
}  // namespace lockstep::kernels
