#include "kernels/exact/w4a4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/exponent.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

/// Codes and scales with an owner.
struct Packed {
  std::int32_t rows;
  std::int32_t cols;
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;
  std::vector<float> global;

  Packed(std::int32_t r, std::int32_t c)
      : rows(r),
        cols(c),
        codes(static_cast<std::size_t>(r) * c / 2),
        scales(static_cast<std::size_t>(r) * c / 16),
        global(static_cast<std::size_t>(r), 1.0f) {}

  PackedView<const std::uint8_t> view() const {
    return {{codes.data(), {rows, cols / 2}, {cols / 2, 1}},
            {scales.data(), {rows, cols / 16}, {cols / 16, 1}},
            {global.data(), {rows}, {1}}};
  }
  E2m1 code(std::int64_t r, std::int64_t k) const {
    const int pair = codes[static_cast<std::size_t>((r * cols + k) / 2)];
    return static_cast<E2m1>(static_cast<std::uint8_t>(k % 2 == 0 ? pair & 15 : pair >> 4));
  }
  E4m3 scale(std::int64_t r, std::int64_t k) const {
    return static_cast<E4m3>(scales[static_cast<std::size_t>((r * cols + k) / 16)]);
  }
};

std::uint32_t word(std::uint32_t seed, std::uint32_t index) {
  return philox(seed, philox_counter(index / 4, 0, 0))[index % 4];
}

/// Any code, any scale byte up to 0x7E, any exponent in [-limit, limit].
Packed random_packed(std::int32_t rows, std::int32_t cols, std::uint32_t seed, int limit,
                     bool one_global = false) {
  Packed p(rows, cols);
  std::uint32_t i = 0;
  for (auto& c : p.codes) c = static_cast<std::uint8_t>(word(seed, i++));
  for (auto& s : p.scales) s = static_cast<std::uint8_t>(word(seed, i++) % 0x7F);
  for (auto& g : p.global) {
    g = power_of_two(static_cast<int>(word(seed, i) % static_cast<unsigned>(2 * limit + 1)) -
                     limit);
    if (!one_global) ++i;
  }
  return p;
}

/// The product as w4a4.h defines it, in 128 bits: no tile, no packing, ldexp of the C library.
float oracle(const Packed& a, std::int64_t row, const Packed& w, std::int64_t out,
             const Packed* residual = nullptr) {
  const auto dot = [&](const Packed& x) {
    __int128 acc = 0;
    for (std::int64_t k = 0; k < x.cols; ++k) {
      acc += static_cast<__int128>(half_units(x.code(row, k)) * half_units(w.code(out, k))) *
             e4m3_units(x.scale(row, k)) * e4m3_units(w.scale(out, k));
    }
    return acc;
  };
  const int n = exponent_of(a.global[static_cast<std::size_t>(row)]) + exponent_of(w.global[0]);
  if (residual == nullptr) return std::ldexp(static_cast<float>(dot(a)), n - 20);
  return std::ldexp(static_cast<float>(4 * dot(a) - dot(*residual)), n - 22);
}

struct Weights {
  std::shared_ptr<std::vector<std::byte>> bytes;
  W4a4Weights view;

  Weights(std::int32_t experts, std::int32_t out, std::int32_t cols)
      : bytes(std::make_shared<std::vector<std::byte>>(
            static_cast<std::size_t>(experts * W4a4Weights::expert_bytes(out, cols) + 64))) {
    void* data = bytes->data();
    std::size_t space = bytes->size();
    view = {static_cast<std::byte*>(std::align(64, bytes->size() - 64, data, space)), experts, out,
            cols};
  }
  explicit Weights(const Packed& w) : Weights(1, w.rows, w.cols) {
    w4a4_fill(view, 0, 0, w.view());
  }
};

std::vector<float> product(const Packed& a, const W4a4Weights& w, Isa isa,
                           const Packed* residual = nullptr) {
  std::vector<float> out(static_cast<std::size_t>(a.rows) * w.out, -7.0f);
  W4a4Args args;
  args.a = a.view();
  if (residual != nullptr) args.residual = residual->view();
  args.w = w;
  args.out = {out.data(), {a.rows, w.out}, {w.out, 1}};
  w4a4_on(args, isa);
  return out;
}

