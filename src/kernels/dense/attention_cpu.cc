#include "kernels/dense/attention_rows.h"

namespace lockstep::kernels {

void attention_portable(const AttentionArgs& args, const KvTables& k_tables,
                        const KvTables& v_tables, const AttentionTile& tile,
                        AttentionScratch& scratch) {
  attention_tile_body(args, k_tables, v_tables, tile, scratch);
}

}  // namespace lockstep::kernels
