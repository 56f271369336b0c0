/// The exact product on a CUDA device, at the shapes of Qwen3-30B-A3B.
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "base/philox.h"
#include "base/text.h"
#include "device/cuda/bench.h"
#include "kernels/dense/w4a16.h"
#include "kernels/exact/moe_w4a4.h"
#include "kernels/exact/w4a4.h"
#include "numerics/exponent.h"

namespace lockstep::kernels {
namespace {

constexpr std::int32_t kHidden = 2048;
constexpr std::int32_t kWidth = 768;
constexpr std::int32_t kExperts = 128;
constexpr std::int32_t kSlots = 8;

/// Each token's experts, drawn alike and without repetition; items in the order of the experts.
struct Routes {
  Routes(std::int64_t tokens, std::uint32_t seed, std::int32_t experts = kExperts) {
    std::vector<std::vector<std::int32_t>> of(static_cast<std::size_t>(experts));
    for (std::int64_t token = 0; token < tokens; ++token) {
      std::set<std::uint32_t> chosen;
      for (std::uint32_t i = 0; chosen.size() < kSlots; ++i) {
        chosen.insert(philox(seed, philox_counter(static_cast<std::uint64_t>(token), i, 0))[0] %
                      static_cast<std::uint32_t>(experts));
      }
      std::int32_t slot = 0;
      for (const std::uint32_t e : chosen) {
        of[e].push_back(static_cast<std::int32_t>(token) * kSlots + slot++);
      }
    }
    offsets.push_back(0);
    for (const auto& items : of) {
      active += !items.empty();
      for (const std::int32_t item : items) {
        slot_of.push_back(item);
        row_of.push_back(item / kSlots);
      }
      offsets.push_back(static_cast<std::int32_t>(slot_of.size()));
    }
  }
  int active = 0;
  std::vector<std::int32_t> offsets, slot_of, row_of;
};

TensorView<const std::int32_t, 1> view_of(const Buffer& b) {
  return {b.as<const std::int32_t>(), {b.bytes() / 4}, {1}, b.device()};
}

struct Input {
  Input(const cuda::Bench& bench, std::int64_t rows, std::int32_t cols, std::uint64_t seed)
      : codes(bench.random_bytes(rows * cols / 2, seed)),
        scales(bench.random_bytes(rows * cols / 16, seed + 1, 0x7E)),
        global(to_device(std::vector<float>(static_cast<std::size_t>(rows), 1.0f), bench.device())),
        view{{codes.as<const std::uint8_t>(), {rows, cols / 2}, {cols / 2, 1}, bench.device()},
             {scales.as<const std::uint8_t>(), {rows, cols / 16}, {cols / 16, 1}, bench.device()},
             {global.as<const float>(), {rows}, {1}, bench.device()}} {}
  Buffer codes, scales, global;
  PackedView<const std::uint8_t> view;
};

/// Sets of experts whose bytes pass between two uses of one.
struct Weights {
  Weights(const cuda::Bench& bench, std::int32_t out, std::int32_t cols, int sets,
          std::uint64_t seed, std::int32_t experts = kExperts)
      : step(experts * W4a4Weights::expert_bytes(out, cols)),
        bytes(bench.random_bytes(step * sets, seed, 0x7E)) {
    for (int i = 0; i < sets * experts; ++i) {  // exponents that the sums can bear
      fill_bytes(bytes.as<std::byte>() + i * W4a4Weights::expert_bytes(out, cols), bench.device(),
                 0, W4a4Weights::kHeaderBytes);
    }
    for (int i = 0; i < sets; ++i) {
      view.push_back({bytes.as<std::byte>() + i * step, experts, out, cols, bench.device()});
    }
  }
  std::int64_t step;
  Buffer bytes;
  std::vector<W4a4Weights> view;
};

void product(cuda::Bench& bench, const char* name, std::int32_t out, std::int32_t cols,
             std::int64_t tokens, bool slots) {
  const Routes routes(tokens, 11);
  const double bytes = static_cast<double>(routes.active) * out * cols * 0.5625;
  const int sets = cuda::Bench::sets_of(bytes);
  const Weights weights(bench, out, cols, sets, 5);
  const std::int64_t items = tokens * kSlots;
  const Input input(bench, slots ? items : tokens, cols, 7);
  const Buffer offsets = to_device(routes.offsets, bench.device());
  const Buffer slot_of = to_device(routes.slot_of, bench.device());
  const Buffer row_of = to_device(routes.row_of, bench.device());
  const Buffer y(bench.device(), items * out * 4);
  cuda::BenchCase one;
  one.name = name;
  one.size = cat({"B ", tokens, ", ", routes.active, " experts"});
  one.bytes = bytes;
  one.flop = 2.0 * static_cast<double>(items) * out * cols;
  one.floor = cuda::Floor::kRead;
  one.sets = sets;
  one.launch = [&](int set, Stream stream) {
    w4a4({.a = input.view,
          .w = weights.view[static_cast<std::size_t>(set)],
          .offsets = view_of(offsets),
          .from = view_of(slots ? slot_of : row_of),
          .to = view_of(slot_of),
          .out = {y.as<float>(), {items, out}, {out, 1}, bench.device()}},
         stream);
  };
  bench.run(one);
}

/// The same products of BF16 activations.
void product16(cuda::Bench& bench, const char* name, std::int32_t out, std::int32_t cols,
               std::int64_t tokens, bool slots, bool sorted = false) {
  const Routes routes(tokens, 11);
  const double bytes = static_cast<double>(routes.active) * out * cols * 0.5625;
  const int sets = cuda::Bench::sets_of(bytes);
  const Weights weights(bench, out, cols, sets, 5);
  const std::int64_t items = tokens * kSlots;
  const std::int64_t rows = slots || sorted ? items : tokens;
  const Buffer x = bench.normal_bf16(rows * cols, 9);
  const Buffer offsets = to_device(routes.offsets, bench.device());
  const Buffer slot_of = to_device(routes.slot_of, bench.device());
  const Buffer row_of = to_device(routes.row_of, bench.device());
  const Buffer y(bench.device(), items * out * 4);
  cuda::BenchCase one;
  one.name = name;
  one.size = cat({"B ", tokens, ", ", routes.active, " experts"});
  one.bytes = bytes;
  one.flop = 2.0 * static_cast<double>(items) * out * cols;
  one.floor = cuda::Floor::kRead;
  one.sets = sets;
  one.launch = [&](int set, Stream stream) {
    w4a16({.x = {x.as<const Bf16>(), {rows, cols}, {cols, 1}, bench.device()},
           .w = weights.view[static_cast<std::size_t>(set)],
           .offsets = view_of(offsets),
           .from = sorted  ? TensorView<const std::int32_t, 1>{}
                   : slots ? view_of(slot_of)
                           : view_of(row_of),
           .to = view_of(slot_of),
           .out = {y.as<float>(), {items, out}, {out, 1}, bench.device()}},
          stream);
  };
  bench.run(one);
}

void products16(cuda::Bench& bench) {
  for (const std::int64_t tokens : {1, 8, 16, 64, 128, 2048, 8192, 32768}) {
    product16(bench, "w4a16 w13", 2 * kWidth, kHidden, tokens, false);
    product16(bench, "w4a16 w2", kHidden, kWidth, tokens, true);
    if (tokens < 2048) continue;
    product16(bench, "w4a16 w13, rows in order", 2 * kWidth, kHidden, tokens, false, true);
    product16(bench, "w4a16 w2, rows in order", kHidden, kWidth, tokens, true, true);
  }
}

void products(cuda::Bench& bench) {
  for (const std::int64_t tokens : {1, 8, 16, 64, 128}) {
    product(bench, "w4a4 w13", 2 * kWidth, kHidden, tokens, false);
    product(bench, "w4a4 w2", kHidden, kWidth, tokens, true);
  }
  product(bench, "w4a4 w13", 2 * kWidth, kHidden, 8192, false);
  product(bench, "w4a4 w2", kHidden, kWidth, 8192, true);
}

/// Both products, SwiGLU, quantization and combination of one layer.
double decode(cuda::Bench& bench, std::int64_t tokens, std::int32_t experts = kExperts) {
  const Device device = bench.device();
  const Routes routes(tokens, 11, experts);
  const double bytes = static_cast<double>(routes.active) * 3 * kHidden * kWidth * 0.5625;
  const int sets = cuda::Bench::sets_of(bytes);
  const Weights gate_up(bench, 2 * kWidth, kHidden, sets, 5, experts);
  const Weights down(bench, kHidden, kWidth, sets, 6, experts);
  const std::int64_t items = tokens * kSlots;
  const Input input(bench, tokens, kHidden, 7);
  const Buffer offsets = to_device(routes.offsets, device);
  const Buffer slot_of = to_device(routes.slot_of, device);
  const Buffer row_of = to_device(routes.row_of, device);
  const Buffer gates =
      to_device(std::vector<float>(static_cast<std::size_t>(items), 0.125f), device);
  const Buffer up(device, items * 2 * kWidth * 4);
  const Buffer codes(device, items * kWidth / 2);
  const Buffer scales(device, items * kWidth / 16);
  const Buffer global(device, items * 4);
  const Buffer y(device, items * kHidden * 4);
  const Buffer out(device, tokens * kHidden * 2);
  cuda::BenchCase one;
  one.name = "moe w4a4, both products";
  one.size = cat({"B ", tokens, ", ", routes.active, " experts"});
  one.bytes = bytes;
  one.flop = 6.0 * static_cast<double>(items) * kHidden * kWidth;
  one.floor = cuda::Floor::kRead;
  one.sets = sets;
  one.launch = [&](int set, Stream stream) {
    const auto at = static_cast<std::size_t>(set);
    moe_w4a4({.a = input.view,
              .gate_up = gate_up.view[at],
              .down = down.view[at],
              .offsets = view_of(offsets),
              .rows_of = view_of(row_of),
              .slots_of = view_of(slot_of),
              .gates = {gates.as<const float>(), {tokens, kSlots}, {kSlots, 1}, device},
              .up = {up.as<float>(), {items, 2 * kWidth}, {2 * kWidth, 1}, device},
              .w2_in = {{codes.as<std::uint8_t>(), {items, kWidth / 2}, {kWidth / 2, 1}, device},
                        {scales.as<std::uint8_t>(), {items, kWidth / 16}, {kWidth / 16, 1}, device},
                        {global.as<float>(), {items}, {1}, device}},
              .y = {y.as<float>(), {items, kHidden}, {kHidden, 1}, device},
              .out = {out.as<Bf16>(), {tokens, kHidden}, {kHidden, 1}, device}},
             stream);
  };
  return bench.run(one);
}

void decodes(cuda::Bench& bench) {
  for (const std::int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 128}) decode(bench, tokens);
}

/// How many experts tokens choose, as the formula has it for draws alike; and the time of decoding
/// by the bytes of those experts. Of 512, so that a few tokens choose many and bytes are what takes
/// the time.
void law_of_experts(cuda::Bench& bench) {
  constexpr std::int32_t kMany = 512;
  cuda::Law chosen = {
      .cost = "experts chosen", .size = "E(1-(1-k/E)^B)", .slope = 1, .within = 0.05};
  cuda::Law time = {
      .cost = "moe decode, time", .size = "experts chosen", .slope = 1, .within = 0.1};
  for (const std::int64_t tokens : {8, 16, 32, 64}) {
    const auto active = static_cast<double>(Routes(tokens, 11, kMany).active);
    const double each = 1 - double{kSlots} / kMany;
    chosen.add(kMany * (1 - std::pow(each, static_cast<double>(tokens))), active);
    time.add(active, decode(bench, tokens, kMany));
  }
  bench.judge(chosen);
  bench.judge(time);
}

const cuda::BenchEntry law_entry("law_moe", law_of_experts);
const cuda::BenchEntry entry("w4a4", products);
const cuda::BenchEntry entry16("w4a16", products16);
const cuda::BenchEntry decode_entry("moe", decodes);

}  // namespace
}  // namespace lockstep::kernels
