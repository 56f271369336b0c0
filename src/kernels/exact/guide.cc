#include "kernels/exact/guide.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "device/memory.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/guide_rows.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/quantize_rows.h"
#include "kernels/exact/record_row.h"
#include "numerics/four_over_six.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kGrainElements = 1 << 15;  // below this a thread is not worth waking

using Counts = std::array<std::int64_t, kNumGuideCounts>;

void require(bool holds, std::initializer_list<Piece> message) {
  if (!holds) throw Error(cat(message));
}

GuideShape shape_of(const GuideArgs& args) {
  GuideShape shape{args.x.shape[0], args.x.shape[1]};
  shape.span = shape.cols;
  if (args.layout.width == 0 || shape.cols == 0) return shape;
  if (args.guidance != Guidance::kOwnScale) shape.slots = args.layout.width / shape.cols;
  if (args.layout.exponents > 0) shape.span = args.layout.width / args.layout.exponents;
  return shape;
}

void check_rule(const Quantizer& rule, Guidance guidance) {
  require(rule.quantizes(), {"guide: the rule does not quantize"});
  require(rule.macro_block == 0, {"guide: a record has no mantissas of macro blocks"});
  require(rule.tie == Tie::kEven && rule.sign_of_zero == SignOfZero::kDropped &&
              rule.code_rule == CodeRule::kExact,
          {"guide: the rule is another stack's dialect; guided rounding is defined for contracts "
           "lockstep, mx-*, mxfp8 and fp8"});
  const bool four_over_six = rule.four_over_six != FourOverSix::kOff;
  if (rule.is_wide()) {
    require(!four_over_six, {"guide: FP8 has no four over six"});
    require(rule.is_mx() || (rule.scale == ScaleFormat::kNone &&
                             rule.global == GlobalScale::kStatic && rule.global_is_power_of_two),
            {"guide: E4M3 elements need e8m0 scales, or a static power of two"});
    require(rule.block % 16 == 0 && rule.block_rows == 1,
            {"guide: blocks are ", rule.block, " by ", rule.block_rows,
             ", must be a multiple of 16 by 1"});
    return;
  }
  if (rule.is_mx()) {
    require(!four_over_six, {"guide: MXFP4 has no four over six"});
    require(rule.block == 32, {"guide: MXFP4 has blocks of ", rule.block, ", must be 32"});
    return;
  }
  require(rule.block == 16, {"guide: NVFP4 has blocks of ", rule.block, ", must be 16"});
  require(
      rule.scale == ScaleFormat::kE4m3 && rule.global_is_power_of_two &&
          rule.denominator == (four_over_six ? 256 : 448) && rule.zero_block == ZeroBlock::kZero,
      {"guide: guided rounding needs e4m3 scales under a power-of-two global scale, as contract "
       "lockstep has them"});
  require(rule.global == GlobalScale::kPerToken || rule.global == GlobalScale::kStatic ||
              (rule.global == GlobalScale::kPerTensor && guidance == Guidance::kOwnScale),
          {"guide: one global scale a tensor is for weights, which are not guided"});
}

void check_records(const GuideArgs& args, const GuideShape& shape) {
  const RowLayout& layout = args.layout;
  const Encoding wanted = encoding_for(args.guidance, args.rule);
  require(layout.encoding == wanted,
          {"guide: layout.encoding is ", static_cast<int>(layout.encoding),
           ", this guidance reads ", static_cast<int>(wanted)});
  const std::int32_t block = args.rule.scale == ScaleFormat::kNone ? 0 : args.rule.block;
  require(layout.block == block,
          {"guide: layout.block is ", layout.block, ", the rule's is ", block});
  require(shape.cols > 0 && layout.width >= shape.cols && layout.width % shape.cols == 0 &&
              shape.rows % shape.slots == 0,
          {"guide: layout.width is ", layout.width, ", x is [", shape.rows, ", ", shape.cols,
           "]: a record must cover whole rows"});
  const bool own = args.rule.global == GlobalScale::kPerToken;
  require(own ? layout.exponents > 0 : layout.exponents == 0,
          {"guide: layout.exponents is ", layout.exponents,
           own ? ", must be 1 or the slots of a token" : ", must be 0: the n is the contract's"});
  const std::int64_t records = shape.rows / shape.slots;
  require(args.records.shape[0] == records && args.records.shape[1] == layout.bytes(),
          {"guide: records are [", args.records.shape[0], ", ", args.records.shape[1],
           "], must be [", records, ", ", layout.bytes(), "]"});
  require(args.records.stride[1] == 1 || layout.bytes() == 1,
          {"guide: records must be contiguous along a row"});
  require(args.present.empty() || args.present.shape[0] == records,
          {"guide: present has ", args.present.shape[0], " entries for ", records, " records"});
}

