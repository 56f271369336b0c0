#include "kernels/exact/quantize.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/quantize_rows.h"
#include "kernels/exact/record_row.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kGrainElements = 1 << 14;  // below this a thread is not worth waking

void require(bool holds, std::initializer_list<Piece> message) {
  if (!holds) throw Error(cat(message));
}

template <typename T>
void require_shape(const TensorView<T, 2>& view, const char* name, std::int64_t rows,
                   std::int64_t cols) {
  require(view.shape[0] == rows && view.shape[1] == cols && (view.data != nullptr || rows == 0),
          {"quantize: ", name, " is [", view.shape[0], ", ", view.shape[1], "], must be [", rows,
           ", ", cols, "]"});
  require(view.stride[1] == 1 || cols <= 1,
          {"quantize: ", name, " has stride ", view.stride[1], " along a row, must be 1"});
}

std::array<std::int64_t, 2> shape_of(const QuantizeArgs& args) {
  return args.x_f32.empty() ? args.x.shape : args.x_f32.shape;
}

Device device_of(const QuantizeArgs& args) {
  return args.x_f32.empty() ? args.x.device : args.x_f32.device;
}

std::int64_t slots_of(const QuantizeArgs& args) {
  const std::int64_t cols = shape_of(args)[1];
  return args.layout.encoding == Encoding::kNone || cols == 0 ? 1 : args.layout.width / cols;
}

void check_records(const QuantizeArgs& args, std::int64_t rows, std::int64_t cols) {
  const RowLayout& layout = args.layout;
  const bool codes =
      layout.encoding != Encoding::kExperts8 && layout.encoding != Encoding::kExperts16;
  require(codes, {"quantize: layout.encoding is for expert ids, must be for codes or scales"});
  require(cols > 0 && layout.width % cols == 0 && layout.width >= cols,
          {"quantize: layout.width is ", layout.width, ", must be a multiple of the ", cols,
           " columns"});
  const std::int64_t slots = slots_of(args);
  require(rows % slots == 0,
          {"quantize: ", rows, " rows do not divide into records of ", slots, " rows each"});
  const std::int32_t block = args.rule.scale == ScaleFormat::kNone ? 0 : args.rule.block;
  require(layout.block == block && (block == 0 || cols % block == 0),
          {"quantize: layout.block is ", layout.block, ", the rule's is ", block});
  require(args.rule.block_rows == 1, {"quantize: blocks of many rows have no records"});
  require(layout.encoding != Encoding::kCodes || !args.rule.is_wide(),
          {"quantize: layout.encoding is codes, must be codes8 for E4M3 elements"});
  require(layout.exponents == 0 || layout.exponents == slots,
          {"quantize: layout.exponents is ", layout.exponents, ", must be 0 or ", slots,
           ", one a row"});
  require((layout.encoding != Encoding::kLsbScaleMod4 &&
           layout.encoding != Encoding::kLsbScaleMod4Map) ||
              args.rule.is_mx() || args.rule.global_is_power_of_two,
          {"quantize: residues mod 4 need a power-of-two global scale"});
  require(
      cols % 8 == 0 || !args.rule.is_wide() || layout.element_bytes() * 8 != layout.width,
      {"quantize: x has ", cols, " columns, must be a multiple of 8 where a record keeps bits"});
  require_shape(args.records, "records", rows / slots, layout.bytes());
}

/// One device for all that is there.
void check_devices(const QuantizeArgs& args) {
  const Device device = device_of(args);
  const auto check = [device](const auto& view, const char* name) {
    require(view.empty() || view.device == device,
            {"quantize: ", name, " is on another device than x"});
  };
  check(args.amax, "amax");
  check(args.out.codes, "out.codes");
  check(args.out.scales, "out.scales");
  check(args.out.global, "out.global");
  check(args.records, "records");
  check(args.nonfinite, "nonfinite");
  check(args.counts, "counts");
}

