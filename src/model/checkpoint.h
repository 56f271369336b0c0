/// A plain Hugging Face directory, from and to (docs/formats/checkpoint.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/weights.h"

namespace lockstep {

/// Reads config.json and the weights of a Qwen3-MoE: one model.safetensors or shards with their
/// index, experts one by one or fused, in BF16, F16 or F32.
class CheckpointSource : public WeightSource {
 public:
  /// Maps the files and checks every tensor's name, shape and dtype; values are read by each().
  /// Throws Error: what is missing, unknown, twice there, or of the wrong shape is named.
  explicit CheckpointSource(const std::filesystem::path& folder);
  ~CheckpointSource() override;

  const ModelConfig& config() const;

  /// BF16 where the file has BF16, else FP32, which holds F16 exactly. Throws Error naming the
  /// tensor where a value is not finite.
  void each(const std::function<void(const Weight&)>& visit) const override;

 private:
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

struct CheckpointOptions {
  std::uint64_t max_shard_bytes = std::uint64_t{5} << 30;
  /// A folder whose tokenizer, chat template and generation config are copied along.
  std::filesystem::path companion{};
  /// Text files of the caller's own beside them, by name.
  std::map<std::string, std::string> texts{};
};

/// Writes BF16, experts one by one, under the names that every reader knows. The folder is made by
/// commit(), whole: if it was not there it appears at once, if it was there (beside other files)
/// its config.json is put in place last. Without commit nothing is left.
class CheckpointWriter : public WeightSink {
 public:
  /// Throws Error where `folder` already holds other shards.
  CheckpointWriter(const std::filesystem::path& folder, const ModelConfig& config,
                   const CheckpointOptions& options = {});
  ~CheckpointWriter() override;

  void begin(WeightVersion version, ContractId contract) override;
  /// FP32 is rounded to BF16, to nearest even. In any order; throws Error where a value is not
  /// finite or beyond BF16, or the weight is of another shape, packed, or there already.
  void put(const Weight& weight) override;
  std::vector<std::uint32_t> commit() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
