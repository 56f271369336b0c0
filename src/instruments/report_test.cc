#include "instruments/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/error.h"
#include "base/text.h"
#include "instruments/chart.h"
#include "instruments/report_tables.h"
#include "instruments/series.h"
#include "recipe/recipe.h"

namespace lockstep::instruments {
namespace {

namespace fs = std::filesystem;

RunData run_of(const std::string& text, const std::string& arm = "trace") {
  RunData run;
  run.name = run.arm = arm;
  read_metrics(text, run);
  return run;
}

std::string recipe_text(const std::string& arm, int seed, const std::string& lr = "0.001") {
  return cat({"# contract 00000000000000aa\narm = \"", arm, "\"\nseed = ", seed,
              "\n[trainer]\nlr = ", lr, "\n"});
}

class RunFolders : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            cat({"report_", testing::UnitTest::GetInstance()->current_test_info()->name()});
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  void put(const std::string& folder, const std::string& metrics, const std::string& recipe = "") {
    fs::create_directories(root_ / folder);
    std::ofstream(root_ / folder / "metrics.jsonl") << metrics;
    if (!recipe.empty()) std::ofstream(root_ / folder / "recipe.toml") << recipe;
  }

  fs::path root_;
};

std::string complaint_of(const fs::path& folder) {
  try {
    read_runs(folder);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ReadMetrics, TakesWhatIsThereAndCountsWhatIsNot) {
  RunData run;
  ASSERT_TRUE(
      read_metrics("{\"step\": 1, \"a\": 1, \"word\": \"x\"}\n"
                   "\n"
                   "{\"step\": 3, \"a\": null, \"late\": 7}\n"
                   "{\"step\": 2, \"a\": NaN}\n"
                   "[1]\n"
                   "{\"step\": \"x\", \"a\": 2}\n"
                   "{\"step\": 2, \"a\": 5}\n"
                   "{\"step\": 2, \"a\": 6}\n"
                   "{\"step\": 4, \"a\"",
                   run));
  EXPECT_EQ(run.steps, (std::vector<double>{1, 2, 3}));
  EXPECT_EQ(run.unreadable_lines, 4);  // NaN is no JSON, a list, a step that is text, half a line
  const std::vector<double>& a = run.column("a");
  EXPECT_EQ(a[0], 1);
  EXPECT_EQ(a[1], 6);  // the later line of a step
  EXPECT_TRUE(std::isnan(a[2]));
  EXPECT_EQ(run.column("late")[2], 7);
  EXPECT_TRUE(std::isnan(run.column("late")[0]));
  EXPECT_TRUE(run.column("word").empty());
}

TEST(ReadMetrics, ForgetsMeansOverNothing) {
  const RunData run = run_of(
      "{\"step\": 1, \"g\": 0, \"g/p99\": 0, \"g/count\": 0, \"gx\": 0}\n"
      "{\"step\": 2, \"g\": 0.5, \"g/p99\": 1, \"g/count\": 9, \"gx\": 0}\n");
  EXPECT_TRUE(std::isnan(run.column("g")[0]));
  EXPECT_TRUE(std::isnan(run.column("g/p99")[0]));
  EXPECT_EQ(run.column("g/count")[0], 0);
  EXPECT_EQ(run.column("gx")[0], 0);
  EXPECT_EQ(run.column("g")[1], 0.5);
}

TEST_F(RunFolders, AreFoundTwoLevelsDeepInOrder) {
  put("b", "{\"step\": 1}\n", recipe_text("naive", 1));
  put("a/seed_2", "{\"step\": 1}\n", recipe_text("trace", 2));
  put("a/seed_1", "{\"step\": 1}\n", recipe_text("trace", 1));
  put("begun", "", recipe_text("trace", 3));
  const std::vector<RunData> runs = read_runs(root_);
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[0].name, "a/seed_1");
  EXPECT_EQ(runs[1].name, "a/seed_2");
  EXPECT_EQ(runs[2].arm, "naive");
  EXPECT_EQ(runs[2].contract_id, "00000000000000aa");
  EXPECT_EQ(runs[2].keys.at("trainer.lr"), "0.001");
  EXPECT_EQ(read_runs(root_ / "b" / "")[0].name, "b");
}

TEST_F(RunFolders, ComplainInOneLine) {
  fs::create_directories(root_ / "empty");
  EXPECT_NE(complaint_of(root_ / "absent").find("is no folder; name a run"), std::string::npos);
  EXPECT_NE(complaint_of(root_).find("has no metrics.jsonl"), std::string::npos);
  put("begun", "{\"st");
  EXPECT_NE(complaint_of(root_ / "begun").find("has no line"), std::string::npos);
}

TEST_F(RunFolders, RecipeThatIsNoTomlIsNoObstacle) {
  put("odd", "{\"step\": 1}\n", "# contract <b>\nthis is = = not\n");
  const std::vector<RunData> runs = read_runs(root_);
  EXPECT_EQ(runs[0].arm, "odd");
  EXPECT_EQ(report_page(runs, "t").find("<b>\n"), std::string::npos);
}

TEST_F(RunFolders, SeedsAreOneArmAndOtherRecipesAnother) {
  put("1", "{\"step\": 1, \"m\": 1}\n{\"step\": 2, \"m\": 3}\n", recipe_text("trace", 1));
  put("2", "{\"step\": 1, \"m\": 2}\n", recipe_text("trace", 2));
  put("3", "{\"step\": 1, \"m\": 9}\n", recipe_text("trace", 1, "0.1"));
  put("4", "{\"step\": 1, \"m\": 0}\n", recipe_text("bf16", 1) + "[contract]\npreset = \"bf16\"\n");
  const std::vector<RunData> runs = read_runs(root_);
  const std::vector<ArmRuns> arms = arms_of(runs);
  ASSERT_EQ(arms.size(), 3u);
  EXPECT_EQ(arms[0].name, "bf16");  // what the others are held against comes first
  EXPECT_FALSE(arms[0].quantized);
  EXPECT_EQ(arms[1].name, "trace (1)");
  EXPECT_EQ(arms[2].name, "trace (3)");
  ASSERT_EQ(arms[1].runs.size(), 2u);

  const std::vector<Point> points = curve(arms[1], "m", 100);
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(points[0].mean, 1.5);
  EXPECT_EQ(points[0].low, 1);
  EXPECT_EQ(points[0].high, 2);
  EXPECT_EQ(points[1].low, points[1].high);
  const Spread last = figure(arms[1], "m", Over::kLast);
  EXPECT_EQ(last.mean, 2);
  EXPECT_EQ(last.deviation, 0);
}

TEST_F(RunFolders, WhatCalibrationFoundSplitsNoArm) {
  for (const std::string_view key : recipe::kCalibrated) {
    const std::string line = "[" + std::string(key.substr(0, key.find('.'))) + "]\n" +
                             std::string(key.substr(key.find('.') + 1)) + " = ";
    put("1", "{\"step\": 1}\n", recipe_text("quads", 1) + line + "\"01\"\n");
    put("2", "{\"step\": 1}\n", recipe_text("quads", 2) + line + "\"10\"\n");
    const std::vector<RunData> runs = read_runs(root_);
    const std::vector<ArmRuns> arms = arms_of(runs);
    ASSERT_EQ(arms.size(), 1u) << key;
    EXPECT_EQ(arms[0].runs.size(), 2u) << key;
    put("2", "{\"step\": 1}\n", recipe_text("naive", 1) + line + "\"10\"\n");
    const std::string tables = recipe_tables(arms_of(read_runs(root_)));
    EXPECT_EQ(tables.find("<tr><th>" + std::string(key)), std::string::npos) << key;
  }
}

TEST(Curve, PoolsStepsAndKeepsTheirRange) {
  RunData run;
  run.arm = "x";
  for (int i = 1; i <= 1000; ++i) {
    run.steps.push_back(i);
    run.metrics["m"].push_back(i == 500 ? 100 : i % 2);
    run.metrics["none"].push_back(kNaN);
  }
  const std::vector<ArmRuns> arms = arms_of({&run, 1});
  const std::vector<Point> points = curve(arms[0], "m", 300);
  EXPECT_EQ(points.size(), 250u);  // four steps each
  EXPECT_EQ(points[0].mean, 0.5);
  EXPECT_EQ(points[0].step, 2.5);
  double most = 0;
  for (const Point& point : points) most = std::max(most, point.high);
  EXPECT_EQ(most, 100);  // no spike is lost
  EXPECT_TRUE(curve(arms[0], "none", 300).empty());
  EXPECT_TRUE(curve(arms[0], "absent", 300).empty());
}

TEST(Grid, TakesLayersByTheirNumber) {
  RunData run = run_of(
      "{\"step\": 1, \"f/layer_0\": 0.1, \"f/layer_10\": 0.3, \"f/layer_x\": 1, "
      "\"f/layer_99999999\": 1}\n");
  const std::vector<ArmRuns> arms = arms_of({&run, 1});
  const Grid layers = grid(arms[0], "f", 10);
  ASSERT_EQ(layers.layers.size(), 11u);
  EXPECT_EQ(layers.layers[0][0], 0.1);
  EXPECT_TRUE(std::isnan(layers.layers[1][0]));
  EXPECT_EQ(layers.layers[10][0], 0.3);
  EXPECT_EQ(largest(layers), 0.3);
}

TEST(Text, IsSafeInHtmlAndScripts) {
  EXPECT_EQ(escaped("<a b=\"c\">'&\x01"), "&lt;a b=&quot;c&quot;&gt;&#39;&amp; ");
  EXPECT_EQ(json_string("</script>\"\\\n"), "\"\\u003c/script\\u003e\\\"\\\\\\u000a\"");
}

TEST(Text, NumbersHaveTheDigitsAskedFor) {
  EXPECT_EQ(number(0.0097123, 2), "0.0097");
  EXPECT_EQ(number(160.44, 3), "160");
  EXPECT_EQ(number(1.5, 3), "1.5");
  EXPECT_EQ(number(100, 2), "100");
  EXPECT_EQ(number(0, 3), "0");
  EXPECT_EQ(number(-2.25, 2), "-2.2");
  EXPECT_EQ(number(1e-9, 3), "1e-09");
  EXPECT_EQ(number(kNaN), "-");
}

TEST(LineChart, LeavesHolesAndStandsZerosOnTheFoot) {
  const std::vector<Line> lines = {
      {{"a", "c1"}, {{1, 0.1, 0.1, 0.1}, {2, kNaN, kNaN, kNaN}, {3, 0, 0, 0}}}};
  const Chart chart = line_chart(lines, Scale::kLog);
  EXPECT_EQ(chart.body.find("nan"), std::string::npos);
  EXPECT_EQ(chart.body.find("inf"), std::string::npos);
  EXPECT_NE(chart.body.find("M58 "), std::string::npos);
  EXPECT_NE(chart.body.find("h0M548 238h0"),
            std::string::npos);  // two dots, the second at the foot
  EXPECT_NE(chart.data.find("[1,0.1],[3,0]"), std::string::npos);
  EXPECT_TRUE(line_chart({}, Scale::kLinear).empty());
}

TEST(HeatMap, JoinsEqualNeighboursAndLeavesHoles) {
  const Chart chart = heat_map({{1, 2, 3}, {{0.1, 0.1, kNaN}}}, 0.2);
  EXPECT_NE(chart.body.find("h185.3v90"), std::string::npos);  // two of three columns in one
  EXPECT_NE(chart.data.find("[0.1,0.1,null]"), std::string::npos);
  EXPECT_TRUE(heat_map({}, 1).empty());
}

TEST(Report, IsOnePageThatAsksForNothing) {
  std::string text;
  for (int step = 1; step <= 12; ++step) {
    text += cat({"{\"step\": ", step, ", \"critic/rewards/mean\": 0.5, \"", kGap, "\": 0.01, \"",
                 kGap, "/p99\": 0.2, \"fp4/act/value_flip_frac/layer_0\": 0.1, ",
                 "\"fp4/guide/bytes_per_token\": 160, \"timing_s/gen\": 1, \"timing_s/step\": 2, ",
                 "\"fp4/decomposition/kv\": 0.004}\n"});
  }
  RunData run = run_of(text, "</script><script>alert(1)</script>");
  run.verdict = "watch: the gap <grew>";
  std::vector<FigureFile> figures;
  const std::string page = report_page({&run, 1}, "a & b", &figures);
  EXPECT_EQ(page.find("alert(1)</script>"), std::string::npos);
  EXPECT_NE(page.find("the gap &lt;grew&gt;"), std::string::npos);
  EXPECT_NE(page.find("<title>a &amp; b"), std::string::npos);
  for (const char* id : {"course", "flips", "decomposition", "time"}) {
    EXPECT_NE(page.find(cat({"<section id=\"", id, "\">"})), std::string::npos) << id;
  }
  for (const char* out : {" src=", "href=", "url(", "@import", "fetch("}) {
    EXPECT_EQ(page.find(out), std::string::npos) << out;
  }
  EXPECT_LT(page.size(), 100u << 10);
  std::vector<std::string> names;
  for (const FigureFile& file : figures) names.push_back(file.name);
  EXPECT_EQ(names[0], "reward.svg");
  EXPECT_EQ(names[1], "gap.svg");
  EXPECT_TRUE(figures[1].text.starts_with("<svg xmlns="));
}

TEST(Report, DoesWithoutWhatIsNotThere) {
  RunData run = run_of("{\"step\": 1}\n");
  const std::string page = report_page({&run, 1}, "bare");
  for (const char* id : {"course", "flips", "guidance", "decomposition", "time", "recipe"}) {
    EXPECT_EQ(page.find(cat({"<section id=\"", id, "\">"})), std::string::npos) << id;
  }
  RunData odd = run_of(
      "{\"step\": 1, \"critic/rewards/mean\": 1e308, \"timing_s/step\": -1, "
      "\"fp4/act/value_flip_frac/layer_0\": -5, \"fp4/guide/bytes_per_token\": 0}\n"
      "{\"step\": 1e15, \"critic/rewards/mean\": -1e308}\n");
  const std::string strange = report_page({&odd, 1}, "odd");
  EXPECT_EQ(strange.find("nan"), std::string::npos);
  EXPECT_LT(strange.size(), 200u << 10);
}

TEST(Report, OfManyArmsAndLayersStaysSmall) {
  std::vector<RunData> runs;
  for (int arm = 0; arm < 11; ++arm) {
    RunData& run = runs.emplace_back();
    run.name = run.arm = cat({"arm_", arm});
    for (int step = 1; step <= 2000; ++step) {
      run.steps.push_back(step);
      run.metrics[kGap].push_back(0.01 + 0.001 * (step * 7 % 13));
    }
    for (int layer = 0; layer < 48; ++layer) {
      for (const char* metric : {"fp4/act/value_flip_frac", "fp4/kv/residual_frac"}) {
        std::vector<double>& column = run.metrics[cat({metric, "/layer_", layer})];
        for (int step = 0; step < 2000; ++step)
          column.push_back((step * 31 + layer * 17) % 97 / 97.0);
      }
    }
  }
  EXPECT_LT(report_page(runs, "many").size(), 4u << 20);
}

TEST_F(RunFolders, ReportIsWrittenWithItsFigures) {
  put("a", "{\"step\": 1, \"critic/rewards/mean\": 0.5}\n");
  write_report(read_runs(root_), "a", root_ / "new" / "page.html", root_ / "figures");
  EXPECT_GT(fs::file_size(root_ / "new" / "page.html"), 1000u);
  EXPECT_TRUE(fs::exists(root_ / "figures" / "reward.svg"));
  std::ofstream(root_ / "file") << "x";
  EXPECT_THROW(write_report(read_runs(root_), "a", root_ / "file" / "page.html"), Error);
}

}  // namespace
}  // namespace lockstep::instruments
