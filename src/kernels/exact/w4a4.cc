#include "kernels/exact/w4a4.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/factor.h"
#include "kernels/exact/items.h"
#include "kernels/exact/w4a4_tile.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/exponent.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr std::int32_t kBlock = 16;
constexpr std::int32_t kMaxCols = 1 << 16;    // 17 * 2304 * 229,376^2 * (2^16 / 16) < 2^63
constexpr std::int64_t kUnitRows = 32;        // unpacked once for all outputs of a unit
constexpr std::int64_t kGrainMacs = 1 << 19;  // below this a thread is not worth waking

[[noreturn]] void fail(std::initializer_list<Piece> message) { throw Error(cat(message)); }

/// For what is checked once a call; in loops the message would be built each time.
void require(bool holds, std::initializer_list<Piece> message) {
  if (!holds) fail(message);
}

bool is_power_of_two(float x) {
  const std::int32_t n = exponent_of(x);
  return n >= kMinExponent - 2 && n <= kMaxExponent && x == power_of_two(n);
}

void check_packed(const char* op, const char* name, const PackedView<const std::uint8_t>& packed) {
  const std::int64_t rows = packed.codes.shape[0];
  const std::int64_t cols = packed.codes.shape[1] * 2;
  require(cols % kBlock == 0 && cols <= kMaxCols,
          {op, ": ", name, " has ", cols, " columns, must be a multiple of ", kBlock, ", at most ",
           kMaxCols});
  require(packed.scales.shape[0] == rows && packed.scales.shape[1] * kBlock == cols,
          {op, ": the scales of ", name, " are [", packed.scales.shape[0], ", ",
           packed.scales.shape[1], "], must be [", rows, ", ", cols / kBlock, "]"});
  require(packed.codes.stride[1] == 1 && packed.scales.stride[1] == 1,
          {op, ": codes and scales of ", name, " must be contiguous along a row"});
  require(packed.global.shape[0] == rows || packed.global.stride[0] == 0,
          {op, ": ", name, " has ", packed.global.shape[0], " global scales, must be ", rows,
           ", or one of stride 0"});
}

float global_of(const PackedView<const std::uint8_t>& packed, std::int64_t row) {
  return packed.global.data[row * packed.global.stride[0]];
}

Factor factor_of(const PackedView<const std::uint8_t>& packed, const Quantizer& rule,
                 std::int64_t row) {
  return as_factor(global_factor(rule, global_of(packed, row)));
}

bool has_fp32_global(const Quantizer& rule) {
  return rule.quantizes() && !rule.global_is_power_of_two;
}

bool is_scale(float global) { return global >= 0.0f && is_finite(global); }

// ---- Weights ----

/// Whether all that the row's codes are worth is 0, whatever the global scale.
bool is_zero(const PackedView<const std::uint8_t>& rows, std::int64_t row) {
  const std::uint8_t* codes = rows.codes.data + row * rows.codes.stride[0];
  const std::uint8_t* scales = rows.scales.data + row * rows.scales.stride[0];
  for (std::int64_t i = 0; i < rows.codes.shape[1]; ++i) {
    if ((codes[i] & 0x77) != 0 && scales[i / (kBlock / 2)] != 0) return false;
  }
  return true;
}

void check_fill(const W4a4Weights& weights, std::int32_t expert, std::int32_t first_row,
                const PackedView<const std::uint8_t>& rows, const Quantizer& rule) {
  check_packed("w4a4_fill", "rows", rows);
  const std::int64_t count = rows.codes.shape[0];
  require(rows.codes.device == weights.device,
          {"w4a4_fill: rows and weights must be on one device"});
  require(rows.codes.shape[1] * 2 == weights.cols,
          {"w4a4_fill: rows have ", rows.codes.shape[1] * 2, " columns, the weights have ",
           weights.cols});
  require(
      expert >= 0 && expert < weights.experts && first_row >= 0 && first_row + count <= weights.out,
      {"w4a4_fill: expert ", expert, ", rows ", first_row, " to ", first_row + count,
       " do not lie in ", weights.experts, " experts of ", weights.out, " rows"});
  if (weights.device.kind == Device::Kind::kCuda) {
    return require(weights.scaled || !has_fp32_global(rule),
                   {"w4a4_fill: the weights are for global scales that are powers of two"});
  }
  w4a4_require(rows, rule);
}

