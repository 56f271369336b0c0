#include "instruments/report.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/folder.h"
#include "base/text.h"
#include "instruments/chart.h"
#include "instruments/decompose.h"
#include "instruments/report_assets.h"
#include "instruments/report_tables.h"
#include "instruments/series.h"
#include "model/json.h"

namespace lockstep::instruments {
namespace {

constexpr std::size_t kPlaces = 400;       // of a curve
constexpr std::size_t kManyArms = 5;       // hide each other where each has so many places
constexpr std::size_t kPlacesOfAll = 320;  // of the curves of many arms together
constexpr std::size_t kHeatCells = 40000;  // of all heat maps together

/// A page as it grows.
class Page {
 public:
  Page(const std::vector<ArmRuns>& arms, std::vector<FigureFile>* figures)
      : arms_(arms), figures_(figures) {}

  void section(const std::string& id, const std::string& title, const std::string& note,
               const std::string& content) {
    if (content.empty()) return;
    html_ += "<section id=\"" + id + "\"><h2>" + escaped(title) + "</h2>";
    if (!note.empty()) html_ += "<p class=\"note\">" + note + "</p>";
    html_ += content + "</section>\n";
  }

  /// A chart with its heading; nothing where it is empty.
  std::string figure(const std::string& name, const std::string& title, const std::string& note,
                     const Chart& chart, std::span<const Label> legend = {},
                     bool legend_within = false) {
    if (chart.empty()) return "";
    if (figures_ != nullptr) {
      figures_->push_back({name + ".svg", svg_file(chart, title, legend, kChartCss)});
    }
    std::string out = "<figure><figcaption><b>" + escaped(title) + "</b>";
    if (!note.empty()) out += "<span>" + escaped(note) + "</span>";
    out += "</figcaption><div class=\"plot\">" + drawing(chart, title);
    if (!chart.data.empty()) out += "<script type=\"application/json\">" + chart.data + "</script>";
    out += "</div>";
    if (legend_within) out += legend_of(legend, false);
    return out + "</figure>";
  }

  static std::string drawing(const Chart& chart, const std::string& title) {
    return "<svg class=\"chart\" role=\"img\" aria-label=\"" + escaped(title) +
           "\" viewBox=\"0 0 " + number(chart.width, 5) + " " + number(chart.height, 5) + "\">" +
           chart.body + "</svg>";
  }

  std::string take() { return std::move(html_); }

