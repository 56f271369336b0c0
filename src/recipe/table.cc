#include "recipe/table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::recipe {
namespace {

template <typename... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <typename... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

std::string in_quotes(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      constexpr const char* kHex = "0123456789ABCDEF";
      out += cat({"\\u00", kHex[static_cast<unsigned char>(c) >> 4], kHex[c & 15]});
    } else {
      out += c;
    }
  }
  return out + "\"";
}

/// A real number as TOML wants it: with a point or an exponent.
std::string real(std::string shortest) {
  if (shortest.find_first_of(".en") == std::string::npos) shortest += ".0";
  return shortest;
}

template <typename T, typename Print>
std::string list(const std::vector<T>& values, Print print) {
  std::string out = "[";
  for (std::size_t i = 0; i < values.size(); ++i) out += (i > 0 ? ", " : "") + print(values[i]);
  return out + "]";
}

std::string to_text(const Value& value) {
  return std::visit(
      Overloaded{[](bool v) { return cat({v}); }, [](std::int64_t v) { return cat({v}); },
                 [](double v) { return real(cat({v})); },
                 [](const std::string& v) { return in_quotes(v); },
                 [](const std::vector<std::int64_t>& v) {
                   return list(v, [](std::int64_t n) { return cat({n}); });
                 },
                 [](const std::vector<std::string>& v) { return list(v, in_quotes); },
                 [](Empty) { return std::string("{}"); }},
      value);
}

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out;
}

std::string range_of(const Key& key) {
  const bool low = std::isfinite(key.least), high = std::isfinite(key.most);
  const std::string from = cat({key.above ? "above " : "at least ", key.least});
  if (low && high) return cat({" ", from, " and at most ", key.most});
  if (low) return " " + from;
  return high ? cat({" at most ", key.most}) : "";
}

/// Puts one value into one key's target, or throws.
class Put {
 public:
  Put(const Entry& entry, const Key& key) : entry_(entry), key_(key) {}

  void operator()(bool* target) const {
    const auto* value = std::get_if<bool>(&entry_.value);
    if (value == nullptr) refuse("true or false");
    *target = *value;
  }
  template <typename T>
  requires std::is_integral_v<T>
  void operator()(T* target) const { *target = integer<T>("a whole number" + range_of(key_)); }
  template <typename T>
  requires std::is_floating_point_v<T>
  void operator()(T* target) const {
    const std::string wanted = "a number" + range_of(key_);
    double value = 0;
    if (const auto* whole = std::get_if<std::int64_t>(&entry_.value)) {
      value = static_cast<double>(*whole);
    } else if (const auto* real = std::get_if<double>(&entry_.value)) {
      value = *real;
    } else {
      refuse(wanted);
    }
    // In range as it will be kept: what a float rounds to 0 is not above 0.
    if (!std::isfinite(value) || std::abs(value) > std::numeric_limits<T>::max() ||
        !in_range(value) || !in_range(static_cast<T>(value))) {
      refuse(wanted);
    }
    *target = static_cast<T>(value);
  }
  void operator()(std::string* target) const {
    // A number where text is meant has lost its quotes to a shell: guide.layers=5.
    if (const auto* whole = std::get_if<std::int64_t>(&entry_.value)) {
      *target = cat({*whole});
      return;
    }
    const auto* value = std::get_if<std::string>(&entry_.value);
    if (value == nullptr) refuse("text in quotes");
    *target = *value;
  }
  void operator()(std::vector<std::int8_t>* target) const {
    if (const auto* empty = std::get_if<std::vector<std::string>>(&entry_.value);
        empty != nullptr && empty->empty()) {
      target->clear();
      return;
    }
    const auto* values = std::get_if<std::vector<std::int64_t>>(&entry_.value);
    if (values == nullptr) refuse("a list of whole numbers");
    std::vector<std::int8_t> out;
    for (const std::int64_t value : *values) {
      if (!in_range(value) || value < -128 || value > 127) {
        refuse("whole numbers" + range_of(key_));
      }
      out.push_back(static_cast<std::int8_t>(value));
    }
    *target = std::move(out);
  }
  void operator()(const Choice& target) const {
    const auto* value = std::get_if<std::string>(&entry_.value);
    if (value == nullptr) refuse("one of " + joined(target.names));
    *target.value = static_cast<std::uint8_t>(index(target.names, *value));
  }
  void operator()(const Flags& target) const {
    const auto* values = std::get_if<std::vector<std::string>>(&entry_.value);
    if (values == nullptr) refuse("a list of " + joined(target.names));
    unsigned bits = 0;
    for (const std::string& value : *values) bits |= 1u << index(target.names, value);
    *target.bits = static_cast<std::uint8_t>(bits);
  }
  void operator()(const Interval& target) const {
    const auto* values = std::get_if<std::vector<std::int64_t>>(&entry_.value);
    if (values == nullptr || values->size() != 2 || (*values)[0] > (*values)[1] ||
        !in_range((*values)[0]) || !in_range((*values)[1])) {
      refuse("[from, to], whole numbers" + range_of(key_));
    }
    *target.value = {(*values)[0], (*values)[1]};
  }
  void operator()(const Format& target) const {
    if (const auto* is = std::get_if<bool>(&entry_.value)) {
      *target.value = *is ? "true" : "false";
      return;
    }
    const auto* value = std::get_if<std::string>(&entry_.value);
    if (value == nullptr) refuse("true, false, or one of " + joined(target.names));
    *target.value = target.names[index(target.names, *value)];
  }
  void operator()(const Bytes& target) const {
    const std::string wanted = "bytes, as 4096 or \"256 MiB\"," + range_of(key_);
    const auto* text = std::get_if<std::string>(&entry_.value);
    if (text == nullptr) {
      *target.value = integer<std::int64_t>(wanted);
      return;
    }
    const std::size_t digits = std::min(text->find_first_not_of("0123456789"), text->size());
    const std::string unit =
        text->substr(std::min(text->find_first_not_of(' ', digits), text->size()));
    const std::vector<std::string> units = {"B", "KiB", "MiB", "GiB", "TiB"};
    const auto found = std::find(units.begin(), units.end(), unit);
    if (digits == 0 || digits > 9 || found == units.end()) refuse(wanted);
    const std::int64_t value = std::stoll(text->substr(0, digits)) << 10 * (found - units.begin());
    if (!in_range(value)) refuse(wanted);
    *target.value = value;
  }

