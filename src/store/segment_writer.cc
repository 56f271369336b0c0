#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "store/segment.h"

namespace lockstep::store {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kWriteBuffer = std::size_t{4} << 20;

void put_32(Bytes& out, std::int64_t value) { put_le(out, static_cast<std::uint32_t>(value)); }

void put_layout(Bytes& out, Place place, const RowLayout& layout) {
  put_32(out, place.layer.value);
  put_le(out, static_cast<std::uint8_t>(place.site));
  put_le(out, static_cast<std::uint8_t>(layout.encoding));
  put_le(out, std::uint16_t{0});
  put_32(out, layout.width);
  put_32(out, layout.block);
  put_32(out, layout.exponents);
}

/// Room for a frame's header, filled in by end_frame.
std::size_t begin_frame(Bytes& out) {
  out.resize(out.size() + kFrameBytes);
  return out.size() - kFrameBytes;
}

/// The header of the frame that began at `at`; returns its payload's CRC.
std::uint32_t end_frame(Bytes& out, std::size_t at, FrameType type) {
  const std::span payload = std::span(out).subspan(at + kFrameBytes);
  Bytes header;
  put_le(header, kLive);
  put_le(header, static_cast<std::uint32_t>(type));
  put_le(header, std::uint64_t{payload.size()});
  const std::uint32_t crc = crc32c(payload);
  put_le(header, crc);
  put_le(header, crc32c(std::span(header).subspan(4)));
  std::copy(header.begin(), header.end(), out.begin() + static_cast<std::ptrdiff_t>(at));
  return crc;
}

/// The part of a column that the next block takes: runs from `run` on, beginning `skip` rows into
/// it. Advances both.
std::vector<Run> next_part(const Column& column, std::size_t& run, std::int32_t& skip) {
  std::int64_t room = std::max<std::int64_t>(1, kBlockTarget / column.row_bytes());
  std::vector<Run> part;
  while (room > 0 && run < column.runs().size()) {
    const Run& whole = column.runs()[run];
    const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(room, whole.count - skip));
    part.push_back({whole.position + skip, count, whole.row + skip});
    room -= count;
    skip += count;
    if (skip == whole.count) {
      ++run;
      skip = 0;
    }
  }
  return part;
}

BlockRef put_block(Bytes& out, std::int64_t offset, SpanId span, const Column& column,
                   std::span<const Run> part) {
  const std::size_t at = begin_frame(out);
  std::int64_t rows = 0;
  for (const Run& run : part) rows += run.count;
  put_le(out, span.value);
  put_layout(out, column.place(), column.layout());
  put_32(out, static_cast<std::int64_t>(part.size()));
  put_32(out, rows);
  for (const Run& run : part) {
    put_32(out, run.position);
    put_32(out, run.count);
  }
  const std::size_t begin = out.size();
  out.resize(begin + row_offset(rows, column.row_bytes()));
  column.copy(part.front().row, rows, out.data() + begin);
  const std::uint32_t crc = end_frame(out, at, FrameType::kBlock);
  return {.offset = static_cast<std::uint64_t>(offset),
          .length = out.size() - at - kFrameBytes,
          .crc = crc,
          .place = column.place(),
          .layout = column.layout(),
          .first = part.front().position,
          .end = part.back().position + part.back().count,
          .rows = static_cast<std::int32_t>(rows)};
}

void put_directory(Bytes& out, const Span& span, std::span<const BlockRef> blocks) {
  const std::size_t at = begin_frame(out);
  put_le(out, span.id.value);
  put_32(out, span.first);
  put_32(out, span.count);
  put_le(out, static_cast<std::uint64_t>(span.version.value));
  put_le(out, span.prefix_hash);
  put_32(out, static_cast<std::int64_t>(blocks.size()));
  for (const BlockRef& block : blocks) {
    put_le(out, block.offset);
    put_le(out, block.length);
    put_le(out, block.crc);
    put_layout(out, block.place, block.layout);
    put_32(out, block.first);
    put_32(out, block.end);
    put_32(out, block.rows);
  }
  end_frame(out, at, FrameType::kDirectory);
}

