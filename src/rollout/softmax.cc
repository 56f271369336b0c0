#include "rollout/softmax.h"

#include <cstring>
#include <vector>

namespace lockstep::rollout {
namespace {

// Sixteen numbers at once, in whatever registers the target has. No fused operation is written
// here, so that targets with and without it agree.
constexpr std::int64_t kLanes = 16;
using Lanes [[gnu::vector_size(64)]] = float;
using Words [[gnu::vector_size(64)]] = std::int32_t;

constexpr float kLowest = -87.0f;         // exp(-87) is still a normal number
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
constexpr float kLog2e = 1.44269504f;
constexpr float kLn2High = 0.693359375f;  // few bits, so that n * kLn2High is exact
constexpr float kLn2Low = -2.12194440e-4f;

[[gnu::always_inline]] inline float max_of(const float* logits, std::int64_t count) {
  float best = logits[0];
  std::int64_t i = 0;
  if (count >= kLanes) {
    Lanes most;
    std::memcpy(&most, logits, sizeof most);
    for (i = kLanes; i + kLanes <= count; i += kLanes) {
      Lanes x;
      std::memcpy(&x, logits + i, sizeof x);
      most = x > most ? x : most;
    }
    for (int lane = 0; lane < kLanes; ++lane) best = most[lane] > best ? most[lane] : best;
  }
  for (; i < count; ++i) best = logits[i] > best ? logits[i] : best;
  return best;
}

[[gnu::always_inline]] inline double exp_of(const float* logits, std::int64_t count,
                                            float temperature, float max, float* out) {
  Lanes sum = {};
  for (std::int64_t i = 0; i < kSoftmaxBlock; i += kLanes) {
    Lanes x;
    if (i + kLanes <= count) {
      std::memcpy(&x, logits + i, sizeof x);
    } else {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        x[lane] = i + lane < count ? logits[i + lane] : 0.0f;
      }
    }
    x = x / temperature - max;
    Words possible = x >= kLowest;
    if (i + kLanes > count) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        if (i + lane >= count) possible[lane] = 0;
      }
    }
    x = x < kLowest ? Lanes{} + kLowest : x;
    const Lanes n = (x * kLog2e + kRounding) - kRounding;
    const Lanes r = (x - n * kLn2High) - n * kLn2Low;
    // exp on [-ln 2 / 2, ln 2 / 2]: degree 7, two units in the last place.
    Lanes p = r * 1.98412698e-4f + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    const Words power = (__builtin_convertvector(n, Words) + 127) << 23;
    Lanes scale;
    std::memcpy(&scale, &power, sizeof scale);
    p = p * scale;
    Words bits;
    std::memcpy(&bits, &p, sizeof bits);
    bits &= possible;
    std::memcpy(&p, &bits, sizeof p);
    std::memcpy(out + i, &p, sizeof p);
    sum = sum + p;
  }
  double total = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) total += static_cast<double>(sum[lane]);
  return total;
}

float max_portable(const float* logits, std::int64_t count) { return max_of(logits, count); }
double exp_portable(const float* logits, std::int64_t count, float temperature, float max,
                    float* out) {
  return exp_of(logits, count, temperature, max, out);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] float max_avx2(const float* logits, std::int64_t count) {
  return max_of(logits, count);
}
[[gnu::target("avx2")]] double exp_avx2(const float* logits, std::int64_t count, float temperature,
                                        float max, float* out) {
  return exp_of(logits, count, temperature, max, out);
}
[[gnu::target("avx512f")]] float max_avx512(const float* logits, std::int64_t count) {
  return max_of(logits, count);
}
[[gnu::target("avx512f")]] double exp_avx512(const float* logits, std::int64_t count,
                                             float temperature, float max, float* out) {
  return exp_of(logits, count, temperature, max, out);
}
#endif

std::vector<SoftmaxOps> supported() {
  std::vector<SoftmaxOps> ops = {{"portable", max_portable, exp_portable}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) ops.push_back({"avx2", max_avx2, exp_avx2});
  if (__builtin_cpu_supports("avx512f")) ops.push_back({"avx512", max_avx512, exp_avx512});
#endif
  return ops;
}

}  // namespace

std::span<const SoftmaxOps> all_softmax_ops() {
  static const std::vector<SoftmaxOps> ops = supported();
  return ops;
}

const SoftmaxOps& softmax_ops() { return all_softmax_ops().back(); }

}  // namespace lockstep::rollout
