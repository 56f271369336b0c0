#include "store/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "base/wait.h"

namespace lockstep::store {
namespace {

tl::unexpected<Fault> failed(const char* doing, const std::string& name) {
  return fault(cat({doing, " ", name, ": ", std::generic_category().message(errno)}));
}

}  // namespace

Result<File> File::create(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (descriptor < 0) return failed("creating", path.string());
  return File(descriptor, path.string());
}

Result<File> File::open(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return failed("opening", path.string());
  return File(descriptor, path.string());
}

Result<File> File::open_to_read(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return failed("opening", path.string());
  return File(descriptor, path.string());
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), name_(std::move(other.name_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(name_, other.name_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Result<std::int64_t> File::size() const {
  struct stat status = {};
  if (::fstat(descriptor_, &status) != 0) return failed("measuring", name_);
  return std::int64_t{status.st_size};
}

Result<void> File::read_at(std::int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(descriptor_, out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("reading", name_);
    if (n == 0) return fault(cat({"reading ", name_, ": it ends at byte ", offset}));
    offset += n;
    out = out.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

Result<void> File::write_at(std::int64_t offset, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(descriptor_, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("writing", name_);
    offset += n;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

Result<void> File::truncate(std::int64_t size) const {
  if (::ftruncate(descriptor_, size) != 0) return failed("cutting", name_);
  return {};
}

Result<void> File::sync() const {
  if (::fdatasync(descriptor_) != 0) return failed("syncing", name_);
  return {};
}

bool File::lock() const { return wait_for_lock(descriptor_, name_); }

}  // namespace lockstep::store
