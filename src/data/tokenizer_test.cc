#include "data/tokenizer.h"

#include <gtest/gtest.h>

#include "base/philox.h"
#include "data/test_tokenizer.h"
#include "data/tokenizer_parts.h"
#include "data/utf8.h"

namespace lockstep::data {

std::string byte_tokenizer_json(const std::string& merges, const std::string& more_vocabulary) {
  std::string vocabulary;
  int next = 256;
  for (int b = 0; b < 256; ++b) {
    const bool printable =
        (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
    char escaped[16];
    std::snprintf(escaped, sizeof escaped, "\\u%04x",
                  static_cast<unsigned>(printable ? b : next++));
    vocabulary += (b > 0 ? ",\"" : "\"") + std::string(escaped) + "\":" + std::to_string(b);
  }
  const auto added = [](int id, const char* text, bool special) {
    return "{\"id\":" + std::to_string(id) + ",\"content\":\"" + text +
           "\",\"special\":" + (special ? "true" : "false") + ",\"normalized\":false}";
  };
  return R"({"version":"1.0","normalizer":{"type":"NFC"},"added_tokens":[)" +
         added(256, "<|endoftext|>", true) + "," + added(257, "<|im_start|>", true) + "," +
         added(258, "<|im_end|>", true) + "," + added(259, "<think>", false) +
         R"(],"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true},)"
         R"("decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{)" +
         vocabulary + more_vocabulary + "},\"merges\":" + merges + "}}";
}

Tokenizer byte_tokenizer(const std::string& merges, const std::string& more_vocabulary) {
  return value_or_throw(Tokenizer::parse(byte_tokenizer_json(merges, more_vocabulary), "test"));
}

