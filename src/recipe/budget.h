/// What a run takes of devices, memory and disk, counted before it begins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "device/memory.h"
#include "recipe/recipe.h"

namespace lockstep::recipe {

struct Budget {
  std::int64_t parameters = 0;
  std::int64_t rollout_weights = 0;  // device
  std::int64_t cache = 0;            // device
  std::int64_t trainers = 1;         // the policy's, and the reference's where there is one
  std::int64_t trainer = 0;          // device: masters, gradients, moments, a copy to compute with
  std::int64_t trainer_most = 0;     // GPU: trainer.memory, or as much as the line above
  std::int64_t evaluation = 0;       // device, at most: an engine of its own, for a while
  std::int64_t read_ahead = 0;       // GPU, at most, and as much of the host's: a pass's records
  std::int64_t swap = 0;             // host
  std::int64_t records = 0;          // host
  std::int64_t checkpoints = 0;      // disk
  std::int64_t records_disk = 0;     // disk, at most
  std::int64_t cache_per_token = 0;
  std::int64_t record_per_token = 0;
  std::int64_t record_per_token_full = 0;  // full codes of every layer

  /// On a GPU the cache makes room for the trainer's activations and records, and for the
  /// evaluation.
  std::int64_t device() const {
    return rollout_weights +
           std::max(trainer_most, trainer + std::max({cache, evaluation, read_ahead}));
  }
  /// On a CPU all of it lies side by side.
  std::int64_t host() const { return rollout_weights + cache + trainer + evaluation; }
};

Budget budget(const Recipe& recipe, const Arm& arm, const ModelConfig& model);

/// Throws Error where trainer.memory is given, not 0, and is no more than what the budget's
/// trainers take of a GPU before a token is read.
void require_trainer_memory(std::int64_t memory, const Budget& budget);

/// A trainer's bytes of a parameter: master, gradient and two moments in FP32; on a GPU the numbers
/// that it computes with, `bf16` or FP32, lie beside them.
std::int64_t trainer_bytes(const std::string& device, bool bf16);

/// Three lines: device, host, disk.
std::string to_string(const Budget& budget);

/// Of a device's memory as it is. Throws Error with the bytes that are there, those needed and what
/// takes them where the budget does not fit.
void require_memory(const std::string& name, const DeviceMemory& memory, const Budget& budget);

/// The same of any `runs` of these at once.
void require_memory_of_all(int runs, std::span<const Budget> budgets, const DeviceMemory& memory);

/// Of the machine's memory: what lies there beside each other on a CPU must fit into what is free,
/// and with it what a run may come to keep, swapped pages, records, and those on their way to a
/// GPU, into all that there is. A 0 of `memory` says nothing. Throws Error with the bytes needed,
/// those there and the key to lower.
void require_host_memory(const DeviceMemory& memory, const Budget& budget, Device device);

/// The first of these of any `runs` at once.
void require_host_memory_of_all(int runs, std::span<const Budget> budgets,
                                const DeviceMemory& memory);

/// "13.8 KiB".
std::string bytes_text(std::int64_t bytes);

/// Bytes that one token leaves with full codes at w13_in, k and v of all layers, routes included:
/// what compact records are compared with.
std::int64_t full_code_bytes(const ModelConfig& model);

}  // namespace lockstep::recipe
