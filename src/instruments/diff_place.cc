#include "instruments/diff_place.h"

#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "kernels/exact/audit.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/record_row.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/guided.h"
#include "numerics/scale.h"

namespace lockstep::instruments {
namespace {

constexpr std::int64_t kChunkElements = std::int64_t{1} << 20;  // held at once, some ten times over
constexpr std::int64_t kGrain = 8;                              // rows

/// Codes of a chunk.
struct Coded {
  Coded(std::int64_t rows, std::int64_t width, const Quantizer& rule)
      : wide(rule.is_wide()),
        codes(static_cast<std::size_t>(rows * rule.code_bytes(width))),
        scales(static_cast<std::size_t>(rows * rule.scale_cols(width))),
        global(static_cast<std::size_t>(rows)),
        view{{codes.data(), {rows, rule.code_bytes(width)}, {rule.code_bytes(width), 1}},
             {scales.data(), {rows, rule.scale_cols(width)}, {rule.scale_cols(width), 1}},
             {global.data(), {rows}, {1}}} {}

  /// Of element i of all.
  int magnitude(std::int64_t i) const { return byte(i) & (wide ? 0x7F : 7); }
  bool negative(std::int64_t i) const { return (byte(i) & (wide ? 0x80 : 8)) != 0; }
  int byte(std::int64_t i) const {
    if (wide) return codes[static_cast<std::size_t>(i)];
    return codes[static_cast<std::size_t>(i / 2)] >> (i % 2 * 4);
  }

  bool wide;
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> global;
  PackedView<std::uint8_t> view;
};

/// Sums over a row, over many; rows are added in order, so that threads change no bit.
struct Sums {
  double a = 0, difference = 0;  // squares
  std::int64_t differ = 0, up = 0, down = 0, dead = 0, dead_flips = 0, clipped = 0;
  double boundary = 0, boundary_flips = 0;
  std::int64_t on_grid = 0, flips_on_grid = 0;

  void add(const Sums& other) {
    a += other.a;
    difference += other.difference;
    differ += other.differ;
    up += other.up;
    down += other.down;
    dead += other.dead;
    dead_flips += other.dead_flips;
    clipped += other.clipped;
    boundary += other.boundary;
    boundary_flips += other.boundary_flips;
    on_grid += other.on_grid;
    flips_on_grid += other.flips_on_grid;
  }
};

struct LeftSums {
  std::int64_t differ = 0;
  double squares = 0;
};

double squared(double x) { return x * x; }

/// From |x| / scale to the nearest midpoint between two codes.
double boundary_distance(double z, bool wide) {
  if (wide) {
    const auto worth = [](std::uint32_t m) {
      return static_cast<double>(to_float(static_cast<E4m3>(static_cast<std::uint8_t>(m))));
    };
    const std::uint32_t m = e4m3_bracket(static_cast<float>(z));
    double nearest = std::abs(z - (worth(m) + worth(m + 1)) / 2);
    if (m > 0) nearest = std::min(nearest, std::abs(z - (worth(m - 1) + worth(m)) / 2));
    if (m < 125) nearest = std::min(nearest, std::abs(z - (worth(m + 1) + worth(m + 2)) / 2));
    return nearest;
  }
  double nearest = std::abs(z - 5.0);
  for (const double midpoint : {0.25, 0.75, 1.25, 1.75, 2.5, 3.5}) {
    nearest = std::min(nearest, std::abs(z - midpoint));
  }
  return nearest;
}

class Chunk {
 public:
  Chunk(const PlaceArgs& args, std::int64_t first, std::int64_t rows)
      : args_(args),
        first_(first),
        rows_(rows),
        width_(args.width),
        a_(rows, args.width, args.rule),
        b_(rows, args.width, args.rule),
        rollout_(static_cast<std::size_t>(rows * args.width)),
        operand_(rollout_.size()) {}

  void run(PlaceDiff& sum, std::vector<double>& drift);

  Sums sums{};
  double rollout_squares = 0;
  std::array<double, kModes.size()> left_squares{};

 private:
  TensorView<const Bf16, 2> rows_of(std::span<const Bf16> x) const {
    return {x.data() + first_ * width_, {rows_, width_}, {width_, 1}};
  }
  RowLayout layout(Encoding encoding) const {
    const bool scaled = args_.rule.scale != ScaleFormat::kNone;
    return {encoding, static_cast<std::int32_t>(width_), scaled ? args_.rule.block : 0,
            args_.rule.global == GlobalScale::kPerToken ? 1 : 0};
  }
  std::int64_t quantize(TensorView<const Bf16, 2> x, Coded& out) const;
  std::vector<std::uint8_t> records(const RowLayout& layout) const;
  Sums compare_row(std::int64_t row) const;
  void compare(PlaceDiff& sum, std::vector<double>& drift);
  void guide(std::size_t mode, PlaceDiff& sum);
  void audit(PlaceDiff& sum) const;