 private:
  [[noreturn]] void refuse(const std::string& wanted) const {
    throw Error(
        cat({entry_.where, ": ", key_.name, " is ", to_text(entry_.value), "; it takes ", wanted}));
  }
  /// A long double holds every int64_t.
  bool in_range(long double value) const {
    return (key_.above ? value > key_.least : value >= key_.least) && value <= key_.most;
  }
  template <typename T>
  T integer(const std::string& wanted) const {
    const auto* value = std::get_if<std::int64_t>(&entry_.value);
    if (value == nullptr || !in_range(*value) || !std::in_range<T>(*value)) refuse(wanted);
    return static_cast<T>(*value);
  }
  std::size_t index(const std::vector<std::string>& names, const std::string& value) const {
    const auto found = std::find(names.begin(), names.end(), value);
    if (found == names.end()) {
      const std::string near = nearest(value, names);
      refuse("one of " + joined(names) + (near.empty() ? "" : ": did you mean " + near + "?"));
    }
    return static_cast<std::size_t>(found - names.begin());
  }

  const Entry& entry_;
  const Key& key_;
};

std::string print(const Target& target) {
  return std::visit(
      Overloaded{
          [](const bool* v) { return cat({*v}); },
          [](const std::string* v) { return in_quotes(*v); },
          [](const float* v) { return real(cat({*v})); },
          [](const double* v) { return real(cat({*v})); },
          [](const std::vector<std::int8_t>* v) {
            return list(*v, [](std::int8_t n) { return cat({static_cast<int>(n)}); });
          },
          [](const Choice& c) { return in_quotes(c.names.at(*c.value)); },
          [](const Flags& f) {
            std::vector<std::string> set;
            for (std::size_t i = 0; i < f.names.size(); ++i) {
              if ((*f.bits >> i & 1) != 0) set.push_back(f.names[i]);
            }
            return list(set, in_quotes);
          },
          [](const Interval& i) {
            return cat({"[", (*i.value)[0], ", ", (*i.value)[1], "]"});
          },
          [](const Format& f) {
            return *f.value == "true" || *f.value == "false" ? *f.value : in_quotes(*f.value);
          },
          [](const Bytes& b) {
            const std::int64_t mib = *b.value >> 20;
            return *b.value == mib << 20 && mib > 0 ? cat({"\"", mib, " MiB\""}) : cat({*b.value});
          },
          [](const auto* whole) { return cat({*whole}); }},
      target);
}

/// name -> value as printed, of a text that write() made.
std::map<std::string, std::string> lines_of(std::string_view text, const std::string& name) {
  std::map<std::string, std::string> lines;
  for (const Entry& entry : parse(text, name)) lines[entry.name] = to_text(entry.value);
  return lines;
}

}  // namespace

