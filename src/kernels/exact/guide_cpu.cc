/// The definition of guided rounding on a CPU, sixteen elements at a time.
#include "kernels/exact/guide_rows.h"

namespace lockstep::kernels {
namespace {

/// The code of element i of a group: 8 for negative, magnitude below.
template <Choice kChoice>
std::uint32_t choose(std::uint32_t negative, std::uint32_t near, std::uint32_t m,
                     std::uint32_t recorded) {
  if constexpr (kChoice == Choice::kNearest) return negative << 3 | near;
  if constexpr (kChoice == Choice::kBit) return negative << 3 | guided_by_bit(m, recorded);
  if constexpr (kChoice == Choice::kCodeGuided) {
    const auto code = static_cast<E2m1>(static_cast<std::uint8_t>(recorded));
    return negative << 3 | guided_by_code(m, negative != 0, code);
  }
  return recorded;
}

template <Choice kChoice>
std::int64_t guide_groups(const GuideElements& args) {
  std::int64_t moved = 0;
  for (std::int64_t g = 0; g < args.groups; ++g) {
    const float scale = args.scales[g];
    const Bf16* x = args.x + g * 16;
    std::uint32_t recorded[16] = {};
    if constexpr (kChoice == Choice::kBit) {
      const std::uint32_t word =
          args.plane[2 * g] | static_cast<std::uint32_t>(args.plane[2 * g + 1]) << 8;
      for (std::uint32_t i = 0; i < 16; ++i) recorded[i] = word >> i & 1u;
    } else if constexpr (kChoice != Choice::kNearest) {
      for (std::uint32_t i = 0; i < 16; ++i)
        recorded[i] = args.plane[8 * g + i / 2] >> i % 2 * 4 & 15u;
    }
    std::uint32_t changed = 0;
    std::uint16_t values[16];
    for (std::uint32_t i = 0; i < 16; ++i) {
      const std::uint32_t bits = bits_of(x[i]);
      const float a = float_of((bits & 0x7FFFu) << 16);
      const std::uint32_t negative = bits >> 15;
      const std::uint32_t m = bracket(a, scale);
      const std::uint32_t near = nearest_in_bracket(a, scale, m);
      const std::uint32_t code = choose<kChoice>(negative, near, m, recorded[i]);
      const std::uint32_t value = float_bits(e2m1_magnitude(code & 7u) * scale) >> 16;
      values[i] = static_cast<std::uint16_t>(value | (value != 0 ? (code & 8u) << 12 : 0u));
      const bool same_sign = code >> 3 == negative || (code & 7u) == 0;
      changed += (code & 7u) != near || !same_sign;
    }
    for (std::uint32_t i = 0; i < 16; ++i) args.out[g * 16 + i] = static_cast<Bf16>(values[i]);
    if (scale > 0.0f) moved += changed;  // under scale 0 every code is 0
  }
  return moved;
}

}  // namespace

std::int64_t guide_elements_portable(const GuideElements& args) {
  switch (args.choice) {
    case Choice::kNearest: return guide_groups<Choice::kNearest>(args);
    case Choice::kBit: return guide_groups<Choice::kBit>(args);
    case Choice::kCodeGuided: return guide_groups<Choice::kCodeGuided>(args);
    case Choice::kCodeForced: return guide_groups<Choice::kCodeForced>(args);
  }
  return 0;
}

}  // namespace lockstep::kernels
