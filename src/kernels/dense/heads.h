/// What stands between the products of queries, keys and values and attention, as one op.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dense/attention.h"
#include "kernels/dense/rope.h"

namespace lockstep::kernels {

struct PlaceHeadsArgs {
  TensorView<Bf16, 2> qkv;        // [rows, (H + 2 N) * C]: q, k and v side by side, in place
  std::int32_t num_heads = 0;     // H
  std::int32_t num_kv_heads = 0;  // N
  std::int32_t head_dim = 0;      // C
  const RopeTable* table = nullptr;
  std::span<const Bf16> q_norm{}, k_norm{};  // [C]; empty: none
  float eps = 1e-6f;
  PagedKv k;
  PagedKv v;
  PagedRows rows;
  TensorView<std::int64_t, 1> counts{};  // of write_kv()
  std::int32_t* bad = nullptr;           // of first_nonfinite()
};

/// rope() of q and of k, first_nonfinite() of what then is in qkv, write_kv() of k and of v: the
/// same bits everywhere. On a CUDA device one launch for E2M1 and BF16 caches of one rule for K and
/// V, whose rows together take up to 48 KiB as BF16, and heads of 32, 64, 96, 128 or 256, which
/// must not come directly behind one that writes what `rows` and the norms name: it reads those
/// before that ends. Throws Error naming what is wrong.
void place_heads(const PlaceHeadsArgs& args, Stream stream);

}  // namespace lockstep::kernels
