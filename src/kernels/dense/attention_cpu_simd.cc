#include "kernels/dense/attention_rows.h"

// The same tile, compiled with wider vectors.
namespace lockstep::kernels {

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
void attention_avx512(const AttentionArgs& args, const KvTables& k_tables,
                      const KvTables& v_tables, const AttentionTile& tile,
                      AttentionScratch& scratch) {
  attention_tile_body(args, k_tables, v_tables, tile, scratch);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
void attention_avx2(const AttentionArgs& args, const KvTables& k_tables, const KvTables& v_tables,
                    const AttentionTile& tile, AttentionScratch& scratch) {
  attention_tile_body(args, k_tables, v_tables, tile, scratch);
}

}  // namespace lockstep::kernels
