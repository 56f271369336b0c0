#include "kernels/exact/quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/quantize_rows.h"
#include "kernels/exact/record_row.h"
#include "numerics/exponent.h"

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

std::int64_t slots_of(const QuantizeArgs& args) {
  if (args.layout.encoding == Encoding::kNone || args.x.shape[1] == 0) return 1;
  return args.layout.width / args.x.shape[1];
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
  require(layout.block == args.rule.block,
          {"quantize: layout.block is ", layout.block, ", the rule's is ", args.rule.block});
  require(layout.exponents == 0 || layout.exponents == slots,
          {"quantize: layout.exponents is ", layout.exponents, ", must be 0 or ", slots,
           ", one a row"});
  require(layout.encoding != Encoding::kLsbScaleMod4 || args.rule.global_is_power_of_two,
          {"quantize: residues mod 4 need a power-of-two global scale"});
  require_shape(args.records, "records", rows / slots, layout.bytes());
}

void check(const QuantizeArgs& args) {
  const auto [rows, cols] = args.x.shape;
  const Quantizer& rule = args.rule;
  require(rule.element == Element::kE2m1,
          {"quantize: rule.element is not e2m1; only FP4 has codes here"});
  require(rule.scale != ScaleFormat::kNone, {"quantize: rule.scale is none, must be e4m3 or e8m0"});
  require(rule.block > 0 && rule.block % 16 == 0,
          {"quantize: rule.block is ", rule.block, ", must be a multiple of 16"});
  require(cols % rule.block == 0, {"quantize: x has ", cols, " columns, must be a multiple of ",
                                   rule.block, ", the block"});
  require(rule.four_over_six == FourOverSix::kOff,
          {"quantize: rule.four_over_six is on, which this build does not know"});
  require(args.x.device.kind == Device::Kind::kCpu,
          {"quantize: x is on a CUDA device, this build quantizes on the CPU"});
  require_shape(args.x, "x", rows, cols);
  require_shape(args.out.codes, "out.codes", rows, cols / 2);
  require_shape(args.out.scales, "out.scales", rows, cols / rule.block);
  if (args.layout.encoding != Encoding::kNone) check_records(args, rows, cols);
}

/// The n of a row or matrix with this amax.
RowGlobal global_of(std::uint16_t amax_bits, const QuantizeArgs& args) {
  const float amax = to_float(static_cast<Bf16>(amax_bits));
  if (args.rule.is_mx()) return {};
  if (args.rule.global == GlobalScale::kStatic) return {args.exponent, args.static_amax};
  return {global_exponent(amax), amax};
}

class Rows {
 public:
  explicit Rows(const QuantizeArgs& args) : args_(args), slots_(slots_of(args)) {
    if (args.rule.global == GlobalScale::kPerTensor) whole_ = tensor_global();
  }

  void run() {
    const std::int64_t rows = args_.x.shape[0];
    const std::int64_t cols = args_.x.shape[1];
    const std::int64_t grain = kGrainElements / std::max<std::int64_t>(cols * slots_, 1);
    parallel_for(rows / slots_, grain, [&](std::int64_t first, std::int64_t end) {
      QuantizeCounts counts{};
      for (std::int64_t group = first; group < end; ++group) record(group, counts);
      add(counts);
    });
    if (args_.rule.global == GlobalScale::kPerTensor && !args_.out.global.empty()) {
      for (std::int64_t i = 0; i < args_.out.global.shape[0]; ++i) put_global(i, whole_);
    }
  }

 private:
  const Bf16* x(std::int64_t row) const { return args_.x.data + row * args_.x.stride[0]; }

  static std::uint16_t amax_of(const Bf16* x, std::int64_t cols) {
    std::uint16_t amax = 0;
    return row_amax_simd(x, cols, amax) ? amax : row_amax(x, cols);
  }

  /// Of the finite rows: one that is not leaves the others as they are.
  RowGlobal tensor_global() const {
    std::atomic<std::uint16_t> most = 0;
    const std::int64_t cols = args_.x.shape[1];
    parallel_for(args_.x.shape[0], kGrainElements / std::max<std::int64_t>(cols, 1),
                 [&](std::int64_t first, std::int64_t end) {
                   std::uint16_t here = 0;
                   for (std::int64_t row = first; row < end; ++row) {
                     const std::uint16_t amax = amax_of(x(row), cols);
                     if (amax < 0x7F80u) here = std::max(here, amax);
                   }
                   std::uint16_t seen = most.load();
                   while (seen < here && !most.compare_exchange_weak(seen, here)) {
                   }
                 });
    return global_of(most.load(), args_);
  }

