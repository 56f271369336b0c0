#include "kernels/exact/residual.h"

#include <algorithm>
#include <numeric>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize_rows.h"
#include "kernels/exact/residual_row.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kGroup = 16;
constexpr std::int64_t kGrainElements = 1 << 13;
constexpr Quantizer kRule = {.element = Element::kE2m1,
                             .scale = ScaleFormat::kE4m3,
                             .global = GlobalScale::kPerToken,
                             .global_is_power_of_two = true};

void require(bool holds, std::initializer_list<Piece> message) {
  if (!holds) throw Error(cat(message));
}

template <typename Packed>
void check_packed(const Packed& packed, const char* name, std::int64_t rows, std::int64_t cols) {
  require(packed.codes.shape[0] == rows && packed.codes.shape[1] * 2 == cols &&
              packed.scales.shape[0] == rows && packed.scales.shape[1] * kGroup == cols,
          {"residual: ", name, " has codes [", packed.codes.shape[0], ", ", packed.codes.shape[1],
           "] and scales [", packed.scales.shape[0], ", ", packed.scales.shape[1], "], x is [",
           rows, ", ", cols, "]"});
  require(packed.codes.stride[1] == 1 && packed.scales.stride[1] == 1,
          {"residual: ", name, " must be contiguous along a row"});
}

void check(const ResidualArgs& args) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t cols = args.x.shape[1];
  require(cols % kGroup == 0, {"residual: x has ", cols, " columns, must be a multiple of 16"});
  require(args.x.stride[1] == 1 || cols <= 1, {"residual: x must be contiguous along a row"});
  const Device here = args.x.device;
  require(args.q.codes.device == here && args.q.scales.device == here &&
              args.q.global.device == here && (args.chosen.empty() || args.chosen.device == here),
          {"residual: x, q and chosen must be on one device"});
  check_packed(args.q, "q", rows, cols);
  require(args.q.global.shape[0] == rows || args.q.global.stride[0] == 0,
          {"residual: q has ", args.q.global.shape[0], " global scales for ", rows, " rows"});
  require(args.per_mille >= 0 && args.per_mille <= 1000,
          {"residual: per_mille is ", args.per_mille, ", must be in [0, 1000]"});
  if (args.choice == ResidualChoice::kStatic && args.pattern != ResidualPattern::kTwoOfFour) {
    require(args.chosen.shape[0] == cols / kGroup && !args.chosen.empty(),
            {"residual: chosen has ", args.chosen.shape[0], " entries, must have one for each of ",
             cols / kGroup, " groups"});
  }
}

/// Of numbers that the host can read.
void check_global(const ResidualArgs& args) {
  require(args.x.device.kind == Device::Kind::kCpu, {"residual: x must be on the CPU"});
  for (std::int64_t r = 0; r < args.x.shape[0]; ++r) {
    const float global = args.q.global.data[r * args.q.global.stride[0]];
    const std::int32_t n = exponent_of(global);
    if (n < kMinExponent || n > kMaxExponent || global != power_of_two(n)) {
      throw Error(cat({"residual: the global scale of row ", r, " of q is not a power of two"}));
    }
  }
}

std::int64_t count_chosen(std::int32_t per_mille, std::int64_t groups) {
  return (std::int64_t{per_mille} * groups + 999) / 1000;
}

/// 1 for the groups with the largest scores, ties to the lower index.
void choose(const float* scores, std::int64_t groups, std::int64_t count,
            std::vector<std::int32_t>& order, std::uint8_t* chosen) {
  order.resize(static_cast<std::size_t>(groups));
  std::iota(order.begin(), order.end(), 0);
  const auto before = [scores](std::int32_t a, std::int32_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  };
  std::nth_element(order.begin(), order.begin() + count, order.end(), before);
  std::fill(chosen, chosen + groups, std::uint8_t{0});
  for (std::int64_t i = 0; i < count; ++i) chosen[order[static_cast<std::size_t>(i)]] = 1;
}

