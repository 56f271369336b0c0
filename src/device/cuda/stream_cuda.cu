#include "device/cuda/check.h"
#include "device/cuda/cuda.h"

namespace lockstep::cuda {

Stream make_stream(std::int8_t index) {
  const OnDevice scope(index);
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return {stream};
}

void drop_stream(std::int8_t, Stream stream) noexcept { cudaStreamDestroy(stream_of(stream)); }

void* make_event(std::int8_t index) {
  const OnDevice scope(index);
  cudaEvent_t event = nullptr;
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

void drop_event(void* event) noexcept { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void record_event(std::int8_t index, void* event, Stream stream) {
  const OnDevice scope(index);
  require(cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(stream)), "cudaEventRecord");
}

void wait_event(void* event) {
  require(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
}

void hold_back(std::int8_t index, void* event, Stream later) {
  const OnDevice scope(index);
  require(cudaStreamWaitEvent(stream_of(later), static_cast<cudaEvent_t>(event), 0),
          "cudaStreamWaitEvent");
}

void begin_graph(std::int8_t index, Stream stream) {
  const OnDevice scope(index);
  require(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
}

void abandon_graph(std::int8_t, Stream stream) noexcept {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream_of(stream), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // what stopped the capture is on its way already
}

void* end_graph(std::int8_t index, Stream stream) {
  const OnDevice scope(index);
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream_of(stream), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  require(status, "cudaGraphInstantiate");
  return executable;
}

void launch_graph(std::int8_t index, void* graph, Stream stream) {
  const OnDevice scope(index);
  require(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)),
          "cudaGraphLaunch");
}

void drop_graph(void* graph) noexcept { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

}  // namespace lockstep::cuda