namespace {

TEST(Utf8, LengthsAndReplacements) {
  EXPECT_EQ(character_length("a"), 1u);
  EXPECT_EQ(character_length("\xC3\xA9"), 2u);
  EXPECT_EQ(character_length("\xE2\x82\xAC"), 3u);
  EXPECT_EQ(character_length("\xF0\x9F\x98\x80"), 4u);
  for (const char* bad : {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80",
                          "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5", "\xE2\x82", "\xC3"}) {
    EXPECT_EQ(character_length(bad), 0u);
    EXPECT_EQ(first_invalid(std::string("a") + bad), 1u);
  }
  EXPECT_EQ(replace_invalid("a\xE2\x82"
                            "b"),
            "a\xEF\xBF\xBD"
            "b");
  EXPECT_EQ(replace_invalid("\xF0\x9F\x98"), "\xEF\xBF\xBD");
  EXPECT_EQ(replace_invalid("\xED\xA0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(replace_invalid("ok"), "ok");
}

TEST(Tokenizer, BytesAreTokensAndAddedTokensAreFound) {
  const Tokenizer tokenizer = byte_tokenizer();
  EXPECT_EQ(tokenizer.size(), 260);
  EXPECT_EQ(tokenizer.encode("3*4"), (std::vector<Token>{'3', '*', '4'}));
  EXPECT_EQ(tokenizer.encode("a<|im_end|>b<think>"), (std::vector<Token>{'a', 258, 'b', 259}));
  EXPECT_EQ(tokenizer.encode("<|im_en"), (std::vector<Token>{'<', '|', 'i', 'm', '_', 'e', 'n'}));
  EXPECT_EQ(tokenizer.encode(""), std::vector<Token>{});
  EXPECT_EQ(tokenizer.find("<|im_end|>"), 258);
  EXPECT_EQ(tokenizer.find("nothing"), std::nullopt);
  EXPECT_TRUE(tokenizer.is_special(258));
  EXPECT_FALSE(tokenizer.is_special(259));
  EXPECT_FALSE(tokenizer.is_special(-1));
  EXPECT_FALSE(tokenizer.is_special(100000));
}

TEST(Tokenizer, MergesByRankThenFromTheLeft) {
  const Tokenizer tokenizer = byte_tokenizer(R"(["b c", ["a", "b"], "a a", ["aa", "a"], "aa aa"])",
                                             R"(,"bc":260,"ab":261,"aa":262,"aaa":263,"aaaa":264)");
  EXPECT_EQ(tokenizer.encode("abc"), (std::vector<Token>{'a', 260}));
  EXPECT_EQ(tokenizer.encode("ab"), (std::vector<Token>{261}));
  EXPECT_EQ(tokenizer.encode("aaa"), (std::vector<Token>{263}));
  EXPECT_EQ(tokenizer.encode("aaaaa"), (std::vector<Token>{262, 263}));
  EXPECT_EQ(tokenizer.encode("aaaa"), (std::vector<Token>{264}));
}

TEST(Tokenizer, LongPiecesMergeAsShortOnesDo) {
  // One piece of many letters goes through the queue; cut shorter it goes through the loop.
  const Tokenizer tokenizer = byte_tokenizer(
      R"(["a b", "b a", "ab ab", "ba a", "c ab", "abab abab", "a c"])",
      R"(,"ab":260,"ba":261,"abab":262,"baa":263,"cab":264,"abababab":265,"ac":266)");
  const std::vector<std::pair<std::string, std::string>> rules = {
      {"a", "b"}, {"b", "a"}, {"ab", "ab"}, {"ba", "a"}, {"c", "ab"}, {"abab", "abab"}, {"a", "c"}};
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::string text;
    for (std::uint32_t i = 0; i < 60 + seed; ++i) {
      text += static_cast<char>('a' + philox(seed, {i, 0, 0, 0})[0] % 3);
    }
    std::vector<std::string> parts;
    for (char c : text) parts.emplace_back(1, c);
    while (true) {  // the rule itself
      std::size_t best = rules.size(), at = 0;
      for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
        for (std::size_t r = 0; r < best; ++r) {
          if (rules[r].first == parts[i] && rules[r].second == parts[i + 1]) best = r, at = i;
        }
      }
      if (best == rules.size()) break;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
    std::vector<Token> expected;
    for (const std::string& part : parts) expected.push_back(*tokenizer.find(part));
    EXPECT_EQ(tokenizer.encode(text), expected) << text;
  }
}

TEST(Tokenizer, IgnoreMergesTakesWholeWords) {
  std::string json = byte_tokenizer_json("[]", R"(,"hello":260)");
  EXPECT_EQ(value_or_throw(Tokenizer::parse(json, "test")).encode("hello").size(), 5u);
  const std::string key = R"("type":"BPE",)";
  json.insert(json.find(key) + key.size(), R"("ignore_merges":true,)");
  EXPECT_EQ(value_or_throw(Tokenizer::parse(json, "test")).encode("hello"),
            std::vector<Token>{260});
}

TEST(Tokenizer, EncodeThenDecodeIsTheNormalizedText) {
  const Tokenizer tokenizer = byte_tokenizer();
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("e\xCC\x81")), "\xC3\xA9");  // NFC
  const std::string text = "na\xC3\xAFve \xF0\x9F\x98\x80 \xE6\xBC\xA2\xE5\xAD\x97\r\n\t x";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  const std::vector<Token> tokens = tokenizer.encode("\xF0\x9F\x98\x80");
  EXPECT_EQ(tokenizer.decode(std::span(tokens).first(2)), "\xEF\xBF\xBD");
  EXPECT_EQ(tokenizer.bytes(std::span(tokens).first(2)), "\xF0\x9F");
  EXPECT_THROW(tokenizer.encode("a\xFF"), Error);
  const std::vector<Token> unknown = {'a', -5, 100000, 'b'};
  EXPECT_EQ(tokenizer.decode(unknown), "ab");
}

