/// The definition of guided rounding on a CPU, sixteen elements at a time: one walk over a row,
/// on the grid of E2M1 or of E4M3.
#include "kernels/exact/guide_rows.h"

namespace lockstep::kernels {
namespace {

/// A code as sign and magnitude apart, for a zero may have been chosen from either side.
struct Chosen {
  bool negative;
  std::uint32_t magnitude;
};

/// Where |x| / scale lies on a grid: the lower end of its bracket, and the end that is nearer.
struct Place {
  std::uint32_t below;
  std::uint32_t near;
};

/// The grids: where a magnitude `a` lies, a recorded code by its bits, what a magnitude is worth.
struct OfE2m1 {
  static E2m1 code(std::uint32_t bits) {
    return static_cast<E2m1>(static_cast<std::uint8_t>(bits));
  }
  static constexpr std::uint32_t kSign = 3;
  explicit OfE2m1(float scale) : scale_(scale) {}
  Place place(float a) const {
    const std::uint32_t m = bracket(a, scale_);
    return {m, nearest_in_bracket(a, scale_, m)};
  }
  float value(std::uint32_t magnitude) const { return e2m1_magnitude(magnitude) * scale_; }
  static std::uint32_t recorded(const std::uint8_t* plane, std::int64_t i) {
    return plane[i / 2] >> i % 2 * 4 & 15u;
  }

 private:
  float scale_;
};

struct OfE4m3 {
  static E4m3 code(std::uint32_t bits) {
    return static_cast<E4m3>(static_cast<std::uint8_t>(bits));
  }
  static constexpr std::uint32_t kSign = 7;
  explicit OfE4m3(float scale) : scale_(scale), inverse_(scale > 0.0f ? 1.0f / scale : 0.0f) {}
  Place place(float a) const {
    const float z = a * inverse_;
    return {e4m3_bracket(z), bits_of(to_e4m3(z))};
  }
  float value(std::uint32_t magnitude) const { return to_float(code(magnitude)) * scale_; }
  static std::uint32_t recorded(const std::uint8_t* plane, std::int64_t i) { return plane[i]; }

 private:
  float scale_, inverse_;
};

template <typename Grid, Choice kChoice>
Chosen choose(bool negative, const Place& place, std::uint32_t recorded) {
  if constexpr (kChoice == Choice::kNearest) return {negative, place.near};
  if constexpr (kChoice == Choice::kBit) return {negative, guided_by_bit(place.below, recorded)};
  if constexpr (kChoice == Choice::kCodeGuided) {
    return {negative, guided_by_code(place.below, negative, Grid::code(recorded))};
  }
  return {recorded >> Grid::kSign != 0, recorded & ((1u << Grid::kSign) - 1)};
}

template <typename Grid, Choice kChoice>
std::uint32_t recorded_of(const std::uint8_t* plane, std::int64_t i) {
  if constexpr (kChoice == Choice::kNearest) return 0;
  if constexpr (kChoice == Choice::kBit) return plane[i / 8] >> i % 8 & 1u;
  return Grid::recorded(plane, i);
}

template <typename Grid, Choice kChoice>
std::int64_t guide_groups(const GuideElements& args) {
  std::int64_t moved = 0;
  for (std::int64_t g = 0; g < args.groups; ++g) {
    const float scale = args.scales[g];
    const Grid grid(scale);
    std::uint32_t changed = 0;
    for (std::int64_t i = 16 * g; i < 16 * g + 16; ++i) {
      const std::uint32_t bits = bits_of(args.x[i]);
      const bool negative = (bits & 0x8000u) != 0;
      const Place place = grid.place(float_of((bits & 0x7FFFu) << 16));
      const Chosen code =
          choose<Grid, kChoice>(negative, place, recorded_of<Grid, kChoice>(args.plane, i));
      const std::uint32_t word = float_bits(grid.value(code.magnitude)) >> 16;
      args.out[i] = static_cast<Bf16>(
          static_cast<std::uint16_t>(word | (word != 0 && code.negative ? 0x8000u : 0u)));
      const bool same_sign = code.negative == negative || code.magnitude == 0;
      changed += code.magnitude != place.near || !same_sign;
    }
    if (scale > 0.0f) moved += changed;  // under scale 0 every code is 0
  }
  return moved;
}

template <typename Grid>
std::int64_t guide_on_grid(const GuideElements& args) {
  switch (args.choice) {
    case Choice::kNearest: return guide_groups<Grid, Choice::kNearest>(args);
    case Choice::kBit: return guide_groups<Grid, Choice::kBit>(args);
    case Choice::kCodeGuided: return guide_groups<Grid, Choice::kCodeGuided>(args);
    case Choice::kCodeForced: return guide_groups<Grid, Choice::kCodeForced>(args);
  }
  return 0;
}

}  // namespace

std::int64_t guide_elements_portable(const GuideElements& args) {
  return guide_on_grid<OfE2m1>(args);
}

std::int64_t guide_elements_e4m3(const GuideElements& args) { return guide_on_grid<OfE4m3>(args); }

}  // namespace lockstep::kernels
