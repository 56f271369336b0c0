#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "device/stream.h"
#include "device/testing.h"
#include "kernels/dense/check.h"
#include "kernels/dense/dispatch.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/route.h"
#include "kernels/dense/router.h"
#include "kernels/dense/testing.h"

namespace lockstep::kernels {
namespace {

class RouteOnDevice : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, RouteOnDevice, testing::ValuesIn(devices()), name_of_device);

struct RouteShape {
  std::int64_t rows, in, count, slots;
};

struct RouteResult {
  std::vector<std::int32_t> experts, offsets, row_of, slot_of;
  std::vector<float> gates;
};

/// A product's operands where the op runs.
struct RouteCase {
  RouteCase(const RouteShape& shape, Device device)
      : shape(shape), device(device), weight(device, packed_elements(shape.count, shape.in) * 2) {
    auto numbers = random_bf16(shape.rows * shape.in, 5, 1.0f);
    // Of the last row all logits are infinite, of both signs; of the first all are equal.
    if (shape.rows > 2) numbers.back() = to_bf16(INFINITY);
    std::fill_n(numbers.begin(), std::min<std::int64_t>(shape.rows, 1) * shape.in, Bf16{});
    x = to_device(numbers, device);
    auto rows = random_bf16(shape.count * shape.in, 6, 0.05f);
    for (std::int64_t i = 1; i <= shape.in && shape.count > 5; ++i) {  // two logits that are equal
      rows[static_cast<std::size_t>(3 * shape.in - i)] =
          rows[static_cast<std::size_t>(5 * shape.in - i)];
    }
    fill_bytes(weight.as<void>(), device, 0xFF, weight.bytes());
    pack_rows(rows_of(rows.data(), shape.count, shape.in), 0, matrix());
    synchronize(device);
  }

  /// The first rows of another case.
  RouteCase(const RouteCase& other, std::int64_t rows)
      : shape(other.shape),
        device(other.device),
        x(other.device, rows * other.shape.in * 2),
        weight(other.device, other.weight.bytes()) {
    shape.rows = rows;
    copy_bytes(x.as<void>(), device, other.x.as<void>(), device, x.bytes());
    copy_bytes(weight.as<void>(), device, other.weight.as<void>(), device, weight.bytes());
    synchronize(device);
  }

  PackedMatrix matrix() const { return {weight.as<Bf16>(), shape.count, shape.in, device}; }
  TensorView<const Bf16, 2> rows() const {
    return rows_of(x.as<const Bf16>(), shape.rows, shape.in, device);
  }

  /// `settled`: nothing runs before it that it must wait for.
  RouteResult at_once(bool normalize, bool split_k, bool settled = true) const {
    const std::int64_t items = shape.rows * shape.slots;
    const Buffer logits(device, shape.rows * shape.count * 4), experts(device, items * 4),
        gates(device, items * 4), offsets(device, (shape.count + 1) * 4), row_of(device, items * 4),
        slot_of(device, items * 4);
    const auto span = [](const Buffer& b) {
      return std::span(b.as<std::int32_t>(), static_cast<std::size_t>(b.bytes() / 4));
    };
    route({.x = rows(),
           .weight = matrix(),
           .split_k = split_k,
           .settled = settled,
           .normalize = normalize,
           .logits = rows_of(logits.as<float>(), shape.rows, shape.count, device),
           .experts = rows_of(experts.as<std::int32_t>(), shape.rows, shape.slots, device),
           .gates = rows_of(gates.as<float>(), shape.rows, shape.slots, device),
           .offsets = span(offsets),
           .row_of = span(row_of),
           .slot_of = span(slot_of)},
          {});
    return {to_host<std::int32_t>(experts), to_host<std::int32_t>(offsets),
            to_host<std::int32_t>(row_of), to_host<std::int32_t>(slot_of), to_host<float>(gates)};
  }

  /// The product where the op runs, all else on the CPU.
  RouteResult by_parts(bool normalize, bool split_k) const {
    const Buffer there(device, shape.rows * shape.count * 4);
    linear_bf16({.x = rows(),
                 .weight = matrix(),
                 .y = rows_of(there.as<float>(), shape.rows, shape.count, device),
                 .split_k = split_k},
                {});
    const auto logits = to_host<float>(there);
    const auto items = static_cast<std::size_t>(shape.rows * shape.slots);
    RouteResult result;
    result.experts.resize(items);
    result.gates.resize(items);
    result.row_of.resize(items);
    result.slot_of.resize(items);
    result.offsets.resize(static_cast<std::size_t>(shape.count + 1));
    router({.logits = rows_of(logits.data(), shape.rows, shape.count),
            .normalize = normalize,
            .experts = rows_of(result.experts.data(), shape.rows, shape.slots),
            .gates = rows_of(result.gates.data(), shape.rows, shape.slots)},
           {});
    dispatch(
        {.experts = rows_of<const std::int32_t>(result.experts.data(), shape.rows, shape.slots),
         .num_experts = static_cast<std::int32_t>(shape.count),
         .offsets = result.offsets,
         .row_of = result.row_of,
         .slot_of = result.slot_of},
        {});
    return result;
  }

