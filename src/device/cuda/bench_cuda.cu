#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string_view>

#include "base/philox.h"
#include "device/cuda/bench.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "numerics/bf16.h"

namespace lockstep::cuda {
namespace {

constexpr int kRounds = 11;  // timed; the median is told
constexpr int kWarmups = 3;
constexpr double kColdBytes = 180e6;
constexpr int kThreads = 256;
constexpr int kBrokenLaws = 3;  // the status where that is all that is wrong

struct Entry {
  const char* name;
  void (*body)(Bench&);
};

std::vector<Entry>& entries() {
  static std::vector<Entry> all;
  return all;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// A case's launches as one graph.
class Replay {
 public:
  Replay(const BenchCase& one, cudaStream_t stream) : stream_(stream) {
    launches_ = (std::max(one.launches, 1) + one.sets - 1) / one.sets * one.sets;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
            "cudaStreamBeginCapture");
    for (int i = 0; i < launches_; ++i) one.launch(i % one.sets, {stream});
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    require(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    require(cudaGraphDestroy(graph), "cudaGraphDestroy");
    require(cudaEventCreate(&begin_), "cudaEventCreate");
    require(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Replay() {
    cudaGraphExecDestroy(executable_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  /// Microseconds of one launch.
  double time() {
    require(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    require(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    require(cudaEventRecord(end_, stream_), "cudaEventRecord");
    require(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e3 / launches_;
  }

 private:
  cudaStream_t stream_;
  int launches_;
  cudaGraphExec_t executable_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

/// A tile of sixteen bytes by four a thread, once: as many blocks as there are tiles.
__global__ void bench_copy_kernel(uint4* to, const uint4* from, std::int64_t count) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads * 4 + threadIdx.x;
  uint4 values[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (first + j * kThreads < count) values[j] = from[first + j * kThreads];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (first + j * kThreads < count) to[first + j * kThreads] = values[j];
  }
}

/// The same past the caches.
__global__ void bench_copy_streaming_kernel(uint4* to, const uint4* from, std::int64_t count) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads * 4 + threadIdx.x;
  uint4 values[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (first + j * kThreads < count) values[j] = __ldcs(from + first + j * kThreads);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (first + j * kThreads < count) __stcs(to + first + j * kThreads, values[j]);
  }
}

__global__ void bench_read_kernel(std::uint32_t* sum, const uint4* from, std::int64_t count) {
  std::uint32_t here = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = from[i + j * step];
#pragma unroll
    for (int j = 0; j < 8; ++j) here ^= values[j].x ^ values[j].y ^ values[j].z ^ values[j].w;
  }
  if (here == 0x9E3779B9u) *sum = here;
}

__global__ void bench_normal_kernel(Bf16* out, std::int64_t count, std::uint64_t seed,
                                    float deviation, int binades) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const PhiloxWords words = philox(seed, philox_counter(static_cast<std::uint64_t>(i), 0, 0));
    const float u = (static_cast<float>(words[0] >> 8) + 0.5f) * 0x1p-24f;
    const float turn = static_cast<float>(words[1] >> 8) * 0x1p-24f;
    float value = sqrtf(-2.0f * logf(u)) * cospif(2.0f * turn) * deviation;
    if (binades > 0) {
      const PhiloxWords block =
          philox(seed, philox_counter(static_cast<std::uint64_t>(i / 16), 1, 0));
      const auto range = static_cast<std::uint32_t>(2 * binades + 1);
      value = ldexpf(value, static_cast<int>(block[0] % range) - binades);
    }
    out[i] = to_bf16(value);
  }
}

__global__ void bench_bytes_kernel(std::uint8_t* out, std::int64_t count, std::uint64_t seed,
                                   std::uint32_t values) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const PhiloxWords words = philox(seed, philox_counter(static_cast<std::uint64_t>(i), 2, 0));
    out[i] = static_cast<std::uint8_t>(words[0] % values);
  }
}

std::string number(double value, const char* format) {
  char text[32];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

}  // namespace

Bench::Bench(Device device) : device_(device) {
  const std::string why = lockstep::why_unusable(device);
  if (!why.empty()) throw Error(why);
  require(cudaSetDevice(device.index), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  stream_ = {stream};
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  std::printf("%s, %d multiprocessors, %.0f MB L2\n", properties.name,
              properties.multiProcessorCount, properties.l2CacheSize / 1e6);
  std::printf("%-38s %-16s %9s %8s %8s %8s %6s %7s %s\n", "case", "size", "us", "MB", "TB/s",
              "TFLOP/s", "floor", "ratio", "spread");
  measure_ceilings();
}

Bench::~Bench() { cudaStreamDestroy(stream_of(stream_)); }

void Bench::measure_ceilings() {
  constexpr std::int64_t kBytes = std::int64_t{1} << 29;
  const Buffer from = random_bytes(kBytes, 1);
  const Buffer to(device_, kBytes);
  const int blocks = multiprocessors(device_.index) * 8;
  const auto tiles = static_cast<unsigned int>(kBytes / 16 / (kThreads * 4));
  const auto bytes = static_cast<double>(kBytes);
  const std::vector<double> copies =
      compare({{.name = "ceiling: cudaMemcpy",
                .size = "512 MiB",
                .bytes = 2 * bytes,
                .launch =
                    [&](int, Stream stream) {
                      copy_bytes(to.as<void>(), device_, from.as<void>(), device_, kBytes, stream);
                    }},
               {.name = "ceiling: copy",
                .size = "512 MiB",
                .bytes = 2 * bytes,
                .launch =
                    [&](int, Stream stream) {
                      bench_copy_kernel<<<tiles, kThreads, 0, stream_of(stream)>>>(
                          to.as<uint4>(), from.as<uint4>(), kBytes / 16);
                      require_launch("bench_copy_kernel");
                    }},
               {.name = "ceiling: streaming copy",
                .size = "512 MiB",
                .bytes = 2 * bytes,
                .launch =
                    [&](int, Stream stream) {
                      bench_copy_streaming_kernel<<<tiles, kThreads, 0, stream_of(stream)>>>(
                          to.as<uint4>(), from.as<uint4>(), kBytes / 16);
                      require_launch("bench_copy_streaming_kernel");
                    }},
               {.name = "ceiling: read",
                .size = "512 MiB",
                .bytes = bytes,
                .launch = [&](int, Stream stream) {
                  bench_read_kernel<<<blocks, kThreads, 0, stream_of(stream)>>>(
                      to.as<std::uint32_t>(), from.as<uint4>(), kBytes / 16);
                  require_launch("bench_read_kernel");
                }}});
  ceilings_.copy = 2 * bytes / (*std::min_element(copies.begin(), copies.end() - 1) * 1e-6);
  ceilings_.read = bytes / (copies.back() * 1e-6);
}

double Bench::run(const BenchCase& one) { return compare({one})[0]; }

std::vector<double> Bench::compare(const std::vector<BenchCase>& cases) {
  const cudaStream_t stream = stream_of(stream_);
  std::vector<std::unique_ptr<Replay>> replays;
  for (const BenchCase& one : cases) {
    one.launch(0, stream_);  // what is wrong shows here, by name
    lockstep::synchronize(device_, stream_);
    replays.push_back(std::make_unique<Replay>(one, stream));
    for (int i = 0; i < kWarmups; ++i) replays.back()->time();
  }
  std::vector<std::vector<double>> times(cases.size());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < cases.size(); ++i) times[i].push_back(replays[i]->time());
  }
  std::vector<double> medians;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const BenchCase& one = cases[i];
    const double us = median(times[i]);
    medians.push_back(us);
    const double ceiling = one.floor == Floor::kCopy ? ceilings_.copy : ceilings_.read;
    double floor = ceiling > 0 ? one.bytes / ceiling * 1e6 : 0;
    if (ceilings_.product > 0) floor = std::max(floor, one.flop / ceilings_.product * 1e6);
    std::vector<double> ratios;
    for (int round = 0; round < kRounds; ++round) {
      const auto at = static_cast<std::size_t>(round);
      ratios.push_back(times[i][at] / times[0][at]);
    }
    const auto [least, most] = std::minmax_element(times[i].begin(), times[i].end());
    std::printf("%-38s %-16s %9.2f %8.1f %8s %8s %6s %7s %.1f%%\n", one.name.c_str(),
                one.size.c_str(), us, one.bytes / 1e6,
                one.bytes > 0 ? number(one.bytes / us / 1e6, "%.3f").c_str() : "",
                one.flop > 0 ? number(one.flop / us / 1e6, "%.1f").c_str() : "",
                floor > 0 ? number(floor / us, "%.3f").c_str() : "",
                i > 0 ? number(median(ratios), "%.3f").c_str() : "", (*most - *least) / us * 100);
    std::fflush(stdout);
  }
  return medians;
}

void Bench::judge(const Law& law) {
  std::printf("law: %s\n", to_string(law).c_str());
  std::fflush(stdout);
  broken_laws_ += !holds(law);
}

void Bench::heading(const std::string& text) const { std::printf("-- %s\n", text.c_str()); }

int Bench::sets_of(double bytes) {
  return static_cast<int>(std::clamp(std::ceil(kColdBytes / std::max(bytes, 1.0)), 1.0, 1024.0));
}

Buffer Bench::normal_bf16(std::int64_t count, std::uint64_t seed, float deviation,
                          int binades) const {
  Buffer out(device_, count * 2, stream_);
  bench_normal_kernel<<<multiprocessors(device_.index) * 8, kThreads, 0, stream_of(stream_)>>>(
      out.as<Bf16>(), count, seed, deviation, binades);
  require_launch("bench_normal_kernel");
  return out;
}

Buffer Bench::random_bytes(std::int64_t count, std::uint64_t seed, std::uint8_t most) const {
  Buffer out(device_, count, stream_);
  bench_bytes_kernel<<<multiprocessors(device_.index) * 8, kThreads, 0, stream_of(stream_)>>>(
      out.as<std::uint8_t>(), count, seed, std::uint32_t{most} + 1);
  require_launch("bench_bytes_kernel");
  return out;
}

BenchEntry::BenchEntry(const char* name, void (*body)(Bench&)) {
  entries().push_back({name, body});
}

int bench_main(int argc, char** argv) {
  std::vector<std::string_view> words(argv + 1, argv + argc);
  std::sort(entries().begin(), entries().end(),
            [](const Entry& a, const Entry& b) { return std::strcmp(a.name, b.name) < 0; });
  const bool list = !words.empty() && words[0] == "--list";
  try {
    std::unique_ptr<Bench> bench;
    for (const Entry& entry : entries()) {
      const std::string_view name = entry.name;
      // The law of an op is asked for as such: it takes longer than the op's own rows.
      const bool asked = words.empty() || std::any_of(words.begin(), words.end(), [&](auto word) {
                           return name.find(word) != std::string_view::npos &&
                                  (word.starts_with("law") || !name.starts_with("law"));
                         });
      if (list) std::printf("%s\n", entry.name);
      if (list || !asked) continue;
      if (bench == nullptr) bench = std::make_unique<Bench>(Device{Device::Kind::kCuda, 0});
      trim_pool(0);  // of the entry before, which may have had most of it
      bench->heading(entry.name);
      entry.body(*bench);
    }
    if (!list && bench == nullptr) throw Error("no benchmark has such a name; see --list");
    if (bench != nullptr && bench->broken_laws() > 0) {
      std::fprintf(stderr, "cuda_bench: %d laws of cost do not hold\n", bench->broken_laws());
      return kBrokenLaws;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace lockstep::cuda
