#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "instruments/diff.h"

namespace lockstep::instruments {
namespace {

using nlohmann::ordered_json;

std::string format(const char* pattern, double value) {
  char text[48];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

double quotient(std::int64_t a, std::int64_t b) {
  return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 0.0;
}

std::string share(std::int64_t a, std::int64_t b) {
  return a == 0 ? "0" : format("%.3f%%", 100.0 * quotient(a, b));
}

std::string drift_text(double drift) { return drift == 0.0 ? "0" : format("%.2e", drift); }

using Table = std::vector<std::vector<std::string>>;

/// Columns two spaces apart: the first flush left, the others flush right.
std::string aligned(const Table& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string blanks(widths[i] - row[i].size(), ' ');
      line += i == 0 ? row[i] + blanks : "  " + blanks + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string place_text(Place place) { return tensor_name(place).substr(7); }

std::string place_table(const Diff& diff) {
  Table table = {{"place", "drift", "worst", "at row", "flips", "up", "down", "adjacent", "scales",
                  "boundary", "at flips", "dead", "clipped", "saturated"}};
  for (const PlaceDiff& p : diff.places) {
    table.push_back({place_text(p.place), drift_text(p.drift), drift_text(p.worst),
                     cat({p.worst_row}), share(p.flips, p.elements), share(p.up, p.elements),
                     share(p.down, p.elements), share(p.adjacent, p.code_flips),
                     share(p.scale_flips, p.blocks), format("%.3f", p.boundary),
                     format("%.3f", p.boundary_flips), share(p.dead, p.elements),
                     share(p.clipped, p.elements), share(p.saturated_b, p.blocks)});
  }
  return aligned(table);
}

/// What a mode leaves at one kind of site, over all layers.
struct SiteSum {
  std::int64_t differ = 0, elements = 0, bytes = 0;
};

SiteSum sum_of(const Diff& diff, std::size_t mode, Site site) {
  SiteSum sum;
  for (const PlaceDiff& place : diff.places) {
    if (place.place.site != site) continue;
    sum.differ += place.left[mode].differ;
    sum.elements += place.elements;
    sum.bytes += place.left[mode].bytes;
  }
  return sum;
}

std::string mode_table(const Diff& diff) {
  Table table = {{"guidance", "left at w13_in", "at k", "at v", "bytes a token"}};
  for (std::size_t mode = 0; mode < kModes.size(); ++mode) {
    std::vector<std::string> row = {std::string(name_of(kModes[mode]))};
    std::int64_t bytes = 0;
    for (const Site site : {Site::kW13In, Site::kK, Site::kV}) {
      const SiteSum sum = sum_of(diff, mode, site);
      row.push_back(sum.elements == 0 ? "-" : share(sum.differ, sum.elements));
      bytes += sum.bytes;
    }
    row.push_back(cat({bytes}));
    table.push_back(std::move(row));
  }
  return aligned(table);
}

std::string verdict_text(const Diff& diff) {
  const auto drift = [&](Place place) {
    for (const PlaceDiff& p : diff.places) {
      if (p.place == place) return drift_text(p.drift);
    }
    return std::string();
  };
  std::string text;
  switch (diff.verdict) {
    case Verdict::kEqual: text = "equal: every number of every place is the same"; break;
    case Verdict::kRounding:
      text =
          cat({"near: nowhere beyond what rounding to BF16 leaves; the first that differs is ",
               tensor_name(*diff.first_different), " (drift ", drift(*diff.first_different), ")"});
      break;
    case Verdict::kApart:
      text = cat({"apart: they part at ", tensor_name(*diff.first_apart), " (drift ",
                  drift(*diff.first_apart), ", rounding to BF16 leaves ",
                  drift_text(diff.allowance(*diff.first_apart)), ")"});
      if (*diff.first_different != *diff.first_apart) {
        text += cat({"; the first that differs is ", tensor_name(*diff.first_different)});
      }
  }
  if (diff.verdict != Verdict::kEqual && diff.steepest && diff.growth >= 4.0) {
    text += cat({"; drift grows most at ", tensor_name(*diff.steepest), ", ",
                 format("%.1f", diff.growth), " times all before it"});
  }
  for (const RouteDiff& r : diff.routes) {
    if (r.mismatched == 0) continue;
    text += cat({"; routes differ from layer ", r.layer.value, " on"});
    break;
  }
  return text + "\n";
}

std::string logp_text(const Diff& diff) {
  if (!diff.logp) return "log-probs: none to compare\n";
  const LogpDiff& gap = *diff.logp;
  return cat({"log-probs: mean gap ", drift_text(gap.mean), ", median ", drift_text(gap.median),
              ", p99 ", drift_text(gap.p99), ", largest ", drift_text(gap.largest), " at row ",
              gap.largest_row, ", over ", gap.tokens, " tokens; rank correlation with drift ",
              format("%.2f", gap.correlation), "; ", diff.agreement, "\n"});
}

ordered_json json_of(const std::optional<Place>& place) {
  return place ? ordered_json(tensor_name(*place)) : ordered_json(nullptr);
}

ordered_json json_of(const PlaceDiff& p) {
  ordered_json left;
  for (std::size_t mode = 0; mode < kModes.size(); ++mode) {
    left[std::string(name_of(kModes[mode]))] = {
        {"differ_frac", quotient(p.left[mode].differ, p.elements)},
        {"l2", p.left[mode].l2},
        {"bytes", p.left[mode].bytes}};
  }
  return {
      {"place", tensor_name(p.place)},
      {"drift", p.drift},
      {"worst_drift", p.worst},
      {"worst_row", p.worst_row},
      {"differ_frac", quotient(p.differ, p.elements)},
      {"flip_frac", quotient(p.flips, p.elements)},
      {"code_flip_frac", quotient(p.code_flips, p.elements)},
      {"up_frac", quotient(p.up, p.elements)},
      {"down_frac", quotient(p.down, p.elements)},
      {"adjacent_frac", quotient(p.adjacent, p.code_flips)},
      {"scale_flip_frac", quotient(p.scale_flips, p.blocks)},
      {"exponent_flips", p.exponent_flips},
      {"boundary", p.boundary},
      {"boundary_at_flips", p.boundary_flips},
      {"dead_frac", quotient(p.dead, p.elements)},
      {"dead_flip_frac", quotient(p.dead_flips, p.elements)},
      {"clipped_frac", quotient(p.clipped, p.elements)},
      {"saturated_frac", {quotient(p.saturated_a, p.blocks), quotient(p.saturated_b, p.blocks)}},
      {"beyond_frac", quotient(p.beyond, p.elements)},
      {"left", std::move(left)}};
}

const char* word_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kEqual: return "equal";
    case Verdict::kRounding: return "near";
    case Verdict::kApart: return "apart";
  }
  return "";
}

}  // namespace

std::string routes_to_text(const Diff& diff) {
  if (diff.routes.empty()) return "";
  Table table = {{"routes", "tokens that differ", "experts that differ"}};
  for (const RouteDiff& r : diff.routes) {
    table.push_back(
        {cat({r.layer.value}), share(r.mismatched, r.tokens), share(r.slots_mismatched, r.slots)});
  }
  return aligned(table) + "\n";
}

std::string to_text(const Diff& diff) {
  return cat({"A (rollout) ", diff.a, "\nB (trainer) ", diff.b, "\n", diff.rows,
              " tokens, quantized as contract ", diff.options.contract, " does\n\n",
              place_table(diff), "\n", routes_to_text(diff), mode_table(diff), "\n",
              verdict_text(diff), logp_text(diff)});
}

std::string to_json(const Diff& diff) {
  ordered_json json = {{"a", diff.a},
                       {"b", diff.b},
                       {"contract", diff.options.contract},
                       {"tokens", diff.rows},
                       {"tolerance", diff.options.tolerance},
                       {"verdict", word_of(diff.verdict)},
                       {"first_different", json_of(diff.first_different)},
                       {"first_apart", json_of(diff.first_apart)},
                       {"steepest", json_of(diff.steepest)},
                       {"growth", diff.growth}};
  ordered_json& places = json["places"] = ordered_json::array();
  for (const PlaceDiff& place : diff.places) places.push_back(json_of(place));
  ordered_json& routes = json["routes"] = ordered_json::array();
  for (const RouteDiff& r : diff.routes) {
    routes.push_back({{"layer", r.layer.value},
                      {"mismatch_frac", quotient(r.mismatched, r.tokens)},
                      {"expert_mismatch_frac", quotient(r.slots_mismatched, r.slots)}});
  }
  ordered_json& modes = json["modes"];
  for (std::size_t mode = 0; mode < kModes.size(); ++mode) {
    ordered_json entry;
    std::int64_t bytes = 0;
    for (const Site site : {Site::kW13In, Site::kK, Site::kV}) {
      const SiteSum sum = sum_of(diff, mode, site);
      bytes += sum.bytes;
      if (sum.elements > 0)
        entry[place_text({Layer{0}, site}).substr(2)] = quotient(sum.differ, sum.elements);
    }
    entry["bytes_per_token"] = bytes;
    modes[std::string(name_of(kModes[mode]))] = std::move(entry);
  }
  if (diff.logp) {
    const LogpDiff& gap = *diff.logp;
    json["logp"] = {{"tokens", gap.tokens},
                    {"mean", gap.mean},
                    {"median", gap.median},
                    {"p99", gap.p99},
                    {"max", gap.largest},
                    {"max_row", gap.largest_row},
                    {"correlation", gap.correlation}};
    json["agrees"] = *diff.agrees;
    json["agreement"] = diff.agreement;
  }
  return json.dump(1) + "\n";
}

}  // namespace lockstep::instruments
