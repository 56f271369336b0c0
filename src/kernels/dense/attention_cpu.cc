#include "kernels/dense/attention_rows.h"

namespace lockstep::kernels {

KvTables::KvTables(std::int8_t exponent) {
  const float global = float_of(static_cast<std::uint32_t>(127 + exponent) << 23);
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    pairs[byte][0] = to_float(static_cast<E2m1>(static_cast<std::uint8_t>(byte & 15)));
    pairs[byte][1] = to_float(static_cast<E2m1>(static_cast<std::uint8_t>(byte >> 4)));
    scales[byte] = to_float(static_cast<E4m3>(static_cast<std::uint8_t>(byte & 127))) * global;
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
