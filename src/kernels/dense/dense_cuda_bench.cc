#include <algorithm>
#include <vector>

#include "base/text.h"
#include "device/cuda/bench.h"
#include "kernels/dense/check.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/linear.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/rope.h"
#include "kernels/dense/router.h"
#include "kernels/dense/sample.h"

namespace lockstep::kernels {
namespace {

using cuda::Bench;

/// `sets` matrices of normal numbers, one after another.
struct Matrices {
  Buffer buffer;
  std::int64_t rows, cols;
  Device device;

  Matrices(const Bench& bench, std::int64_t r, std::int64_t c, int sets, std::uint64_t seed)
      : buffer(bench.normal_bf16(r * c * sets, seed)), rows(r), cols(c), device(bench.device()) {}
  TensorView<Bf16, 2> at(int set) const {
    return rows_of(buffer.as<Bf16>() + set * rows * cols, rows, cols, device);
  }
};

void rope_with_norm(Bench& bench, std::int64_t rows, int sets, const Buffer& weight) {
  constexpr std::int32_t kDim = 128;
  const Matrices heads(bench, rows, 36 * kDim, sets, 4);
  std::vector<std::int32_t> positions;
  for (std::int64_t i = 0; i < rows; ++i) positions.push_back(static_cast<std::int32_t>(i % 4096));
  const Buffer at = to_device(positions, bench.device());
  RopeTable table(1e6, kDim, bench.device());
  table.grow(4096);
  bench.run({.name = "rope with norm",
             .size = cat({"rows=", rows}),
             .bytes = static_cast<double>(rows) * 36 * kDim * 4,
             .sets = sets,
             .launch = [&](int set, Stream stream) {
               rope({.x = heads.at(set),
                     .head_dim = kDim,
                     .positions = {at.as<const std::int32_t>(), positions.size()},
                     .table = &table,
                     .norm = {weight.as<const Bf16>(), kDim}},
                    stream);
             }});
}

void routes(Bench& bench, std::int64_t rows) {
  std::vector<float> logits(static_cast<std::size_t>(rows * 128));
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(i * 2654435761u % 65536) * 0x1p-14f;
  }
  const Buffer from = to_device(logits, bench.device());
  const Buffer experts(bench.device(), rows * 32), gates(bench.device(), rows * 32);
  bench.run({.name = "router",
             .size = cat({"rows=", rows}),
             .bytes = static_cast<double>(rows) * (128 * 4 + 64),
             .launch = [&](int, Stream stream) {
               router({.logits = rows_of(from.as<const float>(), rows, 128, bench.device()),
                       .experts = rows_of(experts.as<std::int32_t>(), rows, 8, bench.device()),
                       .gates = rows_of(gates.as<float>(), rows, 8, bench.device())},
                      stream);
             }});
}

void row_ops(Bench& bench) {
  bench.heading("between the products: width 2048, 36 heads of 128, 128 experts of which 8");
  constexpr std::int64_t kWidth = 2048;
  const auto weight = bench.normal_bf16(kWidth, 1);
  for (const std::int64_t rows : {64, 8192}) {
    const double bytes = static_cast<double>(rows * kWidth) * 2;
    const int sets = Bench::sets_of(2 * bytes);
    const Matrices x(bench, rows, kWidth, sets, 2), y(bench, rows, kWidth, sets, 3);
    const std::string size = cat({"rows=", rows});
    bench.run({.name = "rms_norm",
               .size = size,
               .bytes = 2 * bytes,
               .sets = sets,
               .launch = [&](int set, Stream stream) {
                 rms_norm(
                     {.x = x.at(set), .weight = {weight.as<const Bf16>(), kWidth}, .y = y.at(set)},
                     stream);
               }});
    const Buffer bad(bench.device(), 4);
    bench.run({.name = "residual_add",
               .size = size,
               .bytes = 3 * bytes,
               .sets = sets,
               .launch = [&](int set, Stream stream) {
                 residual_add(x.at(set), y.at(set), bad.as<std::int32_t>(), stream);
               }});
    rope_with_norm(bench, rows, sets, weight);
    routes(bench, rows);
  }
}

void products(Bench& bench) {
  bench.heading("BF16 products of a Qwen3-30B-A3B layer and its head");
  struct Size {
    const char* name;
    std::int64_t rows, in, out;
  };
  for (const Size size : {Size{"qkv", 1, 2048, 5120},
                          {"qkv", 8, 2048, 5120},
                          {"qkv", 16, 2048, 5120},
                          {"qkv", 64, 2048, 5120},
                          {"qkv", 128, 2048, 5120},
                          {"qkv", 256, 2048, 5120},
                          {"o", 8, 4096, 2048},
                          {"o", 64, 4096, 2048},
                          {"router", 64, 2048, 128},
                          {"head", 8, 2048, 151936},
                          {"head", 64, 2048, 151936},
                          {"qkv", 8192, 2048, 5120},
                          {"o", 8192, 4096, 2048}}) {
    const double weight_bytes = static_cast<double>(size.in * size.out) * 2;
    const double bytes = weight_bytes + static_cast<double>(size.rows) *
                                            static_cast<double>(2 * size.in + 2 * size.out);
    const int sets = size.rows > 1000 ? 1 : std::min(Bench::sets_of(bytes), 64);
    const Matrices w(bench, (size.out + 31) / 32 * 32, size.in, sets, 5);
    const Matrices x(bench, size.rows, size.in, sets, 6), y(bench, size.rows, size.out, sets, 7);
    for (const bool settled : {false, true}) {
      bench.run(
          {.name = cat({"linear ", size.name, settled ? ", settled" : ""}),
           .size = cat({"rows=", size.rows, " ", size.in, "->", size.out}),
           .bytes = bytes,
           .flop = 2.0 * static_cast<double>(size.rows * size.in) * static_cast<double>(size.out),
           .floor = cuda::Floor::kRead,
           .sets = sets,
           .launch = [&](int set, Stream stream) {
             linear_bf16({.x = x.at(set),
                          .weight = {w.at(set).data, size.out, size.in, bench.device()},
                          .y_bf16 = y.at(set),
                          .settled = settled},
                         stream);
           }});
    }
  }
}

void sampling(Bench& bench) {
  bench.heading("sampling from 151936 logits in FP32");
  constexpr std::int64_t kCount = 151936;
  for (const std::int64_t rows : {1, 64}) {
    const double bytes = static_cast<double>(rows * kCount) * 4;
    const int sets = std::min(Bench::sets_of(bytes), 8);
    std::vector<float> numbers(static_cast<std::size_t>(rows * kCount));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<float>(i * 2654435761u % 65536) * 0x1p-13f;
    }
    std::vector<Buffer> logits;
    for (int i = 0; i < sets; ++i) logits.push_back(to_device(numbers, bench.device()));
    const auto n = static_cast<std::size_t>(rows);
    const Buffer heat = to_device(std::vector<float>(n, 1.0f), bench.device());
    std::vector<SampleName> names(n);
    for (std::size_t i = 0; i < n; ++i) names[i].a = i;
    const Buffer name = to_device(names, bench.device());
    const Buffer tokens(bench.device(), rows * 4), logps(bench.device(), rows * 4);
    const Buffer workspace(bench.device(), sample_workspace(rows, kCount));
    bench.run({.name = "sample",
               .size = cat({"rows=", rows}),
               .bytes = bytes,
               .floor = cuda::Floor::kRead,
               .sets = sets,
               .launch = [&](int set, Stream stream) {
                 sample(
                     {.logits = rows_of(logits[static_cast<std::size_t>(set)].as<const float>(),
                                        rows, kCount, bench.device()),
                      .temperatures = {heat.as<float>(), n},
                      .seed = 1,
                      .names = {name.as<SampleName>(), n},
                      .tokens = {tokens.as<std::int32_t>(), n},
                      .logps = {logps.as<float>(), n},
                      .workspace = {workspace.as<>(), static_cast<std::size_t>(workspace.bytes())}},
                     stream);
               }});
  }
}

