/// Weights from one end to another, quantized on the way as the contract says.
#pragma once

#include <cstdint>

#include "base/metrics.h"
#include "contract/contract.h"
#include "model/weights.h"

namespace lockstep::sync {

/// Quantizes what the contract quantizes, hands on the rest in BF16, commits, and requires that
/// the sink's checksums equal the sender's. Trainer to engine, checkpoint to engine, trainer to
/// checkpoint, checkpoint to checkpoint.
Metrics refit(const WeightSource& from, WeightSink& to, const Contract& contract,
              WeightVersion version);

}  // namespace lockstep::sync
