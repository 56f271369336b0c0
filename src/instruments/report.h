/// One page about one run, or about several side by side.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "instruments/run.h"

namespace lockstep::instruments {

struct FigureFile {
  std::string name;  // "gap.svg"
  std::string text;
};

/// A whole HTML page: styles, script and charts are within, and it asks for nothing over a network.
/// Runs of one arm become bands, arms stand side by side. `title` heads it. Figures are added to
/// `figures` as files of their own, unless that is null.
std::string report_page(std::span<const RunData> runs, const std::string& title,
                        std::vector<FigureFile>* figures = nullptr);

/// Writes the page to `out`, and the figures into `figures` unless that is empty. Each file is
/// whole or not there. Throws Error where one cannot be written.
void write_report(std::span<const RunData> runs, const std::string& title,
                  const std::filesystem::path& out, const std::filesystem::path& figures = {});

}  // namespace lockstep::instruments
