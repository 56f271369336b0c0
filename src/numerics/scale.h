/// From amax to scales, and from scales to codes and values: every rule that a Quantizer names.
/// Each function is the order of FP32 operations that its dialect uses; docs/formats/nvfp4.md
/// writes them out.
#pragma once

#include "numerics/e4m3.h"
#include "numerics/e8m0.h"
#include "numerics/exponent.h"
#include "numerics/quantizer.h"

namespace lockstep {

inline constexpr float kFloatMax = 3.40282346638528859811704183484516925e+38f;
inline constexpr float kFloatMinNormal = 0x1p-126f;

/// s8 of an NVFP4 block under the global scale 2^n, nearest even, saturating at 448. amax * 2^-n
/// is exact unless it is far below the smallest scale; an FP32 quotient cannot hide a tie, for a
/// tie times six is an FP32 number itself.
constexpr E4m3 block_scale(float amax, std::int32_t n) {
  return to_e4m3(amax * power_of_two(-n) / 6.0f);
}

/// s8 * 2^n. Exact, and so is every e2m1 * s8 * 2^n in BF16.
constexpr float scale_value(E4m3 s8, std::int32_t n) { return to_float(s8) * power_of_two(n); }

/// A block of the cache, whose exponent does not follow it, is saturated when its s8 would round
/// above 448.
constexpr bool is_saturated(float amax, std::int32_t n) {
  return amax * power_of_two(-n) > 464.0f * 6.0f;
}

/// n of a row, a slot or a matrix with this amax under a power-of-two rule.
constexpr std::int32_t own_exponent(const Quantizer& rule, float amax) {
  return rule.denominator == 256 ? global_exponent_of_256(amax) : global_exponent(amax);
}

/// The global scale of a row or a matrix in the forms that the rules use. Under a power of two
/// they are 2^-n and 2^n; without a global scale both are 1.
struct GlobalNumbers {
  float amax = 0.0f;
  float encode = 1.0f;
  float decode = 1.0f;
  std::int32_t exponent = 0;
};

constexpr GlobalNumbers global_of_exponent(std::int32_t n) {
  return {0.0f, power_of_two(-n), power_of_two(n), n};
}

/// Of a finite amax. Always finite and positive: an amax of 0, or one whose scale leaves FP32, is
/// given the scale 1, as Transformer Engine and compressed-tensors do.
constexpr GlobalNumbers global_of_amax(const Quantizer& rule, float amax) {
  if (rule.is_mx() || rule.global == GlobalScale::kNone) return {};
  if (rule.global_is_power_of_two) {
    GlobalNumbers global = global_of_exponent(own_exponent(rule, amax));
    global.amax = amax;
    return global;
  }
  const float span = static_cast<float>(rule.denominator) * 6.0f;
  GlobalNumbers global;
  global.amax = amax;
  if (amax <= 0.0f) return global;
  if (rule.stored_global == StoredGlobal::kEncode) {
    // A number over a tensor is in PyTorch the tensor's reciprocal times the number.
    const float encode = 1.0f / (amax < kFloatMinNormal ? kFloatMinNormal : amax) * span;
    global.encode = is_finite(encode) ? encode : 1.0f;
    global.decode = 1.0f / global.encode;
    return global;
  }
  const float encode = span / amax;
  const float decode = amax / span;
  global.encode = is_finite(encode) ? encode : kFloatMax;
  global.decode = decode > 0.0f ? decode : 1.0f;
  return global;
}

/// The number that stands beside the codes.
constexpr float stored_global(const Quantizer& rule, const GlobalNumbers& global) {
  if (rule.global_is_power_of_two) return global.decode;
  switch (rule.stored_global) {
    case StoredGlobal::kDecode: return global.decode;
    case StoredGlobal::kEncode: return global.encode;
    case StoredGlobal::kAmax: return global.amax;
  }
  return global.decode;
}

/// The factor of all codes of a row or a matrix, from the number that stands beside them.
constexpr float global_factor(const Quantizer& rule, float stored) {
  if (rule.global_is_power_of_two) return stored;
  switch (rule.stored_global) {
    case StoredGlobal::kDecode: return stored;
    case StoredGlobal::kEncode: return 1.0f / stored;
    case StoredGlobal::kAmax:
      return stored * (1.0f / (static_cast<float>(rule.denominator) * 6.0f));
  }
  return stored;
}

/// ggml's E4M3: half rounds up, subnormals stop at 7, and what rounds to 256 or more becomes 448.
constexpr E4m3 to_e4m3_ggml(float x) {
  if (!(x > 0.0f)) return E4m3{0};
  if (x > 448.0f) x = 448.0f;
  const std::uint32_t bits = float_bits(x);
  const std::int32_t exponent = static_cast<std::int32_t>(bits >> 23) - 127 + 7;
  if (exponent >= 15) return E4m3{kE4m3Max};
  if (exponent <= 0) {
    const auto m = static_cast<std::uint32_t>(x * 512.0f + 0.5f);
    return static_cast<E4m3>(static_cast<std::uint8_t>(m > 7 ? 7 : m));
  }
  const std::uint32_t code =
      (static_cast<std::uint32_t>(exponent) << 3 | (bits >> 20 & 7u)) + (bits >> 19 & 1u);
  return static_cast<E4m3>(static_cast<std::uint8_t>(code >= 15u << 3 ? kE4m3Max : code));
}

constexpr float clamp_scale(float scale, float low) {
  return scale < low ? low : scale > 448.0f ? 448.0f : scale;
}

constexpr MxSpan mx_span(const Quantizer& rule) { return rule.is_wide() ? mx_e4m3() : mx_e2m1(); }

/// What an E8M0 byte multiplies the codes by. E4M3 elements know no scale below 2^-124: a byte
/// below 3 is that of a block of zeros, and whatever stands there is 0.
constexpr float mx_value(const Quantizer& rule, std::uint8_t byte) {
  return rule.is_wide() && byte < 3 ? 0.0f : to_float(static_cast<E8m0>(byte));
}

/// The largest scale byte that a quantizer writes; above it data is damaged.
constexpr std::uint8_t most_scale_byte(const Quantizer& rule) {
  if (!rule.is_mx()) return kE4m3Max;
  return static_cast<std::uint8_t>(mx_span(rule).most + 127);
}

/// What a block's codes are multiplied by, under 2^n where there is a global scale, which is then a
/// power of two.
constexpr float scale_value(const Quantizer& rule, std::uint8_t byte, std::int32_t n) {
  if (rule.scale == ScaleFormat::kNone) return power_of_two(n);
  return rule.is_mx() ? mx_value(rule, byte) : scale_value(static_cast<E4m3>(byte), n);
}

/// The E8M0 byte with byte mod 4 == residue that is nearest to `own`, the lower on a tie: the
/// rollout's wherever the block's maximum drifted by less than a factor of 2, for then its byte is
/// at most one off under every rule.
constexpr std::uint8_t mx_byte_of_residue(const Quantizer& rule, std::uint32_t residue,
                                          std::uint8_t own) {
  const std::int32_t up = (static_cast<std::int32_t>(residue) - own) & 3;
  std::int32_t byte = own + (up >= 2 ? up - 4 : up);
  if (byte < 0) byte += 4;
  const std::int32_t most = most_scale_byte(rule);
  return static_cast<std::uint8_t>(byte > most ? byte - 4 : byte);
}

/// n of a cache under this rule, whose amax a calibration batch showed.
constexpr std::int32_t kv_exponent(const Quantizer& rule, float amax) {
  return rule.is_wide() ? kv_exponent_e4m3(amax) : kv_exponent(amax);
}

/// The scale byte of a block with this amax, finite and not negative.
constexpr std::uint8_t scale_byte(const Quantizer& rule, float amax, const GlobalNumbers& global) {
  switch (rule.scale_rule) {
    case ScaleRule::kMxFloor: return bits_of(mx_scale(amax, MxRule::kFloor, mx_span(rule)));
    case ScaleRule::kMxEven: return bits_of(mx_scale(amax, MxRule::kEven, mx_span(rule)));
    case ScaleRule::kMxCeil: return bits_of(mx_scale(amax, MxRule::kCeil, mx_span(rule)));
    case ScaleRule::kMxRceil: return bits_of(mx_scale(amax, MxRule::kRceil, mx_span(rule)));
    case ScaleRule::kGgml: return bits_of(to_e4m3_ggml(amax / 6.0f));
    case ScaleRule::kExact: return bits_of(block_scale(amax, global.exponent));
    case ScaleRule::kTe: return bits_of(to_e4m3(amax * (global.encode * (1.0f / 6.0f))));
    case ScaleRule::kModelOpt: {
      const float scale = amax / (6.0f * global.decode);
      const bool one = rule.zero_block == ZeroBlock::kOne && scale == 0.0f;
      return bits_of(to_e4m3(clamp_scale(one ? 1.0f : scale, 0x1p-9f)));
    }
    case ScaleRule::kTorchao:
      return bits_of(to_e4m3(clamp_scale(amax / 6.0f / global.decode, 0x1p-6f)));
    case ScaleRule::kCompressedTensors: {
      const std::uint8_t byte = bits_of(to_e4m3(global.encode * (amax / 6.0f)));
      return byte == 0 && rule.zero_block == ZeroBlock::kEighth ? std::uint8_t{0x20} : byte;
    }
  }
  return 0;
}

/// How the elements of one block become codes.
struct BlockCoder {
  CodeRule rule = CodeRule::kExact;
  Tie tie = Tie::kEven;
  SignOfZero sign_of_zero = SignOfZero::kDropped;
  float factor = 0.0f;  // scale, multiplier or divisor, as the rule has it
};

constexpr BlockCoder block_coder(const Quantizer& rule, std::uint8_t byte,
                                 const GlobalNumbers& global) {
  BlockCoder coder{rule.code_rule, rule.tie, rule.sign_of_zero, 0.0f};
  if (rule.is_mx()) {
    coder.factor = mx_value(rule, byte);
    return coder;
  }
  const float scale = to_float(static_cast<E4m3>(byte));
  switch (rule.code_rule) {
    case CodeRule::kExact: coder.factor = scale * global.decode; break;
    case CodeRule::kTe: {
      const float decode = scale * (1.0f / global.encode);
      const float multiplier = decode > 0.0f ? 1.0f / decode : kFloatMax;
      coder.factor = multiplier < kFloatMax ? multiplier : kFloatMax;
      break;
    }
    case CodeRule::kModelOpt: coder.factor = scale * global.decode; break;
    case CodeRule::kCompressedTensors: coder.factor = scale / global.encode; break;
    case CodeRule::kTorchao: coder.factor = 1.0f / global.decode / scale; break;
  }
  return coder;
}

/// Magnitude and sign of zero apart, so that each dialect's sign rule can be applied.
constexpr E2m1 signed_code(bool negative, bool below_zero, std::uint32_t m, SignOfZero rule) {
  const bool keeps =
      m != 0 || rule == SignOfZero::kKept || (rule == SignOfZero::kNegativesKept && below_zero);
  return static_cast<E2m1>(static_cast<std::uint8_t>(m | (negative && keeps ? 8u : 0u)));
}

/// The code of one element. Requires x finite.
constexpr E2m1 code_of(float x, const BlockCoder& coder) {
  const bool negative = (float_bits(x) >> 31) != 0;
  if (coder.rule == CodeRule::kExact) {
    const std::uint32_t m = e2m1_quotient(magnitude(x), coder.factor, coder.tie);
    return signed_code(negative, x < 0.0f, m, coder.sign_of_zero);
  }
  const bool multiplies = coder.rule == CodeRule::kTe || coder.rule == CodeRule::kTorchao;
  const float z = multiplies ? x * coder.factor : x / coder.factor;
  return signed_code(negative, z < 0.0f, e2m1_quotient(magnitude(z), 1.0f, coder.tie),
                     coder.sign_of_zero);
}

/// What a block's codes are multiplied by, in the dialect's order; `global` is the stored number.
constexpr float decode_factor(const Quantizer& rule, std::uint8_t byte, float global) {
  if (rule.is_mx()) return mx_value(rule, byte);
  if (rule.scale == ScaleFormat::kNone) return global;
  const float scale = to_float(static_cast<E4m3>(byte));
  if (rule.global == GlobalScale::kNone) return scale;
  if (rule.global_is_power_of_two) return scale * global;
  switch (rule.stored_global) {
    case StoredGlobal::kDecode: return scale * global;
    case StoredGlobal::kEncode: return scale / global;
    case StoredGlobal::kAmax:
      return scale * global * (1.0f / (static_cast<float>(rule.denominator) * 6.0f));
  }
  return scale * global;
}

}  // namespace lockstep
