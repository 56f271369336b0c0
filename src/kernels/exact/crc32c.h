/// CRC32C of much that lies on a device, without bringing it to the host: what a refit compares.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "device/memory.h"
#include "kernels/exact/w4a4.h"

namespace lockstep::kernels {

/// Places in memory, gathered once, whose CRC32C is asked for again and again.
class Crc32cList {
 public:
  using Rows = TensorView<const std::uint8_t, 2>;

  /// All of it lies on `device`; run() works in the order of `stream`.
  explicit Crc32cList(Device device = {}, Stream stream = {}) : device_(device), stream_(stream) {}

  /// An item: the bytes of these views, row by row, one view after another. Each view's rows are
  /// contiguous. Returns the item's number, the next one.
  std::int64_t add(std::span<const Rows> parts);
  std::int64_t add(std::initializer_list<Rows> parts) {
    return add(std::span(parts.begin(), parts.size()));
  }

  /// An item: an expert's rows of codes, its rows of scales and its global scale as FP32, as
  /// w4a4_fill took them, read from the tiles and the header in which they lie. Where the number
  /// beside the codes was not the factor itself (Quantizer::stored_global), the factor stands in.
  std::int64_t add(const W4a4Weights& weights, std::int32_t expert);

  std::int64_t size() const { return static_cast<std::int64_t>(items_.size()); }

  /// base/crc32c of every item's bytes, in the order of their numbers. Waits.
  std::vector<std::uint32_t> run();

  /// On a CUDA device, without waiting: sums [size()], zero before, become what finish() makes
  /// CRCs of. The list must not grow or go before that is done.
  void launch(std::uint32_t* sums, Stream stream);
  std::uint32_t finish(std::int64_t item, std::uint32_t sum) const;

 private:
  struct Item {
    std::vector<Rows> rows{};
    W4a4Weights weights{};
    std::int32_t expert = 0;
    std::int64_t bytes = 0;
  };
  std::uint32_t crc_on_cpu(const Item& item) const;
  void prepare();

  Device device_;
  Stream stream_;
  std::vector<Item> items_;
  std::vector<std::byte> bytes_;  // of prepared_, until it has arrived
  Buffer prepared_;               // units of rows, then experts of each shape
  std::int64_t prepared_items_ = 0;
  std::int64_t units_ = 0;
  struct Shape {
    std::int32_t out = 0, cols = 0;
    std::int64_t first = 0, count = 0;  // of the experts, bytes into prepared_ and how many
    Buffer bits{}, powers{};
  };
  std::vector<Shape> shapes_;
};

/// What Crc32cList::finish() does for an item of so many bytes.
std::uint32_t crc_of_sum(std::uint32_t sum, std::int64_t bytes);

}  // namespace lockstep::kernels
