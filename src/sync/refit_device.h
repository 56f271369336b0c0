/// What refit() does with masters that lie on the device where their receiver's memory is.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "contract/contract.h"
#include "device/memory.h"
#include "kernels/exact/crc32c.h"
#include "kernels/exact/place_numbers.h"
#include "kernels/exact/place_weights.h"
#include "kernels/exact/quantize_weights.h"
#include "kernels/exact/weight_numbers.h"
#include "model/weights.h"

namespace lockstep::sync {

/// All of it in the order of the sink's stream, in memory that is reused from weight to weight:
/// what is sent has been read before it is written again.
class DeviceSender {
 public:
  DeviceSender(WeightSink& to, const Contract& contract);

  /// Puts a weight: quantized, or in BF16, or the codes that it comes as. `number` counts all
  /// weights of the refit. Returns the bytes of what was put.
  std::int64_t send(const Weight& weight, bool quantize, std::size_t number);

  /// Waits; fills in the CRC32C of each weight by its number. Throws Error naming one that BF16
  /// cannot hold.
  void end(std::span<const WeightId> ids, std::span<std::uint32_t> checksums);
  double relative_error();

 private:
  using Bytes = TensorView<const std::uint8_t, 2>;
  struct Pending {
    std::size_t number = 0;
    std::int64_t slot = 0;
    std::int64_t bytes = 0;
    std::int64_t cols = 0;
  };

  template <typename T>
  TensorView<T, 2> room(Buffer& buffer, std::int64_t rows, std::int64_t cols);
  bool place(const Weight& weight, std::size_t number);
  void place_waiting();
  bool place_numbers(const Weight& weight, std::size_t number);
  void place_waiting_numbers();
  std::int64_t send_numbers(const Weight& weight, std::size_t number);
  void send_plain();
  TensorView<const float, 2> masters(const Weight& weight);
  bool gather(const Weight& weight, std::size_t number);
  void send_gathered();
  std::int64_t send_quantized(const Weight& weight, std::size_t number);
  std::int64_t put_codes(const WeightId& id, const PackedView<const std::uint8_t>& codes,
                         std::size_t number);
  using Parts = std::vector<Bytes>;
  struct Summed {
    Parts parts;
    std::size_t number = 0;
    std::int64_t cols = 0;
  };
  void sum(std::span<const Summed> items);
  std::int64_t next_slot(std::int64_t count = 1);
  std::uint32_t* amax_at(std::int64_t slot);
  std::uint32_t* sum_at(std::int64_t slot);
  std::uint64_t* bad_at(std::int64_t slot);

  WeightSink& to_;
  const Contract& contract_;
  Device device_;
  Stream stream_;
  Buffer codes_, scales_, global_, f32_, back_;
  kernels::WeightError error_;
  kernels::WeightSums sums_;
  kernels::WeightPlacer placer_;
  // Masters that have a place, until they are many.
  struct Waiting {
    TensorView<const float, 2> master;
    CodesPlace place;
    std::size_t number = 0;
  };
  std::vector<Waiting> waiting_;
  bool placed_some_ = false;
  struct WaitingNumbers {
    TensorView<const float, 2> master;
    TensorView<Bf16, 2> to;
    std::size_t number = 0;
  };
  kernels::NumberPlacer number_placer_;
  std::vector<WaitingNumbers> waiting_numbers_;
  std::int64_t waiting_bytes_ = 0;
  // What is put in BF16, until a layer of it is there, and room for what is rounded.
  struct Plain {
    Weight weight;
    std::size_t number = 0;
  };
  std::vector<Plain> plain_;
  std::int64_t plain_bytes_ = 0;
  std::vector<Buffer> plain_rooms_;
  // Weights that wait for each other, and their codes.
  struct Gathered {
    WeightId id;
    TensorView<const float, 2> master;
    std::size_t number = 0;
  };
  std::vector<Gathered> gathered_;
  struct Room {
    Buffer codes, scales, global;
  };
  std::array<Room, 2 * kernels::kMostReplaced> rooms_;
  // By where the bytes lie.
  std::map<std::vector<std::uintptr_t>, std::unique_ptr<kernels::Crc32cList>> lists_;
  // Of kSlots weights each: sums, the first elements that are not finite, largest magnitudes.
  struct Slots {
    Buffer sums, bad, amax;
  };
  std::vector<Slots> slots_;
  std::int64_t used_slots_ = 0;
  std::vector<Pending> pending_;
};

}  // namespace lockstep::sync
