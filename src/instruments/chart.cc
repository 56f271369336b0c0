#include "instruments/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>

#include "base/text.h"

namespace lockstep::instruments {
namespace {

constexpr double kWidth = 560, kHeight = 270;
constexpr double kLeft = 58, kRight = 548, kTop = 10, kBottom = 238;

/// A coordinate: a tenth of a unit is less than a pixel.
std::string at(double value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.1f", value);
  std::string out = text.data();
  if (out.ends_with(".0")) out.resize(out.size() - 2);
  return out;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return "<text x=\"" + at(x) + "\" y=\"" + at(y) + "\" class=\"" + anchor + "\">" + escaped(text) +
         "</text>";
}

std::string rule(double x1, double y1, double x2, double y2, const char* colour) {
  return "<path class=\"" + std::string(colour) + "\" d=\"M" + at(x1) + " " + at(y1) + "L" +
         at(x2) + " " + at(y2) + "\"/>";
}

/// null where it is not finite: JSON has no word for it.
std::string json_number(double value) { return std::isfinite(value) ? number(value, 5) : "null"; }

std::string percent(double fraction, int digits = 3) {
  return number(100 * fraction, digits) + "%";
}

bool in_percent(Scale scale) { return scale == Scale::kPercent || scale == Scale::kFraction; }

/// From 1, 2, 5 times a power of ten: that which cuts `range` into at most `most` pieces.
double tidy_step(double range, int most) {
  const double rough = range / most;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double step : {1.0, 2.0, 5.0}) {
    if (step * power >= rough * 0.999) return step * power;
  }
  return 10 * power;
}

/// Where values lie on the page.
struct Axis {
  double low = 0, high = 1;  // values at `from` and `to`
  double from = 0, to = 1;   // coordinates
  bool log = false;
  double place(double value) const {
    if (log) {
      const double part = std::log(std::max(value, low) / low) / std::log(high / low);
      return from + (to - from) * part;
    }
    return from + (to - from) * (value - low) / (high - low);
  }
};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void take(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

Axis steps_axis(std::span<const Line> lines) {
  Range range;
  for (const Line& line : lines) {
    for (const Point& point : line.points) range.take(point.step);
  }
  if (range.low == range.high) range.high = range.low + 1;
  return {range.low, range.high, kLeft, kRight, false};
}

/// Zero has no place on a log axis: it is drawn at its foot.
Axis values_axis(std::span<const Line> lines, Scale scale) {
  Range range;
  for (const Line& line : lines) {
    for (const Point& point : line.points) {
      for (const double value : {point.low, point.high}) {
        if (scale != Scale::kLog || value > 0) range.take(value);
      }
    }
  }
  if (scale == Scale::kLog) {
    if (range.empty()) range = {1e-3, 1};
    const double low = std::log10(range.low), high = std::log10(range.high);
    // Room for one decade at least, so that noise does not look like drama.
    const double pad = std::max(0.08 * (high - low), (1 - (high - low)) / 2);
    return {std::pow(10, low - pad), std::pow(10, high + pad), kBottom, kTop, true};
  }
  if (scale == Scale::kFraction && range.low >= 0 && range.high <= 1) range = {0, 1};
  // From 0 on, unless all lies far above it.
  if (range.low > 0 && (scale == Scale::kPercent || range.low < 0.6 * range.high)) range.low = 0;
  if (range.low == range.high) {
    const double half = std::max(0.5 * std::abs(range.low), 0.5);
    range = {range.low - half, range.high + half};
  }
  const double step = tidy_step(range.high - range.low, 5);
  return {step * std::floor(range.low / step + 1e-9), step * std::ceil(range.high / step - 1e-9),
          kBottom, kTop, false};
}

std::string value_ticks(const Axis& axis, Scale scale) {
  std::string out;
  const auto tick = [&](double value, const std::string& name) {
    const double y = axis.place(value);
    out += rule(kLeft, y, kRight, y, name.empty() ? "minor" : "grid");
    if (!name.empty()) out += text_at(kLeft - 8, y + 4, "end", name);
  };
  if (!axis.log) {
    const double step = tidy_step(axis.high - axis.low, 5);
    for (double v = axis.low; v <= axis.high + step * 1e-6; v += step) {
      const double value = std::abs(v) < step * 1e-6 ? 0 : v;
      tick(value, in_percent(scale) ? percent(value) : number(value));
    }
    return out;
  }
  const double decades = std::log10(axis.high / axis.low);
  const int every = std::max(1, static_cast<int>(std::ceil(decades / 6)));
  const int first = static_cast<int>(std::floor(std::log10(axis.low)));
  const int last = static_cast<int>(std::ceil(std::log10(axis.high)));
  for (int decade = first; decade <= last; ++decade) {
    for (const int digit : {1, 2, 5}) {
      const double value = digit * std::pow(10, decade);
      if (value < axis.low || value > axis.high) continue;
      const bool named = (digit == 1 && decade % every == 0) || decades < 2.6;
      if (named || decades < 4) tick(value, named ? number(value) : "");
    }
  }
  return out;
}

std::string step_ticks(const Axis& axis, double bottom) {
  const std::string first = "step " + number(std::floor(axis.low), 9);
  std::string out = text_at(axis.from, bottom + 18, "start", first);
  const double step = std::max(1.0, tidy_step(axis.high - axis.low, 6));
  const double last = std::floor(axis.high);
  for (double v = step * std::ceil(axis.low / step); v < last; v += step) {
    const double x = axis.place(v);
    if (x - axis.from < 80 || axis.to - x < 40) continue;  // the first and the last stand there
    out += text_at(x, bottom + 18, "middle", number(v, 9));
  }
  return out + text_at(axis.place(last), bottom + 18, "end", number(last, 9));
}

std::string band(const Line& line, const Axis& x, const Axis& y) {
  std::string out, forth, back;
  const auto close = [&] {
    if (!forth.empty()) out += cat({"M", forth.substr(1), back, "Z"});
    forth.clear();
    back.clear();
  };
  bool wide = false;
  for (const Point& point : line.points) {
    if (!std::isfinite(point.mean)) {
      close();
      continue;
    }
    wide |= point.low != point.high;
    const std::string at_x = at(x.place(point.step));
    forth += cat({"L", at_x, " ", at(y.place(point.high))});
    back = cat({"L", at_x, " ", at(y.place(point.low)), back});
  }
  close();
  return wide ? "<path class=\"band " + line.label.colour + "\" d=\"" + out + "\"/>" : "";
}

std::string course(const Line& line, const Axis& x, const Axis& y) {
  std::string out;
  if (line.dots) {
    for (const Point& point : line.points) {
      if (!std::isfinite(point.mean)) continue;
      out += "<circle class=\"dot " + line.label.colour + "\" cx=\"" + at(x.place(point.step)) +
             "\" cy=\"" + at(y.place(point.mean)) + "\" r=\"4.5\"/>";
    }
    return out;
  }
  bool pen = false;
  bool alone = false;  // a place without neighbours is a dot: round caps show a line of no length
  for (const Point& point : line.points) {
    if (!std::isfinite(point.mean)) {
      if (alone) out += "h0";
      pen = alone = false;
      continue;
    }
    out += cat({pen ? "L" : "M", at(x.place(point.step)), " ", at(y.place(point.mean))});
    alone = !pen;
    pen = true;
  }
  if (alone) out += "h0";
  return cat({"<path class=\"line ", line.label.colour, "\" d=\"", out, "\"/>"});
}

/// A cross where the course is at each stop, or last was before it.
std::string crosses(const Line& line, const Axis& x, const Axis& y) {
  constexpr double kArm = 5;
  std::string out;
  for (const double stop : line.stops) {
    const Point* last = nullptr;
    for (const Point& point : line.points) {
      if (point.step <= stop && std::isfinite(point.mean)) last = &point;
    }
    if (last == nullptr) continue;
    const double cx = x.place(last->step), cy = y.place(last->mean);
    out += cat({"<path class=\"line ", line.label.colour, "\" d=\"M", at(cx - kArm), " ",
                at(cy - kArm), "L", at(cx + kArm), " ", at(cy + kArm), "M", at(cx - kArm), " ",
                at(cy + kArm), "L", at(cx + kArm), " ", at(cy - kArm), "\"/>"});
  }
  return out;
}

std::string lines_data(std::span<const Line> lines, const Axis& x, const Axis& y, Scale scale) {
  const auto axis = [](const Axis& a) {
    return cat(
        {"[", at(a.from), ",", at(a.to), ",", json_number(a.low), ",", json_number(a.high), "]"});
  };
  std::string out = "{\"kind\":\"lines\",\"x\":" + axis(x) + ",\"y\":" + axis(y) +
                    ",\"log\":" + (y.log ? "true" : "false") +
                    ",\"percent\":" + (in_percent(scale) ? "true" : "false") + ",\"lines\":[";
  bool first = true;
  for (const Line& line : lines) {
    out += std::string(first ? "" : ",") + "{\"name\":" + json_string(line.label.text) +
           ",\"colour\":\"" + line.label.colour + "\",\"points\":[";
    first = false;
    bool begun = false;
    for (const Point& p : line.points) {
      if (!std::isfinite(p.mean)) continue;
      out += std::string(begun ? "," : "") + "[" + json_number(p.step) + "," + json_number(p.mean);
      if (p.low != p.high) out += cat({",", json_number(p.low), ",", json_number(p.high)});
      out += "]";
      begun = true;
    }
    out += "]}";
  }
  return out + "]}";
}

constexpr int kHeatLevels = 12;

int heat_level(double value, double top) {
  const double part = top > 0 ? value / top : 0;
  return std::clamp(static_cast<int>(part * kHeatLevels), 0, kHeatLevels - 1);
}

constexpr double kMapLeft = 34, kMapRight = 312, kMapTop = 4;

/// Layers at the left, the first and the last step below.
std::string heat_ticks(const Grid& grid, double height) {
  const auto layers = static_cast<double>(grid.layers.size());
  const double cell_h = height / layers;
  std::string out;
  const int every = static_cast<int>(std::ceil(layers * 15 / height));
  for (int layer = 0; layer < static_cast<int>(grid.layers.size()); layer += every) {
    out +=
        text_at(kMapLeft - 6, kMapTop + cell_h * (layer + 0.5) + 4, "end", std::to_string(layer));
  }
  out += text_at(kMapLeft, kMapTop + height + 17, "start", number(grid.steps.front(), 9));
  if (grid.steps.size() > 1) {
    out += text_at(kMapRight, kMapTop + height + 17, "end", number(grid.steps.back(), 9));
  }
  return out;
}

}  // namespace

Chart line_chart(std::span<const Line> lines, Scale scale) {
  bool any = false;
  for (const Line& line : lines) {
    for (const Point& point : line.points) any |= std::isfinite(point.mean);
  }
  if (!any) return {};
  const Axis x = steps_axis(lines), y = values_axis(lines, scale);
  std::string body = value_ticks(y, scale) + step_ticks(x, kBottom);
  for (const Line& line : lines) {
    if (!line.dots) body += band(line, x, y);
  }
  for (const Line& line : lines) body += course(line, x, y) + crosses(line, x, y);
  return {kWidth, kHeight, body, lines_data(lines, x, y, scale)};
}

Chart heat_map(const Grid& grid, double top) {
  if (grid.layers.empty() || grid.steps.empty()) return {};
  const auto layers = static_cast<double>(grid.layers.size());
  const auto columns = static_cast<double>(grid.steps.size());
  const double height = std::clamp(20 * layers, 90.0, 190.0);
  const double cell_w = (kMapRight - kMapLeft) / columns, cell_h = height / layers;

  // One path a colour, equal neighbours in one rectangle: a page of many maps stays small.
  std::array<std::string, kHeatLevels> paths;
  std::string values;
  for (std::size_t layer = 0; layer < grid.layers.size(); ++layer) {
    const std::vector<double>& row = grid.layers[layer];
    const double y = kMapTop + cell_h * static_cast<double>(layer);
    for (std::size_t i = 0; i < row.size();) {
      std::size_t end = i + 1;
      if (!std::isfinite(row[i])) {
        i = end;
        continue;
      }
      const int level = heat_level(row[i], top);
      while (end < row.size() && std::isfinite(row[end]) && heat_level(row[end], top) == level)
        ++end;
      const double x = kMapLeft + cell_w * static_cast<double>(i);
      paths[static_cast<std::size_t>(level)] +=
          cat({"M", at(x), " ", at(y), "h", at(cell_w * static_cast<double>(end - i)), "v",
               at(cell_h), "H", at(x), "z"});
      i = end;
    }
    for (const double value : row) {
      values += cat({values.empty() ? "" : ",", std::isfinite(value) ? number(value, 3) : "null"});
    }
  }
  std::string body =
      "<rect class=\"void\" x=\"34\" y=\"4\" width=\"278\" height=\"" + at(height) + "\"/>";
  for (std::size_t level = 0; level < paths.size(); ++level) {
    if (paths[level].empty()) continue;
    body += cat({"<path class=\"h", level, "\" d=\"", paths[level], "\"/>"});
  }
  body += heat_ticks(grid, height);
  std::string steps;
  for (const double step : grid.steps) steps += cat({steps.empty() ? "" : ",", json_number(step)});
  const std::string data = "{\"kind\":\"heat\",\"box\":[34,4,278," + at(height) + "],\"steps\":[" +
                           steps + "],\"values\":[" + values + "]}";
  return {316, kMapTop + height + 24, body, data};
}

Chart heat_key(double top) {
  std::string body;
  constexpr double kCell = 14;
  for (int level = 0; level < kHeatLevels; ++level) {
    body += "<rect class=\"h" + std::to_string(level) + "\" x=\"" + at(34 + kCell * level) +
            "\" y=\"2\" width=\"14.5\" height=\"10\"/>";
  }
  body += text_at(28, 11.5, "end", "0") +
          text_at(34 + kCell * kHeatLevels + 8, 11.5, "start", percent(top));
  return {260, 16, body, ""};
}

Chart bar_chart(std::span<const Bar> bars, double top, std::string_view unit) {
  if (bars.empty() || !(top > 0)) return {};
  constexpr double kRow = 46, kBarLeft = 4, kBarRight = 552;
  std::string body;
  double y = 4;
  for (const Bar& bar : bars) {
    body +=
        text_at(kBarLeft, y + 13, "name", bar.name) + text_at(kBarRight, y + 13, "end", bar.text);
    body += "<rect class=\"track\" x=\"4\" y=\"" + at(y + 20) +
            "\" width=\"548\" height=\"12\" rx=\"3\"/>";
    double x = kBarLeft;
    for (const Bar::Part& part : bar.parts) {
      if (!(part.value > 0)) continue;
      const double width = std::min((kBarRight - kBarLeft) * part.value / top, kBarRight - x);
      body += "<rect class=\"" + part.label.colour + "\" x=\"" + at(x) + "\" y=\"" + at(y + 20) +
              "\" width=\"" + at(std::max(width, 0.8)) + "\" height=\"12\"><title>" +
              escaped(part.label.text + ": " + number(part.value)) + escaped(unit) +
              "</title></rect>";
      x += width;
    }
    y += kRow;
  }
  return {kWidth, y, body, ""};
}

double largest(const Grid& grid) {
  double most = 0;
  for (const std::vector<double>& row : grid.layers) {
    for (const double value : row) most = std::isfinite(value) ? std::max(most, value) : most;
  }
  return most;
}

double tidy_above(double value) {
  if (!(value > 0)) return 1;
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double step : {1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0}) {
    if (step * power >= value * 0.9999) return step * power;
  }
  return 10 * power;
}

}  // namespace lockstep::instruments
