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

constexpr std::size_t kRounded = kernels::kNumAuditCounts;  // behind the counts of an audit
constexpr std::size_t kOfAudit = kRounded + 1;

/// counts: kOfAudit of each of the four sites in turn.
void put_audit(Metrics& metrics, const std::string& suffix, const std::vector<double>& counts) {
  for (const auto& [name, first_site] : {std::pair("fp4/act/", 0u), std::pair("fp4/kv/", 2u)}) {
    std::array<double, kOfAudit> n{};
    for (std::size_t i = 0; i < 2 * kOfAudit; ++i) {
      n[i % kOfAudit] += counts[first_site * kOfAudit + i];
    }
    const auto put = [&, prefix = std::string(name)](const char* what, double part, double whole) {
      put_fraction(metrics, prefix + what + suffix, part, whole);
    };
    put("flip_frac", n[kernels::kAuditCodeFlips], n[kernels::kAuditCodes]);
    put("adjacent_frac", n[kernels::kAuditAdjacent], n[kernels::kAuditCodeFlips]);
    put("scale_flip_frac", n[kernels::kAuditScaleFlips], n[kernels::kAuditBlocks]);
    put("value_flip_frac", n[kernels::kAuditFlips], n[kernels::kAuditCodes]);
    put("residual_frac", n[kernels::kAuditStillDiffer], n[kRounded]);
    put("beyond_frac", n[kernels::kAuditBeyond], n[kernels::kAuditCodes]);
  }
}

void put_audits(Metrics& metrics, const double* counts, std::size_t num_layers) {
  constexpr std::size_t kOfLayer = kOfAudit * Tally::kAuditSites;
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
    for (std::size_t j = 0; j < audits[i].counts.size(); ++j) {
      audits[i].counts[j] += other.audits[i].counts[j];
    }
    audits[i].rounded += other.audits[i].rounded;
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
  for (const Audit& a : audits) {
    for (const std::int64_t count : a.counts) push(count);
    push(a.rounded);
  }
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
