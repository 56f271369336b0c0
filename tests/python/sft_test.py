"""The first steps of the tiny model's training, against the curve that stands beside its weights."""
import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build")).absolute() / "lockstep"
if not PROGRAM.exists():
    pytest.skip(f"{PROGRAM} is not built", allow_module_level=True)


def curve(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


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
