"""The first steps of the tiny model's training, against the curve that stands beside its weights."""
import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build")).absolute() / "lockstep"
if not PROGRAM.exists():
    pytest.skip(f"{PROGRAM} is not built", allow_module_level=True)


def curve(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def teach(out, *keys):
    command = [PROGRAM, "sft", "recipes/tiny_sft.toml", "batch=16", "eval_prompts=0", *keys, "--out", out]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "LOCKSTEP_HOME": str(ROOT)})


def finished(process, status=0):
    said = process.communicate(timeout=300)[1]
    assert process.returncode == status, said
    return said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_R26_an_interrupted_run_goes_on_to_the_same_weights(tmp_path, how):
    keys = ["steps=40", "save_every=2"]
    finished(teach(tmp_path / "whole", *keys))
    out, unfinished = tmp_path / "part", tmp_path / "part.unfinished"
    cut = teach(out, *keys)
    while not unfinished.exists():
        assert cut.poll() is None, cut.communicate()
        time.sleep(0.01)
    cut.send_signal(how)
    said = finished(cut, -how if how == signal.SIGKILL else 130)
    assert how == signal.SIGKILL or "the same command goes on from step" in said
    assert not out.exists() and sorted(os.listdir(unfinished)) == ["loss.jsonl", "sft.toml", "training_state"]
    done = len(curve(unfinished / "loss.jsonl"))
    assert 2 <= done < 40 and done % 2 == 0
    refused = finished(teach(out, *keys, "trainer.lr=1e-4"), 2)  # another recipe's
    assert "trainer.lr" in refused and str(unfinished) in refused and len(refused.splitlines()) == 1
    said = finished(teach(out, "steps=40", "save_every=7"))
    assert f"going on from step {done + 1} of" in said
    assert not unfinished.exists() and not (tmp_path / "part.loss.jsonl").exists()
    one, other = (tmp_path / "whole/model.safetensors").read_bytes(), (out / "model.safetensors").read_bytes()
    assert one == other
    assert ([{k: v for k, v in line.items() if k != "timing_s/step"} for line in curve(out / "loss.jsonl")] ==
            [{k: v for k, v in line.items() if k != "timing_s/step"} for line in curve(tmp_path / "whole/loss.jsonl")])


def test_a_damaged_unfinished_run_is_named(tmp_path):
    out, unfinished = tmp_path / "it", tmp_path / "it.unfinished"
    cut = teach(out, "steps=40", "save_every=2")
    while not unfinished.exists():
        time.sleep(0.01)
    cut.kill()
    cut.communicate()
    state = next((unfinished / "training_state").iterdir())
    whole, losses = state.read_bytes(), (unfinished / "loss.jsonl").read_text()
    for file, damaged in [(state, whole[:-5]), (unfinished / "loss.jsonl", losses[:-20].encode())]:
        kept = file.read_bytes()
        file.write_bytes(damaged)
        said = finished(teach(out, "steps=40", "save_every=2"), 1)
        assert f"delete {unfinished} to begin at step 1" in said.splitlines()[-1]
        file.write_bytes(kept)
    assert not out.exists()
    (unfinished / "sft.toml").unlink()
    assert f"{unfinished} is nothing that" in finished(teach(out, "steps=40"), 2)


def test_first_steps_are_those_of_the_curve(tmp_path):
    out = tmp_path / "tiny"
    command = [PROGRAM, "sft", "recipes/tiny_sft.toml", "--out", out, "steps=4", "eval_prompts=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "LOCKSTEP_HOME": str(ROOT)})
    assert done.returncode == 0, done.stderr
    ours, theirs = curve(out / "loss.jsonl"), curve(ROOT / "models/tiny-moe/loss.jsonl")
    assert len(ours) == 4
    for a, b in zip(ours, theirs):
        # Another machine's products add in another order; the same machine gives the same bits.
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-3)
        assert a["train/tokens"] == b["train/tokens"]
    assert ours[3]["train/loss"] < ours[0]["train/loss"]


def test_the_curve_ends_where_the_weights_are(tmp_path):
    theirs = curve(ROOT / "models/tiny-moe/loss.jsonl")
    assert theirs[-1]["step"] == 650
    assert sum(line["train/loss"] for line in theirs[-20:]) / 20 < 0.03
    size = (ROOT / "models/tiny-moe/model.safetensors").stat().st_size
    assert size < 9_000_000
