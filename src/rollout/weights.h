/// The rollout's weights, in the layouts that its kernels read.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/memory.h"
#include "kernels/dense/linear.h"
#include "kernels/exact/w4a4.h"
#include "model/weights.h"
#include "record/agreement.h"
#include "rollout/weight_flips.h"

namespace lockstep::rollout {

/// How the experts of a layer are kept.
enum class ExpertFormat : std::uint8_t {
  kBf16,      // arrive in BF16
  kCodeBf16,  // arrive as codes, read as BF16, which holds them exactly (macro blocks: rounded)
  kW4a4,      // NVFP4 codes, for the exact product with codes of activations
  kW4a16,     // the same, for the product with BF16 activations
  kMx,        // the same of MXFP4
};

constexpr bool in_tiles(ExpertFormat format) {
  return format == ExpertFormat::kW4a4 || format == ExpertFormat::kW4a16;
}

/// All of it lies on the device of the Weights.
struct LayerWeights {
  std::span<const Bf16> attention_norm, q_norm, k_norm, mlp_norm;
  kernels::PackedMatrix qkv;     // [q_width + 2 kv_width, D]: Q, K, V
  kernels::PackedMatrix o;       // [D, q_width]
  kernels::PackedMatrix router;  // [E, D]
  ExpertFormat format = ExpertFormat::kBf16;
  // All experts, one after another, [2F, D] and [D, F], in the layout that `format` asks for.
  kernels::PackedMatrix gate_up, down;
  kernels::W4a4Weights gate_up_codes, down_codes;
  PackedView<std::uint8_t> gate_up_mx, down_mx;
};

/// Where a weight lies that is kept in BF16: rows as they are, or packed from `first` on.
struct WeightHome {
  std::span<Bf16> plain{};
  kernels::PackedMatrix packed{};
  std::int64_t first = 0;
};

class DeviceWeights;

/// A WeightSink whose memory is taken once: a refit writes where the last one did. Between begin()
/// and commit() nothing may run on it, for it holds a mixture of two models.
class Weights final : public WeightSink {
 public:
  /// Memory on `device`, in the order of `stream`, on which all work on it is done. NVFP4 experts
  /// of BF16 activations are BF16 copies, or, if `packs`, stay codes for w4a16(). Throws Error
  /// naming the width that no kernel takes.
  explicit Weights(const Agreement& agreement, Device device = {}, Stream stream = {},
                   bool packs = false);
  ~Weights() override;

  void begin(WeightVersion version, ContractId contract) override;
  /// BF16 for all but the experts of quantized layers, which arrive as codes, from the host or from
  /// the device. Throws Error naming the weight: not one of the model, put before, wrong shape or
  /// kind, not finite. What comes from the device is there until the stream has done what it was
  /// given; numbers of it that are not finite are found by commit(), and codes are those of
  /// quantize(), which are not looked at.
  void put(const Weight& weight) override;
  void put_all(std::span<const Weight> weights) override;
  /// Experts' matrices in NVFP4 on a CUDA device.
  std::optional<CodesPlace> place(const WeightId& id) override;
  /// All on a CUDA device that lies there once and in BF16.
  std::optional<TensorView<Bf16, 2>> place_numbers(const WeightId& id) override;
  /// Reads all weights back. Throws Error naming what is missing.
  std::vector<std::uint32_t> commit() override;
  /// fp4/weight/*: how far the experts' codes are from those of the set before; none for a first.
  /// fp4/refit/probe_err: how far a product with what was repacked is from one with what arrived,
  /// at worst, of one expert in so many, others each time.
  Metrics metrics() const override;

  /// Throws Error unless a whole set has been committed and no other has been begun.
  void require_ready() const;
  WeightVersion version() const { return version_; }

  Device device() const override { return device_; }
  Stream stream() const override { return stream_; }
  TensorView<const Bf16, 2> embedding() const { return embedding_; }  // [V, D]
  const kernels::PackedMatrix& head() const { return head_; }         // [V, D]
  std::span<const Bf16> final_norm() const { return final_norm_; }    // on the device
  const LayerWeights& layer(std::int32_t index) const {
    return layers_[static_cast<std::size_t>(index)];
  }

 private:
  enum class State : std::uint8_t { kEmpty, kOpen, kReady };

  void make_room();
  std::byte* take(std::int64_t bytes);  // zeroed, aligned to 256, for good
  std::span<Bf16> vector(std::int64_t size);
  kernels::PackedMatrix matrix(std::int64_t out, std::int64_t in, std::int64_t copies = 1);
  PackedView<std::uint8_t> mx_matrix(std::int64_t out, std::int64_t in);
  kernels::W4a4Weights coded_matrix(std::int32_t out, std::int32_t in);
  const WeightHome& home(const WeightId& id) const { return homes_[index_.at(id)]; }
  WeightHome packed_home(const WeightId& id) const;
  void place(const WeightId& id, TensorView<const Bf16, 2> value);
  std::uint32_t held(std::size_t index);
  std::uint32_t held_codes(std::size_t index) const;
  void put_codes(const WeightId& id, const PackedView<const std::uint8_t>& value);
  void put_coded(const WeightId& id, const PackedView<const std::uint8_t>& value);
  void put_mx(const WeightId& id, const PackedView<const std::uint8_t>& value);
  void put_values(const WeightId& id, const PackedView<const std::uint8_t>& value);
  WeightFlips* flips(Layer layer);
  void remember(const void* data, std::int64_t bytes);
  void probe(const WeightId& id, const PackedView<const std::uint8_t>& value);
  bool arrives_as_codes(const WeightId& id) const;
  ExpertFormat format(Layer layer) const;
  std::size_t admit(const Weight& weight) const;
  std::size_t index_to_put(const WeightId& id) const;
  void require_kind(const Weight& weight) const;
  void require_numbers(const Weight& weight) const;
  bool probes(const WeightId& id) const;
  std::string first_missing() const;

  ModelConfig model_;
  Contract contract_;
  State state_ = State::kEmpty;
  WeightVersion version_;
  std::vector<WeightId> order_;
  std::map<WeightId, std::size_t> index_;
  std::vector<std::uint8_t> seen_;
  std::vector<std::uint32_t> sent_;    // checksums of what came
  std::vector<std::uint32_t> placed_;  // and of the BF16, or the header, that was placed for it
  std::vector<float> globals_;         // that came

  Device device_;
  Stream stream_;
  bool packs_ = false;
  std::vector<Buffer> memory_;
  TensorView<Bf16, 2> embedding_;
  std::span<Bf16> final_norm_;
  kernels::PackedMatrix head_;
  std::vector<LayerWeights> layers_;
  std::vector<WeightHome> homes_;   // by index_
  std::vector<Bf16> dequantized_;   // one expert's matrix on its way
  std::vector<WeightFlips> flips_;  // [L] against the set before; empty: there was none
  std::vector<std::uint8_t> before_;
  double probe_error_ = -1;               // the worst of the set; -1: none was probed
  std::unique_ptr<DeviceWeights> there_;  // on a CUDA device
};

}  // namespace lockstep::rollout