void expect_bits(float got, float want, const std::string& where) {
  std::uint32_t g;
  std::uint32_t e;
  std::memcpy(&g, &got, 4);
  std::memcpy(&e, &want, 4);
  ASSERT_EQ(g, e) << where << ": " << got << " for " << want;
}

class W4a4Isa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!has_isa(GetParam())) GTEST_SKIP() << "this machine does not have these instructions";
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, W4a4Isa, testing::ValuesIn(kAllIsas));

TEST_P(W4a4Isa, EqualsTheExactSumForAnyShape) {
  std::uint32_t seed = 1;
  for (const auto [rows, cols, out] :
       {std::array{1, 16, 1}, std::array{3, 32, 16}, std::array{8, 48, 17}, std::array{9, 128, 160},
        std::array{37, 160, 5}, std::array{33, 64, 128}, std::array{2, 2048, 33},
        std::array{34, 2048, 100}}) {
    const Packed a = random_packed(rows, cols, ++seed, 40);
    const Packed w = random_packed(out, cols, ++seed, 40, true);
    const std::vector<float> y = product(a, Weights(w).view, GetParam());
    for (int r = 0; r < rows; ++r) {
      for (int j = 0; j < out; ++j) {
        expect_bits(
            y[static_cast<std::size_t>(r * out + j)], oracle(a, r, w, j),
            std::to_string(rows) + "x" + std::to_string(cols) + " row " + std::to_string(r));
      }
    }
  }
}

/// Global scales that are no powers of two: the exact sum rounded once, then twice more.
TEST_P(W4a4Isa, Fp32GlobalScalesAreTwoRoundingsBehindTheExactSum) {
  Packed a = random_packed(9, 128, 70, 0), w = random_packed(33, 128, 71, 0, true);
  for (std::size_t r = 0; r < a.global.size(); ++r) {
    a.global[r] = static_cast<float>(1 + word(72, static_cast<std::uint32_t>(r))) * 1.7e-12f;
  }
  a.global[3] = 0.25f;  // a power of two beside them
  a.global[5] = 0.0f;
  w.global.assign(w.global.size(), 0.0123f);
  const auto y = product(a, Weights(w).view, GetParam());
  int exponents[2];
  const float w_mantissa = 2 * std::frexp(w.global[0], &exponents[1]);
  for (int r = 0; r < 9; ++r) {
    Packed plain_a = a, plain_w = w;
    const auto at = static_cast<std::size_t>(r);
    const float mantissa = 2 * std::frexp(a.global[at], &exponents[0]);
    plain_a.global[at] = r == 5 ? 1.0f : std::ldexp(1.0f, exponents[0] - 1);
    plain_w.global[0] = std::ldexp(1.0f, exponents[1] - 1);
    for (int j = 0; j < 33; ++j) {
      const float got = y[at * 33 + static_cast<std::size_t>(j)];
      const float sum = oracle(plain_a, r, plain_w, j);
      if (r == 5) {
        EXPECT_EQ(got, 0.0f);
        continue;
      }
      expect_bits(got, sum * (mantissa * w_mantissa), "row " + std::to_string(r));
      const double real = static_cast<double>(sum) * static_cast<double>(mantissa) *
                          static_cast<double>(w_mantissa);
      EXPECT_NEAR(static_cast<double>(got), real, std::abs(real) * 0x1p-22);
    }
  }
}

/// What a dialect stores beside its codes is read as it means it.
TEST(W4a4, ReadsTheGlobalScaleThatItsDialectStores) {
  Packed a = random_packed(4, 64, 80, 0), w = random_packed(16, 64, 81, 0, true);
  a.global = {3.0f, 5.5f, 0.1f, 700.0f};
  w.global.assign(16, 11.0f);
  for (const StoredGlobal stored :
       {StoredGlobal::kDecode, StoredGlobal::kEncode, StoredGlobal::kAmax}) {
    const Quantizer rule = {.stored_global = stored};
    Weights weights(1, 16, 64);
    w4a4_fill(weights.view, 0, 0, w.view(), {}, rule);
    std::vector<float> y(4 * 16);
    w4a4({.a = a.view(), .w = weights.view, .out = {y.data(), {4, 16}, {16, 1}}, .rule = rule});
    Packed factors_a = a, factors_w = w;
    for (float& g : factors_a.global) g = global_factor(rule, g);
    for (float& g : factors_w.global) g = global_factor(rule, g);
    EXPECT_EQ(y, product(factors_a, Weights(factors_w).view, best_isa()));
  }
}

