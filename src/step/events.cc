#include "step/events.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <span>

#include "base/crc32c.h"
#include "base/text.h"

namespace lockstep::step {
namespace {

// Fields of tensorflow.Event, tensorflow.Summary and tensorflow.SessionLog by their numbers.
constexpr unsigned kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
constexpr unsigned kValue = 1, kTag = 1, kSimpleValue = 2, kStatus = 1, kStart = 1;
constexpr unsigned kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5;

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}
void put_key(std::string& out, unsigned field, unsigned kind) {
  put_varint(out, field << 3 | kind);
}
template <typename T>
void put_fixed(std::string& out, T bits) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(bits >> (8 * i) & 0xff);
}
void put_text(std::string& out, unsigned field, const std::string& text) {
  put_key(out, field, kLengthDelimited);
  put_varint(out, text.size());
  out += text;
}

std::string event(std::int64_t step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::string out;
  put_key(out, kWallTime, kFixed64);
  put_fixed(out, std::bit_cast<std::uint64_t>(now.count()));
  put_key(out, kStep, kVarint);
  put_varint(out, static_cast<std::uint64_t>(step));
  return out;
}

/// CRC32C as TFRecord masks it, so that a checksum of data that holds checksums stays strong.
std::uint32_t masked(const std::string& bytes) {
  const std::uint32_t crc = crc32c(std::as_bytes(std::span(bytes)));
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

}  // namespace

EventFile::EventFile(const std::filesystem::path& folder, std::int64_t first_step) {
  using namespace std::chrono;
  const auto stamp = duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
  // Readers take the files in the order of their names; seconds lead, as TensorBoard's own have it.
  const std::filesystem::path path =
      folder / cat({"events.out.tfevents.", stamp / 1000000, ".",
                    std::to_string(1000000 + stamp % 1000000).substr(1), ".lockstep"});
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
  std::string version = event(0);
  put_text(version, kFileVersion, "brain.Event:2");
  write(version);
  std::string start = event(first_step), status;
  put_key(status, kStatus, kVarint);
  put_varint(status, kStart);
  put_text(start, kSessionLog, status);
  write(start);
}

EventFile::~EventFile() {
  if (file_ >= 0) ::close(file_);
}

void EventFile::append(std::int64_t step, const Metrics& metrics) {
  std::string summary;
  for (const auto& [name, number] : metrics) {
    std::string value;
    put_text(value, kTag, name);
    put_key(value, kSimpleValue, kFixed32);
    put_fixed(value, std::bit_cast<std::uint32_t>(static_cast<float>(number)));
    put_text(summary, kValue, value);
  }
  std::string out = event(step);
  put_text(out, kSummary, summary);
  write(out);
}

void EventFile::write(const std::string& event) {
  if (file_ < 0) return;
  std::string length, frame;
  put_fixed(length, std::uint64_t{event.size()});
  frame = length;
  put_fixed(frame, masked(length));
  frame += event;
  put_fixed(frame, masked(event));
  // A frame that a full disk cut short would hide those after it.
  if (::write(file_, frame.data(), frame.size()) != static_cast<ssize_t>(frame.size())) {
    ::close(file_);
    file_ = -1;
  }
}

}  // namespace lockstep::step