template <typename View>
bool on_device_of_x(const GuideArgs& args, const View& view) {
  return view.empty() || view.device == args.x.device;
}

void check(const GuideArgs& args, const GuideShape& shape) {
  check_rule(args.rule, args.guidance);
  const std::int32_t unit = args.rule.scale == ScaleFormat::kNone ? 16 : args.rule.block;
  require(shape.cols % unit == 0,
          {"guide: x has ", shape.cols, " columns, must be a multiple of ", unit});
  require(args.x.stride[1] == 1 && args.out.stride[1] == 1,
          {"guide: x and out must be contiguous along a row"});
  require(args.out.shape == args.x.shape,
          {"guide: out is [", args.out.shape[0], ", ", args.out.shape[1], "], x is [", shape.rows,
           ", ", shape.cols, "]"});
  require(args.out.device == args.x.device && on_device_of_x(args, args.records) &&
              on_device_of_x(args, args.present) && on_device_of_x(args, args.counts),
          {"guide: x, records, present, out and counts must be on one device"});
  require(
      args.counts.empty() || args.counts.shape[0] == 3 || args.counts.shape[0] == kNumGuideCounts,
      {"guide: counts has ", args.counts.shape[0], " entries, must be 3 or ",
       static_cast<int>(kNumGuideCounts)});
  require(args.exponent >= kMinExponent && args.exponent <= kMaxExponent,
          {"guide: exponent is ", static_cast<int>(args.exponent), ", must be in [-116, 116]"});
  if (args.guidance != Guidance::kOwnScale) check_records(args, shape);
  require(shape.span > 0 || shape.cols == 0, {"guide: layout.exponents exceeds layout.width"});
  require(shape.cols == 0 || (shape.cols % shape.span == 0 && shape.span % unit == 0),
          {"guide: spans of ", shape.span, " elements that share an exponent do not divide the ",
           shape.cols, " columns into blocks"});
}

/// The planes of a record.
struct Record {
  const std::uint8_t* elements = nullptr;
  const std::uint8_t* scales = nullptr;
  const std::uint8_t* maps = nullptr;
  const std::int8_t* exponents = nullptr;
};

Record record_at(const GuideArgs& args, std::int64_t index) {
  const std::uint8_t* bytes = args.records.data + index * args.records.stride[0];
  const std::uint8_t* scales = bytes + args.layout.element_bytes();
  const std::uint8_t* maps = scales + args.layout.scale_bytes();
  return {bytes, scales, maps,
          reinterpret_cast<const std::int8_t*>(maps + args.layout.map_bytes())};
}

/// The BF16 bits of every block's amax; returns the span's, 0x7F80 or more if it holds Inf or NaN.
std::uint16_t amaxes_of(Simd simd, const Bf16* x, std::int64_t span, std::int64_t block,
                        std::uint16_t* amaxes) {
  if (simd != Simd::kNone) {
    return block_amaxes(simd, x, span, static_cast<std::int32_t>(block), amaxes);
  }
  std::uint16_t most = 0;
  for (std::int64_t b = 0; b < span / block; ++b) {
    std::uint16_t here = 0;
    for (std::int64_t i = 0; i < block; ++i) {
      here = std::max(here, static_cast<std::uint16_t>(bits_of(x[b * block + i]) & 0x7FFFu));
    }
    amaxes[b] = here;
    most = std::max(most, here);
  }
  return most;
}

/// Guides rows; one a thread.
class Worker {
 public:
  Worker(const GuideArgs& args, const GuideShape& shape, GuideKernel kernel, Simd simd,
         std::int32_t n)
      : args_(args),
        shape_(shape),
        kernel_(kernel),
        simd_(simd),
        block_(args.rule.scale == ScaleFormat::kNone ? shape.span : args.rule.block),
        blocks_(shape.span / block_),
        matrix_exponent_(n) {
    // block_amaxes() and its users read and write in eights.
    amaxes_.resize(static_cast<std::size_t>(blocks_ + 8));
    scales_.resize(static_cast<std::size_t>(shape.span / 16 + 8));
  }

  void run_record(std::int64_t index) {
    const bool guided = args_.guidance != Guidance::kOwnScale;
    bool covered = guided && (args_.present.empty() ||
                              args_.present.data[index * args_.present.stride[0]] != 0);
    Record record;
    if (covered) {
      record = record_at(args_, index);
      if (is_damaged(args_.rule, args_.layout, record.elements)) {
        covered = false;
        ++counts_[kDamaged];
      }
    }
    if (guided) counts_[covered ? kCovered : kAbsent] += shape_.slots;
    for (std::int64_t slot = 0; slot < shape_.slots; ++slot) {
      const std::int64_t row = index * shape_.slots + slot;
      for (std::int64_t first = 0; first < shape_.cols; first += shape_.span) {
        run_span(row, first, slot * shape_.cols + first, covered ? &record : nullptr);
      }
    }
  }

