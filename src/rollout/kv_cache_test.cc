#include "rollout/kv_cache.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "device/testing.h"

namespace lockstep::rollout {
namespace {

Agreement agreement(int kv_heads = 2, bool fp4 = true) {
  Agreement a;
  a.model = {.num_layers = 3,
             .hidden = 64,
             .expert_width = 32,
             .num_experts = 4,
             .experts_per_token = 2,
             .num_heads = 2 * kv_heads,
             .num_kv_heads = kv_heads,
             .head_dim = 16,
             .vocabulary = 64,
             .max_positions = 256};
  a.contract = fp4 ? contracts::lockstep(3) : contracts::bf16();
  if (fp4) a.contract.kv_exponents.assign(6, -4);
  return a;
}

KvCache cache(std::int64_t frames, std::int64_t host, Device device = {}) {
  const Agreement a = agreement();
  const std::int64_t bytes = cache_layout(a, 4)[0].k.page_bytes;
  return KvCache(a, {.cache_bytes = frames * bytes, .swap_bytes = host * bytes, .page_tokens = 4},
                 device);
}

/// The caches whose pages' bytes matter.
class KvCacheOn : public ::testing::TestWithParam<Device> {
 protected:
  void fill(KvCache& cache, Page page, int value) {
    ASSERT_FALSE(cache.on_host(page));
    fill_bytes(const_cast<std::byte*>(cache.bytes(page)), GetParam(),
               static_cast<std::uint8_t>(value), cache.page_bytes());
  }
  int value(KvCache& cache, Page page) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(cache.page_bytes()));
    const Device at = cache.on_host(page) ? Device{} : GetParam();
    synchronize(GetParam());  // its way to the host may not have ended
    copy_bytes(bytes.data(), {}, cache.bytes(page), at, cache.page_bytes());
    synchronize(GetParam());
    EXPECT_EQ(bytes.front(), bytes.back());
    return std::to_integer<int>(bytes[7]);
  }
};

// Heads 3, 4 and 8: rows of all layers, K and V, lie apart and inside their page.
TEST(KvCache, R47_RowsLieApartForAnyNumberOfHeads) {
  for (const bool fp4 : {true, false}) {
    for (const int heads : {1, 3, 4, 8}) {
      const Agreement a = agreement(heads, fp4);
      const std::vector<LayerKv> layers = cache_layout(a, 16);
      std::vector<int> owners(static_cast<std::size_t>(layers[0].k.page_bytes), 0);
      for (const LayerKv& layer : layers) {
        for (const kernels::PagedKv* kv : {&layer.k, &layer.v}) {
          EXPECT_EQ(kv->row_bytes, fp4 ? heads * 16 / 2 + heads : heads * 16 * 2);
          for (std::int64_t i = 0; i < 16 * kv->row_bytes; ++i) {
            EXPECT_EQ(owners.at(static_cast<std::size_t>(kv->offset + i))++, 0);
          }
        }
      }
    }
  }
}

TEST(KvCache, LayersThatTheContractLeavesOutStayBf16) {
  Agreement a = agreement();
  a.contract.layers = LayerSet::range(1, 3);
  const std::vector<LayerKv> layers = cache_layout(a, 16);
  EXPECT_EQ(layers[0].k.rule.element, Element::kBf16);
  EXPECT_EQ(layers[1].k.rule, a.contract.k);
  EXPECT_EQ(layers[1].v.exponent, -4);
}

TEST(KvCache, R50_RefusesAContractWithoutExponents) {
  Agreement a = agreement();
  a.contract.kv_exponents.clear();
  EXPECT_THROW(cache_layout(a, 16), Error);
}

TEST(KvCache, RefusesABudgetOfLessThanAPage) {
  try {
    KvCache(agreement(), {.cache_bytes = 100});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rollout.cache is 100"), std::string::npos);
  }
}

TEST(KvCache, GivesEveryFrameOnceAndTakesItBack) {
  KvCache c = cache(3, 0);
  std::vector<Page> pages = {c.take(), c.take(), c.take()};
  EXPECT_EQ(c.take(), kNoPage);
  EXPECT_EQ(c.used_frames(), 3);
  c.drop(pages[1], false);
  EXPECT_EQ(c.free_frames(), 1);
  EXPECT_NE(c.take(), kNoPage);
  EXPECT_EQ(c.take(), kNoPage);
}

TEST_P(KvCacheOn, WhoWritesIntoASharedPageCopiesItFirst) {
  KvCache c = cache(3, 0, GetParam());
  const Page page = c.take();
  fill(c, page, 5);
  c.share(page);
  const Page mine = c.own(page);
  EXPECT_NE(mine, page);
  EXPECT_EQ(value(c, mine), 5);
  fill(c, mine, 6);
  EXPECT_EQ(value(c, page), 5);
  EXPECT_EQ(c.own(page), page);  // the last one writes in place
}

// R52: what comes back from host memory is what went.
TEST_P(KvCacheOn, R52_ParkedPagesComeBackWithTheirBytes) {
  KvCache c = cache(2, 2, GetParam());
  const Page a = c.take(), b = c.take();
  fill(c, a, 1);
  fill(c, b, 2);
  EXPECT_TRUE(c.park(a));
  EXPECT_TRUE(c.on_host(a));
  EXPECT_EQ(value(c, a), 1);  // readable where it is
  const Page other = c.take();
  fill(c, other, 9);
  EXPECT_FALSE(c.unpark(a));  // no frame
  c.drop(b, false);
  EXPECT_TRUE(c.unpark(a));
  EXPECT_EQ(value(c, a), 1);
  EXPECT_EQ(value(c, other), 9);
}