/// Four nibbles to the low halves of four bytes.
std::uint32_t spread(std::uint32_t nibbles) {
  const std::uint32_t pairs = (nibbles | nibbles << 8) & 0x00FF00FFu;
  return (pairs | pairs << 4) & 0x0F0F0F0Fu;
}

/// The low halves of four bytes to four nibbles.
std::uint32_t gathered(std::uint32_t bytes) {
  const std::uint32_t pairs = (bytes & 0x000F000Fu) | (bytes & 0x0F000F00u) >> 4;
  return (pairs & 0xFFu) | pairs >> 8;
}

/// Puts a row of codes into lane `lane` of its tile: eight codes are four bytes there, the first
/// four codes in their low halves and the last four in their high halves.
void fill_row(std::uint8_t* tile, std::int32_t lane, std::int32_t blocks, const std::uint8_t* codes,
              const std::uint8_t* scales) {
  std::uint8_t* tile_scales = tile + std::int64_t{blocks} * 128;
  for (std::int64_t b = 0; b < blocks; ++b) {
    for (std::int64_t half = 0; half < 2; ++half) {
      const std::uint8_t* from = codes + b * (kBlock / 2) + half * 4;
      const std::uint32_t first = spread(from[0] | static_cast<std::uint32_t>(from[1]) << 8);
      const std::uint32_t last = spread(from[2] | static_cast<std::uint32_t>(from[3]) << 8);
      const std::uint32_t word = first | last << 4;
      std::uint8_t* into = tile + b * 128 + half * 64 + lane * 4;
      for (int i = 0; i < 4; ++i) into[i] = static_cast<std::uint8_t>(word >> 8 * i);
    }
    tile_scales[b * kTileOut + lane] = scales[b];
  }
}

Factor weight_factor(const W4a4Weights& weights, std::int32_t expert) {
  Factor factor;
  std::memcpy(&factor.exponent, weights.expert(expert) + kExponentAt, sizeof factor.exponent);
  std::memcpy(&factor.mantissa, weights.expert(expert) + kMantissaAt, sizeof factor.mantissa);
  factor.mantissa += 1.0f;  // exact, as the difference was
  return factor;
}

}  // namespace

void w4a4_require(const PackedView<const std::uint8_t>& rows, const Quantizer& rule) {
  const auto is_good = [&](float global) {
    return rule.global_is_power_of_two ? is_power_of_two(global) : is_scale(global);
  };
  for (std::int64_t r = 0; r < rows.codes.shape[0]; ++r) {
    if (!(is_good(global_of(rows, r)) && global_of(rows, r) == global_of(rows, 0))) {
      fail({"w4a4_fill: the global scale of row ", r, " is ", global_of(rows, r), ", not ",
            rule.global_is_power_of_two ? "the one power of two" : "the one finite number",
            " of the matrix: quantize it under a contract with one scale a matrix"});
    }
    // A scale that was never filled in stands there as 0.
    if (global_of(rows, r) == 0.0f && !is_zero(rows, r)) {
      fail({"w4a4_fill: the global scale of row ", r, " is 0 beside codes that are not"});
    }
    const std::uint8_t* s8 = rows.scales.data + r * rows.scales.stride[0];
    for (std::int64_t b = 0; b < rows.scales.shape[1]; ++b) {
      if (!(s8[b] <= kE4m3Max))
        fail({"w4a4_fill: the scale byte of row ", r, ", block ", b, " is ",
              static_cast<int>(s8[b]), ", must be at most 126"});
    }
  }
}

