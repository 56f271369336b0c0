#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "train/arrays.h"

namespace lockstep::train {
namespace {

constexpr std::int64_t kChunk = 1 << 14;

double decayed(const Options& options, std::int64_t update) {
  const std::int64_t length = options.decay_updates - options.warmup_updates;
  if (options.decay == Decay::kConstant || length <= 0) return 1.0;
  const double way = std::clamp(
      static_cast<double>(update - options.warmup_updates) / static_cast<double>(length), 0.0, 1.0);
  const double left =
      options.decay == Decay::kLinear ? 1.0 - way : 0.5 * (1.0 + std::cos(std::numbers::pi * way));
  return options.min_lr_fraction + (1.0 - options.min_lr_fraction) * left;
}

}  // namespace

double learning_rate(const Options& options, std::int64_t update) {
  if (update < options.warmup_updates) {
    return options.lr * static_cast<double>(update + 1) /
           static_cast<double>(options.warmup_updates);
  }
  return options.lr * decayed(options, update);
}

void add(const Floats& to, const Floats& from) {
  if (to.device().kind != Device::Kind::kCpu) {
    throw Error("gradients of several lanes on a CUDA device; there is one");
  }
  float* sum = to.data();
  const float* part = from.data();
  parallel_for(to.size(), kChunk, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) sum[i] += part[i];
  });
}

void sum_over_ranks(const Floats& numbers, Comm& comm) {
  if (comm.size() == 1) return;
  if (numbers.device().kind != Device::Kind::kCpu) {
    throw Error("gradients on a CUDA device are summed over one rank only; set device = \"cpu\"");
  }
  const std::span<float> grads = numbers.all();
  std::vector<double> part;
  for (std::size_t first = 0; first < grads.size(); first += std::size_t{1} << 20) {
    const std::span<float> here =
        grads.subspan(first, std::min(grads.size() - first, std::size_t{1} << 20));
    part.assign(here.begin(), here.end());
    comm.sum(part);
    std::ranges::transform(part, here.begin(), [](double x) { return static_cast<float>(x); });
  }
}

double norm_of(const Floats& numbers, Stream stream) {
  const std::int64_t n = numbers.size();
  if (numbers.device().kind != Device::Kind::kCpu) {
    return std::sqrt(sum_of_squares(numbers, stream));
  }
  const float* grad = numbers.data();
  std::vector<double> parts(static_cast<std::size_t>((n + kChunk - 1) / kChunk));
  parallel_for(static_cast<std::int64_t>(parts.size()), 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t c = from; c < to; ++c) {
      double sum = 0.0;
      for (std::int64_t i = c * kChunk; i < std::min(n, (c + 1) * kChunk); ++i) {
        sum += static_cast<double>(grad[i]) * static_cast<double>(grad[i]);
      }
      parts[static_cast<std::size_t>(c)] = sum;
    }
  });
  double sum = 0.0;
  for (const double part : parts) sum += part;
  return std::sqrt(sum);
}

void adamw(Parameters& parameters, const Floats& grads, const Options& options, std::int64_t update,
           double scale, Stream stream) {
  const double step = static_cast<double>(update + 1);
  const double lr = learning_rate(options, update);
  const auto beta1 = static_cast<float>(options.beta1);
  const auto beta2 = static_cast<float>(options.beta2);
  const auto rest1 = static_cast<float>(1.0 - options.beta1);
  const auto rest2 = static_cast<float>(1.0 - options.beta2);
  const auto keep = static_cast<float>(1.0 - lr * options.weight_decay);
  const auto rate = static_cast<float>(lr / (1.0 - std::pow(options.beta1, step)));
  const auto root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(options.beta2, step)));
  const auto eps = static_cast<float>(options.eps);
  const auto clip = static_cast<float>(scale);
  if (parameters.device().kind != Device::Kind::kCpu) {
    return adamw_on_device({.weights = parameters.masters.data(),
                            .moment1 = parameters.moment1.data(),
                            .moment2 = parameters.moment2.data(),
                            .grads = grads.data(),
                            .count = parameters.size(),
                            .beta1 = beta1,
                            .beta2 = beta2,
                            .rest1 = rest1,
                            .rest2 = rest2,
                            .keep = keep,
                            .rate = rate,
                            .root = root,
                            .eps = eps,
                            .clip = clip},
                           parameters.device(), stream);
  }
  float* w = parameters.masters.data();
  float* m = parameters.moment1.data();
  float* v = parameters.moment2.data();
  const float* grad = grads.data();
  parallel_for(parameters.size(), kChunk, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) {
      const float g = grad[i] * clip;
      m[i] = beta1 * m[i] + rest1 * g;
      v[i] = beta2 * v[i] + rest2 * g * g;
      w[i] = w[i] * keep - rate * m[i] / (std::sqrt(v[i]) * root + eps);
    }
  });
}

}  // namespace lockstep::train
