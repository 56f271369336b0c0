#include "kernels/dense/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "kernels/dense/check.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

constexpr double kUlp = 0x1p-24;  // half a unit in the last place of FP32, relative

struct Packed {
  std::vector<Bf16> memory;
  PackedMatrix matrix;
};

Packed pack(const std::vector<Bf16>& w, std::int64_t out, std::int64_t in) {
  // Poisoned: what packing leaves unwritten shows as NaN.
  Packed packed{std::vector<Bf16>(static_cast<std::size_t>(packed_elements(out, in)),
                                  static_cast<Bf16>(std::uint16_t{0x7FFF})),
                {}};
  packed.matrix = {packed.memory.data(), out, in};
  pack_rows({w.data(), {out, in}, {in, 1}}, 0, packed.matrix);
  return packed;
}

using LinearOn = OnVectors;

INSTANTIATE_TEST_SUITE_P(Vectors, LinearOn,
                         testing::Values(Vectors::kPortable, Vectors::kAvx2, Vectors::kAvx512,
                                         Vectors::kAvx512Bf16));

/// Every output within the bound of its own operands: K rounded steps of a chain.
TEST_P(LinearOn, IsWithinTheBoundOfTheExactSum) {
  for (const auto [rows, in, out] : {std::array<std::int64_t, 3>{1, 2, 1},
                                     {7, 64, 33},
                                     {13, 160, 300},
                                     {29, 128, 64},
                                     {3, 1026, 17}}) {
    const auto x = random_bf16(rows * in, 1);
    const auto w = random_bf16(out * in, 2);
    const Packed packed = pack(w, out, in);
    std::vector<float> y(static_cast<std::size_t>(rows * out), -1.0f);
    std::vector<Bf16> rounded(y.size());
    linear_bf16({.x = rows_of(x.data(), rows, in),
                 .weight = packed.matrix,
                 .y = rows_of(y.data(), rows, out)},
                {});
    linear_bf16({.x = rows_of(x.data(), rows, in),
                 .weight = packed.matrix,
                 .y_bf16 = rows_of(rounded.data(), rows, out)},
                {});
    for (std::int64_t row = 0; row < rows; ++row) {
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
        ASSERT_LE(std::abs(y[at] - exact), static_cast<double>(in) * kUlp * size)
            << row << " " << o;
        ASSERT_EQ(bits_of(rounded[at]), bits_of(to_bf16(y[at])));
      }
    }
  }
}

TEST_P(LinearOn, GivesTheDefinitionsBits) {
  const std::int64_t rows = 31, in = 144, out = 100;
  const auto x = random_bf16(rows * in, 3);
  const Packed w = pack(random_bf16(out * in, 4), out, in);
  for (const bool split : {false, true}) {
    std::vector<float> y(static_cast<std::size_t>(rows * out)), defined(y.size());
    const auto run = [&](std::vector<float>& to) {
      linear_bf16({.x = rows_of(x.data(), rows, in),
                   .weight = w.matrix,
                   .y = rows_of(to.data(), rows, out),
                   .split_k = split},
                  {});
    };
    run(y);
    set_vectors(Vectors::kPortable);
    run(defined);
    set_vectors(GetParam());
    EXPECT_EQ(y, defined) << "split " << split;
  }
}

TEST_P(LinearOn, RowsDoNotDependOnEachOther) {
  const std::int64_t rows = 211, in = 96, out = 70;
  const auto x = random_bf16(rows * in, 5);
  const Packed w = pack(random_bf16(out * in, 6), out, in);
  std::vector<float> all(static_cast<std::size_t>(rows * out));
  linear_bf16(
      {.x = rows_of(x.data(), rows, in), .weight = w.matrix, .y = rows_of(all.data(), rows, out)},
      {});
  for (const std::int64_t first : {0, 1, 95, 97, 210}) {
    for (const std::int64_t count : {1, 2, 5}) {
      if (first + count > rows) continue;
      std::vector<float> some(static_cast<std::size_t>(count * out));
      linear_bf16({.x = rows_of(x.data() + first * in, count, in),
                   .weight = w.matrix,
                   .y = rows_of(some.data(), count, out)},
                  {});
      const auto from = all.begin() + first * out;
      EXPECT_EQ(some, std::vector<float>(from, from + count * out)) << first << " " << count;
    }
  }
}

TEST_P(LinearOn, SplitHalvesAreRoundedToBf16) {
  const std::int64_t rows = 9, in = 64, out = 40;
  const auto x = random_bf16(rows * in, 7);
  const Packed w = pack(random_bf16(out * in, 8), out, in);
  const auto run = [&](const std::vector<Bf16>& values, bool split) {
    std::vector<float> y(static_cast<std::size_t>(rows * out));
    linear_bf16({.x = rows_of(values.data(), rows, in),
                 .weight = w.matrix,
                 .y = rows_of(y.data(), rows, out),
                 .split_k = split},
                {});
    return y;
  };
  std::vector<Bf16> first = x, second = x;
  for (std::int64_t i = 0; i < rows * in; ++i) {
    (i % in < in / 2 ? second : first)[static_cast<std::size_t>(i)] = Bf16{};
  }
  const auto a = run(first, false), b = run(second, false), y = run(x, true);
  for (std::size_t i = 0; i < y.size(); ++i) {
    ASSERT_EQ(y[i], to_float(to_bf16(a[i])) + to_float(to_bf16(b[i])));
  }
}

