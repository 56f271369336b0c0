/// Orders of work on a CUDA device, what waits for them, and work that is given as a whole. On a
/// CPU, where work is done on return, all of it is empty and does nothing.
#pragma once

#include <utility>

#include "device/view.h"

namespace lockstep {

/// A stream with one owner. Buffers that were asked for on it must go before it.
class OwnedStream {
 public:
  OwnedStream() = default;
  /// Empty on a CPU. Throws Error where the device is not usable.
  explicit OwnedStream(Device device);
  ~OwnedStream() { reset(); }
  OwnedStream(OwnedStream&& other) noexcept { swap(other); }
  OwnedStream& operator=(OwnedStream&& other) noexcept {
    swap(other);
    return *this;
  }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  operator Stream() const { return stream_; }
  Device device() const { return device_; }
  /// Waits for all that was given to it; Error where it failed.
  void wait() const;
  void reset();

 private:
  void swap(OwnedStream& other) {
    std::swap(stream_, other.stream_);
    std::swap(device_, other.device_);
  }

  Stream stream_{};
  Device device_{};
};

/// A point in a stream's work.
class Event {
 public:
  Event() = default;
  explicit Event(Device device);
  ~Event() { reset(); }
  Event(Event&& other) noexcept { swap(other); }
  Event& operator=(Event&& other) noexcept {
    swap(other);
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  /// The point behind what was given to the stream so far.
  void record(Stream stream);
  /// The host waits for it; Error where the work before it failed. At once if never recorded.
  void wait() const;
  /// What is given to `later` from now on waits for it.
  void hold_back(Stream later) const;
  void reset();

 private:
  void swap(Event& other) {
    std::swap(event_, other.event_);
    std::swap(device_, other.device_);
  }

  void* event_ = nullptr;
  Device device_{};
};

/// Work on a CUDA device that was given once and can be given again, as one call.
class Graph {
 public:
  Graph() = default;
  ~Graph() { reset(); }
  Graph(Graph&& other) noexcept { swap(other); }
  Graph& operator=(Graph&& other) noexcept {
    swap(other);
    return *this;
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// What `give` gives to the stream, which does not run. It must not allocate, copy from or to
  /// memory that is not pinned, or wait. Throws what `give` throws.
  template <typename Give>
  static Graph of(Device device, Stream stream, const Give& give) {
    begin(device, stream);
    try {
      give();
    } catch (...) {
      abandon(device, stream);
      throw;
    }
    return end(device, stream);
  }

  bool empty() const { return graph_ == nullptr; }
  void launch(Stream stream) const;
  void reset();

 private:
  static void begin(Device device, Stream stream);
  static void abandon(Device device, Stream stream) noexcept;
  static Graph end(Device device, Stream stream);
  void swap(Graph& other) {
    std::swap(graph_, other.graph_);
    std::swap(device_, other.device_);
  }

  void* graph_ = nullptr;
  Device device_{};
};

}  // namespace lockstep
