/// The ops on torch's CUDA tensors, composed of torch's own and of the house's kernels.
///
/// BF16 numbers lie in BF16 tensors there, so that products run on tensor cores; they are summed in
/// FP32 and rounded once, as on the CPU. The gradients of BF16 activations are BF16 too. No op
/// returns a weight's gradient: it is added in FP32 to w.grad(), which is there. What is added is
/// FP32, but a pass's gradient of experts, which is rounded to BF16 first: torch's grouped product
/// has no other result. Every op gives the same bits each time.
///
/// Declared in every build, defined where there is a CUDA compiler: call behind
/// `if constexpr (build::has_cuda)`. All but the products of experts runs on a CPU's tensors too,
/// for tests.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/attention.h"
#include "ops/block.h"
#include "ops/dense.h"
#include "ops/guide.h"
#include "ops/torch.h"

namespace lockstep::ops::cuda {

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, bool bf16);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& w, double eps);
Heads split_heads(const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm,
                  const RopeTable& rope, const at::Tensor& positions, const HeadShape& shape);
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::vector<Block>& blocks, const AttentionShape& shape);
at::Tensor experts(const at::Tensor& x, const at::Tensor& gates, const at::Tensor& w13,
                   const at::Tensor& w2, const at::Tensor& experts, const Rounding& round_slots);
at::Tensor choose_experts(const at::Tensor& p, std::int64_t k);

/// a b in FP32, and sum += a b. Operands of two types meet in BF16.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);
void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

/// Whether the house's kernels take it.
bool has_kernels(const at::Tensor& x);

/// Where a weight's gradient is added up.
at::Tensor grad_of(const at::Tensor& w);

}  // namespace lockstep::ops::cuda
