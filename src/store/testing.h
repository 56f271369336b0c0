/// What the tests of this folder share: rows that say who they are, so that a wrong one shows.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/folder_testing.h"
#include "base/philox.h"
#include "record/trace.h"
#include "store/store.h"

namespace lockstep::store::testing {

inline constexpr ContractId kContract{0x1122334455667788};
inline constexpr RowLayout kLsb{Encoding::kLsb, 64, 16, 1};        // 13 bytes
inline constexpr RowLayout kKv{Encoding::kLsb, 32, 16, 0};         // 6 bytes
inline constexpr RowLayout kCodes{Encoding::kCodes, 64, 16, 1};    // 37 bytes
inline constexpr RowLayout kRoutes{Encoding::kExperts8, 2, 1, 0};  // 2 bytes
inline constexpr Place kW13{Layer{1}, Site::kW13In};
inline constexpr Place kK{Layer{1}, Site::kK};
inline constexpr Place kRouter{Layer{0}, Site::kRouter};

using Bytes = std::vector<std::byte>;

/// The row of a token at a place: random bytes that follow from its name, and `salt`.
inline Bytes row_of(TokenKey key, Place place, RowLayout layout, std::uint32_t salt = 0) {
  Bytes row(static_cast<std::size_t>(layout.bytes()));
  for (std::size_t i = 0; i < row.size(); ++i) {
    const auto where =
        static_cast<std::uint32_t>(place.layer.value * 64 + static_cast<int>(place.site) * 8 +
                                   static_cast<int>(layout.encoding));
    row[i] = static_cast<std::byte>(philox(
        key.span.value,
        {static_cast<std::uint32_t>(key.position), where, static_cast<std::uint32_t>(i), salt})[0]);
  }
  return row;
}

inline Bytes rows_of(std::span<const TokenKey> tokens, Place place, RowLayout layout,
                     std::uint32_t salt = 0) {
  Bytes rows;
  for (const TokenKey& key : tokens) {
    const Bytes row = row_of(key, place, layout, salt);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

inline std::vector<TokenKey> positions(SpanId span, int first, int end) {
  std::vector<TokenKey> tokens;
  for (int p = first; p < end; ++p) tokens.push_back({span, p});
  return tokens;
}

inline void append(TraceSink& sink, std::span<const TokenKey> tokens, Place place, RowLayout layout,
                   std::uint32_t salt = 0) {
  sink.append(tokens, {place, layout, rows_of(tokens, place, layout, salt)});
}

/// A whole span: W13, K and routes of positions first..end-1, full codes of every seventh.
inline void write_span(TraceSink& sink, SpanId id, int first, int end, std::uint32_t salt = 0,
                       WeightVersion version = {1}) {
  sink.open({.id = id, .first = first, .version = version, .prefix_hash = id.value * 31},
            kContract);
  const std::vector<TokenKey> tokens = positions(id, first, end);
  append(sink, tokens, kW13, kLsb, salt);
  append(sink, tokens, kRouter, kRoutes, salt);
  for (const TokenKey& key : tokens) {
    if (key.position % 7 == 0) append(sink, std::span(&key, 1), kW13, kCodes, salt);
  }
  append(sink, tokens, kK, kKv, salt);
  sink.seal(id);
}

struct Got {
  Bytes bytes;
  std::vector<std::uint8_t> present;
  std::size_t count = 0;
};

inline Got read(const TraceSource& source, std::span<const TokenKey> tokens, Place place,
                RowLayout layout, ContractId contract = kContract) {
  Got got{Bytes(tokens.size() * static_cast<std::size_t>(layout.bytes()), std::byte{0xa5}),
          std::vector<std::uint8_t>(tokens.size(), 7)};
  got.count = source.read(tokens, contract, {place, layout, got.bytes}, got.present);
  return got;
}

/// Is each row either its own or absent and zero? Counts those that are there; -1: one is wrong.
inline int own_rows(const Got& got, std::span<const TokenKey> tokens, Place place, RowLayout layout,
                    std::uint32_t salt = 0) {
  int count = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto size = static_cast<std::size_t>(layout.bytes());
    const auto first = got.bytes.begin() + static_cast<std::ptrdiff_t>(i * size);
    const Bytes row(first, first + static_cast<std::ptrdiff_t>(size));
    if (got.present[i] > 1) return -1;
    if (row != (got.present[i] != 0 ? row_of(tokens[i], place, layout, salt) : Bytes(size))) {
      return -1;
    }
    count += got.present[i];
  }
  return got.count == static_cast<std::size_t>(count) ? count : -1;
}

/// Reads all that write_span wrote. How many rows are there; -1: one is wrong.
inline int own_span(const TraceSource& source, SpanId id, int first, int end,
                    std::uint32_t salt = 0) {
  const std::vector<TokenKey> tokens = positions(id, first, end);
  int sum = 0;
  for (const auto& [place, layout] :
       {std::pair(kW13, kLsb), {kRouter, kRoutes}, {kW13, kCodes}, {kK, kKv}}) {
    const int count = own_rows(read(source, tokens, place, layout), tokens, place, layout, salt);
    if (count < 0) return -1;
    sum += count;
  }
  return sum;
}

/// How many rows write_span writes.
inline int rows_in_span(int first, int end) {
  int audits = 0;
  for (int p = first; p < end; ++p) audits += p % 7 == 0;
  return 3 * (end - first) + audits;
}

/// What an Error says that is thrown; "": none is.
inline std::string thrown(const std::function<void()>& what) {
  try {
    what();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// A folder of the test's own, gone with it.
class Folder {
 public:
  const std::filesystem::path& path() const { return folder_.path(); }

  std::vector<std::filesystem::path> segments() const {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(path())) {
      if (entry.path().extension() == ".segment") found.push_back(entry.path());
    }
    return found;
  }

 private:
  /// In memory where that can be: some tests open thousands of folders.
  static std::filesystem::path place() {
    const std::filesystem::path memory = "/dev/shm";
    const bool there = ::access(memory.c_str(), W_OK) == 0;
    return there ? memory : std::filesystem::temp_directory_path();
  }

  TestFolder folder_{place()};
};

}  // namespace lockstep::store::testing
