#include "rollout/door.h"

#include <string>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::rollout {
namespace {

constexpr std::int32_t kMostGroup = 16;  // heads on a KV head
constexpr std::int32_t kMostExperts = 1024;
constexpr std::int32_t kMostHidden = 1 << 15;  // of a row that is kept in shared memory

[[noreturn]] void refuse(std::string what) {
  throw Error(cat({std::move(what), "; use device = \"cpu\""}));
}

void require_widths(const ModelConfig& model, const Options& options) {
  if (model.head_dim != 32 && model.head_dim != 64 && model.head_dim != 128) {
    refuse(cat({"head_dim is ", model.head_dim, "; on a CUDA device it is 32, 64 or 128"}));
  }
  if (model.num_heads / model.num_kv_heads > kMostGroup) {
    refuse(cat({"num_heads is ", model.num_heads, " on ", model.num_kv_heads,
                " KV heads; on a CUDA device each has at most ", kMostGroup}));
  }
  if (model.num_experts > kMostExperts) {
    refuse(
        cat({"num_experts is ", model.num_experts, "; on a CUDA device at most ", kMostExperts}));
  }
  const std::int32_t unit = options.drift.split_k ? 64 : 32;
  const std::pair<const char*, std::int64_t> widths[] = {{"hidden", model.hidden},
                                                         {"expert_width", model.expert_width},
                                                         {"num_heads * head_dim", model.q_width()}};
  for (const auto& [name, width] : widths) {
    if (width % unit == 0) continue;
    refuse(cat({name, " is ", width, "; on a CUDA device a product has a multiple of ", unit,
                " inputs", options.drift.split_k ? " under drift.split_k" : ""}));
  }
  if (model.hidden > kMostHidden) {
    refuse(cat({"hidden is ", model.hidden, "; on a CUDA device at most ", kMostHidden}));
  }
}

void require_formats(const Contract& contract, const Options& options) {
  const bool powers =
      contract.weight.global_is_power_of_two && contract.activation.global_is_power_of_two;
  if (expert_product(contract) == ExpertProduct::kNvfp4 && !powers &&
      options.residual != Residual::kNone) {
    refuse(
        "residual.kind is not none and the contract's global scales are FP32 numbers, under which "
        "a residual is not NVFP4; set residual.kind = \"none\", or contract.preset = \"lockstep\", "
        "whose scales are powers of two");
  }
}

}  // namespace

void require_runs(const Agreement& agreement, const Options& options, Device device) {
  if (agreement.contract.kv_point != KvPoint::kAfterRope) {
    throw Error("contract.kv_point is before_rope; this engine quantizes K after_rope alone");
  }
  if (device.kind == Device::Kind::kCpu) return;
  require_widths(agreement.model, options);
  require_formats(agreement.contract, options);
}

}  // namespace lockstep::rollout
