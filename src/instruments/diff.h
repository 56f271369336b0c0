/// Where two engines part: two dumps of the same tokens, quantized offline as a contract would, and
/// compared place by place. No FP4 hardware is needed, nor that either engine uses FP4.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "contract/contract.h"
#include "instruments/dump.h"
#include "numerics/row.h"

namespace lockstep::instruments {

inline constexpr std::array kModes = {Guidance::kOwnScale,     Guidance::kRolloutScale,
                                      Guidance::kLsbScaleMod4, Guidance::kLsb,
                                      Guidance::kFullGuided,   Guidance::kFullForced};
std::string_view name_of(Guidance mode);  // "lsb_mod4", as recipes spell it

struct DiffOptions {
  std::string contract = "lockstep";  // a preset, or what `rules` are called
  std::optional<Contract> rules{};    // instead: its activation, k and v; layers are not read
  /// A place parts where its drift is above tolerance * sqrt(layer + 1): what rounding to BF16
  /// leaves grows about so with depth.
  double tolerance = 0.01;
};

/// What a mode of guidance would leave of the difference at a place.
struct Left {
  std::int64_t bytes = 0;   // of a token's record
  std::int64_t differ = 0;  // elements whose value is not the rollout's
  double l2 = 0;            // ||operand - rollout's|| / ||rollout's||
};

/// A place, A as the rollout and B as the trainer. Counts are of elements unless they say blocks.
struct PlaceDiff {
  Place place{};
  std::int64_t width = 0;
  std::int64_t elements = 0;
  std::int64_t blocks = 0;

  // Before quantization.
  double drift = 0;  // ||B - A|| / ||A||
  double worst = 0;  // the same of the token that drifted most, and its row
  std::int64_t worst_row = 0;
  std::int64_t differ = 0;  // BF16 numbers that are not equal

  // Both rounded to nearest, each at its own scale.
  std::int64_t flips = 0;           // code * scale differs
  std::int64_t code_flips = 0;      // the code differs ...
  std::int64_t up = 0, down = 0;    // ... B's magnitude being higher, lower
  std::int64_t adjacent = 0;        // ... by one step of the grid
  std::int64_t scale_flips = 0;     // blocks
  std::int64_t exponent_flips = 0;  // tokens whose own 2^n differs

  // Of A's numbers on its grid, in units of the block's scale.
  double boundary = 0;          // mean distance to the nearest midpoint between two codes
  double boundary_flips = 0;    // the same where the code flipped
  std::int64_t dead = 0;        // not zero, and rounded to zero
  std::int64_t dead_flips = 0;  // rounded to zero by one of the two only
  std::int64_t clipped = 0;     // beyond the largest code
  std::int64_t saturated_a = 0,
               saturated_b = 0;  // blocks under a fixed 2^n whose scale is too large
  std::int64_t beyond = 0;  // drifted out of the radius within which one bit is exact, at least

  std::array<Left, kModes.size()> left{};
};

struct RouteDiff {
  Layer layer{};
  std::int64_t tokens = 0;
  std::int64_t mismatched = 0;  // tokens whose sets of experts differ
  std::int64_t slots = 0;
  std::int64_t slots_mismatched = 0;  // experts of A that B did not choose
};

/// |logp of A - logp of B| over the rows where both have one.
struct LogpDiff {
  std::int64_t tokens = 0;
  double mean = 0, median = 0, p99 = 0, largest = 0;
  std::int64_t largest_row = 0;
  double correlation = 0;  // rank correlation with the tokens' drift at the last place
};

enum class Verdict : std::uint8_t {
  kEqual,     // every number is the same
  kRounding,  // nowhere beyond the tolerance
  kApart,
};

struct Diff {
  std::string a, b;
  Contract contract{};
  DiffOptions options{};
  std::int64_t rows = 0;
  std::vector<PlaceDiff> places{};
  std::vector<RouteDiff> routes{};
  std::optional<LogpDiff> logp{};

  Verdict verdict = Verdict::kEqual;
  std::optional<Place> first_different{};  // in the order of computation
  std::optional<Place> first_apart{};
  std::optional<Place> steepest{};  // where drift grew most over all places before it ...
  double growth = 0;                // ... by this factor
  /// Whether the log-probs say what the places say, and in words. Nothing without log-probs.
  std::optional<bool> agrees{};
  std::string agreement{};

  double allowance(Place place) const;  // the drift above which it parts
};

/// Compares. K and V take the exponents that A's metadata names, else those that A's own numbers
/// calibrate. Throws Error in one line: dumps of different tokens, shapes or places, numbers that
/// are not finite, a width that the contract's block does not divide, a contract under which
/// nothing can be guided.
Diff diff(const Dump& a, const Dump& b, const DiffOptions& options);

/// For people: a table of places, one of modes, the verdict.
std::string to_text(const Diff& diff);

/// The table of routes alone, "" without any.
std::string routes_to_text(const Diff& diff);

/// Every figure, for programs: docs/formats/dump.md names the fields.
std::string to_json(const Diff& diff);

}  // namespace lockstep::instruments
