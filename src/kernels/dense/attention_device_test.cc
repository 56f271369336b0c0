#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "base/error.h"
#include "device/testing.h"
#include "kernels/dense/attention_testing.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kMxfp4 = {.element = Element::kE2m1,
                              .block = 32,
                              .scale = ScaleFormat::kE8m0,
                              .scale_rule = ScaleRule::kMxFloor};
constexpr Quantizer kFp8 = {
    .element = Element::kE4m3, .global = GlobalScale::kStatic, .global_is_power_of_two = true};

/// How a call is cut; nothing of it may change a bit.
struct Cut {
  bool in_tiles = false;  // rows of a sequence together, as many as fit
  bool workspace = true;
  std::int32_t longest = 0;  // more than the longest row needs, or 0
};

/// A problem's rows on the device under test.
class AttentionOnDevice : public testing::TestWithParam<Device> {
 protected:
  static bool on_cuda() { return GetParam().kind == Device::Kind::kCuda; }

  static std::vector<Bf16> attend(const Problem& p, const Cache& k, const Cache& v,
                                  std::int64_t first, std::int64_t count, const Cut& cut = {}) {
    if (!on_cuda()) return p.attend(k, v, first, count);
    const auto part = [&](const auto& of, std::int64_t width = 1) {
      return std::vector(of.begin() + first * width, of.begin() + (first + count) * width);
    };
    const std::int64_t width = p.shape.heads * p.shape.dim;
    const Device device = GetParam();
    const auto positions_here = part(p.rows.positions);
    const auto sequence_here = part(p.rows.sequence);
    const Buffer q = to_device(part(p.q, width), device);
    const Buffer positions = to_device(positions_here, device);
    const Buffer sequence = to_device(sequence_here, device);
    std::size_t most = 0;
    for (const auto& table : k.tables) most = std::max(most, table.size());
    std::vector<std::int32_t> flat;
    for (const auto& table : k.tables) {
      flat.insert(flat.end(), table.begin(), table.end());
      flat.resize(flat.size() + most - table.size(), 1 << 30);  // to read it would be a fault
    }
    const Buffer table = to_device(flat, device);
    const std::vector<RowTile> tile_list = tiles(p, positions_here, sequence_here);
    const Buffer tile_buffer = to_device(tile_list, device);
    const Buffer out =
        to_device(std::vector<Bf16>(static_cast<std::size_t>(count * width), to_bf16(NAN)), device);
    const std::int32_t longest =
        cut.longest > 0 ? cut.longest
                        : *std::max_element(positions_here.begin(), positions_here.end()) + 1;
    const Buffer workspace(
        device,
        cut.workspace ? attention_workspace(count, p.shape.heads, p.shape.dim, longest) : 0);
    fill_bytes(workspace.as<void>(), device, 0xFF, workspace.bytes());
    const Buffer k_pool = to_device(k.pool, device), v_pool = to_device(v.pool, device);
    PagedKv k_there = k.kv, v_there = v.kv;
    k_there.pool = k_pool.as<std::byte>();
    v_there.pool = v_pool.as<std::byte>();
    const auto rows = static_cast<std::size_t>(count);
    attention(
        {.q = rows_of(q.as<const Bf16>(), count, width, device),
         .k = k_there,
         .v = v_there,
         .rows = {.positions = {positions.as<std::int32_t>(), rows},
                  .sequence = {sequence.as<std::int32_t>(), rows},
                  .pages = {},
                  .table = rows_of(table.as<const std::int32_t>(),
                                   static_cast<std::int64_t>(k.tables.size()),
                                   static_cast<std::int64_t>(most), device),
                  .longest = longest,
                  .tiles = {tile_buffer.as<RowTile>(), cut.in_tiles ? tile_list.size() : 0}},
         .num_heads = p.shape.heads,
         .num_kv_heads = p.shape.kv_heads,
         .head_dim = p.shape.dim,
         .out = rows_of(out.as<Bf16>(), count, width, device),
         .workspace = {workspace.as<std::byte>(), static_cast<std::size_t>(workspace.bytes())}},
        {});
    return to_host<Bf16>(out);
  }

