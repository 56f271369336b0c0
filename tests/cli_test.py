"""Bad input: each is one clear line that names what is wrong, a non-zero exit, and nothing half-written."""

import json
import os
import pathlib
import resource
import shutil
import signal
import struct
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", ROOT / "build")).resolve() / "lockstep"
MODEL = ROOT / "models/tiny-moe"
SMALL = ["schedule.steps=2", "schedule.prompts=2", "schedule.samples=2", "schedule.save_every=1",
         "eval.prompts=0"]


def lockstep(*args, cwd=None, **kwargs):
    env = {**os.environ, "LOCKSTEP_HOME": str(ROOT)}
    return subprocess.run([PROGRAM, *map(str, args)], cwd=cwd, env=env, text=True,
                          capture_output=True, timeout=300, **kwargs)


def refused(done, status, *words):
    """The program said no, in one line that holds the words."""
    assert done.returncode == status, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and done.stderr.splitlines()[-1] == errors[0], done.stderr
    for word in words:
        assert word in errors[0], errors[0]


def train(tmp_path, *assignments, recipe="recipes/demo.toml", **kwargs):
    return lockstep("train", ROOT / recipe, *SMALL, *assignments, "--run", tmp_path / "run", **kwargs)


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model that a test may break."""
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


def edit_header(model, change):
    """Rewrites the header of model.safetensors; the values stay as they are."""
    path = model / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])


# --- recipes --------------------------------------------------------------------------------------

@pytest.mark.parametrize("assignment, words", [
    ("trainer.lrr=1", ["unknown key trainer.lrr", "did you mean trainer.lr?"]),
    ("trainer.lr=fast", ["trainer.lr", "fast", "a number"]),
    ("rollout.temperature=0", ["rollout.temperature", "0", "above 0"]),           # R95
    ("rollout.temperature=-1", ["rollout.temperature", "-1"]),                    # R95
    ("schedule.samples=0", ["schedule.samples", "0", "at least 1"]),              # R95
    ("rl.clip_low=-0.2", ["rl.clip_low", "-0.2"]),                                # R95
    ("arm=trase", ["trase", "trace"]),
    ("guide.mode=lbs", ["guide.mode", "did you mean lsb?"]),
    ("guide.layers=9", ["layer", "9"]),
    ("guide.kv_layers=9", ["layer", "9"]),
    ("rollout.cache=1024", ["rollout.cache", "too small for one sequence"]),
    ("store.ram=64", ["store.ram", "too small"]),
    ("rollout.max_new_tokens=512", ["rollout.max_new_tokens", "512"]),
    ("rl.correction=tis", ["rl.bypass", "rl.correction"]),
    ("schedule.updates=2", ["rl.bypass", "schedule.updates"]),
    ("contract.kv=false", ["qat.k"]),                                             # R81
    ("task.name=chess", ["task.name", "chess"]),
    ("task.name=jsonl", ["task.file"]),
    ('task.operations=""', ["task.operations is empty"]),
    ("task.operations=%", ["task.operations", "%"]),
    ("task.left=[9, 3]", ["task.left", "9"]),
    ("schedule.steps=10000000", ["step", "task.left"]),   # no prompts for the last step
    ("contract.preset=te", ["contract.preset", "te"]),
    ("rl=5", ["rl is a section", "5"]),
    ("lr={}", ["unknown section lr", "did you mean rl?"]),
    ("=5", ["key=value"]),
    ("trainer.l\nr=5", ["trainer.l\\nr"]),
])
def test_recipe_is_refused(tmp_path, assignment, words):
    done = train(tmp_path, assignment)
    refused(done, 2, *words)
    assert len(done.stderr.splitlines()) == 1, done.stderr  # before anything else is said
    assert not (tmp_path / "run").exists()


def test_missing_files(tmp_path):
    refused(lockstep("train", tmp_path / "none.toml"), 2, "none.toml")
    refused(train(tmp_path, "model=no/such/model"), 2, "model", "no/such/model")
    refused(train(tmp_path, "task.name=jsonl", "task.file=no.jsonl"), 2, "no.jsonl")
    refused(lockstep("rollout", "--score", tmp_path / "none.jsonl"), 2, "none.jsonl")
    assert not (tmp_path / "run").exists()


def test_the_recipe_of_the_document_trains(tmp_path):
    """docs/recipes.md: its recipe, on rows that its judge can tell apart."""
    document = (ROOT / "docs/recipes.md").read_text()
    (tmp_path / "my.toml").write_text(document.split("```toml\n")[1].split("```")[0])
    row = json.loads(document.split("```json\n")[1].splitlines()[0])
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps(row | {"prompt": f"{n}*3=", "reward_model": {"ground_truth": f"{3 * n}"}}) + "\n"
        for n in range(10, 40)))
    done = lockstep("train", "my.toml", *SMALL, "--run", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0 and "step 2/2" in done.stderr, done.stderr


@pytest.mark.parametrize("args", [
    ["diff", "no/such", "x"],
    ["diff", ".", "."],
    ["diff", MODEL / "model.safetensors", MODEL / "model.safetensors", "--contract", "zz"],
    ["diff", MODEL / "model.safetensors", MODEL / "model.safetensors", "arm=zz"],
    ["diff", MODEL / "model.safetensors", MODEL / "model.safetensors", "--tolerance", "nan"],
    ["inspect", MODEL, "--contract", "zz"],
    ["inspect", "no/such"],
    ["inspect", MODEL, "--why", "no/such:2", "--place", "1.k", "--position", "2"],
    ["report", "no/such"],
    ["report", "x" * 5000],
    ["verify", "model=" + "x" * 5000],
    ["inspect", "x" * 5000],
    ["rollout", "--score", "x" * 5000],
    ["verify", "no/such"],
    ["verify", "model=README.md"],
    ["eval", "no/such"],
    ["eval", "--n", "1000000000"],
    ["decompose", "no/such"],
    ["decompose", "--n", "1000000000"],
    ["dump", "no/such", "--score", "x", "--out", "y"],
    ["dump", MODEL, "--score", "no/such", "--out", "y"],
    ["rollout", "--trace", ROOT / "README.md"],
    ["rollout", "task.name=jsonl", "task.file=no/such"],
    ["sft", "no/such"],
    ["sft", ROOT / "recipes/tiny_sft.toml", "model=no/such"],
    ["sft", ROOT / "recipes/tiny_sft.toml", "--out", ROOT / "README.md"],
    ["compare", "no/such"],
    ["compare", ROOT / "recipes/demo.toml", "--arms", "bf16", "model=no/such", "--run", "x"],
    ["demo", "no/such"],
    ["demo", "model=no/such", "--run", "x"],
    ["doctor", "no/such"],
    ["doctor", ROOT / "recipes/demo.toml", "model=no/such"],
    ["doctor", ROOT / "recipes/tiny_sft.toml", "batch=0"],
    ["train", ROOT / "recipes/demo.toml", "model=recipes", "--run", "x"],
])
def test_a_path_that_is_not_there_is_status_2_in_every_verb(tmp_path, args):
    done = lockstep(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 1 and not list(tmp_path.iterdir()), done.stderr


@pytest.mark.parametrize("args, words", [
    (["dump", MODEL, "--score", ROOT, "--out", "d"], ["--score", "folder"]),
    (["diff", MODEL, MODEL], ["is no tensor of a dump"]),
    (["sft", ROOT / "recipes/compare_tiny.toml"], ["run ./lockstep compare", "compare_tiny.toml"]),
    (["compare", ROOT / "recipes/tiny_sft.toml"], ["run ./lockstep sft"]),
])
def test_what_is_of_another_kind_is_status_2(tmp_path, args, words):
    refused(lockstep(*args, cwd=tmp_path), 2, *words)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_weights_is_status_2(model):
    (model / "model.safetensors").unlink()
    for verb in ("verify", "eval", "inspect"):
        refused(lockstep(verb, model), 2, str(model), "name a Hugging Face directory that has weights")


def test_usage_is_status_2():
    refused(lockstep("conquer"), 2, "conquer", "--help")
    refused(lockstep("trian"), 2, "trian", "did you mean train?")
    refused(lockstep("Train", "x.toml"), 2, "Train", "did you mean train?")
    done = lockstep()
    assert done.returncode == 2 and not done.stderr
    assert all(f"  {verb} " in done.stdout for verb in ("demo", "train", "test"))
    refused(lockstep("train"), 2, "recipe")


@pytest.mark.parametrize("args", [
    ("train", ""), ("train", ROOT / "recipes/demo.toml", "--run", ""), ("sft", ""), ("rollout", ""),
    ("rollout", "--prompt", ""), ("rollout", "--out", ""), ("rollout", "--score", ""),
    ("eval", "--model", ""), ("inspect", ""), ("demo", ""), ("doctor", ""), ("verify", ""),
    ("diff", "", ""),
])
def test_empty_text_is_no_default(args):
    refused(lockstep(*args), 2, "is empty")


def test_every_verb_has_help_with_an_example():
    top = lockstep("--help")
    assert top.returncode == 0
    for verb in ["demo", "doctor", "sft", "train", "rollout", "eval", "inspect"]:
        assert verb in top.stdout
        done = lockstep(verb, "--help")
        assert done.returncode == 0 and f"./lockstep {verb}" in done.stdout.split("Example")[1]


# --- checkpoints ----------------------------------------------------------------------------------

def test_truncated_safetensors(tmp_path, model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(train(tmp_path, f"model={model}"), 1, "model.safetensors")
    assert not (tmp_path / "run").exists()


def test_header_of_two_to_the_63_bytes(tmp_path, model):
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 63) + path.read_bytes()[8:])
    refused(train(tmp_path, f"model={model}"), 1, "model.safetensors")


def test_wrong_shape(tmp_path, model):
    def change(header):
        shape = header["model.norm.weight"]["shape"]
        header["model.norm.weight"]["shape"] = [2, shape[0] // 2]
    edit_header(model, change)
    refused(train(tmp_path, f"model={model}"), 1, "model.norm.weight")


def test_wrong_dtype(tmp_path, model):
    edit_header(model, lambda header: header["model.norm.weight"].update(dtype="I16"))
    refused(train(tmp_path, f"model={model}"), 1, "model.norm.weight", "I16")


@pytest.mark.parametrize("arm", ["bf16", "trace"])
def test_nan_weight(tmp_path, model, arm):
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    name = "model.layers.2.self_attn.q_proj.weight"
    at = 8 + size + json.loads(data[8:8 + size])[name]["data_offsets"][0] + 20
    data[at:at + 2] = b"\xc0\x7f"
    path.write_bytes(data)
    refused(train(tmp_path, f"model={model}", f"arm={arm}"), 1, name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", ["I8", "F64", "I64", "BOOL"])
def test_dtype_that_no_weight_has(tmp_path, model, dtype):
    """Named whether or not the offsets go with it."""
    name = "model.norm.weight"
    edit_header(model, lambda header: header[name].update(dtype=dtype))
    refused(train(tmp_path, f"model={model}"), 1, name, dtype)


def test_names_a_tensor_once(tmp_path, model):
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    at = 8 + size + json.loads(data[8:8 + size])[name]["data_offsets"][0]
    data[at:at + 2] = b"\x80\x7f"
    path.write_bytes(data)
    done = train(tmp_path, f"model={model}")
    refused(done, 1, name, "value 0", "not finite")
    assert done.stderr.splitlines()[-1].count("expert") == 1, done.stderr


def test_vocabulary_mismatch(tmp_path, model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 300, "content": "<x>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(train(tmp_path, f"model={model}"), 1, "272")


# --- sequences ------------------------------------------------------------------------------------

def test_prompt_longer_than_the_context():
    refused(lockstep("rollout", "--prompt", "1" * 600), 2, "600", "512")


@pytest.mark.parametrize("line, words", [
    ('{"text": 3}', []),
    ('{"tokens": [1, 2, 99999]}', ["token 99999 at 2", "272"]),
    ("not json", []),
    ('{"text": "' + "1" * 600 + '"}', ["600"]),
])
def test_bad_sequence_names_file_and_line(tmp_path, line, words):
    file = tmp_path / "s.jsonl"
    file.write_text('{"text": "1*2=2"}\n' + line + "\n")
    out = tmp_path / "out.jsonl"
    refused(lockstep("rollout", "--score", file, "--out", out), 1, "s.jsonl:2", *words)
    assert list(tmp_path.iterdir()) == [file]


# --- the run directory ----------------------------------------------------------------------------

def test_run_directory_that_is_somebody_elses(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.tex").write_text("x")
    refused(train(tmp_path), 2, str(run), "thesis.tex")
    assert [p.name for p in run.iterdir()] == ["thesis.tex"]
    (run / "thesis.tex").unlink()
    run.rmdir()
    run.symlink_to(tmp_path / "gone")
    refused(train(tmp_path), 2, str(run), "gone")
    assert not (tmp_path / "gone").exists()
    run.unlink()
    run.write_text("x")
    refused(train(tmp_path), 2, str(run), "no folder")


def test_run_directory_without_its_recipe(tmp_path):
    assert train(tmp_path).returncode == 0
    recipe = tmp_path / "run/recipe.toml"
    text = recipe.read_text()
    before = sorted(p for p in (tmp_path / "run").rglob("*") if p != recipe)
    recipe.unlink()
    refused(train(tmp_path), 2, "checkpoints", "recipe.toml")
    for damaged in ["", "# contract 1\n[trainer\n", text.replace("trainer", "tainer"), "\0" * 50]:
        recipe.write_text(damaged)
        done = train(tmp_path)
        refused(done, 1, str(recipe))
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert sorted(p for p in (tmp_path / "run").rglob("*") if p != recipe) == before
    recipe.write_text(text)
    assert train(tmp_path).returncode == 0


# --- files and folders of every kind --------------------------------------------------------------

def test_streams_that_are_closed_are_no_files_of_the_run(tmp_path):
    """A file opened while 2 is closed must not take that number, and every message with it."""
    def close():
        for stream in range(3):
            os.close(stream)
    env = {**os.environ, "LOCKSTEP_HOME": str(ROOT)}
    done = subprocess.run([PROGRAM, "train", ROOT / "recipes/demo.toml", *SMALL, "--run",
                           tmp_path / "run"], env=env, preexec_fn=close, timeout=300)
    assert done.returncode == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_recipe_is_a_regular_file(tmp_path):
    """Read twice, a pipe is empty, and all keys would have their defaults."""
    os.mkfifo(tmp_path / "pipe")
    refused(lockstep("train", tmp_path / "pipe"), 2, "pipe", "no regular file")
    refused(lockstep("verify", "/dev/null"), 2, "/dev/null", "no regular file")
    for name in ["metrics.jsonl", "recipe.toml"]:  # of a run: nobody waits for who writes into it
        run = tmp_path / name.replace(".", "_")
        run.mkdir()
        os.mkfifo(run / name)
        refused(lockstep("inspect", run), 1, name, "cannot read")


def test_a_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run([ROOT / "lockstep", "doctor"], text=True, capture_output=True, timeout=300,
                          preexec_fn=lambda: (os.chdir(gone), gone.rmdir()))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("lockstep: the folder that you call from is gone")


def test_links_that_lead_in_circles(tmp_path, model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("model.safetensors")
    refused(lockstep("inspect", model), 1, "model.safetensors", "symbolic links")


def test_more_than_the_machine_has(tmp_path):
    for key in ("rollout.cache", "rollout.swap", "store.ram"):
        refused(train(tmp_path, f"{key}=9007199254740991"), 1, key, "lower it")
    refused(lockstep("eval", MODEL, "--samples", 2000000000), 2, "--samples", "16382")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["train", "compare", "demo", "rollout", "eval", "verify",
                                  "decompose", "dump", "inspect"])
def test_every_verb_asks_for_its_memory_first(tmp_path, verb):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "1*2=2"}\n')
    cache = 'rollout.cache="100 TiB"'
    more = {"train": [ROOT / "recipes/demo.toml", cache, "--run", tmp_path / "run"],
            "compare": [ROOT / "recipes/demo.toml", cache, "--arms", "bf16", "--run",
                        tmp_path / "run"],
            "demo": [cache, "--run", tmp_path / "run"],
            "dump": [MODEL, cache, "--score", rows, "--out", tmp_path / "out"],
            "inspect": [MODEL, "--contract", "lockstep"]}.get(verb, [MODEL, cache])
    if verb == "inspect":  # a recipe's keys come from the run that it is asked about
        run = tmp_path / "asked"
        run.mkdir()
        (run / "recipe.toml").write_text(f"model = '{MODEL}'\nrollout.cache = '100 TiB'\n")
        more = [run, "--why", rows, "--place", "1.k", "--position", 2]
    done = lockstep(verb, *more)
    refused(done, 1, "100 TiB", "GiB", "lower")
    assert not (tmp_path / "run").exists() and not (tmp_path / "out").exists()


def test_every_arm_of_the_demo_is_read_before_the_first_runs(tmp_path):
    for arms, words in [("bf16,trase", ["trase", "trace"]), ("bf16,bf16", ["bf16 twice"])]:
        refused(lockstep("demo", "--arms", arms, "--run", tmp_path / "run"), 2, *words)
    assert not (tmp_path / "run").exists()


def test_a_demo_keeps_the_arms_that_have_ended(tmp_path):
    demo = ["demo", *SMALL, "schedule.steps=1", "--run", tmp_path / "run"]
    assert lockstep(*demo, "--arms", "bf16", cwd=tmp_path).returncode == 0
    (tmp_path / "recipe.toml").write_text("no TOML")  # of the folder it is called from
    kept = (tmp_path / "run/bf16/metrics.jsonl").read_bytes()
    again = lockstep(*demo, "--arms", "bf16,naive", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "bf16: done before" in again.stderr and "naive: done" not in again.stderr
    assert (tmp_path / "run/bf16/metrics.jsonl").read_bytes() == kept


def test_what_was_calibrated_does_not_hinder_going_on(tmp_path):
    static = ["arm=quads", "residual.scope=static", "contract.four_over_six=mse"]
    assert train(tmp_path, *static).returncode == 0
    more = train(tmp_path, *static, "schedule.steps=3")
    assert more.returncode == 0 and "step 3/3" in more.stderr, more.stderr


# --- disk and resume ------------------------------------------------------------------------------

def test_no_room_for_the_checkpoints(tmp_path):
    refused(train(tmp_path, "schedule.steps=50000000", "schedule.keep=0",
                  "task.repeat=true"), 1, "room")
    assert not (tmp_path / "run").exists()


def test_disk_that_fills_up_while_a_checkpoint_is_written(tmp_path):
    def small_files():  # a write past the limit fails as it does on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    done = train(tmp_path, preexec_fn=small_files)
    refused(done, 1)
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    # With room again the same command goes on.
    assert train(tmp_path).returncode == 0


def test_R36_resumed_run_with_another_recipe(tmp_path):
    assert train(tmp_path).returncode == 0
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    refused(train(tmp_path, "trainer.lr=0.5"), 2, "trainer.lr", "0.5")
    # Two contracts that differ: the rollout's numbers of one run do not change.
    refused(train(tmp_path, "contract.layers=0-4", "guide.layers=3-4"), 2, "contract.layers")
    refused(train(tmp_path, "guide.kv_layers=none"), 2, "guide.kv_layers names no layer")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before
    recipe = tmp_path / "run/recipe.toml"
    text = recipe.read_text()
    recipe.write_text("# contract 0123456789abcdef" + text[text.index("\n"):])
    refused(train(tmp_path), 2, "contract")


def test_finished_run_stays_as_it_is(tmp_path):
    assert train(tmp_path).returncode == 0
    before = (tmp_path / "run/metrics.jsonl").read_text()
    assert train(tmp_path).returncode == 0
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    # More steps are no other run: it goes on, judged by what came before.
    more = train(tmp_path, "schedule.steps=3", "eval.prompts=0")
    assert more.returncode == 0, more.stderr
    assert "going on from checkpoints/step_2" in more.stderr and "step 3/3" in more.stderr
    after = (tmp_path / "run/metrics.jsonl").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 3
    text = (tmp_path / "run/recipe.toml").read_text()
    assert "steps = 3\n" in text
    refused(train(tmp_path), 2, "schedule.steps: 3 / 2", "more schedule.steps")
    # The device was chosen when it began, and is the run's.
    assert 'device = "auto"' not in text and 'device = "c' in text
    refused(train(tmp_path, "schedule.steps=3", "eval.prompts=0", "device=cuda:5"), 2, "device: ",
            "cuda:5")
    # A plain Hugging Face directory beside the training state.
    names = {p.name for p in (tmp_path / "run/checkpoints/step_3").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "training_state"} <= names


# --- sft ------------------------------------------------------------------------------------------

SFT = ["steps=2", "batch=2", "eval_prompts=0"]


def test_sft_asks_for_memory_and_room_before_it_learns(tmp_path):
    """Not after hours."""
    config = json.loads((MODEL / "config.json").read_text())
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config |= {"hidden_size": 1 << 20, "num_hidden_layers": 128, "num_experts": 1 << 15,
               "head_dim": 32}
    (model / "config.json").write_text(json.dumps(config))
    refused(lockstep("sft", ROOT / "recipes/tiny_sft.toml", *SFT, "fresh=true", f"model={model}",
                     "--out", tmp_path / "out"), 1, "take together", "smaller model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_sft_overwrites_only_its_own(tmp_path):
    recipe, out = ROOT / "recipes/tiny_sft.toml", tmp_path / "out"
    assert lockstep("sft", recipe, *SFT, "--out", out).returncode == 0
    before = (out / "model.safetensors").read_bytes()
    refused(lockstep("sft", recipe, *SFT, "seed=7", "--out", out), 2, str(out), "seed: 1 / 7", "--out")
    assert (out / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "out.loss.jsonl").exists()
    assert lockstep("sft", recipe, *SFT, "--out", out).returncode == 0
    (out / "sft.toml").unlink()
    refused(lockstep("sft", recipe, *SFT, "--out", out), 2, "not written by sft", "--out")


def test_recipe_of_sft_is_not_trained(tmp_path):
    refused(lockstep("train", ROOT / "recipes/tiny_sft.toml", "--run", tmp_path / "run"), 2,
            "tiny_sft.toml is a recipe for sft", "./lockstep sft")
