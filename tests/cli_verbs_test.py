"""rollout, eval, inspect and doctor as a user meets them: the program on models/tiny-moe."""

import json
import os
import pathlib
import resource
import shutil
import struct
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", ROOT / "build")).resolve() / "lockstep"
MODEL = ROOT / "models" / "tiny-moe"
SHORT = "rollout.max_new_tokens=24"

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built")


def run(*args, rc=0, stdout=subprocess.PIPE):
    done = subprocess.run([PROGRAM, *map(str, args)], cwd=ROOT, stdout=stdout,
                          stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == rc, (args, done.returncode, done.stdout, done.stderr)
    return done


def refused(*args, rc, named):
    """The program says in one line what is wrong and names it, and writes nothing to stdout."""
    done = run(*args, rc=rc)
    lines = done.stderr.strip().split("\n")
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for name in named if isinstance(named, list) else [named]:
        assert str(name) in lines[0], lines[0]
    assert done.stdout == ""
    return lines[0]


def rows(text):
    return [json.loads(line) for line in text.splitlines()]


def write_rows(path, *objects):
    path.write_text("".join(json.dumps(o) + "\n" if not isinstance(o, str) else o + "\n"
                            for o in objects))
    return path


@pytest.mark.parametrize("verb", ["sft", "train", "rollout", "eval", "inspect", "doctor"])
def test_every_verb_has_help_with_an_example(verb):
    text = run(verb, "--help").stdout
    assert f"./lockstep {verb}" in text and "Example" in text


# --- rollout ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answers of the arm trace, with their records."""
    folder = tmp_path_factory.mktemp("answers")
    run("rollout", "arm=trace", SHORT, "--n", 12, "--samples", 2, "--out", folder / "answers.jsonl",
        "--trace", folder / "trace")
    return folder


def test_answers_are_whole_and_judged(answers):
    found = rows((answers / "answers.jsonl").read_text())
    assert len(found) == 24
    assert not list(answers.glob("*.part"))
    for row in found:
        given = row["prompt_len"]
        logp = row["rollout_logp"]
        assert len(logp) == len(row["tokens"]) > given
        assert all(value is None for value in logp[:given])
        assert all(value <= 0 for value in logp[given:])
        assert row["prompt"].endswith("=")
        assert eval(row["prompt"][:-1]) == int(row["ground_truth"])
        assert row["finish"] in ("stop", "length")
        assert (row["finish"] == "length") == (len(row["tokens"]) == given + 24 and
                                               row["tokens"][-1] != 256)
        right = row["response"].removesuffix("<|endoftext|>").endswith(
            row["ground_truth"]) and row["finish"] == "stop"
        assert row["reward"] == 1 or not right
    assert {(row["prompt_id"], row["sample"]) for row in found} == {
        (2**27 + i, sample) for i in range(12) for sample in range(2)}


def test_an_answer_does_not_depend_on_its_company(answers):
    alone = rows(run("rollout", "arm=trace", SHORT, "--n", 1, "--samples", 1).stdout)
    assert alone == rows((answers / "answers.jsonl").read_text())[:1]


def test_engine_scores_its_answers_to_the_bit(answers):
    path = answers / "answers.jsonl"
    scored = rows(run("rollout", "arm=trace", "--score", path).stdout)
    for answer, score in zip(rows(path.read_text()), scored, strict=True):
        assert score["tokens"] == answer["tokens"]
        assert score["rollout_logp"] == answer["rollout_logp"]
    assert [score["line"] for score in scored] == list(range(1, 25))


def test_the_gap_is_small_and_smaller_where_the_trainer_follows_records(answers):
    done = run("rollout", "arm=trace", "--score", answers / "answers.jsonl", "--gap")
    guided, unguided = [], []
    for row in rows(done.stdout):
        for engine, follows, alone in zip(row["rollout_logp"], row["trainer_logp"],
                                          row["unguided_logp"], strict=True):
            assert (engine is None) == (follows is None) == (alone is None)
            if engine is not None:
                guided.append(abs(engine - follows))
                unguided.append(abs(engine - alone))
    assert sum(guided) < sum(unguided)
    assert sum(guided) / len(guided) < 0.01
    said = [line for line in done.stderr.splitlines() if line.startswith("|difference")]
    assert len(said) == 3 and f"over {len(guided)} tokens" in said[0]
    mean = float(said[0].split("mean ")[1].split(",")[0])
    assert mean == pytest.approx(sum(guided) / len(guided), abs=1e-6)


def test_the_trainer_alone_agrees_in_bf16(answers):
    path = answers / "answers.jsonl"
    engine = rows(run("rollout", "arm=bf16", "--score", path).stdout)
    trainer = rows(run("rollout", "arm=bf16", "--score", path, "--trainer").stdout)
    gaps = [abs(a - b) for e, t in zip(engine, trainer, strict=True)
            for a, b in zip(e["rollout_logp"], t["trainer_logp"], strict=True) if a is not None]
    assert 0 < sum(gaps) / len(gaps) < 0.01


def test_rows_of_every_form_say_the_same(tmp_path):
    document = (ROOT / "docs/formats/sequences.md").read_text()
    example = document.split("## Example")[1].split("```json\n")[1].split("```")[0]
    path = tmp_path / "forms.jsonl"
    tokens = [50, 42, 51, 61, 54]
    path.write_text(example)
    with path.open("a") as file:
        file.write("\n")  # passed over
        for row in ({"token_ids": tokens, "response_mask": [0, 0, 1, 0, 1], "extra": {"a": 1}},
                    {"prompt": "2*3", "response": "=6"}, {"tokens": [7]}):
            file.write(json.dumps(row) + "\n")
    first, second, third, fourth, fifth = rows(
        run("rollout", "arm=bf16", "--score", path).stdout)
    assert all(row["tokens"] == tokens for row in (first, second, third, fourth))
    logp = first["rollout_logp"]
    assert logp[0] is None and all(value < 0 for value in logp[1:])
    assert second["rollout_logp"] == fourth["rollout_logp"] == [None] * 3 + logp[3:]
    assert third["rollout_logp"] == [None, None, logp[2], None, logp[4]]
    assert fifth == {"line": 6, "tokens": [7], "rollout_logp": [None]}


def test_a_prompt_of_ones_own_and_prompts_of_a_step():
    (row,) = rows(run("rollout", "arm=bf16", SHORT, "--prompt", "12*3=").stdout)
    assert row["prompt"] == "12*3=" and row["reward"] is None and row["response"]
    steps = [rows(run("rollout", SHORT, "--step", step, "--n", 2).stdout) for step in (0, 1)]
    assert [row["prompt_id"] for step in steps for row in step] == [0, 1, 2, 3]


@pytest.mark.parametrize("row, named", [
    ('{"tokens": [1, 2', "row"),
    ("[1, 2]", "no JSON object"),
    ('{"other": 1}', "none of token_ids"),
    ('{"text": ""}', "no tokens"),
    ('{"text": 5}', "text is no string"),
    ('{"tokens": [1, 272]}', "token 272 at 1 is outside the vocabulary of 272"),
    ('{"tokens": [1, -1]}', "holds -1 at 1, which is no id"),
    ('{"tokens": [1, 99999999999]}', "holds 99999999999 at 1, which is no id"),
    ('{"tokens": [1, 2.5]}', "2.5"),
    ('{"tokens": [1, 2], "prompt_len": 3}', "prompt_len is 3"),
    ('{"tokens": [1, 2], "response_mask": [0]}', "1 entries for 2 tokens"),
    ('{"tokens": [1, 2], "response_mask": [0, 2]}', "response_mask holds 2"),
    ('{"tokens": [1, 2], "response_mask": [0, 1], "prompt_len": 1}', "leave one out"),
    ('{"tokens": [1, 2], "rollout_logp": [0]}', "rollout_logp has 1"),
    ('{"tokens": [1, 2], "rollout_logp": [null, 5]}', "rollout_logp holds 5 at 1"),
    ('{"tokens": [1, 2], "rollout_logp": [null, 0.002]}', "rounding may take it to 0.001"),
    ('{"tokens": [1, 2], "rollout_logp": [null, -1e300]}', "rollout_logp holds -1e+300 at 1"),
    (json.dumps({"tokens": [1] * 513}), "the model's context is 512"),
])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, named):
    path = write_rows(tmp_path / "rows.jsonl", {"text": "good"}, row)
    out = tmp_path / "out.jsonl"
    refused("rollout", "--score", path, "--out", out, rc=1, named=[f"{path}:2: ", named])
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_rollout_refuses_what_cannot_be(tmp_path):
    rows_ = write_rows(tmp_path / "rows.jsonl", {"text": "good"})
    empty = write_rows(tmp_path / "empty.jsonl")
    refused("rollout", "recipes/none.toml", rc=2, named="recipes/none.toml")
    refused("rollout", "rollout.temprature=1", rc=2, named="did you mean rollout.temperature?")
    refused("rollout", "rollout.temperature=warm", rc=2, named="rollout.temperature")
    refused("rollout", "rollout.temperature=-1", rc=2, named="rollout.temperature")
    refused("rollout", "rollout.cache=1KiB", rc=2, named="rollout.cache")
    refused("rollout", "--model", tmp_path / "none", rc=2, named=tmp_path / "none")
    refused("rollout", "--prompt", "1" * 600, rc=2, named=["600 tokens", "512"])
    refused("rollout", "--prompt", os.fsdecode(b"1+\xff="), rc=2, named=["--prompt", "UTF-8"])
    refused("rollout", "--n", 0, rc=2, named="--n: 0")
    refused("rollout", "--n", 10**6, rc=2, named="problems for evaluation")
    refused("rollout", "--gap", rc=2, named="--score")
    refused("rollout", "--score", rows_, "--trace", tmp_path / "t", rc=2, named="--trace")
    refused("rollout", "--score", tmp_path / "none.jsonl", rc=2, named="none.jsonl")
    refused("rollout", "--score", empty, rc=1, named="no rows")
    (tmp_path / "none").touch()
    refused("rollout", "--out", tmp_path / "none" / "out.jsonl", rc=2, named="none/out.jsonl")
    refused("rollout", "--out", tmp_path, rc=2, named="a folder")
    refused("rollout", "--nothing", rc=2, named="--nothing")
    with open("/dev/full", "w") as full:
        for args in [["rollout", SHORT, "--n", 1], ["--help"], ["train", "--help"]]:
            assert "stdout" in run(*args, rc=1, stdout=full).stderr
    assert sorted(os.listdir(tmp_path)) == ["empty.jsonl", "none", "rows.jsonl"]


