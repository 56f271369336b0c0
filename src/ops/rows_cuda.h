/// The backward passes of a layer's small parts over BF16 rows, by kernels. Each value is computed
/// in FP32 and rounded once; sums over rows have a fixed order.
#pragma once

#include <cstdint>

#include "device/view.h"
#include "numerics/bf16.h"

namespace lockstep::ops::cuda {

/// Rows of partial sums that the weight's gradient is added up from.
std::int64_t norm_parts(Device device);

struct NormBackward {
  const Bf16* x = nullptr;       // [rows, cols]
  const Bf16* weight = nullptr;  // [cols]
  const Bf16* dy = nullptr;      // [rows, cols]
  Bf16* dx = nullptr;            // [rows, cols]
  float* parts = nullptr;        // [norm_parts(), cols] of the weight's gradient
  std::int64_t rows = 0;
  std::int32_t cols = 0;  // even, at most kMostNormCols
  float eps = 0.0f;
};
inline constexpr std::int64_t kMostNormCols = 8192;
void norm_backward(const NormBackward& args, Device device, Stream stream);

/// Of rope(norm(x)) a head: `heads` of them stand side by side in rows of x and dx, which are
/// `stride` apart, and close together in dy.
struct HeadsBackward {
  const Bf16* x = nullptr;
  const Bf16* weight = nullptr;  // [dim]
  const Bf16* dy = nullptr;      // [rows, heads * dim]
  const float* cos = nullptr;    // [positions, dim / 2]
  const float* sin = nullptr;
  const std::int32_t* positions = nullptr;  // [rows]
  Bf16* dx = nullptr;
  float* parts = nullptr;  // [norm_parts(), dim]
  std::int64_t rows = 0;
  std::int64_t stride = 0;
  std::int32_t heads = 0;
  std::int32_t dim = 0;  // even, at most kMostHeadDim
  float eps = 0.0f;
};
inline constexpr std::int64_t kMostHeadDim = 256;
void heads_backward(const HeadsBackward& args, Device device, Stream stream);

/// Row r is pair[r] of the tokens' slots. With a = silu(g) u, rounded as `down_in` or as the
/// rollout's code, and dout = d loss / d a but for the gate:
struct SwigluBackward {
  const float* gate_up = nullptr;      // [rows, 2F] g, then u
  const float* dout = nullptr;         // [rows, F]
  const Bf16* down_in = nullptr;       // [rows, F]
  const float* gates = nullptr;        // [rows] by pair
  const std::int32_t* pair = nullptr;  // [rows]
  Bf16* dgate_up = nullptr;            // [rows, 2F] gate * dout * da
  Bf16* scaled = nullptr;              // [rows, F] gate * down_in
  float* dgates = nullptr;             // [rows] by pair: sum dout * down_in
  std::int64_t rows = 0;
  std::int32_t width = 0;  // F, even
};
void swiglu_backward(const SwigluBackward& args, Device device, Stream stream);

/// The chosen experts' probabilities, of a softmax over all; with `normalize` divided by their sum.
struct Gates {
  const float* logits = nullptr;         // [rows, experts]
  const std::int32_t* chosen = nullptr;  // [rows, slots], distinct in a row
  float* gates = nullptr;                // [rows, slots]
  std::int64_t rows = 0;
  std::int32_t experts = 0;
  std::int32_t slots = 0;
  bool normalize = true;
};
void gates(const Gates& args, Device device, Stream stream);

struct GatesBackward {
  Gates of{};                     // whose gates are read
  const float* dgates = nullptr;  // [rows, slots]
  float* dlogits = nullptr;       // [rows, experts]
};
void gates_backward(const GatesBackward& args, Device device, Stream stream);

/// Rows of `theirs` that are present replace the chosen ones; *mismatched grows by those that are
/// another set.
struct Follow {
  const std::int32_t* theirs = nullptr;  // [rows, slots], distinct in a row
  const std::uint8_t* present = nullptr;
  std::int32_t* chosen = nullptr;            // [rows, slots]
  unsigned long long* mismatched = nullptr;  // or nobody counts
  std::int64_t rows = 0;
  std::int32_t slots = 0;
};
void follow(const Follow& args, Device device, Stream stream);

/// Of each row of logits: log softmax(logits / temperature) of its token, the logarithm of the sum
/// that divides, and the entropy of all.
struct ScoreRows {
  const float* logits = nullptr;       // [rows, vocabulary]
  const float* temperature = nullptr;  // [rows]
  const std::int64_t* token = nullptr;
  float* logp = nullptr;
  float* log_sum = nullptr;
  float* entropy = nullptr;
  std::int64_t rows = 0;
  std::int32_t vocabulary = 0;  // a multiple of four
};
void score_rows(const ScoreRows& args, Device device, Stream stream);

/// d loss / d logits from slope = d loss / d logp, rounded to BF16.
struct ScoreRowsBackward {
  const float* logits = nullptr;
  const float* temperature = nullptr;
  const float* log_sum = nullptr;
  const float* slope = nullptr;  // [rows]
  const std::int64_t* token = nullptr;
  Bf16* d = nullptr;  // [rows, vocabulary]
  std::int64_t rows = 0;
  std::int32_t vocabulary = 0;
};
void score_rows_backward(const ScoreRowsBackward& args, Device device, Stream stream);

}  // namespace lockstep::ops::cuda