void w4a4_fill(const W4a4Weights& weights, std::int32_t expert, std::int32_t first_row,
               const PackedView<const std::uint8_t>& rows, Stream stream, const Quantizer& rule) {
  check_fill(weights, expert, first_row, rows, rule);
  const std::int64_t count = rows.codes.shape[0];
  if (count == 0) return;
  if (weights.device.kind == Device::Kind::kCuda) {
    if constexpr (build::has_cuda) {
      return w4a4_fill_cuda(weights, expert, first_row, rows, rule, stream);
    }
    fail({"w4a4_fill: the weights are on a CUDA device, and this build has no CUDA backend"});
  }
  std::byte* base = weights.expert(expert);
  const Factor factor = factor_of(rows, rule, 0);
  std::memcpy(base + kExponentAt, &factor.exponent, sizeof factor.exponent);
  const float less_one = factor.mantissa - 1.0f;
  std::memcpy(base + kMantissaAt, &less_one, sizeof less_one);
  auto* tiles = reinterpret_cast<std::uint8_t*>(base + W4a4Weights::kHeaderBytes);
  for (std::int64_t r = 0; r < count; ++r) {
    const std::int64_t row = first_row + r;
    fill_row(tiles + row / kTileOut * W4a4Weights::tile_bytes(weights.cols),
             static_cast<std::int32_t>(row % kTileOut), weights.cols / kBlock,
             rows.codes.data + r * rows.codes.stride[0],
             rows.scales.data + r * rows.scales.stride[0]);
  }
}

void w4a4_read(const W4a4Weights& weights, std::int32_t expert, std::int32_t row,
               std::span<std::uint8_t> codes, std::span<std::uint8_t> scales) {
  const std::int32_t blocks = weights.cols / kBlock;
  const auto* tile =
      reinterpret_cast<const std::uint8_t*>(weights.expert(expert) + W4a4Weights::kHeaderBytes) +
      row / kTileOut * W4a4Weights::tile_bytes(weights.cols);
  const std::int32_t lane = row % kTileOut;
  std::uint8_t* to = codes.data();
  for (std::int64_t b = 0; b < blocks; ++b) {
    for (std::int64_t half = 0; half < 2; ++half) {
      const std::uint8_t* from = tile + b * 128 + half * 64 + lane * 4;
      std::uint32_t word = 0;
      for (int i = 0; i < 4; ++i) word |= static_cast<std::uint32_t>(from[i]) << 8 * i;
      for (const std::uint32_t nibbles : {gathered(word), gathered(word >> 4)}) {
        *to++ = static_cast<std::uint8_t>(nibbles);
        *to++ = static_cast<std::uint8_t>(nibbles >> 8);
      }
    }
    scales[static_cast<std::size_t>(b)] = tile[std::int64_t{blocks} * 128 + b * kTileOut + lane];
  }
}

// ---- The product ----

