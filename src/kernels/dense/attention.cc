#include "kernels/dense/attention.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "kernels/dense/attention_cuda.h"
#include "kernels/dense/attention_rows.h"
#include "kernels/dense/check.h"
#include "kernels/dense/vectors.h"
#include "kernels/exact/quantize.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kTileRows = 16;  // rows of a prefill that read a key block together

std::int32_t bytes_of_row(const Quantizer& rule, std::int64_t width) {
  if (!rule.quantizes()) return static_cast<std::int32_t>(2 * width);
  return static_cast<std::int32_t>(rule.code_bytes(width) + rule.scale_cols(width));
}

void require_cache(const char* op, const PagedKv& kv, std::int64_t width) {
  if (kv.pool == nullptr || kv.page_tokens <= 0 || kv.row_bytes != bytes_of_row(kv.rule, width)) {
    throw Error(cat({op, ": the cache has rows of ", kv.row_bytes, " bytes in pages of ",
                     kv.page_tokens, " tokens; expected rows of ", bytes_of_row(kv.rule, width)}));
  }
  if (!kv.rule.quantizes()) return;
  const bool fp8 = kv.rule.is_wide() && kv.rule.scale == ScaleFormat::kNone;
  const bool mxfp4 = !kv.rule.is_wide() && kv.rule.is_mx();
  const bool nvfp4 = !kv.rule.is_wide() && kv.rule.scale == ScaleFormat::kE4m3;
  if (!mxfp4 && !((fp8 || nvfp4) && kv.rule.global_is_power_of_two)) {
    throw Error(cat({op,
                     ": the cache holds BF16, MXFP4, or NVFP4 or E4M3 under a power of two; the "
                     "contract's rule for K or V is another"}));
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

AttentionOps ops() {
  switch (vectors()) {
    case Vectors::kAvx512Bf16:
    case Vectors::kAvx512: return attention_avx512();
    case Vectors::kAvx2: return attention_avx2();
    case Vectors::kPortable: break;
  }
  return attention_portable();
}

/// What a tile works on. One a thread; memory is kept.
class TileRunner {
 public:
  void run(const AttentionArgs& args, const AttentionOps& ops, const KvTables& k_tables,
           const KvTables& v_tables, const AttentionTile& tile) {
    stride_ = (args.head_dim + kLanes - 1) / kLanes * kLanes;
    group_ = args.num_heads / args.num_kv_heads;
    begin(args, ops, tile);
    const auto* position = args.rows.positions.data() + tile.first_row;
    const std::int32_t last = position[tile.rows - 1];
    const auto sequence = args.rows.sequence[static_cast<std::size_t>(tile.first_row)];
    KvBlock read{.kv = &args.k,
                 .tables = &k_tables,
                 .pages = args.rows.pages[static_cast<std::size_t>(sequence)],
                 .first = 0,
                 .count = 0,
                 .head = tile.kv_head,
                 .heads = args.num_kv_heads,
                 .dim = args.head_dim,
                 .stride = stride_,
                 .out = nullptr};
    HeadBlock block{.keys = keys_.data(),
                    .values = values_.data(),
                    .count = 0,
                    .stride = stride_,
                    .scale = 1.0f / std::sqrt(static_cast<float>(args.head_dim))};
    for (; read.first <= last; read.first += kKeyBlock) {
      read.count = std::min(kKeyBlock, last + 1 - read.first);
      read.kv = &args.k;
      read.tables = &k_tables;
      read.out = keys_.data();
      ops.read(read);
      read.kv = &args.v;
      read.tables = &v_tables;
      read.out = values_.data();
      ops.read(read);
      for (std::int64_t row = 0; row < tile.rows; ++row) {
        if (position[row] < read.first) continue;
        block.count = std::min(kKeyBlock, position[row] + 1 - read.first);
        for (std::int64_t head = row * group_; head < (row + 1) * group_; ++head) {
          ops.take(block, heads_[static_cast<std::size_t>(head)]);
        }
      }
    }
    end(args, ops, tile);
  }

 private:
  /// Queries in FP32, padded with zeros; sums and totals at their start.
  void begin(const AttentionArgs& args, const AttentionOps& ops, const AttentionTile& tile) {
    const std::int64_t dim = args.head_dim;
    const auto heads = static_cast<std::size_t>(tile.rows * group_);
    const auto width = static_cast<std::size_t>(stride_);
    if (dim != dim_) {  // what is past C stays 0
      dim_ = dim;
      keys_.assign(kKeyBlock * width, 0.0f);
      values_.assign(kKeyBlock * width, 0.0f);
    }
    q_.assign(heads * width, 0.0f);
    sums_.assign(heads * width, 0.0f);
    heads_.resize(heads);
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      const Bf16* q =
          args.q.data + (tile.first_row + row) * args.q.stride[0] + tile.kv_head * group_ * dim;
      for (std::int64_t g = 0; g < group_; ++g) {
        const auto head = static_cast<std::size_t>(row * group_ + g);
        float* to = q_.data() + head * width;
        ops.load(q + g * dim, dim, to);
        heads_[head] = {to, sums_.data() + head * width, -std::numeric_limits<float>::infinity(),
                        0.0f};
      }
    }
  }

  void end(const AttentionArgs& args, const AttentionOps& ops, const AttentionTile& tile) const {
    const std::int64_t dim = args.head_dim;
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      Bf16* out =
          args.out.data + (tile.first_row + row) * args.out.stride[0] + tile.kv_head * group_ * dim;
      for (std::int64_t g = 0; g < group_; ++g) {
        ops.store(heads_[static_cast<std::size_t>(row * group_ + g)], dim, out + g * dim);
      }
    }
  }

  std::int64_t stride_ = 0;  // C rounded up to 16
  std::int64_t group_ = 0;   // heads that share a KV head
  std::int64_t dim_ = 0;     // C that keys_ and values_ are laid out for
  std::vector<float> keys_, values_, q_, sums_;
  std::vector<HeadState> heads_;
};

