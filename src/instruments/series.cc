#include "instruments/series.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "recipe/recipe.h"

namespace lockstep::instruments {
namespace {

constexpr std::size_t kSpan = 5;  // steps that "first" and "last" are means of

/// The recipe without what may differ between seeds of an arm: seeds, and what calibration found.
std::map<std::string, std::string> method(const RunData& run) {
  std::map<std::string, std::string> keys = run.keys;
  for (const char* key : {"seed", "task.seed"}) keys.erase(key);
  for (const std::string_view key : recipe::kCalibrated) keys.erase(std::string(key));
  return keys;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? kNaN : sum / static_cast<double>(values.size());
}

/// The places of an arm's steps: at most `most`, each as many different steps wide as the others.
class Places {
 public:
  Places(const ArmRuns& arm, std::size_t most) {
    std::set<double> all;
    for (const RunData* run : arm.runs) all.insert(run->steps.begin(), run->steps.end());
    steps_.assign(all.begin(), all.end());
    width_ = std::max<std::size_t>(1, (steps_.size() + most - 1) / std::max<std::size_t>(1, most));
  }
  std::size_t size() const { return (steps_.size() + width_ - 1) / width_; }
  double first(std::size_t place) const { return steps_[place * width_]; }
  double last(std::size_t place) const {
    return steps_[std::min(steps_.size(), (place + 1) * width_) - 1];
  }
  std::size_t of(double step) const {
    const auto at = std::lower_bound(steps_.begin(), steps_.end(), step) - steps_.begin();
    return static_cast<std::size_t>(at) / width_;
  }

 private:
  std::vector<double> steps_;
  std::size_t width_;
};

/// What was measured at each place, over all seeds.
std::vector<std::vector<double>> gathered(const ArmRuns& arm, const std::string& metric,
                                          const Places& places) {
  std::vector<std::vector<double>> values(places.size());
  for (const RunData* run : arm.runs) {
    const std::vector<double>& column = run->column(metric);
    for (std::size_t i = 0; i < column.size(); ++i) {
      if (!std::isnan(column[i])) values[places.of(run->steps[i])].push_back(column[i]);
    }
  }
  return values;
}

Spread spread(const std::vector<double>& of_seeds) {
  std::vector<double> values;
  for (const double value : of_seeds) {
    if (std::isfinite(value)) values.push_back(value);
  }
  const double middle = mean(values);
  if (values.size() < 2) return {middle, kNaN, values.size()};
  double sum = 0;
  for (const double value : values) sum += (value - middle) * (value - middle);
  return {middle, std::sqrt(sum / static_cast<double>(values.size() - 1)), values.size()};
}

double figure_of(std::vector<double> values, Over over) {
  std::erase_if(values, [](double value) { return std::isnan(value); });
  if (values.empty()) return kNaN;
  const auto span = static_cast<std::ptrdiff_t>(std::min(kSpan, values.size()));
  switch (over) {
    case Over::kFirst: return mean({values.begin(), values.begin() + span});
    case Over::kLast: return mean({values.end() - span, values.end()});
    case Over::kAll: return mean(values);
    case Over::kLatest: return values.back();
    case Over::kMost: return *std::max_element(values.begin(), values.end());
    case Over::kMostOfLast: return *std::max_element(values.end() - span, values.end());
  }
  return kNaN;
}

double total(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += std::isnan(value) ? 0 : value;
  return sum;
}

/// The layers that a metric has: one past the largest number after /layer_.
std::size_t num_layers(const ArmRuns& arm, const std::string& metric) {
  constexpr std::size_t kMost = 512;  // a name with a wild number makes no wild page
  const std::string head = metric + "/layer_";
  std::size_t layers = 0;
  for (const RunData* run : arm.runs) {
    for (auto it = run->metrics.lower_bound(head);
         it != run->metrics.end() && it->first.starts_with(head); ++it) {
      std::size_t layer = 0;
      const char* end = it->first.data() + it->first.size();
      const auto [stop, error] = std::from_chars(it->first.data() + head.size(), end, layer);
      if (error == std::errc() && stop == end && layer < kMost)
        layers = std::max(layers, layer + 1);
    }
  }
  return layers;
}

}  // namespace

std::vector<ArmRuns> arms_of(std::span<const RunData> runs) {
  std::vector<ArmRuns> arms;
  std::map<std::string, int> methods;  // of each name
  for (const RunData& run : runs) {
    const auto same = std::find_if(arms.begin(), arms.end(), [&](const ArmRuns& arm) {
      return arm.name == run.arm && method(*arm.runs[0]) == method(run);
    });
    if (same != arms.end()) {
      same->runs.push_back(&run);
      continue;
    }
    ++methods[run.arm];
    const auto preset = run.keys.find("contract.preset");
    const bool plain = preset != run.keys.end() && preset->second == "bf16";
    arms.push_back({run.arm, {&run}, !plain});
  }
  for (ArmRuns& arm : arms) {
    if (methods[arm.name] > 1) arm.name += " (" + arm.runs[0]->name + ")";
  }
  std::stable_partition(arms.begin(), arms.end(),
                        [](const ArmRuns& arm) { return !arm.quantized; });
  return arms;
}

std::vector<Point> curve(const ArmRuns& arm, const std::string& metric, std::size_t most) {
  const Places places(arm, most);
  const std::vector<std::vector<double>> values = gathered(arm, metric, places);
  std::vector<Point> points;
  bool any = false;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const double step = (places.first(i) + places.last(i)) / 2;
    if (values[i].empty()) {
      points.push_back({step, kNaN, kNaN, kNaN});
      continue;
    }
    const auto [low, high] = std::minmax_element(values[i].begin(), values[i].end());
    points.push_back({step, mean(values[i]), *low, *high});
    any = true;
  }
  return any ? points : std::vector<Point>{};
}

