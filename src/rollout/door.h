#pragma once

#include "device/view.h"
#include "record/agreement.h"
#include "rollout/engine.h"

namespace lockstep::rollout {

/// Throws Error, one line naming what, its value and the remedy, where the engine has no way to
/// run that contract with those options on that device.
void require_runs(const Agreement& agreement, const Options& options, Device device);

}  // namespace lockstep::rollout