/// R44: an expert without tokens writes nothing, and the others are as if it were not there.
TEST_P(LinearOn, R44_GroupsMayBeEmpty) {
  const std::int64_t rows = 40, in = 32, out = 48, groups = 5;
  const std::vector<std::int32_t> offsets = {0, 0, 17, 17, 39, 40};
  const auto x = random_bf16(rows * in, 9);
  const auto w = random_bf16(groups * out * in, 10);
  std::vector<Bf16> memory(static_cast<std::size_t>(groups * packed_elements(out, in)));
  for (std::int64_t g = 0; g < groups; ++g) {
    pack_rows(rows_of(w.data() + g * out * in, out, in), 0,
              {memory.data() + g * packed_elements(out, in), out, in});
  }
  const PackedMatrix weights = {memory.data(), out, in};
  std::vector<std::int32_t> to;
  for (std::int32_t i = 0; i < rows; ++i) to.push_back(static_cast<std::int32_t>(rows) - 1 - i);
  std::vector<float> y(static_cast<std::size_t>(rows * out), NAN), scattered = y;
  grouped_linear_bf16({.x = rows_of(x.data(), rows, in),
                       .offsets = offsets,
                       .weights = weights,
                       .y = rows_of(y.data(), rows, out)},
                      {});
  grouped_linear_bf16({.x = rows_of(x.data(), rows, in),
                       .offsets = offsets,
                       .weights = weights,
                       .to = to,
                       .y = rows_of(scattered.data(), rows, out)},
                      {});
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t group = row < 17 ? 1 : row < 39 ? 3 : 4;
    std::vector<float> one(static_cast<std::size_t>(out));
    linear_bf16({.x = rows_of(x.data() + row * in, 1, in),
                 .weight = {memory.data() + group * packed_elements(out, in), out, in},
                 .y = rows_of(one.data(), 1, out)},
                {});
    for (std::int64_t o = 0; o < out; ++o) {
      const float expected = one[static_cast<std::size_t>(o)];
      ASSERT_EQ(y[static_cast<std::size_t>(row * out + o)], expected);
      ASSERT_EQ(scattered[static_cast<std::size_t>((rows - 1 - row) * out + o)], expected);
    }
  }
  const std::vector<std::int32_t> none(6, 0);
  std::vector<float> untouched(1, 7.0f);
  grouped_linear_bf16({.x = rows_of(x.data(), 0, in),
                       .offsets = none,
                       .weights = weights,
                       .y = rows_of(untouched.data(), 0, out)},
                      {});
  EXPECT_EQ(untouched[0], 7.0f) << "a batch of 0 tokens writes nothing";
}

TEST(Linear, PacksPartByPartAndBack) {
  const std::int64_t out = 45, in = 6;
  const auto w = random_bf16(out * in, 11);
  std::vector<Bf16> memory(static_cast<std::size_t>(packed_elements(out, in)),
                           static_cast<Bf16>(std::uint16_t{0x7FFF}));
  const PackedMatrix matrix = {memory.data(), out, in};
  pack_rows(rows_of(w.data(), 40, in), 0, matrix);
  pack_rows(rows_of(w.data() + 40 * in, 5, in), 40, matrix);
  std::vector<Bf16> row(static_cast<std::size_t>(in));
  for (std::int64_t o = 0; o < out; ++o) {
    unpack_row(matrix, o, row);
    for (std::int64_t i = 0; i < in; ++i) {
      EXPECT_EQ(row[static_cast<std::size_t>(i)], w[static_cast<std::size_t>(o * in + i)]);
    }
  }
  for (const Bf16 x : memory) EXPECT_NE(bits_of(x), 0x7FFF) << "padding is written";
}

TEST(Linear, SaysWhatIsWrong) {
  std::vector<Bf16> memory(static_cast<std::size_t>(packed_elements(8, 4)));
  std::vector<Bf16> x(12);
  std::vector<float> y(16);
  const PackedMatrix w = {memory.data(), 8, 4};
  EXPECT_THROW(
      linear_bf16({.x = rows_of(x.data(), 2, 6), .weight = w, .y = rows_of(y.data(), 2, 8)}, {}),
      Error);
  EXPECT_THROW(linear_bf16({.x = rows_of(x.data(), 2, 4), .weight = w}, {}), Error);
  EXPECT_THROW(pack_rows(rows_of(x.data(), 3, 4), 6, w), Error);
  const std::vector<std::int32_t> falling = {0, 2, 1, 2};
  EXPECT_THROW(grouped_linear_bf16({.x = rows_of(x.data(), 2, 4),
                                    .offsets = falling,
                                    .weights = w,
                                    .y = rows_of(y.data(), 2, 8)},
                                   {}),
               Error);
}

}  // namespace
}  // namespace lockstep::kernels
