#include "train/read_ahead.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace lockstep::train {
namespace {

using Numbers = ReadAhead<int, std::string>;

TEST(ReadAhead, BringsInOrderAndGivesInAnyOrder) {
  std::vector<int> asked;
  {
    Numbers numbers({3, 1, 2}, [&](int key) {
      asked.push_back(key);
      return std::to_string(key);
    });
    EXPECT_TRUE(numbers.has(1));
    EXPECT_FALSE(numbers.has(4));
    EXPECT_EQ(numbers.take(2), "2");
    EXPECT_EQ(numbers.take(3), "3");
    EXPECT_EQ(numbers.take(1), "1");
  }
  EXPECT_EQ(asked, (std::vector{3, 1, 2}));
}

// Whoever asks for a later one must not wait for what nobody will bring.
TEST(ReadAhead, AFailureIsToldToAllThatRemain) {
  std::atomic<int> asked = 0;
  Numbers numbers({0, 1, 2, 3}, [&](int key) -> std::string {
    ++asked;
    if (key == 1) throw Error("the page of 1 is damaged");
    return std::to_string(key);
  });
  EXPECT_EQ(numbers.take(0), "0");
  for (const int key : {3, 1, 2}) {
    try {
      numbers.take(key);
      ADD_FAILURE() << key;
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "the page of 1 is damaged") << key;
    }
  }
  EXPECT_EQ(asked, 2);
}

TEST(ReadAhead, EndsWithoutWhatNobodyTook) {
  std::vector<int> keys(10000);
  std::iota(keys.begin(), keys.end(), 0);
  std::atomic<int> asked = 0;
  {
    Numbers numbers(keys, [&](int key) {
      ++asked;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return std::to_string(key);
    });
    EXPECT_EQ(numbers.take(1), "1");
  }
  EXPECT_GE(asked, 2);
  EXPECT_LT(asked, 10000);  // ten seconds
}

}  // namespace
}  // namespace lockstep::train