TEST_P(W4a4Isa, HoldsTheWorstSums) {
  // 6 * 6 * 448 * 448 over 8192 columns: 2^55.8; with alternating signs 0.
  Packed a(3, 8192);
  Packed w(2, 8192);
  std::fill(a.codes.begin(), a.codes.end(), std::uint8_t{0x77});
  std::fill(a.codes.begin() + 4096, a.codes.begin() + 8192, std::uint8_t{0xF7});
  std::fill(w.codes.begin(), w.codes.end(), std::uint8_t{0x77});
  std::fill(w.codes.begin() + 4096, w.codes.end(), std::uint8_t{0xFF});
  std::fill(a.scales.begin(), a.scales.end(), std::uint8_t{0x7E});
  std::fill(w.scales.begin(), w.scales.end(), std::uint8_t{0x7E});
  const std::vector<float> y = product(a, Weights(w).view, GetParam());
  EXPECT_EQ(y[0], 36.0f * 448 * 448 * 8192);
  EXPECT_EQ(y[1], -36.0f * 448 * 448 * 8192);
  expect_bits(y[2], 0.0f, "cancellation gives +0");
  expect_bits(y[3], 0.0f, "cancellation gives +0");
}

TEST_P(W4a4Isa, RoundsOnceFarBelowAndAboveFloat) {
  Packed a = random_packed(64, 64, 77, 116);
  for (std::size_t r = 0; r < 64; ++r) {
    const int n = r < 32 ? -116 + static_cast<int>(r) / 4 : 116 - static_cast<int>(r) / 16;
    a.global[r] = power_of_two(n);
  }
  int subnormal = 0;
  int infinite = 0;
  for (const int n_w : {-116, -38, -34, -30, 10, 20, 116}) {
    Packed w = random_packed(16, 64, 78, 1, true);
    std::fill(w.global.begin(), w.global.end(), power_of_two(n_w));
    const std::vector<float> y = product(a, Weights(w).view, GetParam());
    for (int r = 0; r < 64; ++r) {
      for (int j = 0; j < 16; ++j) {
        const float want = oracle(a, r, w, j);
        subnormal += want != 0 && std::abs(want) < 0x1p-126f;
        infinite += std::isinf(want);
        expect_bits(y[static_cast<std::size_t>(r * 16 + j)], want, "n_w " + std::to_string(n_w));
      }
    }
  }
  EXPECT_GT(subnormal, 100);
  EXPECT_GT(infinite, 100);
}

TEST_P(W4a4Isa, ResidualIsOneSumOfTwoProducts) {
  const Packed a = random_packed(19, 160, 5, 10);
  Packed residual = random_packed(19, 160, 6, 10);
  for (std::size_t b = 0; b < residual.scales.size(); b += 3) residual.scales[b] = 0;
  const Packed w = random_packed(40, 160, 7, 10, true);
  const std::vector<float> y = product(a, Weights(w).view, GetParam(), &residual);
  for (int r = 0; r < 19; ++r) {
    for (int j = 0; j < 40; ++j) {
      expect_bits(y[static_cast<std::size_t>(r * 40 + j)], oracle(a, r, w, j, &residual),
                  "residual");
    }
  }
}

TEST_P(W4a4Isa, ResidualEqualsTwoProductsWhereTheyAreExact) {
  // Small scales: each product and their difference fit FP32, so that M-stacking must equal them.
  Packed a = random_packed(8, 32, 15, 0);
  Packed residual = random_packed(8, 32, 16, 0);
  Packed w = random_packed(16, 32, 17, 0, true);
  for (auto* p : {&a, &residual, &w}) {
    for (auto& s : p->scales) s = static_cast<std::uint8_t>(0x28 + s % 16);
  }
  const Weights weights(w);
  const std::vector<float> y = product(a, weights.view, GetParam(), &residual);
  const std::vector<float> first = product(a, weights.view, GetParam());
  const std::vector<float> second = product(residual, weights.view, GetParam());
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], first[i] - 0.25f * second[i]);
}

