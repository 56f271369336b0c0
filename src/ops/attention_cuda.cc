#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "ops/cuda.h"
#include "ops/device.h"

namespace lockstep::ops::cuda {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using Sequence = std::pair<std::int64_t, std::int64_t>;  // its first row, its rows

std::vector<Sequence> sequences_of(const std::vector<Block>& blocks) {
  std::vector<Sequence> sequences;
  for (const Block& block : blocks) {
    for (std::size_t i = 0; i < block.start.size(); ++i) {
      sequences.emplace_back(block.start[i], block.length[i]);
    }
  }
  std::ranges::sort(sequences);
  return sequences;
}

/// Asks torch for sums in a fixed order, for a scope: only of what has another way, since some
/// ops whose order is fixed anyway then take longer ones.
class InOrder {
 public:
  InOrder() { set(true); }
  ~InOrder() { set(before_); }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;

 private:
  static void set(bool on) { at::globalContext().setDeterministicAlgorithms(on, false); }
  const bool before_ = at::globalContext().deterministicAlgorithms();
};

/// Torch's flash attention on packed rows.
struct Flash : Function<Flash> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& ends, std::int64_t longest) {
    const auto [out, lse, state, unused, mask] =
        at::_flash_attention_forward(q, k, v, ends, ends, longest, longest, 0.0, true, false);
    ctx->save_for_backward({q, k, v, out, lse, ends, state, unused});
    ctx->saved_data["longest"] = longest;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const std::int64_t longest = ctx->saved_data["longest"].toInt();
    const InOrder in_order;
    const auto [dq, dk, dv] = at::_flash_attention_backward(
        grads[0].contiguous(), saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[5],
        longest, longest, 0.0, true, saved[6], saved[7]);
    return {dq, dk, dv, Tensor(), Tensor()};
  }
};

/// In FP32, a sequence at a time, by torch's own gradients.
Tensor plain(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  const std::int64_t t = q.size(0), group = q.size(1) / k.size(1);
  const auto heads = [group](const Tensor& x) {
    return x.to(at::kFloat).transpose(0, 1).repeat_interleave(group, 0);
  };
  const Tensor later = at::ones({t, t}, q.options().dtype(at::kBool)).triu(1);
  const Tensor scores = (q.to(at::kFloat).transpose(0, 1).matmul(heads(k).transpose(1, 2)) * scale)
                            .masked_fill(later, -std::numeric_limits<double>::infinity());
  return scores.softmax(-1).matmul(heads(v)).transpose(0, 1).to(q.scalar_type());
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const std::vector<Block>& blocks, const AttentionShape& shape) {
  const std::int64_t c = shape.head_dim;
  const Tensor hq = q.view({-1, shape.heads, c});
  const Tensor hk = k.view({-1, shape.kv_heads, c}), hv = v.view({-1, shape.kv_heads, c});
  const std::vector<Sequence> sequences = sequences_of(blocks);
  if (q.is_cuda() && q.scalar_type() == at::kBFloat16 && c % 8 == 0 && c <= 256) {
    std::vector<std::int32_t> ends = {0};
    std::int64_t longest = 0;
    for (const auto& [first, rows] : sequences) {
      ends.push_back(static_cast<std::int32_t>(first + rows));
      longest = std::max(longest, rows);
    }
    return Flash::apply(hq, hk, hv, upload(over(ends, at::kInt), q.device()), longest)
        .view(q.sizes());
  }
  std::vector<Tensor> parts;
  for (const auto& [first, rows] : sequences) {
    const auto of = [first = first, rows = rows](const Tensor& x) {
      return x.narrow(0, first, rows);
    };
    parts.push_back(plain(of(hq), of(hk), of(hv), 1.0 / std::sqrt(static_cast<double>(c))));
  }
  return at::cat(parts).view(q.sizes());
}

}  // namespace lockstep::ops::cuda
