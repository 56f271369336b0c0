#include "kernels/dense/sample.h"

#include "kernels/dense/check.h"
#include "kernels/dense/sample_rows.h"

namespace lockstep::kernels {

std::int64_t sample_workspace(std::int64_t draws, std::int64_t vocabulary) {
  const std::int64_t blocks = (vocabulary + kSampleBlock - 1) / kSampleBlock;
  return draws * blocks * static_cast<std::int64_t>(2 * sizeof(double));
}

void sample(const SampleArgs& args, Stream stream) {
  const Device device = args.logits.device;
  const std::int64_t rows = args.logits.shape[0];
  const std::int64_t vocabulary = args.logits.shape[1];
  require_shape("sample", "logits", args.logits, rows, vocabulary, device);
  if (!on_cuda("sample", device)) {
    throw Error("sample: logits lie on the CPU, where rollout::Distribution draws tokens");
  }
  const std::int64_t draws = std::ssize(args.tokens);
  if (args.rows.empty() && draws != rows) {
    throw Error(cat({"sample: ", draws, " tokens for ", rows, " rows, and no rows of them"}));
  }
  const auto needs = [&](const char* name, std::size_t count, bool optional) {
    if ((optional && count == 0) || static_cast<std::int64_t>(count) == draws) return;
    throw Error(cat({"sample: ", count, " ", name, " for ", draws, " draws"}));
  };
  needs("rows", args.rows.size(), true);
  needs("seeds", args.seeds.size(), true);
  needs("temperatures", args.temperatures.size(), false);
  needs("names", args.names.size(), false);
  needs("given tokens", args.given.size(), true);
  needs("log-probs", args.logps.size(), false);
  const std::int64_t bytes = sample_workspace(draws, vocabulary);
  const auto at = reinterpret_cast<std::uintptr_t>(args.workspace.data());
  if (vocabulary == 0 || static_cast<std::int64_t>(args.workspace.size()) < bytes ||
      at % alignof(double) != 0) {
    throw Error(cat({"sample: a workspace of ", args.workspace.size(), " bytes at ", at % 256,
                     " past a multiple of 256, for ", draws, " draws of ", vocabulary,
                     "; expected ", bytes, " at a multiple of ", alignof(double)}));
  }
  if constexpr (build::has_cuda) sample_cuda(args, stream);
}

}  // namespace lockstep::kernels