TEST(Tokenizer, R87_DecodingAndEncodingAgainIsNotTheIdentity) {
  // Two ways to write one text: who has the tokens keeps them, and never makes them from text.
  const Tokenizer tokenizer = byte_tokenizer(R"(["a b"])", R"(,"ab":260)");
  const std::vector<Token> sampled = {'a', 'b'};
  EXPECT_EQ(tokenizer.decode(sampled), "ab");
  EXPECT_NE(tokenizer.encode(tokenizer.decode(sampled)), sampled);
}

TEST(Tokenizer, RefusesByNameWhatItDoesNotImplement) {
  const std::string good = byte_tokenizer_json();
  ASSERT_TRUE(Tokenizer::parse(good, "t"));
  const auto refused = [&](const std::string& from, const std::string& to, const char* named) {
    std::string json = good;
    const std::size_t at = json.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    json.replace(at, from.size(), to);
    const auto parsed = Tokenizer::parse(json, "t.json");
    ASSERT_FALSE(parsed) << to;
    EXPECT_NE(parsed.error().message.find(named), std::string::npos) << parsed.error().message;
    EXPECT_EQ(parsed.error().message.find('\n'), std::string::npos);
    EXPECT_TRUE(parsed.error().message.starts_with("t.json: "));
  };
  refused(R"({"type":"NFC"})", R"({"type":"NFKC"})", "NFKC");
  refused(R"("type":"BPE")", R"("type":"Unigram")", "Unigram");
  refused(R"({"type":"ByteLevel","add_prefix_space":false)",
          R"({"type":"ByteLevel","add_prefix_space":true)", "add_prefix_space");
  refused(R"("pre_tokenizer":{"type":"ByteLevel")", R"("pre_tokenizer":{"type":"Metaspace")",
          "Metaspace");
  refused(R"("decoder":{"type":"ByteLevel"})", R"("decoder":{"type":"Fuse"})", "Fuse");
  refused(R"("version":"1.0")", R"("post_processor":{"type":"TemplateProcessing"})",
          "TemplateProcessing");
  refused(R"("id":258)", R"("id":258,"lstrip":true)", "lstrip");
  refused(R"("id":258)", R"("id":-1)", "-1");
  refused(R"("id":258)", R"("id":9223372036854775808)", "9223372036854775808");
}

TEST(Tokenizer, BrokenVocabulariesAndMergesAreRefused) {
  EXPECT_FALSE(Tokenizer::parse("", "t"));
  EXPECT_FALSE(Tokenizer::parse("{}", "t"));
  EXPECT_FALSE(Tokenizer::parse(byte_tokenizer_json(R"(["a zz"])"), "t"));
  EXPECT_FALSE(Tokenizer::parse(byte_tokenizer_json(R"(["a b"])"), "t"));  // no token "ab"
  EXPECT_FALSE(Tokenizer::parse(byte_tokenizer_json(R"(["a b", "a b"])", R"(,"ab":260)"), "t"));
  EXPECT_FALSE(Tokenizer::parse(byte_tokenizer_json(R"([["a"]])"), "t"));
  EXPECT_FALSE(Tokenizer::parse(byte_tokenizer_json(R"([7])"), "t"));
  EXPECT_FALSE(Tokenizer::parse(byte_tokenizer_json("[]", R"(,"xy":5)"), "t"));  // 5 twice
  EXPECT_FALSE(Tokenizer::parse(byte_tokenizer_json("[]", R"(,"xy":99999999999)"), "t"));
  EXPECT_FALSE(Tokenizer::parse(byte_tokenizer_json("{}"), "t"));
}

TEST(Tokenizer, AVocabularyThatIsTooSmallIsRefused) {
  ModelConfig config;
  config.vocabulary = 259;
  EXPECT_THROW(check_vocabulary(byte_tokenizer(), config), Error);
  config.vocabulary = 260;
  check_vocabulary(byte_tokenizer(), config);
}

}  // namespace
}  // namespace lockstep::data
