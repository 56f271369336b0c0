#include "rollout/pass_graphs.h"

#include <algorithm>

namespace lockstep::rollout {

void PassGraphs::run(const Workplace& at, const PassShape& shape,
                     const std::function<void()>& give) {
  if (at.moves != moves_) {
    synchronize(at.device, at.stream);  // none of them runs any more
    entries_.clear();
    moves_ = at.moves;
  }
  const auto [found, is_new] = entries_.try_emplace(shape);
  Entry& entry = found->second;
  entry.last_use = ++clock_;
  if (is_new) {
    give();
    if (at.moves != moves_) entries_.clear();  // and the next pass sees it
    if (entries_.size() <= kMost) return;
    const auto oldest = std::min_element(
        entries_.begin(), entries_.end(),
        [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; });
    synchronize(at.device, at.stream);
    entries_.erase(oldest);
    return;
  }
  if (entry.graph.empty()) {
    entry.graph = Graph::of(at.device, at.stream, give);
  } else {
    ++replays_;
  }
  entry.graph.launch(at.stream);
}

}  // namespace lockstep::rollout