  static std::vector<RowTile> tiles(const Problem& p, const std::vector<std::int32_t>& positions,
                                    const std::vector<std::int32_t>& sequence) {
    const std::int32_t most = rows_of_tile(p.shape.heads / p.shape.kv_heads);
    std::vector<RowTile> result;
    std::int32_t last_position = -1;
    std::int32_t last_sequence = -1;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      const bool joins = !result.empty() && result.back().rows < most &&
                         sequence[i] == last_sequence && positions[i] > last_position;
      if (joins) {
        ++result.back().rows;
      } else {
        result.push_back({static_cast<std::int32_t>(i), 1});
      }
      last_position = positions[i];
      last_sequence = sequence[i];
    }
    return result;
  }

  /// What the caches hold instead of K and V.
  static Problem worth(const Problem& p, const Quantizer& rule) {
    Problem result = p;
    if (!rule.quantizes()) return result;
    const std::int64_t rows = p.rows.count(), width = p.kv_width();
    for (std::vector<Bf16>* x : {&result.k, &result.v}) {
      std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * rule.code_bytes(width)));
      std::vector<std::uint8_t> scales(static_cast<std::size_t>(rows * rule.scale_cols(width)));
      const PackedView<std::uint8_t> packed = {rows_of(codes.data(), rows, rule.code_bytes(width)),
                                               rows_of(scales.data(), rows, rule.scale_cols(width)),
                                               {}};
      const std::int8_t n = rule.is_mx() ? std::int8_t{0} : std::int8_t{-7};
      quantize({.x = rows_of(x->data(), rows, width), .rule = rule, .exponent = n, .out = packed});
      dequantize(
          {.codes = packed, .rule = rule, .exponent = n, .bf16 = rows_of(x->data(), rows, width)});
    }
    return result;
  }

  static AttentionErrors errors(const Shape& shape, const Quantizer& rule) {
    if (!on_cuda()) return cpu_errors(shape.dim);
    const bool fp16 = rule.quantizes() && !rule.is_mx();
    return {(shape.dim / 8 + 12) * 0x1p-23, (fp16 ? 0x1p-20 : 0x1p-16) + 40 * 0x1p-22, 0x1p-23};
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, AttentionOnDevice, testing::ValuesIn(devices()), name_of_device);

/// Rows scattered over pages, one of them not finite: the CPU's bytes and counts, and no other
/// byte.
TEST_P(AttentionOnDevice, WritesTheCpusBytes) {
  for (const Quantizer& rule : {Quantizer{}, kNvfp4, kFp8, kMxfp4}) {
    for (const std::int32_t width : {32, 64, 96, 512, 1024}) {
      const std::vector<std::int32_t> lengths = {40, 40};
      Cache cache(rule, width, 16, lengths);
      cache.kv.exponent = rule.is_mx() ? std::int8_t{0} : std::int8_t{-9};  // some blocks saturate
      const std::vector<std::int32_t> positions = {17, 3, 39, 16, 0, 5},
                                      sequence = {1, 0, 0, 0, 1, 1};
      auto x = random_bf16(6 * width, 5, 4.0f);
      for (std::int32_t i = 0; i < width; ++i) {
        if (i < 16) x[static_cast<std::size_t>(i)] = Bf16{};
        x[static_cast<std::size_t>(5 * width + i)] = to_bf16(0x1p-20f);
      }
      x[static_cast<std::size_t>(2 * width + 7)] = to_bf16(INFINITY);
      const std::vector<std::byte> before = cache.pool;
      std::vector<std::int64_t> counts(kNumQuantizeCounts, 3), counts_there = counts;
      write_kv({.x = rows_of<const Bf16>(x.data(), 6, width),
                .kv = cache.kv,
                .rows = {positions, sequence, cache.spans},
                .counts = {counts.data(), {kNumQuantizeCounts}, {1}}},
               {});
      if (!on_cuda()) continue;
      const Device device = GetParam();
      std::vector<std::int32_t> flat;
      for (const auto& table : cache.tables) flat.insert(flat.end(), table.begin(), table.end());
      const Buffer pool = to_device(before, device), from = to_device(x, device);
      const Buffer at = to_device(positions, device), of = to_device(sequence, device);
      const Buffer table = to_device(flat, device), counted = to_device(counts_there, device);
      PagedKv there = cache.kv;
      there.pool = pool.as<>();
      write_kv({.x = rows_of(from.as<const Bf16>(), 6, width, device),
                .kv = there,
                .rows = {.positions = {at.as<std::int32_t>(), 6},
                         .sequence = {of.as<std::int32_t>(), 6},
                         .pages = {},
                         .table = rows_of(table.as<const std::int32_t>(), 2, 3, device)},
                .counts = {counted.as<std::int64_t>(), {kNumQuantizeCounts}, {1}, device}},
               {});
      EXPECT_TRUE(to_host<std::byte>(pool) == cache.pool) << name_of(rule.element) << " " << width;
      EXPECT_EQ(to_host<std::int64_t>(counted), counts) << name_of(rule.element) << " " << width;
    }
  }
}

