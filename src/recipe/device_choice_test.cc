// Which device a recipe's run is on: what its key says, or what works.
#include <gtest/gtest.h>

#include <filesystem>

#include "base/error.h"
#include "device/memory.h"
#include "recipe/preflight.h"
#include "recipe/recipe.h"

namespace lockstep::recipe {
namespace {

TEST(DeviceChoice, ADeviceThatIsNotThereIsRefusedBeforeAnythingStarts) {
  const Budget small = {.rollout_weights = 1 << 20, .cache = 1 << 20, .trainer = 1 << 20};
  EXPECT_EQ(ready_device("cpu", small), Device{});
  try {
    ready_device("cuda:99", small);
    FAIL() << "a hundred GPUs";
  } catch (const Error& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("device is cuda:99: ")) << error.what();
  }
}

TEST(DeviceChoice, AutoIsAGpuThatWorksAndHasRoomForWhatRunsThere) {
  const Budget small = {.trainer = 1 << 20}, large = {.trainer = 1ll << 50};
  const auto settled = [](const std::string& name, const Budget& budget, const char* refused) {
    return settle_device(name, budget, [&](Device device) {
      EXPECT_EQ(device, (Device{Device::Kind::kCuda, 0}));
      if (refused != nullptr) throw Error(refused);
    });
  };
  EXPECT_EQ(settled("cuda:7", large, "none").name, "cuda:7");  // whoever names one is told why not
  EXPECT_EQ(settled("cpu", small, nullptr).name, "cpu");
  const bool works = why_unusable({Device::Kind::kCuda, 0}).empty();
  EXPECT_EQ(settled(kAutoDevice, small, nullptr).name, works ? "cuda" : "cpu");
  const bool is_there = std::filesystem::exists("/dev/nvidiactl");
  EXPECT_EQ(settled(kAutoDevice, small, nullptr).why.empty(), works || !is_there);
  const SettledDevice full = settled(kAutoDevice, large, nullptr);
  EXPECT_EQ(full.name, "cpu");
  EXPECT_EQ(full.why.find("1024 TiB") != std::string::npos, works) << full.why;
  const SettledDevice refused = settled(kAutoDevice, small, "that arm has no kernel there");
  EXPECT_EQ(refused.name, "cpu");
  EXPECT_EQ(refused.why == "that arm has no kernel there", works) << refused.why;
}

TEST(DeviceChoice, ARunThatGoesOnStaysOnItsDevice) {
  const auto with = [](const std::string& device) {
    Recipe r = parse_recipe("arm = \"trace\"", "r");
    r.device = device;
    return r;
  };
  for (const std::string began : {"cpu", "cuda"}) {
    const std::string text = resolved(with(began), ContractId{1});
    Recipe on = with(kAutoDevice), other = with("cuda:1");
    take_settled(text, "recipe.toml", on);
    EXPECT_EQ(on.device, began);
    EXPECT_EQ(hindrances(text, resolved(on, ContractId{1})), "");
    take_settled(text, "recipe.toml", other);
    EXPECT_EQ(hindrances(text, resolved(other, ContractId{1})),
              "device: \"" + began + "\" / \"cuda:1\"\n");
  }
  // One that began when there was no such key ran on the CPU.
  std::string text = resolved(with("cpu"), ContractId{1});
  const std::size_t line = text.find("device = ");
  text.erase(line, text.find('\n', line) + 1 - line);
  Recipe on = with(kAutoDevice);
  take_settled(text, "recipe.toml", on);
  EXPECT_EQ(on.device, "cpu");
  EXPECT_EQ(hindrances(text, resolved(on, ContractId{1})), "");
}

TEST(DeviceChoice, ADeviceWithTooLittleMemoryIsRefusedWithTheBytes) {
  const Budget all = {
      .rollout_weights = 16ll << 30, .cache = 3 << 20, .trainer = 5 << 20, .evaluation = 7 << 20};
  const std::int64_t needed = (16ll << 30) + (12 << 20);
  const DeviceMemory enough = {.total = 20ll << 30, .free = needed};
  EXPECT_NO_THROW(require_memory("cuda", enough, all));
  try {
    require_memory("cuda", {.total = 20ll << 30, .free = needed - 1}, all);
    FAIL() << "a byte too few";
  } catch (const Error& error) {
    const std::string what = error.what();
    for (const char* part :
         {"device is cuda", "of 20 GiB free", "16 GiB are needed", "rollout weights take 16 GiB",
          "rollout.cache 3 MiB", "trainer 5 MiB", "evaluation 7 MiB", "lower rollout.cache"}) {
      EXPECT_NE(what.find(part), std::string::npos) << what;
    }
    EXPECT_EQ(what.find('\n'), std::string::npos);
  }
  // What training takes comes when the cache is away.
  Budget limited = all;
  limited.trainer_most = 12 << 20;
  EXPECT_NO_THROW(require_memory("cuda", enough, limited));
  limited.trainer_most = 13 << 20;
  try {
    require_memory("cuda", enough, limited);
    FAIL() << "a MiB too few";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("rollout weights take 16 GiB and trainer.memory 13 MiB: lower "
                        "trainer.memory"),
              std::string::npos)
        << what;
  }
}