/// What has no columns: a number a row, or one of all rows.
void check_vectors(const QuantizeArgs& args, std::int64_t rows) {
  const auto& global = args.out.global;
  const std::string_view kind = name_of(args.rule.global);
  if (global.empty()) {
    require(rows == 0 || args.rule.global == GlobalScale::kNone ||
                args.rule.global == GlobalScale::kStatic,
            {"quantize: out.global is empty, under a ", kind, " global scale it must not be"});
  } else if (args.rule.global == GlobalScale::kPerToken) {
    require(global.shape[0] == rows && (global.stride[0] != 0 || rows <= 1),
            {"quantize: out.global is [", global.shape[0], "] of stride ", global.stride[0],
             ", under a ", kind, " global scale it must be [", rows, "] and apart"});
  } else {
    require(global.shape[0] == rows || global.shape[0] == 1,
            {"quantize: out.global is [", global.shape[0], "], must be [", rows, "] or [1]"});
  }
  require(args.nonfinite.empty() || args.nonfinite.shape[0] == rows,
          {"quantize: nonfinite is [", args.nonfinite.shape[0], "], must be [", rows, "]"});
  require(args.counts.empty() || args.counts.shape[0] == kNumQuantizeCounts,
          {"quantize: counts is [", args.counts.shape[0], "], must be [", int{kNumQuantizeCounts},
           "]"});
}

/// E4M3 elements: powers of two alone, in blocks or fixed.
void check_wide(const Quantizer& rule) {
  require(rule.is_mx() || (rule.scale == ScaleFormat::kNone &&
                           rule.global == GlobalScale::kStatic && rule.global_is_power_of_two),
          {"quantize: rule.scale is ", name_of(rule.scale),
           "; e4m3 elements take e8m0 scales, or none under a static power of two"});
  require(rule.block > 0 && rule.block_rows > 0,
          {"quantize: rule.block is ", rule.block, " by ", rule.block_rows});
  require(rule.tie == Tie::kEven && rule.sign_of_zero == SignOfZero::kDropped,
          {"quantize: e4m3 elements are rounded to nearest even, and a zero has no sign"});
}

void check(const QuantizeArgs& args) {
  const auto [rows, cols] = shape_of(args);
  const Quantizer& rule = args.rule;
  require(rule.quantizes(), {"quantize: rule.element is bf16, which has no codes"});
  if (rule.is_wide()) {
    check_wide(rule);
  } else {
    require(rule.scale != ScaleFormat::kNone,
            {"quantize: rule.scale is none, must be e4m3 or e8m0"});
    require(rule.block > 0 && rule.block % 16 == 0 && rule.block_rows == 1,
            {"quantize: rule.block is ", rule.block, " by ", rule.block_rows,
             ", must be a multiple of 16 by 1"});
    require(cols % rule.block == 0, {"quantize: x has ", cols, " columns, must be a multiple of ",
                                     rule.block, ", the block"});
  }
  require(rule.is_mx() || rule.scale_rule != ScaleRule::kExact || rule.global_is_power_of_two,
          {"quantize: rule.scale_rule is exact, which needs a power-of-two global scale"});
  require(rule.is_mx() ==
              (rule.scale_rule >= ScaleRule::kMxFloor && rule.scale_rule <= ScaleRule::kMxRceil),
          {"quantize: rule.scale_rule is ", name_of(rule.scale_rule), ", rule.scale is ",
           name_of(rule.scale), "; the mx rules and e8m0 belong together"});
  require(!rule.is_mx() || rule.code_rule == CodeRule::kExact,
          {"quantize: rule.code_rule is ", name_of(rule.code_rule),
           ", which is of e4m3 scales; under e8m0 it must be exact"});
  require(rule.scale_rule != ScaleRule::kGgml || rule.global == GlobalScale::kNone,
          {"quantize: rule.scale_rule is ggml, which knows no global scale; rule.global is ",
           name_of(rule.global)});
  require(
      rule.four_over_six == FourOverSix::kOff ||
          (rule.scale == ScaleFormat::kE4m3 && rule.scale_rule == ScaleRule::kExact &&
           rule.code_rule == CodeRule::kExact && rule.tie == Tie::kEven && rule.denominator == 256),
      {"quantize: rule.four_over_six needs e4m3 scales of denominator 256 under a power-of-two "
       "global scale, as contract lockstep has them; denominator is ",
       rule.denominator});
  require(args.x.empty() || args.x_f32.empty(), {"quantize: x and x_f32 are both given"});
  require(args.amax.empty() || args.amax.shape[0] == rows,
          {"quantize: amax is [", args.amax.shape[0], "], must be [", rows, "]"});
  check_devices(args);
  if (args.x_f32.empty()) {
    require_shape(args.x, "x", rows, cols);
  } else {
    require_shape(args.x_f32, "x_f32", rows, cols);
    require(args.layout.encoding != Encoding::kBf16,
            {"quantize: BF16 records need BF16 values, and x_f32 was given"});
  }
  require_shape(args.out.codes, "out.codes", rows, rule.code_bytes(cols));
  if (rule.scale != ScaleFormat::kNone) {
    require_shape(args.out.scales, "out.scales", rule.scale_rows(rows), rule.scale_cols(cols));
  }
  check_vectors(args, rows);
  if (args.layout.encoding != Encoding::kNone) check_records(args, rows, cols);
}