TEST_P(AttentionOnDevice, IsWithinTheBoundOfTheExactValue) {
  for (const Quantizer& rule : {Quantizer{}, kNvfp4, kFp8, kMxfp4}) {
    for (const Shape shape : {Shape{4, 2, 32},
                              {8, 4, 32},
                              {3, 3, 32},
                              {8, 1, 64},
                              {8, 4, 128},
                              {3, 3, 64},
                              {12, 1, 128},
                              {16, 8, 64}}) {
      const Problem p(shape, on_cuda() ? std::vector{130, 1, 65, 530} : std::vector{40, 1});
      Cache k(rule, p.kv_width(), 16, p.lengths, true), v(rule, p.kv_width(), 16, p.lengths, true);
      p.write(k, v);
      const Problem exact = worth(p, rule);
      for (const bool in_tiles : {false, true}) {
        const auto out = attend(p, k, v, 0, p.rows.count(), {.in_tiles = in_tiles});
        for (std::int64_t row = 0; row < p.rows.count(); row += row % 64 < 62 ? 23 : 1) {
          for (std::int32_t head = 0; head < shape.heads; ++head) {
            check_head(exact, row, head, out, errors(shape, rule));
          }
        }
        if (HasFailure()) FAIL() << name_of(rule.element) << " dim " << shape.dim;
      }
    }
  }
}

TEST_P(AttentionOnDevice, KAndVMayHaveTwoFormats) {
  const std::vector<Quantizer> rules = {Quantizer{}, kNvfp4, kFp8, kMxfp4};
  for (const Quantizer& of_k : rules) {
    for (const Quantizer& of_v : rules) {
      if (of_k == of_v) continue;
      for (const Shape shape : {Shape{4, 2, 32}, {8, 4, 128}, {3, 3, 64}}) {
        const Problem p(shape, {130, 1, 65});
        Cache k(of_k, p.kv_width(), 16, p.lengths), v(of_v, p.kv_width(), 16, p.lengths);
        p.write(k, v);
        Problem exact = worth(p, of_k);
        exact.v = worth(p, of_v).v;
        const auto out = attend(p, k, v, 0, p.rows.count());
        for (std::int64_t row = 0; row < p.rows.count(); row += 13) {
          for (std::int32_t head = 0; head < shape.heads; ++head) {
            check_head(exact, row, head, out, errors(shape, of_k));
          }
        }
        if (HasFailure()) FAIL() << name_of(of_k.element) << ", " << name_of(of_v.element);
        const auto alone = attend(p, k, v, 77, 3);
        const std::int64_t width = shape.heads * shape.dim;
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), out.begin() + 77 * width));
      }
    }
  }
}

