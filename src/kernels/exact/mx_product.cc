#include "kernels/exact/mx_product.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/items.h"
#include "kernels/exact/mx_product_rows.h"
#include "numerics/e2m1.h"
#include "numerics/e8m0.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kBlock = 32;
constexpr std::int64_t kMaxCols = 32768;       // 4608 * 2^40 * (32768 / 32) < 2^63
constexpr std::int64_t kUnitRows = 32;         // whose weights are unpacked once
constexpr std::int32_t kMaxByte = 252;         // 2^125
constexpr std::int32_t kNoBlock = -(1 << 20);  // the anchor of a row of zeros

void require(bool holds, std::initializer_list<Piece> message) {
  if (!holds) throw Error(cat(message));
}

/// Rows in half units with their exponents.
struct Unpacked {
  std::vector<std::int8_t> values;      // [rows, cols]
  std::vector<std::int32_t> exponents;  // [rows, blocks]
  std::vector<std::int32_t> anchors;    // [rows]

  /// Throws Error in the name `name` where a scale byte is damaged.
  Unpacked(const PackedView<const std::uint8_t>& packed, const char* name, std::int64_t first,
           std::int64_t count)
      : values(static_cast<std::size_t>(count * packed.codes.shape[1] * 2)),
        exponents(static_cast<std::size_t>(count * packed.scales.shape[1])),
        anchors(static_cast<std::size_t>(count), kNoBlock) {
    for (std::int64_t r = 0; r < count; ++r) unpack(packed, name, first + r, r);
  }

 private:
  void unpack(const PackedView<const std::uint8_t>& packed, const char* name, std::int64_t row,
              std::int64_t r) {
    const std::uint8_t* codes = packed.codes.data + row * packed.codes.stride[0];
    const std::uint8_t* scales = packed.scales.data + row * packed.scales.stride[0];
    const std::int64_t blocks = packed.scales.shape[1];
    for (std::int64_t b = 0; b < blocks; ++b) {
      if (scales[b] > kMaxByte) {
        throw Error(cat({"mx_product: the scale byte of ", name, " in row ", row, ", block ", b,
                         " is ", static_cast<int>(scales[b]), ", must be at most ", kMaxByte}));
      }
      bool zero = true;
      std::int8_t* into = values.data() + (r * blocks + b) * kBlock;
      for (std::int64_t i = 0; i < kBlock; ++i) {
        const std::uint32_t pair = codes[(b * kBlock + i) / 2];
        const auto code =
            static_cast<E2m1>(static_cast<std::uint8_t>(i % 2 == 0 ? pair & 15 : pair >> 4));
        into[i] = static_cast<std::int8_t>(half_units(code));
        zero = zero && into[i] == 0;
      }
      const std::int32_t e = scales[b] - 127;
      exponents[static_cast<std::size_t>(r * blocks + b)] = e;
      std::int32_t& anchor = anchors[static_cast<std::size_t>(r)];
      if (!zero) anchor = std::max(anchor, e);
    }
  }
};

/// x * 2^shift, to nearest even. |x| <= 4608, so that a shift of -30 leaves nothing.
std::int64_t shifted(std::int32_t x, std::int32_t shift) {
  if (shift >= 0) return std::int64_t{x} * (std::int64_t{1} << shift);
  if (shift < -30) return 0;
  const std::int32_t floor = x >> -shift;
  const std::int32_t rest = x - floor * (1 << -shift);
  const std::int32_t half = 1 << (-shift - 1);
  return floor + (rest > half || (rest == half && (floor & 1) != 0));
}

void check_packed(const PackedView<const std::uint8_t>& packed, const char* name) {
  const std::int64_t cols = packed.codes.shape[1] * 2;
  require(cols % kBlock == 0 && cols <= kMaxCols,
          {"mx_product: ", name, " has ", cols, " columns, must be a multiple of 32, at most ",
           kMaxCols});
  require(
      packed.scales.shape[0] == packed.codes.shape[0] && packed.scales.shape[1] * kBlock == cols,
      {"mx_product: the scales of ", name, " are [", packed.scales.shape[0], ", ",
       packed.scales.shape[1], "], must be [", packed.codes.shape[0], ", ", cols / kBlock, "]"});
  require(packed.codes.stride[1] == 1 && packed.scales.stride[1] == 1,
          {"mx_product: ", name, " must be contiguous along a row"});
}