template <typename T>
class Rows {
 public:
  Rows(const QuantizeArgs& args, const TensorView<const T, 2>& x)
      : args_(args),
        x_(x),
        cols_(x.shape[1]),
        slots_(slots_of(args)),
        scales_(args.rule.scale_cols(cols_)) {
    if constexpr (std::is_same_v<T, Bf16>) simd_ = simd_for(args.rule);
    if (args.rule.global == GlobalScale::kPerTensor) whole_ = tensor_global();
  }

  void run() const {
    parallel_for(x_.shape[0] / slots_, grain(cols_ * slots_),
                 [&](std::int64_t first, std::int64_t end) {
                   QuantizeCounts counts{};
                   for (std::int64_t group = first; group < end; ++group) record(group, counts);
                   add(counts);
                 });
    const auto& global = args_.out.global;
    if (own_global() || global.empty()) return;
    const std::int64_t apart = global.stride[0] == 0 ? 1 : global.shape[0];
    for (std::int64_t i = 0; i < apart; ++i) put_global(i, global_of(0.0f));
  }

 private:
  const T* x(std::int64_t row) const { return x_.data + row * x_.stride[0]; }

  /// Each row's is its own; else all have one, and one thread writes it.
  bool own_global() const { return args_.rule.global == GlobalScale::kPerToken; }

  /// Inf where the row is not finite. Leaves the blocks' amaxes behind for the SIMD encoder.
  float amax_of(std::int64_t row) const {
    if constexpr (std::is_same_v<T, Bf16>) {
      if (simd_ != Simd::kNone) {
        amaxes_.resize(static_cast<std::size_t>(cols_ / args_.rule.block));
        const std::uint16_t bits =
            block_amaxes(simd_, x(row), cols_, args_.rule.block, amaxes_.data());
        return to_float(static_cast<Bf16>(std::min<std::uint16_t>(bits, 0x7F80u)));
      }
    }
    return row_amax(x(row), cols_);
  }

  /// Of the finite rows: one that is not leaves the others as they are.
  GlobalNumbers tensor_global() const {
    std::atomic<float> most = 0.0f;
    parallel_for(x_.shape[0], grain(cols_), [&](std::int64_t first, std::int64_t end) {
      float here = 0.0f;
      for (std::int64_t row = first; row < end; ++row) {
        const float amax = amax_of(row);
        if (is_finite(amax)) here = std::max(here, amax);
      }
      float seen = most.load();
      while (seen < here && !most.compare_exchange_weak(seen, here)) {
      }
    });
    return global_of_amax(args_.rule, most.load());
  }

  GlobalNumbers global_of(float amax) const {
    return row_global(args_.rule, amax, args_.exponent, args_.static_amax, whole_);
  }

  /// The rows of one record, by one thread: their residues share bytes.
  void record(std::int64_t group, QuantizeCounts& counts) const {
    std::uint8_t* out = nullptr;
    if (args_.layout.encoding != Encoding::kNone) {
      out = args_.records.data + group * args_.records.stride[0];
      std::memset(out, 0, static_cast<std::size_t>(args_.layout.bytes()));
    }
    for (std::int64_t slot = 0; slot < slots_; ++slot) {
      const EncodeRow<T> row = encode(group * slots_ + slot, counts);
      if (out != nullptr) keep(row, static_cast<std::int32_t>(slot), out);
    }
  }

  EncodeRow<T> encode(std::int64_t index, QuantizeCounts& counts) const {
    const float amax = amax_of(index);
    const bool finite = is_finite(amax);
    const EncodeRow<T> row{
        .x = x(index),
        .cols = cols_,
        .global = global_of(finite ? amax : 0.0f),
        .codes = args_.out.codes.data + index * args_.out.codes.stride[0],
        .scales =
            scales_ == 0 ? nullptr : args_.out.scales.data + index * args_.out.scales.stride[0]};
    if (!finite) {
      ++counts[kNonfiniteRows];
      std::memset(row.codes, 0, static_cast<std::size_t>(args_.rule.code_bytes(cols_)));
      if (scales_ > 0) std::memset(row.scales, 0, static_cast<std::size_t>(scales_));
    } else if (simd_ == Simd::kNone) {
      encode_row(row, args_.rule, counts);
    } else if constexpr (std::is_same_v<T, Bf16>) {
      encode_row(simd_, row, args_.rule, amaxes_.data(), counts);
    }
    if (!args_.nonfinite.empty()) args_.nonfinite.data[index * args_.nonfinite.stride[0]] = !finite;
    if (own_global()) put_global(index, row.global);
    return row;
  }