def test_a_full_disk_leaves_nothing_and_is_named(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("what was there before")
    done = subprocess.run(
        [PROGRAM, "rollout", SHORT, "--n", "8", "--out", out], cwd=ROOT, capture_output=True,
        text=True, timeout=300, restore_signals=False,  # SIGXFSZ stays ignored
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)))
    assert done.returncode == 1 and f"no room for {out}" in done.stderr
    assert os.listdir(tmp_path) == ["out.jsonl"] and out.read_text() == "what was there before"


def test_a_tasks_bad_row_is_named_too(tmp_path):
    good = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    path = write_rows(tmp_path / "task.jsonl", good, good, {"prompt": "1+2="})
    task = ("task.name=jsonl", f"task.file={path}")
    refused("rollout", *task, rc=1, named=f"{path}:3: ")
    write_rows(path, *[{**good, "prompt": "1" * 500}] * 3)
    refused("eval", *task, SHORT, rc=1, named=[f"{path}:1: ", "500 tokens"])
    write_rows(path, *[good] * 20)
    assert "on 2 prompts of jsonl" in run("eval", *task, SHORT, "--n", 2).stdout


# --- checkpoints that are not what they should be ---------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """A copy of the model that a test may damage."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    return folder


def edit_header(folder, change, body=lambda data, header: data):
    """Rewrites model.safetensors with another header; `body` may change the values."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    values = body(bytearray(data[8 + size:]), header)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


def test_a_damaged_checkpoint_is_named(copy):
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()

    def every_verb_refuses(named, rc=1):
        for verb in (("inspect", copy), ("rollout", SHORT, "--model", copy), ("eval", copy, SHORT)):
            refused(*verb, rc=rc, named=named)

    weights.write_bytes(whole[:-1000])
    every_verb_refuses("model.safetensors")
    weights.write_bytes(struct.pack("<Q", 2**63) + whole[8:])
    every_verb_refuses(["model.safetensors", str(2**63)])
    weights.unlink()
    every_verb_refuses(str(copy), rc=2)
    weights.write_bytes(whole)

    def shape(header):
        header[EXPERT]["shape"].reverse()

    edit_header(copy, shape)
    every_verb_refuses([EXPERT, "[64, 128]"])
    weights.write_bytes(whole)
    edit_header(copy, lambda header: header[EXPERT].update(dtype="I16"))
    every_verb_refuses([EXPERT, "I16"])
    weights.write_bytes(whole)
    edit_header(copy, lambda header: header.pop(EXPERT))
    every_verb_refuses("model.safetensors")

    def not_a_number(values, header):
        at = header[EXPERT]["data_offsets"][0]
        values[at:at + 2] = struct.pack("<H", 0x7fc0)
        return values

    weights.write_bytes(whole)
    edit_header(copy, lambda header: None, not_a_number)
    every_verb_refuses(EXPERT)


def test_a_vocabulary_or_tokenizer_that_does_not_match_is_named(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 260}))
    refused("eval", copy, rc=1, named=["260", "271"])
    (copy / "config.json").write_text(json.dumps({**config, "sliding_window": 64,
                                                  "use_sliding_window": True}))
    refused("eval", copy, rc=1, named="sliding_window")
    (copy / "config.json").write_text("{")
    refused("inspect", copy, rc=1, named="config.json")
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "tokenizer.json").unlink()
    refused("rollout", "--model", copy, rc=1, named="tokenizer.json")


# --- eval ------------------------------------------------------------------------------------------


def test_eval_judges(tmp_path):
    out = tmp_path / "answers.jsonl"
    first = run("eval", MODEL, "arm=bf16", "rollout.max_new_tokens=48", "--n", 24, "--greedy",
                "--out", out).stdout
    again = run("eval", MODEL, "arm=bf16", "rollout.max_new_tokens=48", "--n", 24, "--greedy",
                "seed=5").stdout
    assert first.splitlines()[0] == again.splitlines()[0]
    mean = float(first.split("mean@1 ")[1].split()[0])
    found = rows(out.read_text())
    assert mean == pytest.approx(sum(row["reward"] for row in found) / 24, abs=1e-4)
    assert mean > 0.3  # it was taught
    text = run("eval", "--n", 6, "--samples", 3, "--top-p", 0.9, SHORT).stdout
    assert "mean@3" in text and "best@3" in text and "on 6 prompts of arith" in text
    assert "(standard error)" in text
    text = run("eval", MODEL, SHORT, "--n", 1).stdout
    assert "+-" not in text and "on 1 prompt of arith (10 to 99 * 2 to 99), the default" in text
    text = run("eval", MODEL, SHORT, "task.left=[10, 20]", "--n", 1).stdout
    assert "of arith (10 to 20 * 2 to 99)\n" in text


def test_eval_quantizes_afterwards():
    texts = [run("eval", MODEL, "--posthoc", how, "--n", 8, "--greedy", SHORT).stdout
             for how in ("nvfp4", "four_over_six", "h_scale")]
    for how, text in zip(("nvfp4", "four_over_six", "h_scale"), texts):
        assert "arm naive" in text and f"quantized afterwards: {how}" in text
    contract = [text.split("contract lockstep (")[1].split(")")[0] for text in texts]
    assert contract[0] == contract[2] != contract[1]  # H-Scale is other scales of one format
    refused("eval", "--posthoc", "int4", rc=2, named="h_scale")


def test_eval_refuses_what_cannot_be(tmp_path):
    refused("eval", tmp_path, rc=2, named=["config.json", "recipe.toml"])
    (tmp_path / "runs/arm/seed_1").mkdir(parents=True)
    (tmp_path / "runs/arm/seed_1/recipe.toml").touch()
    for verb in ["eval", "inspect"]:
        refused(verb, tmp_path / "runs", rc=2, named=["name one that has", "/runs/arm/seed_1"])
    refused("eval", "--greedy", "--top-k", 4, rc=2, named="--greedy")
    refused("eval", "--greedy", "--samples", 4, rc=2, named="--samples")
    refused("eval", "--top-p", 2, "--n", 1, rc=2, named="--top-p: 2")


# --- what verbs write ---------------------------------------------------------------------------------


def test_an_output_is_a_file_a_stream_or_refused(tmp_path):
    """Not what a rename would put in the place of a device, a link or an input."""
    dump = tmp_path / "a.safetensors"
    text = {"layers.0.k": {"dtype": "BF16", "shape": [1, 16], "data_offsets": [0, 32]}}
    header = json.dumps(text).encode()
    dump.write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    whole = dump.read_bytes()
    refused("diff", dump, dump, "--json", tmp_path, rc=2, named="it is a folder")
    refused("diff", dump, dump, "--json", dump, rc=2, named=["--json", "is read as well"])
    assert dump.read_bytes() == whole
    shown = run("diff", dump, dump, "--json", "/dev/stdout").stdout
    assert json.loads(shown[:shown.rindex("}") + 1])["contract"] == "lockstep"
    (tmp_path / "link").symlink_to(tmp_path / "there.json")
    (tmp_path / "there.json").write_text("{}")
    run("diff", dump, dump, "--json", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there.json").stat().st_size > 100
    refused("decompose", "--json", tmp_path, rc=2, named="it is a folder")  # before it computes
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "link", "there.json"]


# --- inspect ---------------------------------------------------------------------------------------


def test_inspect_shows_a_checkpoint():
    text = run("inspect", MODEL).stdout
    config = json.loads((MODEL / "config.json").read_text())
    assert f"{config['num_hidden_layers']} layers of width {config['hidden_size']}" in text
    assert "'<|endoftext|>'" in text and "BF16" in text
    (line,) = [line for line in text.splitlines() if line.startswith("experts down")]
    error = float(line.split()[-4])
    assert 0.05 < error < 0.15  # of E2M1 with scales of its own for 16 elements
    shown = run("inspect", MODEL / "model.safetensors").stdout
    assert EXPERT in shown and "[128, 64]" in shown
    refused("inspect", MODEL, "--contract", "lockstop", rc=2, named="lockstep")
    ggml = run("inspect", MODEL, "--contract", "mx-even").stdout
    assert "2 blocks of 32" in ggml
    (shares,) = [line for line in ggml.splitlines() if line.startswith("experts down") and "%" in line]
    bias, dead, grid = (float(share) for share in shares.replace("%", " ").split()[2:5])
    assert bias > 5 and 0 < dead < 30 and grid > 30


def test_a_run_is_inspected_and_judged_by_its_directory(tmp_path):
    folder = tmp_path / "run"
    run("train", "recipes/demo.toml", "schedule.steps=2", "schedule.prompts=4",
        "schedule.samples=2", "eval.prompts=0", SHORT, "--run", folder)
    text = run("inspect", folder).stdout
    contract = (folder / "recipe.toml").read_text().splitlines()[0].removeprefix("# contract ")
    assert "a run of 2 steps" in text and contract in text and "step_2" in text
    assert "critic/rewards/mean" in text
    text = run("eval", folder, "--n", 4).stdout
    assert f"checkpoints/step_2, arm trace, contract lockstep ({contract})" in text


def test_inspect_says_what_does_not_fit(copy):
    refused("inspect", copy / "config.json", rc=2, named="config.json")
    refused("inspect", copy / "none", rc=2, named="none")
    refused("inspect", copy, "--place", "1.k", rc=2, named="--span")


def test_inspect_shows_a_trace(answers):
    trace = answers / "trace"
    text = run("inspect", trace).stdout
    tokens = sum(len(row["tokens"]) - row["prompt_len"] - 1
                 for row in rows((answers / "answers.jsonl").read_text()))
    tokens += sum(row["prompt_len"] for row in rows((answers / "answers.jsonl").read_text())
                  if row["sample"] == 0)
    assert f"36 spans of {tokens} tokens" in text
    line = [line for line in text.splitlines() if line.startswith("3.w13_in")][0].split()
    assert line[1:4] == ["lsb", "25", str(tokens)]
    assert "0 of" in text and "blocks are damaged" in text
    assert run("inspect", next(trace.glob("*.segment"))).stdout.count("w13_in") > 3

    row = rows((answers / "answers.jsonl").read_text())[1]
    name = f"{row['prompt_id']}:1"
    manifest = run("inspect", trace, "--span", name).stdout
    last = len(row["tokens"]) - 2
    assert f"positions {row['prompt_len']} to {last}" in manifest and "5.router" in manifest
    place = run("inspect", trace, "--span", name, "--place", "3.w13_in", "--position", last).stdout
    lines = [line for line in place.splitlines() if line.startswith("  block")]
    assert len(lines) == 8 and all(len(line.split("bits ")[1]) == 16 for line in lines)
    experts = run("inspect", trace, "--span", name, "--place", "0.router").stdout
    chosen = experts.split("experts8: ")[1].split()
    assert len(set(chosen)) == 2 and all(0 <= int(e) < 16 for e in chosen)
    for wrong in ("--span", "99:0"), ("--span", name, "--place", "3.k", "--position", last + 1):
        refused("inspect", trace, *wrong, rc=2, named="span")
    for wrong in ("--span", "x"), ("--span", name, "--place", "3.q"):
        refused("inspect", trace, *wrong, rc=2, named=wrong[-1])


def test_inspect_counts_what_is_damaged(answers, tmp_path):
    (segment,) = (answers / "trace").glob("*.segment")
    whole = segment.read_bytes()
    copy = tmp_path / "000001.segment"
    copy.write_bytes(whole)
    text = run("inspect", copy).stdout
    assert "1 segment, 36 spans" in text

    at = 48 + 24 + 36 + 8 + 1  # a row of the first block: header, frame, block's header, one run
    copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    done = run("inspect", copy, rc=1)
    assert "; 1 of " in done.stdout and "36 spans" in done.stdout
    assert done.stderr.startswith(f"error: {copy} has 1 damaged block; their rows are absent")

    copy.write_bytes(whole[:len(whole) // 2])  # as a killed writer leaves it
    done = run("inspect", copy, rc=1)
    text = done.stdout
    assert " damaged bytes; " in done.stderr and len(done.stderr.splitlines()) == 1
    spans = int(text.split(" segment, ")[1].split()[0])
    assert 0 < spans < 36 and "not ended" in text and "bytes dropped" in text

    copy.write_bytes(whole[:200])
    refused("inspect", tmp_path, "--span", 0, rc=1, named=["has no span 0", "000001.segment"])

    copy.write_bytes(b"\x89LSS" + b"x" * 100)
    refused("inspect", copy, rc=1, named="000001.segment")
    refused("inspect", tmp_path, "--span", 0, rc=1, named="000001.segment")
    done = run("inspect", tmp_path, rc=1)
    assert "left alone" in done.stdout and "000001.segment" in done.stdout


def test_a_path_of_another_kind_is_the_callers_fault(tmp_path):
    """Status 2, and the remedy: a folder for a file, a file that is no dump, places that nobody may write."""
    model = ROOT / "models/tiny-moe"
    weights = model / "model.safetensors"
    for verb in ("rollout", "dump"):
        refused(verb, model, "--score", tmp_path, "--out", tmp_path / "o", rc=2,
                named=["--score", tmp_path, "name a file"])
    refused("eval", model, "task.name=jsonl", f"task.file={tmp_path}", rc=2,
            named=["task.file", "name a file"])
    refused("eval", model, f"task.file={tmp_path}", rc=2, named=["task.file", "name the task jsonl"])
    refused("diff", weights, weights, rc=2, named=[weights, "no tensor of a dump"])
    refused("inspect", model, "--span", 0, rc=2, named=["--span", model])
    refused("sft", ROOT / "recipes/demo.toml", rc=2, named="run ./lockstep train")
    refused("sft", ROOT / "recipes/compare_tiny.toml", rc=2, named="run ./lockstep compare")
    for arms in ("bf16,,naive", "", "bf16,"):
        refused("compare", ROOT / "recipes/compare_tiny.toml", "--arms", arms, rc=2, named=f"'{arms}'")
    file = tmp_path / "file"
    file.write_text("")
    below = file / "x"
    refused("train", ROOT / "recipes/demo.toml", "--run", below, rc=2, named=[below, "another name"])
    refused("compare", ROOT / "recipes/compare_tiny.toml", "--run", below, rc=2, named=[below, "--run"])
    refused("rollout", model, "--n", 1, "--out", below / "o", rc=2, named=[below, "name another"])
    refused("rollout", model, "--n", 1, "--trace", below, rc=2, named=[below, "name another"])
    refused("sft", ROOT / "recipes/tiny_sft.toml", "steps=1", "--out", below, rc=2, named=[file, "name another"])


def test_a_model_that_a_recipe_teaches_is_named_with_it(tmp_path):
    if (ROOT / "runs/long_sft").exists():
        pytest.skip("runs/long_sft is there")
    done = run("doctor", ROOT / "recipes/studies/long_answers.toml", "--quick", rc=2)
    assert "./lockstep sft recipes/long_sft.toml teaches it" in done.stderr


# --- doctor ----------------------------------------------------------------------------------------


def test_doctor_says_what_is_there_and_what_is_missing(tmp_path):
    text = run("doctor", "--quick").stdout
    for word in ("cpu", "memory", "disk", "torch", "device", "contracts", "all that is needed"):
        assert word in text
    assert "torch      2." in text
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[rollout]\nmax_new_tokens = 16\n[schedule]\nsteps = 1\nprompts = 2\n'
                      'samples = 2\n')
    assert "a step of" in run("doctor", recipe).stdout
    for key in ("rollout.cache", "rollout.swap", "store.ram"):  # as a run is refused
        done = run("doctor", recipe, "device=cpu", f'{key}="100 TiB"', rc=1)
        assert f"{key} is 100 TiB, and this machine has" in done.stderr
        assert done.stderr.splitlines()[-1] == f"error: {recipe}: " + \
            run("train", recipe, "device=cpu", f'{key}="100 TiB"', "--run", tmp_path / "r",
                rc=1).stderr.splitlines()[-1].removeprefix("error: ")
    done = run("doctor", recipe, f"model={tmp_path}/none", rc=2)
    assert f"{tmp_path}/none" in done.stderr
    refused("doctor", tmp_path / "none.toml", rc=2, named="none.toml")
    refused("doctor", recipe, "schedule.step=1", rc=2, named="schedule.steps")


def test_doctor_looks_at_each_arm_of_a_comparison(tmp_path):
    # Every recipe of the checkout, but the one that goes on from what another leaves, and those
    # that name a GPU where there is none.
    unfit = [l for l in run("doctor", "--quick").stdout.splitlines() if "does not fit" in l]
    assert all("long_answers.toml does not fit: model is 'runs/long_sft'" in l or
               "long_sft.toml does not fit: device is cuda" in l for l in unfit), unfit
    text = run("doctor", ROOT / "recipes/studies/quads_k.toml").stdout
    assert "and 5 more" in text and "all that is needed" in text
    mine = tmp_path / "mine.toml"
    mine.write_text('[compare]\narms = ["bf16", "trace"]\n[variant.trace]\narm = "trace"\n'
                    'residual.permille = 2000\n')
    assert "residual.permille is 2000" in run("doctor", mine, rc=2).stderr


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    folder = tmp_path / "run"
    refused("train", ROOT / "recipes/demo.toml", "device=gpu", "--run", folder, rc=2,
            named="expected cpu, cuda")
    refused("train", ROOT / "recipes/demo.toml", "device=cuda:77", "--run", folder, rc=1,
            named="device is cuda:77")
    assert not folder.exists()
    refused("rollout", ROOT / "recipes/demo.toml", "device=cuda:77", rc=1,
            named="device is cuda:77")


@pytest.mark.parametrize("verb", ["train", "rollout", "verify"])
def test_a_device_is_refused_before_a_weight_is_read(tmp_path, verb):
    sick = tmp_path / "sick"
    shutil.copytree(MODEL, sick)
    path = sick / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    path.write_bytes(whole[:header] + b"\xff" * (len(whole) - header))  # NaN, every one
    recipe = [ROOT / "recipes/demo.toml", f"model={sick}"]
    more = ["--run", tmp_path / "run"] if verb == "train" else []
    refused(verb, *recipe, "device=cuda:77", *more, rc=1, named="device is cuda:77")
    assert "not finite" in run(verb, *recipe, "device=cpu", *more, rc=1).stderr  # so one would show
