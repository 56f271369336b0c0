/// What device/ asks of a CUDA device, and what a kernel's host side needs. Declared in every
/// build, defined where there is a CUDA compiler: call behind `if constexpr (build::has_cuda)`.
#pragma once

#include <cstdint>
#include <source_location>
#include <string>

#include "device/memory.h"
#include "device/view.h"

namespace lockstep::cuda {

std::string why_unusable(std::int8_t index);
bool holds_context(std::int8_t index);
DeviceMemory memory(std::int8_t index);
/// nullptr where there is not so much memory.
void* allocate(std::int8_t index, std::int64_t bytes, Stream stream);
void release(std::int8_t index, void* data, Stream stream) noexcept;
void* allocate_pinned(std::int8_t index, std::int64_t bytes);
void release_pinned(std::int8_t index, void* data) noexcept;
void copy(void* to, const void* from, std::int64_t bytes, std::int8_t index, Stream stream);
void fill(void* to, std::uint8_t value, std::int64_t bytes, std::int8_t index, Stream stream);
void synchronize(std::int8_t index, Stream stream);
void trim_pool(std::int8_t index);

// device/slab.h: addresses, and memory that lies there for a while.
/// The next size that memory comes in.
std::int64_t slab_bytes(std::int8_t index, std::int64_t bytes);
void* reserve_addresses(std::int8_t index, std::int64_t bytes);
/// Names what lies there now; 0 where there is not so much memory.
unsigned long long map(std::int8_t index, void* data, std::int64_t bytes);
/// Waits for the device. `memory` is 0 as soon as nothing lies there any more, whatever is thrown.
void unmap(std::int8_t index, void* data, std::int64_t bytes, unsigned long long& memory);
/// Unmaps too, unless `memory` is 0.
void drop_addresses(std::int8_t index, void* data, std::int64_t bytes,
                    unsigned long long memory) noexcept;

int multiprocessors(std::int8_t index);

// device/stream.h
Stream make_stream(std::int8_t index);
void drop_stream(std::int8_t index, Stream stream) noexcept;
void* make_event(std::int8_t index);
void drop_event(void* event) noexcept;
void record_event(std::int8_t index, void* event, Stream stream);
void wait_event(void* event);
void hold_back(std::int8_t index, void* event, Stream later);
void begin_graph(std::int8_t index, Stream stream);
void abandon_graph(std::int8_t index, Stream stream) noexcept;
void* end_graph(std::int8_t index, Stream stream);
void launch_graph(std::int8_t index, void* graph, Stream stream);
void drop_graph(void* graph) noexcept;

}  // namespace lockstep::cuda