Grid grid(const ArmRuns& arm, const std::string& metric, std::size_t most) {
  const Places places(arm, most);
  Grid out;
  const std::size_t layers = num_layers(arm, metric);
  if (layers == 0) return out;
  for (std::size_t i = 0; i < places.size(); ++i) out.steps.push_back(places.first(i));
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::vector<double>& row = out.layers.emplace_back();
    for (const auto& at : gathered(arm, metric + "/layer_" + std::to_string(layer), places)) {
      row.push_back(mean(at));
    }
  }
  return out;
}

Spread figure(const ArmRuns& arm, const std::string& metric, Over over) {
  std::vector<double> of_seeds;
  for (const RunData* run : arm.runs) of_seeds.push_back(figure_of(run->column(metric), over));
  return spread(of_seeds);
}

Spread growth(const ArmRuns& arm, const std::string& metric) {
  std::vector<double> of_seeds;
  for (const RunData* run : arm.runs) {
    const std::vector<double>& column = run->column(metric);
    const auto measured = std::count_if(column.begin(), column.end(),
                                        [](double value) { return !std::isnan(value); });
    if (std::cmp_less(measured, 2 * kSpan)) continue;  // first and last would be the same steps
    const double first = figure_of(run->column(metric), Over::kFirst);
    const double last = figure_of(run->column(metric), Over::kLast);
    of_seeds.push_back(first > 0 ? last / first : kNaN);
  }
  return spread(of_seeds);
}

Spread tokens_per_second(const ArmRuns& arm) {
  std::vector<double> of_seeds;
  for (const RunData* run : arm.runs) {
    const double seconds = total(run->column("timing_s/step"));
    const double tokens = total(run->column("perf/total_num_tokens"));
    of_seeds.push_back(seconds > 0 && tokens > 0 ? tokens / seconds : kNaN);
  }
  return spread(of_seeds);
}

std::vector<std::string> names_under(std::span<const ArmRuns> arms, const std::string& prefix) {
  std::set<std::string> names;
  for (const ArmRuns& arm : arms) {
    for (const RunData* run : arm.runs) {
      for (auto it = run->metrics.lower_bound(prefix);
           it != run->metrics.end() && it->first.starts_with(prefix); ++it) {
        names.insert(it->first.substr(prefix.size()));
      }
    }
  }
  return {names.begin(), names.end()};
}

std::string find_metric(std::span<const ArmRuns> arms, const std::string& begin,
                        const std::string& end) {
  for (const std::string& name : names_under(arms, begin)) {
    if (name.ends_with(end)) return begin + name;
  }
  return "";
}

}  // namespace lockstep::instruments
