"""Every arm trains the tiny model for ten steps: rewards and gaps are numbers, and no step is missing."""
import json
import math
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", ROOT / "build")).resolve() / "lockstep"
STEPS = 10


def lockstep(*args):
    env = {**os.environ, "LOCKSTEP_HOME": str(ROOT)}
    return subprocess.run([PROGRAM, *map(str, args)], env=env, text=True, capture_output=True,
                          timeout=900)


def arms():
    """As the program names them where one is not known."""
    said = lockstep("train", ROOT / "recipes/demo.toml", "arm=none-of-them").stderr
    return said[said.rindex("the arms are ") + len("the arms are "):].strip().split(", ")


@pytest.mark.parametrize("arm", arms())
def test_an_arm_trains(tmp_path, arm):
    done = lockstep("train", ROOT / "recipes/demo.toml", f"arm={arm}", f"schedule.steps={STEPS}",
                    "schedule.prompts=4", "schedule.samples=4", "eval.prompts=0",
                    "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    for step in steps:
        assert math.isfinite(step["critic/rewards/mean"])
        assert math.isfinite(step["train/train_rollout_logprob_abs_diff"])
        assert step.get("fp4/guide/covered_frac", 1) == 1
