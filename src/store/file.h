#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "base/error.h"

namespace lockstep::store {

/// An open file. Reads and writes are whole or a fault that names the file and the reason.
/// Thread-safe, for offsets are arguments.
class File {
 public:
  /// Makes a new one; there must be none of that name.
  static Result<File> create(const std::filesystem::path& path);
  static Result<File> open(const std::filesystem::path& path);
  static Result<File> open_to_read(const std::filesystem::path& path);
  /// Takes over a descriptor.
  File(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  Result<std::int64_t> size() const;
  Result<void> read_at(std::int64_t offset, std::span<std::byte> out) const;
  Result<void> write_at(std::int64_t offset, std::span<const std::byte> bytes) const;
  Result<void> truncate(std::int64_t size) const;
  Result<void> sync() const;

  /// Takes the file's advisory lock, after waiting for it; false: another process holds it still.
  bool lock() const;

  const std::string& name() const { return name_; }
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
  std::string name_;
};

}  // namespace lockstep::store
