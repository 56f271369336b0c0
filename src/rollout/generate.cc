#include <algorithm>
#include <map>
#include <utility>

#include "rollout/engine.h"
#include "rollout/request.h"

namespace lockstep::rollout {

std::vector<Trajectory> generate(Engine& engine, std::vector<Request> requests) {
  // Where each sample's result belongs. Two requests for the same one keep their order.
  std::map<std::pair<PromptId, std::int32_t>, std::size_t> places;
  std::size_t next = 0;
  for (const Request& request : requests) {
    for (std::int32_t i = 0; i < request.num_samples; ++i) {
      places.try_emplace({request.prefix.prompt, request.prefix.sample + i}, next++);
    }
  }
  std::vector<std::pair<std::size_t, Trajectory>> results;
  try {
    for (Request& request : requests) engine.submit(std::move(request));
    while (!engine.idle()) {
      for (Trajectory& trajectory : engine.step()) {
        const std::size_t place = places.at({trajectory.prompt, trajectory.sample});
        results.emplace_back(place, std::move(trajectory));
      }
      if (engine.held_back()) throw_held_back(engine.held());
    }
  } catch (...) {
    abort_quietly(engine);
    throw;
  }
  std::stable_sort(results.begin(), results.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Trajectory> trajectories;
  for (auto& [place, trajectory] : results) trajectories.push_back(std::move(trajectory));
  return trajectories;
}

}  // namespace lockstep::rollout
