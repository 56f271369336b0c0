#include "kernels/dense/attention_kernel_cuda.h"

namespace lockstep::kernels {

void launch_attention_nvfp4(const AttentionParams& p, int dim, int groups, int device,
                            void* stream) {
  launch_format<KvFormat::kNvfp4>(p, dim, groups, device, stream);
}

}  // namespace lockstep::kernels
