/// The ops on torch's CUDA tensors, composed of torch's own and of the house's kernels.
///
/// BF16 numbers lie in BF16 tensors there, so that products run on tensor cores; they are summed in
/// FP32 and rounded once, as on the CPU. The gradients of BF16 activations are BF16 too. No op
/// returns a weight's gradient: it is added in FP32 to w.grad(), which is there. Every op gives the
/// same bits each time.
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
#include "ops/experts.h"
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
                   const at::Tensor& w2, const at::Tensor& experts, const Rounding& round_slots,
                   const Coded& coded, bool any_order);

/// Like that of experts.h, by their logits and as int32: the softmax of equal logits is equal.
at::Tensor choose_experts(const at::Tensor& logits, std::int64_t k);

/// The gates of chosen experts, int32 [T, K], from all logits [T, E] in FP32: their probabilities,
/// divided by their sum with `normalize`.
at::Tensor gates(const at::Tensor& logits, const at::Tensor& chosen, bool normalize);

/// In rows that are present, uint8 [T], theirs replace the chosen; both int32 [T, K]. Rows that are
/// another set are counted in mismatched, int64 [1], if it is defined.
void follow(const at::Tensor& theirs, const at::Tensor& present, const at::Tensor& chosen,
            const at::Tensor& mismatched);

/// a b in FP32, and sum += a b. Operands of two types meet in BF16.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);
void add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

/// Scores of rows of logits [rows, V] by kernels, which want BF16 operands x of the head and V a
/// multiple of four. temperature [rows, 1], token int64 [rows]; written are [rows] each of log
/// softmax(logits / temperature) of the token, the logarithm of its denominator, the entropy.
bool scores_rows(const at::Tensor& x, std::int64_t vocabulary);
void score_rows(const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& token,
                const at::Tensor& logp, const at::Tensor& log_sum, const at::Tensor& entropy);

/// d loss / d logits in BF16 from slope [rows, 1] = d loss / d logp.
at::Tensor score_rows_backward(const at::Tensor& logits, const at::Tensor& temperature,
                               const at::Tensor& token, const at::Tensor& log_sum,
                               const at::Tensor& slope);

/// Whether the house's kernels take it.
bool has_kernels(const at::Tensor& x);

/// ops/device.h; `of` bytes are the device's.
void limit_memory(std::int8_t index, std::int64_t bytes, std::int64_t of);

/// Where a weight's gradient is added up.
at::Tensor grad_of(const at::Tensor& w);

}  // namespace lockstep::ops::cuda
