/// Before anything long starts: what contradicts itself or finds no device is refused.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "device/memory.h"
#include "recipe/budget.h"
#include "recipe/recipe.h"

namespace lockstep::recipe {

/// Throws Error for the first contradiction: key, value, remedy. `prompt_tokens` is the longest
/// prompt's length where it is known.
void check(const Recipe& recipe, const Arm& arm, const ModelConfig& model,
           std::int64_t prompt_tokens = 0);

/// The recipe's device, once it is known to be there and to have room for the budget's rollout
/// weights, cache, trainer and evaluation, as they follow each other. Waits for memory that a
/// neighbour gives up within longest_wait(). Throws Error naming what is missing: the bytes of each
/// part where it is memory.
Device ready_device(const std::string& name, const Budget& budget);

/// What a device of that name stands for, and why it is no other.
struct SettledDevice {
  std::string name;
  std::string why;
};

/// What was in the way, of an error that refuses a GPU: without the device's name, and without the
/// remedy to take the CPU, which is for those who asked for the GPU.
std::string why_not_cuda(std::string refusal);

/// Settles "auto"; other names stand for themselves. It is "cuda" where that works, has room for
/// the budget, and `require` does not throw; else "cpu", and `why` says what was in the way: "" on
/// a machine without a GPU.
SettledDevice settle_device(const std::string& name, const Budget& budget,
                            const std::function<void(Device)>& require);

}  // namespace lockstep::recipe
