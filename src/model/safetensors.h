/// The safetensors format (docs/formats/checkpoint.md): tensors by name in one file, read through
/// a mapping and trusted in nothing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "model/file.h"

namespace lockstep {

enum class Dtype : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64,
};

std::string_view dtype_name(Dtype dtype);  // "BF16"
std::int64_t dtype_size(Dtype dtype);      // in bytes

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape{};
  std::uint64_t first = 0, end = 0;  // its bytes, counted from the file's first
};

/// "[64, 128]".
std::string shape_text(std::span<const std::int64_t> shape);

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors{};  // in the order of their bytes
  std::map<std::string, std::string> metadata{};
};

/// What the header at the front of a file says, all of it checked: its length against the file's,
/// each dtype, shape, size and offset; no name twice, no overlap, no gap, nothing beyond the end.
/// `what` names the file in messages.
Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> file,
                                            const std::string& what);

/// A file, open. Copies share the mapping; bytes live as long as one of them.
class Safetensors {
 public:
  static Result<Safetensors> open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const TensorInfo* find(std::string_view name) const;  // nullptr where there is none

  /// Little-endian, row-major; not always aligned.
  std::span<const std::byte> bytes(const TensorInfo& tensor) const;

 private:
  std::filesystem::path path_;
  MappedFile file_;
  SafetensorsHeader header_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
};

/// Writes a file whose tensors are known before their values. The file is there after commit, or
/// not at all.
class SafetensorsWriter {
 public:
  /// Of each tensor name, dtype and shape count; bytes lie in this order. Throws Error.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata = {});

  /// The values of a tensor, in any order of tensors, once each. Throws Error.
  void write(std::string_view name, std::span<const std::byte> bytes);
  /// Throws Error where a tensor has no values yet.
  void commit();

 private:
  struct Plan;
  explicit SafetensorsWriter(const std::filesystem::path& path, Plan plan);

  std::string what_;
  std::map<std::string, TensorInfo, std::less<>> open_;  // not yet written
  FileInMaking file_;
};

}  // namespace lockstep
