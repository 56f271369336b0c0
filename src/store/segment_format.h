/// What writer and reader of a segment share. See docs/formats/segment.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/id.h"

namespace lockstep::store {

inline constexpr std::array<std::uint8_t, 8> kMagic = {0x89, 'L', 'S', 'S', '\r', '\n', 0x1a, '\n'};
inline constexpr std::uint32_t kFormatVersion = 1;
inline constexpr std::int64_t kHeaderBytes = 48;

// A frame: marker, type, payload length (64 bits), CRC of the payload, CRC of the three before.
inline constexpr std::int64_t kFrameBytes = 24;
inline constexpr std::uint32_t kLive = 0x5246534c;       // "LSFR"
inline constexpr std::uint32_t kForgotten = 0x5846534c;  // "LSFX": the span was given up

enum class FrameType : std::uint32_t {
  kBlock = 1,      // rows of one place
  kDirectory = 2,  // the blocks of one span, after them: with it the span is whole
  kFooter = 3,     // where the directories are
};

inline constexpr std::int64_t kBlockHeaderBytes = 36;      // before the runs
inline constexpr std::int64_t kRunBytes = 8;               // position and count
inline constexpr std::int64_t kDirectoryHeaderBytes = 36;  // before the block references
inline constexpr std::int64_t kBlockRefBytes = 52;
inline constexpr std::int64_t kFooterHeaderBytes = 8;   // before the offsets
inline constexpr std::int64_t kTrailerBytes = 16;       // the last bytes of a finished segment
inline constexpr std::uint32_t kEndMagic = 0x4553534c;  // "LSSE"

/// A block's rows are about as many bytes; a longer column becomes several.
inline constexpr std::int64_t kBlockTarget = std::int64_t{1} << 20;

// What a reader believes at most.
inline constexpr std::uint32_t kMaxWidth = std::uint32_t{1} << 24;
inline constexpr std::uint32_t kMaxPosition = std::uint32_t{1} << 30;

struct SegmentHeader {
  ContractId contract;
  std::uint64_t run = 0;     // the run that wrote it
  std::uint64_t number = 0;  // ascending within a folder
};

}  // namespace lockstep::store