/// Residuals and scores of all rows.
struct Residuals {
  std::vector<Bf16> values;          // [rows, cols]
  std::vector<float> scores;         // [rows, groups]
  std::vector<std::uint8_t> finite;  // [rows]
};

std::int32_t row_exponent(const ResidualArgs& args, std::int64_t row) {
  return exponent_of(args.q.global.data[row * args.q.global.stride[0]]);
}

template <typename Body>
void for_rows(const ResidualArgs& args, const Body& body) {
  const std::int64_t cols = std::max<std::int64_t>(1, args.x.shape[1]);
  parallel_for(args.x.shape[0], std::max<std::int64_t>(1, kGrainElements / cols), body);
}

Residuals residuals_of(const ResidualArgs& args, Isa isa) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t cols = args.x.shape[1];
  const std::int64_t groups = cols / kGroup;
  Residuals all;
  all.values.resize(static_cast<std::size_t>(rows * cols));
  all.scores.resize(static_cast<std::size_t>(rows * groups));
  all.finite.resize(static_cast<std::size_t>(rows));
  const ResidualKernel kernel = residual_row(isa);
  for_rows(args, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t r = first; r < end; ++r) {
      const Bf16* x = args.x.data + r * args.x.stride[0];
      if (!is_finite(row_amax(x, cols))) continue;
      all.finite[static_cast<std::size_t>(r)] = 1;
      kernel({x, args.q.codes.data + r * args.q.codes.stride[0],
              args.q.scales.data + r * args.q.scales.stride[0], row_exponent(args, r), groups,
              all.values.data() + r * cols, all.scores.data() + r * groups});
    }
  });
  return all;
}

/// Groups that are chosen together.
std::int64_t unit_groups(const ResidualArgs& args) {
  return args.pattern == ResidualPattern::kBlocks ? kResidualBlockCols / kGroup : 1;
}

/// Scores of units, from those of their groups; rows [first, end) are added up.
std::vector<float> unit_scores(const ResidualArgs& args, const Residuals& all, std::int64_t first,
                               std::int64_t end) {
  const std::int64_t groups = args.x.shape[1] / kGroup;
  const std::int64_t together = unit_groups(args);
  std::vector<float> scores(static_cast<std::size_t>((groups + together - 1) / together));
  for (std::int64_t r = first; r < end; ++r) {
    for (std::int64_t g = 0; g < groups; ++g) {
      scores[static_cast<std::size_t>(g / together)] +=
          all.scores[static_cast<std::size_t>(r * groups + g)];
    }
  }
  return scores;
}

/// A choice of units as one of groups.
void spread(const std::uint8_t* units, std::int64_t together, std::int64_t groups,
            std::uint8_t* out) {
  for (std::int64_t g = 0; g < groups; ++g) out[g] = units[g / together];
}

/// One choice for all rows, [groups], or one every `rows_of_tile` rows.
std::vector<std::uint8_t> batch_choice(const ResidualArgs& args, const Residuals& all,
                                       std::int64_t rows_of_tile) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t groups = args.x.shape[1] / kGroup;
  const std::int64_t tiles = (rows + rows_of_tile - 1) / std::max<std::int64_t>(rows_of_tile, 1);
  std::vector<float> scores;
  for (std::int64_t t = 0; t < tiles; ++t) {
    const std::vector<float> more =
        unit_scores(args, all, t * rows_of_tile, std::min(rows, (t + 1) * rows_of_tile));
    scores.insert(scores.end(), more.begin(), more.end());
  }
  const auto units = static_cast<std::int64_t>(scores.size());
  std::vector<std::uint8_t> chosen(scores.size());
  std::vector<std::int32_t> order;
  choose(scores.data(), units, count_chosen(args.per_mille, units), order, chosen.data());
  std::vector<std::uint8_t> out(static_cast<std::size_t>(tiles * groups));
  for (std::int64_t t = 0; t < tiles; ++t) {
    spread(chosen.data() + t * (units / tiles), unit_groups(args), groups, out.data() + t * groups);
  }
  return out;
}