TEST_P(AttentionOnDevice, RowsDoNotDependOnHowACallIsCut) {
  if (!on_cuda()) GTEST_SKIP() << "attention_test.cc has this for the CPU";
  for (const Quantizer& rule : {kNvfp4, Quantizer{}}) {
    for (const Shape shape : {Shape{16, 2, 32}, {32, 4, 128}, {6, 3, 64}}) {
      const Problem p(shape, {1100, 77});
      Cache k(rule, p.kv_width(), 16, p.lengths, true), v(rule, p.kv_width(), 16, p.lengths, true);
      p.write(k, v);
      const std::int64_t rows = p.rows.count(), width = shape.heads * shape.dim;
      const auto all = attend(p, k, v, 0, rows);
      const auto same = [&](const std::vector<Bf16>& part, std::int64_t first, std::int64_t count) {
        const auto from = all.begin() + first * width;
        return part == std::vector<Bf16>(from, from + count * width);
      };
      EXPECT_TRUE(attend(p, k, v, 0, rows) == all) << "again";
      EXPECT_TRUE(attend(p, k, v, 0, rows, {.workspace = false}) == all) << "folded";
      EXPECT_TRUE(attend(p, k, v, 0, rows, {.in_tiles = true}) == all) << "in tiles";
      EXPECT_TRUE(attend(p, k, v, 0, rows, {.in_tiles = true, .workspace = false}) == all);
      for (const std::int64_t first : {0, 1, 63, 511, 512, 1023, 1024, 1099, 1100, 1176}) {
        EXPECT_TRUE(same(attend(p, k, v, first, 1), first, 1)) << "alone, row " << first;
        EXPECT_TRUE(same(attend(p, k, v, first, 1, {.workspace = false}), first, 1)) << first;
      }
      EXPECT_TRUE(same(attend(p, k, v, 5, 40, {.in_tiles = true}), 5, 40)) << "another chunk";
      EXPECT_TRUE(same(attend(p, k, v, 1080, 90), 1080, 90)) << "across sequences";
      EXPECT_TRUE(same(attend(p, k, v, 1010, 30, {.in_tiles = true, .longest = 1100}), 1010, 30));
      for (const std::int32_t page_tokens : {1, 7, 64, 256}) {
        for (const bool aligned : {false, true}) {
          Cache k2(rule, p.kv_width(), page_tokens, p.lengths, aligned);
          Cache v2(rule, p.kv_width(), page_tokens, p.lengths, aligned);
          p.write(k2, v2);
          EXPECT_TRUE(attend(p, k2, v2, 0, rows, {.in_tiles = aligned}) == all)
              << "pages of " << page_tokens;
        }
      }
    }
  }
}

/// Runs of rows, rows, words or bytes at a time; the ring's places are filled several times, and
/// the last block of values has a few keys alone.
TEST_P(AttentionOnDevice, HowRowsComeChangesNoBit) {
  if (!on_cuda()) GTEST_SKIP() << "of a CUDA device";
  for (const Quantizer& rule : {kNvfp4, kFp8, kMxfp4, Quantizer{}}) {
    for (const Shape shape : {Shape{4, 2, 32}, {3, 1, 32}, {6, 3, 64}, {8, 4, 128}}) {
      const Problem p(shape, {331});
      std::vector<Bf16> expected;
      for (const std::int32_t page_tokens : {16, 1, 7, 8, 64}) {
        for (const bool aligned : {true, false}) {
          Cache k(rule, p.kv_width(), page_tokens, p.lengths, aligned);
          Cache v(rule, p.kv_width(), page_tokens, p.lengths, aligned);
          p.write(k, v);
          const auto out = attend(p, k, v, 329, 2);
          if (expected.empty()) expected = out;
          EXPECT_TRUE(out == expected) << name_of(rule.element) << " dim " << shape.dim
                                       << ", pages of " << page_tokens << ", " << aligned;
        }
      }
      for (std::int64_t row = 329; row < 331; ++row) {
        std::vector<Bf16> all(static_cast<std::size_t>(row * shape.heads * shape.dim));
        all.insert(all.end(), expected.begin() + (row - 329) * shape.heads * shape.dim,
                   expected.end());
        check_head(worth(p, rule), row, 0, all, errors(shape, rule));
      }
    }
  }
}

