// TOML into entries: the one file that knows of toml++.
//
// toml++ asserts where it should refuse ("[.x" is one such text), and without assertions it
// assumes.
// Here its assertions are kept, and are errors like any other.
#undef NDEBUG
#pragma GCC diagnostic ignored "-Wterminate"
#include <stdexcept>
#define TOML_ASSERT(expr) ((expr) ? void() : throw std::logic_error("it breaks off in a name"))
#define TOML_ENABLE_FORMATTERS 0
#define TOML_ENABLE_UNRELEASED_FEATURES 0
#include <toml++/toml.h>

#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "recipe/table.h"

namespace lockstep::recipe {
namespace {

std::string where_of(const toml::node& node, const std::string& file) {
  const auto line = node.source().begin.line;
  return line == 0 ? file : cat({file, ":", line});
}

Value list_of(const toml::array& array, const std::string& name, const std::string& where) {
  std::vector<std::int64_t> numbers;
  std::vector<std::string> words;
  for (const toml::node& element : array) {
    if (const auto* number = element.as_integer()) {
      numbers.push_back(number->get());
    } else if (const auto* word = element.as_string()) {
      words.push_back(word->get());
    } else {
      throw Error(where + ": " + name + " holds something that is neither whole number nor text");
    }
  }
  if (!numbers.empty() && !words.empty()) {
    throw Error(where + ": " + name + " mixes numbers and text in one list");
  }
  if (!numbers.empty()) return numbers;
  return words;
}

void collect(const toml::table& table, const std::string& prefix, const std::string& file,
             std::vector<Entry>& entries) {
  for (const auto& [key, node] : table) {
    const std::string name = prefix + std::string(key.str());
    const std::string where = where_of(node, file);
    if (const auto* inner = node.as_table()) {
      collect(*inner, name + ".", file, entries);
    } else if (const auto* array = node.as_array()) {
      entries.push_back({name, list_of(*array, name, where), where});
    } else if (const auto* boolean = node.as_boolean()) {
      entries.push_back({name, boolean->get(), where});
    } else if (const auto* integer = node.as_integer()) {
      entries.push_back({name, integer->get(), where});
    } else if (const auto* real = node.as_floating_point()) {
      entries.push_back({name, real->get(), where});
    } else if (const auto* text = node.as_string()) {
      entries.push_back({name, text->get(), where});
    } else {
      throw Error(where + ": " + name + " is a date or time, which no key takes");
    }
  }
}

}  // namespace

std::vector<Entry> parse(std::string_view text, const std::string& file) {
  constexpr std::size_t kMost = 64 << 10;  // also bounds how deep dotted keys can nest
  if (text.size() > kMost) {
    throw Error(
        cat({file, ": ", text.size(), " bytes are no recipe; at most ", kMost, " are read"}));
  }
  try {
    std::vector<Entry> entries;
    collect(toml::parse(text, file), "", file, entries);
    return entries;
  } catch (const toml::parse_error& error) {
    throw Error(cat({file, ":", error.source().begin.line, ": not TOML: ", error.description()}));
  } catch (const std::logic_error& error) {
    throw Error(cat({file, ": not TOML: ", error.what()}));
  }
}

Entry parse_assignment(std::string_view text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    throw Error(cat({"'", text, "' is no assignment; write key=value, as trainer.lr=1e-5"}));
  }
  const std::string name(text.substr(0, equals)), value(text.substr(equals + 1));
  const std::string where = "command line";
  try {
    const toml::table table = toml::parse("value = " + value);
    std::vector<Entry> entries;
    if (table.size() == 1) collect(table, "", where, entries);
    if (entries.size() == 1 && entries[0].name == "value") {
      return {name, std::move(entries[0].value), where};
    }
  } catch (const std::logic_error&) {
  } catch (const toml::parse_error&) {
    // Text that a shell has stripped of its quotes.
  }
  return {name, value, where};
}

}  // namespace lockstep::recipe
