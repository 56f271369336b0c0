#pragma once

#include <cstdint>
#include <span>

#include "device/comm.h"
#include "train/parameters.h"
#include "train/trainer.h"

namespace lockstep::train {

/// The learning rate of update number `update`, counted from 0: a linear rise over the first
/// `warmup_updates`, then the decay, which ends at `decay_updates` and stays there.
double learning_rate(const Options& options, std::int64_t update);

/// to += from.
void add(const Floats& to, const Floats& from);

/// Adds the numbers of all ranks in rank order. Collective.
void sum_over_ranks(const Floats& numbers, Comm& comm);

/// The Euclidean norm, in double and a fixed order. Waits for the stream.
double norm_of(const Floats& numbers, Stream stream = {});

/// AdamW with decoupled weight decay on every weight, in FP32: update number `update`, counted from
/// 0, with gradients multiplied by `scale`.
void adamw(Parameters& parameters, const Floats& grads, const Options& options, std::int64_t update,
           double scale, Stream stream = {});

}  // namespace lockstep::train
