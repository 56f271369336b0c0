// What oracles_test.py asks of the kernels: raw little-endian numbers on standard input, raw bytes
// on standard output.
//   cast FORMAT                          FP32 -> codes, one a byte; FORMAT e2m1, e4m3, bf16
//   quantize PRESET DTYPE GLOBAL R C     bf16 or f32 [R, C] -> codes, scales, FP32 globals [R]
//   dequantize PRESET GLOBAL R C         the same bytes -> FP32 [R, C]
//   swizzle LAYOUT R B                   scales [R, B] -> 128x4 or 8x4
//   ggml PRESET R C                      codes, scales -> ggml blocks
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "contract/contract.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/pack.h"
#include "kernels/exact/quantize.h"
#include "numerics/e4m3.h"

namespace lockstep {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes read_all() {
  Bytes bytes;
  std::vector<std::uint8_t> chunk(1 << 20);
  for (std::size_t n = 0; (n = std::fread(chunk.data(), 1, chunk.size(), stdin)) > 0;) {
    bytes.insert(bytes.end(), chunk.begin(), chunk.begin() + static_cast<std::ptrdiff_t>(n));
  }
  return bytes;
}

template <typename T>
void write(const std::vector<T>& data) {
  std::fwrite(data.data(), sizeof(T), data.size(), stdout);
}

template <typename T>
std::vector<T> take(const Bytes& bytes, std::size_t& at, std::int64_t count) {
  std::vector<T> out(static_cast<std::size_t>(count));
  if (at + out.size() * sizeof(T) > bytes.size()) throw std::runtime_error("input is too short");
  std::memcpy(out.data(), bytes.data() + at, out.size() * sizeof(T));
  at += out.size() * sizeof(T);
  return out;
}

template <typename T>
TensorView<T, 2> matrix(std::vector<T>& data, std::int64_t rows, std::int64_t cols) {
  return {data.data(), {rows, cols}, {cols, 1}, {}};
}

struct Packed {
  Packed(const Quantizer& rule, std::int64_t rows, std::int64_t cols)
      : codes(static_cast<std::size_t>(rows * rule.code_bytes(cols))),
        scales(static_cast<std::size_t>(rule.scale_rows(rows) * rule.scale_cols(cols))),
        global(static_cast<std::size_t>(rows)),
        view{matrix(codes, rows, rule.code_bytes(cols)),
             matrix(scales, rule.scale_rows(rows), rule.scale_cols(cols)),
             {global.data(), {rows}, {1}, {}}} {}
  Bytes codes, scales;
  std::vector<float> global;
  PackedView<std::uint8_t> view;
};

/// The preset, or "PRESET/mae" and "PRESET/mse": with four over six;
/// `mxfp8-even`, and `fp8-row` for what `fp8` makes of activations, beside the presets.
Quantizer rule_of(const std::string& name, const std::string& global) {
  if (name == "fp8-row") return contracts::format("fp8", contracts::Tensor::kActivation);
  for (const auto& [known, mx] : {std::pair("mxfp8-floor", MxRule::kFloor),
                                  {"mxfp8-even", MxRule::kEven},
                                  {"mxfp8-ceil", MxRule::kCeil},
                                  {"mxfp8-rceil", MxRule::kRceil}}) {
    if (name == known) return contracts::format("mxfp8", contracts::Tensor::kActivation, mx);
  }
  const std::string preset = name.substr(0, name.find('/'));
  Quantizer rule = contracts::preset(preset, 1).weight;
  if (name != preset) {
    rule.four_over_six = name.ends_with("/mae") ? FourOverSix::kMae : FourOverSix::kMse;
    rule.denominator = 256;
  }
  if (global == "per-token") rule.global = GlobalScale::kPerToken;
  if (global == "none") rule.global = GlobalScale::kNone;
  return rule;
}

void cast(const std::string& format) {
  const Bytes in = read_all();
  std::size_t at = 0;
  Bytes out;
  std::vector<Bf16> wide;
  for (const float x : take<float>(in, at, static_cast<std::int64_t>(in.size() / 4))) {
    if (format == "e2m1") out.push_back(bits_of(to_e2m1(x)));
    if (format == "e4m3") out.push_back(bits_of(to_e4m3(x)));
    if (format == "bf16") wide.push_back(to_bf16(x));
  }
  write(out);
  write(wide);
}

void run(const std::vector<std::string>& args) {
  const std::string& verb = args.at(0);
  if (verb == "cast") return cast(args.at(1));
  const std::int64_t rows = std::atoll(args.at(args.size() - 2).c_str());
  const std::int64_t cols = std::atoll(args.at(args.size() - 1).c_str());
  const Bytes in = read_all();
  std::size_t at = 0;
  if (verb == "swizzle") {
    const auto layout =
        args.at(1) == "128x4" ? kernels::ScaleLayout::k128x4 : kernels::ScaleLayout::k8x4;
    Bytes scales = take<std::uint8_t>(in, at, rows * cols);
    Bytes out(static_cast<std::size_t>(kernels::scale_layout_bytes(layout, rows, cols)));
    kernels::swizzle_scales(matrix(scales, rows, cols), layout, out);
    return write(out);
  }
  if (verb == "quantize") {
    const Quantizer rule = rule_of(args.at(1), args.at(3));
    Packed out(rule, rows, cols);
    if (args.at(2) == "f32") {
      auto x = take<float>(in, at, rows * cols);
      kernels::quantize({.x_f32 = matrix(x, rows, cols), .rule = rule, .out = out.view});
    } else {
      auto x = take<Bf16>(in, at, rows * cols);
      kernels::quantize({.x = matrix(x, rows, cols), .rule = rule, .out = out.view});
    }
    write(out.codes);
    write(out.scales);
    return write(out.global);
  }
  const Quantizer rule = rule_of(args.at(1), verb == "ggml" ? "none" : args.at(2));
  Packed packed(rule, rows, cols);
  packed.codes = take<std::uint8_t>(in, at, rows * rule.code_bytes(cols));
  packed.scales = take<std::uint8_t>(in, at, rule.scale_rows(rows) * rule.scale_cols(cols));
  packed.view.codes.data = packed.codes.data();
  packed.view.scales.data = packed.scales.data();
  if (verb == "ggml") {
    const std::int64_t width = kernels::ggml_row_bytes(rule, cols);
    Bytes out(static_cast<std::size_t>(rows * width));
    kernels::pack_ggml(packed.view, rule, matrix(out, rows, width));
    return write(out);
  }
  if (verb != "dequantize") throw std::runtime_error("verb " + verb + " is not known");
  packed.global = take<float>(in, at, rows);
  packed.view.global.data = packed.global.data();
  std::vector<float> out(static_cast<std::size_t>(rows * cols));
  kernels::dequantize({.codes = packed.view, .rule = rule, .f32 = matrix(out, rows, cols)});
  write(out);
}

}  // namespace
}  // namespace lockstep

int main(int count, char** values) {
  try {
    lockstep::run(std::vector<std::string>(values + 1, values + count));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "quantize_tool: %s\n", error.what());
    return 1;
  }
  return 0;
}
