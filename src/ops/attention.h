#pragma once

#include <cstdint>
#include <vector>

#include "ops/block.h"
#include "ops/torch.h"

namespace lockstep::ops {

struct AttentionShape {
  std::int64_t heads = 0;     // H
  std::int64_t kv_heads = 0;  // N
  std::int64_t head_dim = 0;  // C
  bool bf16 = true;           // the result is rounded
};

/// Causal attention within each sequence: softmax(q k^T C^-0.5) v, scores and softmax in FP32.
/// q [T, H * C], k and v [T, N * C] -> [T, H * C]. The blocks together hold every row once.
/// Rows of padding are zero and lie behind a sequence's own, so no row sees them.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::vector<Block>& blocks, const AttentionShape& shape);

}  // namespace lockstep::ops