  RouteShape shape;
  Device device;
  Buffer x, weight;
};

bool same_gates(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float p, float q) {
    return std::bit_cast<std::uint32_t>(p) == std::bit_cast<std::uint32_t>(q) ||
           (std::isnan(p) && std::isnan(q));
  });
}

TEST_P(RouteOnDevice, LeavesWhatItsPartsLeave) {
  for (const RouteShape& shape : {RouteShape{1, 2048, 128, 8},
                                  {2, 2048, 128, 8},
                                  {7, 256, 32, 4},
                                  {8, 2048, 128, 8},
                                  {9, 256, 6, 6},
                                  {31, 512, 127, 1},
                                  {33, 1024, 65, 16},
                                  {40, 2560, 128, 8},
                                  {63, 4096, 128, 8},
                                  {64, 2048, 128, 8},
                                  {64, 288, 128, 8},    // by its parts: inputs,
                                  {64, 256, 160, 8},    // experts,
                                  {33, 256, 32, 17},    // slots
                                  {65, 256, 32, 4}}) {  // and rows
    const RouteCase op(shape, GetParam());
    for (const bool normalize : {true, false}) {
      for (const bool split_k : {false, true}) {
        if (split_k && shape.in % 64 != 0) continue;
        const RouteResult got = op.at_once(normalize, split_k);
        const RouteResult expected = op.by_parts(normalize, split_k);
        const auto name = testing::Message() << shape.rows << " rows of " << shape.in << ", "
                                             << shape.slots << " of " << shape.count;
        EXPECT_EQ(got.experts, expected.experts) << name;
        EXPECT_TRUE(same_gates(got.gates, expected.gates)) << name;
        EXPECT_EQ(got.offsets, expected.offsets) << name;
        EXPECT_EQ(got.row_of, expected.row_of) << name;
        EXPECT_EQ(got.slot_of, expected.slot_of) << name;
      }
    }
  }
}

/// Among 64 rows one launch has a row, among 65 three have.
TEST_P(RouteOnDevice, ARowDoesNotDependOnItsCompany) {
  const RouteCase many({65, 2048, 128, 8}, GetParam());
  const RouteCase few(many, 64);
  for (const bool split_k : {false, true}) {
    const RouteResult all = many.at_once(true, split_k);
    for (const bool settled : {true, false}) {
      const RouteResult some = few.at_once(true, split_k, settled);
      const auto first = [](const auto& of) {
        return std::vector(of.begin(), of.begin() + 64 * 8);
      };
      EXPECT_EQ(some.experts, first(all.experts));
      EXPECT_TRUE(same_gates(some.gates, first(all.gates)));
    }
  }
}

/// A norm of long rows lets the next launch begin at once and takes its time: the route, whose
/// weight is older, begins beside it, and must neither read the rows that it makes nor write what
/// it may read before it has ended.
TEST_P(RouteOnDevice, WaitsForALaunchThatIsUnderWay) {
  constexpr std::int64_t kIn = 2048, kCount = 128, kSlots = 8, kLong = 1 << 15;
  const Device device = GetParam();
  const OwnedStream stream(device);
  for (const std::int64_t rows : {1, 8, 64}) {
    const RouteCase op({rows, kIn, kCount, kSlots}, device);
    const Buffer from = to_device(random_bf16(rows * kLong, 7), device);
    const Buffer norm = to_device(std::vector<Bf16>(kLong, to_bf16(1.0f)), device);
    const Buffer normed(device, from.bytes(), stream);
    const Buffer logits(device, rows * kCount * 4, stream),
        chosen(device, rows * kSlots * 8, stream),
        index(device, (kCount + 1 + 2 * rows * kSlots) * 4, stream);
    const auto items = static_cast<std::size_t>(rows * kSlots);
    const auto run = [&](bool beside) {
      for (const Buffer* to : {&normed, &logits, &chosen, &index}) {
        fill_bytes(to->as<void>(), device, 0xFF, to->bytes(), stream);
      }
      rms_norm({.x = rows_of(from.as<const Bf16>(), rows, kLong, device),
                .weight = {norm.as<const Bf16>(), kLong},
                .y = rows_of(normed.as<Bf16>(), rows, kLong, device)},
               stream);
      if (!beside) stream.wait();
      auto* const at = index.as<std::int32_t>();
      route({.x = {normed.as<const Bf16>(), {rows, kIn}, {kLong, 1}, device},
             .weight = op.matrix(),
             .settled = beside,
             .logits = rows_of(logits.as<float>(), rows, kCount, device),
             .experts = rows_of(chosen.as<std::int32_t>(), rows, kSlots, device),
             .gates = rows_of(chosen.as<float>() + items, rows, kSlots, device),
             .offsets = {at, kCount + 1},
             .row_of = {at + kCount + 1, items},
             .slot_of = {at + kCount + 1 + items, items}},
            stream);
      stream.wait();
      return std::pair(to_host<std::int32_t>(chosen), to_host<std::int32_t>(index));
    };
    const auto alone = run(false);
    EXPECT_EQ(alone.second[kCount], rows * kSlots);
    for (int time = 0; time < 20; ++time) ASSERT_EQ(run(true), alone) << rows << " " << time;
  }
}

