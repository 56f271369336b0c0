#include "recipe/recipe.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "recipe/preflight.h"

namespace lockstep::recipe {
namespace {

constexpr ModelConfig kModel = {.num_layers = 8,
                                .hidden = 128,
                                .expert_width = 64,
                                .num_experts = 16,
                                .experts_per_token = 2,
                                .num_heads = 4,
                                .num_kv_heads = 2,
                                .head_dim = 32,
                                .vocabulary = 64,
                                .max_positions = 512};

/// What the reader says of a text, "" where it is content.
std::string complaint(const std::string& text, const std::vector<std::string>& assignments = {}) {
  try {
    parse_recipe(text, "r.toml", assignments);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

/// What preflight says of it.
std::string contradiction(const std::string& text) {
  const Recipe recipe = parse_recipe(text, "r.toml");
  try {
    check(recipe, bind(recipe.arm, kModel, recipe.rollout, recipe.rl), kModel);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Recipe, AValueWhereASectionBelongsAndASectionThatIsNone) {
  const std::string said = complaint("rl = 5");
  EXPECT_NE(said.find("r.toml:1: rl is a section"), std::string::npos) << said;
  EXPECT_NE(said.find("5"), std::string::npos) << said;
  EXPECT_NE(complaint("", {"trainer=1"}).find("command line: trainer is a section"),
            std::string::npos);
  EXPECT_NE(complaint("[trainr]\n").find("unknown section trainr: did you mean trainer?"),
            std::string::npos);
  EXPECT_NE(complaint("[seed]\n"), "");
  EXPECT_EQ(complaint("[trainer]\n[rl]\n"), "");
}

TEST(Recipe, TextThatTomlLibrariesTripOver) {
  EXPECT_NE(complaint("ram=9\xc2\xa1\n"), "");
  EXPECT_NE(complaint("[.x"), "");
  EXPECT_EQ(complaint("# caf\xc3\xa9 \xc2\xa1\nmodel = \"\xc3\xa9\"\n"), "");
  std::string dots = "[a";
  for (int i = 0; i < 30000; ++i) dots += ".a";
  EXPECT_NE(complaint(dots + "]").find("64 dots"), std::string::npos);
  EXPECT_NE(complaint("", {"model=" + dots}), "");
  EXPECT_NE(complaint("a=" + std::string(30000, '[')), "");
}

TEST(Recipe, ReadsEveryKindOfValue) {
  const Recipe r = parse_recipe(R"(
arm = "trace"
seed = 7
model = "m"
[trainer]
lr = 3e-4
decay = "cosine"
recompute = true
[guide]
sites = ["k", "v"]
layers = "0,2,5-7"
[contract]
kv_exponents = [-3, 2]
[rollout]
cache = "64 MiB"
swap = 4096
temperature = 1
)",
                                "r.toml");
  EXPECT_EQ(r.schedule.seed, 7u);
  EXPECT_EQ(r.trainer.lr, 3e-4);
  EXPECT_EQ(r.trainer.decay, train::Decay::kCosine);
  EXPECT_TRUE(r.trainer.recompute);
  EXPECT_EQ(r.arm.sites, (SiteSet{Site::kK, Site::kV}));
  EXPECT_EQ(r.arm.mode, Guidance::kLsb);  // the arm's
  EXPECT_EQ(r.arm.kv_exponents, (std::vector<std::int8_t>{-3, 2}));
  EXPECT_EQ(r.rollout.cache_bytes, 64 << 20);
  EXPECT_EQ(r.rollout.swap_bytes, 4096);
  EXPECT_EQ(r.schedule.sampling.temperature, 1.0f);
}

TEST(Recipe, ADeviceIsOneOfThoseThereCanBe) {
  EXPECT_EQ(contradiction("device = \"cuda:1\""), "");
  EXPECT_NE(contradiction("device = \"gpu\"").find("device is 'gpu'"), std::string::npos);
  EXPECT_EQ(contradiction("device = \"auto\""), "");
}

TEST(Recipe, KeysOverrideTheArmWhereverItStands) {
  EXPECT_EQ(parse_recipe("guide.layers = \"all\"\narm = \"trace\"", "r").arm.layers, "all");
  const std::vector<std::string> late = {"arm=naive", "trainer.lr=0.5", "model=some/where"};
  const Recipe r = parse_recipe("arm = \"trace\"", "r", late);
  EXPECT_EQ(r.arm.mode, Guidance::kOwnScale);
  EXPECT_EQ(r.trainer.lr, 0.5);
  EXPECT_EQ(r.model, "some/where");
}

TEST(Recipe, TheArmsSurrogateYieldsToTheRecipes) {
  EXPECT_EQ(parse_recipe("arm = \"qurl\"", "r").rl.surrogate, rl::Surrogate::kAcr);
  EXPECT_EQ(parse_recipe("rl.surrogate = \"gspo\"\narm = \"qurl\"", "r").rl.surrogate,
            rl::Surrogate::kGspo);
  EXPECT_EQ(parse_recipe("arm = \"naive\"", "r").rl.surrogate, rl::Surrogate::kPpo);
}

TEST(Recipe, EachMistakeIsOneLineWithKeyValueAndRemedy) {
  EXPECT_EQ(complaint("[trainer]\nlr_ = 1"),
            "r.toml:2: unknown key trainer.lr_: did you mean trainer.lr?");
  EXPECT_EQ(complaint("[rollout]\nlr = 1"),
            "r.toml:2: unknown key rollout.lr: did you mean trainer.lr?");
  EXPECT_EQ(complaint("[trainer]\nlr = \"fast\""),
            "r.toml:2: trainer.lr is \"fast\"; it takes a number at least 0 and at most 1");
  EXPECT_EQ(complaint("[rollout]\ntemperature = 0"),
            "r.toml:2: rollout.temperature is 0; it takes a number above 0 and at most 100");
  EXPECT_EQ(
      complaint("[schedule]\nsamples = 2.5"),
      "r.toml:2: schedule.samples is 2.5; it takes a whole number at least 1 and at most 16382");
  EXPECT_EQ(complaint("arm = \"trase\"").rfind("r.toml:1: there is no arm 'trase'", 0), 0u);
  EXPECT_EQ(complaint("[guide]\nmode = \"lbs\"").find("did you mean lsb?") != std::string::npos,
            true);
  EXPECT_NE(complaint("[rollout]\ncache = \"1 parsec\""), "");
  EXPECT_EQ(complaint("[guide]\nreplay_experts = true"),
            "r.toml:2: guide.replay_experts has been renamed; write guide.routing_replay: \"r3\" "
            "where that was true, else \"none\"");
  EXPECT_NE(complaint("[rollout"), "");
  EXPECT_NE(complaint("", {"no assignment"}), "");
}

TEST(Recipe, TheCommandLineNamesTheKeyAndNotItsPlaceInATable) {
  const auto said = [](const std::string& assignment) { return complaint("", {assignment}); };
  EXPECT_EQ(said("guide.sites=[1, \"k\"]"),
            "command line: guide.sites mixes numbers and text in one list");
  EXPECT_EQ(said("guide.sites=[[1]]").rfind("command line: guide.sites holds something", 0), 0u);
  EXPECT_EQ(said("trainer.lr=1979-05-27"),
            "command line: trainer.lr is a date or time, which no key takes");
  EXPECT_EQ(said("model=caf\xe9").rfind("command line: model is no UTF-8 text", 0), 0u);
  EXPECT_EQ(said("trainer.lr={}"),
            "command line: trainer.lr is {}; it takes a number at least 0 "
            "and at most 1");
  // A shell takes the quotes away: 5 is layer 5, and a file may be called 5.
  const std::vector<std::string> bare = {"guide.layers=5", "model=5"};
  EXPECT_EQ(parse_recipe("", "r", bare).arm.layers, "5");
  EXPECT_EQ(parse_recipe("", "r", bare).model, "5");
}

TEST(Recipe, NumbersAreInRangeAsTheyAreKept) {
  EXPECT_NE(complaint("rollout.temperature = 1e-300").find("above 0"), std::string::npos);
  EXPECT_NE(complaint("trainer.eps = 1e-300").find("at least 1e-30"), std::string::npos);
  EXPECT_EQ(complaint("seed = 9007199254740992"), "");
  EXPECT_NE(complaint("seed = 9007199254740993").find("at most 9007199254740992"),
            std::string::npos);
  for (const char* number : {"nan", "-inf", "1e400", "99999999999999999999", "true", "[]"}) {
    EXPECT_NE(complaint(std::string("rollout.temperature = ") + number), "") << number;
  }
}

TEST(Recipe, IsARegularFile) {
  const std::filesystem::path pipe = std::filesystem::path(testing::TempDir()) / "recipe_pipe";
  std::filesystem::remove(pipe);
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(read_recipe(pipe, {}), Error);  // twice read, a pipe is empty: all defaults
  EXPECT_THROW(read_recipe("/dev/null", {}), Error);
  EXPECT_THROW(read_recipe(testing::TempDir(), {}), Error);
}

TEST(Recipe, TheResolvedCopyReadsBackAsItself) {
  for (const std::string& name : arm_names()) {
    const Recipe first = parse_recipe("arm = \"" + name + "\"\n[trainer]\nlr = 3e-4", "r");
    const std::string text = resolved(first, ContractId{0x123});
    EXPECT_EQ(text.rfind("# contract 0000000000000123\n", 0), 0u);
    const Recipe second = parse_recipe(text, "copy");
    EXPECT_EQ(resolved(second, ContractId{0x123}), text);
    EXPECT_EQ(differences(text, resolved(second, ContractId{})), "");
  }
}

TEST(Recipe, DifferencesNameTheKeys) {
  const std::string a = resolved(parse_recipe("arm = \"naive\"", "r"), {});
  const std::string b = resolved(parse_recipe("arm = \"naive\"\nseed = 3", "r"), {});
  EXPECT_EQ(differences(a, b), "seed: 0 / 3\n");
}

TEST(Recipe, KeysThatOnlyExtendARunHinderNothing) {
  const auto with = [](const std::string& schedule) {
    return resolved(parse_recipe("arm = \"naive\"\n" + schedule, "r"), {});
  };
  const std::string ten = with("schedule.steps = 10");
  EXPECT_EQ(hindrances(ten, with("schedule.steps = 20\nschedule.save_every = 3\n"
                                 "schedule.keep = 0\neval.every = 5")),
            "");
  // Nor do the keys that a line names where memory is used up.
  EXPECT_EQ(hindrances(ten, with("schedule.steps = 10\ntrainer.memory = \"40 GiB\"\n"
                                 "trainer.recompute = true\nrollout.cache = \"7 MiB\"\n"
                                 "rollout.swap = \"5 MiB\"\nstore.ram = \"3 GiB\"\n"
                                 "store.disk = \"9 GiB\"")),
            "");
  EXPECT_NE(hindrances(ten, with("schedule.steps = 10\ntrainer.tokens_per_pass = 2048")), "");
  EXPECT_EQ(hindrances(ten, with("schedule.steps = 20\nseed = 3")), "seed: 0 / 3\n");
  EXPECT_EQ(hindrances(ten, with("schedule.steps = 5")), "schedule.steps: 10 / 5\n");
  // A run that began before there was a key goes on under its default, and under no other value.
  std::string older = ten;
  const std::size_t at = older.find("kv_layers = ");
  ASSERT_NE(at, std::string::npos);
  older.erase(at, older.find('\n', at) - at);
  EXPECT_EQ(hindrances(older, ten), "");
  EXPECT_EQ(hindrances(older, with("schedule.steps = 10\nguide.kv_layers = \"0\"")),
            "guide.kv_layers: absent / \"0\"\n");
  // Noise in stages over the run's steps was another from the start.
  EXPECT_EQ(hindrances(with("schedule.steps = 10\nsync.noise_start = 0.01"),
                       with("schedule.steps = 20\nsync.noise_start = 0.01")),
            "schedule.steps: 10 / 20\n");
}

TEST(Arm, LayersBySpelling) {
  EXPECT_EQ(layer_set("latter_half", 7), LayerSet::range(3, 7));
  EXPECT_EQ(layer_set("latter_two_thirds", 6), LayerSet::range(2, 6));
  EXPECT_EQ(layer_set("latter_two_thirds", 8), LayerSet::range(3, 8));
  EXPECT_EQ(layer_set("first_85%", 48), LayerSet::range(0, 41));  // seven of 48 stay BF16
  EXPECT_EQ(layer_set("first_85%", 8), LayerSet::range(0, 7));
  EXPECT_EQ(layer_set("first_99%", 2), LayerSet::range(0, 1));
  EXPECT_EQ(layer_set("last_25%", 40), LayerSet::range(30, 40));
  EXPECT_THROW(layer_set("first_100%", 8), Error);
  EXPECT_THROW(layer_set("last_%", 8), Error);
  EXPECT_EQ(layer_set("0-2,5", 6).bits[0], 0b100111u);
  EXPECT_EQ(layer_set("odd", 6).bits[0], 0b101010u);
  EXPECT_THROW(layer_set("6", 6), Error);
  EXPECT_THROW(layer_set("half", 6), Error);
  EXPECT_THROW(layer_set("", 6), Error);
}

TEST(Arm, EveryArmPassesPreflightAndReplaysRoutes) {
  for (const std::string& name : arm_names()) {
    EXPECT_EQ(contradiction("arm = \"" + name + "\"\n[rl]\nbypass = false"), "") << name;
    EXPECT_TRUE(bind(arm_spec(name), kModel).guide.replay_experts);
  }
}

TEST(Preflight, ContradictionsAreRefused) {
  EXPECT_NE(contradiction("[rl]\nbypass = true"), "");  // with the default correction
  EXPECT_EQ(contradiction("[rl]\nbypass = true\ncorrection = \"none\""), "");
  EXPECT_NE(contradiction("[rl]\nbypass = true\ncorrection = \"none\"\n[schedule]\nupdates = 2"),
            "");
  EXPECT_NE(contradiction("arm = \"naive\"\n[guide]\nsites = [\"k\"]\nmode = \"lsb\""), "");
  EXPECT_NE(contradiction("[rl]\nbypass = true\ncorrection = \"none\"\n"
                          "[guide]\nrouting_replay = \"r2\""),
            "");
  EXPECT_EQ(contradiction("[guide]\nrouting_replay = \"r2\""), "");
  EXPECT_NE(contradiction("[guide]\nrouting_replay = \"r2\"\nsites = [\"w2_in\"]"), "");
  EXPECT_NE(contradiction("arm = \"bf16\"\n[qat]\nweights = true"), "");
  EXPECT_NE(contradiction("[guide]\nsites = []"), "");
  EXPECT_NE(contradiction("[guide]\nmode = \"own_scale\""), "");
  EXPECT_NE(contradiction("[guide]\nlayers = \"none\""), "");
  EXPECT_NE(contradiction("[contract]\nlayers = \"first_half\""), "");
  EXPECT_NE(contradiction("[contract]\nkv_exponents = [1]"), "");
  EXPECT_NE(contradiction("[rollout]\nmax_new_tokens = 512"), "");
  EXPECT_NE(contradiction("[rollout]\ncache = 1024"), "");
  EXPECT_NE(contradiction("[store]\nram = 100"), "");
  EXPECT_NE(contradiction("arm = \"quads\"\n[residual]\nalpha = 0.3"), "");
  EXPECT_NE(contradiction("arm = \"quads\"\n[residual]\nsites = []"), "");
  EXPECT_NE(contradiction("arm = \"quads\"\n[residual]\ngroups = \"0110\""), "");
  EXPECT_NE(contradiction("arm = \"quads\"\n[contract]\nactivations = false"), "");
  EXPECT_NE(contradiction("arm = \"quads\"\n[qat]\nresidual = true"), "");
  EXPECT_NE(contradiction("arm = \"trace\"\n[residual]\nkind = \"dense\"\n[qat]\nresidual = true"),
            "");
  EXPECT_EQ(contradiction("arm = \"quads\"\n[residual]\nscope = \"static\"\npermille = 125"), "");
  EXPECT_NE(contradiction("[rl]\nsurrogate = \"score_centering\"\ncorrection = \"none\""), "");
  EXPECT_NE(contradiction("[rl]\nsurrogate = \"score_centering\"\n[rollout]\ntop_logprobs = 8"),
            "");
  EXPECT_NE(contradiction("[rollout]\ntop_logprobs = 65"), "");
  EXPECT_EQ(contradiction("[rl]\nsurrogate = \"score_centering\"\ncorrection = \"none\"\n"
                          "[rollout]\ntop_logprobs = 64"),
            "");
  EXPECT_NE(contradiction("[sync]\nnoise_start = 0.01"), "");
  EXPECT_NE(contradiction("[sync]\nnoise_start = 0.01\nnoise_end = 1e-4\nnoise_stages = 1"), "");
  EXPECT_NE(contradiction("arm = \"qurl\"\n[rl]\nbypass = true\ncorrection = \"none\""), "");
  EXPECT_NE(contradiction("[rl]\noverlong_buffer_len = 200"), "");
}

TEST(Preflight, BoundsBetweenWhichNothingLies) {
  EXPECT_NE(contradiction("rl.correction = \"icepop\"\nrl.correction_floor = 0.9\n"
                          "rl.correction_cap = 0.5")
                .find("rl.correction_floor is 0.9, not below rl.correction_cap, 0.5"),
            std::string::npos);
  EXPECT_EQ(contradiction("rl.correction_floor = 0.9\nrl.correction_cap = 0.5"), "");  // tis
  for (const char* kind : {"token", "seq", "geo"}) {
    const std::string low = std::string("rl.reject_") + kind + "_low = 0.8\n";
    const std::string high = std::string("rl.reject_") + kind + "_high = ";
    EXPECT_EQ(contradiction(low), "");
    EXPECT_EQ(contradiction(low + high + "1.2"), "");
    EXPECT_NE(contradiction(low + high + "0.8"), "");
  }
  EXPECT_NE(contradiction("rl.dual_clip = 1").find("3 is usual"), std::string::npos);
  EXPECT_EQ(contradiction("rl.dual_clip = 3"), "");
}

TEST(Preflight, TheCacheHoldsThePromptToo) {
  const Recipe recipe = parse_recipe("[rollout]\ncache = 200000\nmax_new_tokens = 64\n", "r.toml");
  const Arm arm = bind(recipe.arm, kModel, recipe.rollout, recipe.rl);
  check(recipe, arm, kModel);
  try {
    check(recipe, arm, kModel, 100000);
    FAIL() << "a prompt that the cache has no room for";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("100000 given and 64 new"), std::string::npos);
  }
}

TEST(Preflight, BytesOfTheBudget) {
  const Recipe r = parse_recipe("arm = \"trace\"", "r");
  const Budget b = budget(r, bind(r.arm, kModel), kModel);
  // One bit and s8 / 16: 24 + 1 bytes of w13_in, 12 of K and of V, four layers; routes everywhere.
  EXPECT_EQ(b.record_per_token, 4 * (25 + 12 + 12) + 8 * 2);
  EXPECT_EQ(b.record_per_token_full, 8 * (73 + 36 + 36) + 8 * 2);
  EXPECT_EQ(b.cache_per_token, 8 * 2 * 36);
  EXPECT_EQ(bytes_text(13 * 1024 + 820), "13.8 KiB");
  // A pass's records are read ahead to a GPU, within a bound.
  EXPECT_EQ(b.read_ahead, 0);
  const auto read_ahead = [](const std::string& keys) {
    const Recipe there = parse_recipe("device = \"cuda\"\n" + keys, "r");
    return budget(there, bind(there.arm, kModel), kModel).read_ahead;
  };
  EXPECT_EQ(read_ahead("arm = \"trace\""), 8192 * b.record_per_token);
  EXPECT_EQ(read_ahead("arm = \"trace\"\n[trainer]\ntokens_per_pass = 100000000"), 1ll << 30);
}

TEST(Arm, FormatsAreKeysAndBooleansStayWhatTheyWere) {
  const auto contract = [](const std::string& keys) {
    return bind(parse_recipe("[contract]\n" + keys, "r").arm, kModel).contract;
  };
  EXPECT_EQ(contract(""), contracts::lockstep(8));
  EXPECT_EQ(contract("weights = true\nactivations = true\nkv = true"), contracts::lockstep(8));
  EXPECT_EQ(contract("weights = \"nvfp4\"\nactivations = \"nvfp4\"\nkv = \"nvfp4\""),
            contracts::lockstep(8));
  EXPECT_EQ(contract("kv = false"), contract("kv = \"bf16\""));
  EXPECT_FALSE(contract("kv = false").k.quantizes());
  EXPECT_EQ(contract("preset = \"bf16\""), contracts::bf16());
  EXPECT_EQ(contract("preset = \"fp8\""), contracts::preset("fp8", 8));
  const Contract mixed = contract("activations = \"mxfp8\"\nmx_rule = \"even\"");
  EXPECT_EQ(mixed.activation.element, Element::kE4m3);
  EXPECT_EQ(mixed.activation.scale_rule, ScaleRule::kMxEven);
  EXPECT_EQ(mixed.weight, contracts::lockstep(8).weight);
  EXPECT_EQ(contract("preset = \"bf16\"\nweights = \"fp8\"").layers, LayerSet::range(0, 8));
  EXPECT_NE(complaint("[contract]\nkv = \"mxpf4\"").find("did you mean mxfp4?"), std::string::npos);
  EXPECT_NE(complaint("[contract]\nkv = 4").find("true, false, or one of"), std::string::npos);
}

TEST(Preflight, FormatsThatDoNotGoTogetherAreRefused) {
  EXPECT_NE(contradiction("[contract]\nkv = \"mxfp8\"").find("no kernel reads from the cache"),
            std::string::npos);
  EXPECT_NE(contradiction("arm = \"mxfp4_w4a8_qat\"\n[contract]\nkv = \"mxfp8\""), "");
  EXPECT_NE(contradiction("arm = \"fp8\"\n[residual]\nkind = \"channels\"")
                .find("residual.kind is not none"),
            std::string::npos);
  EXPECT_NE(contradiction("arm = \"fp8_trace\"\n[guide]\nmode = \"rollout_scale\"")
                .find("leaves nothing to record"),
            std::string::npos);
  EXPECT_EQ(contradiction("arm = \"fp8_trace\"\n[guide]\nmode = \"lsb_scale_mod4\""), "");
  EXPECT_EQ(contradiction("arm = \"mxfp4_trace\"\n[guide]\nmode = \"lsb_scale_mod4\""), "");
}

TEST(Preflight, RecordsOfTheLongestPromptHaveRoomToo) {
  const auto refusal = [](std::int64_t ram, std::int64_t prompt) -> std::string {
    Recipe r = parse_recipe("[rollout]\nmax_new_tokens = 8", "r");
    r.store.ram_bytes = ram;
    const Arm arm = bind(r.arm, kModel, r.rollout, r.rl);
    try {
      check(r, arm, kModel, prompt);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  const Recipe r = parse_recipe("", "r");
  const std::int64_t token = budget(r, bind(r.arm, kModel), kModel).record_per_token;
  EXPECT_EQ(refusal(18 * token, 10), "");
  EXPECT_EQ(refusal(18 * token - 1, 10).find("store.ram is"), 0u);
  EXPECT_NE(refusal(18 * token - 1, 10).find("10 given and 8 new tokens"), std::string::npos);
  EXPECT_EQ(refusal(8 * token, 0), "");
}

TEST(Recipe, ARunKeepsWhatCalibrationFound) {
  Recipe began = parse_recipe("arm = \"quads\"\n[residual]\nscope = \"static\"", "r");
  began.arm.kv_exponents = {-3, 4};
  began.arm.residual_groups = "0110";
  const std::string text = resolved(began, ContractId{1});
  for (const std::string_view key : kCalibrated) {
    EXPECT_NE(text.find(std::string(key.substr(key.find('.') + 1)) + " = "), std::string::npos);
    EXPECT_TRUE(is_calibrated(key));
  }
  Recipe on = parse_recipe("arm = \"quads\"\n[residual]\nscope = \"static\"", "r");
  take_settled(text, "recipe.toml", on);
  EXPECT_EQ(on.arm.kv_exponents, began.arm.kv_exponents);
  EXPECT_EQ(on.arm.residual_groups, began.arm.residual_groups);
  EXPECT_EQ(hindrances(text, resolved(on, ContractId{1})), "");
  try {
    take_settled(text + "[tainer]\nlr = 1\n", "recipe.toml", on);
    FAIL() << "a damaged recipe was taken from";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("recipe.toml"), std::string::npos);
  }
  on.arm.residual_groups = "1111";  // given: not taken from there
  take_settled(text, "recipe.toml", on);
  EXPECT_EQ(on.arm.residual_groups, "1111");
  EXPECT_EQ(hindrances(text, resolved(on, ContractId{1})),
            "residual.groups: \"0110\" / \"1111\"\n");
}

TEST(Arm, GroupsAreTheContractsOnlyWhereAPassTakesThem) {
  ArmSpec spec = arm_spec("quads");
  spec.residual_groups = "01";
  EXPECT_TRUE(bind(spec, kModel).contract.residual_groups.empty());
  spec.residual_scope = rollout::ResidualScope::kStatic;
  EXPECT_EQ(bind(spec, kModel).contract.residual_groups, (std::vector<std::uint8_t>{0, 1}));
}

TEST(Arm, MacroBlocksAreKeysAndPartOfTheContractsId) {
  const auto contract = [](const std::string& keys) {
    return bind(parse_recipe(keys, "r").arm, kModel).contract;
  };
  const Contract plain = contract("arm = \"mxfp4_w4a4\"");
  const Contract mbs = contract("arm = \"mbs\"");
  EXPECT_EQ(mbs.weight.macro_block, 128);
  EXPECT_EQ(mbs.activation.macro_block, 128);
  EXPECT_FALSE(mbs.k.quantizes());
  EXPECT_NE(mbs.id(), plain.id());
  EXPECT_EQ(lockstep::diff(plain, mbs),
            "activation.macro_block: 0 / 128\nweight.macro_block: 0 / 128\n");
  EXPECT_EQ(contract("arm = \"mbs\"\n[contract]\nmacro_blocks = []").id(), plain.id());
  const Contract weights = contract("arm = \"mbs\"\n[contract]\nmacro_blocks = [\"weights\"]");
  EXPECT_EQ(weights.weight.macro_block, 128);
  EXPECT_EQ(weights.activation.macro_block, 0);
  EXPECT_EQ(expert_product(weights), ExpertProduct::kBf16);
}

TEST(Preflight, MacroBlocksWhereThereAreNoneOrNothingFollowsThem) {
  const auto refused = [](const std::string& text, const char* why) {
    std::string said;
    try {
      said = contradiction(text);
    } catch (const Error& error) {
      said = error.what();  // the contract itself cannot be
    }
    EXPECT_NE(said.find(why), std::string::npos) << text << ": " << said;
  };
  refused("[contract]\nmacro_blocks = [\"weights\"]", "contract.macro_blocks has weights");
  refused("arm = \"mxfp4_w4a8_qat\"\n[contract]\nmacro_blocks = [\"activations\"]",
          "contract.macro_blocks has activations");
  refused("arm = \"mxfp4_trace\"\n[contract]\nmacro_blocks = [\"activations\"]",
          "macro blocks no record holds");
  EXPECT_EQ(contradiction("arm = \"mxfp4_trace\"\n[contract]\nmacro_blocks = [\"weights\"]"), "");
  EXPECT_EQ(contradiction("arm = \"mbs\"\n[contract]\nkv = \"mxfp4\"\n[qat]\nk = true\nv = true\n"
                          "[guide]\nmode = \"lsb\"\nsites = [\"k\", \"v\"]"),
            "");
  refused("arm = \"mbs\"\n[residual]\nkind = \"channels\"", "residual.kind is not none");
  EXPECT_EQ(contradiction("arm = \"mbs\"\n[residual]\nkind = \"dense\"\nalpha = 0.5\n"
                          "[qat]\nresidual = true"),
            "");
  EXPECT_NE(complaint("[contract]\nmacro_blocks = [\"kv\"]").find("weights, activations"),
            std::string::npos);
}

TEST(Preflight, TesFp32ScalesAreInNoRecordAndHaveNoSecondPass) {
  EXPECT_NE(contradiction("arm = \"trace\"\n[contract]\npreset = \"te\"")
                .find("FP32 global scale no record holds"),
            std::string::npos);
  EXPECT_NE(contradiction("arm = \"quads\"\n[contract]\npreset = \"te\""), "");
  EXPECT_EQ(contradiction("arm = \"w4a4\"\n[contract]\npreset = \"te\""), "");
  EXPECT_EQ(contradiction("arm = \"w4a16\"\n[contract]\npreset = \"te\"\nkv = false"), "");
}

TEST(Preflight, TheTrainersOwnProductNeedsItsOwnCodes) {
  const auto refused = [](const std::string& keys, const char* remedy) {
    const std::string said = contradiction("arm = \"qarl\"\n" + keys);
    EXPECT_NE(said.find("qat.real_product is true"), std::string::npos) << keys << ": " << said;
    EXPECT_NE(said.find(remedy), std::string::npos) << said;
  };
  refused("[qat]\nactivations = false", "qat.activations = true");
  refused("[trainer]\nbf16 = false", "trainer.bf16 = true");
  refused("[contract]\nactivations = \"mxfp8\"", "both NVFP4 or both MXFP4");
  refused(
      "[contract]\nweights = \"mxfp4\"\nactivations = \"mxfp4\"\n"
      "macro_blocks = [\"weights\"]",
      "without macro blocks");
  refused("[guide]\nmode = \"lsb\"\nsites = [\"w13_in\"]", "out of guide.sites");
  refused("[residual]\nkind = \"dense\"\n[qat]\nresidual = true", "qat.residual = false");
  EXPECT_EQ(contradiction("arm = \"qarl\"\n[guide]\nmode = \"lsb\"\nsites = [\"k\", \"v\"]"), "");
  EXPECT_EQ(contradiction("arm = \"qarl\"\n[contract]\nweights = \"mxfp4\"\n"
                          "activations = \"mxfp4\"\nmx_rule = \"even\""),
            "");
}

TEST(Preflight, BytesOfFormats) {
  const auto record = [](const char* arm) {
    const Recipe r = parse_recipe(std::string("arm = \"") + arm + "\"", "r");
    return budget(r, bind(r.arm, kModel), kModel);
  };
  // 128 elements of w13_in, 64 of K and V, four layers: 1.25 bits of MX, 1 and a byte a row of FP8.
  EXPECT_EQ(record("mxfp4_trace").record_per_token, 4 * (20 + 10 + 10) + 8 * 2);
  EXPECT_EQ(record("mxfp4_w4a8_trace").record_per_token, 4 * (20 + 10 + 10) + 8 * 2);
  EXPECT_EQ(record("fp8_trace").record_per_token, 4 * (17 + 8 + 8) + 8 * 2);
  EXPECT_EQ(record("mxfp4_trace").cache_per_token, 8 * 2 * 34);
  EXPECT_EQ(record("fp8_trace").cache_per_token, 8 * 2 * 64);
}

TEST(Arm, APresetThatNoRolloutRunsIsNamed) {
  for (const char* preset : {"modelopt", "lokstep", ""}) {
    ArmSpec spec = arm_spec("naive");
    spec.contract = preset;
    EXPECT_THROW(bind(spec, ModelConfig{.num_layers = 2}), Error) << preset;
  }
}

/// docs/recipes.md has a row for each key, as the code has it.
TEST(Recipe, TheDocumentHasEveryKey) {
  std::ifstream in("docs/recipes.md");
  const std::string document(std::istreambuf_iterator<char>(in), {});
  ASSERT_FALSE(document.empty());
  Recipe recipe;
  SftRecipe sft;
  std::string of_sft;  // those that train has not
  const std::string of_train = reference(keys(recipe));
  for (const Key& key : keys(sft)) {
    const std::string row = reference({&key, 1});
    if (of_train.find(row) == std::string::npos) of_sft += row;
  }
  for (const std::string& rows : {of_train, of_sft}) {
    EXPECT_NE(document.find("|---|---|---|---|\n" + rows + "\n"), std::string::npos)
        << "write into docs/recipes.md:\n"
        << rows;
  }
}

}  // namespace
}  // namespace lockstep::recipe
