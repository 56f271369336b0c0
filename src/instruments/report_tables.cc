#include "instruments/report_tables.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/text.h"
#include "recipe/recipe.h"

namespace lockstep::instruments {
namespace {

constexpr std::size_t kArmColours = 7;

std::string value_or(const RunData& run, const std::string& key, const std::string& otherwise) {
  const auto found = run.keys.find(key);
  return found == run.keys.end() || found->second.empty() ? otherwise : found->second;
}

std::string figure_text(const Spread& spread, double scale, int digits, const char* unit = "") {
  if (!std::isfinite(spread.mean)) return "–";
  std::string out = number(spread.mean * scale, digits) + unit;
  if (std::isfinite(spread.deviation)) {
    out += "<small class=\"deviation\">± " + number(spread.deviation * scale, 2) + "</small>";
  }
  return out;
}

std::string change(const ArmRuns& arm, const std::string& metric, int digits) {
  const Spread first = figure(arm, metric, Over::kFirst), last = figure(arm, metric, Over::kLast);
  if (!std::isfinite(last.mean)) return "–";
  return "<span class=\"from\">" + number(first.mean, digits) + " → </span>" +
         figure_text(last, 1, digits);
}

std::string factor(const Spread& spread) {
  const std::string text = figure_text(spread, 1, 2);
  return text == "–" ? text : "×" + text;
}

/// The worst verdict of an arm's runs, first word as its badge.
std::string verdict(const ArmRuns& arm) {
  const auto rank = [](const std::string& text) {
    return text.starts_with("bad") ? 3 : text.starts_with("watch") ? 2 : text.empty() ? 0 : 1;
  };
  std::string worst;
  for (const RunData* run : arm.runs) {
    if (rank(run->verdict) > rank(worst)) worst = run->verdict;
  }
  if (worst.empty()) return "–";
  const std::string word = worst.substr(0, worst.find(':'));
  const std::string why = worst.size() > word.size() ? worst.substr(word.size() + 2) : "";
  const int level = rank(worst);
  return "<span class=\"badge v" + std::to_string(level) + "\">" + escaped(word) + "</span>" +
         (why.empty() ? "" : "<small class=\"why\">" + escaped(why) + "</small>");
}

std::string bytes(const ArmRuns& arm) {
  const Spread used = figure(arm, "fp4/guide/bytes_per_token", Over::kAll);
  if (!std::isfinite(used.mean)) return "–";
  std::string out = number(used.mean, 3);
  const double full = arm.runs[0]->full_code_bytes;
  if (std::isfinite(full)) out += "<small> of " + number(full, 5) + "</small>";
  return out;
}

std::string plural(std::size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

struct Column {
  std::string name;
  std::vector<std::string> cells;  // HTML
};

/// Columns in which no arm has a figure are left out.
std::string table(const std::vector<ArmRuns>& arms, const std::vector<Column>& columns) {
  std::vector<const Column*> shown;
  for (const Column& column : columns) {
    if (std::any_of(column.cells.begin(), column.cells.end(),
                    [](const std::string& cell) { return cell != "–"; })) {
      shown.push_back(&column);
    }
  }
  std::string out = "<div class=\"scroll\"><table class=\"summary\"><thead><tr><th>arm</th>";
  for (const Column* column : shown) out += "<th>" + column->name + "</th>";
  out += "</tr></thead><tbody>";
  for (std::size_t i = 0; i < arms.size(); ++i) {
    out += "<tr><th>" + swatch(arms, i) + escaped(arms[i].name);
    if (arms[i].runs.size() > 1)
      out += "<small>" + plural(arms[i].runs.size(), "seed") + "</small>";
    out += "</th>";
    for (const Column* column : shown) {
      out += "<td data-name=\"" + column->name + "\">" + column->cells[i] + "</td>";
    }
    out += "</tr>";
  }
  return out + "</tbody></table></div>";
}

/// The recipe as text with its comments set back.
std::string recipe_text(const std::string& recipe) {
  std::string out;
  for (std::size_t at = 0; at < recipe.size();) {
    const std::size_t end = std::min(recipe.find('\n', at), recipe.size());
    const std::string line = escaped(std::string_view(recipe).substr(at, end - at));
    out += line.starts_with("#") ? "<i>" + line + "</i>\n" : line + "\n";
    at = end + 1;
  }
  return out;
}

std::string differing_keys(const std::vector<ArmRuns>& arms) {
  std::set<std::string> names;
  for (const ArmRuns& arm : arms) {
    for (const auto& [key, value] : arm.runs[0]->keys) names.insert(key);
  }
  std::string rows;
  for (const std::string& name : names) {
    std::set<std::string> values;
    for (const ArmRuns& arm : arms) values.insert(value_or(*arm.runs[0], name, "–"));
    if (values.size() < 2 || name == "arm" || recipe::is_calibrated(name)) continue;
    rows += "<tr><th>" + escaped(name) + "</th>";
    for (const ArmRuns& arm : arms) {
      rows += "<td>" + escaped(value_or(*arm.runs[0], name, "–")) + "</td>";
    }
    rows += "</tr>";
  }
  if (rows.empty()) return "";
  std::string out =
      "<div class=\"scroll\"><table class=\"keys\"><thead><tr><th>keys that differ</th>";
  for (std::size_t i = 0; i < arms.size(); ++i) {
    out += "<th>" + swatch(arms, i) + escaped(arms[i].name) + "</th>";
  }
  return out + "</tr></thead><tbody>" + rows + "</tbody></table></div>";
}

}  // namespace

Label arm_label(const std::vector<ArmRuns>& arms, std::size_t index) {
  std::string name = arms[index].name;
  for (const RunData* run : arms[index].runs) {
    if (run->stop) name += cat({" (", run->name, " stopped at step ", run->stop->step, ")"});
  }
  if (!arms[index].quantized) return {name, "c0"};
  std::size_t before = 0;
  for (std::size_t i = 0; i < index; ++i) before += arms[i].quantized ? 1 : 0;
  std::string colour = "c" + std::to_string(1 + before % kArmColours);
  if (before >= kArmColours) colour += " dashed";
  return {name, colour};
}

std::string swatch(const std::vector<ArmRuns>& arms, std::size_t index) {
  return "<svg class=\"swatch\" viewBox=\"0 0 10 10\"><circle class=\"" +
         arm_label(arms, index).colour + "\" cx=\"5\" cy=\"5\" r=\"4.5\"/></svg>";
}

std::string legend_of(std::span<const Label> labels, bool active) {
  std::string out = "<span class=\"legend\">";
  for (const Label& label : labels) {
    const std::string dot = "<svg class=\"swatch\" viewBox=\"0 0 10 10\"><circle class=\"" +
                            label.colour + "\" cx=\"5\" cy=\"5\" r=\"4.5\"/></svg>";
    out += active ? "<button type=\"button\" aria-pressed=\"true\" data-name=\"" +
                        escaped(label.text) + "\">" + dot + escaped(label.text) + "</button>"
                  : "<span>" + dot + escaped(label.text) + "</span>";
  }
  return out + "</span>";
}

std::string masthead(const std::vector<ArmRuns>& arms, const std::string& title) {
  std::size_t steps = 0, runs = 0;
  std::set<std::string> models, contracts;
  for (const ArmRuns& arm : arms) {
    for (const RunData* run : arm.runs) {
      steps = std::max(steps, run->steps.size());
      ++runs;
      models.insert(value_or(*run, "model", ""));
      if (arm.quantized && !run->contract_id.empty()) contracts.insert(run->contract_id);
    }
  }
  models.erase("");
  std::string facts;
  for (const std::string& model : models) facts += "<span>" + escaped(model) + "</span>";
  facts += "<span>" + plural(steps, "step") + "</span>";
  if (arms.size() > 1) facts += "<span>" + plural(arms.size(), "arm") + "</span>";
  if (runs > arms.size()) facts += "<span>" + plural(runs, "run") + "</span>";
  if (contracts.size() == 1) facts += "<span>contract " + escaped(*contracts.begin()) + "</span>";
  return "<header><div><p class=\"brand\">Lockstep</p><h1>" + escaped(title) +
         "</h1><p class=\"facts\">" + facts +
         "</p></div><button type=\"button\" id=\"theme\" aria-label=\"light or dark\"></button>"
         "</header>\n";
}

std::string headline(const std::vector<ArmRuns>& arms) {
  const auto plain =
      std::find_if(arms.begin(), arms.end(), [](const ArmRuns& arm) { return !arm.quantized; });
  const auto gap = [](const ArmRuns& arm) { return figure(arm, kGap, Over::kLast).mean; };
  if (plain == arms.end() || arms.size() < 2 || !(gap(*plain) > 0)) {
    return "First and last five steps of each run.";
  }
  std::string out;
  for (const ArmRuns& arm : arms) {
    if (&arm == &*plain || !std::isfinite(gap(arm))) continue;
    out += (out.empty() ? "" : ", ") + escaped(arm.name) + " <b>" +
           number(gap(arm) / gap(*plain), 2) + "×</b>";
  }
  return "The gap at the end, against that of " + escaped(plain->name) + ": " + out +
         ". Figures are means of the first and last five steps.";
}

std::string summary_table(const std::vector<ArmRuns>& arms) {
  const std::string judged = find_metric(arms, "val-core/", "/reward/mean@1");
  std::vector<Column> columns = {{"verdict", {}},      {"reward", {}},  {"evaluation", {}},
                                 {"mean |Δlogp|", {}}, {"growth", {}},  {"p99 |Δlogp|", {}},
                                 {"flips", {}},        {"covered", {}}, {"bytes a token", {}},
                                 {"tokens/s", {}}};
  for (const ArmRuns& arm : arms) {
    const std::string cells[] = {
        verdict(arm),
        change(arm, "critic/rewards/mean", 3),
        judged.empty() ? "–" : figure_text(figure(arm, judged, Over::kLatest), 1, 3),
        change(arm, kGap, 2),
        factor(growth(arm, kGap)),
        change(arm, std::string(kGap) + "/p99", 2),
        figure_text(figure(arm, "fp4/act/flip_frac", Over::kAll), 100, 3, " %"),
        figure_text(figure(arm, "fp4/guide/covered_frac", Over::kAll), 100, 4, " %"),
        bytes(arm),
        figure_text(tokens_per_second(arm), 1, 4)};
    for (std::size_t i = 0; i < columns.size(); ++i) columns[i].cells.push_back(cells[i]);
  }
  return table(arms, columns);
}

std::string recipe_tables(const std::vector<ArmRuns>& arms) {
  std::string out = differing_keys(arms);
  for (std::size_t i = 0; i < arms.size(); ++i) {
    const RunData& run = *arms[i].runs[0];
    if (run.recipe.empty() && run.contract.empty()) continue;
    out += "<details><summary>" + swatch(arms, i) + escaped(arms[i].name);
    if (!run.contract_id.empty()) out += "<small>contract " + escaped(run.contract_id) + "</small>";
    out += "</summary><div class=\"pair texts\">";
    if (!run.contract.empty()) {
      out += "<div><h4>contract</h4><pre>" + escaped(run.contract) + "</pre></div>";
    }
    if (!run.recipe.empty()) {
      out += "<div><h4>recipe</h4><pre>" + recipe_text(run.recipe) + "</pre></div>";
    }
    out += "</div></details>";
  }
  return out;
}

std::string footer(std::span<const RunData> runs) {
  std::string out =
      "<footer>Bands, where there are any, span seeds, and steps that share a point. Point at a "
      "chart to read "
      "its values; choose an arm to hide it.";
  for (const RunData& run : runs) {
    if (run.unreadable_lines == 0) continue;
    out += cat({" ", escaped(run.name), ": ",
                plural(static_cast<std::size_t>(run.unreadable_lines), "line"),
                " of metrics.jsonl could not be read and ",
                run.unreadable_lines == 1 ? "is" : "are", " left out."});
  }
  return out + "</footer>\n";
}

}  // namespace lockstep::instruments