/// A body's columns that hold rows, by place and encoding: the file does not depend on the order
/// in which an engine first named them.
std::vector<const Column*> in_order(const Body& body) {
  std::vector<const Column*> columns;
  for (const Column& column : body.columns) {
    if (column.rows() > 0) columns.push_back(&column);
  }
  std::sort(columns.begin(), columns.end(), [](const Column* a, const Column* b) {
    return std::pair(a->place(), a->layout().encoding) <
           std::pair(b->place(), b->layout().encoding);
  });
  return columns;
}

}  // namespace

Result<SegmentWriter> SegmentWriter::create(std::shared_ptr<File> file,
                                            const SegmentHeader& header) {
  Bytes bytes;
  for (const std::uint8_t byte : kMagic) put_le(bytes, byte);
  put_le(bytes, kFormatVersion);
  put_32(bytes, kHeaderBytes);
  put_le(bytes, header.contract.value);
  put_le(bytes, header.run);
  put_le(bytes, header.number);
  put_le(bytes, std::uint32_t{0});
  put_le(bytes, crc32c(bytes));
  const Result<void> written = file->write_at(0, bytes);
  if (!written) return tl::unexpected(written.error());
  return SegmentWriter(std::move(file), kHeaderBytes);
}

Result<void> SegmentWriter::write(std::span<const std::byte> bytes) {
  const Result<void> written = file_->write_at(size_, bytes);
  if (written) size_ += static_cast<std::int64_t>(bytes.size());
  return written;
}

Result<StoredSpan> SegmentWriter::write_span(const Span& span, const Body& body) {
  StoredSpan stored = {.span = span};
  const std::int64_t begin = size_;
  Bytes buffer;
  for (const Column* column : in_order(body)) {
    std::size_t run = 0;
    std::int32_t skip = 0;
    while (run < column->runs().size()) {
      const std::vector<Run> part = next_part(*column, run, skip);
      const std::int64_t offset = size_ + static_cast<std::int64_t>(buffer.size());
      stored.blocks.push_back(put_block(buffer, offset, span.id, *column, part));
      if (buffer.size() < kWriteBuffer) continue;
      if (const Result<void> written = write(buffer); !written) {
        return tl::unexpected(written.error());
      }
      buffer.clear();
    }
  }
  stored.directory = size_ + static_cast<std::int64_t>(buffer.size());
  put_directory(buffer, span, stored.blocks);
  if (const Result<void> written = write(buffer); !written) return tl::unexpected(written.error());
  stored.bytes = size_ - begin;
  return stored;
}

Result<StoredSpan> SegmentWriter::append(const Span& span, const Body& body) {
  const std::int64_t before = size_;
  Result<StoredSpan> stored = write_span(span, body);
  if (!stored) {
    // Should even the cut fail, a scan still takes what is left for a torn tail.
    static_cast<void>(file_->truncate(before));
    size_ = before;
    return stored;
  }
  directories_.push_back(static_cast<std::uint64_t>(stored->directory));
  return stored;
}

Result<void> SegmentWriter::finish() {
  Bytes bytes;
  const std::size_t at = begin_frame(bytes);
  put_le(bytes, std::uint64_t{directories_.size()});
  for (const std::uint64_t offset : directories_) put_le(bytes, offset);
  end_frame(bytes, at, FrameType::kFooter);
  Bytes trailer;
  put_le(trailer, static_cast<std::uint64_t>(size_));
  put_le(trailer, crc32c(trailer));
  put_le(trailer, kEndMagic);
  bytes.insert(bytes.end(), trailer.begin(), trailer.end());
  const std::int64_t before = size_;
  const Result<void> written = write(bytes);
  if (!written) static_cast<void>(file_->truncate(before));
  return written;
}

Result<void> forget_span(const File& file, const StoredSpan& stored) {
  Bytes marker;
  put_le(marker, kForgotten);
  return file.write_at(stored.directory, marker);
}

}  // namespace lockstep::store
