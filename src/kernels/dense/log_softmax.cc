#include "kernels/dense/log_softmax.h"

#include "base/parallel.h"
#include "kernels/dense/check.h"
#include "kernels/dense/isa.h"
#include "kernels/dense/log_softmax_rows.h"

namespace lockstep::kernels {

void log_softmax(const LogSoftmaxArgs& args, Stream) {
  const std::int64_t rows = args.logits.shape[0];
  const std::int64_t cols = args.logits.shape[1];
  require_shape("log_softmax", "logits", args.logits, rows, cols);
  if (cols < 1) throw Error("log_softmax: rows of 0 logits; expected at least 1");
  const auto count = static_cast<std::int64_t>(args.temperature.size());
  if (count != rows || static_cast<std::int64_t>(args.logsumexp.size()) != rows) {
    throw Error(cat({"log_softmax: ", count, " temperatures and ", args.logsumexp.size(),
                     " results for ", rows, " rows"}));
  }
  for (const float temperature : args.temperature) {
    if (!(temperature > 0.0f)) {
      throw Error(cat({"log_softmax: temperature ", temperature, "; expected more than 0"}));
    }
  }
  parallel_for(rows, 1 + (1 << 14) / cols, [&](std::int64_t first, std::int64_t end) {
    switch (isa()) {
      case Isa::kAvx512Bf16:
      case Isa::kAvx512: return log_softmax_avx512(args, first, end);
      case Isa::kAvx2: return log_softmax_avx2(args, first, end);
      case Isa::kPortable: return log_softmax_portable(args, first, end);
    }
  });
}

}  // namespace lockstep::kernels
