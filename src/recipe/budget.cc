#include "recipe/budget.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "model/names.h"
#include "record/agreement.h"

namespace lockstep::recipe {
namespace {

/// Bytes of a row of `width` elements under a rule.
std::int64_t row_bytes(const Quantizer& rule, std::int64_t width) {
  if (!rule.quantizes()) return 2 * width;
  return rule.code_bytes(width) + rule.scale_cols(width) / rule.block_rows + rule.macro_cols(width);
}

/// The bytes that are there beside those that are needed: to the byte where both round to the same.
std::string beside(std::int64_t there, std::int64_t needed) {
  const std::string text = bytes_text(there);
  return text == bytes_text(needed) ? cat({there, " B"}) : text;
}

}  // namespace

void require_trainer_memory(std::int64_t memory, const Budget& b) {
  if (memory == 0 || memory > b.trainer) return;
  const char* const of = b.trainers > 1 ? " of the policy's trainer and the reference's, each of "
                                        : " of a trainer of ";
  throw Error(cat({"trainer.memory is ", bytes_text(memory), ", and weights, gradients and moments",
                   of, b.parameters, " parameters take ", bytes_text(b.trainer),
                   " of it before a token is read: raise it, or set it to 0 for what is free"}));
}

std::int64_t trainer_bytes(const std::string& device, bool bf16) {
  if (device == kAutoDevice || device_named(device).kind == Device::Kind::kCpu) return 16;
  return bf16 ? 18 : 20;
}

Budget budget(const Recipe& recipe, const Arm& arm, const ModelConfig& model) {
  Budget b;
  std::int64_t codes = 0;
  for (const WeightId& id : weight_ids(model)) {
    const auto [out, in] = weight_shape(model, id.role);
    b.parameters += out * in;
    const bool packed = of_expert(id.role) && arm.contract.layers.has(id.layer);
    const std::int64_t coded = out * row_bytes(arm.contract.weight, in);
    b.rollout_weights += packed ? coded : out * in * 2;
    if (packed && arm.qat.real_product) codes += coded;  // the trainer's own
  }
  b.cache = recipe.rollout.cache_bytes;
  b.trainers = arm.rl.kl_weight > 0 ? 2 : 1;
  b.trainer =
      (trainer_bytes(recipe.device, recipe.trainer.bf16) * b.parameters + codes) * b.trainers;
  const bool is_limited =
      recipe.device != kAutoDevice && device_named(recipe.device).kind == Device::Kind::kCuda;
  b.trainer_most = std::max(b.trainer, is_limited ? recipe.trainer.memory_bytes : 0);
  b.swap = recipe.rollout.swap_bytes;
  b.records = recipe.store.ram_bytes;
  const std::int64_t kept = recipe.schedule.keep_checkpoints;
  const std::int64_t written = std::max<std::int64_t>(
      1, (recipe.schedule.steps + recipe.schedule.save_every - 1) / recipe.schedule.save_every);
  b.checkpoints = (kept > 0 ? std::min(kept + 1, written) : written) * 14 * b.parameters;
  b.records_disk = recipe.store_on_disk ? recipe.store.disk_bytes : 0;
  for (std::int32_t layer = 0; layer < model.num_layers; ++layer) {
    const bool packed = arm.contract.layers.has(Layer{layer});
    b.cache_per_token += row_bytes(packed ? arm.contract.k : Quantizer{}, model.kv_width()) +
                         row_bytes(packed ? arm.contract.v : Quantizer{}, model.kv_width());
  }
  if (recipe.evaluation.prompts > 0) {
    b.evaluation =
        b.rollout_weights + std::min(b.cache, std::int64_t{recipe.evaluation.prompts} *
                                                  model.max_positions * b.cache_per_token);
  }
  b.record_per_token =
      Agreement{.model = model, .contract = arm.contract, .guide = arm.guide}.bytes_per_token();
  b.record_per_token_full = full_code_bytes(model);
  if (is_limited) {
    const std::int64_t tokens =
        std::max(recipe.trainer.tokens_per_pass, recipe.schedule.sampling.max_new_tokens);
    b.read_ahead = std::min(recipe.trainer.read_ahead_bytes, tokens * b.record_per_token);
  }
  return b;
}

void require_memory(const std::string& name, const DeviceMemory& memory, const Budget& b) {
  const std::int64_t needed = b.device();
  if (needed <= memory.free) return;
  const std::string parts =
      b.rollout_weights + b.trainer_most == needed && b.trainer_most > b.trainer
          ? cat({" and trainer.memory ", bytes_text(b.trainer_most), ": lower trainer.memory"})
          : cat({", the trainer ", bytes_text(b.trainer),
                 ", and beside them in turn rollout.cache ", bytes_text(b.cache),
                 " and evaluation ", bytes_text(b.evaluation),
                 b.read_ahead > 0 ? " and records read ahead " + bytes_text(b.read_ahead) : "",
                 b.read_ahead > std::max(b.cache, b.evaluation) ? ": lower trainer.tokens_per_pass"
                                                                : ": lower rollout.cache"});
  throw Error(cat({"device is ", name, ", which has ", beside(memory.free, needed), " of ",
                   bytes_text(memory.total), " free; ", bytes_text(needed),
                   " are needed: rollout weights take ", bytes_text(b.rollout_weights), parts,
                   ", or choose a smaller model or another device"}));
}

namespace {

/// Refuses runs at once whose largest `needs` are more than is `free`.
void require_of_all(int runs, std::vector<std::int64_t> needs, std::int64_t free,
                    const char* where) {
  const auto most = std::min(std::ssize(needs), std::ptrdiff_t{runs});
  std::partial_sort(needs.begin(), needs.begin() + most, needs.end(), std::greater<>());
  const std::int64_t needed = std::accumulate(needs.begin(), needs.begin() + most, std::int64_t{0});
  if (needed <= free) return;
  throw Error(
      cat({"--jobs has ", most, " runs ", where, " at once, which take ", bytes_text(needed), "; ",
           beside(free, needed), " are free: give it a smaller number"}));
}

}  // namespace

void require_memory_of_all(int runs, std::span<const Budget> budgets, const DeviceMemory& memory) {
  std::vector<std::int64_t> needs;
  for (const Budget& b : budgets) needs.push_back(b.device());
  require_of_all(runs, std::move(needs), memory.free, "on a GPU");
}

void require_host_memory_of_all(int runs, std::span<const Budget> budgets,
                                const DeviceMemory& memory) {
  if (memory.free == 0) return;
  std::vector<std::int64_t> needs;
  for (const Budget& b : budgets) needs.push_back(b.host());
  require_of_all(runs, std::move(needs), memory.free, "in the machine's memory");
}

void require_host_memory(const DeviceMemory& memory, const Budget& b, Device device) {
  const auto require = [&](const std::string& what, std::int64_t bytes, std::int64_t there,
                           const char* kind, const char* remedy) {
    if (memory.total == 0 || there == 0 || bytes <= there) return;
    throw Error(cat({what, bytes_text(bytes), ", and this machine has ", beside(there, bytes), kind,
                     "; ", remedy}));
  };
  const bool on_cpu = device.kind == Device::Kind::kCpu;
  const std::int64_t ahead = on_cpu ? 0 : b.read_ahead;
  constexpr const char* kAll = " of memory";
  if (on_cpu) require("rollout.cache is ", b.cache, memory.total, kAll, "lower it");
  require("rollout.swap is ", b.swap, memory.total, kAll, "lower it");
  require("store.ram is ", b.records, memory.total, kAll, "lower it");
  std::int64_t at_once = 0;
  if (on_cpu) {
    at_once = b.host();
    require(cat({"rollout weights ", bytes_text(b.rollout_weights), ", rollout.cache ",
                 bytes_text(b.cache), ", the trainer ", bytes_text(b.trainer), " and evaluation ",
                 bytes_text(b.evaluation), " take together "}),
            at_once, memory.free, " of memory free",
            "lower rollout.cache, choose a smaller model, or end what else runs here");
  }
  require(
      cat({on_cpu
               ? cat({"rollout weights, cache, trainer and evaluation ", bytes_text(at_once), ", "})
               : std::string(),
           "rollout.swap ", bytes_text(b.swap), ahead > 0 ? ", store.ram " : " and store.ram ",
           bytes_text(b.records), ahead > 0 ? " and records read ahead " + bytes_text(ahead) : "",
           " may take together "}),
      at_once + b.swap + b.records + ahead, memory.total, kAll, "lower rollout.swap or store.ram");
}

std::int64_t full_code_bytes(const ModelConfig& model) {
  Contract contract = contracts::lockstep(model.num_layers);
  const Guide guide = {.mode = Guidance::kFullGuided,
                       .sites = {Site::kW13In, Site::kK, Site::kV},
                       .layers = LayerSet::range(0, model.num_layers),
                       .replay_experts = true};
  return Agreement{.model = model, .contract = contract, .guide = guide}.bytes_per_token();
}

std::string bytes_text(std::int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  std::int64_t tenths = bytes * 10;
  while (tenths >= 10240 && unit < 4) {
    tenths = (tenths + 512) / 1024;
    ++unit;
  }
  return tenths % 10 == 0 ? cat({tenths / 10, " ", units[unit]})
                          : cat({tenths / 10, ".", tenths % 10, " ", units[unit]});
}

std::string to_string(const Budget& b) {
  return cat({"device: rollout weights ",
              bytes_text(b.rollout_weights),
              ", KV cache ",
              bytes_text(b.cache),
              " (",
              bytes_text(b.cache_per_token),
              " a token), trainer ",
              bytes_text(b.trainer),
              b.trainer_most > b.trainer ? " to " + bytes_text(b.trainer_most) : "",
              " of ",
              b.parameters,
              b.trainers > 1 ? " parameters and as many of the reference's" : " parameters",
              b.evaluation > 0 ? ", an evaluation's engine " + bytes_text(b.evaluation) : "",
              b.read_ahead > 0 ? ", records read ahead up to " + bytes_text(b.read_ahead) : "",
              "\nhost:   swapped pages up to ",
              bytes_text(b.swap),
              ", records up to ",
              bytes_text(b.records),
              " (",
              bytes_text(b.record_per_token),
              " a token)",
              b.read_ahead > 0 ? ", those read ahead up to " + bytes_text(b.read_ahead) : "",
              "\ndisk:   checkpoints ",
              bytes_text(b.checkpoints),
              ", records up to ",
              bytes_text(b.records_disk),
              "\n"});
}

}  // namespace lockstep::recipe