  const PlaceArgs& args_;
  std::int64_t first_, rows_, width_;
  Coded a_, b_;
  std::vector<Bf16> rollout_, operand_;  // what A's codes are worth; what B would use
};

/// The blocks that are saturated under a fixed exponent.
std::int64_t Chunk::quantize(TensorView<const Bf16, 2> x, Coded& out) const {
  std::int64_t counts[kernels::kNumQuantizeCounts] = {};
  kernels::quantize({.x = x,
                     .rule = args_.rule,
                     .exponent = args_.exponent,
                     .out = out.view,
                     .counts = {counts, {kernels::kNumQuantizeCounts}, {1}}});
  return counts[kernels::kSaturatedBlocks];
}

std::vector<std::uint8_t> Chunk::records(const RowLayout& layout) const {
  std::vector<std::uint8_t> records(static_cast<std::size_t>(rows_ * layout.bytes()));
  const std::int64_t blocks = args_.rule.scale_cols(width_);
  const std::int64_t bytes = args_.rule.code_bytes(width_);
  parallel_for(rows_, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float global = a_.global[static_cast<std::size_t>(row)];
      kernels::write_record(
          {.codes = a_.codes.data() + row * bytes,
           .scales = a_.scales.data() + row * blocks,
           .cols = static_cast<std::int32_t>(width_),
           .exponent = static_cast<std::int8_t>(layout.exponents > 0 ? exponent_of(global) : 0),
           .wide = args_.rule.is_wide()},
          0, layout, records.data() + row * layout.bytes());
    }
  });
  return records;
}

Sums Chunk::compare_row(std::int64_t row) const {
  Sums sums;
  const Bf16* a = args_.a.data() + (first_ + row) * width_;
  const Bf16* b = args_.b.data() + (first_ + row) * width_;
  const std::int64_t blocks = args_.rule.scale_cols(width_);
  const auto n = args_.rule.global == GlobalScale::kPerToken
                     ? exponent_of(a_.global[static_cast<std::size_t>(row)])
                     : args_.exponent;
  for (std::int64_t i = 0; i < width_; ++i) {
    const auto x = static_cast<double>(to_float(a[i]));
    const auto y = static_cast<double>(to_float(b[i]));
    sums.a += squared(x);
    sums.difference += squared(y - x);
    sums.differ += x != y;
    const std::int64_t element = row * width_ + i;
    const int p = a_.magnitude(element), q = b_.magnitude(element);
    sums.up += q > p;
    sums.down += q < p;
    sums.dead += p == 0 && x != 0.0;
    sums.dead_flips += (p == 0) != (q == 0);
    const std::uint8_t byte =
        blocks == 0 ? std::uint8_t{0}
                    : a_.scales[static_cast<std::size_t>(row * blocks + i / args_.rule.block)];
    const auto scale = static_cast<double>(scale_value(args_.rule, byte, n));
    if (!(scale > 0.0)) continue;
    const double z = std::abs(x) / scale;
    sums.clipped += z > (args_.rule.is_wide() ? 448.0 : 6.0);
    const double distance = boundary_distance(z, args_.rule.is_wide());
    sums.boundary += distance;
    ++sums.on_grid;
    if (p == q && a_.negative(element) == b_.negative(element)) continue;
    sums.boundary_flips += distance;
    ++sums.flips_on_grid;
  }
  return sums;
}

void Chunk::compare(PlaceDiff& sum, std::vector<double>& drift) {
  std::vector<Sums> all(static_cast<std::size_t>(rows_));
  parallel_for(rows_, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      all[static_cast<std::size_t>(row)] = compare_row(row);
    }
  });
  for (std::int64_t row = 0; row < rows_; ++row) {
    const Sums& s = all[static_cast<std::size_t>(row)];
    sums.add(s);
    // A row of zeros that did not stay one has drifted by all that there is.
    const double own = s.difference == 0.0 ? 0.0 : s.a == 0.0 ? 1.0 : std::sqrt(s.difference / s.a);
    drift[static_cast<std::size_t>(first_ + row)] = own;
    if (own > sum.worst) {
      sum.worst = own;
      sum.worst_row = first_ + row;
    }
    if (args_.rule.global != GlobalScale::kPerToken) continue;
    const auto at = static_cast<std::size_t>(row);
    sum.exponent_flips += a_.global[at] != b_.global[at];
  }
}

