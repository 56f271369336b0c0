/// Files as weights need them: mapped to read, or of a known size to fill, whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

#include "base/error.h"

namespace lockstep {

/// A file's bytes, mapped read-only. Copies share the mapping.
class MappedFile {
 public:
  static Result<MappedFile> open(const std::filesystem::path& path);

  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  std::shared_ptr<const std::byte> data_;
  std::size_t size_ = 0;
};

/// Where a file that a user names is written.
struct Destination {
  std::filesystem::path place;  // what `path` leads to: a link stays one
  std::filesystem::path part;   // beside it, to be renamed when whole; `place` for a pipe, a
                                // terminal or /dev/null, which is written as it is
  bool in_place() const { return part == place; }
};

/// Makes its folder. Throws Error, before anything is computed for it, where `path` is a folder or
/// cannot be written.
Destination destination(const std::filesystem::path& path);

/// Writes `path` by way of `path`.part; until commit there is no `path`, or the old one.
class FileInMaking {
 public:
  /// Takes the room for `size` bytes at once: a full disk is known before anything is written.
  /// Throws Error.
  FileInMaking(const std::filesystem::path& path, std::uint64_t size);
  FileInMaking(FileInMaking&& other) noexcept;
  FileInMaking& operator=(FileInMaking&&) = delete;
  ~FileInMaking();

  /// Requires offset + bytes.size() <= size.
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  /// On the disk and under its name. Throws Error.
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path part_;
  int file_ = -1;
};

/// What a file holds is on the disk. Throws Error.
void sync_file(const std::filesystem::path& file);

/// What a folder's entries are called is on the disk. Throws Error.
void sync_folder(const std::filesystem::path& folder);

}  // namespace lockstep
