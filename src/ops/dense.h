/// The dense parts of a layer, each with its gradient, on the device of their tensors, which are
/// contiguous. With `bf16` results are rounded to BF16 numbers and the gradient of that rounding is
/// the identity. On a CPU all tensors are FP32; ops/cuda.h tells of those on a CUDA device.
#pragma once

#include <memory>

#include "device/view.h"
#include "kernels/dense/rope.h"
#include "ops/torch.h"

namespace lockstep::ops {

/// x * w^T, rounded once.   [T, in], [out, in] -> [T, out]
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, bool bf16);

/// Products outside of graphs, in FP32: a * b into `out`, or a new tensor, or added to `sum`.
void product_out(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out);
at::Tensor product(const at::Tensor& a, const at::Tensor& b);
void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

/// h + o, rounded.   [T, D]
at::Tensor add(const at::Tensor& h, const at::Tensor& o, bool bf16);

/// round(round(x / sqrt(mean(x^2) + eps)) * w).   [T, D], [D] -> [T, D]
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& w, double eps, bool bf16);

/// cos and sin of position * theta^(-2i/C), computed in double.
struct RopeTable {
  RopeTable(std::int64_t positions, std::int64_t head_dim, double theta, Device device = {});
  at::Tensor cos;  // [positions, C / 2]
  at::Tensor sin;
  std::shared_ptr<const kernels::RopeTable> there;  // for kernels, on a CUDA device
};

struct HeadShape {
  std::int64_t heads = 0;     // H
  std::int64_t kv_heads = 0;  // N
  std::int64_t head_dim = 0;  // C
  double eps = 0.0;
  bool bf16 = true;
};

struct Heads {
  at::Tensor q;  // [T, H * C]
  at::Tensor k;  // [T, N * C]
  at::Tensor v;  // [T, N * C]
};

/// What attention reads: q and k after their per-head norm and rotation, and v.
/// qkv [T, (H + 2N) C], q_norm and k_norm [C], positions int32 [T].
Heads split_heads(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm,
                  const RopeTable& rope, const at::Tensor& positions, const HeadShape& shape);

}  // namespace lockstep::ops
