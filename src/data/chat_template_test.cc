#include "data/chat_template.h"

#include <gtest/gtest.h>

namespace lockstep::data {
namespace {

std::string render(std::string_view source, const std::vector<Message>& messages = {}) {
  return value_or_throw(ChatTemplate::parse(source, "t")).render(messages);
}

std::string fault_of(std::string_view source) {
  const auto parsed = ChatTemplate::parse(source, "t");
  if (!parsed) return parsed.error().message;
  try {
    parsed->render(std::vector<Message>{{"user", "hi"}});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ChatTemplate, Expressions) {
  const std::vector<Message> messages = {{"system", "be brief"}, {"user", "  hi  "}};
  const auto is = [&](std::string_view source, std::string_view expected) {
    EXPECT_EQ(render(source, messages), expected) << source;
  };
  is("{{ messages[0].role + '/' + messages[-1]['content'] }}", "system/  hi  ");
  is("{{ messages|length - 1 }}", "1");
  is("{{ messages[::-1][0].role }}{{ messages[1:]|length }}{{ 'abc'[:2] }}", "user1ab");
  is("{{ 'a' if messages[0].none is defined else 'b' }}", "b");
  is("{{ messages[5] is undefined }}{{ nothing }}", "True");
  is("{{ 1 < 2 and not 2 <= 1 or x }}", "True");
  is("{{ 'x' in 'axb' }}{{ 'x' not in ['x'] }}", "TrueFalse");
  is("{{ messages[1].content.strip() ~ 1 }}{{ messages[1].content | trim }}", "hi1hi");
  is(R"({{ "a</think>\n\nb".split('</think>')[-1].lstrip('\n') }})", "b");
  is("{{ messages[0].content is string and messages is not string }}", "True");
  is("{{ -3 + 1 }}", "-2");
}

TEST(ChatTemplate, Blocks) {
  EXPECT_EQ(render("{% if x %}a{% elif 1 %}b{% else %}c{% endif %}"), "b");
  EXPECT_EQ(render("{% if x %}a{% elif none %}b{% else %}c{% endif %}d"), "cd");
  EXPECT_EQ(render("{% for i in [1, 2, 3] %}{{ i }}{{ ',' if not loop.last }}{% endfor %}"),
            "1,2,3");
  EXPECT_EQ(render("{% for i in [] %}x{% else %}none{% endfor %}"), "none");
  EXPECT_EQ(render("{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}"), "1");
  EXPECT_EQ(render("{% set n = namespace(x=1) %}{% for i in [1] %}{% set n.x = 2 %}{% endfor %}"
                   "{{ n.x }}"),
            "2");
  EXPECT_EQ(render("a {#- gone -#} b"), "ab");
  EXPECT_EQ(render("a\n  {%- if 1 -%}\n  b\n  {%- endif %}\nc\n"), "abc");
  EXPECT_EQ(render("a\n  {% if 1 %}\n  b\n  {% endif %}\nc\n"), "a\n  b\nc");
  EXPECT_EQ(render("{{ '%}' }}{{ \"}}\" }}"), "%}}}");
}

TEST(ChatTemplate, RefusesByNameWhatItDoesNotImplement) {
  const auto refused = [](std::string_view source, std::string_view named) {
    const std::string message = fault_of(source);
    EXPECT_NE(message.find(named), std::string::npos) << source << " -> " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  };
  refused("{% macro f() %}{% endmacro %}", "macro");
  refused("\n\n{% include 'x' %}", "line 3: {% include %}");
  refused("{{ messages | map('upper') }}", "map");
  refused("{{ 'x'.replace('x', 'y') }}", "replace");
  refused("{{ strftime_now('%d') }}", "strftime_now");
  refused("{{ 3 is odd }}", "odd");
  refused("{{ 2 * 3 }}", "*");
  refused("{{ messages }}", "printing a list");
  refused("{{ nothing.field }}", "undefined");
  refused("{{ raise_exception('roles must alternate') }}", "roles must alternate");
  refused("{% if 1 %}", "{% if %} is not closed");
  refused("{% for x in messages %}", "{% for %} is not closed");
  refused("{% endif %}", "endif");
  refused("{{ 'x", "not closed");
  refused("{{ 'x' }", "not closed");
  refused("{{ (1 }}", ")");
  refused("{{ }}", "not implemented");
  refused("{{ " + std::string(5000, '(') + " }}", "deeply");
  refused("{{ " + std::string(5000, '-') + "1 }}", "deeply");
  refused("{% for a, b in messages %}{% endfor %}", "\"in\"");
}

TEST(ChatTemplate, ElifChainsAndBlocksHaveAnEnd) {
  std::string chain = "{% if 0 %}";
  for (int i = 0; i < 5000; ++i) chain += "{% elif 0 %}";
  EXPECT_NE(fault_of(chain + "{% endif %}").find("deeply"), std::string::npos);
}

// Such a chain leans to the left: its tree is as deep as it is long.
TEST(ChatTemplate, ChainsAndValuesHaveAnEnd) {
  const auto chain = [](std::string first, std::string_view link, int count) {
    for (int i = 0; i < count; ++i) first += link;
    return first;
  };
  for (const char* link : {"~'a'", " or 0", " and 1", "==1", " in 'a'", " not in 'a'", "+1", ".x",
                           "[0]", "|trim", " is none", ".strip()", "[:1]"}) {
    const std::string message = fault_of("{{ " + chain("x", link, 100'000) + " }}");
    EXPECT_NE(message.find("too deep"), std::string::npos) << link << " -> " << message;
  }
  EXPECT_EQ(render("{{ " + chain("'a'", "~'a'", 200) + " }}"), std::string(201, 'a'));
  EXPECT_EQ(render("{{ [" + chain("1", ",1", 5000) + "]|length }}"), "5001");
  EXPECT_NE(fault_of("{% set x = [] %}" + chain("", "{% set x = [x] %}", 5000)).find("nested"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep::data
