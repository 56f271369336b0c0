#include "kernels/dense/attention.h"

#include <cstring>

#include "base/parallel.h"
#include "kernels/dense/attention_rows.h"
#include "kernels/dense/check.h"
#include "kernels/dense/vectors.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kTileRows = 16;  // rows of a prefill that read a key block together

std::int32_t bytes_of_row(const Quantizer& rule, std::int64_t width) {
  if (rule.element == Element::kBf16) return static_cast<std::int32_t>(2 * width);
  return static_cast<std::int32_t>(width / 2 + width / rule.block);
}

void require_cache(const char* op, const PagedKv& kv, std::int64_t width) {
  if (kv.pool == nullptr || kv.page_tokens <= 0 || kv.row_bytes != bytes_of_row(kv.rule, width)) {
    throw Error(cat({op, ": the cache has rows of ", kv.row_bytes, " bytes in pages of ",
                     kv.page_tokens, " tokens; expected rows of ", bytes_of_row(kv.rule, width)}));
  }
  if (kv.rule.element == Element::kBf16) return;
  if (kv.rule.element != Element::kE2m1 || kv.rule.scale != ScaleFormat::kE4m3 ||
      !kv.rule.global_is_power_of_two) {
    throw Error(cat({op,
                     ": the cache holds BF16, or E2M1 under E4M3 scales and a power of two; "
                     "the contract's rule for K or V is another"}));
  }
}

/// Every row has a sequence and a page for each position up to its own.
void require_rows(const char* op, const PagedRows& rows, std::int64_t count,
                  std::int32_t page_tokens) {
  if (static_cast<std::int64_t>(rows.positions.size()) != count ||
      static_cast<std::int64_t>(rows.sequence.size()) != count) {
    throw Error(cat({op, ": ", rows.positions.size(), " positions and ", rows.sequence.size(),
                     " sequences for ", count, " rows"}));
  }
  for (std::size_t i = 0; i < rows.positions.size(); ++i) {
    const auto sequence = static_cast<std::size_t>(rows.sequence[i]);
    const bool known = rows.sequence[i] >= 0 && sequence < rows.pages.size();
    const std::int64_t held =
        known ? static_cast<std::int64_t>(rows.pages[sequence].size()) * page_tokens : 0;
    if (rows.positions[i] < 0 || rows.positions[i] >= held) {
      throw Error(cat({op, ": row ", i, " is at position ", rows.positions[i], " of sequence ",
                       rows.sequence[i], ", whose pages hold ", held, " tokens"}));
    }
  }
}

/// Runs of rows of one sequence at rising positions, cut to tiles, for each KV head.
std::vector<AttentionTile> tiles(const AttentionArgs& args) {
  std::vector<AttentionTile> result;
  const std::int64_t rows = args.q.shape[0];
  result.reserve(static_cast<std::size_t>(rows * args.num_kv_heads));
  for (std::int64_t first = 0, end = 0; first < rows; first = end) {
    const auto i = [](std::int64_t row) { return static_cast<std::size_t>(row); };
    for (end = first + 1; end < rows && end < first + kTileRows; ++end) {
      if (args.rows.sequence[i(end)] != args.rows.sequence[i(first)]) break;
      if (args.rows.positions[i(end)] <= args.rows.positions[i(end - 1)]) break;
    }
    for (std::int32_t head = 0; head < args.num_kv_heads; ++head) {
      result.push_back({first, end - first, head});
    }
  }
  return result;
}

void run_tile(const AttentionArgs& args, const KvTables& k, const KvTables& v,
              const AttentionTile& tile, AttentionScratch& scratch) {
  switch (vectors()) {
    case Vectors::kAvx512Bf16:
    case Vectors::kAvx512: return attention_avx512(args, k, v, tile, scratch);
    case Vectors::kAvx2: return attention_avx2(args, k, v, tile, scratch);
    case Vectors::kPortable: return attention_portable(args, k, v, tile, scratch);
  }
}

/// Codes of all rows side by side, before they go to their pages. One a thread that calls.
struct Staging {
  std::vector<std::uint8_t> codes, scales;
};

}  // namespace

void write_kv(const WriteKvArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t width = args.x.shape[1];
  const PagedKv& kv = args.kv;
  require_shape("write_kv", "x", args.x, rows, width);
  require_cache("write_kv", kv, width);
  require_rows("write_kv", args.rows, rows, kv.page_tokens);
  const auto target = [&](std::int64_t row) {
    const auto i = static_cast<std::size_t>(row);
    return kv.row(args.rows.pages[static_cast<std::size_t>(args.rows.sequence[i])],
                  args.rows.positions[i]);
  };
  if (kv.rule.element == Element::kBf16) {
    for (std::int64_t row = 0; row < rows; ++row) {
      std::memcpy(target(row), args.x.data + row * args.x.stride[0],
                  static_cast<std::size_t>(2 * width));
    }
    return;
  }
  static thread_local Staging staging;
  const std::int64_t codes = width / 2;
  const std::int64_t scales = width / kv.rule.block;
  staging.codes.resize(static_cast<std::size_t>(rows * codes));
  staging.scales.resize(static_cast<std::size_t>(rows * scales));
  quantize({.x = args.x,
            .rule = kv.rule,
            .exponent = kv.exponent,
            .out = {.codes = rows_of(staging.codes.data(), rows, codes),
                    .scales = rows_of(staging.scales.data(), rows, scales),
                    .global = {}},
            .counts = args.counts},
           stream);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::byte* to = target(row);
    std::memcpy(to, staging.codes.data() + row * codes, static_cast<std::size_t>(codes));
    std::memcpy(to + codes, staging.scales.data() + row * scales, static_cast<std::size_t>(scales));
  }
}

void attention(const AttentionArgs& args, Stream) {
  const std::int64_t rows = args.q.shape[0];
  const std::int64_t dim = args.head_dim;
  if (dim <= 0 || args.num_kv_heads <= 0 || args.num_heads % args.num_kv_heads != 0) {
    throw Error(cat({"attention: ", args.num_heads, " heads on ", args.num_kv_heads,
                     " KV heads of ", dim, "; expected a whole number of heads on each"}));
  }
  require_shape("attention", "q", args.q, rows, args.num_heads * dim);
  require_shape("attention", "out", args.out, rows, args.num_heads * dim);
  require_cache("attention: k", args.k, args.num_kv_heads * dim);
  require_cache("attention: v", args.v, args.num_kv_heads * dim);
  require_rows("attention", args.rows, rows, std::min(args.k.page_tokens, args.v.page_tokens));
  const std::vector<AttentionTile> work = tiles(args);
  const KvTables k_tables(args.k.exponent);
  const KvTables v_tables(args.v.exponent);
  parallel_for(
      static_cast<std::int64_t>(work.size()), 4, [&](std::int64_t first, std::int64_t end) {
        static thread_local AttentionScratch scratch;
        for (; first < end; ++first) {
          run_tile(args, k_tables, v_tables, work[static_cast<std::size_t>(first)], scratch);
        }
      });
}

}  // namespace lockstep::kernels