 private:
  const std::vector<ArmRuns>& arms_;
  std::vector<FigureFile>* figures_;
  std::string html_;
};

std::string grid_of(const std::string& figures, const std::string& kind = "pair") {
  return figures.empty() ? "" : "<div class=\"" + kind + "\">" + figures + "</div>";
}

/// A name that may be a file's.
std::string file_word(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    out += plain || c == '_' || c == '-' ? c : '_';
  }
  return out;
}

std::vector<Line> lines_of(const std::vector<ArmRuns>& arms, const std::string& metric) {
  const bool many = arms.size() >= kManyArms;
  const std::size_t places = many ? std::max<std::size_t>(kPlacesOfAll / arms.size(), 20) : kPlaces;
  std::vector<Line> lines;
  for (std::size_t i = 0; i < arms.size(); ++i) {
    std::vector<Point> points = curve(arms[i], metric, places);
    for (Point& point : points) {  // bands of many would hide their lines
      if (many) point.low = point.high = point.mean;
    }
    if (points.empty()) continue;
    lines.push_back({arm_label(arms, i), std::move(points)});
    for (const RunData* run : arms[i].runs) {
      if (run->stop) lines.back().stops.push_back(static_cast<double>(run->stop->step));
    }
  }
  return lines;
}

/// The note of a figure, and how many steps a point of its curves stands for where it is several.
std::string note_of(const std::string& note, std::span<const Line> lines) {
  if (lines.empty() || lines[0].points.size() < 2) return note;
  const double steps = lines[0].points[1].step - lines[0].points[0].step;
  return steps > 1 ? cat({note, "; means of ", steps, " steps"}) : note;
}

/// Rewards while training; judgements on other prompts as dots, where there are any.
std::string reward_figure(Page& page, const std::vector<ArmRuns>& arms,
                          std::span<const Label> legend) {
  std::vector<Line> lines = lines_of(arms, "critic/rewards/mean");
  const std::string judged = find_metric(arms, "val-core/", "/reward/mean@1");
  const std::size_t courses = lines.size();
  for (std::size_t i = 0; i < arms.size() && !judged.empty(); ++i) {
    Line line{arm_label(arms, i), curve(arms[i], judged, kPlaces), true};
    line.label.text += ", evaluation";
    if (!line.points.empty()) lines.push_back(std::move(line));
  }
  const char* note = lines.size() > courses
                         ? "mean of a step's samples; dots: prompts never trained on"
                         : "mean of a step's samples";
  return page.figure("reward", "Reward", note_of(note, lines), line_chart(lines, Scale::kFraction),
                     legend);
}

std::string course_figures(Page& page, const std::vector<ArmRuns>& arms,
                           std::span<const Label> legend) {
  std::string out = reward_figure(page, arms, legend);
  const auto add = [&](const char* name, const char* title, const char* note,
                       const std::string& metric, Scale scale) {
    const std::vector<Line> lines = lines_of(arms, metric);
    out += page.figure(name, title, note_of(note, lines), line_chart(lines, scale), legend);
  };
  add("gap", "Gap, mean |Δlogp|", "trainer against rollout, per sampled token; log scale", kGap,
      Scale::kLog);
  add("gap_p99", "Gap, 99th percentile", "the worst token in a hundred; log scale",
      std::string(kGap) + "/p99", Scale::kLog);
  add("routes", "Routes that differ", "chosen experts that the trainer alone would not choose",
      "fp4/routes/mismatch_frac", Scale::kPercent);
  return grid_of(out);
}

struct HeatMetric {
  const char* name;
  const char* file;
  const char* title;
};
constexpr HeatMetric kHeat[] = {
    {"fp4/act/value_flip_frac", "act", "expert input, before guidance"},
    {"fp4/act/residual_frac", "act_guided", "expert input, after guidance"},
    {"fp4/kv/value_flip_frac", "kv", "K and V, before guidance"},
    {"fp4/kv/residual_frac", "kv_guided", "K and V, after guidance"},
};

std::string heat_figures(Page& page, const std::vector<ArmRuns>& arms) {
  struct Map {
    std::size_t arm;
    const HeatMetric* metric;
    Grid grid;
  };
  std::size_t rows = 0;  // first the size of all, then how many columns each may have
  for (const ArmRuns& arm : arms) {
    for (const HeatMetric& metric : kHeat) rows += grid(arm, metric.name, 1).layers.size();
  }
  if (rows == 0) return "";
  const std::size_t columns = std::clamp<std::size_t>(kHeatCells / rows, 24, 140);
  std::vector<Map> maps;
  double most = 0;
  for (std::size_t i = 0; i < arms.size(); ++i) {
    for (const HeatMetric& metric : kHeat) {
      Grid one = grid(arms[i], metric.name, columns);
      most = std::max(most, largest(one));
      if (!one.layers.empty()) maps.push_back({i, &metric, std::move(one)});
    }
  }
  const double top = tidy_above(most);
  std::string out = "<div class=\"key\">" + Page::drawing(heat_key(top), "colours") + "</div>";
  for (std::size_t i = 0; i < arms.size(); ++i) {
    std::string row;
    for (const Map& map : maps) {
      if (map.arm != i) continue;
      row += page.figure("flips_" + file_word(arms[i].name) + "_" + map.metric->file,
                         map.metric->title, "", heat_map(map.grid, top));
    }
    if (row.empty()) continue;
    out += "<h3>" + swatch(arms, i) + escaped(arms[i].name) + "</h3>" + grid_of(row, "quad");
  }
  return out;
}

/// What records take of a token, against what its full codes would.
std::string bytes_figure(Page& page, const std::vector<ArmRuns>& arms) {
  std::vector<Bar> bars;
  double top = 0, full = 0;
  for (std::size_t i = 0; i < arms.size(); ++i) {
    const double bytes = figure(arms[i], "fp4/guide/bytes_per_token", Over::kAll).mean;
    if (!std::isfinite(bytes)) continue;
    for (const RunData* run : arms[i].runs) {
      if (std::isfinite(run->full_code_bytes)) full = std::max(full, run->full_code_bytes);
    }
    bars.push_back({arms[i].name, number(bytes), {{arm_label(arms, i), bytes}}});
    top = std::max(top, bytes);
  }
  if (bars.empty()) return "";
  if (full > 0) bars.push_back({"full codes", number(full), {{{"full codes", "ref"}, full}}});
  return page.figure("bytes", "Bytes of records per token",
                     full > 0 ? "against all codes at w13_in, k and v of every layer" : "",
                     bar_chart(bars, std::max(top, full), " B"));
}

std::string guidance_figures(Page& page, const std::vector<ArmRuns>& arms,
                             std::span<const Label> legend) {
  std::string out;
  out +=
      page.figure("coverage", "Coverage", "guided rows whose record was there",
                  line_chart(lines_of(arms, "fp4/guide/covered_frac"), Scale::kFraction), legend);
  out += page.figure("moved", "Codes that guidance moved", "of all guided codes",
                     line_chart(lines_of(arms, "fp4/guide/moved_frac"), Scale::kPercent), legend);
  return grid_of(out + bytes_figure(page, arms), "trio");
}

/// Where a step's time goes. Times that lie within others are left out.
std::string timing_figure(Page& page, const std::vector<ArmRuns>& arms) {
  struct Stage {
    const char* metric;
    const char* name;
  };
  constexpr Stage kStages[] = {{"timing_s/gen", "rollout"},
                               {"timing_s/update_actor", "train"},
                               {"timing_s/old_log_prob", "old log-probs"},
                               {"timing_s/update_weights", "refit"},
                               {"timing_s/rescore", "rescore"}};
  std::vector<Bar> bars;
  std::vector<bool> shown(std::size(kStages) + 1);
  double top = 0;
  for (const ArmRuns& arm : arms) {
    const double step = figure(arm, "timing_s/step", Over::kAll).mean;
    if (!(step > 0)) continue;
    Bar bar{arm.name, number(step) + " s", {}};
    double rest = step;
    for (std::size_t i = 0; i < std::size(kStages); ++i) {
      const double seconds = figure(arm, kStages[i].metric, Over::kAll).mean;
      if (!(seconds > 0)) continue;
      bar.parts.push_back({{kStages[i].name, cat({"t", i})}, seconds});
      rest -= seconds;
      shown[i] = shown[i] || seconds > 0.005 * step;
    }
    if (rest > 0.005 * step) {
      bar.parts.push_back({{"other", "t5"}, rest});
      shown.back() = true;
    }
    top = std::max(top, step);
    bars.push_back(std::move(bar));
  }
  std::vector<Label> legend;
  for (std::size_t i = 0; i < std::size(kStages); ++i) {
    if (shown[i]) legend.push_back({kStages[i].name, cat({"t", i})});
  }
  if (shown.back()) legend.push_back({"other", "t5"});
  const std::string out = page.figure("timing", "A step's time", "mean over the run",
                                      bar_chart(bars, top, " s"), legend, true);
  return grid_of(out + page.figure("throughput", "Tokens a second",
                                   "prompt and response, whole steps",
                                   line_chart(lines_of(arms, "perf/throughput"), Scale::kLinear)));
}

/// Bars of what begins so, in the order in which `decompose` tells its parts.
std::vector<Bar> decomposition_bars(const std::vector<ArmRuns>& arms, std::size_t arm,
                                    const std::string& prefix) {
  std::vector<std::string> names = names_under({&arms[arm], 1}, prefix);
  const auto rank = [](const std::string& name) {
    const auto found = std::find_if(std::begin(kParts), std::end(kParts),
                                    [&](Part part) { return name == name_of(part); });
    return found - std::begin(kParts);
  };
  std::stable_sort(names.begin(), names.end(),
                   [&](const std::string& a, const std::string& b) { return rank(a) < rank(b); });
  std::vector<Bar> bars;
  for (const std::string& name : names) {
    const double value = figure(arms[arm], prefix + name, Over::kLast).mean;
    if (std::isfinite(value))
      bars.push_back({name, number(value), {{arm_label(arms, arm), value}}});
  }
  return bars;
}

double largest(const std::vector<Bar>& bars, double top) {
  for (const Bar& bar : bars) top = std::max(top, bar.parts[0].value);
  return top;
}

/// The gap with one part of the low precision on at a time, where `decompose` has measured it: of
/// all layers, and of a layer alone.
std::string decomposition_figures(Page& page, const std::vector<ArmRuns>& arms) {
  std::string out;
  double top = 0;
  for (std::size_t i = 0; i < arms.size(); ++i) {
    top = largest(decomposition_bars(arms, i, "fp4/decomposition/"), top);
  }
  for (std::size_t i = 0; i < arms.size(); ++i) {
    out += page.figure("decomposition_" + file_word(arms[i].name), arms[i].name, "",
                       bar_chart(decomposition_bars(arms, i, "fp4/decomposition/"), top, ""));
  }
  std::string layers;
  for (std::size_t i = 0; i < arms.size(); ++i) {
    std::string row;
    for (const Part part : {Part::kWeights, Part::kActivations, Part::kK, Part::kV}) {
      const std::string prefix = cat({"fp4/decomposition_layer/", name_of(part), "/layer_"});
      const std::vector<Bar> bars = decomposition_bars(arms, i, prefix);
      row += page.figure(cat({"decomposition_", file_word(arms[i].name), "_", name_of(part)}),
                         name_of(part), "a layer at a time", bar_chart(bars, largest(bars, 0), ""));
    }
    if (row.empty()) continue;
    layers += "<h3>" + swatch(arms, i) + escaped(arms[i].name) + "</h3>" + grid_of(row, "quad");
  }
  return grid_of(out) + layers;
}

std::string head(const std::string& title) {
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<meta name=\"color-scheme\" content=\"light dark\">\n<title>" +
         escaped(title) + " · Lockstep</title>\n<style>" + kChartCss + kReportCss +
         "</style></head>\n<body><main>\n";
}

}  // namespace

