#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/text.h"
#include "store/segment.h"

namespace lockstep::store {
namespace {

using Bytes = std::vector<std::byte>;

struct Frame {
  FrameType type{};
  bool live = false;
  std::int64_t offset = 0;
  std::int64_t length = 0;  // of the payload
  std::uint32_t crc = 0;

  std::int64_t end() const { return offset + kFrameBytes + length; }
};

std::int64_t get_32(std::span<const std::byte> bytes, std::size_t at) {
  return get_le<std::uint32_t>(bytes, at);
}

// Their numbers are in files: a new one goes behind them.
static_assert(static_cast<int>(Site::kW13In) == 0 && static_cast<int>(Site::kRouter) == 4);
static_assert(static_cast<int>(Encoding::kScale) == 1 && static_cast<int>(Encoding::kLsb) == 3);
static_assert(static_cast<int>(Encoding::kCodes) == 4 && static_cast<int>(Encoding::kBf16) == 7);
static_assert(static_cast<int>(Encoding::kLsbScaleMod4Map) == 8);
static_assert(static_cast<int>(Encoding::kCodes8) == 9);

/// The frame whose header these 24 bytes are; nothing where they are none.
std::optional<Frame> parse_frame(std::span<const std::byte> bytes, std::int64_t offset) {
  const auto marker = get_le<std::uint32_t>(bytes, 0);
  const auto type = get_le<std::uint32_t>(bytes, 4);
  const auto length = get_le<std::uint64_t>(bytes, 8);
  if (marker != kLive && marker != kForgotten) return {};
  if (type < 1 || type > 3 || length > std::uint64_t{1} << 62) return {};
  if (crc32c(bytes.subspan(4, 16)) != get_le<std::uint32_t>(bytes, 20)) return {};
  return Frame{.type = static_cast<FrameType>(type),
               .live = marker == kLive,
               .offset = offset,
               .length = static_cast<std::int64_t>(length),
               .crc = get_le<std::uint32_t>(bytes, 16)};
}

/// Place and layout, 20 bytes; false where they make no sense.
bool parse_layout(std::span<const std::byte> bytes, std::size_t at, Place& place,
                  RowLayout& layout) {
  const std::int64_t layer = get_32(bytes, at);
  const auto site = get_le<std::uint8_t>(bytes, at + 4);
  const auto encoding = get_le<std::uint8_t>(bytes, at + 5);
  const std::int64_t width = get_32(bytes, at + 8);
  const std::int64_t block = get_32(bytes, at + 12);
  const std::int64_t exponents = get_32(bytes, at + 16);
  if (layer >= Schema::kMaxLayers || site > static_cast<int>(Site::kRouter)) return false;
  if (encoding > static_cast<int>(Encoding::kCodes8)) return false;
  if (width > kMaxWidth || block > kMaxWidth || exponents > kMaxWidth) return false;
  place = {Layer{static_cast<std::int32_t>(layer)}, static_cast<Site>(site)};
  layout = {static_cast<Encoding>(encoding), static_cast<std::int32_t>(width),
            static_cast<std::int32_t>(block), static_cast<std::int32_t>(exponents)};
  return layout.bytes() > 0;
}

std::optional<BlockRef> parse_ref(std::span<const std::byte> bytes, std::int64_t directory) {
  BlockRef ref;
  ref.offset = get_le<std::uint64_t>(bytes, 0);
  ref.length = get_le<std::uint64_t>(bytes, 8);
  ref.crc = get_le<std::uint32_t>(bytes, 16);
  const std::int64_t first = get_32(bytes, 40);
  const std::int64_t end = get_32(bytes, 44);
  const std::int64_t rows = get_32(bytes, 48);
  if (!parse_layout(bytes, 20, ref.place, ref.layout)) return {};
  const auto limit = static_cast<std::uint64_t>(directory);
  if (ref.offset < static_cast<std::uint64_t>(kHeaderBytes) || ref.offset > limit) return {};
  if (ref.length > limit - ref.offset) return {};
  if (end > std::int64_t{kMaxPosition} || first >= end || rows < 1 || rows > end - first) return {};
  ref.first = static_cast<std::int32_t>(first);
  ref.end = static_cast<std::int32_t>(end);
  ref.rows = static_cast<std::int32_t>(rows);
  return ref;
}

/// Is `b` the next block after `a` in a directory's order, places apart or positions ascending?
bool follows(const BlockRef& a, const BlockRef& b) {
  const std::pair left(a.place, a.layout.encoding);
  const std::pair right(b.place, b.layout.encoding);
  return left < right || (left == right && a.layout == b.layout && a.end <= b.first);
}

std::optional<StoredSpan> parse_directory(std::span<const std::byte> payload, const Frame& frame) {
  if (payload.size() < kDirectoryHeaderBytes) return {};
  const std::int64_t first = get_32(payload, 8);
  const std::int64_t count = get_32(payload, 12);
  const std::int64_t blocks = get_32(payload, 32);
  if (first + count > std::int64_t{kMaxPosition}) return {};
  if (static_cast<std::int64_t>(payload.size()) !=
      kDirectoryHeaderBytes + blocks * kBlockRefBytes) {
    return {};
  }
  StoredSpan stored = {
      .span = {.id = SpanId{get_le<std::uint64_t>(payload, 0)},
               .first = static_cast<std::int32_t>(first),
               .count = static_cast<std::int32_t>(count),
               .version = {static_cast<std::int64_t>(get_le<std::uint64_t>(payload, 16))},
               .prefix_hash = get_le<std::uint64_t>(payload, 24)},
      .directory = frame.offset,
      .bytes = kFrameBytes + frame.length};
  for (std::int64_t i = 0; i < blocks; ++i) {
    const auto at = static_cast<std::size_t>(kDirectoryHeaderBytes + i * kBlockRefBytes);
    const auto ref = parse_ref(payload.subspan(at, kBlockRefBytes), frame.offset);
    if (!ref || (i > 0 && !follows(stored.blocks.back(), *ref))) return {};
    stored.bytes += kFrameBytes + static_cast<std::int64_t>(ref->length);
    stored.blocks.push_back(*ref);
  }
  return stored;
}

Result<Bytes> read(const File& file, std::int64_t offset, std::int64_t length) {
  Bytes bytes(static_cast<std::size_t>(length));
  if (const Result<void> done = file.read_at(offset, bytes); !done) {
    return tl::unexpected(done.error());
  }
  return bytes;
}

/// Reads a segment from front to back, or by its footer.
class Scanner {
 public:
  Scanner(const File& file, std::int64_t size, Damage& damage)
      : file_(file), size_(size), damage_(damage) {}

