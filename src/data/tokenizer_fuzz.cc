// A tokenizer.json from anybody, and text from anybody: read or refused with one line; what it
// encodes, it decodes to the same bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "data/tokenizer.h"
#include "data/tokenizer_parts.h"
#include "data/utf8.h"

namespace {

using namespace lockstep;

/// Every byte a token, a few merges, GPT-2's pattern, two added tokens.
const data::Tokenizer& known() {
  static const data::Tokenizer tokenizer = [] {
    std::string vocabulary;
    int next = 256;
    for (int b = 0; b < 256; ++b) {
      const bool printable =
          (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      char letter[16];
      std::snprintf(letter, sizeof letter, "\\u%04x",
                    static_cast<unsigned>(printable ? b : next++));
      vocabulary.append("\"").append(letter).append("\":").append(std::to_string(b)).append(",");
    }
    return value_or_throw(data::Tokenizer::parse(
        R"({"normalizer":{"type":"NFC"},"added_tokens":[{"id":300,"content":"<|x|>"},)"
        R"({"id":301,"content":"<|xy|>","normalized":false}],"pre_tokenizer":)"
        R"({"type":"ByteLevel","add_prefix_space":false},"model":{"type":"BPE","vocab":{)" +
            vocabulary + R"("aa":256,"ab":257,"aaaa":258},"merges":["a a","a b","aa aa"]}})",
        "known"));
  }();
  return tokenizer;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(bytes), size);
  try {
    const auto tokens = known().encode(text);
    if (known().bytes(tokens) != data::to_nfc(text)) std::abort();
  } catch (const Error&) {
    if (data::first_invalid(text) == std::string_view::npos) std::abort();
  }
  if (data::first_invalid(data::replace_invalid(text)) != std::string_view::npos) std::abort();

  const auto parsed = data::Tokenizer::parse(text, "fuzz");
  if (!parsed) return 0;
  try {
    constexpr std::string_view kText =
        "It's 12 \xC3\xA9t\xC3\xA9s,\r\n  <|im_end|>\t\xF0\x9F\x98\x80";
    (void)parsed->decode(parsed->encode(kText));
  } catch (const Error&) {
  }
  return 0;
}
