#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "device/testing.h"
#include "kernels/dense/attention_testing.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/heads.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

struct HeadShape {
  std::int32_t heads, kv_heads, dim;
};

class PlaceHeadsOnDevice : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, PlaceHeadsOnDevice, testing::ValuesIn(devices()), name_of_device);

constexpr Quantizer kCacheFp8 = {
    .element = Element::kE4m3, .global = GlobalScale::kStatic, .global_is_power_of_two = true};
constexpr Quantizer kCacheMx = {.element = Element::kE2m1,
                                .block = 32,
                                .scale = ScaleFormat::kE8m0,
                                .scale_rule = ScaleRule::kMxFloor};

/// A pass of seven rows of two sequences, and what its ops leave one by one on the CPU.
struct HeadCase {
  HeadCase(const Quantizer& rule, const HeadShape& shape, bool normed)
      : shape(shape),
        width(shape.kv_heads * shape.dim),
        cols((shape.heads + 2 * shape.kv_heads) * shape.dim),
        k(rule, width, 16, lengths),
        v(rule, width, 16, lengths),
        table(1e4, shape.dim) {
    table.grow(64);
    k.kv.exponent = rule.is_mx() ? std::int8_t{0} : std::int8_t{-9};  // some blocks saturate
    v.kv.exponent = rule.is_mx() ? std::int8_t{0} : std::int8_t{-4};
    qkv = random_bf16(rows() * cols, 3, 4.0f);
    for (std::int64_t i = 0; i < 32; ++i) qkv[static_cast<std::size_t>(2 * cols - 1 - i)] = Bf16{};
    for (std::int64_t i = 1; i <= width; ++i) {
      qkv[static_cast<std::size_t>(5 * cols - i)] = to_bf16(0x1p-20f);
    }
    // As a number of K's it would leave NaNs there, whose bits are the device's own.
    const std::int32_t at = rule.quantizes() ? shape.heads * shape.dim : 0;
    qkv[static_cast<std::size_t>(3 * cols + at + 1)] = to_bf16(INFINITY);
    qkv[static_cast<std::size_t>(6 * cols - 1)] = to_bf16(NAN);
    if (normed) {
      q_norm = random_bf16(shape.dim, 8, 1.0f);
      k_norm = random_bf16(shape.dim, 9, 1.0f);
    }
  }

  std::int64_t rows() const { return std::ssize(positions); }

  /// All of it one by one.
  void one_by_one() {
    const auto part = [&](std::int32_t first, std::int32_t count) {
      return TensorView<Bf16, 2>{
          qkv.data() + first * shape.dim, {rows(), count * shape.dim}, {cols, 1}};
    };
    rope({.x = part(0, shape.heads),
          .head_dim = shape.dim,
          .positions = positions,
          .table = &table,
          .norm = q_norm},
         {});
    const auto keys = part(shape.heads, shape.kv_heads);
    rope(
        {.x = keys, .head_dim = shape.dim, .positions = positions, .table = &table, .norm = k_norm},
        {});
    first_nonfinite(rows_of<const Bf16>(qkv.data(), rows(), cols), &bad, {});
    const TensorView<std::int64_t, 1> counted = {counts.data(), {kNumQuantizeCounts}, {1}};
    write_kv({.x = keys, .kv = k.kv, .rows = {positions, sequence, k.spans}, .counts = counted},
             {});
    write_kv({.x = part(shape.heads + shape.kv_heads, shape.kv_heads),
              .kv = v.kv,
              .rows = {positions, sequence, k.spans},
              .counts = counted},
             {});
  }

  /// The op, on a device; what it leaves comes back.
  void at_once(Device device) {
    if (device.kind == Device::Kind::kCpu) {
      return place_heads(args(qkv.data(), table, q_norm, k_norm, k.kv, v.kv,
                              {positions, sequence, k.spans}, counts.data(), &bad, device),
                         {});
    }
    std::vector<std::int32_t> flat;
    for (const auto& pages : k.tables) flat.insert(flat.end(), pages.begin(), pages.end());
    const Buffer x = to_device(qkv, device), at = to_device(positions, device),
                 of = to_device(sequence, device), tables = to_device(flat, device),
                 k_pool = to_device(k.pool, device), v_pool = to_device(v.pool, device),
                 q_weight = to_device(q_norm, device), k_weight = to_device(k_norm, device),
                 counted = to_device(counts, device),
                 first = to_device(std::vector<std::int32_t>{bad}, device);
    RopeTable there(1e4, shape.dim, device);
    there.grow(64);
    PagedKv keys = k.kv, values = v.kv;
    keys.pool = k_pool.as<>();
    values.pool = v_pool.as<>();
    const auto norm = [](const Buffer& weight, std::size_t n) {
      return std::span(weight.as<const Bf16>(), n);
    };
    synchronize(device, {});
    place_heads(args(x.as<Bf16>(), there, norm(q_weight, q_norm.size()),
                     norm(k_weight, k_norm.size()), keys, values,
                     {.positions = {at.as<std::int32_t>(), positions.size()},
                      .sequence = {of.as<std::int32_t>(), positions.size()},
                      .pages = {},
                      .table = rows_of(tables.as<const std::int32_t>(), 2, 3, device)},
                     counted.as<std::int64_t>(), first.as<std::int32_t>(), device),
                {});
    qkv = to_host<Bf16>(x);
    k.pool = to_host<std::byte>(k_pool);
    v.pool = to_host<std::byte>(v_pool);
    counts = to_host<std::int64_t>(counted);
    bad = to_host<std::int32_t>(first)[0];
  }

