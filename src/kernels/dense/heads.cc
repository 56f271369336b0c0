#include "kernels/dense/heads.h"

#include "kernels/dense/check.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/heads_rows.h"

namespace lockstep::kernels {
namespace {

/// Heads [first, first + count) of each row.
TensorView<Bf16, 2> part_of(const PlaceHeadsArgs& args, std::int64_t first, std::int64_t count) {
  return {args.qkv.data + first * args.head_dim,
          {args.qkv.shape[0], count * args.head_dim},
          args.qkv.stride,
          args.qkv.device};
}

}  // namespace

void place_heads(const PlaceHeadsArgs& args, Stream stream) {
  const std::int64_t rows = args.qkv.shape[0], heads = args.num_heads, groups = args.num_kv_heads;
  const Device device = args.qkv.device;
  if (args.head_dim <= 0 || args.head_dim % 2 != 0 || heads <= 0 || groups <= 0) {
    throw Error(cat({"place_heads: ", heads, " heads and ", groups, " KV heads of ", args.head_dim,
                     "; expected some of each, of an even number"}));
  }
  require_shape("place_heads", "qkv", args.qkv, rows, (heads + 2 * groups) * args.head_dim, device);
  if (args.table == nullptr || args.table->device() != device || args.bad == nullptr) {
    throw Error("place_heads: table and bad must be there, on the device where qkv lies");
  }
  if (on_cuda("place_heads", device)) {
    if constexpr (build::has_cuda) {
      if (place_heads_cuda(args, stream)) return;
    }
  }
  RopeArgs turn{.x = part_of(args, 0, heads),
                .head_dim = args.head_dim,
                .positions = args.rows.positions,
                .table = args.table,
                .norm = args.q_norm,
                .eps = args.eps};
  rope(turn, stream);
  turn.x = part_of(args, heads, groups);
  turn.norm = args.k_norm;
  rope(turn, stream);
  first_nonfinite(args.qkv, args.bad, stream);
  write_kv({.x = turn.x, .kv = args.k, .rows = args.rows, .counts = args.counts}, stream);
  write_kv({.x = part_of(args, heads + groups, groups),
            .kv = args.v,
            .rows = args.rows,
            .counts = args.counts},
           stream);
}

}  // namespace lockstep::kernels
