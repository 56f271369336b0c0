/// The files of assets/, put into the program by CMake.
#pragma once

namespace lockstep::instruments {

extern const char* const kReportCss;     // assets/report.css: the page
extern const char* const kChartCss;      // assets/chart.css: what charts need, as files, too
extern const char* const kReportScript;  // assets/report.js

}  // namespace lockstep::instruments
