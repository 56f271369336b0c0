#include "rollout/pass_checks.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep::rollout {
namespace {

constexpr std::uint8_t kNone = 0x7F;  // in every byte: more than any row

const char* name_of(std::int32_t check) {
  switch (static_cast<Check>(check)) {
    case Check::kQkv: return "q, k or v";
    case Check::kAttention: return "the attention's output";
    case Check::kW13In: return "w13_in";
    case Check::kW2In: return "w2_in";
    case Check::kExperts: break;
  }
  return "the experts' output";
}

}  // namespace

PassChecks::PassChecks(std::int32_t layers, Workplace& at, std::int64_t counts)
    : layers_(layers),
      num_counts_(counts),
      at_(&at),
      cells_(at.device, all_bytes(), at.stream),
      fetched_(all_bytes(), at.device) {}

std::vector<std::int64_t> PassChecks::settled_counts() const {
  const auto* from = reinterpret_cast<const std::int64_t*>(
      (at_->on_cuda() ? fetched_.as<>() : cells_.as<>()) + counts_at());
  return {from, from + num_counts_};
}

void PassChecks::put_counts(const std::vector<std::int64_t>& counts) const {
  copy_bytes(this->counts(), at_->device, counts.data(), {}, 8 * num_counts_, at_->stream);
  synchronize(at_->device, at_->stream);  // `counts` may end
}

void PassChecks::begin(const Pass& pass) {
  rows_ = static_cast<std::int32_t>(pass.asked_rows());
  tokens_ = pass.tokens;
  keys_ = pass.keys;
  wanted_ = pass.wanted;
  asked_ = false;
  fill_bytes(cells_.as<void>(), at_->device, kNone, bytes(), at_->stream);
}

void PassChecks::look(const std::int32_t* cell) const {
  if (at_->on_cuda()) return;
  if (*cell < rows_) stop(static_cast<std::int32_t>(cell - cells_.as<std::int32_t>()), *cell);
}

void PassChecks::fetch() {
  if (!at_->on_cuda()) return;
  copy_bytes(fetched_.as<void>(), {}, cells_.as<void>(), at_->device, all_bytes(), at_->stream);
  asked_ = true;
}

void PassChecks::settle() {
  if (!asked_) return;
  asked_ = false;
  for (std::int32_t i = 0; i <= layers_ * kChecks; ++i) {
    if (const std::int32_t row = fetched_.as<std::int32_t>()[i]; row < rows_) stop(i, row);
  }
}

void PassChecks::stop(std::int32_t cell, std::int32_t row) const {
  const bool is_logit = cell == layers_ * kChecks;
  const auto at = static_cast<std::size_t>(is_logit ? wanted_[static_cast<std::size_t>(row)] : row);
  throw Error(cat({"layer ", cell / kChecks, ": ", is_logit ? "a logit" : name_of(cell % kChecks),
                   " is not finite at token ", tokens_[at], ", position ", keys_[at].position,
                   ", span ", keys_[at].span.value,
                   "; nothing was sampled from it: look at the weights of the last update"}));
}

}  // namespace lockstep::rollout
