#pragma once

#include <cstdint>

namespace lockstep::rl {

enum class Advantage : std::uint8_t {
  kGrpo,    // (reward - mean) / (std + 1e-6) within the group
  kDrGrpo,  // reward - mean
};

enum class Surrogate : std::uint8_t {
  kPpo,    // max(-r A, -clip(r) A), token by token
  kGspo,   // the same with the response's geometric mean ratio
  kCispo,  // -clip(r) A log pi, the clipped ratio without gradient
  kTbpo,   // GSPO's ratio; A < 0: nothing outside the band
  kAcr,    // PPO whose upper clip follows the truncated correction (QuRL)
  /// -A (min(rho, cap) log pi - sum over the top tokens of c_v log pi_v), rho = pi / pi_roll: the
  /// truncated score less its mean under the rollout, which truncation moves from zero.
  kScoreCentering,
};

/// What stands between the rollout's policy and the update (docs/methods.md): a weight from
/// rho = pi_old / pi_roll, without gradient.
enum class Correction : std::uint8_t {
  kNone,
  kTis,     // min(rho, cap)
  kCis,     // clamp(rho, floor, cap)
  kIcePop,  // rho within [floor, cap], else 0
  kSeqTis,  // min(product of rho, cap), for all tokens of the response
  kAis,     // 1 + lambda (min(rho, cap) - 1), lambda from the batch: our reading, see ais_lambda()
};

/// Which tokens or responses leave the loss. Each rule is off where its bound is 0.
struct Rejection {
  float token_low = 0, token_high = 0;  // MIS: rho outside
  float seq_low = 0, seq_high = 0;      // Seq-MIS: the product of rho outside
  float geo_low = 0, geo_high = 0;      // Geo-RS: its geometric mean outside
  float k3 = 0;                         // K3-RS: mean(rho - 1 - log rho) above
  float veto = 0;                       // any rho below
  float opsm = 0;                       // A < 0 and mean log(pi_old / pi_theta) above
};

enum class Aggregation : std::uint8_t {
  kTokenMean,         // over all response tokens (DAPO)
  kSeqMeanTokenMean,  // over a response's tokens, then over responses (GRPO)
  kSeqMeanTokenSum,   // summed over a response's tokens, over sum_length, then over responses
};

/// Estimators of KL(pi_theta || pi_ref), x = log pi_theta - log pi_ref.
enum class Kl : std::uint8_t {
  kK1,      // x
  kK2,      // x^2 / 2
  kK3,      // exp(-x) - 1 + x
  kK3Plus,  // the value of k3, the gradient of k2
};

struct Options {
  Advantage advantage = Advantage::kGrpo;
  Surrogate surrogate = Surrogate::kPpo;
  float clip_low = 0.2f;
  float clip_high = 0.27f;
  float dual_clip = 0.0f;  // A < 0: the loss is at most -dual_clip * A; 0: off
  Correction correction = Correction::kTis;
  float correction_floor = 0.5f;
  float correction_cap = 5.0f;
  bool correction_batch_norm = false;  // weights over their mean, after truncation
  float ais_ess = 1.0f, ais_k3 = 1.0f, ais_variance = 1.0f;  // lambda's three parts
  float ais_k3_unit = 0.01f, ais_variance_unit = 1.0f;
  Rejection reject{};
  /// DAPO's soft penalty: the reward falls linearly over the last so many of max_new_tokens, by
  /// overlong_penalty_factor at their end; 0: off.
  std::int32_t overlong_buffer_len = 0;
  float overlong_penalty_factor = 1.0f;
  bool mask_truncated = false;  // responses that max_new_tokens cut off leave the loss
  /// The rollout's log-probs stand for the old policy's, so the ratio holds drift and update alike;
  /// a correction would count the drift twice, and is refused.
  bool bypass = false;
  Aggregation aggregation = Aggregation::kSeqMeanTokenMean;
  float sum_length = 1.0f;  // what kSeqMeanTokenSum divides by: 1, or a longest response
  /// Do groups without variance leave the denominator (DAPO's filter)?
  bool drop_flat_groups = false;
  /// Do masked tokens leave the denominator as well? Either way they leave the numerator.
  bool masked_leave_denominator = false;
  float kl_weight = 0.0f;
  Kl kl = Kl::kK3Plus;
  bool kl_off_policy = false;  // times pi_theta / pi_roll, with its gradient
  float triage_tail = 0.5f;    // a metric's: log pi_theta - log pi_roll below minus this is deep
};

}  // namespace lockstep::rl
