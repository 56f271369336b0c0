#include "recipe/compare.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::recipe {
namespace {

constexpr std::int32_t kMostSeeds = 1000;

/// `name` without its first word where that is `section`; "" else.
std::string within(const std::string& name, const std::string& section) {
  return name.starts_with(section + ".") ? name.substr(section.size() + 1) : "";
}

/// A label is a folder of the run and a word of the table.
void check_label(const std::string& label, const std::string& where) {
  const bool plain = std::all_of(label.begin(), label.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '+';
  });
  if (plain && !label.empty() && label.size() <= 40) return;
  throw Error(cat({where, ": '", label,
                   "' cannot name an arm of a comparison; take up to 40 letters, digits, _, - "
                   "and +"}));
}

void put(std::vector<Entry>& entries, Entry entry) {
  std::erase_if(entries, [&](const Entry& e) { return e.name == entry.name; });
  entries.push_back(std::move(entry));
}

std::string text_of(const Entry& entry) {
  const auto* text = std::get_if<std::string>(&entry.value);
  if (text == nullptr) throw Error(entry.where + ": arm takes the name of an arm, in quotes");
  return *text;
}

/// The arm that a variant changes: the one it names, else its namesake.
std::string arm_of(const std::vector<Entry>& variant, const std::string& label) {
  for (const Entry& entry : variant) {
    if (entry.name == "arm") return text_of(entry);
  }
  return label;
}

void read_arms(const Entry& entry, Comparison& comparison) {
  const auto* labels = std::get_if<std::vector<std::string>>(&entry.value);
  if (labels == nullptr) {
    throw Error(entry.where + ": compare.arms takes a list of arms, as [\"bf16\", \"trace\"]");
  }
  comparison.arms = *labels;
}

void read_seeds(const Entry& entry, Comparison& comparison) {
  const auto* seeds = std::get_if<std::int64_t>(&entry.value);
  if (seeds == nullptr || *seeds < 1 || *seeds > kMostSeeds) {
    throw Error(cat({entry.where, ": compare.seeds takes a whole number from 1 to ", kMostSeeds}));
  }
  comparison.seeds = static_cast<std::int32_t>(*seeds);
}

}  // namespace

Sections split(std::vector<Entry> entries) {
  Sections sections;
  for (Entry& entry : entries) {
    const bool empty = std::holds_alternative<Empty>(entry.value);
    if (entry.name == "compare" || entry.name == "variant") {
      if (empty) continue;
      throw Error(cat({entry.where, ": ", entry.name, " is a section, and stands here as a key; ",
                       entry.name == "compare" ? "write [compare] and its arms and seeds"
                                               : "write [variant.LABEL] and the keys it changes"}));
    }
    if (const std::string key = within(entry.name, "compare"); !key.empty()) {
      entry.name = key;
      sections.compare.push_back(std::move(entry));
    } else if (const std::string rest = within(entry.name, "variant"); !rest.empty()) {
      const std::size_t dot = rest.find('.');
      if (dot == std::string::npos && empty) {
        check_label(rest, entry.where);
        sections.variants[rest];
        continue;
      }
      if (dot == std::string::npos) {
        throw Error(cat({entry.where, ": ", entry.name,
                         " is no table; write [variant.LABEL] and the keys that it changes"}));
      }
      const std::string label = rest.substr(0, dot);
      check_label(label, entry.where);
      entry.name = rest.substr(dot + 1);
      sections.variants[label].push_back(std::move(entry));
    } else {
      sections.plain.push_back(std::move(entry));
    }
  }
  return sections;
}

Recipe recipe_of(const Sections& sections, const std::string& label,
                 std::span<const Entry> assignments) {
  std::vector<Entry> entries = sections.plain;
  const auto variant = sections.variants.find(label);
  const std::vector<Entry> none;
  const std::vector<Entry>& own = variant == sections.variants.end() ? none : variant->second;
  for (const Entry& entry : own) put(entries, entry);
  for (const Entry& entry : assignments) put(entries, entry);
  put(entries, {"arm", arm_of(own, label), own.empty() ? label : own.front().where});
  return recipe_of(entries);
}

Recipe Comparison::recipe(const std::string& label, std::int32_t number) const {
  Recipe recipe = recipe_of(sections, label, assignments);
  constexpr std::uint64_t kMost = std::uint64_t{1} << 53;
  if (std::max(recipe.schedule.seed, recipe.task.arith.seed) + static_cast<std::uint64_t>(number) >
      kMost) {
    throw Error(cat({"seed is ", recipe.schedule.seed, " and task.seed ", recipe.task.arith.seed,
                     ", and number ", number, " behind it is above ", kMost, "; lower them"}));
  }
  recipe.schedule.seed += static_cast<std::uint64_t>(number);
  recipe.task.arith.seed += static_cast<std::uint64_t>(number);
  recipe.task.jsonl.seed = recipe.task.arith.seed;
  return recipe;
}

Comparison read_comparison(const std::filesystem::path& file,
                           std::span<const std::string> assignments,
                           const std::vector<std::string>& arms, std::int32_t seeds) {
  Comparison comparison;
  comparison.sections = split(read_entries(file));
  for (const std::string& text : assignments) {
    Entry entry = parse_assignment(text);
    if (entry.name == "arm") {
      throw Error(entry.where + ": arm is what a comparison varies; name arms by --arms");
    }
    if (entry.name.starts_with("compare.") || entry.name.starts_with("variant.")) {
      throw Error(cat(
          {entry.where, ": ", entry.name, " stands in the recipe; --arms and --seeds go over it"}));
    }
    put(comparison.assignments, std::move(entry));
  }
  for (const Entry& entry : comparison.sections.compare) {
    if (entry.name == "arms") {
      read_arms(entry, comparison);
    } else if (entry.name == "seeds") {
      read_seeds(entry, comparison);
    } else {
      throw Error(cat({entry.where, ": unknown key compare.", entry.name,
                       "; a comparison has compare.arms and compare.seeds"}));
    }
  }
  // A variant that is not compared today is read all the same: a mistake in it is one.
  for (const auto& variant : comparison.sections.variants) {
    try {
      recipe_of(comparison.sections, variant.first, comparison.assignments);
    } catch (const Error& error) {
      throw Error(cat({"variant.", variant.first, ": ", error.what()}));
    }
  }
  if (!arms.empty()) comparison.arms = arms;
  if (seeds > 0) comparison.seeds = seeds;
  if (comparison.arms.empty()) {
    throw Error(cat({file.string(), " names no arms to compare; give compare.arms, or --arms"}));
  }
  std::set<std::string> seen;
  for (const std::string& label : comparison.arms) {
    check_label(label, file.string());
    if (!seen.insert(label).second) {
      throw Error(cat({file.string(), ": the arm ", label, " stands twice in the list"}));
    }
  }
  return comparison;
}

}  // namespace lockstep::recipe
