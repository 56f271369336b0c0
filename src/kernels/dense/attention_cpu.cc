#include "kernels/dense/attention_rows.h"
#include "numerics/scale.h"

namespace lockstep::kernels {

KvTables::KvTables(const PagedKv& kv) {
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    pairs[byte][0] = to_float(static_cast<E2m1>(static_cast<std::uint8_t>(byte & 15)));
    pairs[byte][1] = to_float(static_cast<E2m1>(static_cast<std::uint8_t>(byte >> 4)));
    const auto scale = static_cast<std::uint8_t>(kv.rule.is_mx() ? byte : byte & 127);
    scales[byte] = scale_value(kv.rule, scale, kv.exponent);
    wide[byte] =
        to_float(static_cast<E4m3>(static_cast<std::uint8_t>(byte))) * power_of_two(kv.exponent);
  }
}

AttentionOps attention_portable() {
  return {
      .load = [](const Bf16* q, std::int64_t dim, float* out) { load_query(q, dim, out); },
      .store = [](const HeadState& head, std::int64_t dim,
                  Bf16* out) { store_head(head, dim, out); },
      .read = [](const KvBlock& block) { read_block(block); },
      .take = [](const HeadBlock& block, HeadState& head) { take_block(block, head); },
  };
}

}  // namespace lockstep::kernels
