#include "data/answer.h"

#include <gtest/gtest.h>

#include <optional>

namespace lockstep::data {
namespace {

TEST(Answer, LastNumber) {
  const auto is = [](std::string_view text, std::optional<std::string> expected) {
    EXPECT_EQ(last_number(text), expected) << text;
  };
  is("30*6=180;7*6=42;180+42=222", "222");
  is("347-586=-239", "-239");
  is("5-3", "3");
  is("x is -3.", "-3");
  is("(2)-3", "3");
  is("costs $1,234.50 in all.", "1,234.50");
  is("12,34", "34");
  is("in 1,234,567 of 12,3456", "3456");
  is("about .5", ".5");
  is("3.", "3");
  is("2/3", "2/3");
  is("12/4=3", "3");
  is("so \\frac{1}{2}", "\\frac{1}{2}");
  is("so -\\dfrac{3}{4} then", "-\\dfrac{3}{4}");
  is("50%", "50%");
  is("50\\%.", "50\\%");
  is("1.5e3", "1.5e3");
  is("1.5 \\times 10^{3} m", "1.5 \\times 10^{3}");
  is("\xE2\x88\x92"
     "7",
     "\xE2\x88\x92"
     "7");
  is("no number", std::nullopt);
  is("", std::nullopt);
  is("\\frac{a}{b}", std::nullopt);
  is("123456789012345678901234567890", "123456789012345678901234567890");
}

TEST(Answer, LastBoxed) {
  EXPECT_EQ(last_boxed("\\boxed{1} or \\boxed{2}"), "2");
  EXPECT_EQ(last_boxed("\\boxed{\\frac{1}{\\sqrt{2}}}."), "\\frac{1}{\\sqrt{2}}");
  EXPECT_EQ(last_boxed("\\boxed{\\{1, 2\\}}"), "\\{1, 2\\}");
  EXPECT_EQ(last_boxed("\\boxed 7 is"), "7");
  EXPECT_EQ(last_boxed("\\boxed{{{{}}}}"), "{{{}}}");
  EXPECT_EQ(last_boxed("\\boxed{1"), std::nullopt);
  EXPECT_EQ(last_boxed("\\boxed"), std::nullopt);
  EXPECT_EQ(last_boxed("none"), std::nullopt);
}

TEST(Answer, SameNumber) {
  const auto same = [](const char* a, const char* b) {
    EXPECT_TRUE(same_number(a, b)) << a << " " << b;
    EXPECT_TRUE(same_number(b, a)) << b << " " << a;
  };
  same("1,234", "1234");
  same("007", "7");
  same("+3", "3");
  same("-3",
       "\xE2\x88\x92"
       "3");
  same("3.", "3");
  same(".5", "0.50");
  same("1/2", "0.5");
  same("\\frac{1}{2}", "2/4");
  same("\\frac12", "1/2");
  same("-\\frac{3}{4}", "\\dfrac{-3}{4}");
  same("1\\frac{1}{2}", "1.5");
  same("0.333333", "1/3");
  same("0.6666666667", "2/3");
  same("3.3333333e-1", "1/3");
  same("3.33333333e1", "100/3");
  same("33.333333%", "1/3");
  same("33.333333", "100/3%");
  same("0.33333333", "33\\frac{1}{3}%");
  same("50%", "0.5");
  same("50\\%", "50");
  same("50%", "50.0%");
  same("1.5e3", "1500");
  same("1.5\\times10^{3}", "1500");
  same("2e-3", "1/500");
  same("$5", "5");
  same("\\text{12}", "12");
  same("123456789012345678", "123456789012345678.0");
  same("0", "-0");
}

TEST(Answer, DifferentNumbers) {
  const auto differ = [](const char* a, const char* b) {
    EXPECT_FALSE(same_number(a, b)) << a << " " << b;
    EXPECT_FALSE(same_number(b, a)) << b << " " << a;
  };
  differ("1,23", "123");
  differ("0.33", "1/3");
  differ("0.333334", "1/3");
  differ("1.234567e-10", "1/10000000");
  differ("0.123456%", "1/4000000");
  differ("33.333334%", "1/3");
  differ("3.333334e-1", "1/3");
  differ("3.333333e5", "1000000/3");  // its last digit counts tenths
  differ("3e-7", "1/3000000");
  differ("0.3333333333333333333e-18", "1/3");
  differ("123456789012345678", "123456789012345677");
  differ("0.0000001", "0.0000002");
  differ("3", "-3");
  differ("5%", "0.5");
  differ("1/0", "1/0");
  differ("x", "x");
  differ("", "");
  differ("12", "12 apples");
  differ("1e99", "1e99");
}

TEST(Answer, SameAnswerInWords) {
  EXPECT_TRUE(same_answer("\\text{Tuesday}", "Tuesday."));
  EXPECT_TRUE(same_answer("x^2 + 1", "x^2+1"));
  EXPECT_TRUE(same_answer("\\left(1, 2\\right)", "(1,2)"));
  EXPECT_TRUE(same_answer("\\dfrac{x}{2}", "\\frac{x}{2}"));
  EXPECT_TRUE(same_answer("90^\\circ", "90"));
  EXPECT_TRUE(same_answer("123456789012345678901", "123456789012345678901"));
  EXPECT_FALSE(same_answer("x", "y"));
}

TEST(Answer, Judges) {
  EXPECT_TRUE(correct(Judge::kExact, " 42\n", "42"));
  EXPECT_FALSE(correct(Judge::kExact, "42.0", "42"));
  EXPECT_TRUE(correct(Judge::kNumber, "so 41, no, 42.0", "42"));
  EXPECT_FALSE(correct(Judge::kNumber, "42 or 43", "42"));
  EXPECT_TRUE(correct(Judge::kBoxed, "\\boxed{42} is 43", "42"));
  EXPECT_FALSE(correct(Judge::kBoxed, "42", "42"));
  EXPECT_TRUE(correct(Judge::kAnswer, "42", "42"));
  EXPECT_FALSE(correct(Judge::kAnswer, "\\boxed{41} 42", "42"));
  EXPECT_FALSE(correct(Judge::kAnswer, "", ""));
}

TEST(Answer, Forms) {
  EXPECT_TRUE(in_form(Form::kAny, ""));
  EXPECT_TRUE(in_form(Form::kBoxed, "a \\boxed{1}"));
  EXPECT_FALSE(in_form(Form::kBoxed, "\\boxed{1} \\boxed{2}"));
  EXPECT_FALSE(in_form(Form::kBoxed, "\\boxed{1"));
  EXPECT_TRUE(in_form(Form::kThink, "<think>\nhm\n</think>\n4"));
  EXPECT_FALSE(in_form(Form::kThink, "<think>hm</think>"));
  EXPECT_FALSE(in_form(Form::kThink, "hm</think>4"));
  EXPECT_FALSE(in_form(Form::kThink, "<think>a</think><think>b</think>4"));
  EXPECT_FALSE(in_form(Form::kThink, "4"));
}

}  // namespace
}  // namespace lockstep::data