  const Counts& counts() const { return counts_; }

 private:
  void run_span(std::int64_t row, std::int64_t first, std::int64_t at, const Record* record) {
    const Bf16* x = args_.x.data + row * args_.x.stride[0] + first;
    Bf16* out = args_.out.data + row * args_.out.stride[0] + first;
    const std::uint16_t amax = amaxes_of(simd_, x, shape_.span, block_, amaxes_.data());
    if (amax >= 0x7F80) {
      std::fill(out, out + shape_.span, Bf16{});
      ++counts_[kNonfinite];
      return;
    }
    GuideElements elements{.x = x, .out = out, .groups = shape_.span / 16};
    if (record == nullptr) {
      own_scales(x, to_float(static_cast<Bf16>(amax)));
    } else {
      elements.choice = choice_of(args_.guidance);
      const bool bits = elements.choice == Choice::kBit;
      elements.plane = record->elements + (bits ? at / 8 : args_.rule.code_bytes(at));
      const std::int32_t n =
          args_.layout.exponents > 0 ? record->exponents[at / shape_.span] : args_.exponent;
      if (args_.guidance == Guidance::kLsbScaleMod4) {
        residue_scales(*record, at / block_, n);
      } else {
        recorded_scales(record->scales + at / block_, n);
      }
    }
    elements.scales = scales_.data();
    const std::int64_t moved = kernel_(elements);
    if (record != nullptr) counts_[kMoved] += moved;
  }

  float amax_of(std::int64_t block) const {
    return to_float(static_cast<Bf16>(amaxes_[static_cast<std::size_t>(block)]));
  }

  /// The scale of a block, once for each sixteen elements of it.
  void put(std::int64_t block, float value) {
    const std::int64_t groups = block_ / 16;
    std::fill_n(scales_.begin() + block * groups, groups, value);
  }

  void put_byte(std::int64_t block, std::uint8_t byte, std::int32_t n) {
    put(block, scale_value(args_.rule, byte, n));
  }

  void own_scales(const Bf16* x, float amax) {
    const std::int32_t n = args_.rule.global == GlobalScale::kPerToken
                               ? own_exponent(args_.rule, amax)
                           : args_.rule.global == GlobalScale::kStatic ? args_.exponent
                                                                       : matrix_exponent_;
    const GlobalNumbers global = global_of_exponent(n);
    for (std::int64_t b = 0; b < blocks_; ++b) {
      const bool none = args_.rule.scale == ScaleFormat::kNone;
      put_byte(b,
               none ? std::uint8_t{0}
                    : block_byte(x + b * args_.rule.block, amax_of(b), args_.rule, global),
               n);
    }
  }

  void recorded_scales(const std::uint8_t* bytes, std::int32_t n) {
    for (std::int64_t b = 0; b < blocks_; ++b) {
      put_byte(b, args_.layout.block > 0 ? bytes[b] : std::uint8_t{0}, n);
    }
  }

  void residue_scales(const Record& record, std::int64_t first_block, std::int32_t n) {
    if (args_.layout.block == 0) return recorded_scales(nullptr, n);
    for (std::int64_t b = 0; b < blocks_; ++b) {
      const std::int64_t at = first_block + b;
      const std::uint32_t residue = record.scales[at / 4] >> at % 4 * 2 & 3u;
      if (args_.rule.is_mx()) {
        const std::uint8_t own = scale_byte(args_.rule, amax_of(b), {});
        put_byte(b, mx_byte_of_residue(args_.rule, residue, own), n);
        continue;
      }
      const bool four = args_.layout.map_bytes() > 0 && (record.maps[at / 8] >> at % 8 & 1) != 0;
      const float y = four ? scale_quotient_of_four(amax_of(b), n) : scale_quotient(amax_of(b), n);
      put(b, scale_value(scale_of_residue(residue, y), n));
    }
  }

  const GuideArgs& args_;
  const GuideShape& shape_;
  GuideKernel kernel_;
  Simd simd_;
  std::int64_t block_;   // elements that share a scale
  std::int64_t blocks_;  // of a span
  std::int32_t matrix_exponent_;
  std::vector<std::uint16_t> amaxes_;
  std::vector<float> scales_;
  Counts counts_{};
};