std::int64_t tile_rows(const ResidualArgs& args) {
  return args.pattern == ResidualPattern::kBlocks ? kResidualBlockRows : args.x.shape[0];
}

/// Clears the codes of the two smaller residuals of every four.
void keep_two_of_four(const Bf16* values, std::int64_t cols, std::uint8_t* codes) {
  for (std::int64_t first = 0; first < cols; first += 4) {
    std::uint32_t a[4];
    for (std::int64_t i = 0; i < 4; ++i) a[i] = bits_of(values[first + i]) & 0x7FFFu;
    std::uint32_t keep = 0;
    for (std::uint32_t i = 0; i < 4; ++i) {
      std::uint32_t before = 0;
      for (std::uint32_t j = 0; j < 4; ++j) before += a[j] > a[i] || (a[j] == a[i] && j < i);
      if (before < 2) keep |= 15u << (4 * i);
    }
    std::uint8_t* pair = codes + first / 2;
    pair[0] = static_cast<std::uint8_t>(pair[0] & keep);
    pair[1] = static_cast<std::uint8_t>(pair[1] & keep >> 8);
  }
}

/// Quantizes a row's residual under 2^(n - 2) and clears what was not chosen.
void encode(const ResidualArgs& args, std::int64_t row, const Bf16* values, Simd simd,
            std::vector<std::uint16_t>& amaxes, const std::uint8_t* chosen) {
  const std::int64_t cols = args.x.shape[1];
  QuantizeCounts counts{};
  std::uint8_t* codes = args.out.codes.data + row * args.out.codes.stride[0];
  std::uint8_t* scales = args.out.scales.data + row * args.out.scales.stride[0];
  const EncodeRow<Bf16> encoded{values, cols, global_of_exponent(row_exponent(args, row) - 2),
                                codes, scales};
  if (simd == Simd::kNone) {
    encode_row(encoded, kRule, counts);
  } else {
    block_amaxes(simd, values, cols, static_cast<std::int32_t>(kGroup), amaxes.data());
    encode_row(simd, encoded, kRule, amaxes.data(), counts);
  }
  if (args.pattern == ResidualPattern::kTwoOfFour) keep_two_of_four(values, cols, codes);
  for (std::int64_t g = 0; g < cols / kGroup; ++g) {
    if (chosen[g] != 0) continue;
    scales[g] = 0;
    std::fill_n(codes + g * kGroup / 2, kGroup / 2, std::uint8_t{0});
  }
}

}  // namespace

void residual_on(const ResidualArgs& args, Isa isa) {
  check(args);
  check_global(args);
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t cols = args.x.shape[1];
  check_packed(args.out, "out", rows, cols);
  if (rows == 0 || cols == 0) return;
  const std::int64_t groups = cols / kGroup;
  const Residuals all = residuals_of(args, isa);
  const Simd simd = isa == Isa::kPortable ? Simd::kNone : simd_for(kRule);
  const bool whole = args.pattern == ResidualPattern::kTwoOfFour;
  const ResidualChoice choice = whole ? ResidualChoice::kStatic : args.choice;
  std::vector<std::uint8_t> shared;
  if (choice == ResidualChoice::kBatch) shared = batch_choice(args, all, tile_rows(args));
  if (choice == ResidualChoice::kStatic) {
    for (std::int64_t g = 0; g < groups; ++g) {
      shared.push_back(whole ? 1 : args.chosen.data[g * args.chosen.stride[0]]);
    }
  }
  for_rows(args, [&](std::int64_t first, std::int64_t end) {
    std::vector<std::uint8_t> own(static_cast<std::size_t>(groups)), units(own);
    std::vector<std::int32_t> order;
    std::vector<std::uint16_t> amaxes(static_cast<std::size_t>(groups) + 8);
    const std::vector<std::uint8_t> nothing(static_cast<std::size_t>(groups));
    for (std::int64_t r = first; r < end; ++r) {
      const std::uint8_t* chosen = shared.data();
      if (choice == ResidualChoice::kPerToken) {
        const std::vector<float> scores = unit_scores(args, all, r, r + 1);
        const auto count = static_cast<std::int64_t>(scores.size());
        choose(scores.data(), count, count_chosen(args.per_mille, count), order, units.data());
        spread(units.data(), unit_groups(args), groups, own.data());
        chosen = own.data();
      } else if (choice == ResidualChoice::kBatch) {
        chosen += r / tile_rows(args) * groups;
      }
      if (all.finite[static_cast<std::size_t>(r)] == 0) chosen = nothing.data();
      encode(args, r, all.values.data() + r * cols, simd, amaxes, chosen);
      if (!args.out.global.empty()) {
        args.out.global.data[r * args.out.global.stride[0]] =
            power_of_two(row_exponent(args, r) - 2);
      }
    }
  });
}

