/// The definition of a row's residual and of its groups' scores.
#include "kernels/exact/residual_row.h"

namespace lockstep::kernels {

void residual_row_portable(const ResidualRow& row) { residual_row_body(row); }

}  // namespace lockstep::kernels
