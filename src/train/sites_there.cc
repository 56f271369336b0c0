/// The same sites on a CUDA device: nothing here waits but settle().
#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "kernels/exact/guide.h"
#include "ops/device.h"
#include "train/sites.h"
#include "train/sites_later.h"

namespace lockstep::train {

using at::Tensor;

void Sites::follow_there(const Choice& choice, const Tensor& chosen) const {
  const at::Device device = chosen.device();
  const Tensor other =
      ops::upload(ops::over(choice.experts, at::kLong), device).view(chosen.sizes());
  const Tensor present = ops::upload(ops::over(choice.present, at::kByte), device).to(at::kBool);
  if (tally_ != nullptr) {
    const Tensor same = (chosen.unsqueeze(2) == other.unsqueeze(1)).any(2).all(1);
    const Tensor mismatched = present.logical_and(same.logical_not()).sum();
    later_->mismatched =
        later_->mismatched.defined() ? later_->mismatched + mismatched : mismatched;
    later_->followed += std::ranges::count_if(choice.present, [](auto x) { return x != 0; });
    ++later_->layers;
  }
  chosen.copy_(at::where(present.unsqueeze(1), other, chosen));
}

/// The audit tokens' rows of x, in BF16.
Tensor Sites::audited_there(const Tensor& x) const {
  Tensor& index = later_->audited;
  if (!index.defined()) {
    std::vector<std::int64_t> rows;
    for (const std::size_t i : audited_) rows.push_back(pack_.key_row[i]);
    index = ops::upload(ops::over(rows, at::kLong), x.device());
  }
  return x.view({pack_.rows(), -1}).index_select(0, index).to(at::kBFloat16);
}

void Sites::round_there(Place place, TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to) const {
  const at::Device device = ops::torch_device(to.device);
  const auto numbers = at::TensorOptions(device).dtype(at::kBFloat16);
  const auto rows_at = [&](const Bf16* data) {
    return audited_there(
        at::from_blob(const_cast<Bf16*>(data), {to.shape[0] * to.shape[1]}, numbers));
  };
  Tensor before;
  if (audits(place)) before = rows_at(from.data);

  kernels::GuideArgs args = {.x = from, .rule = agreement_.rule(place.site), .out = to};
  args.exponent = exponent(place);
  Tensor bytes, present;
  if (follows(place)) {
    const Records records = read(place, agreement_.encoding(place));
    bytes = ops::upload(ops::over(records.bytes, at::kByte), device);
    present = ops::upload(ops::over(records.present, at::kByte), device);
    const std::int64_t width = records.layout.bytes();
    args.guidance = agreement_.guide.mode;
    args.layout = records.layout;
    args.records = {
        bytes.const_data_ptr<std::uint8_t>(), {pack_.rows(), width}, {width, 1}, to.device};
    args.present = {present.const_data_ptr<std::uint8_t>(), {pack_.rows()}, {1}, to.device};
    if (tally_ != nullptr) {
      const auto site = static_cast<std::size_t>(place.site);
      Tensor& counts = later_->counts;
      if (!counts.defined()) {
        counts = at::zeros({std::ssize(later_->cols), kernels::kNumGuideCounts},
                           numbers.dtype(at::kLong));
      }
      later_->cols[site] = to.shape[1];
      args.counts = {counts.data_ptr<std::int64_t>() + site * kernels::kNumGuideCounts,
                     {kernels::kNumGuideCounts},
                     {1},
                     to.device};
    }
  }
  kernels::guide(args, ops::stream_on(to.device));
  if (before.defined()) {
    later_->audits.push_back({place, to.shape[1], before, rows_at(to.data)});
  }
}

namespace {

std::vector<Bf16> fetch(const Tensor& rows) {
  std::vector<Bf16> numbers(rows.defined() ? static_cast<std::size_t>(rows.numel()) : 0);
  if (numbers.empty()) return numbers;
  const Tensor here = rows.cpu();
  std::copy_n(static_cast<const Bf16*>(here.const_data_ptr()), numbers.size(), numbers.begin());
  return numbers;
}

}  // namespace

void Sites::settle() const {
  if (later_ == nullptr) return;
  if (later_->counts.defined()) {
    const Tensor here = later_->counts.cpu();
    const std::int64_t* counts = here.const_data_ptr<std::int64_t>();
    for (std::size_t i = 0; i < later_->cols.size(); ++i, counts += kernels::kNumGuideCounts) {
      count(static_cast<Site>(i), {counts, kernels::kNumGuideCounts}, later_->cols[i]);
    }
  }
  if (later_->mismatched.defined()) {
    tally_->routes_followed += later_->followed;
    tally_->routes_absent += pack_.rows() * later_->layers - later_->followed;
    tally_->routes_mismatched += later_->mismatched.item<std::int64_t>();
  }
  for (const Later::Audit& one : later_->audits) {
    audit(one.place, one.cols, fetch(one.before), fetch(one.after));
  }
  *later_ = {};
}

}  // namespace lockstep::train
