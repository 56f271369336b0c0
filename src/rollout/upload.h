#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "rollout/rows.h"

namespace lockstep::rollout {

/// Arrays on their way to a device, in one copy from pinned memory. On a CPU they stay where they
/// are. Equal sizes lie at equal addresses until memory grows.
class Upload {
 public:
  explicit Upload(Workplace& at);

  void begin() { parts_.clear(); }
  /// One more array, which must stay as it is until send(); answers under which number.
  template <typename T>
  std::size_t add(std::span<const T> values) {
    parts_.push_back({values.data(), static_cast<std::int64_t>(values.size_bytes()), 0});
    return parts_.size() - 1;
  }
  template <typename T>
  std::size_t add(const std::vector<T>& values) {
    return add(std::span<const T>(values));
  }
  void send();
  /// Where it lies, after send().
  template <typename T>
  std::span<const T> get(std::size_t number) const {
    const Part& part = parts_[number];
    const void* data = at_->on_cuda() ? there_ + part.offset : part.from;
    return {static_cast<const T*>(data), static_cast<std::size_t>(part.bytes) / sizeof(T)};
  }

 private:
  struct Part {
    const void* from;
    std::int64_t bytes;
    std::int64_t offset;
  };

  Workplace* at_;
  std::vector<Part> parts_;
  PinnedBuffer pinned_;
  Room room_;
  const std::byte* there_ = nullptr;
  Event sent_;
};

}  // namespace lockstep::rollout
