#include "device/stream.h"

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "device/cuda/cuda.h"
#include "device/memory.h"

namespace lockstep {
namespace {

bool on_cuda(Device device) { return device.kind == Device::Kind::kCuda; }

void require_usable(Device device) {
  const std::string why = why_unusable(device);
  if (!why.empty()) throw Error(cat({"device = \"cuda\": ", why}));
}

}  // namespace

OwnedStream::OwnedStream(Device device) : device_(device) {
  require_usable(device);
  if constexpr (build::has_cuda) {
    if (on_cuda(device)) stream_ = cuda::make_stream(device.index);
  }
}

void OwnedStream::wait() const { synchronize(device_, stream_); }

void OwnedStream::reset() {
  void* const handle = std::exchange(stream_.handle, nullptr);
  if (handle == nullptr) return;
  if constexpr (build::has_cuda) cuda::drop_stream(device_.index, {handle});
}

Event::Event(Device device) : device_(device) {
  require_usable(device);
  if constexpr (build::has_cuda) {
    if (on_cuda(device)) event_ = cuda::make_event(device.index);
  }
}

void Event::record([[maybe_unused]] Stream stream) {
  if (event_ == nullptr) return;
  if constexpr (build::has_cuda) cuda::record_event(device_.index, event_, stream);
}

void Event::wait() const {
  if (event_ == nullptr) return;
  if constexpr (build::has_cuda) cuda::wait_event(event_);
}

void Event::hold_back([[maybe_unused]] Stream later) const {
  if (event_ == nullptr) return;
  if constexpr (build::has_cuda) cuda::hold_back(device_.index, event_, later);
}

void Event::reset() {
  void* const event = std::exchange(event_, nullptr);
  if (event == nullptr) return;
  if constexpr (build::has_cuda) cuda::drop_event(event);
}

void Graph::begin([[maybe_unused]] Device device, [[maybe_unused]] Stream stream) {
  if constexpr (build::has_cuda) {
    if (on_cuda(device)) return cuda::begin_graph(device.index, stream);
  }
  throw Error("device: only work on a CUDA device becomes a graph");
}

void Graph::abandon([[maybe_unused]] Device device, [[maybe_unused]] Stream stream) noexcept {
  if constexpr (build::has_cuda) cuda::abandon_graph(device.index, stream);
}

Graph Graph::end([[maybe_unused]] Device device, [[maybe_unused]] Stream stream) {
  Graph graph;
  graph.device_ = device;
  if constexpr (build::has_cuda) graph.graph_ = cuda::end_graph(device.index, stream);
  return graph;
}

void Graph::launch([[maybe_unused]] Stream stream) const {
  if (graph_ == nullptr) return;
  if constexpr (build::has_cuda) cuda::launch_graph(device_.index, graph_, stream);
}

void Graph::reset() {
  void* const graph = std::exchange(graph_, nullptr);
  if (graph == nullptr) return;
  if constexpr (build::has_cuda) cuda::drop_graph(graph);
}

}  // namespace lockstep