  /// The rows of one record, by one thread: their residues share bytes.
  void record(std::int64_t group, QuantizeCounts& counts) {
    std::uint8_t* out = nullptr;
    if (args_.layout.encoding != Encoding::kNone) {
      out = args_.records.data + group * args_.records.stride[0];
      std::memset(out, 0, static_cast<std::size_t>(args_.layout.bytes()));
    }
    for (std::int64_t slot = 0; slot < slots_; ++slot) {
      row(group * slots_ + slot, static_cast<std::int32_t>(slot), out, counts);
    }
  }

  void row(std::int64_t index, std::int32_t slot, std::uint8_t* out, QuantizeCounts& counts) {
    const std::int64_t cols = args_.x.shape[1];
    EncodeRow row{.x = x(index),
                  .cols = cols,
                  .global = whole_,
                  .codes = args_.out.codes.data + index * args_.out.codes.stride[0],
                  .scales = args_.out.scales.data + index * args_.out.scales.stride[0]};
    const std::uint16_t amax = amax_of(row.x, cols);
    const bool finite = amax < 0x7F80u;
    if (args_.rule.global != GlobalScale::kPerTensor) {
      row.global = global_of(finite ? amax : std::uint16_t{0}, args_);
    }
    if (!args_.nonfinite.empty()) args_.nonfinite.data[index * args_.nonfinite.stride[0]] = !finite;
    if (finite) {
      if (!encode_row_simd(row, args_.rule, counts)) encode_row(row, args_.rule, counts);
    } else {
      ++counts[kNonfiniteRows];
      std::memset(row.codes, 0, static_cast<std::size_t>(cols / 2));
      std::memset(row.scales, 0, static_cast<std::size_t>(cols / args_.rule.block));
    }
    if (args_.rule.global != GlobalScale::kPerTensor && !args_.out.global.empty()) {
      put_global(index, row.global);
    }
    if (out != nullptr) keep(row, slot, out);
  }

  void keep(const EncodeRow& row, std::int32_t slot, std::uint8_t* out) const {
    if (args_.layout.encoding == Encoding::kBf16) {
      const auto bytes = static_cast<std::size_t>(row.cols) * sizeof(Bf16);
      std::memcpy(out + static_cast<std::size_t>(slot) * bytes, row.x, bytes);
      return;
    }
    write_record({row.codes, row.scales, static_cast<std::int32_t>(row.cols),
                  static_cast<std::int8_t>(row.global.exponent)},
                 slot, args_.layout, out);
  }

  void put_global(std::int64_t index, const RowGlobal& global) const {
    args_.out.global.data[index * args_.out.global.stride[0]] = power_of_two(global.exponent);
  }

  void add(const QuantizeCounts& counts) const {
    if (args_.counts.empty()) return;
    for (std::int64_t i = 0; i < kNumQuantizeCounts; ++i) {
      std::atomic_ref(args_.counts.data[i * args_.counts.stride[0]])
          .fetch_add(counts[static_cast<std::size_t>(i)], std::memory_order_relaxed);
    }
  }

  const QuantizeArgs& args_;
  std::int64_t slots_;
  RowGlobal whole_{};
};

}  // namespace

void quantize(const QuantizeArgs& args, Stream) {
  check(args);
  Rows(args).run();
}

void quantize_weight(TensorView<const float, 2> master, const Quantizer& rule,
                     const PackedView<std::uint8_t>& out) {
  const auto [rows, cols] = master.shape;
  std::vector<Bf16> rounded(static_cast<std::size_t>(rows * cols));
  parallel_for(rows, kGrainElements / std::max<std::int64_t>(cols, 1),
               [&](std::int64_t first, std::int64_t end) {
                 for (std::int64_t row = first; row < end; ++row) {
                   const float* x = master.data + row * master.stride[0];
                   Bf16* to = rounded.data() + row * cols;
                   for (std::int64_t col = 0; col < cols; ++col) to[col] = to_bf16(x[col]);
                 }
               });
  const auto bad =
      std::find_if_not(rounded.begin(), rounded.end(), [](Bf16 value) { return is_finite(value); });
  if (bad != rounded.end()) {
    const std::int64_t at = bad - rounded.begin();
    throw Error(cat({"quantize: the weight at row ", at / cols, ", column ", at % cols,
                     " is not a finite BF16 number; it must be before it can have codes"}));
  }
  quantize({.x = {rounded.data(), {rows, cols}, {cols, 1}, {}}, .rule = rule, .out = out});
}

}  // namespace lockstep::kernels
