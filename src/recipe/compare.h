/// What `lockstep compare` puts side by side: arms of one recipe, each with the same seeds.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "recipe/recipe.h"

namespace lockstep::recipe {

/// A recipe's entries by what they are for. `compare.*` is the comparison's own; `[variant.LABEL]`
/// is an arm under a name of its own, with keys over everything that the recipe says otherwise.
struct Sections {
  std::vector<Entry> plain{};
  std::vector<Entry> compare{};                          // without "compare."
  std::map<std::string, std::vector<Entry>> variants{};  // by label, without "variant.LABEL."
};

/// Throws Error where a label could not be a folder's name.
Sections split(std::vector<Entry> entries);

/// The recipe of an arm: `label` is a variant's or an arm's name. `assignments` go over all keys.
/// Throws Error naming the labels that there are.
Recipe recipe_of(const Sections& sections, const std::string& label,
                 std::span<const Entry> assignments = {});

/// Left in the folder of a run that a comparison could not go on with: where and why. Gone when the
/// run goes on.
inline constexpr const char* kStopFile = "stopped.json";

struct Comparison {
  std::vector<std::string> arms{};  // labels, in the table's order, none twice
  std::int32_t seeds = 1;
  Sections sections{};
  std::vector<Entry> assignments{};

  /// The recipe of an arm under the seed of that number, 0 to seeds - 1: `seed` and `task.seed` are
  /// so much above the recipe's, so that all arms of a number see the same prompts and draws.
  Recipe recipe(const std::string& label, std::int32_t number) const;
};

/// Reads compare.arms and compare.seeds; `arms` not empty and `seeds` not 0 go over them. Throws
/// Error in one line for what is wrong with the file; the arms' own recipes are read by recipe().
Comparison read_comparison(const std::filesystem::path& file,
                           std::span<const std::string> assignments,
                           const std::vector<std::string>& arms, std::int32_t seeds);

}  // namespace lockstep::recipe
