// A safetensors file from anybody: its header is read and every tensor lies within, or it is
// refused with one line.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "model/config_json.h"
#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto header = parse_safetensors(bytes, "fuzz");
  if (!header && header.error().message.empty()) std::abort();
  if (header) {
    std::uint64_t covered = 0;
    for (const TensorInfo& tensor : header->tensors) {
      if (tensor.end < tensor.first || tensor.end > size) std::abort();
      covered += tensor.end - tensor.first;
      std::uint64_t count = 1;
      for (std::int64_t extent : tensor.shape) count *= static_cast<std::uint64_t>(extent);
      if (count * static_cast<std::uint64_t>(dtype_size(tensor.dtype)) !=
          tensor.end - tensor.first) {
        std::abort();
      }
    }
    if (covered > size) std::abort();
  }
  // The other thing that a checkpoint's stranger writes.
  const auto config = parse_config({reinterpret_cast<const char*>(data), size}, "", "fuzz");
  if (config) check_config(*config, "fuzz");
  return 0;
}
