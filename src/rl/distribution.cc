#include "rl/distribution.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace lockstep::rl {
namespace {

// The upper half of an FP32's bits: sign 0, the exponent and seven bits of the mantissa.
constexpr std::size_t kBins = 1 << 15;

std::size_t bin_of(double value) {
  return std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16;
}

double middle_of(std::size_t bin) {
  const auto bits = static_cast<std::uint32_t>(bin) << 16;
  return bin == 0 ? 0.0 : static_cast<double>(std::bit_cast<float>(bits | 0x8000u));
}

}  // namespace

Distribution::Distribution() : bins_(kBins) {}

void Distribution::add(double value) {
  if (std::isnan(value)) return;
  value = std::min(value, 0x1p127);
  bins_[bin_of(value)] += 1;
  sum_ += value;
  count_ += 1;
  largest_ = std::max(largest_, value);
}

void Distribution::reduce(Comm& comm) {
  std::array<double, 2> sums = {sum_, count_};
  std::array<double, 1> most = {largest_};
  comm.sum(sums);
  comm.max(most);
  comm.sum(bins_);
  sum_ = sums[0], count_ = sums[1], largest_ = most[0];
}

double Distribution::mean() const { return count_ > 0 ? sum_ / count_ : 0; }

double Distribution::quantile(double q) const {
  double below = 0;
  for (std::size_t bin = 0; bin < kBins; ++bin) {
    below += bins_[bin];
    if (below > 0 && below >= q * count_) return std::min(middle_of(bin), largest_);
  }
  return 0;
}

void Distribution::put(const std::string& name, Metrics& metrics) const {
  metrics[name] = mean();
  metrics[name + "/median"] = quantile(0.5);
  metrics[name + "/p99"] = quantile(0.99);
  metrics[name + "/max"] = largest_;
  metrics[name + "/count"] = count_;
}

}  // namespace lockstep::rl
