/// All weights of a model in one FP32 array on one device, so that an optimizer step, a norm or a
/// checkpoint is a loop over numbers. Projections that share an input lie together: q, k and v are
/// one matrix, and the experts of a layer are one stack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "contract/contract.h"
#include "device/memory.h"
#include "model/config.h"
#include "model/weights.h"
#include "ops/code_matrix.h"

namespace lockstep::train {

/// Zeroed numbers on a device, at a fixed alignment: products of the same operands then have the
/// same bits from run to run. On a CUDA device what is done to them is done in a stream's order,
/// and in its order they end that they began in.
class Floats {
 public:
  explicit Floats(std::int64_t size, Device device = {}, Stream stream = {});
  float* data() const { return on_cpu() ? data_.get() : there_.as<float>(); }
  std::int64_t size() const { return size_; }
  std::int64_t bytes() const { return size_ * static_cast<std::int64_t>(sizeof(float)); }
  Device device() const { return device_; }
  void zero(Stream stream = {}) const;

  /// Of a CPU's.
  std::span<float> all() const { return {data_.get(), static_cast<std::size_t>(size_)}; }

 private:
  bool on_cpu() const { return device_.kind == Device::Kind::kCpu; }

  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  std::int64_t size_;
  Device device_;
  Buffer there_;  // on a CUDA device
};

struct Slot {
  WeightId id;
  std::int64_t offset = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  std::size_t count() const { return static_cast<std::size_t>(rows * cols); }
};

/// A layer's routed experts as codes, in the order that the exact product reads.
struct ExpertCodes {
  ops::CodeMatrix gate_up, down;
};

class Parameters {
 public:
  /// Which of them compute with FP4 values, and whether the others with BF16 values.
  struct Numbers {
    Contract contract;
    bool fp4_experts = false;
    bool bf16 = true;
    bool codes = false;  // are the experts' codes kept as well?
  };

  /// Throws Error naming the bytes that a CUDA device has too little of.
  Parameters(const ModelConfig& config, Numbers numbers, Device device = {}, Stream stream = {});
  Device device() const { return device_; }

  const std::vector<Slot>& slots() const { return slots_; }  // in weight_ids order
  const Slot& slot(const WeightId& id) const;
  /// On a CPU.
  std::span<float> of(const Floats& numbers, const Slot& slot) const;
  /// From and to any device: on a CPU what is read is the slot itself, else a copy in `room`, for
  /// which it waits.
  std::span<const float> read(const Floats& numbers, const Slot& slot, std::vector<float>& room,
                              Stream stream = {}) const;
  void write(const Floats& numbers, const Slot& slot, const float* values, Device from = {},
             Stream stream = {}) const;

  /// Makes the compute weights from the masters: rounded to BF16, routed experts on to FP4 by the
  /// contract's own quantizer (and to BF16 where its values are not exact there). Once an update,
  /// whatever the number of passes. Throws Error naming the weight that is not finite.
  void refresh(Stream stream = {});

  /// Those of the weights that the last refresh() saw; nullptr where none are kept.
  const ExpertCodes* codes(Layer layer) const;

  std::int64_t size() const { return masters.size(); }
  /// Of the device's memory.
  std::int64_t bytes() const {
    return masters.bytes() + compute.bytes() + compute_bf16.bytes() + moment1.bytes() +
           moment2.bytes() + code_bytes_;
  }

 private:
  std::int64_t place(std::vector<Slot>& slots, std::int64_t offset, const ModelConfig& config);

  void make_room_for_codes(const ModelConfig& config, Stream stream);
  ops::CodeMatrix room_for_codes(std::int32_t experts, std::int32_t out, std::int32_t cols,
                                 Stream stream);
  void keep_codes(const Slot& slot, const PackedView<const std::uint8_t>& packed,
                  Stream stream = {}) const;
  void fake_quantize(const Slot& slot) const;
  bool is_fp4(const Slot& slot) const;
  void refresh_on_device(Stream stream) const;
  bool fake_quantize_at_once(Stream stream) const;
  void check_finite(Stream stream) const;

  Numbers numbers_;
  std::int64_t num_experts_;
  Device device_;
  std::vector<ExpertCodes> codes_;  // [L], or empty
  std::vector<Buffer> code_memory_;
  std::vector<Slot> slots_;
  std::map<WeightId, std::size_t> index_;
  std::int64_t total_ = 0;
  std::int64_t code_bytes_ = 0;

 public:
  Floats masters;
  Floats compute;       // on a CPU, or where compute is not in BF16
  Buffer compute_bf16;  // [size()] Bf16 on a CUDA device, where it is
  Floats moment1;
  Floats moment2;
};

/// Masters as a source, which lie on the device, and what takes initial weights into them, in the
/// order of torch's stream. `order` tells on which stream masters were written last; the source
/// waits for it before it shows them. Empty: on the device's default stream.
std::unique_ptr<WeightSource> masters_source(const Parameters& parameters,
                                             std::function<Stream()> order = {});
std::unique_ptr<WeightSink> masters_sink(Parameters& parameters, std::function<void()> committed);

}  // namespace lockstep::train