TEST_P(KvCacheOn, ASharedPageStaysWhileOneUserRuns) {
  KvCache c = cache(2, 2, GetParam());
  const Page page = c.take();
  fill(c, page, 3);
  c.share(page);
  EXPECT_FALSE(c.park(page));
  EXPECT_FALSE(c.on_host(page));
  c.drop(page, false);  // the one who ran: what is left is parked, its frame is free
  EXPECT_TRUE(c.on_host(page));
  EXPECT_EQ(c.free_frames(), 2);
  EXPECT_TRUE(c.unpark(page));
  EXPECT_EQ(value(c, page), 3);
  c.drop(page, false);
  EXPECT_EQ(c.free_frames(), 2);
}

TEST_P(KvCacheOn, TheLastRunningUserOfASharedPageNeedsNoFrameToOwnIt) {
  KvCache c = cache(1, 1, GetParam());
  const Page page = c.take();
  fill(c, page, 4);
  c.share(page);
  c.park(page);
  const Page mine = c.own(page);
  ASSERT_NE(mine, kNoPage);
  EXPECT_EQ(value(c, mine), 4);
  fill(c, mine, 8);
  EXPECT_TRUE(c.on_host(page));
  EXPECT_EQ(value(c, page), 4);
}

TEST_P(KvCacheOn, WithHostMemoryFullPagesLeaveWhenTheyCan) {
  KvCache c = cache(2, 1, GetParam());
  const Page a = c.take(), b = c.take();
  fill(c, a, 1);
  fill(c, b, 2);
  EXPECT_TRUE(c.park(a));
  EXPECT_FALSE(c.park(b));  // host memory is full: b stays in its frame
  const Page d = c.take();  // into the frame that a left
  fill(c, d, 3);
  EXPECT_EQ(c.take(), kNoPage);
  ASSERT_TRUE(c.unpark(a));  // a and b change places
  EXPECT_TRUE(c.on_host(b));
  EXPECT_EQ(value(c, a), 1);
  EXPECT_EQ(value(c, b), 2);
  EXPECT_EQ(value(c, d), 3);
  EXPECT_FALSE(c.unpark(b));
  c.drop(d, false);
  ASSERT_TRUE(c.unpark(b));
  EXPECT_EQ(value(c, b), 2);
}

INSTANTIATE_TEST_SUITE_P(Devices, KvCacheOn, ::testing::ValuesIn(devices()), name_of_device);

TEST(KvCache, RecallsFullPagesOfTheSameTokensAndNames) {
  KvCache c = cache(4, 0);
  const std::vector<Page> pages = {c.take(), c.take(), c.take()};
  const std::vector<Token> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const std::vector<std::uint64_t> names(9, 7);
  c.remember(pages, tokens, names);
  EXPECT_EQ(c.remembered(), 2);  // the third page is not full
  for (const Page page : pages) c.drop(page, false);
  EXPECT_EQ(c.free_frames(), 4);

  EXPECT_EQ(c.recall(tokens, names), (std::vector<Page>{pages[0], pages[1]}));
  EXPECT_EQ(c.free_frames(), 2);
  std::vector<Token> other = tokens;
  other[5] = 0;
  EXPECT_EQ(c.recall(other, names), (std::vector<Page>{pages[0]}));
  const std::vector<std::uint64_t> other_names(9, 8);
  EXPECT_TRUE(c.recall(tokens, other_names).empty());
  // The second page alone, without the first before it, is another context.
  EXPECT_TRUE(c.recall(std::span(tokens).subspan(4), names).empty());
}

TEST(KvCache, RememberedPagesGiveWayOldestFirst) {
  KvCache c = cache(2, 0);
  const std::vector<std::uint64_t> names(4, 0);
  const std::vector<Token> first = {1, 1, 1, 1}, second = {2, 2, 2, 2};
  for (const auto& tokens : {first, second}) {
    const Page page = c.take();
    c.remember(std::span(&page, 1), tokens, names);
    c.drop(page, false);
  }
  EXPECT_NE(c.take(), kNoPage);
  EXPECT_TRUE(c.recall(first, names).empty());
  EXPECT_EQ(c.recall(second, names).size(), 1u);
}

// R64: after new weights nothing of the old ones is handed on, not even what somebody still holds.
TEST(KvCache, R64_ForgetsAllAtOnce) {
  KvCache c = cache(2, 0);
  const std::vector<std::uint64_t> names(4, 0);
  const std::vector<Token> held = {1, 1, 1, 1}, idle = {2, 2, 2, 2};
  const Page a = c.take(), b = c.take();
  c.remember(std::span(&a, 1), held, names);
  c.remember(std::span(&b, 1), idle, names);
  c.drop(b, false);
  c.forget();
  EXPECT_TRUE(c.recall(held, names).empty());
  EXPECT_TRUE(c.recall(idle, names).empty());
  EXPECT_EQ(c.free_frames(), 1);
  c.drop(a, false);
  EXPECT_EQ(c.free_frames(), 2);
}

}  // namespace
}  // namespace lockstep::rollout
