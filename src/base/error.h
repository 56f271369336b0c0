/// How things go wrong. A caller's mistake throws Error; damaged data or a failing system is a
/// Result inside store/ and model/; a broken invariant is an assert in words.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>
#include <tl/expected.hpp>

namespace lockstep {

/// One line for the user: what was wrong, its value, the remedy. Where it was found is kept aside.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message,
                 std::source_location where = std::source_location::current())
      : std::runtime_error(message), where_(where) {}

  const std::source_location& where() const { return where_; }

 private:
  std::source_location where_;
};

/// What was asked for is at fault, and nothing went wrong: an option, a recipe's key or value, or a
/// path that one of them names and that is not there or is of another kind. The program ends with
/// status 2; with 1 for every other Error: the machine, the files' contents, the run itself.
class Usage : public Error {
 public:
  // Written out: an inherited constructor with that default is more than nvcc's front end bears.
  explicit Usage(const std::string& message,
                 std::source_location where = std::source_location::current())
      : Error(message, where) {}
};

/// What a Result holds when there is no value: one line, like an Error's.
struct Fault {
  std::string message;
};

template <typename T>
using Result = tl::expected<T, Fault>;

inline tl::unexpected<Fault> fault(std::string message) {
  return tl::unexpected<Fault>(Fault{std::move(message)});
}

/// The value, or its fault thrown as an Error.
template <typename T>
T value_or_throw(Result<T> result, std::source_location where = std::source_location::current()) {
  if (!result) throw Error(result.error().message, where);
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace lockstep
