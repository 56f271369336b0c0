// Scans any bytes as a segment and reads every block that they claim to hold: once as they are,
// and once with their checksums put right, so that what lies behind those is reached too.
#include <sys/mman.h>

#include <cstdlib>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "store/segment.h"

namespace lockstep::store {
namespace {

using Bytes = std::vector<std::byte>;

void set_32(Bytes& bytes, std::size_t at, std::uint32_t value) {
  for (std::size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<std::byte>(value >> 8 * i & 0xff);
}

/// Payloads in the order in which they lie, frame headers, the header, the trailer. Block
/// checksums that stand in directories are put right in the same pass, for blocks come first.
void fix_checksums(Bytes& bytes) {
  constexpr auto kFrame = static_cast<std::size_t>(kFrameBytes);
  constexpr auto kRef = static_cast<std::size_t>(kBlockRefBytes);
  if (bytes.size() < kHeaderBytes) return;
  set_32(bytes, 44, crc32c(std::span(bytes).first(44)));
  std::size_t at = kHeaderBytes;
  while (at + kFrame <= bytes.size()) {
    const std::uint64_t length = get_le<std::uint64_t>(bytes, at + 8);
    if (length > bytes.size() - at - kFrame) break;
    const std::size_t end = at + kFrame + static_cast<std::size_t>(length);
    if (get_le<std::uint32_t>(bytes, at + 4) == static_cast<std::uint32_t>(FrameType::kDirectory)) {
      for (std::size_t ref = at + kFrame + kDirectoryHeaderBytes; ref + kRef <= end; ref += kRef) {
        const std::uint64_t offset = get_le<std::uint64_t>(bytes, ref);
        const std::uint64_t size = get_le<std::uint64_t>(bytes, ref + 8);
        if (offset >= at || size > at - offset || offset + kFrame + size > bytes.size()) continue;
        set_32(bytes, ref + 16, crc32c(std::span(bytes).subspan(offset + kFrame, size)));
      }
    }
    set_32(bytes, at + 16, crc32c(std::span(bytes).subspan(at + kFrame, length)));
    set_32(bytes, at + 20, crc32c(std::span(bytes).subspan(at + 4, 16)));
    at = end;
  }
  const std::size_t trailer = bytes.size() - kTrailerBytes;
  if (trailer >= kHeaderBytes) {
    set_32(bytes, trailer + 8, crc32c(std::span(bytes).subspan(trailer, 8)));
  }
}

void require(bool what) {
  if (!what) std::abort();
}

void read_all(const Bytes& bytes) {
  static const int descriptor = ::memfd_create("segment", MFD_CLOEXEC);
  static const File file(descriptor, "segment");
  require(file.truncate(0).has_value() && file.write_at(0, bytes).has_value());
  if (!read_header(file)) return;
  Damage damage;
  const Result<Scan> scan = scan_segment(file, damage);
  require(scan.has_value());
  require(scan->whole <= static_cast<std::int64_t>(bytes.size()));
  for (const StoredSpan& stored : scan->spans) {
    for (const BlockRef& ref : stored.blocks) {
      const auto block = read_block(file, stored.span.id, ref);
      if (!block) continue;
      const auto positions = static_cast<std::size_t>(ref.end - ref.first);
      if (positions > 1 << 16) continue;
      const std::int32_t row = ref.layout.bytes();
      Bytes out(positions * static_cast<std::size_t>(row));
      std::vector<std::uint8_t> present(positions);
      const std::size_t found = block->copy(row, ref.first, out.data(), present);
      require(found == static_cast<std::size_t>(ref.rows));
    }
  }
}

}  // namespace
}  // namespace lockstep::store

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::store;
  const std::span input(reinterpret_cast<const std::byte*>(data), size);
  Bytes bytes(input.begin(), input.end());
  read_all(bytes);
  fix_checksums(bytes);
  read_all(bytes);
  return 0;
}