  void keep(const EncodeRow<T>& row, std::int32_t slot, std::uint8_t* out) const {
    if (args_.layout.encoding == Encoding::kBf16) {
      std::uint8_t* to = out + static_cast<std::int64_t>(slot) * cols_ * 2;
      if constexpr (std::is_same_v<T, Bf16>) {
        std::memcpy(to, row.x, static_cast<std::size_t>(cols_) * sizeof(Bf16));
      }
      return;
    }
    write_record({row.codes, row.scales, static_cast<std::int32_t>(cols_),
                  static_cast<std::int8_t>(row.global.exponent), args_.rule.is_wide()},
                 slot, args_.layout, out);
  }

  void put_global(std::int64_t index, const GlobalNumbers& global) const {
    args_.out.global.data[index * args_.out.global.stride[0]] = stored_global(args_.rule, global);
  }

  void add(const QuantizeCounts& counts) const {
    if (args_.counts.empty()) return;
    for (std::int64_t i = 0; i < kNumQuantizeCounts; ++i) {
      std::atomic_ref(args_.counts.data[i * args_.counts.stride[0]])
          .fetch_add(counts[static_cast<std::size_t>(i)], std::memory_order_relaxed);
    }
  }

  static std::int64_t grain(std::int64_t elements) {
    return kGrainElements / std::max<std::int64_t>(elements, 1);
  }

  const QuantizeArgs& args_;
  const TensorView<const T, 2>& x_;
  std::int64_t cols_;
  std::int64_t slots_;
  std::int64_t scales_;  // of a row
  Simd simd_ = Simd::kNone;
  GlobalNumbers whole_{};
  static thread_local std::vector<std::uint16_t> amaxes_;
};

template <typename T>
thread_local std::vector<std::uint16_t> Rows<T>::amaxes_;

void quantize_weight_cpu(TensorView<const float, 2> master, const Quantizer& rule,
                         const PackedView<std::uint8_t>& out) {
  const auto [rows, cols] = master.shape;
  std::vector<Bf16> rounded(static_cast<std::size_t>(rows * cols));
  std::atomic<bool> finite = true;
  parallel_for(rows, kGrainElements / std::max<std::int64_t>(cols, 1),
               [&](std::int64_t first, std::int64_t end) {
                 for (std::int64_t row = first; row < end; ++row) {
                   const float* x = master.data + row * master.stride[0];
                   Bf16* to = rounded.data() + row * cols;
                   for (std::int64_t col = 0; col < cols; ++col) to[col] = to_bf16(x[col]);
                   if (!is_finite(row_amax(to, cols))) finite = false;
                 }
               });
  if (!finite) {
    const auto bad =
        std::find_if_not(rounded.begin(), rounded.end(), [](Bf16 x) { return is_finite(x); });
    throw_nonfinite_weight(bad - rounded.begin(), cols);
  }
  quantize({.x = {rounded.data(), {rows, cols}, {cols, 1}, {}}, .rule = rule, .out = out});
}

}  // namespace

void throw_nonfinite_weight(std::int64_t at, std::int64_t cols) {
  throw Error(cat({"quantize: the weight at row ", at / cols, ", column ", at % cols,
                   " is not a finite BF16 number; it must be before it can have codes"}));
}

void quantize(const QuantizeArgs& args, Stream stream) {
  check(args);
  if (args.rule.macro_block > 0) return quantize_macro(args, stream);
  if (device_of(args).kind == Device::Kind::kCuda) {
    if constexpr (build::has_cuda) return quantize_cuda(args, stream);
    throw Error("quantize: x is on a CUDA device, this build has no CUDA backend");
  }
  if (args.rule.block_rows > 1) return quantize_blocks(args);
  if (args.x_f32.empty()) {
    Rows<Bf16>(args, args.x).run();
  } else {
    Rows<float>(args, args.x_f32).run();
  }
}

void quantize_weight(TensorView<const float, 2> master, const Quantizer& rule,
                     const PackedView<std::uint8_t>& out, Stream stream) {
  if (master.device.kind == Device::Kind::kCpu) return quantize_weight_cpu(master, rule, out);
  if constexpr (build::has_cuda) return quantize_weight_cuda(master, rule, out, stream);
  throw Error("quantize: the weight is on a CUDA device, this build has no CUDA backend");
}

}  // namespace lockstep::kernels
