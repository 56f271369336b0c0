#include "model/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/folder.h"
#include "base/text.h"

namespace lockstep {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* doing, int why) {
  throw Error(cat({path.string(), ": cannot ", doing, ": ", std::strerror(why)}));
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  // Not blocking: what turns out to be a pipe without a writer is refused, not waited for.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return fault(cat({path.string(), ": cannot open: ", std::strerror(errno)}));
  struct stat status {};
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(file);
    return fault(cat({path.string(), ": is no regular file"}));
  }
  MappedFile mapped;
  mapped.size_ = static_cast<std::size_t>(status.st_size);
  if (mapped.size_ > 0) {
    void* data = ::mmap(nullptr, mapped.size_, PROT_READ, MAP_PRIVATE, file, 0);
    const int why = errno;
    ::close(file);
    if (data == MAP_FAILED) {
      return fault(cat({path.string(), ": cannot map: ", std::strerror(why)}));
    }
    mapped.data_ = {static_cast<const std::byte*>(data),
                    [size = mapped.size_](const std::byte* bytes) {
                      ::munmap(const_cast<std::byte*>(bytes), size);
                    }};
  } else {
    ::close(file);
  }
  return mapped;
}

Destination destination(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  const bool there = std::filesystem::exists(status);
  if (!there && status.type() != std::filesystem::file_type::not_found) {
    throw Error(cat({path.string(), ": cannot write: ", error.message()}));
  }
  if (std::filesystem::is_directory(status)) {
    throw Usage(cat({path.string(), ": cannot write: it is a folder; name a file"}));
  }
  const std::string text = path.string();
  const bool special = text.starts_with("/dev/") || text.starts_with("/proc/");  // /dev/stdout
  if (there && (special || !std::filesystem::is_regular_file(status))) return {path, path};

  Destination found{there ? std::filesystem::canonical(path) : path, {}};
  const std::filesystem::path parent = found.place.parent_path();
  const std::filesystem::path folder = parent.empty() ? "." : parent;
  make_folder(folder, cat({text, ": its folder"}), "name another file");
  if (::access(folder.c_str(), W_OK) != 0) {
    if (errno == EROFS) fail(path, "write", errno);
    throw Usage(cat({text, ": cannot be written: ", std::strerror(errno), "; name another file"}));
  }
  found.part = found.place.string() + ".part";
  return found;
}

FileInMaking::FileInMaking(const std::filesystem::path& path, std::uint64_t size) {
  const Destination to = destination(path);
  if (to.in_place()) throw Error(cat({path.string(), ": is no regular file; name one"}));
  path_ = to.place;
  part_ = to.part;
  file_ = ::open(part_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) fail(path_, "write", errno);
  const int why = size == 0 ? 0 : ::posix_fallocate(file_, 0, static_cast<off_t>(size));
  if (why != 0) {
    ::close(file_);
    ::unlink(part_.c_str());
    throw Error(cat({path_.string(), ": no room for ", size, " bytes: ", std::strerror(why)}));
  }
}

FileInMaking::FileInMaking(FileInMaking&& other) noexcept
    : path_(std::move(other.path_)),
      part_(std::move(other.part_)),
      file_(std::exchange(other.file_, -1)) {}

FileInMaking::~FileInMaking() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(part_.c_str());
}

void FileInMaking::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ::ssize_t written =
        ::pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(path_, "write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void FileInMaking::commit() {
  if (::fsync(file_) != 0) fail(path_, "write", errno);
  if (::close(std::exchange(file_, -1)) != 0) fail(path_, "write", errno);
  if (::rename(part_.c_str(), path_.c_str()) != 0) fail(path_, "rename to", errno);
}

namespace {

void sync(const std::filesystem::path& path, int flags) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
  if (file < 0) fail(path, "open", errno);
  const int why = ::fsync(file) == 0 ? 0 : errno;
  ::close(file);
  if (why != 0 && why != EINVAL) fail(path, "sync", why);  // some file systems have no such sync
}

}  // namespace

void sync_file(const std::filesystem::path& file) { sync(file, 0); }

void sync_folder(const std::filesystem::path& folder) { sync(folder, O_DIRECTORY); }

}  // namespace lockstep
