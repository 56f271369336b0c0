#include "store/segment.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <sstream>
#include <thread>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "store/store.h"
#include "store/testing.h"

namespace lockstep::store {
namespace {

using namespace testing;

constexpr SpanId kA{0x0001000000000040};
constexpr SpanId kB{0x0001000000000041};
constexpr int kEnd = 10;    // a small segment, for every byte of it is damaged in turn
constexpr int kBegin = 14;  // of span B, so that it has as many audit rows as A
constexpr int kRows = 3 * kEnd + 2;

Bytes contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  Bytes bytes(chars.size());
  std::transform(chars.begin(), chars.end(), bytes.begin(),
                 [](char c) { return static_cast<std::byte>(c); });
  return bytes;
}

/// A segment of spans A and B, damaged by verbs, and what a store makes of it.
class SegmentTest : public ::testing::Test {
 protected:
  /// The segment of a store that ended well, or was killed before it wrote a footer.
  void Write(bool finished = true) {
    Folder folder;
    {
      Store store({.folder = folder.path(), .run = 7});
      write_span(store, kA, 0, kEnd);
      write_span(store, kB, kBegin, kBegin + kEnd);
      ASSERT_TRUE(store.flush());
      if (!finished) bytes_ = contents(folder.segments().at(0));
    }
    if (finished) bytes_ = contents(folder.segments().at(0));
  }
  void SetByte(std::size_t at, std::uint8_t value) { bytes_[at] = std::byte{value}; }
  void Flip(std::size_t at, std::uint8_t mask) { bytes_[at] ^= std::byte{mask}; }
  void Truncate(std::size_t size) { bytes_.resize(size); }
  void FixHeader() {
    const std::uint32_t crc = crc32c(std::span(bytes_).first(44));
    for (std::size_t i = 0; i < 4; ++i) SetByte(44 + i, static_cast<std::uint8_t>(crc >> 8 * i));
  }

  /// Opens a store on the bytes as they are now, reads both spans, and looks that no row is wrong.
  void Reopen(const Options& like = {.run = 7}) {
    Folder folder;
    std::ofstream(folder.path() / "000001.segment", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes_.data()),
               static_cast<std::streamsize>(bytes_.size()));
    Options options = like;
    options.folder = folder.path();
    Store store(options);
    a_ = own_span(store, kA, 0, kEnd);
    b_ = own_span(store, kB, kBegin, kBegin + kEnd);
    lines_ = store.dropped();
    dropped_bytes_ = store.metrics().at("perf/trace/dropped_bytes");
    ASSERT_GE(a_, 0);
    ASSERT_GE(b_, 0);
    unexplained_ = (a_ < kRows || b_ < kRows) && lines_.empty();
    files_ = folder.segments().size();
  }
  std::string Line(std::size_t i = 0) const {
    if (i >= lines_.size()) return "";
    return lines_[i].substr(lines_[i].find("000001.segment"));
  }

  Bytes bytes_;
  int a_ = 0;
  int b_ = 0;
  bool unexplained_ = false;  // rows are missing, and no reason is given
  std::vector<std::string> lines_;
  double dropped_bytes_ = 0;
  std::size_t files_ = 0;
};

TEST_F(SegmentTest, IsFoundAgainWithAndWithoutFooter) {
  for (const bool finished : {true, false}) {
    Write(finished);
    Reopen();
    EXPECT_EQ(a_, kRows);
    EXPECT_EQ(b_, kRows);
    EXPECT_EQ(lines_, std::vector<std::string>{});
  }
}

TEST_F(SegmentTest, EveryByteDamagedLeavesRowsTheirOwnOrAbsent) {
  for (const bool finished : {true, false}) {
    Write(finished);
    int losses = 0;
    for (std::size_t at = 0; at < bytes_.size(); ++at) {
      const auto mask = static_cast<std::uint8_t>(at % 2 == 0 ? 0xff : 1 << at % 8);
      Flip(at, mask);
      SCOPED_TRACE(at);
      Reopen();
      if (HasFatalFailure()) return;
      losses += a_ < kRows || b_ < kRows;
      ASSERT_FALSE(unexplained_);
      // One byte lies in one span, or in none; in the header it takes the file.
      EXPECT_TRUE(a_ == kRows || b_ == kRows || at < static_cast<std::size_t>(kHeaderBytes));
      Flip(at, mask);
    }
    // Not noticed: the footer, and the frame headers of blocks that a directory names.
    EXPECT_GT(losses, static_cast<int>(bytes_.size()) * 2 / 3);
  }
}