  PlaceHeadsArgs args(Bf16* x, const RopeTable& turns, std::span<const Bf16> q_weight,
                      std::span<const Bf16> k_weight, const PagedKv& keys, const PagedKv& values,
                      const PagedRows& where, std::int64_t* counted, std::int32_t* first,
                      Device device) const {
    return {.qkv = rows_of(x, rows(), cols, device),
            .num_heads = shape.heads,
            .num_kv_heads = shape.kv_heads,
            .head_dim = shape.dim,
            .table = &turns,
            .q_norm = q_weight,
            .k_norm = k_weight,
            .k = keys,
            .v = values,
            .rows = where,
            .counts = {counted, {kNumQuantizeCounts}, {1}, device},
            .bad = first};
  }

  HeadShape shape;
  std::int32_t width, cols;
  std::vector<std::int32_t> lengths = {40, 40};
  std::vector<std::int32_t> positions = {17, 3, 39, 16, 0, 5, 31}, sequence = {1, 0, 0, 0, 1, 1, 1};
  Cache k, v;
  RopeTable table;
  std::vector<Bf16> qkv, q_norm, k_norm;
  std::vector<std::int64_t> counts = std::vector<std::int64_t>(kNumQuantizeCounts, 3);
  std::int32_t bad = kNoRow;
};

TEST_P(PlaceHeadsOnDevice, LeavesWhatItsPartsLeave) {
  for (const Quantizer& rule : {Quantizer{}, kNvfp4, kCacheMx, kCacheFp8}) {
    for (const HeadShape& shape : {HeadShape{8, 4, 32},
                                   {32, 4, 128},
                                   {40, 8, 128},
                                   {6, 3, 64},
                                   {2, 1, 32},
                                   {3, 1, 16},
                                   {5, 3, 96},
                                   {18, 2, 256},
                                   {96, 96, 128},  // 48 KiB of shared memory, the most
                                   {97, 97, 128}}) {
      for (const bool normed : {true, false}) {
        if (rule.is_mx() && shape.kv_heads * shape.dim % 32 != 0) continue;
        HeadCase expected(rule, shape, normed), op(rule, shape, normed);
        expected.one_by_one();
        op.at_once(GetParam());
        const auto name = testing::Message()
                          << name_of(rule.element) << " of " << rule.block << ", " << shape.heads
                          << " heads of " << shape.dim << (normed ? ", normed" : "");
        EXPECT_EQ(op.bad, 3) << name;
        EXPECT_EQ(op.bad, expected.bad) << name;
        EXPECT_EQ(op.counts, expected.counts) << name;
        EXPECT_TRUE(op.k.pool == expected.k.pool) << name;
        EXPECT_TRUE(op.v.pool == expected.v.pool) << name;
        // A NaN's bits are the device's own.
        for (std::size_t i = 0; i < op.qkv.size(); ++i) {
          const float a = to_float(op.qkv[i]), b = to_float(expected.qkv[i]);
          ASSERT_TRUE(bits_of(op.qkv[i]) == bits_of(expected.qkv[i]) ||
                      (std::isnan(a) && std::isnan(b)))
              << name << " " << i;
        }
      }
    }
  }
}

TEST_P(PlaceHeadsOnDevice, RefusesWhatDoesNotFit) {
  HeadCase c(kNvfp4, {8, 4, 32}, true);
  const auto args = [&] {
    return c.args(c.qkv.data(), c.table, c.q_norm, c.k_norm, c.k.kv, c.v.kv,
                  {c.positions, c.sequence, c.k.spans}, c.counts.data(), &c.bad, {});
  };
  auto wrong = args();
  wrong.num_kv_heads = 3;
  EXPECT_THROW(place_heads(wrong, {}), Error);
  wrong = args();
  wrong.head_dim = 0;
  EXPECT_THROW(place_heads(wrong, {}), Error);
  wrong = args();
  wrong.bad = nullptr;
  EXPECT_THROW(place_heads(wrong, {}), Error);
  wrong = args();
  wrong.q_norm = wrong.q_norm.first(7);
  EXPECT_THROW(place_heads(wrong, {}), Error);
}

}  // namespace
}  // namespace lockstep::kernels
