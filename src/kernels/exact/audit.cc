#include "kernels/exact/audit.h"

#include <algorithm>
#include <array>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/audit_block.h"
#include "kernels/exact/quantize_rows.h"
#include "kernels/exact/record_row.h"

namespace lockstep::kernels {
namespace {

void require(bool holds, std::initializer_list<Piece> message) {
  if (!holds) throw Error(cat(message));
}

AuditShape check(const AuditArgs& args) {
  const RowLayout& layout = args.layout;
  AuditShape shape{args.x.shape[0], args.x.shape[1], 1, layout.width};
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
  const auto here = [&](const auto& view) { return view.device == args.x.device; };
  require(here(args.operand) && here(args.records) && here(args.counts) &&
              (args.present.empty() || here(args.present)),
          {"audit: x, operand, records, present and counts must be on one device"});
  return shape;
}

void audit_here(const AuditArgs& args, const AuditShape& shape) {
  const RowLayout& layout = args.layout;
  const bool scaled = args.rule.scale != ScaleFormat::kNone;
  const auto block = static_cast<std::int32_t>(scaled ? layout.block : shape.span);
  AuditCounts counts{};
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
      count_audit(
          {args.rule, x + c, operand + c, record + args.rule.code_bytes(at),
           scale_value(args.rule, own, n), scale_value(args.rule, theirs, recorded_n), block},
          counts);
    }
  }
  for (std::int64_t i = 0; i < kNumAuditCounts; ++i) {
    args.counts.data[i * args.counts.stride[0]] += counts[static_cast<std::size_t>(i)];
  }
}

}  // namespace

void audit(const AuditArgs& args, Stream stream) { audit({&args, 1}, stream); }

void audit(std::span<const AuditArgs> all, Stream stream) {
  require(all.size() <= kMostAudits, {"audit: ", all.size(), " at a time, at most ", kMostAudits});
  std::array<AuditShape, kMostAudits> shapes{};
  for (std::size_t i = 0; i < all.size(); ++i) {
    require(all[i].x.device == all[0].x.device, {"audit: all must be on one device"});
    if (all[i].x.shape[0] > 0) shapes[i] = check(all[i]);
  }
  if (all.empty()) return;
  if (all[0].x.device.kind == Device::Kind::kCuda) {
    if constexpr (build::has_cuda) {
      return audit_cuda(all, std::span(shapes).first(all.size()), stream);
    }
    throw Error("audit: x is on a CUDA device, and this build has no CUDA backend");
  }
  for (std::size_t i = 0; i < all.size(); ++i) audit_here(all[i], shapes[i]);
}

}  // namespace lockstep::kernels
