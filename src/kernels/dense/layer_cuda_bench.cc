/// What a layer of Qwen3-30B-A3B does between its products, as it does it.
#include <vector>

#include "base/text.h"
#include "device/cuda/bench.h"
#include "kernels/dense/add_norm.h"
#include "kernels/dense/check.h"
#include "kernels/dense/heads.h"
#include "kernels/dense/route.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

using cuda::Bench;

constexpr Quantizer kCacheRule = {.element = Element::kE2m1,
                                  .scale = ScaleFormat::kE4m3,
                                  .global = GlobalScale::kStatic,
                                  .global_is_power_of_two = true};
constexpr std::int64_t kHidden = 2048, kExperts = 128, kSlots = 8;
constexpr std::int32_t kDim = 128, kHeads = 32, kGroups = 4, kPage = 16, kTokens = 4096;

TensorView<Bf16, 2> matrix(const Buffer& of, int set, std::int64_t rows, std::int64_t cols) {
  return rows_of(of.as<Bf16>() + set * rows * cols, rows, cols, of.device());
}

std::span<const Bf16> numbers(const Buffer& of) {
  return {of.as<const Bf16>(), static_cast<std::size_t>(of.bytes()) / sizeof(Bf16)};
}

std::span<std::int32_t> whole(const Buffer& of) {
  return {of.as<std::int32_t>(), static_cast<std::size_t>(of.bytes()) / 4};
}

/// Queries and keys normed and turned, all looked at, keys and values put into an NVFP4 cache.
void heads_placed(Bench& bench, std::int64_t rows) {
  constexpr std::int64_t kCols = (kHeads + 2 * kGroups) * kDim, kPages = kTokens / kPage;
  const Device device = bench.device();
  const std::int64_t row_bytes = kCacheRule.code_bytes(kGroups * kDim) + kGroups * kDim / 16;
  const double bytes = static_cast<double>(rows * kCols) * 4;
  const int sets = Bench::sets_of(bytes);
  const Buffer qkv = bench.normal_bf16(rows * kCols * sets, 9), norm = bench.normal_bf16(kDim, 1);
  std::vector<std::int32_t> positions, sequence;
  for (std::int32_t i = 0; i < rows; ++i) {
    positions.push_back(i * 37 % kTokens);
    sequence.push_back(i);
  }
  std::vector<std::int32_t> pages(static_cast<std::size_t>(rows * kPages));
  for (std::size_t i = 0; i < pages.size(); ++i) {
    pages[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) / kPages);
  }
  const Buffer at = to_device(positions, device), of = to_device(sequence, device),
               pages_of = to_device(pages, device), pool(device, rows * kPage * row_bytes * 2),
               bad(device, 4), counts(device, 8 * kNumQuantizeCounts);
  RopeTable table(1e6, kDim, device);
  table.grow(kTokens);
  PagedKv k{};
  k.pool = pool.as<std::byte>();
  k.page_bytes = kPage * row_bytes * 2;
  k.page_tokens = kPage;
  k.row_bytes = static_cast<std::int32_t>(row_bytes);
  k.rule = kCacheRule;
  PagedKv v = k;
  v.offset = kPage * row_bytes;
  const PagedRows where = {
      .positions = whole(at),
      .sequence = whole(of),
      .pages = {},
      .table = rows_of(pages_of.as<const std::int32_t>(), rows, kPages, device)};
  bench.run({.name = "place_heads",
             .size = cat({"rows=", rows}),
             .bytes = bytes,
             .sets = sets,
             .launch = [&](int set, Stream stream) {
               place_heads(
                   {.qkv = matrix(qkv, set, rows, kCols),
                    .num_heads = kHeads,
                    .num_kv_heads = kGroups,
                    .head_dim = kDim,
                    .table = &table,
                    .q_norm = numbers(norm),
                    .k_norm = numbers(norm),
                    .k = k,
                    .v = v,
                    .rows = where,
                    .counts = {counts.as<std::int64_t>(), {kNumQuantizeCounts}, {1}, device},
                    .bad = bad.as<std::int32_t>()},
                   stream);
             }});
}