/// As a layer has them: a norm and the product of what it gives, the weight read meanwhile.
void norm_and_product(Bench& bench) {
  bench.heading("a norm of 2048 and the product 2048->5120");
  constexpr std::int64_t kIn = 2048, kOut = 5120;
  const auto gains = bench.normal_bf16(kIn, 1);
  for (const std::int64_t rows : {1, 64}) {
    const double bytes = static_cast<double>(kIn * kOut * 2 + rows * (2 * kIn + 2 * kOut));
    const int sets = Bench::sets_of(bytes);
    const Matrices w(bench, kOut, kIn, sets, 5);
    const Matrices h(bench, rows, kIn, sets, 6), x(bench, rows, kIn, sets, 7);
    const Matrices y(bench, rows, kOut, sets, 8);
    for (const bool settled : {false, true}) {
      bench.run({.name = cat({"rms_norm, linear qkv", settled ? ", settled" : ""}),
                 .size = cat({"rows=", rows}),
                 .bytes = bytes,
                 .floor = cuda::Floor::kRead,
                 .sets = sets,
                 .launch = [&](int set, Stream stream) {
                   rms_norm(
                       {.x = h.at(set), .weight = {gains.as<const Bf16>(), kIn}, .y = x.at(set)},
                       stream);
                   linear_bf16({.x = x.at(set),
                                .weight = {w.at(set).data, kOut, kIn, bench.device()},
                                .y_bf16 = y.at(set),
                                .settled = settled},
                               stream);
                 }});
    }
  }
}

const cuda::BenchEntry kRowOps("dense_rows", row_ops);
const cuda::BenchEntry kProducts("dense_products", products);
const cuda::BenchEntry kNormAndProduct("dense_pair", norm_and_product);
const cuda::BenchEntry kSampling("dense_sampling", sampling);

}  // namespace
}  // namespace lockstep::kernels
