#include "train/tally.h"

#include <string>
#include <vector>

namespace lockstep::train {
namespace {

constexpr const char* kNames[] = {"w13_in", "w2_in", "k", "v"};

void put_fraction(Metrics& metrics, const std::string& name, double part, double whole) {
  if (whole > 0) metrics[name] = part / whole;
}

void put_guided(Metrics& metrics, const std::string& suffix, const double* counts) {
  const double rows = counts[0] + counts[1];
  put_fraction(metrics, "fp4/guide/covered_frac" + suffix, counts[0], rows);
  put_fraction(metrics, "fp4/guide/absent_frac" + suffix, counts[1], rows);
  put_fraction(metrics, "fp4/guide/moved_frac" + suffix, counts[2], counts[3]);
}

}  // namespace

Tally& Tally::operator+=(const Tally& other) {
  for (std::size_t site = 0; site < guided.size(); ++site) {
    guided[site].covered += other.guided[site].covered;
    guided[site].absent += other.guided[site].absent;
    guided[site].moved += other.guided[site].moved;
    guided[site].elements += other.guided[site].elements;
  }
  routes_followed += other.routes_followed;
  routes_absent += other.routes_absent;
  routes_mismatched += other.routes_mismatched;
  entropy += other.entropy;
  scored += other.scored;
  return *this;
}

Metrics Tally::metrics(Comm& comm) const {
  std::vector<double> sums;
  for (const Guided& site : guided) {
    for (const std::int64_t count : {site.covered, site.absent, site.moved, site.elements}) {
      sums.push_back(static_cast<double>(count));
    }
  }
  const std::size_t routes = sums.size();
  for (const std::int64_t count : {routes_followed, routes_absent, routes_mismatched, scored}) {
    sums.push_back(static_cast<double>(count));
  }
  sums.push_back(entropy);
  comm.sum(sums);

  Metrics metrics;
  double all[4] = {};
  for (std::size_t site = 0; site < std::size(kNames); ++site) {
    put_guided(metrics, std::string("/") + kNames[site], &sums[4 * site]);
    for (std::size_t i = 0; i < 4; ++i) all[i] += sums[4 * site + i];
  }
  put_guided(metrics, "", all);
  const double* route = &sums[routes];
  put_fraction(metrics, "fp4/routes/absent_frac", route[1], route[0] + route[1]);
  put_fraction(metrics, "fp4/routes/mismatch_frac", route[2], route[0]);
  put_fraction(metrics, "actor/entropy", route[4], route[3]);
  return metrics;
}

}  // namespace lockstep::train