namespace {

/// Some items of one expert, times some of its tiles.
struct Unit {
  std::int32_t expert = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int32_t tile = 0;
  std::int32_t tile_end = 0;
};

Items items_of(const W4a4Args& args) { return {args.offsets, args.from, args.to}; }

bool has_residual(const W4a4Args& args) { return !args.residual.codes.empty(); }

void check_shapes(const W4a4Args& args, std::int64_t items) {
  check_packed("w4a4", "a", args.a);
  require(args.a.codes.shape[1] * 2 == args.w.cols,
          {"w4a4: a has ", args.a.codes.shape[1] * 2, " columns, the weights have ", args.w.cols});
  require(args.w.experts > 0 && args.w.out > 0 && args.w.data != nullptr,
          {"w4a4: the weights are empty"});
  require(args.a.codes.device == args.w.device && args.out.device == args.w.device,
          {"w4a4: a, w and out must be on one device"});
  if (args.residual_halvings < 0 || args.residual_halvings > 2) {
    fail({"w4a4: residual_halvings is ", args.residual_halvings, ", must be 0, 1 or 2"});
  }
  if (has_residual(args)) {
    check_packed("w4a4", "residual", args.residual);
    if (!(args.residual.codes.shape == args.a.codes.shape))
      fail({"w4a4: residual has ", args.residual.codes.shape[0], " rows of ",
            args.residual.codes.shape[1] * 2, ", must have the shape of a"});
  }
  require(args.out.shape[1] == args.w.out && (args.out.stride[1] == 1 || args.w.out == 1),
          {"w4a4: out has ", args.out.shape[1], " columns, must be contiguous and ", args.w.out});
  check_item_shapes("w4a4", items_of(args), items, args.w.experts, args.a.codes.shape[0],
                    args.out.shape[0]);
}

void check(const W4a4Args& args, std::int64_t items) {
  check_shapes(args, items);
  require(args.w.device.kind == Device::Kind::kCpu, {"w4a4: a must be on the CPU"});
  for (std::int64_t r = 0; r < args.a.codes.shape[0]; ++r) {
    if (!is_scale(global_of(args.a, r))) {
      fail({"w4a4: the global scale of row ", r, " of a is ", global_of(args.a, r),
            ", must be finite"});
    }
    if (has_residual(args) && factor_of(args.a, args.rule, r).mantissa != 1.0f) {
      fail({"w4a4: the global scale of row ", r, " of a is not a power of two, which a residual ",
            "needs"});
    }
  }
  check_items("w4a4", items_of(args), items, args.w.experts, args.a.codes.shape[0],
              args.out.shape[0]);
}

/// Cuts the work so that threads have units enough, whatever the experts' loads.
std::vector<Unit> units_of(const W4a4Args& args, std::int64_t items) {
  const std::int32_t tiles = (args.w.out + kTileOut - 1) / kTileOut;
  // A unit of few items and many outputs is cut along its outputs.
  const std::int64_t macs = std::min(items, kUnitRows) * args.w.cols * kTileOut;
  const auto step = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(8 * kGrainMacs / std::max<std::int64_t>(macs, 1), 1, tiles));
  std::vector<Unit> units;
  const auto add = [&](std::int32_t expert, std::int64_t first, std::int64_t end) {
    for (; first < end; first += kUnitRows) {
      const std::int64_t count = std::min(kUnitRows, end - first);
      for (std::int32_t t = 0; t < tiles; t += step) {
        units.push_back({expert, first, count, t, std::min(t + step, tiles)});
      }
    }
  };
  if (args.offsets.empty()) {
    add(0, 0, items);
  } else {
    for (std::int32_t e = 0; e < args.w.experts; ++e) {
      add(e, args.offsets.data[e], args.offsets.data[e + 1]);
    }
  }
  return units;
}

/// The activations of a unit's items, unpacked tile by tile.
struct Unpacked {
  std::vector<std::int8_t> a;
  std::vector<BlockInfo> info;
  std::vector<std::int32_t> shift;
  std::vector<float> factor;  // of what the tile leaves
  std::vector<float*> out;

  void resize(std::int64_t rows, std::int64_t parts, std::int64_t blocks) {
    a.resize(static_cast<std::size_t>(rows * parts * blocks * kBlock));
    info.resize(static_cast<std::size_t>(rows * parts * blocks));
    shift.resize(static_cast<std::size_t>(rows));
    factor.resize(static_cast<std::size_t>(rows));
    out.resize(static_cast<std::size_t>(rows));
  }
};

PartialRow partial_row(const PackedView<const std::uint8_t>& packed, std::int64_t row) {
  PartialRow partial;
  partial.codes = packed.codes.data + row * packed.codes.stride[0];
  partial.scales = packed.scales.data + row * packed.scales.stride[0];
  partial.blocks = packed.scales.shape[1];
  return partial;
}

void unpack(const W4a4Args& args, const Unit& unit, const TileBackend& backend, Unpacked& into) {
  const std::int64_t parts = has_residual(args) ? 2 : 1;
  const std::int64_t blocks = args.w.cols / kBlock;
  into.resize(unit.count, parts, blocks);
  const Factor w = weight_factor(args.w, unit.expert);
  for (std::int64_t i = 0; i < unit.count; ++i) {
    const std::int64_t tile = i / kMaxTileRows * kMaxTileRows;
    const std::int64_t rows = std::min<std::int64_t>(kMaxTileRows, unit.count - tile);
    const std::int64_t from = items_of(args).from_row(unit.first + i);
    for (std::int64_t part = 0; part < parts; ++part) {
      PartialRow row = partial_row(part == 0 ? args.a : args.residual, from);
      row.factor = parts == 1 ? 1 : part == 0 ? 4 << args.residual_halvings : -1;
      row.stride = rows * parts;
      const std::int64_t at = tile * parts * blocks + (i - tile) * parts + part;
      row.a = into.a.data() + at * kBlock;
      row.info = into.info.data() + at;
      backend.unpack(row);
    }
    const auto at = static_cast<std::size_t>(i);
    const Factor a = factor_of(args.a, args.rule, from);
    const std::int32_t shift = a.exponent + w.exponent - 20;
    // Below 2^-254 there is nothing left of any sum, and no pair of factors either.
    into.shift[at] = std::max(shift - (parts == 2 ? 2 + args.residual_halvings : 0), -254);
    into.factor[at] = a.mantissa * w.mantissa;
    into.out[at] = args.out.data + items_of(args).to_row(unit.first + i) * args.out.stride[0];
  }
}