  Result<Scan> run() {
    scan_.whole = std::min(size_, kHeaderBytes);
    const Result<bool> finished = by_footer();
    if (!finished) return tl::unexpected(finished.error());
    scan_.finished = *finished;
    if (!*finished) {
      if (const Result<void> done = by_frames(); !done) return tl::unexpected(done.error());
    }
    return std::move(scan_);
  }

 private:
  /// The frame at `offset`, if one is there and the file holds it to its end.
  Result<std::optional<Frame>> frame_at(std::int64_t offset) const {
    if (offset < kHeaderBytes || offset > size_ - kFrameBytes) return std::optional<Frame>();
    const Result<Bytes> bytes = read(file_, offset, kFrameBytes);
    if (!bytes) return tl::unexpected(bytes.error());
    std::optional<Frame> frame = parse_frame(*bytes, offset);
    if (frame && frame->length > size_ - offset - kFrameBytes) frame.reset();
    return frame;
  }

  Result<bool> by_footer() {
    if (size_ < kHeaderBytes + kFrameBytes + kFooterHeaderBytes + kTrailerBytes) return false;
    const Result<Bytes> trailer = read(file_, size_ - kTrailerBytes, kTrailerBytes);
    if (!trailer) return tl::unexpected(trailer.error());
    const auto offset = get_le<std::uint64_t>(*trailer, 0);
    if (get_le<std::uint32_t>(*trailer, 12) != kEndMagic ||
        get_le<std::uint32_t>(*trailer, 8) != crc32c(std::span(*trailer).first(8)) ||
        offset > static_cast<std::uint64_t>(size_)) {
      return false;
    }
    const auto frame = frame_at(static_cast<std::int64_t>(offset));
    if (!frame) return tl::unexpected(frame.error());
    if (!*frame || (*frame)->type != FrameType::kFooter ||
        (*frame)->end() != size_ - kTrailerBytes || (*frame)->length < kFooterHeaderBytes) {
      return false;
    }
    const Result<Bytes> payload = read(file_, (*frame)->offset + kFrameBytes, (*frame)->length);
    if (!payload) return tl::unexpected(payload.error());
    const auto count = get_le<std::uint64_t>(*payload, 0);
    if (crc32c(*payload) != (*frame)->crc ||
        count != (payload->size() - kFooterHeaderBytes) / sizeof(std::uint64_t)) {
      return false;
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(kFooterHeaderBytes) + i * sizeof(std::uint64_t);
      const auto where = get_le<std::uint64_t>(*payload, at);
      if (const Result<void> done = listed(where); !done) return tl::unexpected(done.error());
    }
    scan_.whole = size_;
    return true;
  }

