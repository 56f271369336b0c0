#include "record/agreement.h"

#include <algorithm>

namespace lockstep {

Encoding Agreement::encoding(Place place) const {
  if (place.layer.value < 0 || place.layer.value >= model.num_layers) return Encoding::kNone;
  if (place.site == Site::kRouter) {
    if (!guide.replay_experts) return Encoding::kNone;
    return model.num_experts <= 256 ? Encoding::kExperts8 : Encoding::kExperts16;
  }
  if (!guide.follows(place)) return Encoding::kNone;
  const Quantizer at = rule(place.site);
  // A scale that stands in the contract is known without a record.
  if (at.quantizes() && at.scale == ScaleFormat::kNone && guide.mode == Guidance::kRolloutScale) {
    return Encoding::kNone;
  }
  return encoding_for(guide.mode, at);
}

RowLayout Agreement::layout(Place place, Encoding encoding) const {
  const std::int32_t k = model.experts_per_token;
  if (place.site == Site::kRouter) return {encoding, k, 1, 0};
  const Quantizer at = rule(place.site);
  if (encoding == Encoding::kCodes && at.is_wide()) encoding = Encoding::kCodes8;
  // MXFP4, MXFP8 and FP8 have no exponent of a row's own.
  const std::int32_t own = at.is_mx() ? 0 : 1;
  const std::int32_t block = at.scale == ScaleFormat::kNone && at.quantizes() ? 0 : at.block;
  switch (place.site) {
    case Site::kW13In: return {encoding, model.hidden, block, own};
    case Site::kW2In: return {encoding, k * model.expert_width, block, own * k};
    default: return {encoding, model.kv_width(), block, 0};
  }
}

Quantizer Agreement::rule(Site site) const {
  Quantizer rule = site == Site::kK   ? contract.k
                   : site == Site::kV ? contract.v
                                      : contract.activation;
  if (!rule.is_wide() || !rule.is_mx()) return rule;
  const std::int32_t row = site == Site::kW13In  ? model.hidden
                           : site == Site::kW2In ? model.expert_width
                                                 : model.head_dim;
  rule.block = std::min(rule.block, row);
  return rule;
}

std::int64_t Agreement::bytes_per_token() const {
  std::int64_t bytes = 0;
  for (std::int32_t layer = 0; layer < model.num_layers; ++layer) {
    for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV, Site::kRouter}) {
      const Place place = {Layer{layer}, site};
      const Encoding kept = encoding(place);
      if (kept != Encoding::kNone) bytes += layout(place, kept).bytes();
    }
  }
  return bytes;
}

}  // namespace lockstep
