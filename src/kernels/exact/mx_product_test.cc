#include "kernels/exact/mx_product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "device/testing.h"
#include "numerics/e2m1.h"

namespace lockstep::kernels {
namespace {

struct Packed {
  std::int64_t rows;
  std::int64_t cols;
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;

  /// Any codes; scale bytes around `middle`, `spread` wide; some blocks all zero under byte 0.
  Packed(std::int64_t r, std::int64_t c, std::uint32_t seed, int middle, int spread)
      : rows(r),
        cols(c),
        codes(static_cast<std::size_t>(r * c / 2)),
        scales(static_cast<std::size_t>(r * c / 32)) {
    std::uint64_t i = 0;
    const auto next = [&] { return philox(seed, philox_counter(i++, 0, 0))[0]; };
    for (auto& code : codes) code = static_cast<std::uint8_t>(next());
    for (auto& s : scales) {
      s = static_cast<std::uint8_t>(std::clamp(
          middle + static_cast<int>(next() % static_cast<unsigned>(2 * spread + 1)) - spread, 0,
          252));
    }
    for (std::size_t b = 0; b < scales.size(); b += 7) {
      scales[b] = 0;
      std::fill_n(codes.begin() + static_cast<std::ptrdiff_t>(b * 16), 16, std::uint8_t{0});
    }
  }
  PackedView<const std::uint8_t> view() const {
    return {{codes.data(), {rows, cols / 2}, {cols / 2, 1}},
            {scales.data(), {rows, cols / 32}, {cols / 32, 1}},
            {}};
  }
  int half(std::int64_t r, std::int64_t k) const {
    const auto i = static_cast<std::size_t>(r * cols + k);
    return half_units(
        static_cast<E2m1>(static_cast<std::uint8_t>(codes[i / 2] >> (i % 2 * 4) & 15)));
  }
  int exponent(std::int64_t r, std::int64_t b) const {
    return scales[static_cast<std::size_t>(r * cols / 32 + b)] - 127;
  }
};

/// The product of mx_product.h in long double, which holds every step exactly.
float oracle(const Packed& a, std::int64_t r, const Packed& w, std::int64_t o) {
  const auto anchor_of = [](const Packed& p, std::int64_t row) {
    int most = -100000;
    for (std::int64_t k = 0; k < p.cols; ++k) {
      if (p.half(row, k) != 0) most = std::max(most, p.exponent(row, k / 32));
    }
    return most;
  };
  const int anchor = anchor_of(a, r) + anchor_of(w, o);
  if (anchor < -50000) return 0.0f;
  long double sum = 0;
  for (std::int64_t b = 0; b < a.cols / 32; ++b) {
    int dot = 0;
    for (std::int64_t k = b * 32; k < b * 32 + 32; ++k) dot += a.half(r, k) * w.half(o, k);
    // rintl rounds to nearest even.
    sum += std::rint(std::ldexp(static_cast<long double>(dot),
                                a.exponent(r, b) + w.exponent(o, b) - anchor + 40));
  }
  return std::ldexp(static_cast<float>(sum), anchor - 42);
}

/// Packed rows on a device.
struct There {
  Buffer codes, scales;
  PackedView<const std::uint8_t> view;

