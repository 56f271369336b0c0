#include "step/run_dir.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>

#include "base/error.h"
#include "step/events.h"

namespace lockstep::step {
namespace {

namespace fs = std::filesystem;

class RunDirTest : public testing::Test {
 protected:
  void SetUp() override { fs::remove_all(root_); }
  void TearDown() override { fs::remove_all(root_); }

  static void write(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }
  std::string metrics() const {
    std::ifstream in(root_ / "metrics.jsonl");
    return {std::istreambuf_iterator<char>(in), {}};
  }
  static std::string complaint(const std::function<void()>& act) {
    try {
      act();
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }
  /// `steps` steps, a checkpoint every second one.
  void work(std::int64_t first, std::int64_t last, std::int64_t keep = 0) {
    RunDir run(root_, *comm_);
    run.begin("# contract 1\n");
    EXPECT_EQ(run.resume(), first);
    for (std::int64_t step = first + 1; step <= last; ++step) {
      run.append(step, {{"reward", 1.0 / static_cast<double>(step)}});
      if (step % 2 != 0) continue;
      run.save(step, keep, [](const fs::path& folder) { write(folder / "state", "x"); });
    }
  }

  const fs::path root_ =  // Its own: tests of one fixture run side by side.
      fs::temp_directory_path() / ("lockstep_run_dir_test_" + std::to_string(getpid()));
  const std::unique_ptr<Comm> comm_ = Comm::single();
};

TEST_F(RunDirTest, ResumesAtTheNewestWholeCheckpoint) {
  work(0, 5);
  const std::string before = metrics();
  write(root_ / "metrics.jsonl", before + "{\"step\": 6, \"rew");  // killed while it wrote
  fs::create_directories(root_ / "checkpoints/step_6.part");       // and while it saved
  work(4, 5);
  EXPECT_EQ(metrics(), before);
  EXPECT_FALSE(fs::exists(root_ / "checkpoints/step_6.part"));
}

TEST_F(RunDirTest, MissingLinesAreNotMadeUp) {
  work(0, 4);
  write(root_ / "metrics.jsonl", "{\"step\": 1, \"reward\": 1}\n");
  RunDir run(root_, *comm_);
  EXPECT_THROW(run.resume(), Error);
}

TEST_F(RunDirTest, ADamagedLineIsNamed) {
  work(0, 4);
  const std::string whole = metrics();
  for (const char* second : {"{\"step\": 2, \"rew", "", "{\"step\": 3}", "[2]", "\xff\xfe"}) {
    const std::size_t first = whole.find('\n') + 1;
    write(root_ / "metrics.jsonl",
          whole.substr(0, first) + second + whole.substr(whole.find('\n', first)));
    RunDir run(root_, *comm_);
    EXPECT_NE(complaint([&] { run.resume(); }).find("metrics.jsonl:2 "), std::string::npos)
        << second;
  }
}

TEST_F(RunDirTest, StrayFoldersAreNoCheckpoints) {
  work(0, 4);
  for (const char* name :
       {"step_007", "step_9x", "step_", "step_-1", "step_99999999999999999999"}) {
    fs::create_directories(root_ / "checkpoints" / name);
  }
  write(root_ / "checkpoints/step_8", "a file");
  work(4, 5, 1);
  EXPECT_TRUE(fs::exists(root_ / "checkpoints/step_007"));
}

TEST_F(RunDirTest, SomebodyElsesFolderIsLeftAlone) {
  fs::create_directories(root_);
  { const RunDir run(root_, *comm_); }  // empty: it may become one
  EXPECT_TRUE(fs::exists(root_));
  write(root_ / "thesis.tex", "x");
  fs::remove_all(root_ / "checkpoints");
  fs::remove(root_ / "lock");
  EXPECT_NE(complaint([&] { RunDir(root_, *comm_); }).find("thesis.tex"), std::string::npos);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1);
}

TEST_F(RunDirTest, ARunKilledBeforeItBeganBegins) {
  fs::create_directories(root_ / "checkpoints");
  fs::create_directories(root_ / "trace");
  write(root_ / "trace/LOCK", "");  // the store's, which opens before the recipe is written
  work(0, 1);
  fs::remove(root_ / "recipe.toml");
  fs::remove(root_ / "metrics.jsonl");
  write(root_ / "trace/notes", "");
  EXPECT_NE(complaint([&] { RunDir(root_, *comm_); }), "");
}

TEST_F(RunDirTest, ARunWithoutItsRecipeDoesNotGoOn) {
  work(0, 4);
  fs::remove(root_ / "recipe.toml");
  EXPECT_NE(complaint([&] { RunDir(root_, *comm_); }).find("recipe.toml"), std::string::npos);
  fs::remove_all(root_ / "checkpoints");
  EXPECT_NE(complaint([&] { RunDir(root_, *comm_); }).find("metrics.jsonl"), std::string::npos);
  write(root_ / "recipe.toml", "");
  const RunDir run(root_, *comm_);
  EXPECT_NE(complaint([&] { run.recipe(); }).find("recipe.toml is empty"), std::string::npos);
}

TEST_F(RunDirTest, ADamagedRecipeIsNamedWithItsPath) {
  work(0, 2);
  write(root_ / "recipe.toml", "# contract 1\nseed = = 1\n");
  RunDir run(root_, *comm_);
  const std::string said = complaint([&] { run.begin("# contract 1\nseed = 1\n"); });
  EXPECT_NE(said.find((root_ / "recipe.toml").string() + ":2"), std::string::npos) << said;
}

TEST_F(RunDirTest, ALinkThatLeadsNowhereAndAFileAreNoRunDirectory) {
  fs::create_symlink("/no/such/folder", root_);
  EXPECT_NE(complaint([&] { RunDir(root_, *comm_); }).find("/no/such/folder"), std::string::npos);
  EXPECT_TRUE(fs::is_symlink(root_));
  fs::remove(root_);
  write(root_, "x");
  EXPECT_NE(complaint([&] { RunDir(root_, *comm_); }).find("no folder"), std::string::npos);
  EXPECT_NE(complaint([&] { RunDir("", *comm_); }).find("--run"), std::string::npos);
}

TEST_F(RunDirTest, KeepsTheNewestCheckpoints) {
  work(0, 10, 2);
  RunDir run(root_, *comm_);
  EXPECT_FALSE(fs::exists(run.checkpoint(6)));
  EXPECT_TRUE(fs::exists(run.checkpoint(8)));
  EXPECT_EQ(run.resume(), 10);
}

TEST_F(RunDirTest, ACheckpointThatFailsLeavesNothing) {
  RunDir run(root_, *comm_);
  run.resume();
  EXPECT_THROW(run.save(2, 0,
                        [](const fs::path& folder) {
                          write(folder / "state", "half");
                          throw Error("no room");
                        }),
               Error);
  EXPECT_TRUE(fs::is_empty(root_ / "checkpoints"));
}

TEST_F(RunDirTest, OneProcessAtATime) {
  RunDir first(root_, *comm_);
  EXPECT_THROW(RunDir(root_, *comm_), Error);
}

TEST_F(RunDirTest, AnotherRecipeIsRefusedByItsKeys) {
  RunDir run(root_, *comm_);
  EXPECT_EQ(run.recipe(), "");
  run.begin("# contract 1\nseed = 1\n[trainer]\nlr = 0.5\n");
  run.begin("# contract 1\nseed = 1\n[trainer]\nlr = 0.5\n");
  try {
    run.begin("# contract 1\nseed = 1\n[trainer]\nlr = 0.25\n");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("trainer.lr: 0.5 / 0.25"), std::string::npos);
  }
  EXPECT_THROW(run.begin("# contract 2\nseed = 1\n[trainer]\nlr = 0.5\n"), Error);
}

TEST_F(RunDirTest, ARunThatNeverBeganLeavesNoFolder) {
  { const RunDir run(root_, *comm_); }
  EXPECT_FALSE(fs::exists(root_));
  {
    RunDir run(root_, *comm_);
    run.begin("# contract 1\n");
  }
  { const RunDir run(root_, *comm_); }
  EXPECT_TRUE(fs::exists(root_ / "recipe.toml"));
}

TEST_F(RunDirTest, MetricsAreJson) {
  EXPECT_EQ(metrics_line(3, {{"a/b", 0.5}, {"c", NAN}, {"d", 2e-7}}),
            "{\"step\": 3, \"a/b\": 0.5, \"c\": null, \"d\": 2e-07}\n");
}

// tests/events_test.py reads what this leaves with TensorBoard's own reader.
TEST(Events, WritesWhatTensorBoardReads) {
  const char* folder = std::getenv("LOCKSTEP_EVENTS");
  const fs::path path = folder == nullptr ? fs::temp_directory_path() /
                                                ("lockstep_events_" + std::to_string(getpid()))
                                          : folder;
  fs::create_directories(path);
  {
    EventFile events(path, 1);
    for (int step = 1; step <= 5; ++step) events.append(step, {{"a/b", step * 0.5}, {"c", -1}});
  }
  {
    EventFile events(path, 4);  // a run that was resumed from step 3 on
    for (int step = 4; step <= 6; ++step) events.append(step, {{"a/b", step * 10.0}});
  }
  EXPECT_GT(std::distance(fs::directory_iterator(path), fs::directory_iterator()), 1);
  if (folder == nullptr) fs::remove_all(path);
}

}  // namespace
}  // namespace lockstep::step