namespace {

/// The name that `name` was meant to be: the right one in the wrong section, or a wrong one; "".
std::string meant(const std::string& name, std::span<const Key> keys) {
  const std::string last = "." + name.substr(name.rfind('.') + 1);
  std::vector<std::string> names;
  std::string near;
  for (const Key& known : keys) {
    names.push_back(known.name);
    if (known.name.ends_with(last)) near = known.name;
  }
  return near.empty() ? nearest(name, names) : near;
}

/// Keys that had another name once, as recipe.toml of older runs has it.
struct Renamed {
  const char* before;
  const char* now;
};
constexpr Renamed kRenamed[] = {
    {"guide.replay_experts", "guide.routing_replay: \"r3\" where that was true, else \"none\""}};

/// The section that `name` was meant to be, of those that there are; "".
std::string meant_section(const std::string& name, std::span<const Key> keys) {
  std::vector<std::string> names;
  for (const Key& key : keys) {
    const std::size_t dot = key.name.find('.');
    if (dot != std::string::npos) names.push_back(key.name.substr(0, dot));
  }
  return nearest(name, names);
}

[[noreturn]] void refuse_unknown(const Entry& entry, std::span<const Key> keys) {
  const auto below = std::find_if(keys.begin(), keys.end(), [&](const Key& key) {
    return key.name.starts_with(entry.name + ".");
  });
  if (below != keys.end()) {
    throw Error(cat({entry.where, ": ", entry.name, " is a section, and stands here as a key with ",
                     to_text(entry.value), "; its keys are ", entry.name, ".X, as ", below->name}));
  }
  for (const Renamed& key : kRenamed) {
    if (entry.name == key.before) {
      throw Error(cat({entry.where, ": ", entry.name, " has been renamed; write ", key.now}));
    }
  }
  const bool section = std::holds_alternative<Empty>(entry.value);
  const std::string near = section ? meant_section(entry.name, keys) : meant(entry.name, keys);
  throw Error(cat({entry.where, section ? ": unknown section " : ": unknown key ", entry.name,
                   near.empty() ? "; recipes/ has examples, and a run's recipe.toml every key"
                                : ": did you mean " + near + "?"}));
}

}  // namespace

void assign(std::span<const Entry> entries, std::span<const Key> keys) {
  for (const Entry& entry : entries) {
    const auto key =
        std::find_if(keys.begin(), keys.end(), [&](const Key& k) { return k.name == entry.name; });
    if (key != keys.end()) {
      std::visit(Put(entry, *key), key->target);
    } else if (!std::holds_alternative<Empty>(entry.value) ||
               std::none_of(keys.begin(), keys.end(),
                            [&](const Key& k) { return k.name.starts_with(entry.name + "."); })) {
      refuse_unknown(entry, keys);
    }
  }
}

std::string write(std::span<const Key> keys) {
  std::string out, section;
  for (const Key& key : keys) {
    const std::size_t dot = key.name.rfind('.');
    const std::string here = dot == std::string::npos ? "" : key.name.substr(0, dot);
    if (here != section) {
      out += "\n[" + here + "]\n";
      section = here;
    }
    out += "# " + key.doc + "\n" + key.name.substr(dot == std::string::npos ? 0 : dot + 1) + " = " +
           print(key.target) + "\n";
  }
  return out;
}

namespace {

/// "0 to 1", "above 0, to 100", "1 or more".
std::string numbers_of(const Key& key, bool whole) {
  constexpr double kNoEnd = 2147483647;  // what stands for none in whole numbers, or more
  const bool ends = key.most < (whole ? kNoEnd : std::numeric_limits<double>::infinity());
  if (key.above) return cat({"above ", key.least, ends ? cat({", to ", key.most}) : ""});
  return ends ? cat({key.least, " to ", key.most}) : cat({key.least, " or more"});
}

std::string may_be(const Key& key) {
  const auto in_code = [](const std::vector<std::string>& names) {
    std::string out;
    for (const std::string& name : names) out += (out.empty() ? "`" : ", `") + name + "`";
    return out;
  };
  return std::visit(
      Overloaded{[](bool*) { return std::string("true, false"); },
                 [](std::string*) { return std::string("text"); },
                 [&](std::vector<std::int8_t>*) { return "list of " + numbers_of(key, true); },
                 [&](const Choice& choice) { return in_code(choice.names); },
                 [&](const Flags& flags) { return "list of " + in_code(flags.names); },
                 [&](const Bytes&) { return "bytes, " + numbers_of(key, true); },
                 [&](const Interval&) { return "two of " + numbers_of(key, true); },
                 [&](const Format& format) { return "true, false, " + in_code(format.names); },
                 [&](const auto* number) {
                   return numbers_of(key,
                                     std::is_integral_v<std::remove_cvref_t<decltype(*number)>>);
                 }},
      key.target);
}

}  // namespace

std::string reference(std::span<const Key> keys) {
  std::string out;
  for (const Key& key : keys) {
    out += "| `" + key.name + "` | `" + print(key.target) + "` | " + may_be(key) + " | " + key.doc +
           " |\n";
  }
  return out;
}

std::string differences(std::string_view before, std::string_view after,
                        const std::string& old_file) {
  auto old_lines = lines_of(before, old_file);
  std::string out;
  for (const auto& [name, value] : lines_of(after, "the new recipe")) {
    const auto old = old_lines.extract(name);
    const std::string was = old.empty() ? "absent" : old.mapped();
    if (was != value) out += name + ": " + was + " / " + value + "\n";
  }
  for (const auto& [name, value] : old_lines) out += name + ": " + value + " / absent\n";
  return out;
}

}  // namespace lockstep::recipe
