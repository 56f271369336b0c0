/// Weights from one end to another, quantized on the way as the contract says.
#pragma once

#include <cstdint>

#include "base/metrics.h"
#include "contract/contract.h"
#include "model/weights.h"

namespace lockstep::sync {

/// Is this weight a routed expert's in a layer that the contract quantizes?
bool quantized(const Contract& contract, const WeightId& id);

/// Quantizes what the contract quantizes, hands on the rest in BF16, commits, and requires that
/// the sink's checksums equal the sender's. Trainer to engine, checkpoint to engine, trainer to
/// checkpoint, checkpoint to checkpoint.
///
/// FP32 values are rounded to BF16 first; BF16 values pass as they are. Metrics fp4/refit/{version,
/// bytes, seconds, rel_err}; rel_err is ||Q(W) - W|| / ||W|| over what was quantized. Under MXFP4
/// its parts, fp4/mx/weight/* (kernels::MxError), of some experts of each layer. And what the sink
/// found.
/// Throws Error naming the weight where a value is not finite, where codes are given but another
/// contract is asked for, or where a checksum differs.
Metrics refit(const WeightSource& from, WeightSink& to, const Contract& contract,
              WeightVersion version);

}  // namespace lockstep::sync
