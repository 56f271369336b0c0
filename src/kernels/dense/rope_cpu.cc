#include "kernels/dense/rope_rows.h"

namespace lockstep::kernels {

void rope_portable(const RopeArgs& args, std::int64_t first, std::int64_t end) {
  rope_rows(args, first, end);
}

}  // namespace lockstep::kernels