  There(const Packed& from, Device device)
      : codes(to_device(from.codes, device)), scales(to_device(from.scales, device)) {
    view = from.view();
    view.codes.data = codes.as<const std::uint8_t>();
    view.scales.data = scales.as<const std::uint8_t>();
    view.codes.device = view.scales.device = device;
  }
};

std::vector<float> product(const Packed& a, const Packed& w, Device device = {}) {
  const There x(a, device), y(w, device);
  const Buffer out =
      to_device(std::vector<float>(static_cast<std::size_t>(a.rows * w.rows), -7.0f), device);
  MxProductArgs args;
  args.a = x.view;
  args.w = y.view;
  args.out = {out.as<float>(), {a.rows, w.rows}, {w.rows, 1}, device};
  mx_product(args);
  return to_host<float>(out);
}

class MxProductOn : public testing::TestWithParam<Device> {};

INSTANTIATE_TEST_SUITE_P(Devices, MxProductOn, testing::ValuesIn(devices()), name_of_device);

std::uint32_t bits(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

TEST_P(MxProductOn, EqualsTheAnchorRule) {
  // Scales that agree, that differ by more than the 40 bits kept, and at both ends of the range.
  for (const auto& [middle, spread] : {std::pair{127, 3}, std::pair{127, 40}, std::pair{30, 60},
                                       std::pair{126, 126}, std::pair{240, 12}}) {
    const Packed a(7, 160, 1, middle, spread);
    const Packed w(37, 160, 2, middle, spread);
    const std::vector<float> y = product(a, w, GetParam());
    for (std::int64_t r = 0; r < 7; ++r) {
      for (std::int64_t o = 0; o < 37; ++o) {
        ASSERT_EQ(bits(y[static_cast<std::size_t>(r * 37 + o)]), bits(oracle(a, r, w, o)))
            << middle << " +- " << spread << " at " << r << ", " << o;
      }
    }
  }
}

TEST_P(MxProductOn, IsExactWhereTheScalesAreClose) {
  const Packed a(5, 96, 3, 120, 2);
  const Packed w(9, 96, 4, 130, 2);
  const std::vector<float> y = product(a, w, GetParam());
  for (std::int64_t r = 0; r < 5; ++r) {
    for (std::int64_t o = 0; o < 9; ++o) {
      double sum = 0;
      for (std::int64_t k = 0; k < 96; ++k) {
        sum += std::ldexp(a.half(r, k) * w.half(o, k) * 0.25,
                          a.exponent(r, k / 32) + w.exponent(o, k / 32));
      }
      EXPECT_EQ(y[static_cast<std::size_t>(r * 9 + o)], static_cast<float>(sum));
    }
  }
}

TEST_P(MxProductOn, ZerosGivePositiveZero) {
  Packed a(2, 32, 5, 127, 0);
  Packed w(3, 32, 6, 127, 0);
  std::fill(a.codes.begin(), a.codes.begin() + 16, std::uint8_t{0x80});  // -0 and 0
  std::fill(a.codes.begin() + 16, a.codes.end(), std::uint8_t{0xA2});    // -1, 1
  std::fill(w.codes.begin(), w.codes.end(), std::uint8_t{0x22});
  for (const float y : product(a, w, GetParam())) EXPECT_EQ(bits(y), 0u);
}

TEST_P(MxProductOn, R45_AlternatingBlockScales) {
  Packed a(1, 128, 7, 127, 0);
  Packed w(2, 128, 8, 127, 0);
  std::fill(a.codes.begin(), a.codes.end(), std::uint8_t{0x22});
  std::fill(w.codes.begin(), w.codes.end(), std::uint8_t{0x22});
  a.scales = {127, 134, 127, 134};
  w.scales = {134, 127, 134, 127, 127, 134, 127, 134};
  const std::vector<float> y = product(a, w, GetParam());
  EXPECT_EQ(y[0], 128 * 128.0f);
  EXPECT_EQ(y[1], 64 * 1.0f + 64 * 128.0f * 128.0f);
}

TEST_P(MxProductOn, GroupsAndThreadsDoNotChangeBits) {
  const Packed a(20, 64, 9, 120, 30);
  const Packed w(3 * 40, 64, 10, 120, 30);
  std::vector<std::int32_t> offsets = {0, 12, 12, 31};
  std::vector<std::int32_t> from;
  std::vector<std::int32_t> to;
  for (int i = 0; i < 31; ++i) {
    from.push_back(i * 7 % 20);
    to.push_back(30 - i);
  }
  const Device device = GetParam();
  const There x(a, device), y(w, device);
  const Buffer begins = to_device(offsets, device), rows = to_device(from, device),
               places = to_device(to, device);
  const Buffer out(device, 31 * 40 * 4);
  const MxProductArgs args{x.view,
                           y.view,
                           3,
                           {begins.as<const std::int32_t>(), {4}, {1}, device},
                           {rows.as<const std::int32_t>(), {31}, {1}, device},
                           {places.as<const std::int32_t>(), {31}, {1}, device},
                           {out.as<float>(), {31, 40}, {40, 1}, device}};
  for (const int threads : {1, 2}) {
    set_threads(threads);
    fill_bytes(out.as<void>(), device, 0xAA, out.bytes());
    mx_product(args);
    const std::vector<float> got = to_host<float>(out);
    for (std::size_t i = 0; i < 31; ++i) {
      const int expert = i < 12 ? 0 : 2;
      for (int j = 0; j < 40; ++j) {
        ASSERT_EQ(bits(got[static_cast<std::size_t>(to[i] * 40 + j)]),
                  bits(oracle(a, from[i], w, expert * 40 + j)));
      }
    }
  }
}

TEST(MxProduct, NamesWhatIsWrong) {
  Packed a(2, 64, 11, 127, 1);
  const Packed w(2, 64, 12, 127, 1);
  a.scales[3] = 253;
  try {
    product(a, w);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("row 1, block 1 is 253"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::kernels