TEST(DeviceChoice, RecordsReadAheadTakeTheCachesPlace) {
  Budget b = {.rollout_weights = 1 << 20, .cache = 2 << 20, .trainer = 3 << 20};
  b.read_ahead = 2 << 20;
  EXPECT_EQ(b.device(), 6 << 20);
  b.read_ahead = 5 << 20;
  EXPECT_EQ(b.device(), 9 << 20);
  try {
    require_memory("cuda", {.total = 16 << 20, .free = 8 << 20}, b);
    FAIL() << "a MiB too few";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what())
                  .find(" and records read ahead 5 MiB: lower trainer.tokens_per_pass"),
              std::string::npos)
        << error.what();
  }
  const std::string text = to_string(b);
  EXPECT_NE(text.find("records read ahead up to 5 MiB\nhost:"), std::string::npos) << text;
  EXPECT_NE(text.find("those read ahead up to 5 MiB\ndisk:"), std::string::npos) << text;
}

TEST(DeviceChoice, RunsAtOnceNeedTheMemoryOfTheLargest) {
  const std::vector<Budget> runs = {{.cache = 3 << 20}, {.trainer = 7 << 20}, {.cache = 5 << 20}};
  EXPECT_NO_THROW(require_memory_of_all(2, runs, {.free = 12 << 20}));
  EXPECT_NO_THROW(require_memory_of_all(9, runs, {.free = 15 << 20}));
  try {
    require_memory_of_all(2, runs, {.free = (12 << 20) - 1});
    FAIL() << "a byte too few";
  } catch (const Error& error) {
    EXPECT_EQ(
        std::string(error.what()),
        "--jobs has 2 runs on a GPU at once, which take 12 MiB; 12582911 B are free: give it a "
        "smaller number");
  }
}

TEST(DeviceChoice, TheMachinesMemoryIsAskedForWhatLiesThere) {
  const Budget b = {.rollout_weights = 1ll << 30,
                    .cache = 2ll << 30,
                    .trainer = 3ll << 30,
                    .evaluation = 4ll << 30,
                    .swap = 5ll << 30,
                    .records = 6ll << 30};
  const auto said = [&](std::int64_t total, std::int64_t free, Device device) -> std::string {
    try {
      require_host_memory({.total = total, .free = free}, b, device);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  constexpr Device kCpu{}, kGpu{Device::Kind::kCuda, 0};
  const std::int64_t at_once = 10ll << 30, all = 21ll << 30;
  EXPECT_EQ(said(all, at_once, kCpu), "");
  EXPECT_EQ(said(0, 0, kCpu), "");  // a machine that does not say
  EXPECT_EQ(said(all, at_once - 1, kCpu),
            "rollout weights 1 GiB, rollout.cache 2 GiB, the trainer 3 GiB and evaluation 4 GiB "
            "take together 10 GiB, and this machine has 10737418239 B of memory free; lower "
            "rollout.cache, choose a smaller model, or end what else runs here");
  EXPECT_EQ(
      said(all - 1, at_once, kCpu),
      "rollout weights, cache, trainer and evaluation 10 GiB, rollout.swap 5 GiB and "
      "store.ram 6 GiB may take together 21 GiB, and this machine has 22548578303 B of memory; "
      "lower rollout.swap or store.ram");
  EXPECT_EQ(said(11ll << 30, 1, kGpu), "");  // the rest lies on the device
  EXPECT_NE(said((11ll << 30) - 1, 1, kGpu).find("may take together 11 GiB"), std::string::npos);
  EXPECT_EQ(said(1ll << 30, 1, kGpu),
            "rollout.swap is 5 GiB, and this machine has 1 GiB of memory; lower it");

  Budget guided = b;  // pinned beside the store, on a GPU alone
  guided.read_ahead = 1ll << 30;
  EXPECT_NO_THROW(require_host_memory({.total = all, .free = at_once}, guided, kCpu));
  EXPECT_NO_THROW(require_host_memory({.total = 12ll << 30, .free = 1}, guided, kGpu));
  try {
    require_host_memory({.total = 11ll << 30, .free = 1}, guided, kGpu);
    FAIL() << "no room for records that are read ahead";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "rollout.swap 5 GiB, store.ram 6 GiB and records read ahead 1 GiB may take together "
              "12 GiB, and this machine has 11 GiB of memory; lower rollout.swap or store.ram");
  }

  const std::vector<Budget> runs(3, b);
  EXPECT_NO_THROW(require_host_memory_of_all(2, runs, {.total = all, .free = 2 * at_once}));
  EXPECT_NO_THROW(require_host_memory_of_all(2, runs, {}));
  EXPECT_THROW(require_host_memory_of_all(3, runs, {.total = all, .free = 2 * at_once}), Error);
}

TEST(DeviceChoice, TheDevicesOwnMemoryIsAsked) {
  if (const std::string why = why_unusable({Device::Kind::kCuda, 0}); !why.empty()) {
    GTEST_SKIP() << why;
  }
  const Budget small = {.rollout_weights = 1 << 20, .cache = 1 << 20, .trainer = 1 << 20};
  EXPECT_EQ(ready_device("cuda:0", small), (Device{Device::Kind::kCuda, 0}));
  EXPECT_THROW(ready_device("cuda:0", {.rollout_weights = 1ll << 50}), Error);
}

}  // namespace
}  // namespace lockstep::recipe
