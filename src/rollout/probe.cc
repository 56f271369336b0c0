#include "rollout/probe.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/philox.h"
#include "base/text.h"
#include "kernels/exact/dequantize.h"
#include "model/names.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kProbedRows = 16;
constexpr double kTolerance = 0.01;  // exact sums, or FP32 ones of BF16 operands

}  // namespace

/// Values of codes under a scale of one: a 6 in every sixteen sees to that.
std::vector<Bf16> probe_row(std::int64_t in) {
  std::vector<Bf16> x;
  for (std::int64_t i = 0; i < in; ++i) {
    const auto code = static_cast<std::uint8_t>(
        i % 16 == 0 ? 7u
                    : philox(61, philox_counter(static_cast<std::uint64_t>(i), 0, 0))[0] & 15u);
    x.push_back(to_bf16(to_float(static_cast<E2m1>(code))));
  }
  return x;
}

std::int64_t probe_step(std::int64_t out) { return std::max<std::int64_t>(out / kProbedRows, 1); }

void require_probe(const WeightId& id, double error) {
  if (error <= kTolerance) return;
  throw Error(cat({"weight ", to_string(id), ": a product with it is off by ", error,
                   " of itself: it does not lie as the kernel reads it"}));
}

void probe_sums(const ProbeSumsArgs& args, Stream stream) {
  if constexpr (build::has_cuda) return probe_sums_cuda(args, stream);
  throw Error("weights: they lie on a CUDA device, this build has no CUDA backend");
}

void probe_sums(const PlacedProbe* probes, std::int64_t count, Device device, Stream stream) {
  if constexpr (build::has_cuda) return probe_sums_cuda(probes, count, device, stream);
  throw Error("weights: they lie on a CUDA device, this build has no CUDA backend");
}

double probe_error(const PackedView<const std::uint8_t>& arrived, const Quantizer& rule,
                   const ProbedProduct& product) {
  const std::int64_t out = arrived.codes.shape[0], in = rule.columns(arrived.codes.shape[1]);
  const std::vector<Bf16> x = probe_row(in);
  std::vector<float> y(static_cast<std::size_t>(out)), w(static_cast<std::size_t>(out * in));
  product({x.data(), {1, in}, {in, 1}}, {y.data(), {1, out}, {out, 1}});
  kernels::dequantize({.codes = arrived, .rule = rule, .f32 = {w.data(), {out, in}, {in, 1}}});
  double error = 0, norm = 0;
  const std::int64_t step = probe_step(out);
  for (std::int64_t row = 0; row < out; row += step) {
    double sum = 0;
    for (std::int64_t i = 0; i < in; ++i) {
      sum += static_cast<double>(to_float(x[static_cast<std::size_t>(i)])) *
             static_cast<double>(w[static_cast<std::size_t>(row * in + i)]);
    }
    const double difference = static_cast<double>(y[static_cast<std::size_t>(row)]) - sum;
    error += difference * difference;
    norm += sum * sum;
  }
  return norm > 0 ? std::sqrt(error / norm) : 0;
}

}  // namespace lockstep::rollout
