#include "train/tally.h"

#include <string>

namespace lockstep::train {
namespace {

constexpr const char* kNames[] = {"w13_in", "w2_in", "k", "v"};

void put_fraction(Metrics& metrics, const std::string& name, double part, double whole) {
  if (whole > 0) metrics[name] = part / whole;
}

/// counts: covered, absent, moved, elements.
void put_guided(Metrics& metrics, const std::string& suffix, const double* counts) {
  const double rows = counts[0] + counts[1];
  put_fraction(metrics, "fp4/guide/covered_frac" + suffix, counts[0], rows);
  put_fraction(metrics, "fp4/guide/absent_frac" + suffix, counts[1], rows);
  put_fraction(metrics, "fp4/guide/moved_frac" + suffix, counts[2], counts[3]);
}

/// counts: elements, flipped, rounded, residual, of the four sites in turn.
void put_audit(Metrics& metrics, const std::string& suffix, const std::vector<double>& counts) {
  for (const auto& [name, first] : {std::pair("fp4/act/", 0), std::pair("fp4/kv/", 8)}) {
    double sums[4] = {};
    for (int i = 0; i < 8; ++i) sums[i % 4] += counts[static_cast<std::size_t>(first + i)];
    put_fraction(metrics, std::string(name) + "flip_frac" + suffix, sums[1], sums[0]);
    put_fraction(metrics, std::string(name) + "residual_frac" + suffix, sums[3], sums[2]);
  }
}

void put_audits(Metrics& metrics, const double* counts, std::size_t num_layers) {
  constexpr std::size_t kOfLayer = 4 * Tally::kAuditSites;
  std::vector<double> all(kOfLayer), layer(kOfLayer);
  for (std::size_t l = 0; l < num_layers; ++l) {
    for (std::size_t i = 0; i < kOfLayer; ++i) {
      layer[i] = counts[l * kOfLayer + i];
      all[i] += layer[i];
    }
    put_audit(metrics, "/layer_" + std::to_string(l), layer);
  }
  put_audit(metrics, "", all);
}

}  // namespace

Tally& Tally::operator+=(const Tally& other) {
  for (std::size_t site = 0; site < guided.size(); ++site) {
    guided[site].covered += other.guided[site].covered;
    guided[site].absent += other.guided[site].absent;
    guided[site].moved += other.guided[site].moved;
    guided[site].elements += other.guided[site].elements;
  }
  for (std::size_t i = 0; i < audits.size(); ++i) {
    audits[i].elements += other.audits[i].elements;
    audits[i].flipped += other.audits[i].flipped;
    audits[i].rounded += other.audits[i].rounded;
    audits[i].residual += other.audits[i].residual;
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
  const auto push = [&](auto... counts) { (sums.push_back(static_cast<double>(counts)), ...); };
  for (const Guided& g : guided) push(g.covered, g.absent, g.moved, g.elements);
  const std::size_t routes = sums.size();
  push(routes_followed, routes_absent, routes_mismatched, scored, entropy);
  const std::size_t audit = sums.size();
  for (const Audit& a : audits) push(a.elements, a.flipped, a.rounded, a.residual);
  comm.sum(sums);

  Metrics metrics;
  double all[4] = {};
  for (std::size_t site = 0; site < guided.size(); ++site) {
    put_guided(metrics, std::string("/") + kNames[site], &sums[4 * site]);
    for (std::size_t i = 0; i < 4; ++i) all[i] += sums[4 * site + i];
  }
  put_guided(metrics, "", all);
  const double* route = &sums[routes];
  put_fraction(metrics, "fp4/routes/absent_frac", route[1], route[0] + route[1]);
  put_fraction(metrics, "fp4/routes/mismatch_frac", route[2], route[0]);
  put_fraction(metrics, "actor/entropy", route[4], route[3]);
  put_audits(metrics, sums.data() + audit, audits.size() / kAuditSites);
  return metrics;
}

}  // namespace lockstep::train