/// What global scales leave that are no powers of two.
void scale(const Unpacked& x, std::int64_t first, const Tile& tile) {
  for (std::int32_t r = 0; r < tile.rows; ++r) {
    const float factor = x.factor[static_cast<std::size_t>(first + r)];
    if (factor == 1.0f) continue;
    float* out = tile.out[r] + tile.column;
    for (std::int32_t i = 0; i < tile.width; ++i) out[i] *= factor;
  }
}

void run_unit(const W4a4Args& args, const Unit& unit, const TileBackend& backend) {
  thread_local Unpacked x;
  unpack(args, unit, backend, x);
  const std::int32_t parts = has_residual(args) ? 2 : 1;
  const std::int64_t blocks = args.w.cols / kBlock;
  const auto* tiles =
      reinterpret_cast<const std::uint8_t*>(args.w.expert(unit.expert) + W4a4Weights::kHeaderBytes);
  for (std::int32_t t = unit.tile; t < unit.tile_end; ++t) {
    for (std::int64_t r = 0; r < unit.count; r += kMaxTileRows) {
      Tile tile;
      tile.weights = tiles + t * W4a4Weights::tile_bytes(args.w.cols);
      tile.blocks = static_cast<std::int32_t>(blocks);
      tile.rows = static_cast<std::int32_t>(std::min<std::int64_t>(kMaxTileRows, unit.count - r));
      tile.a = x.a.data() + r * parts * args.w.cols;
      tile.info = x.info.data() + r * parts * blocks;
      tile.shift = x.shift.data() + r;
      tile.out = x.out.data() + r;
      tile.column = t * kTileOut;
      tile.width = std::min(kTileOut, args.w.out - t * kTileOut);
      backend.multiply(tile, parts);
      scale(x, r, tile);
    }
  }
}

}  // namespace

void w4a4_on(const W4a4Args& args, Isa isa) {
  const std::int64_t items = count_items(items_of(args), args.a.codes.shape[0]);
  check(args, items);
  if (items == 0) return;
  const std::vector<Unit> units = units_of(args, items);
  const TileBackend backend = w4a4_backend(isa);
  const std::int64_t macs = items * args.w.cols * args.w.out;
  const auto count = static_cast<std::int64_t>(units.size());
  const std::int64_t grain = std::clamp<std::int64_t>(kGrainMacs * count / macs, 1, count);
  parallel_for(count, grain, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t u = first; u < end; ++u) {
      run_unit(args, units[static_cast<std::size_t>(u)], backend);
    }
  });
}

void w4a4(const W4a4Args& args, Stream stream) {
  if (args.w.device.kind == Device::Kind::kCpu) return w4a4_on(args, best_isa());
  if constexpr (build::has_cuda) {
    const std::int64_t items = count_items(items_of(args), args.a.codes.shape[0]);
    check_shapes(args, items);
    if (items == 0) return;
    if (!args.w.scaled && !has_fp32_global(args.rule)) return w4a4_cuda(args, items, stream);
    const std::int64_t rows = args.a.codes.shape[0];
    require(std::ssize(args.room) >= rows,
            {"w4a4: room has ", args.room.size(), " numbers, FP32 global scales need ", rows});
    require(!has_residual(args), {"w4a4: a residual needs global scales that are powers of two"});
    return w4a4_scaled_cuda(args, items, stream);
  }
  fail({"w4a4: the weights are on a CUDA device, and this build has no CUDA backend"});
}

}  // namespace lockstep::kernels