std::string report_page(std::span<const RunData> runs, const std::string& title,
                        std::vector<FigureFile>* figures) {
  const std::vector<ArmRuns> arms = arms_of(runs);
  std::vector<Label> legend;
  for (std::size_t i = 0; i < arms.size(); ++i) legend.push_back(arm_label(arms, i));

  Page page(arms, figures);
  page.section("figures", "At a glance", headline(arms), summary_table(arms));
  page.section("course", "Course", legend_of(legend, arms.size() > 1),
               course_figures(page, arms, legend));
  page.section(
      "flips", "Values that flip, layer by layer",
      "Layers downwards, steps to the right. A value flips where its code or its block's scale "
      "is not the rollout's: before guidance, as the trainer alone would round; after it, "
      "as it does round. Without guidance both are the same.",
      heat_figures(page, arms));
  page.section("guidance", "Guidance", "", guidance_figures(page, arms, legend));
  page.section("decomposition", "Where the gap comes from",
               "The gap with one part of the low precision switched on at a time.",
               decomposition_figures(page, arms));
  page.section("time", "Time", "", timing_figure(page, arms));
  page.section("recipe", "Recipe and contract", "", recipe_tables(arms));
  return head(title) + masthead(arms, title) + page.take() + footer(runs) +
         "</main>\n<div id=\"tip\" hidden></div>\n<script>" + kReportScript +
         "</script>\n</body></html>\n";
}

void write_report(std::span<const RunData> runs, const std::string& title,
                  const std::filesystem::path& out, const std::filesystem::path& figures) {
  std::vector<FigureFile> files;
  const std::string page = report_page(runs, title, figures.empty() ? nullptr : &files);
  if (!out.parent_path().empty()) {
    make_folder(out.parent_path(), "the page's folder", "name another file with --out");
  }
  if (!figures.empty()) make_folder(figures, "the figures' folder", "name another with --figures");
  write_text(out, page);
  for (const FigureFile& file : files) write_text(figures / file.name, file.text);
}

}  // namespace lockstep::instruments
