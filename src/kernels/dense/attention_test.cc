#include "kernels/dense/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "kernels/dense/attention_testing.h"
#include "kernels/dense/check.h"
#include "kernels/dense/testing.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

using AttentionOn = OnVectors;

INSTANTIATE_TEST_SUITE_P(Vectors, AttentionOn,
                         testing::Values(Vectors::kPortable, Vectors::kAvx2, Vectors::kAvx512));

TEST_P(AttentionOn, IsWithinTheBoundOfTheExactValue) {
  for (const Shape shape : {Shape{4, 2, 32}, {3, 3, 16}, {8, 1, 64}, {2, 2, 80}}) {
    const Problem p(shape, {130, 1, 65, 64});
    Cache k({}, p.kv_width(), 16, p.lengths), v({}, p.kv_width(), 16, p.lengths);
    p.write(k, v);
    const auto out = p.attend(k, v, 0, p.rows.count());
    for (std::int64_t row = 0; row < p.rows.count(); row += row % 64 < 62 ? 7 : 1) {
      for (std::int32_t head = 0; head < shape.heads; ++head)
        check_head(p, row, head, out, cpu_errors(shape.dim));
    }
  }
}

TEST_P(AttentionOn, ReadsCodesAsTheValuesTheyAreWorth) {
  for (const Shape shape : {Shape{4, 2, 32}, {3, 3, 16}, {2, 1, 128}}) {
    const Problem p(shape, {100, 31});
    const std::int64_t rows = p.rows.count();
    Cache k4(kNvfp4, p.kv_width(), 16, p.lengths), v4(kNvfp4, p.kv_width(), 16, p.lengths);
    p.write(k4, v4);
    Problem worth = p;
    for (std::vector<Bf16>* x : {&worth.k, &worth.v}) {
      const std::int64_t width = p.kv_width();
      std::vector<std::uint8_t> codes(x->size() / 2), scales(x->size() / 16);
      const PackedView<std::uint8_t> packed = {
          rows_of(codes.data(), rows, width / 2), rows_of(scales.data(), rows, width / 16), {}};
      quantize(
          {.x = rows_of(x->data(), rows, width), .rule = kNvfp4, .exponent = -7, .out = packed});
      dequantize({.codes = packed,
                  .rule = kNvfp4,
                  .exponent = -7,
                  .bf16 = rows_of(x->data(), rows, width)});
    }
    Cache k({}, p.kv_width(), 16, p.lengths), v({}, p.kv_width(), 16, p.lengths);
    worth.write(k, v);
    EXPECT_EQ(p.attend(k4, v4, 0, rows), worth.attend(k, v, 0, rows));
  }
}

TEST_P(AttentionOn, RowsDoNotDependOnTilesPagesOrInstructions) {
  const Problem p({4, 2, 32}, {200, 77});
  Cache k(kNvfp4, p.kv_width(), 16, p.lengths), v(kNvfp4, p.kv_width(), 16, p.lengths);
  p.write(k, v);
  const auto all = p.attend(k, v, 0, p.rows.count());
  const auto same = [&](const std::vector<Bf16>& part, std::int64_t first, std::int64_t count) {
    const auto from = all.begin() + first * 128;
    return part == std::vector<Bf16>(from, from + count * 128);
  };
  for (const std::int64_t first : {0, 1, 63, 64, 130, 199, 200, 276}) {
    EXPECT_TRUE(same(p.attend(k, v, first, 1), first, 1)) << "alone, row " << first;
  }
  EXPECT_TRUE(same(p.attend(k, v, 5, 40), 5, 40)) << "another chunk";
  EXPECT_TRUE(same(p.attend(k, v, 180, 90), 180, 90)) << "across sequences";
  for (const std::int32_t page_tokens : {1, 7, 64, 256}) {
    Cache k2(kNvfp4, p.kv_width(), page_tokens, p.lengths);
    Cache v2(kNvfp4, p.kv_width(), page_tokens, p.lengths);
    p.write(k2, v2);
    EXPECT_TRUE(p.attend(k2, v2, 0, p.rows.count()) == all) << "pages of " << page_tokens;
  }
  set_vectors(Vectors::kPortable);
  EXPECT_TRUE(p.attend(k, v, 0, p.rows.count()) == all) << "the definition";
}

