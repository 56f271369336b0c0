#include "record/coverage.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::array kSites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV, Site::kRouter};
constexpr std::array kNames = {"w13_in", "w2_in", "k", "v", "router"};

constexpr std::size_t index(Site site) { return static_cast<std::size_t>(site); }

/// The batch's tokens in one row, with what is to be known of each.
struct Tokens {
  std::vector<TokenKey> keys;
  std::vector<std::size_t> sample;
  std::vector<std::uint8_t> stale;
  std::vector<std::uint8_t> unguided;
};

Tokens collect(std::span<const Trajectory> batch, std::int64_t oldest) {
  Tokens tokens;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    for (const Span& span : batch[i].path) {
      for (std::int32_t p = 0; p < span.count; ++p) {
        tokens.keys.push_back({span.id, span.first + p});
        tokens.sample.push_back(i);
        tokens.stale.push_back(span.version.value < oldest);
      }
    }
  }
  tokens.unguided = tokens.stale;
  return tokens;
}

/// Counts one place's rows, and what their loss means.
void count(Place place, std::span<const std::uint8_t> present, Tokens& tokens, Coverage& coverage) {
  Coverage::Rows& rows = coverage.sites.at(index(place.site));
  const bool cache = place.site == Site::kK || place.site == Site::kV;
  for (std::size_t t = 0; t < present.size(); ++t) {
    if (present[t] != 0 && tokens.stale[t] == 0) {
      ++rows.present;
      continue;
    }
    ++rows.absent;
    if (tokens.stale[t] != 0 || place.site == Site::kRouter) continue;
    if (cache) {
      coverage.tainted[tokens.sample[t]] = 1;
    } else {
      tokens.unguided[t] = 1;
    }
  }
}

double fraction_of(const Coverage::Rows& rows) {
  const std::int64_t due = rows.present + rows.absent;
  return due == 0 ? 1.0 : static_cast<double>(rows.present) / static_cast<double>(due);
}

}  // namespace

std::int64_t Coverage::tainted_samples() const {
  return std::count(tainted.begin(), tainted.end(), std::uint8_t{1});
}

double Coverage::fraction(Site site) const { return fraction_of(sites.at(index(site))); }

double Coverage::fraction() const {
  Rows sum;
  for (const Site site : kSites) {
    if (site == Site::kRouter) continue;
    sum.present += sites.at(index(site)).present;
    sum.absent += sites.at(index(site)).absent;
  }
  return fraction_of(sum);
}

Coverage cover(std::span<const Trajectory> batch, const Agreement& agreement,
               const TraceSource& trace, WeightVersion newest) {
  Tokens tokens = collect(batch, newest.value - agreement.guide.max_version_diff);
  Coverage coverage;
  coverage.tainted.resize(batch.size());
  coverage.tokens = static_cast<std::int64_t>(tokens.keys.size());
  std::vector<std::uint8_t> present(tokens.keys.size());
  const ContractId contract = agreement.contract.id();
  for (std::int32_t layer = 0; layer < agreement.model.num_layers; ++layer) {
    for (const Site site : kSites) {
      const Place place = {Layer{layer}, site};
      const Encoding encoding = agreement.encoding(place);
      if (encoding == Encoding::kNone) continue;
      const RowLayout layout = agreement.layout(place, encoding);
      trace.read(tokens.keys, contract, {place, layout, {}}, present);
      count(place, present, tokens, coverage);
    }
  }
  coverage.unguided_tokens = std::count(tokens.unguided.begin(), tokens.unguided.end(), 1);
  coverage.stale_tokens = std::count(tokens.stale.begin(), tokens.stale.end(), 1);
  return coverage;
}

Metrics metrics(const Coverage& coverage) {
  return {{"fp4/guide/unguided_tokens", static_cast<double>(coverage.unguided_tokens)},
          {"fp4/guide/stale_tokens", static_cast<double>(coverage.stale_tokens)}};
}

void require_coverage(const Coverage& coverage, double least) {
  for (const Site site : kSites) {
    const double found = coverage.fraction(site);
    if (found >= least) continue;
    const Coverage::Rows& rows = coverage.sites.at(index(site));
    const std::string remedy =
        coverage.stale_tokens == 0
            ? std::string(
                  "raise store.ram or store.disk, or see fp4/trace/* and perf/trace/* in "
                  "metrics.jsonl")
            : cat({coverage.stale_tokens, " tokens' records are too old: raise ",
                   "guide.max_version_diff, or set guide.fallback = \"rescore\""});
    throw Error(cat({"records of ", kNames.at(index(site)), " cover ", found, " of the rows (",
                     rows.absent, " of ", rows.present + rows.absent,
                     " are absent), guide.min_coverage is ", least, "; ", remedy}));
  }
}

}  // namespace lockstep