TEST_P(W4a4Isa, HalvedResidualsEqualTwoProductsWhereTheyAreExact) {
  Packed a = random_packed(8, 32, 15, 0);
  Packed residual = random_packed(8, 32, 16, 0);
  Packed w = random_packed(16, 32, 17, 0, true);
  for (auto* p : {&a, &residual, &w}) {
    for (auto& s : p->scales) s = static_cast<std::uint8_t>(0x28 + s % 16);
  }
  const Weights weights(w);
  const std::vector<float> first = product(a, weights.view, GetParam());
  const std::vector<float> second = product(residual, weights.view, GetParam());
  for (const int halvings : {1, 2}) {
    std::vector<float> y(8 * 16);
    w4a4_on({.a = a.view(),
             .residual = residual.view(),
             .w = weights.view,
             .out = {y.data(), {8, 16}, {16, 1}},
             .residual_halvings = halvings},
            GetParam());
    const float share = halvings == 1 ? 0.125f : 0.0625f;
    for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], first[i] - share * second[i]);
  }
}

TEST_P(W4a4Isa, R45_AlternatingBlockScales) {
  Packed a(1, 64);
  Packed w(16, 64);
  std::fill(a.codes.begin(), a.codes.end(), std::uint8_t{0x22});  // ones
  std::fill(w.codes.begin(), w.codes.end(), std::uint8_t{0x22});
  for (std::size_t b = 0; b < a.scales.size(); ++b) {
    a.scales[b] = bits_of(to_e4m3(b % 2 == 0 ? 1.0f : 96.0f));
  }
  for (std::size_t b = 0; b < w.scales.size(); ++b) {
    w.scales[b] = bits_of(to_e4m3(b % 2 == 0 ? 96.0f : 1.0f));
  }
  for (const float y : product(a, Weights(w).view, GetParam())) EXPECT_EQ(y, 64 * 96.0f);
}

TEST_P(W4a4Isa, AnyBatchTilingAndThreadCountGivesTheSameBits) {
  const std::int32_t experts = 5;
  const Packed a = random_packed(70, 128, 21, 8);
  std::vector<Packed> w;
  Weights weights(experts, 72, 128);
  for (std::int32_t e = 0; e < experts; ++e) {
    w.push_back(random_packed(72, 128, 30 + static_cast<std::uint32_t>(e), 8, true));
    w4a4_fill(weights.view, e, 0, w.back().view());
  }
  // Expert 0 has no item, expert 1 all rows, expert 3 one row many times, 2 and 4 some.
  std::vector<std::int32_t> from(70);
  std::iota(from.begin(), from.end(), 0);
  std::vector<std::int32_t> offsets = {0, 0, 70, 81, 100, 107};
  for (int i = 0; i < 11; ++i) from.push_back(i * 6);
  for (int i = 0; i < 19; ++i) from.push_back(33);
  for (int i = 0; i < 7; ++i) from.push_back(69 - i);
  std::vector<std::int32_t> to(from.size());
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = static_cast<std::int32_t>(i * 17 % 107);
  std::vector<float> out(108 * 72, -7.0f);
  W4a4Args args{a.view(),
                {},
                weights.view,
                {offsets.data(), {6}, {1}},
                {from.data(), {107}, {1}},
                {to.data(), {107}, {1}},
                {out.data(), {108, 72}, {72, 1}}};
  set_threads(1);
  w4a4_on(args, GetParam());
  const std::vector<float> alone = out;
  set_threads(3);
  std::fill(out.begin(), out.end(), -7.0f);
  w4a4_on(args, GetParam());
  set_threads(0);
  EXPECT_EQ(std::memcmp(alone.data(), out.data(), out.size() * sizeof(float)), 0);
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto expert = static_cast<std::size_t>(
        std::upper_bound(offsets.begin(), offsets.end(), static_cast<int>(i)) - offsets.begin() -
        1);
    for (int j = 0; j < 72; ++j) {
      expect_bits(out[static_cast<std::size_t>(to[i] * 72 + j)], oracle(a, from[i], w[expert], j),
                  "item " + std::to_string(i));
    }
  }
  for (int j = 0; j < 72; ++j) EXPECT_EQ(out[static_cast<std::size_t>(107 * 72 + j)], -7.0f);
}

TEST_P(W4a4Isa, R44_NoItemsWriteNothing) {
  const Packed a = random_packed(4, 32, 3, 4);
  const Packed w = random_packed(16, 32, 4, 4, true);
  Weights weights(w);
  std::vector<std::int32_t> offsets = {0, 0};
  std::vector<std::int32_t> from(1);
  std::vector<float> out(16, -7.0f);
  W4a4Args args;
  args.a = a.view();
  args.w = weights.view;
  args.offsets = {offsets.data(), {2}, {1}};
  args.from = {from.data(), {0}, {1}};
  args.out = {out.data(), {1, 16}, {16, 1}};
  w4a4_on(args, GetParam());
  for (const float y : out) EXPECT_EQ(y, -7.0f);
}