std::int64_t residual_workspace(const ResidualArgs& args) {
  const bool whole = args.pattern == ResidualPattern::kTwoOfFour;
  if (args.choice != ResidualChoice::kBatch || whole) return 0;
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t groups = args.x.shape[1] / kGroup;
  const std::int64_t tile = std::max<std::int64_t>(tile_rows(args), 1);
  return rows * groups + (rows + tile - 1) / tile * groups;
}

void residual(const ResidualArgs& args, Stream stream) {
  if (args.x.device.kind == Device::Kind::kCpu) return residual_on(args, best_isa());
  if constexpr (build::has_cuda) {
    check(args);
    const Device here = args.x.device;
    check_packed(args.out, "out", args.x.shape[0], args.x.shape[1]);
    require(args.out.codes.device == here && args.out.scales.device == here &&
                (args.out.global.empty() || args.out.global.device == here) &&
                (args.workspace.empty() || args.workspace.device == here),
            {"residual: out and workspace must be on the device of x"});
    require(args.workspace.empty() || args.workspace.shape[0] >= residual_workspace(args),
            {"residual: workspace has ", args.workspace.shape[0], " numbers, needs ",
             residual_workspace(args)});
    if (args.x.shape[0] > 0 && args.x.shape[1] > 0) residual_cuda(args, stream);
  } else {
    throw Error("residual: x is on a CUDA device, and this build has no CUDA backend");
  }
}

namespace {

std::vector<float> values_of(const PackedView<const std::uint8_t>& codes, const Quantizer& rule,
                             std::int64_t rows, std::int64_t cols) {
  std::vector<float> values(static_cast<std::size_t>(rows * cols));
  dequantize({.codes = codes, .rule = rule, .f32 = {values.data(), {rows, cols}, {cols, 1}}});
  return values;
}

bool all_on(Device device, const PackedView<const std::uint8_t>& packed) {
  const auto lies = [&](const auto& view) { return view.shape[0] == 0 || view.device == device; };
  return lies(packed.codes) && lies(packed.scales) && lies(packed.global) && lies(packed.mantissas);
}

/// At the door of the dense second pass.
void require_together(const char* op, Device device, bool holds) {
  require(holds, {op, ": every view must be on one device"});
  require(device.kind == Device::Kind::kCpu || build::has_cuda,
          {op, ": views are on a CUDA device, and this build has no CUDA backend"});
}

}  // namespace

