/// The memory that a pass works in: it grows and never shrinks.
#pragma once

#include <cstdint>
#include <vector>

#include "device/memory.h"
#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::rollout {

/// Where a pass runs, and in which order.
struct Workplace {
  Device device{};
  Stream stream{};
  std::int64_t moves = 0;  // how often memory was taken anew: what knows the old one is stale

  bool on_cuda() const { return device.kind == Device::Kind::kCuda; }
};

/// What to ask for where a little more may be wanted soon: pinning memory anew takes milliseconds.
constexpr std::int64_t with_headroom(std::int64_t bytes) { return bytes + bytes / 4; }

/// Bytes that grow. What they held is lost where they do.
class Room {
 public:
  Room() = default;  // on the CPU
  explicit Room(Workplace& at) : at_(&at) {}

  void* take(std::int64_t bytes) {
    if (buffer_.bytes() < bytes) {
      const Workplace here = at_ == nullptr ? Workplace{} : *at_;
      buffer_.reset();
      buffer_ = Buffer(here.device, bytes, here.stream);
      if (at_ != nullptr) ++at_->moves;
    }
    return buffer_.as<void>();
  }
  /// What was taken last.
  template <typename T = std::byte>
  T* data() const {
    return buffer_.as<T>();
  }
  Device device() const { return at_ == nullptr ? Device{} : at_->device; }

 private:
  Workplace* at_ = nullptr;
  Buffer buffer_;
};

/// Rows of a matrix.
template <typename T>
class Rows2d {
 public:
  Rows2d() = default;
  explicit Rows2d(Workplace& at) : room_(at) {}

  TensorView<T, 2> view(std::int64_t rows, std::int64_t cols) {
    auto* data = static_cast<T*>(room_.take(rows * cols * static_cast<std::int64_t>(sizeof(T))));
    return {data, {rows, cols}, {cols, 1}, room_.device()};
  }

 private:
  Room room_;
};

/// Codes of as many rows as a pass has.
class CodeRows {
 public:
  CodeRows() = default;
  explicit CodeRows(Workplace& at) : codes_(at), scales_(at), mantissas_(at), global_(at) {}

  PackedView<std::uint8_t> view(std::int64_t rows, std::int64_t cols, const Quantizer& rule) {
    const auto global = global_.view(rows, 1);
    const std::int64_t macros = rule.macro_cols(cols);
    return {codes_.view(rows, rule.code_bytes(cols)),
            scales_.view(rows, rule.scale_cols(cols)),
            {global.data, {rows}, {1}, global.device},
            macros > 0 ? mantissas_.view(rows, macros) : TensorView<std::uint8_t, 2>{}};
  }

 private:
  Rows2d<std::uint8_t> codes_, scales_, mantissas_;
  Rows2d<float> global_;
};

/// Numbers that kernels add to.
class DeviceCounts {
 public:
  /// In memory of their own, or where the pass brings them to the host with what else it brings.
  DeviceCounts(std::int64_t count, Workplace& at, std::int64_t* data = nullptr)
      : at_(&at), count_(count), data_(data) {
    if (data_ == nullptr) {
      buffer_ = Buffer(at.device, count * kBytes, at.stream);
      data_ = buffer_.as<std::int64_t>();
    }
    clear();
  }

  TensorView<std::int64_t, 1> view() const { return {data_, {count_}, {1}, at_->device}; }

  /// Since the last call. Waits for the device.
  std::vector<std::int64_t> take() {
    std::vector<std::int64_t> values(static_cast<std::size_t>(count_));
    copy_bytes(values.data(), {}, data_, at_->device, count_ * kBytes, at_->stream);
    synchronize(at_->device, at_->stream);
    clear();
    return values;
  }

 private:
  static constexpr std::int64_t kBytes = sizeof(std::int64_t);
  void clear() { fill_bytes(data_, at_->device, 0, count_ * kBytes, at_->stream); }

  Workplace* at_;
  std::int64_t count_;
  std::int64_t* data_;
  Buffer buffer_;
};

}  // namespace lockstep::rollout
