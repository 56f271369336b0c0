/// What Weights does where its memory is a CUDA device's.
#pragma once

#include <array>
#include <map>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "kernels/exact/crc32c.h"
#include "rollout/probe.h"
#include "rollout/weights.h"

namespace lockstep::rollout {

/// Puts weights into their places, from the host through pinned memory or from the device. Nobody
/// waits before commit(), but for pinned memory that is still being read.
class DeviceWeights {
 public:
  /// Everything stays with the caller, whose memory it is.
  struct Places {
    const ModelConfig& model;
    const Contract& contract;
    const std::vector<WeightId>& order;
    const std::vector<WeightHome>& homes;  // of what is kept in BF16
    const std::vector<LayerWeights>& layers;
    const kernels::PackedMatrix& head;
  };
  DeviceWeights(const Places& places, Device device, Stream stream);

  /// `compare`: flips are counted against what lies there.
  void begin(bool compare);
  /// A weight that is checked but for numbers which lie on the device.
  struct Arrival {
    std::size_t index = 0;
    const Weight* weight = nullptr;
    bool probe = false;
  };
  void put(std::span<const Arrival> arrivals);
  /// Where codes of NVFP4 go that their sender writes itself.
  CodesPlace place(std::size_t index, bool probe);
  /// And numbers.
  TensorView<Bf16, 2> numbers_at(std::size_t index) const;
  /// CRC32C of each as it lies, in the form in which it came. Waits. Throws Error naming a weight
  /// from the device that is not finite, or one that a product finds not to lie as it should.
  std::vector<std::uint32_t> commit();

  /// After commit(): of each layer, empty where nothing was compared; and the worst, -1: none.
  const std::vector<WeightFlips>& flips() const { return flips_; }
  double probe_error() const { return probe_error_; }

 private:
  using Codes = PackedView<const std::uint8_t>;
  using Numbers = TensorView<const Bf16, 2>;

  template <typename T>
  void upload(TensorView<const T, 2> from, void* to);
  template <typename T>
  void copy(TensorView<const T, 2> from, T* to);
  void put_numbers(std::size_t index, Numbers value);
  Codes on_device(const Codes& codes);
  Numbers numbers_of(std::size_t index, const Codes& value);
  void put_codes(std::size_t index, const Codes& value, bool probe);
  bool replace(std::span<const Arrival> arrivals);
  void probe_codes(std::size_t index, const Codes& codes);
  void note_scaled(std::size_t index, const Codes& codes);
  void compare(Layer layer, const Codes& value);
  void probe(std::size_t index, Numbers worth);
  void multiply(std::size_t index, std::int64_t in, TensorView<float, 2> y);
  struct Probed {
    Buffer x, codes, scales, global;
  };
  const Probed& probed(const WeightId& id, std::int64_t in);
  Codes codes_of(const Probed& probed, std::int64_t in) const;
  const kernels::W4a4Weights& codes_at(const WeightId& id) const;
  /// What the device reads until it has done its probes.
  struct ProbeLists {
    std::vector<std::int32_t> numbers{};  // of experts: offsets of each group, then zeros
    std::vector<PlacedProbe> probes{};
    Buffer numbers_there{}, probes_there{}, y{};
  };
  ProbeLists probe_placed();
  /// Experts' matrices of a layer, of one kind.
  struct ProbedGroup {
    kernels::W4a4Weights w{};
    ExpertFormat format{};
    const Probed* by = nullptr;
    std::int64_t items = 0;
    float* y = nullptr;
  };
  void multiply_placed(std::span<const ProbedGroup> groups, const std::int32_t* numbers);
  Bf16* place(std::size_t index) const;
  PackedView<std::uint8_t> mx_place(const WeightId& id) const;
  void list_all();
  ExpertFormat format(const WeightId& id) const;
  std::int64_t* flips_of(Layer layer) const;

  template <typename T>
  std::vector<T> read(const Buffer& from) const;

  Places at_;
  Device device_;
  Stream stream_;

  struct Half {
    PinnedBuffer memory;
    Event read;
  };
  std::array<Half, 2> halves_;
  std::size_t next_half_ = 0;
  Buffer codes_, scales_, global_;  // of a weight on its way from the host
  Buffer power_;                    // w4a4()'s room
  Buffer numbers_, other_numbers_;  // what its codes are worth
  std::vector<Bf16> on_host_;

  std::map<std::int64_t, Probed> probed_;  // by width
  // Probes of weights that their sender places, until commit().
  struct Placed {
    std::size_t index = 0;
    Buffer sample;
  };
  std::vector<Placed> placed_probes_;
  Buffer y_;
  std::vector<std::size_t> probes_;  // weights, in the order of errors_
  Buffer errors_;                    // two doubles a probe

  kernels::Crc32cList list_;         // of all weights, then the head where it is the embedding
  std::vector<std::uint32_t> sent_;  // of codes that are kept as numbers
  std::vector<std::uint32_t> placed_;
  Buffer bad_;     // [weights] the first row that is not finite
  Buffer counts_;  // [L, kNumFlipCounts]
  bool compares_ = false;
  std::vector<WeightFlips> flips_;
  double probe_error_ = -1;
};

}  // namespace lockstep::rollout
