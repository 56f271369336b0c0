/// Timing on a CUDA device, for the x_cuda_bench.cc files that make up `cuda_bench`.
///
/// A case is captured into a graph of many launches that rotate over sets of inputs, and the graph
/// is replayed between events; cases that are compared take turns. What the card can do, a copy and
/// a read, is measured first in the same run, and every time stands beside its share of that floor.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "device/cuda/law.h"
#include "device/memory.h"

namespace lockstep::cuda {

/// Per second.
struct Ceilings {
  double copy = 0;     // bytes, read and written together
  double read = 0;     // bytes
  double product = 0;  // FLOP of BF16 products; 0 where no case measured it: set_product()
};

/// What a case's bytes are held against.
enum class Floor : std::uint8_t { kCopy, kRead };

struct BenchCase {
  std::string name;
  std::string size;
  double bytes = 0;  // that must move, each once
  double flop = 0;   // of BF16 products; its floor counts where it is the higher one
  Floor floor = Floor::kCopy;
  int sets = 1;  // of inputs: sets_of(bytes of one) where they shall not come from the L2
  /// Gives one run over set `set` to the stream. It is captured: no allocation, no waiting.
  std::function<void(int set, Stream stream)> launch;
  int launches = 20;  // in a graph, at least; rounded up to a multiple of sets
};

class Bench {
 public:
  /// Throws Error where the device is not usable.
  explicit Bench(Device device);
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  Device device() const { return device_; }
  Stream stream() const { return stream_; }
  const Ceilings& ceilings() const { return ceilings_; }
  void set_product(double flop_a_second) { ceilings_.product = flop_a_second; }

  /// Measures and prints a row; returns the microseconds of one launch.
  double run(const BenchCase& one);
  /// The same of several, which take turns; each row but the first tells the median of its ratios
  /// to the first.
  std::vector<double> compare(const std::vector<BenchCase>& cases);
  /// Prints whether a law of cost holds. Where one does not, bench_main() ends with a
  /// status of its own.
  void judge(const Law& law);
  int broken_laws() const { return broken_laws_; }
  /// A line between rows.
  void heading(const std::string& text) const;

  /// Input sets for which 180 MB, three times the L2, pass between two uses of one.
  static int sets_of(double bytes);

  /// Normal numbers with the given deviation, each block of 16 times a power of two of its own in
  /// 2^[-binades, binades]. `seed` differs from buffer to buffer.
  Buffer normal_bf16(std::int64_t count, std::uint64_t seed, float deviation = 1.0f,
                     int binades = 0) const;
  /// Random bytes; `most` is the largest.
  Buffer random_bytes(std::int64_t count, std::uint64_t seed, std::uint8_t most = 0xFF) const;

 private:
  void measure_ceilings();

  Device device_;
  Stream stream_;
  Ceilings ceilings_;
  int broken_laws_ = 0;
};

/// A file's cases: a namespace-scope object of this type is all that it needs.
struct BenchEntry {
  BenchEntry(const char* name, void (*body)(Bench&));
};

/// `cuda_bench [--list] [name ...]`: the entries whose names contain one of the words, or all. The
/// status is 1 where something failed, 3 where nothing did and a law of cost does not hold.
int bench_main(int argc, char** argv);

}  // namespace lockstep::cuda
