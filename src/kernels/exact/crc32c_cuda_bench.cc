#include "device/cuda/bench.h"
#include "kernels/exact/crc32c.h"

namespace lockstep {
namespace {

using cuda::Bench;

/// The checksums of a layer of Qwen3-30B-A3B, and of as many bytes in rows.
void run(Bench& bench) {
  const Device device = bench.device();
  const auto time = [&](const char* name, const std::string& size, kernels::Crc32cList& list,
                        std::int64_t bytes) {
    const Buffer sums(device, 4 * list.size(), bench.stream());
    list.launch(sums.as<std::uint32_t>(), bench.stream());
    bench.run({.name = name,
               .size = size,
               .bytes = static_cast<double>(bytes),
               .floor = cuda::Floor::kRead,
               .launch = [&](int, Stream stream) { list.launch(sums.as<std::uint32_t>(), stream); },
               .launches = 4});
  };
  for (const auto& [out, cols] : {std::pair{1536, 2048}, {2048, 768}}) {
    const std::int64_t bytes = 128 * kernels::W4a4Weights::expert_bytes(out, cols);
    const Buffer memory = bench.random_bytes(bytes, 1);
    kernels::Crc32cList list(device, bench.stream());
    for (std::int32_t expert = 0; expert < 128; ++expert) {
      list.add({memory.as<>(), 128, out, cols, device}, expert);
    }
    time("crc32c of experts", "128 x [" + std::to_string(out) + ", " + std::to_string(cols) + "]",
         list, bytes);
  }
  constexpr std::int64_t kBytes = 256 << 20;
  const Buffer memory = bench.random_bytes(kBytes, 2);
  kernels::Crc32cList list(device, bench.stream());
  for (std::int64_t i = 0; i < 128; ++i) {
    list.add({{memory.as<std::uint8_t>() + i * (kBytes / 128),
               {1, kBytes / 128},
               {kBytes / 128, 1},
               device}});
  }
  time("crc32c of rows", "256 MiB", list, kBytes);
}

const cuda::BenchEntry kEntry("crc32c", run);

}  // namespace
}  // namespace lockstep
