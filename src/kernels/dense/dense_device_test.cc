#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/dense/check.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/rope.h"
#include "kernels/dense/router.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

/// Ops that promise the same bits on every device: each run is held against the CPU's definition.
class DenseOn : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { set_vectors(Vectors::kPortable); }
  void TearDown() override { set_vectors(best_vectors()); }

  /// A matrix on the device under test, or on the CPU.
  template <typename T>
  struct Matrix {
    Buffer buffer;
    std::int64_t rows, cols;
    TensorView<T, 2> view() const { return rows_of(buffer.as<T>(), rows, cols, buffer.device()); }
    std::span<T> span() const { return {buffer.as<T>(), static_cast<std::size_t>(rows * cols)}; }
    std::vector<T> host() const { return to_host<T>(buffer); }
  };

  template <typename T>
  static Matrix<T> matrix(const std::vector<T>& values, std::int64_t rows, Device device) {
    const auto count = static_cast<std::int64_t>(values.size());
    return {to_device(values, device), rows, rows == 0 ? 0 : count / rows};
  }

  /// The bits of what `run` returns for this device and for the CPU.
  template <typename Run>
  static void expect_same(const Run& run) {
    EXPECT_TRUE(run(GetParam()) == run(Device{}));
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, DenseOn, testing::ValuesIn(devices()), name_of_device);

TEST_P(DenseOn, RmsNormGivesTheDefinitionsBits) {
  // 24,576 are 48 KiB of shared memory.
  for (const std::int64_t cols :
       {1, 7, 16, 128, 160, 1000, 2048, 4096, 5120, 24063, 24065, 24576, 30000, 32768}) {
    const std::int64_t rows = 5;
    auto x = random_bf16(rows * cols, 1, 3.0f);
    const auto w = random_bf16(cols, 2);
    for (std::int64_t i = 0; i < cols; ++i) {  // squares that are subnormal, and ties of rounding
      x[static_cast<std::size_t>(i)] = to_bf16(to_float(x[static_cast<std::size_t>(i)]) * 0x1p-66f);
      x[static_cast<std::size_t>(cols + i)] = to_bf16(i % 2 == 0 ? 1.0f : 0x1.02p0f);
    }
    expect_same([&](Device device) {
      const auto from = matrix(x, rows, device), weight = matrix(w, 1, device);
      const auto to = matrix(std::vector<Bf16>(x.size()), rows, device);
      rms_norm({.x = from.view(), .weight = weight.span(), .y = to.view()}, {});
      rms_norm({.x = from.view(), .weight = weight.span(), .y = from.view()}, {});  // in place
      EXPECT_TRUE(from.host() == to.host());
      return to.host();
    });
  }
}

TEST_P(DenseOn, RopeGivesTheDefinitionsBits) {
  for (const std::int32_t dim : {2, 16, 32, 64, 80, 128, 256}) {
    const std::vector<std::int32_t> positions = {0, 1, 77, 1999, 3, 1000};
    const auto rows = static_cast<std::int64_t>(positions.size());
    const auto x = random_bf16(rows * 3 * dim, 3, 2.0f), w = random_bf16(dim, 4);
    for (const bool normalizes : {false, true}) {
      expect_same([&](Device device) {
        RopeTable table(1e6, dim, device);
        table.grow(500);
        table.grow(2000);
        const auto at = matrix(positions, 1, device);
        const auto weight = matrix(w, 1, device);
        const auto in_place = matrix(x, rows, device);
        RopeArgs args{
            .x = in_place.view(), .head_dim = dim, .positions = at.span(), .table = &table};
        if (normalizes) args.norm = weight.span();
        rope(args, {});
        return in_place.host();
      });
    }
  }
}

TEST_P(DenseOn, RouterGivesTheDefinitionsBits) {
  std::mt19937 random(5);
  std::normal_distribution<float> gauss(0.0f, 3.0f);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::int64_t count : {1, 5, 16, 64, 128, 257, 512}) {
    const std::int64_t rows = 37, chosen = std::min<std::int64_t>(count, 8);
    std::vector<float> logits;
    for (std::int64_t i = 0; i < rows * count; ++i) logits.push_back(gauss(random));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto row = [&](std::int64_t r) -> float& {
        return logits[static_cast<std::size_t>(r * count + i)];
      };
      row(0) = 0.25f;                                        // all equal
      row(1) = std::round(row(1));                           // many ties
      row(2) = i % 3 == 0 ? 50.0f : -60.0f;                  // most probabilities are 0
      row(3) = i == count - 1 ? infinity : row(3);           // NaN everywhere
      row(4) = i == count / 2 ? std::nanf("") : row(4);      // and again
      row(5) = i % 2 == 0 ? -infinity : row(5) * 0x1p-130f;  // zeros of both signs among them
    }
    for (const bool normalizes : {false, true}) {
      expect_same([&](Device device) {
        const auto from = matrix(logits, rows, device);
        const auto slots = static_cast<std::size_t>(rows * chosen);
        const auto experts = matrix(std::vector<std::int32_t>(slots, -1), rows, device);
        const auto gates = matrix(std::vector<float>(slots, -1.0f), rows, device);
        router({.logits = from.view(),
                .normalize = normalizes,
                .experts = experts.view(),
                .gates = gates.view()},
               {});
        std::vector<std::uint32_t> bits;
        for (const std::int32_t e : experts.host()) bits.push_back(static_cast<std::uint32_t>(e));
        for (const float g : gates.host()) bits.push_back(g == g ? float_bits(g) : 0x7FC00000u);
        return bits;
      });
    }
  }
}

