#include "kernels/dense/attention_kernel_cuda.h"

namespace lockstep::kernels {

void launch_attention_bf16(const AttentionParams& p, int dim, int groups, int device,
                           void* stream) {
  launch_format<KvFormat::kBf16>(p, dim, groups, device, stream);
}

}  // namespace lockstep::kernels
