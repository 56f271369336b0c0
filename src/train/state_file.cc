#include "train/state_file.h"

#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/error.h"

namespace lockstep::train {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie");

constexpr char kMagic[8] = {'L', 'O', 'C', 'K', 'T', 'R', 'N', '1'};
constexpr std::size_t kHeader = 40;
constexpr int kSections = 3;  // masters, first moments, second moments

/// Tells models apart: the shapes of all weights, in order.
std::uint32_t shapes_crc(const Parameters& parameters) {
  std::vector<std::byte> bytes;
  for (const Slot& slot : parameters.slots()) {
    put_le(bytes, static_cast<std::uint32_t>(slot.id.role));
    put_le(bytes, static_cast<std::uint32_t>(slot.id.layer.value));
    put_le(bytes, static_cast<std::uint32_t>(slot.id.expert.value));
    put_le(bytes, static_cast<std::uint64_t>(slot.rows));
    put_le(bytes, static_cast<std::uint64_t>(slot.cols));
  }
  return crc32c(bytes);
}

std::uint64_t numbers_in(const Parameters& parameters) {
  std::uint64_t count = 0;
  for (const Slot& slot : parameters.slots()) count += slot.count();
  return count;
}

const Floats& section(const Parameters& parameters, int i) {
  return i == 0 ? parameters.masters : i == 1 ? parameters.moment1 : parameters.moment2;
}

std::vector<std::byte> header(const Parameters& parameters, std::int64_t updates) {
  std::vector<std::byte> bytes;
  for (const char c : kMagic) bytes.push_back(static_cast<std::byte>(c));
  put_le(bytes, std::uint32_t{1});  // version
  put_le(bytes, shapes_crc(parameters));
  put_le(bytes, static_cast<std::uint64_t>(updates));
  put_le(bytes, numbers_in(parameters));
  put_le(bytes, std::uint32_t{0});  // reserved
  put_le(bytes, crc32c(bytes));
  return bytes;
}

void write(std::ofstream& out, std::span<const std::byte> bytes) {
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
}

void write_section(std::ofstream& out, const Parameters& parameters, const Floats& numbers,
                   Stream stream) {
  std::uint32_t crc = 0;
  std::vector<float> room;
  for (const Slot& slot : parameters.slots()) {
    const auto bytes = std::as_bytes(parameters.read(numbers, slot, room, stream));
    crc = crc32c(bytes, crc);
    write(out, bytes);
  }
  std::vector<std::byte> tail;
  put_le(tail, crc);
  write(out, tail);
}

std::vector<std::byte> contents(const std::filesystem::path& file) {
  std::error_code failed;
  const std::uintmax_t size = std::filesystem::file_size(file, failed);
  if (failed) throw Error("no trainer state at " + file.string() + ": " + failed.message());
  std::ifstream in(file, std::ios::binary);
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!in) throw Error("cannot read " + file.string());
  return bytes;
}

void check_header(const std::string& name, std::span<const std::byte> bytes,
                  const Parameters& parameters) {
  if (bytes.size() < kHeader || std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0 ||
      crc32c(bytes.first(kHeader - 4)) != get_le<std::uint32_t>(bytes, kHeader - 4)) {
    throw Error(name + " is not a trainer state, or its header is damaged");
  }
  const auto version = get_le<std::uint32_t>(bytes, 8);
  if (version != 1) {
    throw Error(name + " has version " + std::to_string(version) + "; this program reads 1");
  }
  if (get_le<std::uint32_t>(bytes, 12) != shapes_crc(parameters) ||
      get_le<std::uint64_t>(bytes, 24) != numbers_in(parameters)) {
    throw Error(name + " is of another model: its weights have other names or shapes");
  }
}

}  // namespace

void write_state(const std::filesystem::path& file, const Parameters& parameters,
                 std::int64_t updates, Stream stream) {
  const std::filesystem::path beside = file.string() + ".part";
  {
    std::ofstream out(beside, std::ios::binary | std::ios::trunc);
    write(out, header(parameters, updates));
    for (int i = 0; i < kSections; ++i)
      write_section(out, parameters, section(parameters, i), stream);
    out.flush();
    if (!out) {
      out.close();
      std::error_code ignored;
      std::filesystem::remove(beside, ignored);
      throw Error("cannot write " + file.string() +
                  ": is there room on the disk, and may you write there?");
    }
  }
  std::filesystem::rename(beside, file);
}

std::int64_t read_state(const std::filesystem::path& file, Parameters& parameters, Stream stream) {
  const std::vector<std::byte> bytes = contents(file);
  const std::string name = file.string();
  check_header(name, bytes, parameters);
  const std::size_t numbers = static_cast<std::size_t>(numbers_in(parameters)) * sizeof(float);
  const std::size_t expected = kHeader + kSections * (numbers + 4);
  if (bytes.size() != expected) {
    throw Error(name + " has " + std::to_string(bytes.size()) + " bytes, its header promises " +
                std::to_string(expected) + ": it was cut off");
  }
  const auto part = [&](int i) {
    return std::span(bytes).subspan(kHeader + static_cast<std::size_t>(i) * (numbers + 4), numbers);
  };
  for (int i = 0; i < kSections; ++i) {
    const std::size_t end = kHeader + static_cast<std::size_t>(i + 1) * (numbers + 4) - 4;
    if (crc32c(part(i)) != get_le<std::uint32_t>(bytes, end)) {
      throw Error(name + " is damaged: the checksum of section " + std::to_string(i) + " is wrong");
    }
  }
  for (int i = 0; i < kSections; ++i) {
    std::size_t at = 0;
    std::vector<float> values;
    for (const Slot& slot : parameters.slots()) {
      values.resize(slot.count());
      const std::size_t size = values.size() * sizeof(float);
      std::memcpy(values.data(), part(i).data() + at, size);
      parameters.write(section(parameters, i), slot, values.data(), {}, stream);
      at += size;
    }
  }
  return static_cast<std::int64_t>(get_le<std::uint64_t>(bytes, 16));
}

}  // namespace lockstep::train
