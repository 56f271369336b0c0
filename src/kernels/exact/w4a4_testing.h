/// For tests: codes that own their bytes, on the host and on a device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/philox.h"
#include "device/memory.h"
#include "kernels/exact/w4a4.h"
#include "numerics/exponent.h"

namespace lockstep::kernels {

inline std::uint32_t word(std::uint32_t seed, std::uint32_t index) {
  return philox(seed, philox_counter(index, 0, 0))[0];
}

/// Codes and scales on the host.
struct Codes {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;
  std::vector<float> global;

  PackedView<const std::uint8_t> view() const {
    return {{codes.data(), {rows, cols / 2}, {cols / 2, 1}},
            {scales.data(), {rows, cols / 16}, {cols / 16, 1}},
            {global.data(), {rows}, {1}}};
  }
};

/// Any code, any scale byte in [least, 0x7E], one exponent in [-limit, limit] a row or for all.
inline Codes random_codes(std::int64_t rows, std::int64_t cols, std::uint32_t seed, int limit,
                          bool one, std::uint32_t least = 0) {
  Codes c{rows, cols, {}, {}, {}};
  c.codes.resize(static_cast<std::size_t>(rows * cols / 2));
  c.scales.resize(static_cast<std::size_t>(rows * cols / 16));
  c.global.resize(static_cast<std::size_t>(rows));
  std::uint32_t i = 0;
  for (std::size_t at = 0; at < c.codes.size(); at += 4) {
    const std::uint32_t bits = word(seed, i++);
    std::memcpy(&c.codes[at], &bits, std::min<std::size_t>(4, c.codes.size() - at));
  }
  for (auto& s : c.scales) {
    s = static_cast<std::uint8_t>(least + word(seed, i++) % (0x7F - least));
  }
  for (auto& g : c.global) {
    g = power_of_two(static_cast<int>(word(seed, i) % static_cast<unsigned>(2 * limit + 1)) -
                     limit);
    if (!one) ++i;
  }
  return c;
}

/// The same on a device.
struct OnDevice {
  OnDevice(const Codes& c, Device device)
      : codes(to_device(c.codes, device)),
        scales(to_device(c.scales, device)),
        global(to_device(c.global, device)),
        view{{codes.as<const std::uint8_t>(), {c.rows, c.cols / 2}, {c.cols / 2, 1}, device},
             {scales.as<const std::uint8_t>(), {c.rows, c.cols / 16}, {c.cols / 16, 1}, device},
             {global.as<const float>(), {c.rows}, {1}, device}} {}
  Buffer codes, scales, global;
  PackedView<const std::uint8_t> view;
};

struct Experts {
  Experts(const std::vector<Codes>& w, Device device)
      : bytes(device, static_cast<std::int64_t>(w.size()) *
                          W4a4Weights::expert_bytes(static_cast<std::int32_t>(w[0].rows),
                                                    static_cast<std::int32_t>(w[0].cols))) {
    fill_bytes(bytes.as<void>(), device, 0, bytes.bytes());
    view = {bytes.as<std::byte>(), static_cast<std::int32_t>(w.size()),
            static_cast<std::int32_t>(w[0].rows), static_cast<std::int32_t>(w[0].cols), device};
    for (std::size_t e = 0; e < w.size(); ++e) {
      const OnDevice rows(w[e], device);
      w4a4_fill(view, static_cast<std::int32_t>(e), 0, rows.view);
      synchronize(device);
    }
  }
  Buffer bytes;
  W4a4Weights view;
};

inline TensorView<const std::int32_t, 1> index_view(const Buffer& buffer) {
  return {buffer.as<const std::int32_t>(), {buffer.bytes() / 4}, {1}, buffer.device()};
}

}  // namespace lockstep::kernels
