/// The definition of guided rounding on a CPU, sixteen elements at a time: one walk over a row,
/// on the grid of E2M1 or of E4M3.
#include "kernels/exact/guide_rows.h"

namespace lockstep::kernels {
namespace {

template <typename Grid, Choice kChoice>
std::int64_t guide_groups(const GuideElements& args) {
  std::int64_t moved = 0;
  for (std::int64_t g = 0; g < args.groups; ++g) {
    const float scale = args.scales[g];
    const Grid grid(scale);
    std::uint32_t changed = 0;
    for (std::int64_t i = 16 * g; i < 16 * g + 16; ++i) {
      const Guided guided =
          guide_element<kChoice>(grid, args.x[i], recorded_of<Grid, kChoice>(args.plane, i));
      args.out[i] = static_cast<Bf16>(guided.value);
      changed += guided.moved;
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
