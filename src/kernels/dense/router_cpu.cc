#include <algorithm>
#include <span>
#include <vector>

#include "kernels/dense/lanes.h"
#include "kernels/dense/router_rows.h"

namespace lockstep::kernels {
namespace {

/// p = softmax(logits), in FP32.
void softmax(const float* logits, std::span<float> p) {
  const float top = *std::max_element(logits, logits + p.size());
  float sum = 0.0f;
  for (std::size_t e = 0; e < p.size(); ++e) {
    p[e] = exp_fp32(logits[e] - top);
    sum += p[e];
  }
  for (float& value : p) value /= sum;
}

}  // namespace

void router_portable(const RouterArgs& args, std::int64_t first, std::int64_t end) {
  std::vector<float> p(static_cast<std::size_t>(args.logits.shape[1]));
  const auto chosen = static_cast<std::size_t>(args.experts.shape[1]);
  for (std::int64_t row = first; row < end; ++row) {
    std::int32_t* experts = args.experts.data + row * args.experts.stride[0];
    float* gates = args.gates.data + row * args.gates.stride[0];
    softmax(args.logits.data + row * args.logits.stride[0], p);
    float sum = 0.0f;
    for (std::size_t slot = 0; slot < chosen; ++slot) {
      std::size_t best = p.size();  // the lowest that is not yet taken, then what is greater
      for (std::size_t e = 0; e < p.size(); ++e) {
        const bool taken =
            std::find(experts, experts + slot, static_cast<std::int32_t>(e)) != experts + slot;
        if (!taken && (best == p.size() || p[e] > p[best])) best = e;
      }
      experts[slot] = static_cast<std::int32_t>(best);
      gates[slot] = p[best];
      sum += p[best];
    }
    if (!args.normalize) continue;
    for (std::size_t slot = 0; slot < chosen; ++slot) gates[slot] /= sum;
  }
}

}  // namespace lockstep::kernels
