/// What a store takes by the bytes of its records: time until they lie in the folder, and bytes
/// there.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "device/cuda/bench.h"
#include "store/store.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::int32_t kHidden = 2048, kLayers = 24, kTokens = 128;

struct Stored {
  double seconds = 0, record_bytes = 0, disk_bytes = 0;
};

/// Compact records of w13_in of 24 layers, of so many sequences of 128 tokens.
Stored stored(const fs::path& folder, std::size_t sequences) {
  fs::remove_all(folder);
  const RowLayout layout = {Encoding::kLsb, kHidden, 16, 1};
  const auto bytes = static_cast<std::size_t>(layout.bytes());
  std::vector<std::byte> rows(sequences * bytes);
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  std::vector<TokenKey> keys(sequences);
  Stored seen;
  {
    store::Store store({.folder = folder, .ram_bytes = 1ll << 34, .contract = ContractId{1}});
    const auto began = std::chrono::steady_clock::now();
    for (std::size_t s = 0; s < sequences; ++s) {
      keys[s] = {SpanId{s + 1}, 0};
      store.open({.id = keys[s].span, .count = kTokens}, ContractId{1});
    }
    for (std::int32_t token = 0; token < kTokens; ++token) {
      for (std::int32_t layer = 0; layer < kLayers; ++layer) {
        store.append(keys, {{Layer{layer}, Site::kW13In}, layout, rows});
      }
      for (TokenKey& key : keys) ++key.position;
    }
    for (const TokenKey& key : keys) store.seal(key.span);
    if (const Result<void> done = store.flush(); !done) throw Error(done.error().message);
    seen.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
  seen.record_bytes = static_cast<double>(rows.size()) * kTokens * kLayers;
  for (const fs::directory_entry& file : fs::directory_iterator(folder)) {
    seen.disk_bytes += static_cast<double>(file.file_size());
  }
  return seen;
}

/// New, and gone with everything in it.
struct OwnFolder {
  explicit OwnFolder(const fs::path& below) {
    std::string name = (below / "lockstep_store_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw Error(below.string() + " takes no folder");
    path = name;
  }
  ~OwnFolder() {
    std::error_code none;
    fs::remove_all(path, none);
  }
  OwnFolder(const OwnFolder&) = delete;
  OwnFolder& operator=(const OwnFolder&) = delete;
  fs::path path;
};

void law_of_store(cuda::Bench& bench) {
  // Memory, where there is such a folder: a disk has a law of its own.
  const OwnFolder folder(fs::is_directory("/dev/shm") ? "/dev/shm" : fs::temp_directory_path());
  cuda::Law time = {.cost = "store, time", .size = "bytes", .slope = 1, .within = 0.1};
  cuda::Law bytes = {.cost = "store, bytes on disk", .size = "bytes", .slope = 1, .within = 0.05};
  double overhead = 0;
  for (const std::size_t sequences : {64, 128, 256, 512}) {
    Stored best = stored(folder.path / "store", sequences);
    for (int i = 0; i < 2; ++i) {
      const Stored again = stored(folder.path / "store", sequences);
      if (again.seconds < best.seconds) best = again;
    }
    time.add(best.record_bytes, best.seconds);
    bytes.add(best.record_bytes, best.disk_bytes);
    overhead = std::max(overhead, best.disk_bytes / best.record_bytes - 1);
  }
  bench.judge(time);
  bench.judge(bytes);
  bench.heading(
      cat({"beside the records there are at most ", overhead * 100, " % (index, checksums)"}));
}

const cuda::BenchEntry kStore("law_store", law_of_store);

}  // namespace
}  // namespace lockstep