TEST_F(SegmentTest, EveryLengthLeavesWholeSpansOrNone) {
  for (const bool finished : {true, false}) {
    Write(finished);
    const Bytes whole = bytes_;
    int unexplained = 0;
    for (std::size_t size = 0; size < whole.size(); ++size) {
      bytes_ = whole;
      Truncate(size);
      SCOPED_TRACE(size);
      Reopen();
      if (HasFatalFailure()) return;
      EXPECT_TRUE(a_ == kRows || a_ == 0);
      EXPECT_TRUE(b_ == kRows || b_ == 0);
      EXPECT_GE(a_, b_);  // what was written first is lost last
      unexplained += unexplained_;
    }
    EXPECT_EQ(unexplained, 3);  // nothing at all, a header alone, a header and A alone
  }
}

TEST_F(SegmentTest, ATornTailIsCutAndCounted) {
  Write(/*finished=*/false);
  Truncate(bytes_.size() - 1);
  Reopen();
  EXPECT_EQ(a_, kRows);
  EXPECT_EQ(b_, 0);
  EXPECT_NE(Line().find(": torn tail"), std::string::npos) << Line();
  EXPECT_GT(dropped_bytes_, 0);
}

TEST_F(SegmentTest, ADamagedBlockIsAbsentAndTheRestOfItsSpanIsNot) {
  Write();
  const Bytes row = row_of({kA, 3}, kRouter, kRoutes);
  const auto at = std::search(bytes_.begin(), bytes_.end(), row.begin(), row.end());
  Flip(static_cast<std::size_t>(at - bytes_.begin()), 4);
  Reopen();
  EXPECT_EQ(a_, kRows - kEnd);
  EXPECT_EQ(b_, kRows);
  EXPECT_EQ(lines_.size(), 1u);
  EXPECT_EQ(Line(), "000001.segment: 88 bytes at 48: block checksum");
  EXPECT_EQ(dropped_bytes_, 88);
}

TEST_F(SegmentTest, ScansPastADamagedFrame) {
  Write(/*finished=*/false);
  Flip(kHeaderBytes + 8, 0xff);  // the length of A's first block
  Reopen();
  EXPECT_EQ(a_, kRows);  // its directory names the block, whose payload is good
  EXPECT_EQ(b_, kRows);
  EXPECT_EQ(Line(), "000001.segment: 88 bytes at 48: frame header");
}

TEST_F(SegmentTest, ForeignFilesAreLeftAlone) {
  const auto foreign = [&](const Options& options, const std::string& line) {
    Reopen(options);
    EXPECT_EQ(a_ + b_, 0);
    EXPECT_EQ(Line(), line);
    EXPECT_EQ(files_, 1u);
  };
  Write();
  foreign({.run = 8}, "000001.segment: of another run: left alone");
  foreign({.run = 7, .contract = {5}}, "000001.segment: of another contract: left alone");
  SetByte(8, 2);
  FixHeader();
  foreign({.run = 7}, "000001.segment: segment version 2, not 1: left alone");
  SetByte(0, 'P');
  foreign({.run = 7}, "000001.segment: not a segment: left alone");
  bytes_.assign(20, std::byte{0x89});
  foreign({.run = 7}, "000001.segment: too short for a segment: left alone");
}

TEST_F(SegmentTest, RandomBurstsOfDamage) {
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    Write(i % 2 == 0);
    for (int burst = 0; burst < 3; ++burst) {
      const std::size_t at = kHeaderBytes + random() % (bytes_.size() - kHeaderBytes);
      const std::size_t count = std::min<std::size_t>(random() % 64, bytes_.size() - at);
      const auto first = bytes_.begin() + static_cast<std::ptrdiff_t>(at);
      if (burst == 0) {
        bytes_.erase(first, first + static_cast<std::ptrdiff_t>(count));
      } else {
        std::generate_n(first, count, [&] { return static_cast<std::byte>(random()); });
      }
    }
    Reopen();
    if (HasFatalFailure()) return;
    EXPECT_FALSE(unexplained_);
  }
}

TEST(Segment, LongColumnsBecomeSeveralBlocksAndGapsStay) {
  Folder folder;
  constexpr RowLayout kWide{Encoding::kCodes, 4096, 16, 1};  // 2305 bytes
  const auto all = positions(kA, 100, 1100);
  std::vector<TokenKey> some;
  for (const TokenKey& key : all) {
    if (key.position % 5 < 3) some.push_back(key);
  }
  {
    Store store({.folder = folder.path()});
    store.open({.id = kA, .first = 100}, kContract);
    append(store, some, kW13, kWide);
    store.seal(kA);
    ASSERT_TRUE(store.flush());
  }
  Store store({.folder = folder.path()});
  const Got got = read(store, all, kW13, kWide);
  EXPECT_EQ(own_rows(got, all, kW13, kWide), 600);
  const std::span middle = std::span(all).subspan(437, 9);
  EXPECT_EQ(own_rows(read(store, middle, kW13, kWide), middle, kW13, kWide), 5);
}

