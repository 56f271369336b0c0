#pragma once

#include "numerics/quantizer.h"
#include "ops/code_matrix.h"
#include "ops/guide.h"
#include "ops/torch.h"

namespace lockstep::ops {

/// The rollout's own product in the forward (QaRL): codes times codes, exactly. The backward is
/// that of the same operands' values.
struct Coded {
  const CodeMatrix* gate_up = nullptr;  // codes of w13; nullptr: no such product
  const CodeMatrix* down = nullptr;     // codes of w2
  Quantizer rule{};                     // of what the experts read
  at::Tensor source{};  // [T, D] BF16 numbers, of which x has the values of the codes
};

/// sum_k gate[t, k] * down_e(swiglu(gate_up_e(x[t]))), e = expert[t, k], in FP32 and slot order,
/// rounded once with `bf16`.
///
/// x [T, D], gates [T, K], w13 [E, 2F, D] (gate over up), w2 [E, D, F], as dense.h; experts int64
/// [T, K], on a CUDA device int32. The inputs of w2 are rounded to BF16 with `bf16`, and then by
/// `round_slots` if there is one: it sees [T * K, F], the slots of a token in a row, or in any
/// order with `any_order`. Their gradient passes it by unchanged. Tokens are sorted by expert, so
/// that each expert is one product.
at::Tensor experts(const at::Tensor& x, const at::Tensor& gates, const at::Tensor& w13,
                   const at::Tensor& w2, const at::Tensor& experts, const Rounding& round_slots,
                   bool bf16, const Coded& coded = {}, bool any_order = false);

/// The K experts of the largest probabilities, in falling order; of equal ones the lower index.
/// p [T, E] -> int64 [T, K]; on a CUDA device ops/cuda.h tells of another one.
at::Tensor choose_experts(const at::Tensor& p, std::int64_t k);

}  // namespace lockstep::ops
