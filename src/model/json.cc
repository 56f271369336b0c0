#include "model/json.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "base/text.h"
#include "model/file.h"

namespace lockstep {
namespace {

using nlohmann::json;

/// Sees the parser's events. What it refuses, it throws: the parser passes that on.
class Guard {
 public:
  explicit Guard(int max_depth) : max_depth_(max_depth) {}

  bool operator()(int depth, json::parse_event_t event, json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
        check(depth);
        keys_.emplace_back();
        break;
      case json::parse_event_t::array_start: check(depth); break;
      case json::parse_event_t::key:
        if (!keys_.back().insert(value.get_ref<const std::string&>()).second) {
          throw Error(cat({"key \"", value.get_ref<const std::string&>(), "\" stands twice"}));
        }
        break;
      case json::parse_event_t::object_end: keys_.pop_back(); break;
      default: break;
    }
    return true;
  }

 private:
  void check(int depth) const {
    if (depth >= max_depth_) throw Error(cat({"is nested deeper than ", max_depth_}));
  }

  int max_depth_;
  std::vector<std::unordered_set<std::string>> keys_;
};

}  // namespace

Result<json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits) {
  if (text.size() > limits.bytes) {
    return fault(
        cat({what, ": JSON of ", text.size(), " bytes; at most ", limits.bytes, " are read"}));
  }
  try {
    return json::parse(text.begin(), text.end(), Guard(limits.depth));
  } catch (const json::parse_error& error) {
    return fault(cat({what, ": not JSON at byte ", error.byte}));
  } catch (const json::exception&) {
    return fault(cat({what, ": not JSON: a number is out of range"}));
  } catch (const Error& error) {
    return fault(cat({what, ": JSON ", error.what()}));
  }
}

Result<std::string> read_text(const std::filesystem::path& path, std::size_t limit) {
  std::error_code failed;
  const std::uintmax_t size = std::filesystem::file_size(path, failed);
  if (failed) return fault(cat({path.string(), ": cannot read: ", failed.message()}));
  if (size > limit) {
    return fault(cat({path.string(), ": ", size, " bytes; at most ", limit, " are read"}));
  }
  std::ifstream in(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(size), '\0');
  if (!in || !in.read(text.data(), static_cast<std::streamsize>(text.size()))) {
    return fault(cat({path.string(), ": cannot read: ", std::strerror(errno)}));
  }
  return text;
}

Result<json> read_json(const std::filesystem::path& path, const JsonLimits& limits) {
  return read_text(path, limits.bytes).and_then([&](const std::string& text) {
    return parse_json(text, path.string(), limits);
  });
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  const Destination to = destination(path);
  errno = 0;
  std::ofstream out(to.part, std::ios::binary | (to.in_place() ? std::ios::app : std::ios::trunc));
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.close();
  std::error_code error;
  if (!out) {
    error = std::error_code(errno, std::generic_category());
  } else if (!to.in_place()) {
    std::filesystem::rename(to.part, to.place, error);
  }
  if (!error) return;
  std::error_code ignored;
  if (!to.in_place()) std::filesystem::remove(to.part, ignored);
  throw Error(cat({path.string(), ": cannot write: ", error.message()}));
}

}  // namespace lockstep
