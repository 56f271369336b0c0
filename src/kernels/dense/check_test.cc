// What the ops refuse at their doors: one line with the op, the thing and its value.
#include "kernels/dense/check.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/dense/add_norm.h"
#include "kernels/dense/dispatch.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/linear.h"
#include "kernels/dense/rope.h"
#include "kernels/exact/mx_error.h"
#include "kernels/exact/packed_matrix.h"

namespace lockstep::kernels {
namespace {

std::string said(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Doors, NameWhatIsNotThere) {
  std::vector<Bf16> x(8);
  const auto rows = rows_of(x.data(), 2, 4);
  EXPECT_EQ(said([&] { first_nonfinite(rows, nullptr, {}); }),
            "first_nonfinite: bad is null for 2 rows; expected a number on their device");
  EXPECT_EQ(said([&] { residual_add(rows, rows, nullptr, {}); }),
            "residual_add: bad is null for 2 rows; expected a number on their device");
  EXPECT_EQ(said([&] { first_nonfinite(rows_of(x.data(), 0, 4), nullptr, {}); }), "");
  std::vector<float> numbers(8);
  EXPECT_EQ(said([&] { first_nonfinite(rows_of<const float>(numbers.data(), 2, 4), nullptr, {}); }),
            "first_nonfinite: bad is null for 2 rows; expected a number on their device");
  const std::vector<std::int32_t> positions(2);
  EXPECT_EQ(said([&] { rope({.x = rows, .head_dim = 4, .positions = positions}, {}); }),
            "rope: table is null; expected one on x's device");
  const RopeTable table(1e4, 4, {});
  EXPECT_EQ(
      said([&] {
        rope({.x = rows_of(x.data(), 2, 0), .head_dim = 4, .positions = positions, .table = &table},
             {});
      }),
      "rope: head_dim is 4 of 0 columns; expected an even divisor of some");
}

TEST(Doors, NameAPlaceThatIsOutside) {
  std::vector<std::int32_t> experts = {0, 1, 2, 7}, offsets(5), row_of(4), slot_of(4);
  const DispatchArgs args = {.experts = rows_of<const std::int32_t>(experts.data(), 2, 2),
                             .num_experts = 4,
                             .offsets = offsets,
                             .row_of = row_of,
                             .slot_of = slot_of};
  EXPECT_EQ(said([&] { dispatch(args, {}); }), "dispatch: experts of a row[1] is 7; expected 0..3");
  experts.back() = -1;
  EXPECT_NE(said([&] { dispatch(args, {}); }), "");
  experts.back() = 3;
  EXPECT_EQ(said([&] { dispatch(args, {}); }), "");

  std::vector<Bf16> from(8), to(8);
  const std::vector<std::int32_t> index = {1, 2};
  EXPECT_EQ(said([&] {
              gather_rows(rows_of<const Bf16>(from.data(), 2, 4), index, rows_of(to.data(), 2, 4),
                          {});
            }),
            "gather_rows: index[1] is 2; expected 0..1");
}

TEST(Doors, OfAPackedMatrix) {
  std::vector<Bf16> data(static_cast<std::size_t>(packed_elements(4, 8))), row(8);
  const PackedMatrix matrix = {data.data(), 4, 8};
  EXPECT_EQ(said([&] { unpack_row(matrix, 3, row); }), "");
  EXPECT_EQ(said([&] { unpack_row(matrix, 4, row); }),
            "unpack_row: row 4 into 8 numbers; expected 0..3 and 8");
  EXPECT_NE(said([&] { unpack_row(matrix, 0, std::span(row).first(7)); }), "");
  EXPECT_NE(said([&] { unpack_row({nullptr, 4, 8}, 0, row); }), "");
  std::vector<float> y(8);
  EXPECT_EQ(said([&] {
              grouped_linear_bf16({.x = rows_of<const Bf16>(row.data(), 1, 8),
                                   .offsets = {},
                                   .weights = matrix,
                                   .y = rows_of(y.data(), 1, 4)},
                                  {});
            }),
            "grouped_linear_bf16: offsets are empty; expected groups + 1");
}

TEST(Doors, OfErrorsOfMxfp4) {
  const Quantizer rule = mx_rule(ScaleRule::kMxFloor);
  std::vector<Bf16> x(64);
  EXPECT_EQ(said([&] {
              mx_error({x.data(), {1, 32}, {32, 2}}, rule);
            }),
            "mx_error: x is there with stride 2 along a row; expected contiguous rows");
  EXPECT_EQ(said([&] {
              mx_error({nullptr, {1, 32}, {32, 1}}, rule);
            }),
            "mx_error: x is null with stride 1 along a row; expected contiguous rows");
}

}  // namespace
}  // namespace lockstep::kernels
