/// The experts' products of a prefill, over BF16 copies, and those of a backward pass, at the
/// shapes of Qwen3-30B-A3B.
#include <vector>

#include "base/philox.h"
#include "base/text.h"
#include "device/cuda/bench.h"
#include "kernels/dense/grouped_product.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kExperts = 128;

/// Where each expert's items begin, drawn alike.
std::vector<std::int32_t> draw(std::int64_t items) {
  std::vector<std::int32_t> offsets(kExperts + 1, 0);
  for (std::int64_t i = 0; i < items; ++i) {
    ++offsets[1 + philox(3, philox_counter(static_cast<std::uint64_t>(i), 0, 0))[0] % kExperts];
  }
  for (std::size_t e = 1; e < offsets.size(); ++e) offsets[e] += offsets[e - 1];
  return offsets;
}

void prefill(cuda::Bench& bench, const char* name, std::int64_t out, std::int64_t k,
             std::int64_t tokens, bool turned = false) {
  const std::int64_t items = tokens * 8;
  const std::vector<std::int32_t> offsets = draw(items);
  const Device device = bench.device();
  const Buffer at = to_device(offsets, device);
  const Buffer x = bench.normal_bf16(items * k, 1);
  const Buffer w = bench.normal_bf16(kExperts * out * k, 2);
  const Buffer y(device, items * out * 4);
  const std::int64_t rows = turned ? k : out, cols = turned ? out : k;
  cuda::BenchCase one;
  one.name = name;
  one.size = cat({"T ", tokens, ", ", out, "x", k});
  one.bytes = static_cast<double>(items * k * 2 + kExperts * out * k * 2 + items * out * 4);
  one.flop = 2.0 * static_cast<double>(items) * static_cast<double>(out * k);
  one.launches = 5;
  one.launch = [&](int, Stream stream) {
    grouped_product({.x = {x.as<const Bf16>(), {items, k}, {k, 1}, device},
                     .w = {w.as<const Bf16>(), {kExperts, rows, cols}, {out * k, cols, 1}, device},
                     .turned = turned,
                     .offsets = {at.as<const std::int32_t>(), {kExperts + 1}, {1}, device},
                     .y = {y.as<float>(), {items, out}, {out, 1}, device}},
                    stream);
  };
  bench.run(one);
}

/// The gradient of such weights.
void gradient(cuda::Bench& bench, const char* name, std::int64_t rows, std::int64_t cols,
              std::int64_t tokens) {
  const std::int64_t items = tokens * 8;
  const std::vector<std::int32_t> offsets = draw(items);
  const Device device = bench.device();
  const Buffer at = to_device(offsets, device);
  const Buffer a = bench.normal_bf16(items * rows, 1), b = bench.normal_bf16(items * cols, 2);
  const Buffer sum(device, kExperts * rows * cols * 4);
  cuda::BenchCase one;
  one.name = name;
  one.size = cat({"T ", tokens, ", ", rows, "x", cols});
  one.bytes = static_cast<double>(items * (rows + cols) * 2 + kExperts * rows * cols * 8);
  one.flop = 2.0 * static_cast<double>(items) * static_cast<double>(rows * cols);
  one.launches = 5;
  one.launch = [&](int, Stream stream) {
    grouped_sums({.a = {a.as<const Bf16>(), {items, rows}, {rows, 1}, device},
                  .b = {b.as<const Bf16>(), {items, cols}, {cols, 1}, device},
                  .offsets = {at.as<const std::int32_t>(), {kExperts + 1}, {1}, device},
                  .sum = {sum.as<float>(), {kExperts, rows, cols}, {rows * cols, cols, 1}, device}},
                 stream);
  };
  bench.run(one);
}

void products(cuda::Bench& bench) {
  for (const std::int64_t tokens : {2048, 8192, 32768}) {
    prefill(bench, "grouped bf16 w13", 1536, 2048, tokens);
    prefill(bench, "grouped bf16 w2", 2048, 768, tokens);
  }
  prefill(bench, "back through w13", 2048, 1536, 8192, true);
  prefill(bench, "back through w2", 768, 2048, 8192, true);
  gradient(bench, "gradient of w13", 1536, 2048, 8192);
  gradient(bench, "gradient of w2", 2048, 768, 8192);
}

const cuda::BenchEntry entry("grouped", products);

}  // namespace
}  // namespace lockstep::kernels