/// More keys than the L2 holds, so that they come when they like, and more splits than blocks of
/// threads.
TEST_P(AttentionOnDevice, ManyLongSequencesGiveTheSameBitsEachTime) {
  if (!on_cuda()) GTEST_SKIP() << "of a CUDA device";
  const Device device = GetParam();
  constexpr std::int64_t kRows = 24, kHeads = 32, kWidth = 4 * 128, kTokens = 8192;
  constexpr std::int64_t kPageTokens = 16, kPagesEach = kTokens / kPageTokens;
  for (const Quantizer& rule : {kNvfp4, Quantizer{}}) {
    const std::int64_t row_bytes =
        rule.quantizes() ? rule.code_bytes(kWidth) + rule.scale_cols(kWidth) : 2 * kWidth;
    const std::int64_t page_bytes = 2 * kPageTokens * row_bytes;
    std::mt19937 random(3);
    std::vector<std::byte> some(1 << 20);
    for (auto& x : some) x = std::byte(random() & 0x3F);  // no infinite number
    const Buffer source = to_device(some, device);
    const Buffer pool(device, kRows * kPagesEach * page_bytes);
    for (std::int64_t i = 0; i < pool.bytes(); i += source.bytes()) {
      copy_bytes(pool.as<std::byte>() + i, device, source.as<void>(), device,
                 std::min(source.bytes(), pool.bytes() - i), {});
    }
    std::vector<std::int32_t> pages_of(static_cast<std::size_t>(kRows * kPagesEach)), at, of;
    std::iota(pages_of.begin(), pages_of.end(), 0);
    std::shuffle(pages_of.begin(), pages_of.end(), random);
    for (std::int32_t i = 0; i < kRows; ++i) {
      at.push_back(static_cast<std::int32_t>(kTokens) - 1 - i % 5 * 99);
      of.push_back(i);
    }
    const Buffer table = to_device(pages_of, device);
    const Buffer positions = to_device(at, device), sequence = to_device(of, device);
    const Buffer q = to_device(random_bf16(kRows * kHeads * 128, 1), device);
    PagedKv k{.pool = pool.as<std::byte>(),
              .page_bytes = page_bytes,
              .offset = 0,
              .page_tokens = static_cast<std::int32_t>(kPageTokens),
              .row_bytes = static_cast<std::int32_t>(row_bytes),
              .rule = rule,
              .exponent = -7};
    PagedKv v = k;
    v.offset = page_bytes / 2;
    const auto run = [&](std::int64_t first, std::int64_t count, int times) {
      const auto rows = static_cast<std::size_t>(count);
      const Buffer out(device, count * kHeads * 128 * 2);
      const Buffer workspace(device, attention_workspace(count, kHeads, 128, kTokens));
      fill_bytes(workspace.as<void>(), device, 0xFF, workspace.bytes());
      const std::int64_t width = kHeads * 128;
      const AttentionArgs args{
          .q = rows_of(q.as<const Bf16>() + first * width, count, width, device),
          .k = k,
          .v = v,
          .rows = {.positions = {positions.as<std::int32_t>() + first, rows},
                   .sequence = {sequence.as<std::int32_t>() + first, rows},
                   .pages = {},
                   .table = rows_of(table.as<const std::int32_t>(), kRows, kPagesEach, device),
                   .longest = kTokens},
          .num_heads = kHeads,
          .num_kv_heads = 4,
          .head_dim = 128,
          .out = rows_of(out.as<Bf16>(), count, width, device),
          .workspace = {workspace.as<std::byte>(), static_cast<std::size_t>(workspace.bytes())}};
      for (int i = 0; i < times; ++i) attention(args, {});
      return to_host<Bf16>(out);
    };
    const std::vector<Bf16> all = run(0, kRows, 1);
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(run(0, kRows, 30) == all) << name_of(rule.element);
    for (const std::int64_t row : {0, 1, 13, 23}) {
      const auto from = all.begin() + row * kHeads * 128;
      EXPECT_TRUE(run(row, 1, 1) == std::vector<Bf16>(from, from + kHeads * 128)) << row;
    }
  }
}

}  // namespace
}  // namespace lockstep::kernels
