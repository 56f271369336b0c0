/// Segments: append-only files of whole spans. See docs/formats/segment.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "contract/site.h"
#include "numerics/row.h"
#include "record/trajectory.h"
#include "store/file.h"
#include "store/segment_format.h"
#include "store/span_body.h"

namespace lockstep::store {

/// Where rows of one place lie in a segment, as the span's directory says.
struct BlockRef {
  std::uint64_t offset = 0;  // of its frame
  std::uint64_t length = 0;  // of its payload
  std::uint32_t crc = 0;     // of its payload
  Place place{};
  RowLayout layout{};
  std::int32_t first = 0;  // positions [first, end) hold its rows
  std::int32_t end = 0;
  std::int32_t rows = 0;
};

/// A span in a segment.
struct StoredSpan {
  Span span;
  std::vector<BlockRef> blocks{};  // by place and encoding, then position
  std::int64_t directory = 0;      // offset of its directory's frame
  std::int64_t bytes = 0;          // that it takes of the file, framing included
};

/// What was found damaged: so many bytes dropped, and why.
struct Damage {
  std::int64_t bytes = 0;
  std::vector<std::string> lines{};  // "FILE: 52 bytes at 96: payload checksum"

  void drop(const std::string& file, std::int64_t offset, std::int64_t count, const char* why);
};

class SegmentWriter {
 public:
  /// Begins an empty file.
  static Result<SegmentWriter> create(std::shared_ptr<File> file, const SegmentHeader& header);

  /// Appends a span whole, or cuts the file back to what it was.
  Result<StoredSpan> append(const Span& span, const Body& body);

  /// Writes footer and trailer. Nothing is appended afterwards.
  Result<void> finish();

  std::int64_t size() const { return size_; }

 private:
  SegmentWriter(std::shared_ptr<File> file, std::int64_t size)
      : file_(std::move(file)), size_(size) {}
  Result<void> write(std::span<const std::byte> bytes);
  Result<StoredSpan> write_span(const Span& span, const Body& body);

  std::shared_ptr<File> file_;
  std::int64_t size_ = 0;
  std::vector<std::uint64_t> directories_;
};

/// Writes over a stored span's marker, so that no later scan finds it.
Result<void> forget_span(const File& file, const StoredSpan& stored);

/// The header; a fault says what the file is instead.
Result<SegmentHeader> read_header(const File& file);

struct Scan {
  std::vector<StoredSpan> spans;  // in file order
  bool finished = false;          // footer and trailer were good, and used
  std::int64_t whole = 0;         // bytes up to the end of the last whole span
};

/// Finds the whole spans of a segment: by its footer, else frame by frame, past damage where there
/// is some. A fault is the system's; what is wrong with the file is told to `damage`.
Result<Scan> scan_segment(const File& file, Damage& damage);

/// A block read and checked against its reference: its runs and its rows.
struct Block {
  std::vector<std::byte> payload;
  std::vector<Run> runs;
  const std::byte* rows = nullptr;

  /// copy_rows() to `out`, rows of `row_bytes` each; a null one asks for presence alone.
  std::size_t copy(std::int32_t row_bytes, std::int32_t position, std::byte* out,
                   std::span<std::uint8_t> present) const {
    return copy_rows(runs, position, present,
                     [&](std::int64_t row, std::int64_t count, std::int64_t at) {
                       if (out == nullptr) return;
                       std::memcpy(out + row_offset(at, row_bytes),
                                   rows + row_offset(row, row_bytes), row_offset(count, row_bytes));
                     });
  }
};

enum class BlockFault : std::uint8_t {
  kDamaged,  // the bytes are not what was written
  kSystem,   // they could not be read this time
};

tl::expected<Block, BlockFault> read_block(const File& file, SpanId span, const BlockRef& ref);

}  // namespace lockstep::store