TEST_P(DenseOn, ResidualAddLowersTheBadRow) {
  for (const std::int64_t cols : {33, 64, 2048}) {
    const std::int64_t rows = 300;
    auto x = random_bf16(rows * cols, 7);
    const auto h = random_bf16(rows * cols, 8);
    for (const bool bad : {false, true}) {
      if (bad) {
        x[static_cast<std::size_t>(290 * cols + 5)] = to_bf16(INFINITY);
        x[static_cast<std::size_t>(41 * cols + 32)] = to_bf16(INFINITY);
      }
      expect_same([&](Device device) {
        const auto from = matrix(x, rows, device), to = matrix(h, rows, device);
        const auto row = matrix(std::vector<std::int32_t>{kNoRow, kNoRow, 7}, 1, device);
        residual_add(from.view(), to.view(), row.buffer.as<std::int32_t>(), {});
        first_nonfinite(from.view(), row.buffer.as<std::int32_t>() + 1, {});
        first_nonfinite(from.view(), row.buffer.as<std::int32_t>() + 2, {});
        const std::int32_t first = bad ? 41 : kNoRow;
        EXPECT_EQ(row.host(), (std::vector<std::int32_t>{first, first, 7}));
        return to.host();
      });
    }
  }
}

TEST_P(DenseOn, CombineAndGatherGiveTheDefinitionsBits) {
  std::mt19937 random(9);
  std::normal_distribution<float> gauss;
  for (const std::int64_t cols : {1, 150, 2048}) {
    const std::int64_t rows = 5, slots = 8;
    std::vector<float> y, gates;
    for (std::int64_t i = 0; i < rows * slots * cols; ++i) y.push_back(gauss(random));
    for (std::int64_t i = 0; i < rows * slots; ++i) gates.push_back(std::abs(gauss(random)));
    expect_same([&](Device device) {
      const auto from = matrix(y, rows * slots, device), by = matrix(gates, rows, device);
      const auto to =
          matrix(std::vector<Bf16>(static_cast<std::size_t>(rows * cols)), rows, device);
      combine({.y = from.view(), .gates = by.view(), .out = to.view()}, {});
      return to.host();
    });
    const auto table = random_bf16(rows * cols, 11);
    const std::vector<std::int32_t> index = {4, 0, 0, 2, 3, 1, 4};
    expect_same([&](Device device) {
      const auto from = matrix(table, rows, device);
      const auto rows_wanted = matrix(index, 1, device);
      const auto to = matrix(std::vector<Bf16>(index.size() * static_cast<std::size_t>(cols)),
                             static_cast<std::int64_t>(index.size()), device);
      gather_rows(from.view(), rows_wanted.span(), to.view());
      return to.host();
    });
  }
}

TEST_P(DenseOn, ManyRowsAreCombinedAndGatheredAlike) {
  const std::int64_t rows = 4400, cols = 1024, slots = 2;
  std::vector<float> y(static_cast<std::size_t>(rows * slots * cols));
  std::uint32_t state = 3;
  for (float& x : y) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
  }
  const std::vector<float> gates(y.begin(), y.begin() + rows * slots);
  expect_same([&](Device device) {
    const auto from = matrix(y, rows * slots, device), by = matrix(gates, rows, device);
    const auto to = matrix(std::vector<Bf16>(static_cast<std::size_t>(rows * cols)), rows, device);
    combine({.y = from.view(), .gates = by.view(), .out = to.view()}, {});
    return to.host();
  });
  std::vector<std::int32_t> index;
  for (std::int32_t i = 0; i < 20'001; ++i) index.push_back(i * 7919 % 300);
  for (const std::int64_t width : {8, 72, 1024}) {
    const auto table = random_bf16(300 * width, 12);
    expect_same([&](Device device) {
      const auto from = matrix(table, 300, device);
      const auto rows_wanted = matrix(index, 1, device);
      const auto to = matrix(std::vector<Bf16>(index.size() * static_cast<std::size_t>(width)),
                             std::ssize(index), device);
      gather_rows(from.view(), rows_wanted.span(), to.view());
      return to.host();
    });
  }
}

