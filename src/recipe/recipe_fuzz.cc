// A recipe from anybody: it is read, or refused with one line; nothing else happens.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "recipe/recipe.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const recipe::Recipe read = recipe::parse_recipe(text, "fuzz");
    // What was read can be written, and reads back as itself.
    const std::string copy = recipe::resolved(read, {});
    if (recipe::resolved(recipe::parse_recipe(copy, "copy"), {}) != copy) std::abort();
  } catch (const Error&) {
  }
  return 0;
}