std::int64_t check(const MxProductArgs& args, const Items& items) {
  check_packed(args.a, "a");
  check_packed(args.w, "w");
  require(args.a.codes.shape[1] == args.w.codes.shape[1],
          {"mx_product: a has ", args.a.codes.shape[1] * 2, " columns, w has ",
           args.w.codes.shape[1] * 2});
  require(args.experts > 0 && args.w.codes.shape[0] == args.experts * args.out.shape[1],
          {"mx_product: w has ", args.w.codes.shape[0], " rows, must be ", args.experts,
           " experts of the ", args.out.shape[1], " columns of out"});
  require(args.out.stride[1] == 1 || args.out.shape[1] <= 1,
          {"mx_product: out must be contiguous along a row"});
  const Device device = args.a.codes.device;
  require(args.w.codes.device == device && args.out.device == device,
          {"mx_product: a, w and out must be on one device"});
  const std::int64_t count = count_items(items, args.a.codes.shape[0]);
  if (device.kind == Device::Kind::kCuda) {
    check_item_shapes("mx_product", items, count, args.experts, args.a.codes.shape[0],
                      args.out.shape[0]);
    return count;
  }
  check_items("mx_product", items, count, args.experts, args.a.codes.shape[0], args.out.shape[0]);
  return count;
}

float product(const Unpacked& a, std::int64_t row, const Unpacked& w, std::int64_t out,
              std::int64_t blocks) {
  const std::int32_t anchor =
      a.anchors[static_cast<std::size_t>(row)] + w.anchors[static_cast<std::size_t>(out)];
  if (anchor <= kNoBlock / 2) return 0.0f;
  std::int64_t sum = 0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int8_t* x = a.values.data() + (row * blocks + b) * kBlock;
    const std::int8_t* y = w.values.data() + (out * blocks + b) * kBlock;
    std::int32_t dot = 0;
    for (std::int64_t i = 0; i < kBlock; ++i) dot += x[i] * y[i];
    const std::int32_t e = a.exponents[static_cast<std::size_t>(row * blocks + b)] +
                           w.exponents[static_cast<std::size_t>(out * blocks + b)];
    // A block above the anchor is all zero on one side.
    if (dot != 0) sum += shifted(dot, e - anchor + 40);
  }
  return std::ldexp(static_cast<float>(sum), anchor - 42);
}

}  // namespace

void mx_product(const MxProductArgs& args, [[maybe_unused]] Stream stream) {
  const Items items{args.offsets, args.from, args.to};
  const std::int64_t count = check(args, items);
  const std::int64_t outs = args.out.shape[1];
  if (count == 0 || outs == 0) return;
  if (args.out.device.kind == Device::Kind::kCuda) {
    if constexpr (build::has_cuda) return mx_product_cuda(args, count, stream);
    throw Error("mx_product: a is on a CUDA device, and this build has no CUDA backend");
  }
  const std::int64_t blocks = args.a.scales.shape[1];
  const Unpacked a(args.a, "a", 0, args.a.codes.shape[0]);
  const std::int64_t units = (outs + kUnitRows - 1) / kUnitRows;
  parallel_for(args.experts * units, 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t u = first; u < end; ++u) {
      const std::int64_t expert = u / units;
      const std::int64_t out = u % units * kUnitRows;
      const std::int64_t some = std::min(kUnitRows, outs - out);
      const std::int64_t begin = args.offsets.empty() ? 0 : args.offsets.data[expert];
      const std::int64_t stop =
          args.offsets.empty() ? (expert == 0 ? count : 0) : args.offsets.data[expert + 1];
      if (begin >= stop) continue;
      const Unpacked w(args.w, "w", expert * outs + out, some);
      for (std::int64_t i = begin; i < stop; ++i) {
        float* y = args.out.data + items.to_row(i) * args.out.stride[0] + out;
        for (std::int64_t j = 0; j < some; ++j) y[j] = product(a, items.from_row(i), w, j, blocks);
      }
    }
  });
}

}  // namespace lockstep::kernels
