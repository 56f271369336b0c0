#include "ops/attention.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "base/build.h"
#include "base/parallel.h"
#include "ops/cuda.h"
#include "ops/round.h"

namespace lockstep::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Packed rows [T, heads * C] -> [B, H, S, C]; each of `heads` is repeated for the H / heads query
/// heads that read it.
Tensor gather(const Tensor& packed, const Block& block, std::int64_t heads,
              const AttentionShape& shape) {
  const std::int64_t c = shape.head_dim;
  const std::int64_t s = block.longest;
  const auto b = static_cast<std::int64_t>(block.start.size());
  const std::int64_t group = shape.heads / heads;
  Tensor out = at::empty({b, shape.heads, s, c}, at::kFloat);
  const float* from = packed.data_ptr<float>();
  float* to = out.data_ptr<float>();
  parallel_for(b * shape.heads, 8, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) {
      const auto sequence = static_cast<std::size_t>(i / shape.heads);
      const std::int64_t head = i % shape.heads / group;
      const float* row = from + (block.start[sequence] * heads + head) * c;
      float* place = to + i * s * c;
      const std::int64_t length = block.length[sequence];
      for (std::int64_t t = 0; t < length; ++t) {
        std::copy_n(row + t * heads * c, c, place + t * c);
      }
      std::fill(place + length * c, place + s * c, 0.0f);
    }
  });
  return out;
}

/// The way back: adds what the query heads of a group say, in their order. Strides are the
/// tensor's own, for the attention op returns a transposed one.
void scatter(const Tensor& blocked, const Block& block, std::int64_t heads,
             const AttentionShape& shape, bool bf16, const Tensor& packed) {
  const std::int64_t c = shape.head_dim;
  const std::int64_t group = shape.heads / heads;
  const std::int64_t of_sequence = blocked.stride(0);
  const std::int64_t of_head = blocked.stride(1);
  const std::int64_t of_token = blocked.stride(2);
  const float* from = blocked.data_ptr<float>();
  float* to = packed.data_ptr<float>();
  const auto sequences = static_cast<std::int64_t>(block.start.size());
  parallel_for(sequences * heads, 8, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) {
      const auto sequence = static_cast<std::size_t>(i / heads);
      const std::int64_t head = i % heads;
      for (std::int64_t t = 0; t < block.length[sequence]; ++t) {
        float* row = to + ((block.start[sequence] + t) * heads + head) * c;
        const float* part = from + i / heads * of_sequence + head * group * of_head + t * of_token;
        std::copy_n(part, c, row);
        for (std::int64_t g = 1; g < group; ++g) {
          for (std::int64_t j = 0; j < c; ++j) row[j] += part[g * of_head + j];
        }
        if (bf16) {
          for (std::int64_t j = 0; j < c; ++j) row[j] = round_bf16(row[j]);
        }
      }
    }
  });
}

using Blocks = std::shared_ptr<const std::vector<Block>>;

/// Lets a graph keep what is not a tensor.
struct Kept : torch::CustomClassHolder {
  Blocks blocks;
  AttentionShape shape;
};

struct Attention : Function<Attention> {
  static constexpr std::size_t kSaved = 5;  // of a block: q, k, v, out, log-sum-exp

  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Blocks& blocks, const AttentionShape& shape) {
    Tensor out = at::empty_like(q);
    variable_list saved;
    for (const Block& block : *blocks) {
      const Tensor bq = gather(q, block, shape.heads, shape);
      const Tensor bk = gather(k, block, shape.kv_heads, shape);
      const Tensor bv = gather(v, block, shape.kv_heads, shape);
      const auto [o, lse] = at::_scaled_dot_product_flash_attention_for_cpu(bq, bk, bv, 0.0, true);
      scatter(o, block, shape.heads, shape, shape.bf16, out);
      saved.insert(saved.end(), {bq, bk, bv, o, lse});
    }
    ctx->save_for_backward(saved);
    auto kept = c10::make_intrusive<Kept>();
    kept->blocks = blocks;
    kept->shape = shape;
    ctx->saved_data["kept"] = c10::IValue::make_capsule(kept);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto kept = ctx->saved_data["kept"].toCapsule();
    const auto* holder = static_cast<const Kept*>(kept.get());
    const Blocks& blocks = holder->blocks;
    const AttentionShape& shape = holder->shape;
    const Tensor grad = grads[0].contiguous();
    const std::int64_t tokens = grad.size(0);
    Tensor dq = at::empty_like(grad);
    Tensor dk = at::empty({tokens, shape.kv_heads * shape.head_dim}, at::kFloat);
    Tensor dv = at::empty_like(dk);
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      const Block& block = (*blocks)[i];
      const auto* part = &saved[i * kSaved];
      const Tensor dout = gather(grad, block, shape.heads, shape);
      const auto [bq, bk, bv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          dout, part[0], part[1], part[2], part[3], part[4], 0.0, true);
      scatter(bq, block, shape.heads, shape, false, dq);
      scatter(bk, block, shape.kv_heads, shape, false, dk);
      scatter(bv, block, shape.kv_heads, shape, false, dv);
    }
    return {dq, dk, dv, Tensor(), Tensor()};
  }
};

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const std::vector<Block>& blocks, const AttentionShape& shape) {
  if constexpr (build::has_cuda) {
    if (q.is_cuda()) return cuda::attention(q, k, v, blocks, shape);
  }
  return Attention::apply(q, k, v, std::make_shared<const std::vector<Block>>(blocks), shape);
}

}  // namespace lockstep::ops
