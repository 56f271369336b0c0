#include "train/audit.h"

#include <algorithm>
#include <vector>

#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"
#include "numerics/bf16.h"

namespace lockstep::train {
namespace {

/// Codes of x at the trainer's own scales, as the rule packs them.
std::vector<std::uint8_t> own_codes(const AuditArgs& args, std::int64_t rows) {
  const std::int64_t blocks = args.rule.scale_cols(args.cols);
  const std::int64_t bytes = args.rule.code_bytes(args.cols);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * bytes));
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(rows * blocks));
  std::vector<float> global(static_cast<std::size_t>(rows));
  kernels::quantize({.x = {args.before.data(), {rows, args.cols}, {args.cols, 1}},
                     .rule = args.rule,
                     .exponent = args.exponent,
                     .out = {.codes = {codes.data(), {rows, bytes}, {bytes, 1}},
                             .scales = {scales.data(), {rows, blocks}, {blocks, 1}},
                             .global = {global.data(), {rows}, {1}}}});
  return codes;
}

/// What the rollout's codes are worth.   [rows, cols]
std::vector<Bf16> rollout_values(const AuditArgs& args, std::int64_t rows) {
  const auto tokens = static_cast<std::int64_t>(args.present.size());
  std::vector<Bf16> values(args.before.size());
  kernels::guide(
      {.x = {args.before.data(), {rows, args.cols}, {args.cols, 1}},
       .rule = args.rule,
       .guidance = Guidance::kFullForced,
       .layout = args.layout,
       .records = {args.records.data(), {tokens, args.layout.bytes()}, {args.layout.bytes(), 1}},
       .present = {args.present.data(), {tokens}, {1}},
       .out = {values.data(), {rows, args.cols}, {args.cols, 1}},
       .exponent = args.exponent});
  return values;
}

std::int64_t differing_codes(const std::uint8_t* a, const std::uint8_t* b, std::int64_t bytes,
                             bool wide) {
  std::int64_t count = 0;
  if (wide) {
    for (std::int64_t i = 0; i < bytes; ++i) count += a[i] != b[i] ? 1 : 0;
    return count;
  }
  for (std::int64_t i = 0; i < bytes; ++i) {
    const auto x = static_cast<unsigned>(a[i] ^ b[i]);
    count += ((x & 0x0fu) != 0 ? 1 : 0) + ((x & 0xf0u) != 0 ? 1 : 0);
  }
  return count;
}

}  // namespace

Tally::Audit audit(const AuditArgs& args) {
  const std::int64_t width = args.layout.width;
  const auto tokens = static_cast<std::int64_t>(args.present.size());
  const std::int64_t rows = tokens * width / args.cols;
  const std::vector<std::uint8_t> own = own_codes(args, rows);
  const std::vector<Bf16> rollout =
      args.after.empty() ? std::vector<Bf16>() : rollout_values(args, rows);
  Tally::Audit counts;
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (args.present[static_cast<std::size_t>(t)] == 0) continue;
    // A record begins with its codes, packed as own codes are.
    counts.elements += width;
    const std::int64_t bytes = args.rule.code_bytes(width);
    counts.flipped +=
        differing_codes(own.data() + t * bytes, args.records.data() + t * args.layout.bytes(),
                        bytes, args.rule.is_wide());
    if (args.after.empty()) continue;
    counts.rounded += width;
    for (std::int64_t i = t * width; i < (t + 1) * width; ++i) {
      const auto at = static_cast<std::size_t>(i);
      counts.residual += to_float(args.after[at]) != to_float(rollout[at]) ? 1 : 0;
    }
  }
  return counts;
}

}  // namespace lockstep::train
