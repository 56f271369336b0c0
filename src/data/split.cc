#include "data/split.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cctype>
#include <cstdint>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "data/utf8.h"

namespace lockstep::data {
namespace {

// White space by Unicode's property. PCRE2's \s has one more, U+180E, which lost the property.
constexpr std::string_view kSpaces =
    R"(\x{9}-\x{d} \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// The escapes that mean the same to Oniguruma, for which patterns are written, and to PCRE2.
constexpr std::string_view kEscapes = "sSpPrntdDx";

/// The pattern with \s and \S spelled out.
std::string translate(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c != '\\' || i + 1 == pattern.size()) {
      if (in_class && pattern.substr(i, 2) == "&&") {
        throw Error(cat({"pre-tokenizer pattern ", pattern, ": && in a class is not implemented"}));
      }
      if (c == '[') in_class = true;
      if (c == ']') in_class = false;
      out += c;
      continue;
    }
    const char escaped = pattern[++i];
    if (std::isalnum(static_cast<unsigned char>(escaped)) &&
        kEscapes.find(escaped) == kEscapes.npos) {
      throw Error(cat({"pre-tokenizer pattern ", pattern, ": \\", escaped, " is not implemented"}));
    }
    if (escaped == 's') {
      out += in_class ? std::string(kSpaces) : cat({"[", kSpaces, "]"});
    } else if (escaped == 'S' && !in_class) {
      out += cat({"[^", kSpaces, "]"});
    } else if (escaped == 'S') {
      throw Error(cat({"pre-tokenizer pattern ", pattern, ": \\S in a class is not implemented"}));
    } else {
      out += {'\\', escaped};
    }
  }
  return out;
}

struct MatchDataFree {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

struct ContextFree {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};

using MatchData = std::unique_ptr<pcre2_match_data, MatchDataFree>;
using Context = std::unique_ptr<pcre2_match_context, ContextFree>;

// A match backtracks at most as often as a text of some megabytes of white space asks for.
constexpr std::uint32_t kMatchLimit = 50'000'000;
constexpr std::uint32_t kHeapLimitKib = 64 << 10;

}  // namespace

const std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct Splitter::Compiled {
  pcre2_code* code = nullptr;  // nullptr: the pattern is a literal

  Compiled() = default;
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;
  ~Compiled() { pcre2_code_free(code); }
};

Splitter Splitter::regex(std::string_view pattern) {
  const std::string translated = translate(pattern);
  int failed = 0;
  PCRE2_SIZE where = 0;
  auto compiled = std::make_shared<Compiled>();
  compiled->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &failed, &where, nullptr);
  if (!compiled->code) {
    std::array<PCRE2_UCHAR, 128> why{};
    pcre2_get_error_message(failed, why.data(), why.size());
    throw Error(
        cat({"pre-tokenizer pattern ", pattern, ": ", reinterpret_cast<const char*>(why.data())}));
  }
  pcre2_jit_compile(compiled->code, PCRE2_JIT_COMPLETE);  // where there is none, it interprets
  Splitter splitter;
  splitter.compiled_ = std::move(compiled);
  splitter.pattern_ = pattern;
  return splitter;
}

Splitter Splitter::literal(std::string_view text) {
  if (text.empty()) throw Error("pre-tokenizer: a Split at an empty string");
  Splitter splitter;
  splitter.compiled_ = std::make_shared<Compiled>();
  splitter.pattern_ = text;
  return splitter;
}

namespace {

struct Found {
  std::size_t first, end;
};

/// Finds matches of one pattern one after another.
class Matcher {
 public:
  Matcher(const pcre2_code* code, std::string_view pattern)
      : code_(code),
        pattern_(pattern),
        data_(pcre2_match_data_create(1, nullptr)),
        context_(pcre2_match_context_create(nullptr)) {
    pcre2_set_match_limit(context_.get(), kMatchLimit);
    pcre2_set_heap_limit(context_.get(), kHeapLimitKib);
  }

  std::optional<Found> next(std::string_view text, std::size_t from) const {
    int result = match(text, from, PCRE2_NO_UTF_CHECK);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) {
      result = match(text, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT);
    }
    if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
    if (result < 0) {
      throw Error(cat({"pre-tokenizer pattern ", pattern_, ": gave up on a text of ", text.size(),
                       " bytes (PCRE2 ", result, "); split the text"}));
    }
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data_.get());
    return Found{ends[0], ends[1]};
  }

 private:
  int match(std::string_view text, std::size_t from, std::uint32_t options) const {
    return pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from, options,
                       data_.get(), context_.get());
  }

  const pcre2_code* code_;
  std::string_view pattern_;
  MatchData data_;
  Context context_;
};

std::optional<Found> find_literal(std::string_view text, std::size_t from, std::string_view what) {
  const std::size_t first = text.find(what, from);
  if (first == std::string_view::npos) return std::nullopt;
  return Found{first, first + what.size()};
}

}  // namespace

void Splitter::split(std::string_view text,
                     const std::function<void(std::string_view)>& piece) const {
  std::optional<Matcher> matcher;
  if (compiled_->code) matcher.emplace(compiled_->code, pattern_);
  std::size_t done = 0;  // up to here, pieces are out
  std::size_t from = 0;  // here, the search goes on
  while (from < text.size()) {
    const auto found = matcher ? matcher->next(text, from) : find_literal(text, from, pattern_);
    if (!found) break;
    if (found->end <= found->first) {  // an empty match cuts nothing
      from = found->first + character_length(text.substr(found->first));
      if (found->first == text.size()) break;
      continue;
    }
    if (found->first > done) piece(text.substr(done, found->first - done));
    piece(text.substr(found->first, found->end - found->first));
    done = from = found->end;
  }
  if (done < text.size()) piece(text.substr(done));
}

void split_all(const std::vector<Splitter>& splitters, std::string_view text,
               const std::function<void(std::string_view)>& piece) {
  std::vector<std::string_view> pieces = {text};
  if (text.empty()) return;
  for (const Splitter& splitter : splitters) {
    std::vector<std::string_view> finer;
    for (std::string_view part : pieces) {
      splitter.split(part, [&](std::string_view cut) { finer.push_back(cut); });
    }
    pieces = std::move(finer);
  }
  for (std::string_view part : pieces) piece(part);
}

}  // namespace lockstep::data