void residual_of(TensorView<const Bf16, 2> x, const Quantizer& rule,
                 const PackedView<const std::uint8_t>& q, const PackedView<std::uint8_t>& out,
                 TensorView<float, 2> rest, Stream stream) {
  const auto [rows, cols] = x.shape;
  const bool here = x.device.kind == Device::Kind::kCpu;
  require_together(
      "residual_of", x.device,
      all_on(x.device, q) && all_on(x.device, out) && (here || rest.device == x.device));
  if constexpr (build::has_cuda) {
    if (!here) {
      require(rest.shape == x.shape, {"residual_of: rest is [", rest.shape[0], ", ", rest.shape[1],
                                      "], x [", rows, ", ", cols, "]"});
      if (rows == 0 || cols == 0) return;
      residual_rest_cuda(x, rule, q, rest, stream);
      return quantize({.x_f32 = rest, .rule = rule, .out = out}, stream);
    }
  }
  std::vector<float> lost = values_of(q, rule, rows, cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    const Bf16* row = x.data + r * x.stride[0];
    for (std::int64_t c = 0; c < cols; ++c) {
      float& value = lost[static_cast<std::size_t>(r * cols + c)];
      value = to_float(row[c]) - value;
    }
  }
  quantize({.x_f32 = {lost.data(), {rows, cols}, {cols, 1}}, .rule = rule, .out = out});
}

void add_residual(const PackedView<const std::uint8_t>& q,
                  const PackedView<const std::uint8_t>& rest, const Quantizer& rule, float alpha,
                  TensorView<Bf16, 2> out, Stream stream) {
  require_together("add_residual", out.device, all_on(out.device, q) && all_on(out.device, rest));
  const auto [rows, cols] = out.shape;
  if constexpr (build::has_cuda) {
    if (out.device.kind != Device::Kind::kCpu) {
      if (rows == 0 || cols == 0) return;
      return add_residual_cuda(q, rest, rule, alpha, out, stream);
    }
  }
  const std::vector<float> main = values_of(q, rule, rows, cols);
  const std::vector<float> second = values_of(rest, rule, rows, cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    Bf16* row = out.data + r * out.stride[0];
    for (std::int64_t c = 0; c < cols; ++c) {
      const auto at = static_cast<std::size_t>(r * cols + c);
      row[c] = to_bf16(main[at] + alpha * second[at]);
    }
  }
}

void add_product(TensorView<const float, 2> x, float alpha, TensorView<float, 2> y, Stream stream) {
  const std::int64_t cols = y.shape[1];
  require(x.shape == y.shape && x.stride[0] == cols && y.stride[0] == cols,
          {"add_product: x is [", x.shape[0], ", ", x.shape[1], "], y [", y.shape[0], ", ", cols,
           "], both without gaps"});
  require(x.device == y.device, {"add_product: x and y must be on one device"});
  if constexpr (build::has_cuda) {
    if (y.device.kind != Device::Kind::kCpu) return add_product_cuda(x, alpha, y, stream);
  }
  require(y.device.kind == Device::Kind::kCpu,
          {"add_product: x is on a CUDA device, and this build has no CUDA backend"});
  for (std::int64_t i = 0; i < y.shape[0] * cols; ++i) y.data[i] += alpha * x.data[i];
}

std::vector<float> residual_scores(const ResidualArgs& args) {
  ResidualArgs plain = args;
  plain.choice = ResidualChoice::kBatch;
  plain.pattern = ResidualPattern::kChannels;
  check(plain);
  check_global(plain);
  return unit_scores(plain, residuals_of(plain, best_isa()), 0, plain.x.shape[0]);
}

std::vector<std::uint8_t> choose_groups(const std::vector<float>& scores, ResidualPattern pattern,
                                        std::int32_t per_mille) {
  const auto groups = static_cast<std::int64_t>(scores.size());
  const std::int64_t together =
      pattern == ResidualPattern::kBlocks ? kResidualBlockCols / kGroup : 1;
  std::vector<float> units(static_cast<std::size_t>((groups + together - 1) / together));
  for (std::size_t g = 0; g < scores.size(); ++g) {
    units[g / static_cast<std::size_t>(together)] += scores[g];
  }
  const auto count = static_cast<std::int64_t>(units.size());
  std::vector<std::uint8_t> chosen(units.size()), out(scores.size());
  std::vector<std::int32_t> order;
  choose(units.data(), count, count_chosen(per_mille, count), order, chosen.data());
  spread(chosen.data(), together, groups, out.data());
  return out;
}

}  // namespace lockstep::kernels
