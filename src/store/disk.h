#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/segment.h"
#include "store/store.h"

namespace lockstep::store {

struct Segment {
  std::filesystem::path path;
  SegmentHeader header;
  std::shared_ptr<File> file;
  std::int64_t size = 0;
  std::int64_t live = 0;  // spans that somebody may still read
};

/// A span on disk. Its file stays open, so that a read under way outlives the file's removal.
struct DiskSpan {
  std::shared_ptr<Segment> segment;
  StoredSpan stored;
};

/// The folder of segments: what was found there, what is appended, what is given up. One thread
/// at a time; bytes() may be asked by any.
class Disk {
 public:
  /// Takes the folder for itself and scans it. Throws where that cannot be.
  explicit Disk(const Options& options);

  /// Ends the segment that is being written.
  ~Disk();

  /// What an earlier run of the same id left whole, oldest first. Once.
  std::vector<std::shared_ptr<const DiskSpan>> recovered() { return std::move(recovered_); }
  const Damage& damage() const { return damage_; }
  const std::vector<std::string>& foreign() const { return foreign_; }

  /// Appends a span whole; a fault (no room, the budget) leaves nothing of it.
  Result<std::shared_ptr<const DiskSpan>> put(const Span& span, ContractId contract,
                                              const Body& body);

  /// Gives up spans; a segment without live ones goes with its file. Returns the bytes freed.
  std::int64_t forget(std::span<const std::shared_ptr<const DiskSpan>> spans);

  /// What was put so far survives a loss of power, and what was given up does not come back. A
  /// fault says what of it did not reach the disk.
  Result<void> sync();

  /// Of this store's own segments; those left alone count toward disk_bytes as well.
  std::int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  std::int64_t segments() const { return segments_.load(std::memory_order_relaxed); }

 private:
  void recover(const std::filesystem::path& path);
  void leave_alone(const std::filesystem::path& path, std::string why);
  Result<void> begin_segment(ContractId contract);
  void end_segment();
  void remove(const std::shared_ptr<Segment>& segment);
  void remove_file(const std::filesystem::path& path);
  void changed(const std::shared_ptr<Segment>& segment);

  Options options_;
  std::optional<File> lock_;
  std::uint64_t next_number_ = 1;
  std::shared_ptr<Segment> current_;
  std::optional<SegmentWriter> writer_;
  std::vector<std::shared_ptr<Segment>> unsynced_;  // those that live on alone
  bool folder_unsynced_ = false;                    // files came or went
  std::filesystem::path unsynced_parent_{};         // of a folder that was made; else empty
  std::optional<Fault> not_given_up_;  // since sync(): a marker not written, a file not removed
  std::int64_t foreign_bytes_ = 0;
  std::vector<std::shared_ptr<const DiskSpan>> recovered_;
  std::vector<std::string> foreign_;
  Damage damage_;
  std::atomic<std::int64_t> bytes_ = 0;
  std::atomic<std::int64_t> segments_ = 0;
};

}  // namespace lockstep::store