TEST(Segment, SpansOfTwoContractsGoToTwoSegments) {
  Folder folder;
  Store store({.folder = folder.path()});
  store.open({.id = kA}, ContractId{1});
  store.seal(kA);
  store.open({.id = kB}, ContractId{2});
  store.seal(kB);
  ASSERT_TRUE(store.flush());
  EXPECT_EQ(folder.segments().size(), 2u);
}

TEST(Segment, AResumedRunAppendsBesideWhatItFound) {
  Folder folder;
  for (std::uint64_t life = 0; life < 4; ++life) {
    Store store({.folder = folder.path()});
    for (std::uint64_t s = 0; s < life; ++s) {
      EXPECT_EQ(own_span(store, {s}, 0, 9), rows_in_span(0, 9));
    }
    write_span(store, {life}, 0, 9);
    write_span(store, {77}, 0, 9, static_cast<std::uint32_t>(life));  // again in each life
    ASSERT_TRUE(store.flush());
    EXPECT_EQ(own_span(store, {77}, 0, 9, static_cast<std::uint32_t>(life)), rows_in_span(0, 9));
  }
  Store store({.folder = folder.path()});
  EXPECT_EQ(store.spans().size(), 5u);
  EXPECT_EQ(own_span(store, {77}, 0, 9, 3), rows_in_span(0, 9));
  store.retire(WeightVersion{100});
  ASSERT_TRUE(store.flush());
  EXPECT_EQ(folder.segments().size(), 0u);
}

/// Writes spans for ever, tells through `pipe` how many are safe, gives up some.
[[noreturn]] void write_until_killed(const std::filesystem::path& folder, int pipe) {
  Store store({.folder = folder, .ram_bytes = 20'000, .segment_bytes = 30'000});
  for (std::uint64_t s = 0;; ++s) {
    write_span(store, {s}, 0, 20, /*salt=*/5, WeightVersion{static_cast<std::int64_t>(s)});
    if (s % 7 == 6) store.release(std::vector<SpanId>{{s - 2}});
    if (s % 5 == 4 && store.flush()) {
      if (::write(pipe, &s, sizeof(s)) != sizeof(s)) ::_exit(1);
    }
  }
}