/// Codes of all rows side by side, before they go to their pages. One a thread that calls.
struct Staging {
  std::vector<std::uint8_t> codes, scales;
};

}  // namespace

void write_kv(const WriteKvArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t width = args.x.shape[1];
  const PagedKv& kv = args.kv;
  const Device device = args.x.device;
  require_shape("write_kv", "x", args.x, rows, width, device);
  require_cache("write_kv", kv, width);
  if (on_cuda("write_kv", device)) {
    if constexpr (build::has_cuda) return write_kv_cuda(args, stream);
  }
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
  const std::int64_t codes = kv.rule.code_bytes(width);
  const std::int64_t scales = kv.rule.scale_cols(width);
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
    std::copy_n(staging.scales.data() + row * scales, scales,
                reinterpret_cast<std::uint8_t*>(to) + codes);  // none where n is the only scale
  }
}

void attention(const AttentionArgs& args, Stream stream) {
  const Device device = args.q.device;
  const std::int64_t rows = args.q.shape[0];
  const std::int64_t dim = args.head_dim;
  if (dim <= 0 || args.num_kv_heads <= 0 || args.num_heads % args.num_kv_heads != 0) {
    throw Error(cat({"attention: ", args.num_heads, " heads on ", args.num_kv_heads,
                     " KV heads of ", dim, "; expected a whole number of heads on each"}));
  }
  require_shape("attention", "q", args.q, rows, args.num_heads * dim, device);
  require_shape("attention", "out", args.out, rows, args.num_heads * dim, device);
  require_cache("attention: k", args.k, args.num_kv_heads * dim);
  require_cache("attention: v", args.v, args.num_kv_heads * dim);
  if (on_cuda("attention", device)) {
    if constexpr (build::has_cuda) return attention_cuda(args, stream);
  }
  require_rows("attention", args.rows, rows, std::min(args.k.page_tokens, args.v.page_tokens));
  const std::vector<AttentionTile> work = tiles(args);
  const KvTables k_tables(args.k);
  const KvTables v_tables(args.v);
  const AttentionOps loops = ops();
  parallel_for(
      static_cast<std::int64_t>(work.size()), 4, [&](std::int64_t first, std::int64_t end) {
        static thread_local TileRunner runner;
        for (; first < end; ++first) {
          runner.run(args, loops, k_tables, v_tables, work[static_cast<std::size_t>(first)]);
        }
      });
}

std::int32_t rows_of_tile(std::int32_t group) { return std::max(1, kTileQueries / group); }

std::int64_t attention_workspace(std::int64_t rows, std::int32_t num_heads, std::int32_t head_dim,
                                 std::int32_t longest) {
  return rows * num_heads * splits_of(longest) * (head_dim + 2) *
         static_cast<std::int64_t>(sizeof(float));
}

}  // namespace lockstep::kernels