void Chunk::guide(std::size_t mode, PlaceDiff& sum) {
  Left& left = sum.left[mode];
  const RowLayout kept = layout(encoding_for(kModes[mode], args_.rule));
  const std::vector<std::uint8_t> record = records(kept);
  kernels::guide({.x = rows_of(args_.b),
                  .rule = args_.rule,
                  .guidance = kModes[mode],
                  .layout = kept,
                  .records = {record.data(), {rows_, kept.bytes()}, {kept.bytes(), 1}},
                  .out = {operand_.data(), {rows_, width_}, {width_, 1}},
                  .exponent = args_.exponent});
  left.bytes = kept.bytes();
  for (std::size_t i = 0; i < operand_.size(); ++i) {
    const auto mine = static_cast<double>(to_float(operand_[i]));
    const auto theirs = static_cast<double>(to_float(rollout_[i]));
    left.differ += mine != theirs;
    left_squares[mode] += squared(mine - theirs);
  }
}

/// Of B at its own scale against A's codes; operand_ holds B so rounded.
void Chunk::audit(PlaceDiff& sum) const {
  const RowLayout full = layout(args_.rule.is_wide() ? Encoding::kCodes8 : Encoding::kCodes);
  const std::vector<std::uint8_t> codes = records(full);
  std::int64_t counts[kernels::kNumAuditCounts] = {};
  kernels::audit({.x = rows_of(args_.b),
                  .operand = {operand_.data(), {rows_, width_}, {width_, 1}},
                  .rule = args_.rule,
                  .layout = full,
                  .records = {codes.data(), {rows_, full.bytes()}, {full.bytes(), 1}},
                  .exponent = args_.exponent,
                  .counts = {counts, {kernels::kNumAuditCounts}, {1}}});
  sum.blocks += counts[kernels::kAuditBlocks];
  sum.flips += counts[kernels::kAuditFlips];
  sum.code_flips += counts[kernels::kAuditCodeFlips];
  sum.adjacent += counts[kernels::kAuditAdjacent];
  sum.scale_flips += counts[kernels::kAuditScaleFlips];
  sum.beyond += counts[kernels::kAuditBeyond];
}

void Chunk::run(PlaceDiff& sum, std::vector<double>& drift) {
  sum.saturated_a += quantize(rows_of(args_.a), a_);
  sum.saturated_b += quantize(rows_of(args_.b), b_);
  kernels::dequantize({.codes = a_.view,
                       .rule = args_.rule,
                       .exponent = args_.exponent,
                       .bf16 = {rollout_.data(), {rows_, width_}, {width_, 1}}});
  for (const Bf16 x : rollout_) rollout_squares += squared(static_cast<double>(to_float(x)));
  compare(sum, drift);
  for (std::size_t mode = 0; mode < kModes.size(); ++mode) {
    guide(mode, sum);
    if (kModes[mode] == Guidance::kOwnScale) audit(sum);
  }
  sum.elements += rows_ * width_;
}

double quotient(double a, double b) { return b > 0.0 ? a / b : 0.0; }

}  // namespace

PlaceDiff compare_place(const PlaceArgs& args, std::vector<double>& drift) {
  const auto rows = static_cast<std::int64_t>(args.a.size()) / args.width;
  const std::int64_t step = std::max<std::int64_t>(kChunkElements / args.width, 1);
  PlaceDiff sum{.place = args.place, .width = args.width};
  drift.assign(static_cast<std::size_t>(rows), 0.0);
  Sums all;
  double rollout = 0;
  std::array<double, kModes.size()> left{};
  for (std::int64_t first = 0; first < rows; first += step) {
    Chunk chunk(args, first, std::min(step, rows - first));
    chunk.run(sum, drift);
    all.add(chunk.sums);
    rollout += chunk.rollout_squares;
    for (std::size_t mode = 0; mode < left.size(); ++mode) left[mode] += chunk.left_squares[mode];
  }
  sum.differ = all.differ;
  sum.up = all.up;
  sum.down = all.down;
  sum.dead = all.dead;
  sum.dead_flips = all.dead_flips;
  sum.clipped = all.clipped;
  sum.drift =
      all.difference > 0.0 && all.a == 0.0 ? 1.0 : std::sqrt(quotient(all.difference, all.a));
  sum.boundary = quotient(all.boundary, static_cast<double>(all.on_grid));
  sum.boundary_flips = quotient(all.boundary_flips, static_cast<double>(all.flips_on_grid));
  for (std::size_t mode = 0; mode < left.size(); ++mode) {
    sum.left[mode].l2 = std::sqrt(quotient(left[mode], rollout));
  }
  return sum;
}

}  // namespace lockstep::instruments