  /// The directory that the footer lists at `where`.
  Result<void> listed(std::uint64_t where) {
    const auto offset = static_cast<std::int64_t>(std::min(where, std::uint64_t{1} << 62));
    const auto frame = frame_at(offset);
    if (!frame) return tl::unexpected(frame.error());
    if (!*frame || (*frame)->type != FrameType::kDirectory) {
      damage_.drop(file_.name(), offset, kFrameBytes, "no directory where the footer lists one");
      return {};
    }
    return directory(**frame);
  }

  /// Takes up the span of a directory frame.
  Result<void> directory(const Frame& frame) {
    if (!frame.live) return {};
    const Result<Bytes> payload = read(file_, frame.offset + kFrameBytes, frame.length);
    if (!payload) return tl::unexpected(payload.error());
    const auto drop = [&](const char* why) {
      damage_.drop(file_.name(), frame.offset, kFrameBytes + frame.length, why);
    };
    if (crc32c(*payload) != frame.crc) {
      drop("directory checksum");
    } else if (std::optional<StoredSpan> stored = parse_directory(*payload, frame)) {
      scan_.spans.push_back(std::move(*stored));
    } else {
      drop("directory makes no sense");
    }
    return {};
  }

  Result<void> by_frames() {
    std::int64_t offset = kHeaderBytes;
    while (offset < size_) {
      const auto frame = frame_at(offset);
      if (!frame) return tl::unexpected(frame.error());
      if (!*frame) {
        const Result<std::int64_t> next = next_frame(offset + 1);
        if (!next) return tl::unexpected(next.error());
        if (*next == size_) {
          damage_.drop(file_.name(), scan_.whole, size_ - scan_.whole, "torn tail");
          return {};
        }
        damage_.drop(file_.name(), offset, *next - offset, "frame header");
        offset = *next;
        continue;
      }
      offset = (*frame)->end();
      if ((*frame)->type != FrameType::kDirectory) continue;
      const std::int64_t before = damage_.bytes;
      if (const Result<void> done = directory(**frame); !done) return done;
      if (damage_.bytes > before) orphans((*frame)->offset);
      scan_.whole = offset;
    }
    orphans(size_);
    return {};
  }

  /// What lies between the last whole span and `end` belongs to none.
  void orphans(std::int64_t end) {
    if (scan_.whole == end) return;
    damage_.drop(file_.name(), scan_.whole, end - scan_.whole, "blocks without a directory");
  }

  /// Where the next good frame begins at or past `offset`; the file's end when there is none.
  Result<std::int64_t> next_frame(std::int64_t offset) const {
    constexpr std::int64_t kChunk = 1 << 16;
    for (; offset <= size_ - kFrameBytes; offset += kChunk) {
      const std::int64_t length = std::min(kChunk + kFrameBytes - 1, size_ - offset);
      const Result<Bytes> chunk = read(file_, offset, length);
      if (!chunk) return tl::unexpected(chunk.error());
      for (std::int64_t i = 0; i + kFrameBytes <= length; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if ((*chunk)[at] != std::byte{kLive & 0xff}) continue;
        const auto frame = parse_frame(std::span(*chunk).subspan(at, kFrameBytes), offset + i);
        if (frame && frame->length <= size_ - frame->offset - kFrameBytes) return frame->offset;
      }
    }
    return size_;
  }

