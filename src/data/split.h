/// Pre-tokenization: cuts text into the pieces within which merges happen.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

/// A pattern that cuts text into its matches and what lies between them. Safe to share by threads.
class Splitter {
 public:
  /// `pattern` as tokenizer.json writes it, for Oniguruma; letters, numbers and white space are
  /// Unicode's. Throws Error where PCRE2 does not know the pattern.
  static Splitter regex(std::string_view pattern);
  static Splitter literal(std::string_view text);

  /// Calls piece on consecutive pieces that make up `text`, which is well-formed UTF-8. Throws
  /// Error where the pattern backtracks without end.
  void split(std::string_view text, const std::function<void(std::string_view)>& piece) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
  std::string pattern_;
};

/// Cuts by each splitter in turn: the pieces of one are what the next one cuts.
void split_all(const std::vector<Splitter>& splitters, std::string_view text,
               const std::function<void(std::string_view)>& piece);

/// GPT-2's pattern, which a ByteLevel pre-tokenizer stands for.
extern const std::string_view kGpt2Pattern;

}  // namespace lockstep::data
