// Residual compensation on a CUDA device, of a decode step's tokens and of a prefill's, beside
// quantizing them; and SwiGLU.
#include <memory>
#include <vector>

#include "base/text.h"
#include "device/cuda/bench.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/residual.h"
#include "kernels/exact/swiglu.h"

namespace lockstep::kernels {
namespace {

constexpr Quantizer kRule = {.element = Element::kE2m1,
                             .scale = ScaleFormat::kE4m3,
                             .global = GlobalScale::kPerToken,
                             .global_is_power_of_two = true};

struct Packed {
  Buffer codes, scales, global;
  std::int64_t rows, cols;
  PackedView<std::uint8_t> view() const {
    const Device device = codes.device();
    return {{codes.as<std::uint8_t>(), {rows, cols / 2}, {cols / 2, 1}, device},
            {scales.as<std::uint8_t>(), {rows, cols / 16}, {cols / 16, 1}, device},
            {global.as<float>(), {rows}, {1}, device}};
  }
};

Packed make_packed(std::int64_t rows, std::int64_t cols, Device device) {
  return {Buffer(device, rows * cols / 2), Buffer(device, rows * cols / 16),
          Buffer(device, 4 * rows), rows, cols};
}

struct Set {
  Buffer x;
  Packed q, out;
  Buffer chosen, workspace;
};

ResidualArgs args_of(const Set& set, ResidualPattern pattern, ResidualChoice choice) {
  const Device device = set.x.device();
  ResidualArgs args;
  args.x = {set.x.as<const Bf16>(), {set.q.rows, set.q.cols}, {set.q.cols, 1}, device};
  args.q = set.q.view();
  args.out = set.out.view();
  args.pattern = pattern;
  args.choice = choice;
  args.chosen = {set.chosen.as<const std::uint8_t>(), {set.q.cols / 16}, {1}, device};
  args.workspace = {set.workspace.as<float>(), {set.workspace.bytes() / 4}, {1}, device};
  return args;
}

QuantizeArgs quantize_args_of(const Set& set) {
  QuantizeArgs args;
  args.x = {set.x.as<const Bf16>(), {set.q.rows, set.q.cols}, {set.q.cols, 1}, set.x.device()};
  args.rule = kRule;
  args.out = set.q.view();
  return args;
}

/// x and its codes in, codes out: 2 + 0.5625 + 0.5625 B an element.
double bytes_of(std::int64_t rows, std::int64_t cols) {
  return 3.125 * static_cast<double>(rows * cols);
}

std::shared_ptr<std::vector<Set>> make_sets(const cuda::Bench& bench, std::int64_t rows,
                                            std::int64_t cols) {
  auto sets = std::make_shared<std::vector<Set>>();
  for (int i = 0; i < cuda::Bench::sets_of(bytes_of(rows, cols)) && i < 256; ++i) {
    sets->push_back({bench.normal_bf16(rows * cols, static_cast<std::uint64_t>(i), 1.0f, 2),
                     make_packed(rows, cols, bench.device()),
                     make_packed(rows, cols, bench.device()), bench.random_bytes(cols / 16, 77, 1),
                     Buffer(bench.device(), 4 * (rows * cols / 16 + rows * cols / 16))});
    quantize(quantize_args_of(sets->back()));
  }
  synchronize(bench.device());
  return sets;
}

cuda::BenchCase residual_case(const std::shared_ptr<std::vector<Set>>& sets, const char* name,
                              ResidualPattern pattern, ResidualChoice choice) {
  const Packed& q = sets->front().q;
  cuda::BenchCase one;
  one.name = cat({"residual, ", name});
  one.size = cat({q.rows, " x ", q.cols});
  one.bytes = bytes_of(q.rows, q.cols);
  one.sets = static_cast<int>(sets->size());
  one.launch = [sets, pattern, choice](int set, Stream stream) {
    residual(args_of((*sets)[static_cast<std::size_t>(set)], pattern, choice), stream);
  };
  return one;
}

/// Time by channels, of as many tokens.
void residual_law(cuda::Bench& bench) {
  cuda::Law ranked = {.cost = "residual, each token's own choice, time",
                      .size = "channels",
                      .slope = 1,
                      .within = 0.1};
  cuda::Law given = ranked;
  given.cost = "residual of given channels, time";
  for (const std::int64_t cols : {1024, 2048, 4096, 8192}) {
    const auto sets = make_sets(bench, 8192, cols);
    const std::vector<double> us = bench.compare(
        {residual_case(sets, "per token", ResidualPattern::kChannels, ResidualChoice::kPerToken),
         residual_case(sets, "static", ResidualPattern::kChannels, ResidualChoice::kStatic)});
    ranked.add(static_cast<double>(cols), us[0]);
    given.add(static_cast<double>(cols), us[1]);
  }
  bench.judge(ranked);
  bench.judge(given);
}

void residual_rows(cuda::Bench& bench) {
  for (const std::int64_t rows : {1, 64, 256, 8192}) {
    const std::int64_t cols = 2048;
    const auto elements = static_cast<double>(rows * cols);
    const auto sets = make_sets(bench, rows, cols);
    const auto make = [&](const char* name, ResidualPattern pattern, ResidualChoice choice) {
      return residual_case(sets, name, pattern, choice);
    };
    cuda::BenchCase plain;
    plain.name = "quantize";
    plain.size = cat({rows, " x ", cols});
    plain.bytes = elements * 2.5625;
    plain.sets = static_cast<int>(sets->size());
    plain.launch = [sets](int set, Stream stream) {
      quantize(quantize_args_of((*sets)[static_cast<std::size_t>(set)]), stream);
    };
    bench.compare({plain, make("per token", ResidualPattern::kChannels, ResidualChoice::kPerToken),
                   make("batch", ResidualPattern::kChannels, ResidualChoice::kBatch),
                   make("static", ResidualPattern::kChannels, ResidualChoice::kStatic),
                   make("blocks", ResidualPattern::kBlocks, ResidualChoice::kPerToken),
                   make("two of four", ResidualPattern::kTwoOfFour, ResidualChoice::kStatic)});
  }
}

struct SwigluSet {
  Buffer both, out;
};

void swiglu_rows(cuda::Bench& bench) {
  const std::int64_t cols = 768;
  for (const std::int64_t rows : {512, 65536}) {
    const auto elements = static_cast<double>(rows * cols);
    auto sets = std::make_shared<std::vector<SwigluSet>>();
    for (int i = 0; i < cuda::Bench::sets_of(10 * elements); ++i) {
      // Pairs of BF16 numbers taken for FP32 are such numbers with random lower halves.
      sets->push_back({bench.normal_bf16(4 * rows * cols, static_cast<std::uint64_t>(i)),
                       Buffer(bench.device(), 2 * rows * cols)});
    }
    cuda::BenchCase one;
    one.name = "swiglu";
    one.size = cat({rows, " x ", cols});
    one.bytes = 10 * elements;
    one.sets = static_cast<int>(sets->size());
    one.launch = [sets, rows](int set, Stream stream) {
      const SwigluSet& here = (*sets)[static_cast<std::size_t>(set)];
      const Device device = here.both.device();
      const auto* both = here.both.as<const float>();
      swiglu({{both, {rows, cols}, {2 * cols, 1}, device},
              {both + cols, {rows, cols}, {2 * cols, 1}, device},
              {here.out.as<Bf16>(), {rows, cols}, {cols, 1}, device}},
             stream);
    };
    bench.run(one);
  }
}

const cuda::BenchEntry kResidualLaw("law_residual", residual_law);
const cuda::BenchEntry kResidual("residual", residual_rows);
const cuda::BenchEntry kSwiglu("swiglu", swiglu_rows);

}  // namespace
}  // namespace lockstep::kernels
