/// The definition of guided rounding on a CPU: guide_group.h without any further instructions.
#include "kernels/exact/guide_group.h"

namespace lockstep::kernels {

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
