#include "model/checksum.h"

#include <bit>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/crc32c.h"

namespace lockstep {
namespace {

template <typename T>
std::uint32_t crc_of_rows(const TensorView<const T, 2>& view, std::uint32_t crc) {
  for (std::int64_t row = 0; row < view.shape[0]; ++row) {
    const std::span<const T> values(view.data + row * view.stride[0],
                                    static_cast<std::size_t>(view.shape[1]));
    crc = crc32c(std::as_bytes(values), crc);
  }
  return crc;
}

}  // namespace

std::uint32_t checksum(const TensorView<const Bf16, 2>& value) { return crc_of_rows(value, 0); }

std::uint32_t checksum(const PackedView<const std::uint8_t>& value) {
  std::uint32_t crc = crc_of_rows(value.scales, crc_of_rows(value.codes, 0));
  crc = crc_of_rows(value.mantissas, crc);
  return checksum_with_global(crc, value.global.empty() ? 1.0f : value.global.data[0]);
}

std::uint32_t checksum_with_global(std::uint32_t crc, float global) {
  std::vector<std::byte> bytes;
  put_le(bytes, std::bit_cast<std::uint32_t>(global));
  return crc32c(bytes, crc);
}

}  // namespace lockstep