// Widths whose common words are of 16, 4, 2 bytes and one.
TEST_P(DenseOn, RowsOfSeveralWidthsAreGatheredAtOnce) {
  for (const std::vector<std::int64_t>& widths :
       {std::vector<std::int64_t>{512, 64, 16}, {512, 64, 4}, {30, 2}, {7, 64, 1, 5000}}) {
    const std::vector<std::int32_t> index = {2, 0, 2, 1, 1};
    expect_same([&](Device device) {
      std::vector<GatherArgs> all;
      std::vector<decltype(matrix(std::vector<std::uint8_t>(), 1, device))> kept;
      for (const std::int64_t cols : widths) {
        std::vector<std::uint8_t> table;
        for (std::int64_t i = 0; i < 3 * cols; ++i) {
          table.push_back(static_cast<std::uint8_t>(i * 7 + cols));
        }
        kept.push_back(matrix(table, 3, device));
        kept.push_back(
            matrix(std::vector<std::uint8_t>(static_cast<std::size_t>(5 * cols)), 5, device));
        all.push_back({kept[kept.size() - 2].view(), kept.back().view()});
      }
      const auto rows_wanted = matrix(index, 1, device);
      gather_rows(all, rows_wanted.span(), {});
      std::vector<std::uint8_t> got;
      for (std::size_t i = 1; i < kept.size(); i += 2) {
        const auto rows = kept[i].host();
        got.insert(got.end(), rows.begin(), rows.end());
      }
      return got;
    });
  }
}

TEST_P(DenseOn, BytesAreGatheredAndFloatsLookedAt) {
  for (const std::int64_t cols : {1, 6, 64, 70000}) {
    std::vector<std::uint8_t> table;
    for (std::int64_t i = 0; i < 3 * cols; ++i) table.push_back(static_cast<std::uint8_t>(i * 7));
    const std::vector<std::int32_t> index = {2, 0, 2, 1};
    std::vector<float> x(static_cast<std::size_t>(4 * cols), 3e38f);
    x[static_cast<std::size_t>(3 * cols)] = NAN;
    x[static_cast<std::size_t>(3 * cols - 1)] = -INFINITY;
    expect_same([&](Device device) {
      const auto from = matrix(table, 3, device);
      const auto rows_wanted = matrix(index, 1, device);
      const auto to =
          matrix(std::vector<std::uint8_t>(static_cast<std::size_t>(4 * cols)), 4, device);
      gather_rows(from.view(), rows_wanted.span(), to.view());
      const auto values = matrix(x, 4, device);
      const auto row = matrix(std::vector<std::int32_t>{kNoRow, kNoRow}, 1, device);
      first_nonfinite(values.view(), row.buffer.as<std::int32_t>(), {});
      auto first_two = values.view();
      first_two.shape[0] = 2;
      first_nonfinite(first_two, row.buffer.as<std::int32_t>() + 1, {});
      EXPECT_EQ(row.host(), (std::vector<std::int32_t>{2, kNoRow}));
      return to.host();
    });
  }
}

TEST_P(DenseOn, DriftNoiseGivesTheDefinitionsBits) {
  for (const std::int64_t cols : {1, 97, 2048, 24064, 24576, 32768}) {
    const std::vector<std::uint64_t> streams = {1, 1, 7, 1ull << 40, 7};
    const std::vector<std::int32_t> positions = {0, 1, 0, 9, 1 << 20};
    const auto x = random_bf16(5 * cols, 12);
    expect_same([&](Device device) {
      const auto in_place = matrix(x, 5, device);
      const auto names = matrix(streams, 1, device);
      const auto at = matrix(positions, 1, device);
      drift_noise({.x = in_place.view(),
                   .sigma = 0.1f,
                   .seed = 99,
                   .streams = names.span(),
                   .positions = at.span(),
                   .site = 3},
                  {});
      return in_place.host();
    });
  }
}

TEST(Dense, OperandsLieOnOneDevice) {
  const std::vector<Bf16> x(16), w(16);
  std::vector<Bf16> y(16);
  auto there = rows_of(x.data(), 1, 16, kFirstCuda);
  EXPECT_THROW(rms_norm({.x = there, .weight = w, .y = rows_of(y.data(), 1, 16)}, {}), Error);
}

}  // namespace
}  // namespace lockstep::kernels
