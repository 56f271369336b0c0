/// Charts as SVG: drawn here once, so that a page needs no script to show them and each stands as a
/// file of its own. Colours are classes; assets/report.css gives them in light and dark.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "instruments/series.h"

namespace lockstep::instruments {

/// What a chart shows of an arm or a part, in the legend of a file and under the pointer.
struct Label {
  std::string text;
  std::string colour;  // a class of report.css: c0 ... c7 arms, t0 ... t5 parts of a whole
};

struct Chart {
  double width = 0, height = 0;
  std::string body;  // SVG elements in that box
  std::string data;  // JSON from which report.js tells values under the pointer; may be ""
  bool empty() const { return body.empty(); }
};

struct Line {
  Label label;
  std::vector<Point> points;
  bool dots = false;            // single measurements, not a course
  std::vector<double> stops{};  // steps at which runs could not go on: a cross on the course
};

enum class Scale {
  kLinear,
  kPercent,   // fractions, of whatever range
  kFraction,  // fractions, from 0 to 1 wherever all lies there
  kLog,
};

/// Lines over steps; bands where seeds or pooled steps differ. Empty where there is nothing finite.
Chart line_chart(std::span<const Line> lines, Scale scale);

/// Layers over steps. `top` is the value of the darkest colour.
Chart heat_map(const Grid& grid, double top);

/// The colours of heat maps, from 0 to `top`.
Chart heat_key(double top);

struct Bar {
  std::string name;
  std::string text;  // at the bar's right
  struct Part {
    Label label;
    double value = 0;
  };
  std::vector<Part> parts;  // side by side
};

/// Bars from 0 to `top`. `unit` stands behind values under the pointer.
Chart bar_chart(std::span<const Bar> bars, double top, std::string_view unit);

/// The largest value of a grid; 0 where there is none.
double largest(const Grid& grid);

/// A tidy number not below `value`: 1, 2, 5 times a power of ten and what lies between.
double tidy_above(double value);

/// The chart as a file: light, with its title, its legend and its own styles.
std::string svg_file(const Chart& chart, const std::string& title, std::span<const Label> legend,
                     std::string_view css);

/// Text safe within HTML and XML, quotes included. Control characters become spaces.
std::string escaped(std::string_view text);

/// A JSON string, quotes included, safe within a script element.
std::string json_string(std::string_view text);

/// `digits` significant digits, no trailing zeros; "-" of what is not finite.
std::string number(double value, int digits = 3);

}  // namespace lockstep::instruments