TEST(W4a4, GateAndUpShareAMatrix_RefillKeepsTheRest) {
  const Packed gate = random_packed(24, 32, 50, 0, true);
  const Packed up = random_packed(24, 32, 51, 0, true);
  const Packed a = random_packed(5, 32, 52, 3);
  Weights weights(2, 48, 32);
  w4a4_fill(weights.view, 1, 24, up.view());
  w4a4_fill(weights.view, 1, 0, gate.view());
  const std::byte* before = weights.view.data;
  w4a4_fill(weights.view, 1, 24, gate.view());
  w4a4_fill(weights.view, 1, 24, up.view());
  EXPECT_EQ(weights.view.data, before);
  W4a4Weights second = {weights.view.expert(1), 1, 48, 32};
  const std::vector<float> y = product(a, second, best_isa());
  for (int r = 0; r < 5; ++r) {
    for (int j = 0; j < 48; ++j) {
      expect_bits(y[static_cast<std::size_t>(r * 48 + j)],
                  j < 24 ? oracle(a, r, gate, j) : oracle(a, r, up, j - 24), "gate and up");
    }
  }
}

/// Rows of experts that nobody filled and no item names are not read, whatever lies there.
TEST(W4a4, R31_ExpertsWithoutItemsAreNotRead) {
  const Packed w = random_packed(32, 64, 90, 3, true), a = random_packed(6, 64, 91, 3);
  const std::vector<std::int32_t> offsets = {0, 0, 0, 4, 6, 6};  // of the first two and the last
  std::vector<float> clean;
  for (const int poison : {0x00, 0xFF, 0x7F}) {
    Weights weights(5, 32, 64);
    std::memset(weights.view.data, poison,
                static_cast<std::size_t>(5 * W4a4Weights::expert_bytes(32, 64)));
    for (const int expert : {2, 3}) {
      std::memset(weights.view.expert(expert), 0,
                  static_cast<std::size_t>(W4a4Weights::expert_bytes(32, 64)));
      w4a4_fill(weights.view, expert, 0, w.view());
    }
    std::vector<float> y(6 * 32);
    w4a4({.a = a.view(),
          .w = weights.view,
          .offsets = {offsets.data(), {6}, {1}},
          .out = {y.data(), {6, 32}, {32, 1}}});
    if (clean.empty()) clean = y;
    EXPECT_EQ(y, clean) << poison;
    for (const float value : y) EXPECT_TRUE(std::isfinite(value));
  }
}

template <typename Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(W4a4, NamesWhatIsWrong) {
  Packed w = random_packed(16, 32, 60, 0, true);
  Weights weights(1, 16, 32);
  w.scales[5] = 0x7F;
  EXPECT_NE(
      message_of([&] { w4a4_fill(weights.view, 0, 0, w.view()); }).find("row 2, block 1 is 127"),
      std::string::npos);
  EXPECT_TRUE(std::all_of(weights.bytes->begin(), weights.bytes->end(),
                          [](std::byte b) { return b == std::byte{0}; }));
  w.scales[5] = 1;
  w.global[3] = 2.0f;
  EXPECT_NE(message_of([&] { w4a4_fill(weights.view, 0, 0, w.view()); }).find("row 3"),
            std::string::npos);
  EXPECT_NE(message_of([&] { w4a4_fill(weights.view, 1, 0, w.view()); }).find("expert 1"),
            std::string::npos);
  Packed a = random_packed(2, 32, 61, 0);
  a.global[1] = 0.3f;
  EXPECT_NE(message_of([&] { product(a, weights.view, Isa::kPortable, &a); }).find("row 1 of a"),
            std::string::npos);
  a.global[1] = std::numeric_limits<float>::infinity();
  EXPECT_NE(message_of([&] { product(a, weights.view, Isa::kPortable); }).find("row 1 of a"),
            std::string::npos);
  const Packed narrow = random_packed(2, 16, 62, 0);
  EXPECT_NE(message_of([&] { product(narrow, weights.view, Isa::kPortable); }).find("16 columns"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep::kernels