/// n of a matrix whose global scale is its own: over all rows that are finite.
std::int32_t matrix_exponent(const GuideArgs& args) {
  float amax = 0.0f;
  for (std::int64_t r = 0; r < args.x.shape[0]; ++r) {
    const float row = row_amax(args.x.data + r * args.x.stride[0], args.x.shape[1]);
    if (is_finite(row)) amax = std::max(amax, row);
  }
  return own_exponent(args.rule, amax);
}

}  // namespace

namespace {

/// Is it rounding to nearest under a rule that guided rounding knows nothing of?
bool is_unguided(const GuideArgs& args) {
  return args.guidance == Guidance::kOwnScale && args.rule.quantizes() && !args.rule.is_guidable();
}

void round_own(const GuideArgs& args, Stream stream) {
  const auto [rows, cols] = args.x.shape;
  const Quantizer& rule = args.rule;
  const Device device = args.x.device;
  const auto bytes = [device](std::int64_t height, std::int64_t width, const Buffer& own) {
    return TensorView<std::uint8_t, 2>{own.as<std::uint8_t>(), {height, width}, {width, 1}, device};
  };
  const Buffer codes(device, rows * rule.code_bytes(cols), stream);
  const Buffer scales(device, rule.scale_rows(rows) * rule.scale_cols(cols), stream);
  const Buffer mantissas(device, rows * rule.macro_cols(cols), stream);
  const Buffer global(device, rows * std::int64_t{sizeof(float)}, stream);
  const Buffer counts(device, kNumQuantizeCounts * std::int64_t{sizeof(std::int64_t)}, stream);
  fill_bytes(counts.as<void>(), device, 0, counts.bytes(), stream);
  const PackedView<std::uint8_t> packed = {
      .codes = bytes(rows, rule.code_bytes(cols), codes),
      .scales = bytes(rule.scale_rows(rows), rule.scale_cols(cols), scales),
      .global = {global.as<float>(), {rows}, {1}, device},
      .mantissas = bytes(rows, rule.macro_cols(cols), mantissas)};
  quantize({.x = args.x,
            .rule = rule,
            .out = packed,
            .counts = {counts.as<std::int64_t>(), {kNumQuantizeCounts}, {1}, device}},
           stream);
  dequantize({.codes = packed, .rule = rule, .bf16 = args.out}, stream);
  if (args.counts.shape[0] <= kNonfinite) return;
  std::int64_t seen[2] = {};
  std::int64_t* const sum = args.counts.data + kNonfinite * args.counts.stride[0];
  constexpr std::int64_t kSize = sizeof(std::int64_t);
  copy_bytes(&seen[0], {}, counts.as<std::int64_t>() + kNonfiniteRows, device, kSize, stream);
  copy_bytes(&seen[1], {}, sum, device, kSize, stream);
  synchronize(device, stream);
  seen[1] += seen[0];
  copy_bytes(sum, device, &seen[1], {}, kSize, stream);
  synchronize(device, stream);  // `seen` ends here
}

}  // namespace

void guide_on(const GuideArgs& args, Isa isa) {
  if (is_unguided(args)) return round_own(args, {});
  const GuideShape shape = shape_of(args);
  check(args, shape);
  require(args.x.device.kind == Device::Kind::kCpu, {"guide: x must be on the CPU"});
  if (shape.rows == 0 || shape.cols == 0) return;
  const std::int32_t n =
      args.rule.global == GlobalScale::kPerTensor ? matrix_exponent(args) : std::int32_t{0};
  const Simd simd = isa == Isa::kPortable ? Simd::kNone : simd_for(args.rule);
  const GuideKernel kernel = args.rule.is_wide() ? guide_elements_e4m3 : guide_elements(isa);
  const std::int64_t records = shape.rows / shape.slots;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / (shape.slots * shape.cols));
  Counts total{};
  std::mutex mutex;
  parallel_for(records, grain, [&](std::int64_t first, std::int64_t end) {
    Worker worker(args, shape, kernel, simd, n);
    for (std::int64_t r = first; r < end; ++r) worker.run_record(r);
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += worker.counts()[i];
  });
  if (args.counts.empty()) return;
  for (std::int64_t i = 0; i < args.counts.shape[0]; ++i) {
    args.counts.data[i * args.counts.stride[0]] += total[static_cast<std::size_t>(i)];
  }
}

void guide(const GuideArgs& args, Stream stream) {
  if (args.x.device.kind == Device::Kind::kCpu) return guide_on(args, best_isa());
  if constexpr (build::has_cuda) {
    if (is_unguided(args)) return round_own(args, stream);
    const GuideShape shape = shape_of(args);
    check(args, shape);
    if (shape.rows > 0 && shape.cols > 0) guide_cuda(args, shape, stream);
  } else {
    throw Error("guide: x is on a CUDA device, and this build has no CUDA backend");
  }
}

}  // namespace lockstep::kernels