void sums_normed(Bench& bench, std::int64_t rows) {
  const double bytes = static_cast<double>(rows * kHidden) * 8;
  const int sets = Bench::sets_of(bytes);
  const Buffer x = bench.normal_bf16(rows * kHidden * sets, 2),
               h = bench.normal_bf16(rows * kHidden * sets, 3), y(bench.device(), x.bytes()),
               weight = bench.normal_bf16(kHidden, 4), bad(bench.device(), 8);
  bench.run({.name = "add_norm",
             .size = cat({"rows=", rows}),
             .bytes = bytes,
             .sets = sets,
             .launch = [&](int set, Stream stream) {
               add_norm({.x = matrix(x, set, rows, kHidden),
                         .h = matrix(h, set, rows, kHidden),
                         .bad = bad.as<std::int32_t>(),
                         .weight = numbers(weight),
                         .y = matrix(y, set, rows, kHidden),
                         .bad_y = bad.as<std::int32_t>() + 1},
                        stream);
             }});
}

/// The same behind the experts, whose slots are added up first.
void slots_normed(Bench& bench, std::int64_t rows) {
  const double bytes = static_cast<double>(rows * kHidden) * (6 + 4 * kSlots);
  const int sets = Bench::sets_of(bytes);
  const Buffer h = bench.normal_bf16(rows * kHidden * sets, 3), x(bench.device(), h.bytes()),
               y(bench.device(), h.bytes()), weight = bench.normal_bf16(kHidden, 4),
               bad(bench.device(), 8), gates = bench.normal_bf16(rows * kSlots * 2, 5),
               outputs = bench.normal_bf16(rows * kSlots * kHidden * 2 * sets, 6);  // as FP32
  for (const bool apart : {false, true}) {
    bench.run({.name = apart ? "slots added up, add_norm" : "add_norm of slots",
               .size = cat({"rows=", rows}),
               .bytes = bytes,
               .sets = sets,
               .launch = [&](int set, Stream stream) {
                 const std::int64_t items = rows * kSlots;
                 const auto slots = rows_of(outputs.as<const float>() + set * items * kHidden,
                                            items, kHidden, bench.device());
                 const auto by = rows_of(gates.as<const float>(), rows, kSlots, bench.device());
                 AddNormArgs args = {.x = matrix(x, set, rows, kHidden),
                                     .h = matrix(h, set, rows, kHidden),
                                     .bad = bad.as<std::int32_t>(),
                                     .outputs = slots,
                                     .gates = by,
                                     .weight = numbers(weight),
                                     .y = matrix(y, set, rows, kHidden)};
                 if (apart) {
                   combine({.y = slots, .gates = by, .out = args.x}, stream);
                   args.outputs = {};
                 }
                 add_norm(args, stream);
               }});
  }
}

/// Logits, the choice of experts, the order of the items.
void routed(Bench& bench, std::int64_t rows) {
  constexpr int kSets = 64;
  const Device device = bench.device();
  const Buffer w = bench.normal_bf16(kExperts * kHidden * kSets, 5, 0.02f),
               x = bench.normal_bf16(rows * kHidden * kSets, 6),
               logits(device, rows * kExperts * 4), experts(device, rows * kSlots * 4),
               gates(device, rows * kSlots * 4), offsets(device, 4 * (kExperts + 1)),
               row_of(device, rows * kSlots * 4), slot_of(device, rows * kSlots * 4);
  bench.run({.name = "router's product, choice, order",
             .size = cat({"rows=", rows}),
             .bytes = static_cast<double>((kExperts + rows) * kHidden * 2),
             .floor = cuda::Floor::kRead,
             .sets = kSets,
             .launch = [&](int set, Stream stream) {
               route({.x = matrix(x, set, rows, kHidden),
                      .weight = {matrix(w, set, kExperts, kHidden).data, kExperts, kHidden, device},
                      .settled = true,
                      .logits = rows_of(logits.as<float>(), rows, kExperts, device),
                      .experts = rows_of(experts.as<std::int32_t>(), rows, kSlots, device),
                      .gates = rows_of(gates.as<float>(), rows, kSlots, device),
                      .offsets = whole(offsets),
                      .row_of = whole(row_of),
                      .slot_of = whole(slot_of)},
                     stream);
             }});
}

void layer(Bench& bench) {
  bench.heading(
      "a layer between its products: width 2048, 32 and 4 heads of 128, 8 of 128 experts");
  for (const std::int64_t rows : {1, 8, 64, 128, 4096}) {
    heads_placed(bench, rows);
    sums_normed(bench, rows);
    routed(bench, rows);
  }
  for (const std::int64_t rows : {64, 256, 512, 4096}) slots_normed(bench, rows);
}

const cuda::BenchEntry kLayer("dense_layer", layer);

}  // namespace
}  // namespace lockstep::kernels
