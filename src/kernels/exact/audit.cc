#include "kernels/exact/audit.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/quantize_rows.h"
#include "kernels/exact/record_row.h"
#include "numerics/guided.h"

namespace lockstep::kernels {
namespace {

void require(bool holds, std::initializer_list<Piece> message) {
  if (!holds) throw Error(cat(message));
}

/// Rows of x in a record, and elements that share an n.
struct Shape {
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t slots;
  std::int64_t span;
};

Shape check(const AuditArgs& args) {
  const RowLayout& layout = args.layout;
  Shape shape{args.x.shape[0], args.x.shape[1], 1, layout.width};
  require(layout.encoding == (args.rule.is_wide() ? Encoding::kCodes8 : Encoding::kCodes),
          {"audit: layout.encoding is ", static_cast<int>(layout.encoding), ", must be codes"});
  require(args.rule.quantizes() && (args.rule.is_mx() || args.rule.global_is_power_of_two),
          {"audit: the rule must be NVFP4 or FP8 under a power-of-two scale, or MX"});
  const std::int32_t block = args.rule.scale == ScaleFormat::kNone ? 0 : args.rule.block;
  require(layout.block == block && shape.cols > 0 && (block == 0 || shape.cols % block == 0) &&
              layout.width >= shape.cols && layout.width % shape.cols == 0,
          {"audit: layout is ", layout.width, " in blocks of ", layout.block, ", x has ",
           shape.cols, " columns under blocks of ", block});
  shape.slots = layout.width / shape.cols;
  if (layout.exponents > 0) shape.span = layout.width / layout.exponents;
  shape.span = std::min(shape.span, shape.cols);
  require(shape.span > 0 && shape.cols % shape.span == 0 && (block == 0 || shape.span % block == 0),
          {"audit: layout.exponents is ", layout.exponents, ", which does not divide ", shape.cols,
           " columns into blocks"});
  require(shape.rows % shape.slots == 0 && args.records.shape[0] == shape.rows / shape.slots &&
              args.records.shape[1] == layout.bytes(),
          {"audit: records are [", args.records.shape[0], ", ", args.records.shape[1],
           "], must be [", shape.rows / shape.slots, ", ", layout.bytes(), "]"});
  require(args.operand.shape == args.x.shape, {"audit: operand must have the shape of x"});
  require(args.counts.shape[0] == kNumAuditCounts,
          {"audit: counts has ", args.counts.shape[0], " entries, must be ",
           static_cast<int>(kNumAuditCounts)});
  return shape;
}

/// One block: the trainer's values against the rollout's codes.
struct Block {
  const Quantizer& rule;
  const Bf16* x;
  const Bf16* operand;
  const std::uint8_t* codes;
  float own_scale;
  float scale;
  std::int32_t size;
};

/// Whether x lies scale / 4 or more from the interval that rounds to the code. Its ends are
/// midpoints; 6 has no upper end.
bool is_beyond(float x, float scale, E2m1 code) {
  const std::uint32_t m = bits_of(code) & 7u;
  const float value = e2m1_magnitude(m);
  const float below = m == 0 ? 0.25f : 0.5f * (value - e2m1_magnitude(m - 1));
  const float above = m == 7 ? 0.0f : 0.5f * (e2m1_magnitude(m + 1) - value);
  const float towards = (bits_of(code) & 8u) != 0 ? -x : x;  // as if it were positive
  if (towards <= (value - below - 0.25f) * scale) return true;
  return m != 7 && towards >= (value + above + 0.25f) * scale;
}

/// Does x lie where the code is no end of its bracket any more?
bool is_beyond(float x, float scale, E4m3 code) {
  const std::uint32_t m = bits_of(code) & 0x7Fu;
  const auto value = [](std::uint32_t magnitude) {
    return to_float(static_cast<E4m3>(static_cast<std::uint8_t>(magnitude)));
  };
  const float towards = (bits_of(code) & 0x80u) != 0 ? -x : x;  // as if it were positive
  if (towards <= (m == 0 ? -value(1) : value(m - 1)) * scale) return true;
  return m != kE4m3Max && towards >= value(m + 1) * scale;
}

/// A code's place on the grid, what it is worth there, and whether x is out of its reach.
struct OnGrid {
  std::int32_t step;
  float value;
};

OnGrid on_grid(const Quantizer& rule, std::uint8_t code) {
  const std::uint32_t sign = rule.is_wide() ? 0x80u : 8u;
  const auto m = static_cast<std::int32_t>(code & (sign - 1));
  const bool negative = (code & sign) != 0;
  const float value =
      rule.is_wide() ? to_float(static_cast<E4m3>(code)) : to_float(static_cast<E2m1>(code));
  return {negative ? -m : m, value};
}

std::uint8_t nearest_code(const Quantizer& rule, float x, float scale) {
  if (!rule.is_wide()) return bits_of(to_e2m1_scaled(x, scale));
  return scale > 0.0f ? bits_of(to_e4m3_scaled(x, 1.0f / scale)) : std::uint8_t{0};
}

void count_block(const Block& block, std::array<std::int64_t, kNumAuditCounts>& counts) {
  ++counts[kAuditBlocks];
  counts[kAuditCodes] += block.size;
  counts[kAuditScaleFlips] += block.own_scale != block.scale;
  const bool wide = block.rule.is_wide();
  for (std::int32_t i = 0; i < block.size; ++i) {
    const float x = to_float(block.x[i]);
    const auto code =
        static_cast<std::uint8_t>(wide ? block.codes[i] : block.codes[i / 2] >> i % 2 * 4 & 15);
    const bool zero = !(block.scale > 0.0f);
    const OnGrid theirs = zero ? OnGrid{} : on_grid(block.rule, code);
    const OnGrid own = on_grid(block.rule, nearest_code(block.rule, x, block.own_scale));
    const float rollout = zero ? 0.0f : theirs.value * block.scale;
    const std::int32_t distance = std::abs(own.step - theirs.step);
    counts[kAuditFlips] += own.value * block.own_scale != rollout;
    counts[kAuditCodeFlips] += distance != 0;
    counts[kAuditAdjacent] += distance == 1;
    counts[kAuditStillDiffer] += to_float(block.operand[i]) != rollout;
    counts[kAuditBeyond] += !zero && (wide ? is_beyond(x, block.scale, static_cast<E4m3>(code))
                                           : is_beyond(x, block.scale, static_cast<E2m1>(code)));
  }
}

}  // namespace

void audit(const AuditArgs& args, Stream) {
  if (args.x.shape[0] == 0) return;
  const Shape shape = check(args);
  const RowLayout& layout = args.layout;
  const bool scaled = args.rule.scale != ScaleFormat::kNone;
  const auto block = static_cast<std::int32_t>(scaled ? layout.block : shape.span);
  std::array<std::int64_t, kNumAuditCounts> counts{};
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    const std::int64_t index = row / shape.slots;
    if (!args.present.empty() && args.present.data[index * args.present.stride[0]] == 0) continue;
    const std::uint8_t* record = args.records.data + index * args.records.stride[0];
    if (is_damaged(args.rule, layout, record)) continue;
    const std::uint8_t* scales = record + layout.element_bytes();
    const std::uint8_t* exponents = scales + layout.scale_bytes();
    const Bf16* x = args.x.data + row * args.x.stride[0];
    if (!is_finite(row_amax(x, shape.cols))) continue;
    ++counts[kAuditRows];
    const Bf16* operand = args.operand.data + row * args.operand.stride[0];
    for (std::int64_t c = 0; c < shape.cols; c += block) {
      const std::int64_t at = row % shape.slots * shape.cols + c;
      const std::int64_t first = c / shape.span * shape.span;
      const bool own_n = args.rule.global == GlobalScale::kPerToken;
      const std::int32_t n =
          own_n ? own_exponent(args.rule, row_amax(x + first, shape.span)) : args.exponent;
      const auto recorded_n =
          static_cast<std::int8_t>(layout.exponents > 0 ? exponents[at / shape.span]
                                                        : static_cast<std::uint8_t>(args.exponent));
      std::uint8_t own = 0, theirs = 0;
      if (scaled) {
        own = block_byte(x + c, row_amax(x + c, block), args.rule, global_of_exponent(n));
        theirs = scales[at / block];
      }
      count_block(
          {args.rule, x + c, operand + c, record + args.rule.code_bytes(at),
           scale_value(args.rule, own, n), scale_value(args.rule, theirs, recorded_n), block},
          counts);
    }
  }
  for (std::int64_t i = 0; i < kNumAuditCounts; ++i) {
    args.counts.data[i * args.counts.stride[0]] += counts[static_cast<std::size_t>(i)];
  }
}

}  // namespace lockstep::kernels
