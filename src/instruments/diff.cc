#include "instruments/diff.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/text.h"
#include "instruments/diff_place.h"
#include "numerics/bf16.h"
#include "numerics/scale.h"

namespace lockstep::instruments {
namespace {

// A mean gap that BF16 engines do not exceed, small models or large (docs/formats/dump.md).
constexpr double kRoundingGap = 0.02;
// What the order of a head's FP32 sums leaves when all before it is equal.
constexpr double kSumOrderGap = 1e-4;
constexpr double kLeastDrift = 0x1p-10;  // below it, growth says nothing

void require_places(const Dump& a, const Dump& b) {
  for (const Place& place : a.places()) {
    if (!b.has(place))
      throw Error(cat({b.name(), ": has no ", tensor_name(place), ", which ", a.name(),
                       " has; dump the same places of both"}));
    if (a.width(place) == b.width(place)) continue;
    throw Error(cat({tensor_name(place), " is ", a.width(place), " wide in ", a.name(), " and ",
                     b.width(place), " in ", b.name(), ": these are not the same model"}));
  }
  for (const Place& place : b.places()) {
    if (!a.has(place))
      throw Error(cat({a.name(), ": has no ", tensor_name(place), ", which ", b.name(),
                       " has; dump the same places of both"}));
  }
}

void require_tokens(const Dump& a, const Dump& b) {
  if (a.rows() != b.rows()) {
    throw Error(cat({a.name(), " has ", a.rows(), " tokens, ", b.name(), " has ", b.rows(),
                     ": dump the same sequences with both engines"}));
  }
  const std::vector<Token> left = a.tokens(), right = b.tokens();
  if (left.empty() || right.empty()) return;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i] == right[i]) continue;
    throw Error(cat({"token ", i, " is ", left[i], " in ", a.name(), " and ", right[i], " in ",
                     b.name(), ": dump the same sequences with both engines"}));
  }
}

void require_guidable(const std::string& name, const Quantizer& rule) {
  if (rule.is_guidable()) return;
  throw Error(cat({"contract ", name,
                   " has no codes that guidance is defined for; compare under lockstep, mx-floor, "
                   "mx-even, mx-ceil, mx-rceil, mxfp8 or fp8"}));
}

void require_blocks(const Dump& dump, Place place, const Quantizer& rule) {
  const std::int64_t width = dump.width(place);
  const std::int32_t block = rule.scale == ScaleFormat::kNone ? 16 : rule.block;
  if (width % block == 0 && width <= INT32_MAX) return;
  throw Error(cat({dump.name(), ": ", tensor_name(place), " is ", width, " wide, which blocks of ",
                   block, " do not divide"}));
}

float amax_of(const std::vector<Bf16>& values) {
  std::uint16_t most = 0;
  for (const Bf16 x : values) most = std::max<std::uint16_t>(most, bits_of(x) & 0x7fff);
  return to_float(static_cast<Bf16>(most));
}

/// K's and V's, [L, 2].
std::vector<std::int8_t> exponents_of(const Dump& a, std::int32_t layers, const Quantizer& rule) {
  std::vector<std::int8_t> exponents = a.kv_exponents();
  if (exponents.empty()) {
    exponents.assign(static_cast<std::size_t>(2 * layers), 0);
    for (const Place& place : a.places()) {
      if (place.site != Site::kK && place.site != Site::kV) continue;
      const auto at = static_cast<std::size_t>(2 * place.layer.value + (place.site == Site::kV));
      exponents[at] = static_cast<std::int8_t>(kv_exponent(rule, amax_of(a.values(place))));
    }
  }
  if (std::ssize(exponents) < 2 * layers) {
    throw Error(cat({a.name(), ": kv_exponents has ", exponents.size(), " numbers, the dump has ",
                     layers, " layers: K's and V's of each are expected"}));
  }
  return exponents;
}

RouteDiff compare_routes(const Dump& a, const Dump& b, Layer layer) {
  const std::vector<std::int32_t> left = a.experts(layer), right = b.experts(layer);
  const std::int64_t k = a.width({layer, Site::kRouter});
  RouteDiff diff{.layer = layer};
  for (std::int64_t row = 0; row < a.rows(); ++row) {
    const auto* mine = left.data() + row * k;
    const auto* theirs = right.data() + row * k;
    const auto missing = std::count_if(mine, mine + k, [&](std::int32_t expert) {
      return std::find(theirs, theirs + k, expert) == theirs + k;
    });
    ++diff.tokens;
    diff.slots += k;
    diff.mismatched += missing > 0;
    diff.slots_mismatched += missing;
  }
  return diff;
}

/// Ranks from 0; equal values share their mean rank.
std::vector<double> ranks(const std::vector<double>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t i, std::size_t j) { return values[i] < values[j]; });
  std::vector<double> ranks(values.size());
  for (std::size_t first = 0; first < order.size();) {
    std::size_t end = first;
    while (end < order.size() && values[order[end]] == values[order[first]]) ++end;
    const double shared = 0.5 * static_cast<double>(first + end - 1);
    for (; first < end; ++first) ranks[order[first]] = shared;
  }
  return ranks;
}

/// Spearman's; 0 where one of the two does not vary.
double rank_correlation(const std::vector<double>& x, const std::vector<double>& y) {
  const std::vector<double> p = ranks(x), q = ranks(y);
  const double mean = 0.5 * (static_cast<double>(p.size()) - 1.0);
  double pq = 0, pp = 0, qq = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    pq += (p[i] - mean) * (q[i] - mean);
    pp += (p[i] - mean) * (p[i] - mean);
    qq += (q[i] - mean) * (q[i] - mean);
  }
  return pp > 0 && qq > 0 ? pq / std::sqrt(pp * qq) : 0.0;
}

