// How charts spell numbers and texts.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "instruments/chart.h"

namespace lockstep::instruments {

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
    }
  }
  return out;
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || c == '<' || c == '>' || c == '&') {
      std::array<char, 8> code;
      std::snprintf(code.data(), code.size(), "\\u%04x", byte);
      out += code.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string number(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  if (value == 0) return "0";
  std::array<char, 64> text;
  const double size = std::abs(value);
  if (size >= 1e-5 && size < 1e7) {
    // No exponent in the range that people read: as many places as the digits ask for.
    const int whole = static_cast<int>(std::floor(std::log10(size))) + 1;
    std::snprintf(text.data(), text.size(), "%.*f", std::max(0, digits - whole), value);
    std::string out = text.data();
    if (out.find('.') != std::string::npos) {
      while (out.back() == '0') out.pop_back();
      if (out.back() == '.') out.pop_back();
    }
    return out;
  }
  std::snprintf(text.data(), text.size(), "%.*g", digits, value);
  return text.data();
}

std::string svg_file(const Chart& chart, const std::string& title, std::span<const Label> legend,
                     std::string_view css) {
  const double head = legend.empty() ? 34 : 56;
  const auto text = [](double value) { return number(value, 5); };
  std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + text(chart.width) +
                    " " + text(chart.height + head) + "\" width=\"" + text(chart.width) +
                    "\" height=\"" + text(chart.height + head) + "\" class=\"chart\">\n<style>" +
                    escaped(css) +
                    "</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n" +
                    "<text class=\"title\" x=\"10\" y=\"21\">" + escaped(title) + "</text>\n";
  double x = 10;
  for (const Label& label : legend) {
    out += "<rect class=\"" + label.colour + "\" x=\"" + text(x) +
           "\" y=\"35\" width=\"14\" height=\"8\" rx=\"2\"/><text x=\"" + text(x + 19) +
           "\" y=\"43\">" + escaped(label.text) + "</text>\n";
    x += 36 + 6.6 * static_cast<double>(label.text.size());
  }
  return out + "<g transform=\"translate(0 " + text(head) + ")\">" + chart.body + "</g>\n</svg>\n";
}

}  // namespace lockstep::instruments
