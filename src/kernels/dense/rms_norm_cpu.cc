#include "kernels/dense/rms_norm_rows.h"

namespace lockstep::kernels {

void rms_norm_portable(const RmsNormArgs& args, std::int64_t first, std::int64_t end) {
  rms_norm_rows(args, first, end);
}

}  // namespace lockstep::kernels
