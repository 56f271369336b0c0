#include <algorithm>
#include <numeric>
#include <random>

#include "base/text.h"
#include "device/cuda/bench.h"
#include "kernels/dense/attention.h"
#include "kernels/dense/check.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

using cuda::Bench;
using cuda::BenchCase;

struct Heads {
  std::int32_t all, kv, dim;

  std::int64_t width() const { return std::int64_t{all} * dim; }
  std::int64_t kv_width() const { return std::int64_t{kv} * dim; }
};
constexpr Heads kLarge = {32, 4, 128};
constexpr Heads kSmall = {8, 4, 32};
constexpr Quantizer kNvfp4 = {.element = Element::kE2m1,
                              .scale = ScaleFormat::kE4m3,
                              .global = GlobalScale::kStatic,
                              .global_is_power_of_two = true};

/// K and V of one layer for some sequences, in pages that lie in no order.
struct Cache {
  Heads heads;
  Quantizer rule;
  Buffer pool, table, positions, sequence, tiles, q, out, workspace;
  std::int64_t rows = 0, batch = 0, pages_each = 0, sequence_tokens = 0;
  std::int32_t page_tokens = 16, row_bytes = 0;
  std::int64_t tile_count = 0;

  std::int64_t page_bytes() const { return 2ll * page_tokens * row_bytes; }
};

/// Some rows of the codes of normal numbers, made on the host.
std::vector<std::uint8_t> some_rows(const Quantizer& rule, std::int64_t width) {
  const std::int64_t rows = 4096;
  std::mt19937 random(7);
  std::normal_distribution<float> gauss;
  std::vector<Bf16> x(static_cast<std::size_t>(rows * width));
  for (Bf16& value : x) value = to_bf16(gauss(random));
  const std::int64_t codes = rule.code_bytes(width), scales = rule.scale_cols(width);
  std::vector<std::uint8_t> part(static_cast<std::size_t>(rows * (codes + scales)));
  const std::int64_t row = codes + scales;
  quantize({.x = rows_of<const Bf16>(x.data(), rows, width),
            .rule = rule,
            .exponent = -7,
            .out = {.codes = {part.data(), {rows, codes}, {row, 1}},
                    .scales = {part.data() + codes, {rows, scales}, {row, 1}},
                    .global = {}}});
  return part;
}

/// A pool full of the codes of normal numbers: the same ones many times over.
Buffer full_pool(const Bench& bench, const Heads& heads, const Quantizer& rule, std::int64_t bytes,
                 std::uint64_t seed) {
  if (!rule.quantizes()) return bench.normal_bf16(bytes / 2, seed);
  const std::vector<std::uint8_t> part = some_rows(rule, heads.kv_width());
  const Buffer made = to_device(part, bench.device());
  Buffer pool(bench.device(), bytes);
  for (std::int64_t at = 0; at < bytes; at += made.bytes()) {
    copy_bytes(pool.as<>() + at, bench.device(), made.as<void>(), bench.device(),
               std::min(made.bytes(), bytes - at), {});
  }
  synchronize(bench.device());
  return pool;
}

/// `chunk` rows at the end of each of `batch` sequences of `tokens`.
Cache make_cache(const Bench& bench, const Heads& heads, const Quantizer& rule, std::int64_t batch,
                 std::int64_t tokens, std::int64_t chunk, std::uint64_t seed) {
  Cache c;
  const std::int64_t width = heads.kv_width();
  c.heads = heads;
  c.rule = rule;
  c.rows = batch * chunk;
  c.batch = batch;
  c.sequence_tokens = tokens;
  c.row_bytes = static_cast<std::int32_t>(
      rule.quantizes() ? rule.code_bytes(width) + rule.scale_cols(width) : 2 * width);
  c.pages_each = (tokens + c.page_tokens - 1) / c.page_tokens;
  c.pool = full_pool(bench, heads, rule, batch * c.pages_each * c.page_bytes(), seed);
  std::vector<std::int32_t> table(static_cast<std::size_t>(batch * c.pages_each));
  std::iota(table.begin(), table.end(), 0);
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  std::shuffle(table.begin(), table.end(), random);
  std::vector<std::int32_t> positions, sequence;
  std::vector<RowTile> tiles;
  const std::int32_t together = rows_of_tile(heads.all / heads.kv);
  for (std::int64_t s = 0; s < batch; ++s) {
    for (std::int64_t i = 0; i < chunk; ++i) {
      if (i % together == 0) {
        tiles.push_back({static_cast<std::int32_t>(positions.size()),
                         static_cast<std::int32_t>(std::min<std::int64_t>(together, chunk - i))});
      }
      positions.push_back(static_cast<std::int32_t>(tokens - chunk + i));
      sequence.push_back(static_cast<std::int32_t>(s));
    }
  }
  c.table = to_device(table, bench.device());
  c.positions = to_device(positions, bench.device());
  c.sequence = to_device(sequence, bench.device());
  c.tiles = to_device(tiles, bench.device());
  c.tile_count = static_cast<std::int64_t>(tiles.size());
  c.q = bench.normal_bf16(c.rows * heads.width(), seed + 1);
  c.out = Buffer(bench.device(), c.rows * heads.width() * 2);
  if (chunk == 1) {
    c.workspace = Buffer(bench.device(), attention_workspace(c.rows, heads.all, heads.dim,
                                                             static_cast<std::int32_t>(tokens)));
  }
  return c;
}

