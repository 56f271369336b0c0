/// Guided rounding of E4M3 elements, on a CPU: as guide_cpu.cc, on the grid of FP8.
#include "kernels/exact/guide_rows.h"

namespace lockstep::kernels {
namespace {

/// A code as sign and magnitude apart, for a zero may have been chosen from either side.
struct Chosen {
  bool negative;
  std::uint32_t magnitude;
};

template <Choice kChoice>
Chosen choose(bool negative, float z, std::uint32_t near, std::uint32_t recorded) {
  const std::uint32_t m = e4m3_bracket(z);
  if constexpr (kChoice == Choice::kNearest) return {negative, near};
  if constexpr (kChoice == Choice::kBit) return {negative, guided_by_bit(m, recorded)};
  const auto code = static_cast<E4m3>(static_cast<std::uint8_t>(recorded));
  if constexpr (kChoice == Choice::kCodeGuided) {
    return {negative, guided_by_code(m, negative, code)};
  }
  return {recorded >> 7 != 0, recorded & 0x7Fu};
}

template <Choice kChoice>
std::uint32_t recorded_of(const std::uint8_t* plane, std::int64_t i) {
  if constexpr (kChoice == Choice::kNearest) return 0;
  if constexpr (kChoice == Choice::kBit) return plane[i / 8] >> i % 8 & 1u;
  return plane[i];
}

template <Choice kChoice>
std::int64_t guide_groups(const GuideElements& args) {
  std::int64_t moved = 0;
  for (std::int64_t g = 0; g < args.groups; ++g) {
    const float scale = args.scales[g];
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (std::int64_t i = 16 * g; i < 16 * g + 16; ++i) {
      const std::uint32_t bits = bits_of(args.x[i]);
      const bool negative = (bits & 0x8000u) != 0;
      const float z = float_of((bits & 0x7FFFu) << 16) * inverse;
      const std::uint32_t near = bits_of(to_e4m3(z));
      const std::uint32_t recorded = recorded_of<kChoice>(args.plane, i);
      const Chosen code = choose<kChoice>(negative, z, near, recorded);
      const float value =
          to_float(static_cast<E4m3>(static_cast<std::uint8_t>(code.magnitude))) * scale;
      const std::uint32_t word = float_bits(value) >> 16;
      args.out[i] = static_cast<Bf16>(
          static_cast<std::uint16_t>(word | (word != 0 && code.negative ? 0x8000u : 0u)));
      const bool same_sign = code.negative == negative || code.magnitude == 0;
      moved += scale > 0.0f && (code.magnitude != near || !same_sign);
    }
  }
  return moved;
}

}  // namespace

std::int64_t guide_elements_e4m3(const GuideElements& args) {
  switch (args.choice) {
    case Choice::kNearest: return guide_groups<Choice::kNearest>(args);
    case Choice::kBit: return guide_groups<Choice::kBit>(args);
    case Choice::kCodeGuided: return guide_groups<Choice::kCodeGuided>(args);
    case Choice::kCodeForced: return guide_groups<Choice::kCodeForced>(args);
  }
  return 0;
}

}  // namespace lockstep::kernels
