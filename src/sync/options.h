#pragma once

#include <cstdint>

namespace lockstep::sync {

enum class NoiseOn : std::uint8_t {
  kNorms,    // the layers' two RMSNorms and the final one: w + sigma e (QeRL's AQN)
  kExperts,  // routed experts, before they are quantized: w + sigma rms(w) e (MXFP4's AQN)
};

/// Noise that the rollout's weights get on their way, and the trainer's never: exploration.
struct Noise {
  NoiseOn on = NoiseOn::kNorms;
  double start = 0.0;  // sigma at first; 0: none
  double end = 0.0;    // and at last
  /// The run in so many equal parts: none in the first, start in the second, end in the last,
  /// falling geometrically; 0: from step to step, from start to end.
  std::int32_t stages = 10;
};

struct Options {
  /// QuRL's update-aware quantization: the first policy's routed experts (gate and up) and router
  /// are divided by this and the norm before them multiplied: the same function of smaller weights.
  double uaq_scale = 1.0;
  Noise noise{};
};

}  // namespace lockstep::sync