/// R47: for head counts that divide by 4 and that do not, what lies in the pages is what direct
/// quantization of the row gives.
TEST(Attention, R47_PagesHoldWhatQuantizationGives) {
  for (const std::int32_t heads : {3, 4, 8}) {
    for (const std::int32_t dim : {16, 32, 64}) {
      const std::int32_t width = heads * dim;
      const std::vector<std::int32_t> lengths = {33};
      const Rows rows(lengths);
      const auto x = random_bf16(rows.count() * width, 4);
      Cache cache(kNvfp4, width, 16, lengths);
      write_kv(
          {.x = rows_of(x.data(), rows.count(), width), .kv = cache.kv, .rows = rows.in(cache)},
          {});
      for (std::int32_t row = 0; row < 33; ++row) {
        std::vector<std::uint8_t> direct(static_cast<std::size_t>(width / 2 + width / 16));
        quantize({.x = rows_of(x.data() + row * width, 1, width),
                  .rule = kNvfp4,
                  .exponent = -7,
                  .out = {rows_of(direct.data(), 1, width / 2),
                          rows_of(direct.data() + width / 2, 1, width / 16),
                          {}}});
        EXPECT_EQ(0, std::memcmp(cache.kv.row(cache.tables[0], row), direct.data(), direct.size()))
            << heads << " heads of " << dim << ", row " << row;
      }
    }
  }
}

/// R53: rows scattered over pages leave every other byte as it was.
TEST(Attention, R53_ScatteredRowsTouchNothingElse) {
  for (const Quantizer& rule : {kNvfp4, Quantizer{}}) {
    const std::vector<std::int32_t> lengths = {40, 40};
    Cache together(rule, 64, 16, lengths), one_by_one(rule, 64, 16, lengths);
    const std::vector<std::int32_t> positions = {17, 3, 39, 16, 0};
    const std::vector<std::int32_t> sequence = {1, 0, 0, 0, 1};
    const auto x = random_bf16(5 * 64, 5);
    write_kv({.x = rows_of(x.data(), 5, 64),
              .kv = together.kv,
              .rows = {positions, sequence, together.spans}},
             {});
    std::vector<std::uint8_t> ours(together.pool.size(), 0);
    for (std::size_t i = 0; i < 5; ++i) {
      write_kv({.x = rows_of(x.data() + i * 64, 1, 64),
                .kv = one_by_one.kv,
                .rows = {std::span(positions).subspan(i, 1), std::span(sequence).subspan(i, 1),
                         one_by_one.spans}},
               {});
      const auto row =
          together.kv.row(together.tables[static_cast<std::size_t>(sequence[i])], positions[i]) -
          together.pool.data();
      std::fill_n(ours.begin() + row, together.kv.row_bytes, std::uint8_t{1});
    }
    EXPECT_EQ(together.pool, one_by_one.pool);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      ASSERT_TRUE(ours[i] != 0 || together.pool[i] == std::byte{0xFF}) << i;
    }
  }
}

TEST(Attention, SaysWhatIsWrong) {
  const Problem p({4, 2, 32}, {10});
  Cache cache({}, p.kv_width(), 16, p.lengths);
  const auto x = rows_of(p.k.data(), 1, 64);
  const std::vector<std::int32_t> beyond = {16}, negative = {-1}, zero = {0}, other = {1};
  EXPECT_THROW(write_kv({.x = x, .kv = cache.kv, .rows = {beyond, zero, cache.spans}}, {}), Error);
  EXPECT_THROW(write_kv({.x = x, .kv = cache.kv, .rows = {negative, zero, cache.spans}}, {}),
               Error);
  EXPECT_THROW(write_kv({.x = x, .kv = cache.kv, .rows = {zero, other, cache.spans}}, {}), Error);
  EXPECT_THROW(
      write_kv({.x = rows_of(p.k.data(), 1, 32), .kv = cache.kv, .rows = {zero, zero, cache.spans}},
               {}),
      Error);
  for (const std::byte b : cache.pool) ASSERT_EQ(b, std::byte{0xFF}) << "nothing is half-written";
}

}  // namespace
}  // namespace lockstep::kernels