void launch(const Bench& bench, const Cache& c, bool in_tiles, Stream stream) {
  PagedKv k{.pool = c.pool.as<>(),
            .page_bytes = c.page_bytes(),
            .offset = 0,
            .page_tokens = c.page_tokens,
            .row_bytes = c.row_bytes,
            .rule = c.rule,
            .exponent = -7};
  PagedKv v = k;
  v.offset = c.page_bytes() / 2;
  const auto rows = static_cast<std::size_t>(c.rows);
  attention({.q = rows_of(c.q.as<const Bf16>(), c.rows, c.heads.width(), bench.device()),
             .k = k,
             .v = v,
             .rows = {.positions = {c.positions.as<std::int32_t>(), rows},
                      .sequence = {c.sequence.as<std::int32_t>(), rows},
                      .pages = {},
                      .table = rows_of(c.table.as<const std::int32_t>(), c.batch, c.pages_each,
                                       bench.device()),
                      .longest = static_cast<std::int32_t>(c.sequence_tokens),
                      .tiles = {c.tiles.as<RowTile>(),
                                in_tiles ? static_cast<std::size_t>(c.tile_count) : 0}},
             .num_heads = c.heads.all,
             .num_kv_heads = c.heads.kv,
             .head_dim = c.heads.dim,
             .out = rows_of(c.out.as<Bf16>(), c.rows, c.heads.width(), bench.device()),
             .workspace = {c.workspace.as<>(), static_cast<std::size_t>(c.workspace.bytes())}},
            stream);
}

struct Size {
  std::int64_t batch, tokens;
};

/// Microseconds of one layer.
double run_decode(Bench& bench, const Heads& heads, const Quantizer& rule, const Size& size) {
  const auto width = static_cast<double>(heads.kv_width());
  const double row = rule.quantizes() ? width * 9 / 16 : width * 2;
  const double bytes = 2 * row * static_cast<double>(size.batch * size.tokens);
  const int sets = Bench::sets_of(bytes);
  std::vector<Cache> caches;
  for (int i = 0; i < sets; ++i) {
    caches.push_back(make_cache(bench, heads, rule, size.batch, size.tokens, 1,
                                static_cast<std::uint64_t>(100 + i)));
  }
  return bench.run({.name = rule.quantizes() ? "decode nvfp4 kv" : "decode bf16 kv",
                    .size = cat({"B=", size.batch, " C=", size.tokens}),
                    .bytes = bytes,
                    .floor = cuda::Floor::kRead,
                    .sets = sets,
                    .launch = [&](int set, Stream stream) {
                      launch(bench, caches[static_cast<std::size_t>(set)], false, stream);
                    }});
}

void decode(Bench& bench) {
  bench.heading("attention, decode: 32 heads on 4 KV heads of 128, pages of 16 tokens");
  for (const Size size :
       {Size{1, 2048}, {1, 32768}, {4, 8192}, {16, 8192}, {64, 8192}, {1, 131072}, {8, 32768}}) {
    for (const Quantizer& rule : {kNvfp4, Quantizer{}}) run_decode(bench, kLarge, rule, size);
  }
  bench.heading("the same, 8 heads on 4 KV heads of 32");
  for (const Size size : {Size{64, 272}, {512, 272}, {512, 1024}}) {
    for (const Quantizer& rule : {kNvfp4, Quantizer{}}) run_decode(bench, kSmall, rule, size);
  }
}

/// Time by tokens in the cache, whether sequences or their lengths make them many.
void law_of_keys(Bench& bench) {
  cuda::Law sequences = {
      .cost = "decode attention, time", .size = "sequences of 32K", .slope = 1, .within = 0.1};
  cuda::Law lengths = sequences;
  lengths.size = "tokens of 32 sequences";
  for (const std::int64_t batch : {8, 16, 32, 64}) {
    sequences.add(static_cast<double>(batch), run_decode(bench, kLarge, kNvfp4, {batch, 32768}));
  }
  for (const std::int64_t tokens : {8192, 16384, 32768, 65536}) {
    lengths.add(static_cast<double>(tokens), run_decode(bench, kLarge, kNvfp4, {32, tokens}));
  }
  bench.judge(sequences);
  bench.judge(lengths);
}

void prefill(Bench& bench) {
  bench.heading(
      "attention, prefill of a chunk at the end of a sequence; floor by FLOP of whole keys");
  struct Size {
    std::int64_t batch, tokens, chunk;
  };
  for (const Size size : {Size{1, 8192, 2048}, {4, 2048, 2048}}) {
    for (const Quantizer& rule : {kNvfp4, Quantizer{}}) {
      const Cache cache = make_cache(bench, kLarge, rule, size.batch, size.tokens, size.chunk, 7);
      const double keys = static_cast<double>(size.tokens) - static_cast<double>(size.chunk) / 2;
      bench.run({.name = rule.quantizes() ? "prefill nvfp4 kv" : "prefill bf16 kv",
                 .size = cat({"B=", size.batch, " C=", size.tokens, " rows=", size.chunk}),
                 .bytes = static_cast<double>(cache.pool.bytes()),
                 .flop = 4.0 * static_cast<double>(kLarge.width()) * keys *
                         static_cast<double>(cache.rows),
                 .floor = cuda::Floor::kRead,
                 .launch = [&](int, Stream stream) { launch(bench, cache, true, stream); },
                 .launches = 3});
    }
  }
}

const cuda::BenchEntry kKeys("law_attention", law_of_keys);
const cuda::BenchEntry kDecode("attention_decode", decode);
const cuda::BenchEntry kPrefill("attention_prefill", prefill);

}  // namespace
}  // namespace lockstep::kernels
