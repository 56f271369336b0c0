/// Is a weight that was repacked for a kernel still the one that arrived? Checksums say that it
/// arrived whole; a product says that it lies where the kernel reads it.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "device/view.h"
#include "model/weights.h"
#include "numerics/quantizer.h"

namespace lockstep::rollout {

/// y [1, out] = x [1, in] times the repacked weight.
using ProbedProduct = std::function<void(TensorView<const Bf16, 2> x, TensorView<float, 2> y)>;

/// ||y - y'|| / ||y'|| over some of the outputs, y' from what the codes that arrived are worth. x
/// holds numbers that every quantizer of four or more bits keeps. 0 where y' is 0 throughout.
double probe_error(const PackedView<const std::uint8_t>& arrived, const Quantizer& rule,
                   const ProbedProduct& product);

/// That x, [in].
std::vector<Bf16> probe_row(std::int64_t in);
/// One output in so many is looked at.
std::int64_t probe_step(std::int64_t out);

/// Throws Error naming the weight where the error is more than rounding's.
void require_probe(const WeightId& id, double error);

struct ProbeSumsArgs {
  const Bf16* x = nullptr;            // [in]
  TensorView<const Bf16, 2> worth{};  // [out, in] what the weight's codes are worth
  const float* y = nullptr;           // [out] the product's
  double* sums = nullptr;             // [2] become ||y - y'||^2 and ||y'||^2
};

/// probe_error()'s two sums on a CUDA device, where all of it lies; nobody waits.
void probe_sums(const ProbeSumsArgs& args, Stream stream);

/// A probe of a weight that was quantized into its place; all of it lies on one CUDA device.
struct PlacedProbe {
  const std::byte* sample = nullptr;  // kernels::PlacedWeight's of its rows, at probe_step()
  const Bf16* x = nullptr;            // [in]
  const float* y = nullptr;           // [out] the product's
  double* sums = nullptr;             // [2] become ||y - y'||^2 and ||y'||^2
  std::int32_t out = 0, in = 0, step = 1;
};

/// The same sums of many probes, whose list lies on the device.
void probe_sums(const PlacedProbe* probes, std::int64_t count, Device device, Stream stream);

/// Behind them; defined where there is a CUDA compiler.
void probe_sums_cuda(const ProbeSumsArgs& args, Stream stream);
void probe_sums_cuda(const PlacedProbe* probes, std::int64_t count, Device device, Stream stream);

}  // namespace lockstep::rollout
