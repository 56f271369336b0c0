#include "record/agreement.h"

namespace lockstep {

Encoding Agreement::encoding(Place place) const {
  if (place.site == Site::kRouter) {
    if (!guide.replay_experts) return Encoding::kNone;
    return model.num_experts <= 256 ? Encoding::kExperts8 : Encoding::kExperts16;
  }
  return guide.follows(place) ? encoding_for(guide.mode, rule(place.site)) : Encoding::kNone;
}

RowLayout Agreement::layout(Place place, Encoding encoding) const {
  const std::int32_t k = model.experts_per_token;
  switch (place.site) {
    case Site::kRouter: return {encoding, k, 1, 0};
    case Site::kW13In: return {encoding, model.hidden, contract.activation.block, 1};
    case Site::kW2In: return {encoding, k * model.expert_width, contract.activation.block, k};
    case Site::kK: return {encoding, model.kv_width(), contract.k.block, 0};
    case Site::kV: return {encoding, model.kv_width(), contract.v.block, 0};
  }
  return {};
}

const Quantizer& Agreement::rule(Site site) const {
  return site == Site::kK ? contract.k : site == Site::kV ? contract.v : contract.activation;
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
