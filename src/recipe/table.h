/// One table of keys says everything about a recipe: what may stand in it, of what type, in what
/// range, with what default, and why. Reading, complaints and the resolved copy all follow it.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lockstep::recipe {

/// A section with nothing in it.
struct Empty {};

/// What a TOML file or a command line says of one key; tables are spelled out: `trainer.lr`.
using Value = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>,
                           std::vector<std::string>, Empty>;
struct Entry {
  std::string name;
  Value value;
  std::string where;  // "file:line", for complaints
};

/// An enum: `names` are its values' in their order.
struct Choice {
  std::uint8_t* value;
  std::vector<std::string> names;
};
template <typename Enum>
Choice choice(Enum& value, std::vector<std::string> names) {
  static_assert(sizeof(Enum) == 1);
  return {reinterpret_cast<std::uint8_t*>(&value), std::move(names)};
}

/// A set over an enum, as bits.
struct Flags {
  std::uint8_t* bits;
  std::vector<std::string> names;
};

/// A number of bytes: 4096, or "256 MiB".
struct Bytes {
  std::int64_t* value;
};

/// Two numbers, the first not above the second.
struct Interval {
  std::array<std::int64_t, 2>* value;
};

/// A format's name, or true for the preset's and false for BF16, kept as text.
struct Format {
  std::string* value;
  std::vector<std::string> names;
};

using Target =
    std::variant<bool*, std::int32_t*, std::int64_t*, std::uint64_t*, float*, double*, std::string*,
                 std::vector<std::int8_t>*, Choice, Flags, Bytes, Interval, Format>;

/// Is the target a text or a list with nothing in it?
inline bool is_empty(const Target& target) {
  return std::visit(
      [](const auto& value) {
        if constexpr (requires { value->empty(); }) return value->empty();
        return false;
      },
      target);
}

/// A key, and where its value goes. What the target holds before reading is the default.
struct Key {
  std::string name;
  Target target;
  std::string doc;  // one line, printed above the key in the resolved copy
  double least = -std::numeric_limits<double>::infinity();  // of numbers
  double most = std::numeric_limits<double>::infinity();
  bool above = false;  // numbers must be above `least`
};

/// The entries of a TOML text, in its order. Throws Error with file and line.
std::vector<Entry> parse(std::string_view text, const std::string& file);

/// An entry from "key=value" as a command line has it; a value that is not TOML is text.
Entry parse_assignment(std::string_view text);

/// Puts each entry where its key says. Throws Error that names key, value and remedy.
void assign(std::span<const Entry> entries, std::span<const Key> keys);

/// The keys with their present values as TOML, each under its line of doc.
std::string write(std::span<const Key> keys);

/// The keys with their present values, the defaults, as rows of a Markdown table: key, default,
/// what it may be, and doc.
std::string reference(std::span<const Key> keys);

/// `name = value` of the keys that differ between two such texts, old / new, one a line. Throws
/// Error naming `old_file` where the first is none.
std::string differences(std::string_view before, std::string_view after,
                        const std::string& old_file = "the old recipe");

}  // namespace lockstep::recipe
