#include "kernels/exact/place_numbers.h"

#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/place_numbers_rows.h"

namespace lockstep::kernels {
namespace {

std::int64_t units_of_numbers(std::int64_t numbers) {
  return (numbers + kNumbersOfUnit - 1) / kNumbersOfUnit;
}

}  // namespace

bool NumberPlacer::takes(const TensorView<const float, 2>& master, const Bf16* to) const {
  const auto lies_well = [](const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  };
  const std::int64_t numbers = master.shape[0] * master.shape[1];
  return build::has_cuda && device_.kind == Device::Kind::kCuda && master.device == device_ &&
         master.stride[1] == 1 && master.stride[0] == master.shape[1] && numbers > 0 &&
         master.shape[1] % 8 == 0 && units_of_numbers(numbers) <= kMostNumberUnits &&
         lies_well(master.data) && lies_well(to);
}

void NumberPlacer::place(std::span<const PlacedNumbers> weights) {
  if (weights.empty()) return;
  std::vector<NumbersItem> items;
  std::int64_t units = 0;
  for (const PlacedNumbers& weight : weights) {
    if (!takes(weight.master, weight.to)) {
      throw Error(cat({"place_numbers: master is [", weight.master.shape[0], ", ",
                       weight.master.shape[1], "] with stride ", weight.master.stride[0],
                       "; expected whole rows of a multiple of 8, both sides at a multiple of 16 "
                       "bytes of the placer's CUDA device"}));
    }
    const std::int64_t numbers = weight.master.shape[0] * weight.master.shape[1];
    items.push_back({weight.master.data, weight.to,
                     reinterpret_cast<unsigned long long*>(weight.bad), weight.sum, numbers,
                     units});
    units += units_of_numbers(numbers);
  }
  if constexpr (build::has_cuda) {
    if (tables_.bytes() == 0) {
      tables_ = Buffer(device_, sizeof(NumbersTables), stream_);
      numbers_tables_cuda(tables_.as<NumbersTables>(), device_, stream_);
    }
    const auto bytes = std::ssize(items) * static_cast<std::int64_t>(sizeof(NumbersItem));
    lists_ = Buffer(device_, bytes, stream_);  // the last one goes in the order of the stream
    copy_bytes(lists_.as<void>(), device_, items.data(), {}, bytes, stream_);
    place_numbers_cuda(lists_.as<NumbersItem>(), static_cast<std::int32_t>(items.size()), units,
                       tables_.as<NumbersTables>(), device_, stream_);
  }
}

}  // namespace lockstep::kernels