TEST_P(RouteOnDevice, HasNothingToDoForNoRows) {
  const RouteResult none = RouteCase({0, 256, 32, 4}, GetParam()).at_once(true, false);
  EXPECT_EQ(none.offsets, std::vector<std::int32_t>(33));
}

/// Rows of more room than they need, as a capture and a pass have them.
TEST_P(RouteOnDevice, TakesRowsThatLieApart) {
  constexpr std::int64_t kRows = 33, kIn = 512, kCount = 48, kSlots = 4, kApart = 24;
  const Device device = GetParam();
  const RouteCase op({kRows, kIn, kCount, kSlots}, device);
  const RouteResult expected = op.at_once(true, false);
  std::vector<Bf16> wide(static_cast<std::size_t>(kRows * (kIn + 8)));
  const auto numbers = to_host<Bf16>(op.x);
  for (std::int64_t row = 0; row < kRows; ++row) {
    std::copy_n(numbers.begin() + row * kIn, kIn, wide.begin() + row * (kIn + 8));
  }
  const Buffer x = to_device(wide, device), logits(device, kRows * kCount * 4),
               experts(device, kRows * kApart * 4), gates(device, kRows * kApart * 4),
               index(device, (kCount + 1 + 2 * kRows * kSlots) * 4);
  auto* const at = index.as<std::int32_t>();
  route({.x = {x.as<const Bf16>(), {kRows, kIn}, {kIn + 8, 1}, device},
         .weight = op.matrix(),
         .logits = rows_of(logits.as<float>(), kRows, kCount, device),
         .experts = {experts.as<std::int32_t>(), {kRows, kSlots}, {kApart, 1}, device},
         .gates = {gates.as<float>(), {kRows, kSlots}, {kApart, 1}, device},
         .offsets = {at, kCount + 1},
         .row_of = {at + kCount + 1, kRows * kSlots},
         .slot_of = {at + kCount + 1 + kRows * kSlots, kRows * kSlots}},
        {});
  const auto got = to_host<std::int32_t>(experts);
  const auto weights = to_host<float>(gates);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      const auto from = static_cast<std::size_t>(row * kSlots + slot);
      const auto to = static_cast<std::size_t>(row * kApart + slot);
      ASSERT_EQ(got[to], expected.experts[from]) << row << " " << slot;
      ASSERT_TRUE(same_gates({weights[to]}, {expected.gates[from]})) << row << " " << slot;
    }
  }
}

TEST_P(RouteOnDevice, RefusesWhatLiesElsewhere) {
  const RouteCase op({4, 256, 32, 4}, GetParam());
  std::vector<float> floats(4 * 36);
  std::vector<std::int32_t> ints(4 * 4 + 33 + 2 * 16);
  const std::span<std::int32_t> rest = std::span(ints).subspan(16);
  const Device other =
      GetParam().kind == Device::Kind::kCpu ? Device{Device::Kind::kCuda, 0} : Device{};
  RouteArgs args = {.x = op.rows(),
                    .weight = op.matrix(),
                    .logits = rows_of(floats.data(), 4, 32, GetParam()),
                    .experts = rows_of(ints.data(), 4, 4, GetParam()),
                    .gates = rows_of(floats.data() + 128, 4, 4, GetParam()),
                    .offsets = rest.first(33),
                    .row_of = rest.subspan(33, 16),
                    .slot_of = rest.last(16)};
  args.weight.device = other;
  EXPECT_THROW(route(args, {}), Error);
  args.weight = op.matrix();
  args.weight.data = nullptr;
  EXPECT_THROW(route(args, {}), Error);
  args.weight = op.matrix();
  args.weight.in = args.x.shape[1] = -256;
  EXPECT_THROW(route(args, {}), Error);
}

TEST_P(RouteOnDevice, RefusesWhatDoesNotFit) {
  std::vector<Bf16> x(64), w(64 * 4);
  std::vector<float> floats(16);
  std::vector<std::int32_t> ints(32);
  RouteArgs args = {.x = rows_of<const Bf16>(x.data(), 2, 32),
                    .weight = {w.data(), 4, 32, {}},
                    .logits = rows_of(floats.data(), 2, 4),
                    .experts = rows_of(ints.data(), 2, 2),
                    .gates = rows_of(floats.data() + 8, 2, 2),
                    .offsets = std::span(ints).subspan(4, 4),
                    .row_of = std::span(ints).subspan(12, 4),
                    .slot_of = std::span(ints).subspan(16, 4)};
  EXPECT_THROW(route(args, {}), Error);  // an offset is missing
  args.offsets = std::span(ints).subspan(4, 5);
  args.logits = rows_of(floats.data(), 2, 3);
  EXPECT_THROW(route(args, {}), Error);
  args.logits = rows_of(floats.data(), 2, 4);
  args.row_of = args.row_of.first(3);
  EXPECT_THROW(route(args, {}), Error);
}

}  // namespace
}  // namespace lockstep::kernels