  const File& file_;
  std::int64_t size_;
  Damage& damage_;
  Scan scan_;
};

/// The runs of a block's payload; false where they are not those of `ref`.
bool parse_runs(std::span<const std::byte> payload, const BlockRef& ref, std::vector<Run>& runs) {
  const std::int64_t count = get_32(payload, 28);
  const std::int64_t rows = get_32(payload, 32);
  const std::int64_t expected =
      kBlockHeaderBytes + count * kRunBytes + rows * std::int64_t{ref.layout.bytes()};
  if (count < 1 || rows != ref.rows || static_cast<std::int64_t>(payload.size()) != expected) {
    return false;
  }
  std::int64_t row = 0;
  std::int64_t end = ref.first;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(kBlockHeaderBytes + i * kRunBytes);
    const std::int64_t position = get_32(payload, at);
    const std::int64_t length = get_32(payload, at + 4);
    if (position < end || length < 1 || position + length > ref.end) return false;
    runs.push_back({static_cast<std::int32_t>(position), static_cast<std::int32_t>(length), row});
    row += length;
    end = position + length;
  }
  return row == rows;
}

}  // namespace

void Damage::drop(const std::string& file, std::int64_t offset, std::int64_t count,
                  const char* why) {
  bytes += count;
  lines.push_back(cat({file, ": ", count, " bytes at ", offset, ": ", why}));
}

Result<SegmentHeader> read_header(const File& file) {
  const Result<std::int64_t> size = file.size();
  if (!size) return tl::unexpected(size.error());
  if (*size < kHeaderBytes) return fault(cat({file.name(), ": too short for a segment"}));
  const Result<Bytes> bytes = read(file, 0, kHeaderBytes);
  if (!bytes) return tl::unexpected(bytes.error());
  for (std::size_t i = 0; i < kMagic.size(); ++i) {
    if ((*bytes)[i] != std::byte{kMagic.at(i)}) return fault(cat({file.name(), ": not a segment"}));
  }
  const auto version = get_le<std::uint32_t>(*bytes, 8);
  if (version != kFormatVersion) {
    return fault(cat({file.name(), ": segment version ", version, ", not ", kFormatVersion}));
  }
  if (get_32(*bytes, 12) != kHeaderBytes ||
      crc32c(std::span(*bytes).first(kHeaderBytes - 4)) != get_le<std::uint32_t>(*bytes, 44)) {
    return fault(cat({file.name(), ": header checksum"}));
  }
  return SegmentHeader{.contract = {get_le<std::uint64_t>(*bytes, 16)},
                       .run = get_le<std::uint64_t>(*bytes, 24),
                       .number = get_le<std::uint64_t>(*bytes, 32)};
}

Result<Scan> scan_segment(const File& file, Damage& damage) {
  const Result<std::int64_t> size = file.size();
  if (!size) return tl::unexpected(size.error());
  return Scanner(file, *size, damage).run();
}

tl::expected<Block, BlockFault> read_block(const File& file, SpanId span, const BlockRef& ref) {
  constexpr auto damaged = tl::unexpected(BlockFault::kDamaged);
  const Result<std::int64_t> size = file.size();
  if (!size) return tl::unexpected(BlockFault::kSystem);
  const auto offset = static_cast<std::int64_t>(ref.offset);
  const auto length = static_cast<std::int64_t>(ref.length);
  if (length < kBlockHeaderBytes || length > *size - offset - kFrameBytes) return damaged;
  Result<Bytes> payload = read(file, offset + kFrameBytes, length);
  if (!payload) return tl::unexpected(BlockFault::kSystem);
  if (crc32c(*payload) != ref.crc) return damaged;

  Place place;
  RowLayout layout;
  if (get_le<std::uint64_t>(*payload, 0) != span.value ||
      !parse_layout(*payload, 8, place, layout) || place != ref.place || layout != ref.layout) {
    return damaged;
  }
  Block block;
  if (!parse_runs(*payload, ref, block.runs)) return damaged;
  block.payload = std::move(*payload);
  block.rows = block.payload.data() + kBlockHeaderBytes +
               static_cast<std::ptrdiff_t>(block.runs.size()) * kRunBytes;
  return block;
}

}  // namespace lockstep::store
