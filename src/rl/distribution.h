#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "device/comm.h"

namespace lockstep::rl {

/// The distribution of a magnitude over all ranks: mean, quantiles, largest, count. Quantiles come
/// from bins of 2^-7 relative width, so that ranks add them up and no order of values matters.
class Distribution {
 public:
  Distribution();

  /// Takes a value >= 0; one that is not a number is not counted.
  void add(double value);

  /// Adds up over ranks. Collective; once, after the last add().
  void reduce(Comm& comm);

  double count() const { return count_; }
  double mean() const;              // 0 where there are no values
  double quantile(double q) const;  // the value at or below which a fraction q lies
  double largest() const { return largest_; }

  /// name (the mean), name/median, name/p99, name/max, name/count.
  void put(const std::string& name, Metrics& metrics) const;

 private:
  std::vector<double> bins_;
  double sum_ = 0, count_ = 0, largest_ = 0;
};

}  // namespace lockstep::rl