TEST(Segment, KilledAtAnyMomentWhatWasFlushedIsWholeAndTheRestNeverWrong) {
  std::mt19937 random(11);
  for (int round = 0; round < 20; ++round) {
    Folder folder;
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    if (child == 0) write_until_killed(folder.path(), ends[1]);
    ::close(ends[1]);
    std::this_thread::sleep_for(std::chrono::microseconds(2000 + random() % 30'000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    std::uint64_t safe = 0;
    for (std::uint64_t s = 0; ::read(ends[0], &s, sizeof(s)) == sizeof(s);) safe = s + 1;
    ::close(ends[0]);

    Store store({.folder = folder.path()});
    for (std::uint64_t s = 0; s < safe + 20; ++s) {
      const int rows = own_span(store, {s}, 0, 20, 5);
      ASSERT_TRUE(rows == 0 || rows == rows_in_span(0, 20)) << "span " << s << ", " << rows;
      // Those whose release may have reached the disk are another matter.
      ASSERT_TRUE(s >= safe || s % 7 == 4 || rows > 0) << "span " << s;
    }
  }
}

/// Limits how long a file may grow while it lives.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

TEST(Segment, AFullDiskStopsAdmissionAndLosesNothing) {
  Folder folder;
  Store store({.folder = folder.path(), .ram_bytes = 12'000});
  std::uint64_t s = 0;
  {
    const FileLimit limit(20'000);
    while (s < 100 && store.admits(2000)) write_span(store, {s++}, 0, 60);
    ASSERT_LT(s, 30u);
    ASSERT_GT(s, 8u);
    const std::string why = store.held();
    EXPECT_NE(why.find(": File too large; make room there, or raise store.ram"), std::string::npos)
        << why;
    EXPECT_EQ(std::count(why.begin(), why.end(), '\n'), 0);
    EXPECT_FALSE(store.flush());
    for (std::uint64_t i = 0; i < s; ++i) {
      EXPECT_EQ(own_span(store, {i}, 0, 60), rows_in_span(0, 60));
    }
    EXPECT_LE(std::filesystem::file_size(folder.segments().at(0)), 20'000u);
  }
  // There is room again: on it goes, and nothing half-written lies between.
  EXPECT_TRUE(store.admits(2000));
  ASSERT_TRUE(store.flush());
  for (std::uint64_t i = 0; i < s; ++i) {
    EXPECT_EQ(own_span(store, {i}, 0, 60), rows_in_span(0, 60));
  }
  Damage damage;
  const File file = value_or_throw(File::open(folder.segments().at(0)));
  const Scan scan = value_or_throw(scan_segment(file, damage));
  EXPECT_EQ(scan.spans.size(), s);
  EXPECT_EQ(damage.lines, std::vector<std::string>{});
}

/// A file system of 64 KiB, where this user may mount one.
class SmallDisk {
 public:
  SmallDisk() { mounted_ = ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, "size=64k") == 0; }
  ~SmallDisk() {
    if (mounted_) ::umount(folder_.path().c_str());
  }
  bool mounted() const { return mounted_; }
  const Folder& folder() const { return folder_; }

 private:
  Folder folder_;
  bool mounted_ = false;
};

TEST(Segment, ADiskWithoutRoomStopsAdmissionAndLosesNothing) {
  const SmallDisk disk;
  if (!disk.mounted()) GTEST_SKIP() << "mounting needs root";
  {
    Store store({.folder = disk.folder().path(), .ram_bytes = 12'000});
    std::uint64_t s = 0;
    while (s < 1000 && store.admits(2000)) write_span(store, {s++}, 0, 60);
    ASSERT_LT(s, 60u);
    EXPECT_NE(store.held().find(": No space left on device; make room there, or raise store.ram"),
              std::string::npos)
        << store.held();
    for (std::uint64_t i = 0; i < s; ++i) {
      EXPECT_EQ(own_span(store, {i}, 0, 60), rows_in_span(0, 60));
    }
    store.retire(WeightVersion{2});  // the step is over
    EXPECT_TRUE(store.admits(2000));
    ASSERT_TRUE(store.flush());
    write_span(store, {5000}, 0, 60, 0, WeightVersion{2});
    ASSERT_TRUE(store.flush());
  }
  Store store({.folder = disk.folder().path()});  // ended without room for anything half-written
  EXPECT_EQ(own_span(store, {5000}, 0, 60), rows_in_span(0, 60));
  EXPECT_EQ(store.dropped(), std::vector<std::string>{});
}

/// The bytes in the ```hex blocks of a document's section.
Bytes example_in(const std::string& document) {
  std::ifstream in(document);
  Bytes bytes;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("```", 0) == 0) {
      inside = line == "```hex";
      continue;
    }
    if (!inside) continue;
    std::istringstream words(line.substr(0, line.find('|')));
    for (std::string word; words >> word;) {
      bytes.push_back(static_cast<std::byte>(std::stoi(word, nullptr, 16)));
    }
  }
  return bytes;
}

/// The example of the document: one span of two tokens, each of which chose two experts.
void write_example(const File& file) {
  auto shared = std::make_shared<File>(File(::dup(file.descriptor()), "example"));
  Body body;
  body.columns.emplace_back(kRouter, kRoutes);
  const Bytes rows = {std::byte{3}, std::byte{9}, std::byte{0}, std::byte{15}};
  body.columns[0].append(4, 2, rows.data());
  body.columns[0].close();
  SegmentWriter writer = value_or_throw(
      SegmentWriter::create(shared, {.contract = kContract, .run = 42, .number = 1}));
  const Span span = {
      .id = kA, .first = 4, .count = 2, .version = {3}, .prefix_hash = 0xfeedfacecafebeef};
  value_or_throw(writer.append(span, body));
  value_or_throw(writer.finish());
}

TEST(Segment, TheDocumentsExampleIsWhatIsWritten) {
  Folder folder;
  const auto path = folder.path() / "000001.segment";
  write_example(value_or_throw(File::create(path)));
  EXPECT_EQ(contents(path), example_in("docs/formats/segment.md"));

  Store store({.folder = folder.path(), .run = 42, .contract = kContract});
  const auto tokens = positions(kA, 4, 6);
  const Got got = read(store, tokens, kRouter, kRoutes);
  EXPECT_EQ(got.bytes, (Bytes{std::byte{3}, std::byte{9}, std::byte{0}, std::byte{15}}));
}

}  // namespace
}  // namespace lockstep::store
