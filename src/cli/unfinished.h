#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "recipe/recipe.h"
#include "train/trainer.h"

namespace lockstep::cli {

/// How a model's recipe differs from the one that `file`, an sft.toml, holds, in one line, before /
/// now; "" where it does not, but for the device that auto takes and for how often is saved.
std::string differs_from(const std::filesystem::path& file, const recipe::SftRecipe& recipe);

/// What an interrupted sft goes on from: the folder OUT.unfinished, with the recipe, the losses so
/// far and the trainer's state. It is whole at every moment, or not there.
class Unfinished {
 public:
  /// Throws Usage where it is of another recipe, Error where the losses are damaged.
  Unfinished(const std::filesystem::path& out, const recipe::SftRecipe& recipe);

  /// Of the steps that are done; none: it begins.
  const std::vector<double>& losses() const { return losses_; }
  /// A line of each.
  const std::string& curve() const { return curve_; }
  void load(train::Trainer& trainer) const;
  /// `curve`: of all steps so far.
  void save(const train::Trainer& trainer, const std::string& curve) const;
  /// The model is written.
  void remove() const;

 private:
  std::filesystem::path folder_;
  std::string recipe_;
  std::string curve_;
  std::vector<double> losses_;
};

}  // namespace lockstep::cli
