#include "store/disk.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/sync_testing.h"
#include "store/testing.h"

namespace lockstep::store {
namespace {

using namespace testing;
using Names = std::set<std::string>;

constexpr SpanId kA{1}, kB{2};

/// Of this process.
std::ptrdiff_t open_files() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return std::distance(begin(entries), end(entries));
}

/// Waits until the store's own thread has nothing to do, without a flush.
void settle(const Store& store) { EXPECT_FALSE(store.admits(std::int64_t{1} << 40)); }

// A training run retires each step's spans and never flushes.
TEST(Disk, ASegmentThatIsGivenUpIsClosed) {
  Folder folder;
  Store store({.folder = folder.path(), .ram_bytes = 0, .segment_bytes = 4000});
  write_span(store, {0}, 0, 50, 0, WeightVersion{0});
  settle(store);
  const std::ptrdiff_t before = open_files();
  for (std::int64_t step = 1; step < 30; ++step) {
    for (std::uint64_t s = 0; s < 4; ++s) {
      const auto id = static_cast<std::uint64_t>(step) * 4 + s;
      write_span(store, {id}, 0, 50, 0, WeightVersion{step});
    }
    store.retire(WeightVersion{step});
    settle(store);
    EXPECT_LE(folder.segments().size(), 3u);
  }
  EXPECT_LE(open_files(), before + 2);
}

TEST(Disk, AFlushBringsFilesFoldersAndMarkersToTheDisk) {
  Folder outer;
  const std::filesystem::path folder = outer.path() / "trace";
  const std::string segment = folder / "000001.segment";
  auto& synced = SyncedFiles::all();
  Store store({.folder = folder});
  write_span(store, kA, 0, 30);
  write_span(store, kB, 0, 30);
  synced.take();
  ASSERT_TRUE(store.flush());
  EXPECT_EQ(synced.take(), (Names{outer.path(), folder, segment}));
  ASSERT_TRUE(store.flush());
  EXPECT_EQ(synced.take(), Names{});
  store.release(std::vector{kA});  // its marker is written over
  ASSERT_TRUE(store.flush());
  EXPECT_EQ(synced.take(), Names{segment});
  store.release(std::vector{kB});  // and now the file goes
  ASSERT_TRUE(store.flush());
  EXPECT_EQ(synced.take(), Names{folder});
}

TEST(Disk, WhatIsNotGivenUpIsTold) {
  Folder folder;
  Store store({.folder = folder.path()});
  write_span(store, kA, 0, 30);
  ASSERT_TRUE(store.flush());
  // A folder of that name cannot be removed as a file is.
  const std::filesystem::path path = folder.segments().at(0);
  std::filesystem::remove(path);
  std::filesystem::create_directories(path / "inside");
  store.release(std::vector{kA});
  const Result<void> flushed = store.flush();
  ASSERT_FALSE(flushed);
  EXPECT_NE(flushed.error().message.find("removing " + path.string()), std::string::npos)
      << flushed.error().message;
  EXPECT_TRUE(store.flush());
}

TEST(Disk, SegmentsOfOthersCountTowardTheBudget) {
  Folder folder;
  std::ofstream(folder.path() / "000007.segment") << std::string(9000, 'x');
  Store store({.folder = folder.path(), .ram_bytes = 0, .disk_bytes = 10'000});
  write_span(store, kA, 0, 60);
  const Result<void> flushed = store.flush();
  ASSERT_FALSE(flushed);
  EXPECT_NE(flushed.error().message.find(
                "9000 bytes of store.disk = 10000 are in use (9000 by other runs' segments there)"),
            std::string::npos)
      << flushed.error().message;
  EXPECT_EQ(own_span(store, kA, 0, 60), rows_in_span(0, 60));
}

}  // namespace
}  // namespace lockstep::store
