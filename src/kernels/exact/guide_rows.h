/// What stands behind guide(): elements at given scales on a CPU, rows on a CUDA device. Inside
/// kernels/exact/ only.
#pragma once

#include <cstdint>

#include "kernels/exact/guide.h"
#include "kernels/exact/isa.h"
#include "numerics/guided.h"

namespace lockstep::kernels {

/// How the code is chosen once the scale is known.
enum class Choice : std::uint8_t { kNearest, kBit, kCodeGuided, kCodeForced };

constexpr Choice choice_of(Guidance guidance) {
  switch (guidance) {
    case Guidance::kOwnScale:
    case Guidance::kRolloutScale: return Choice::kNearest;
    case Guidance::kLsbScaleMod4:
    case Guidance::kLsb: return Choice::kBit;
    case Guidance::kFullGuided: return Choice::kCodeGuided;
    case Guidance::kFullForced: return Choice::kCodeForced;
  }
  return Choice::kNearest;
}

/// How rows, records and the spans that share an n lie to each other.
struct GuideShape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t slots = 1;  // rows of a record
  std::int64_t span = 0;   // elements that share an n; cols is a multiple
};

/// Where |x| / scale lies on a grid: the lower end of its bracket, and the end that is nearer.
struct Place {
  std::uint32_t below;
  std::uint32_t near;
};

/// The grids: where a magnitude `a` lies, a code by its bits, what a magnitude is worth.
class OfE2m1 {
 public:
  static constexpr std::uint32_t kSign = 3;
  constexpr explicit OfE2m1(float scale) : scale_(scale) {}
  static constexpr E2m1 code(std::uint32_t bits) {
    return static_cast<E2m1>(static_cast<std::uint8_t>(bits));
  }
  constexpr Place place(float a) const {
    const std::uint32_t m = bracket(a, scale_);
    return {m, nearest_in_bracket(a, scale_, m)};
  }
  constexpr float value(std::uint32_t magnitude) const {
    return e2m1_magnitude(magnitude) * scale_;
  }
  static constexpr std::uint32_t recorded(const std::uint8_t* plane, std::int64_t i) {
    return plane[i / 2] >> i % 2 * 4 & 15u;
  }

 private:
  float scale_;
};

class OfE4m3 {
 public:
  static constexpr std::uint32_t kSign = 7;
  constexpr explicit OfE4m3(float scale)
      : scale_(scale), inverse_(scale > 0.0f ? 1.0f / scale : 0.0f) {}
  static constexpr E4m3 code(std::uint32_t bits) {
    return static_cast<E4m3>(static_cast<std::uint8_t>(bits));
  }
  constexpr Place place(float a) const {
    const float z = a * inverse_;
    return {e4m3_bracket(z), bits_of(to_e4m3(z))};
  }
  constexpr float value(std::uint32_t magnitude) const {
    return to_float(code(magnitude)) * scale_;
  }
  static constexpr std::uint32_t recorded(const std::uint8_t* plane, std::int64_t i) {
    return plane[i];
  }

 private:
  float scale_, inverse_;
};

/// A code as sign and magnitude apart, for a zero may have been chosen from either side.
struct Chosen {
  bool negative;
  std::uint32_t magnitude;
};

template <typename Grid, Choice kChoice>
constexpr Chosen choose(bool negative, const Place& place, std::uint32_t recorded) {
  if constexpr (kChoice == Choice::kNearest) return {negative, place.near};
  if constexpr (kChoice == Choice::kBit) return {negative, guided_by_bit(place.below, recorded)};
  if constexpr (kChoice == Choice::kCodeGuided) {
    return {negative, guided_by_code(place.below, negative, Grid::code(recorded))};
  }
  return {recorded >> Grid::kSign != 0, recorded & ((1u << Grid::kSign) - 1)};
}

/// What is recorded of element i.
template <typename Grid, Choice kChoice>
constexpr std::uint32_t recorded_of(const std::uint8_t* plane, std::int64_t i) {
  if constexpr (kChoice == Choice::kNearest) return 0;
  if constexpr (kChoice == Choice::kBit) return plane[i / 8] >> i % 8 & 1u;
  return Grid::recorded(plane, i);
}

/// The BF16 bits of an element's value, and whether its code is another than the nearest.
struct Guided {
  std::uint16_t value;
  bool moved;
};

template <Choice kChoice, typename Grid>
constexpr Guided guide_element(const Grid& grid, Bf16 x, std::uint32_t recorded) {
  const std::uint32_t bits = bits_of(x);
  const bool negative = (bits & 0x8000u) != 0;
  const Place place = grid.place(float_of((bits & 0x7FFFu) << 16));
  const Chosen code = choose<Grid, kChoice>(negative, place, recorded);
  const std::uint32_t word = float_bits(grid.value(code.magnitude)) >> 16;
  const bool same_sign = code.negative == negative || code.magnitude == 0;
  return {static_cast<std::uint16_t>(word | (word != 0 && code.negative ? 0x8000u : 0u)),
          code.magnitude != place.near || !same_sign};
}

struct GuideElements {
  Choice choice = Choice::kNearest;
  const Bf16* x = nullptr;        // [groups * 16], finite
  Bf16* out = nullptr;            // may be x
  std::int64_t groups = 0;        // of sixteen elements
  const float* scales = nullptr;  // [groups] s8 * 2^n or 2^e, repeated where a block is longer
  const std::uint8_t* plane = nullptr;  // kBit: 2 bytes a group; kCode*: 8, or 16 of E4M3
};

/// Writes the guided values; returns how many codes differ from round-to-nearest.
using GuideKernel = std::int64_t (*)(const GuideElements&);

std::int64_t guide_elements_portable(const GuideElements& args);  // the definition
GuideKernel guide_elements(Isa isa);

/// The same of E4M3 elements; scales are powers of two, or 0.
std::int64_t guide_elements_e4m3(const GuideElements& args);

/// guide() on a CUDA device, of arguments that guide() has checked; at least one row and column.
void guide_cuda(const GuideArgs& args, const GuideShape& shape, Stream stream);

}  // namespace lockstep::kernels
