#include "kernels/dense/log_softmax_rows.h"

namespace lockstep::kernels {

void log_softmax_portable(const LogSoftmaxArgs& args, std::int64_t first, std::int64_t end) {
  log_softmax_rows(args, first, end);
}

}  // namespace lockstep::kernels
