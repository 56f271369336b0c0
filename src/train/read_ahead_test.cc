#include "train/read_ahead.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lockstep::train {
namespace {

constexpr std::int64_t kPlenty = 1 << 30;

struct Numbers : ReadAhead<int, std::string> {
  /// Each of `bytes`.
  Numbers(std::vector<int> keys, Bring bring, std::int64_t most_bytes = kPlenty,
          std::int64_t bytes = 1)
      : ReadAhead(
            std::move(keys), std::move(bring), [bytes](int) { return bytes; }, most_bytes) {}
};

std::vector<int> first(int count) {
  std::vector<int> keys(static_cast<std::size_t>(count));
  std::iota(keys.begin(), keys.end(), 0);
  return keys;
}

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
  std::atomic<int> asked = 0;
  {
    Numbers numbers(first(1 << 20), [&](int key) {
      ++asked;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return std::to_string(key);
    });
    EXPECT_EQ(numbers.take(1), "1");
  }
  EXPECT_GE(asked, 2);
  EXPECT_LT(asked, 1 << 20);
}

// What nobody has taken yet is in memory.
TEST(ReadAhead, HoldsNoMoreThanItMay) {
  constexpr std::int64_t kEach = 10;
  for (const std::int64_t most : {0, 9, 10, 35}) {
    const std::int64_t fit = std::max<std::int64_t>(most / kEach, 1);
    std::atomic<std::int64_t> brought = 0, taken = 0, held = 0;
    Numbers numbers(
        first(50),
        [&](int key) {
          held = std::max(held.load(), ++brought - taken);
          return std::to_string(key);
        },
        most, kEach);
    for (int key = 0; key < 50; ++key) {
      EXPECT_EQ(numbers.take(key), std::to_string(key));
      ++taken;
    }
    EXPECT_LE(held, fit + 1) << most;  // the one that is being taken counts here still
  }
}

TEST(ReadAhead, BringsAllBeforeWhatSomebodyWaitsFor) {
  Numbers numbers(
      first(20), [](int key) { return std::to_string(key); }, 3);
  EXPECT_EQ(numbers.take(12), "12");
  for (int key = 0; key < 20; ++key) {
    if (key == 12) continue;
    EXPECT_EQ(numbers.take(key), std::to_string(key));
  }
}

TEST(ReadAhead, EndsWhileItWaitsForRoom) {
  std::atomic<int> asked = 0;
  {
    Numbers numbers(
        first(10),
        [&](int key) {
          ++asked;
          return std::to_string(key);
        },
        2);
    while (asked < 2) std::this_thread::yield();
  }
  EXPECT_EQ(asked, 2);
}

TEST(ReadAhead, AFailureComesPastWhatHasNoRoom) {
  Numbers numbers(
      first(10),
      [](int key) -> std::string {
        if (key == 1) throw Error("the page of 1 is damaged");
        return std::to_string(key);
      },
      1);
  EXPECT_THROW(numbers.take(9), Error);
  EXPECT_EQ(numbers.take(0), "0");
}

}  // namespace
}  // namespace lockstep::train