std::optional<LogpDiff> compare_logp(const Dump& a, const Dump& b,
                                     const std::vector<double>& drift) {
  const std::vector<float> left = a.logp(), right = b.logp();
  std::vector<double> gaps, drifts;
  LogpDiff diff;
  for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    if (std::isnan(left[i]) || std::isnan(right[i])) continue;
    const double gap = std::abs(static_cast<double>(left[i]) - static_cast<double>(right[i]));
    if (gaps.empty() || gap > diff.largest) {
      diff.largest = gap;
      diff.largest_row = static_cast<std::int64_t>(i);
    }
    gaps.push_back(gap);
    drifts.push_back(i < drift.size() ? drift[i] : 0.0);
  }
  if (gaps.empty()) return std::nullopt;
  const auto n = static_cast<double>(gaps.size());
  diff.tokens = std::ssize(gaps);
  diff.mean = std::accumulate(gaps.begin(), gaps.end(), 0.0) / n;
  diff.correlation = rank_correlation(gaps, drifts);
  std::sort(gaps.begin(), gaps.end());
  const auto at = [&](double q) { return gaps[static_cast<std::size_t>(std::ceil(q * n)) - 1]; };
  diff.median = at(0.5);
  diff.p99 = at(0.99);
  return diff;
}

/// What the places say, and whether the log-probs say the same.
void judge(Diff& diff) {
  double most = kLeastDrift;
  for (const PlaceDiff& place : diff.places) {
    if (place.differ > 0 && !diff.first_different) diff.first_different = place.place;
    if (place.drift > diff.allowance(place.place) && !diff.first_apart) {
      diff.first_apart = place.place;
    }
    if (place.drift / most > diff.growth) {
      diff.growth = place.drift / most;
      diff.steepest = place.place;
    }
    most = std::max(most, place.drift);
  }
  diff.verdict = diff.first_apart       ? Verdict::kApart
                 : diff.first_different ? Verdict::kRounding
                                        : Verdict::kEqual;
  if (!diff.logp) return;
  const LogpDiff& gap = *diff.logp;
  const char* behind =
      "look behind the last place: its experts, the final norm, the head, the temperature";
  switch (diff.verdict) {
    case Verdict::kEqual:
      diff.agrees = gap.largest <= kSumOrderGap;
      diff.agreement = gap.largest == 0.0 ? "the log-probs are equal too"
                       : *diff.agrees ? "the log-probs differ as the order of FP32 sums lets them"
                                      : cat({"the log-probs are not equal: ", behind});
      return;
    case Verdict::kRounding:
      diff.agrees = gap.mean <= kRoundingGap;
      diff.agreement =
          *diff.agrees ? "the log-probs are as near"
                       : cat({"the log-probs are further apart than rounding leaves: ", behind});
      return;
    case Verdict::kApart:
      diff.agrees = gap.largest > 0.0;
      diff.agreement = *diff.agrees ? "the log-probs part too"
                                    : "the log-probs are equal: were they dumped by both engines?";
      return;
  }
}

}  // namespace

std::string_view name_of(Guidance mode) {
  switch (mode) {
    case Guidance::kOwnScale: return "own_scale";
    case Guidance::kRolloutScale: return "rollout_scale";
    case Guidance::kLsbScaleMod4: return "lsb_scale_mod4";
    case Guidance::kLsb: return "lsb";
    case Guidance::kFullGuided: return "full_guided";
    case Guidance::kFullForced: return "full_forced";
  }
  return "";
}

double Diff::allowance(Place place) const {
  return options.tolerance * std::sqrt(static_cast<double>(place.layer.value + 1));
}

Diff diff(const Dump& a, const Dump& b, const DiffOptions& options) {
  if (!(options.tolerance > 0.0) || !std::isfinite(options.tolerance)) {
    throw Error(cat({"the tolerance is ", options.tolerance, "; a positive number is expected"}));
  }
  require_tokens(a, b);
  require_places(a, b);
  std::int32_t layers = 0;
  for (const Place& place : a.places()) layers = std::max(layers, place.layer.value + 1);
  Diff diff{.a = a.name(), .b = b.name(), .options = options, .rows = a.rows()};
  diff.contract = options.rules ? *options.rules : contracts::preset(options.contract, layers);
  diff.contract.layers = LayerSet::range(0, layers);
  if (diff.contract.k.global == GlobalScale::kStatic) {
    diff.contract.kv_exponents = exponents_of(a, layers, diff.contract.k);
  }

  std::vector<double> drift;
  for (const Place& place : a.places()) {
    if (place.site == Site::kRouter) {
      diff.routes.push_back(compare_routes(a, b, place.layer));
      continue;
    }
    const bool cached = place.site != Site::kW13In;
    Quantizer rule = !cached                  ? diff.contract.activation
                     : place.site == Site::kK ? diff.contract.k
                                              : diff.contract.v;
    if (rule.is_wide() && a.width(place) < rule.block) {
      rule.block = static_cast<std::int32_t>(a.width(place));  // an FP8 block is a row at most
    }
    require_guidable(options.contract, rule);
    require_blocks(a, place, rule);
    const std::vector<Bf16> left = a.values(place), right = b.values(place);
    const auto at = static_cast<std::size_t>(2 * place.layer.value + (place.site == Site::kV));
    const bool fixed = cached && rule.global == GlobalScale::kStatic;
    diff.places.push_back(
        compare_place({.place = place,
                       .width = a.width(place),
                       .rule = rule,
                       .exponent = fixed ? diff.contract.kv_exponents[at] : std::int8_t{0},
                       .a = left,
                       .b = right},
                      drift));
  }
  diff.logp = compare_logp(a, b, drift);
  judge(diff);
  return diff;
}

}  // namespace lockstep::instruments
