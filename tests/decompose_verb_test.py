"""`lockstep decompose`: on a run it leaves what the report shows; what it refuses."""

import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", ROOT / "build")).resolve() / "lockstep"


def lockstep(*args):
    return subprocess.run([PROGRAM, *map(str, args)], text=True, capture_output=True, timeout=300,
                          env={**os.environ, "LOCKSTEP_HOME": str(ROOT)})


def test_R92_R93_a_runs_gap_is_split_by_replaying_a_batch_on_both_sides(tmp_path):
    run = tmp_path / "run"
    done = lockstep("train", "recipes/demo.toml", "arm=trace", "drift.noise=0", "schedule.steps=1",
                    "schedule.prompts=2", "schedule.samples=2", "eval.prompts=0", "--run", run)
    assert done.returncode == 0, done.stderr
    lines = (run / "metrics.jsonl").read_text()
    done = lockstep("decompose", run, "--n", 2, "--samples", 1)
    assert done.returncode == 0, done.stderr
    for word in ["engine", "activations", "Routes with replay off", "3.w13_in", "boundary", "dead"]:
        assert word in done.stdout, done.stdout
    out = json.loads((run / "decomposition.json").read_text())
    parts = {k.split("/")[-1]: v for k, v in out["metrics"].items() if "/decomposition/" in k}
    assert set(parts) == {"engine", "routing", "weights", "activations", "experts", "k", "v", "kv", "all"}
    assert all(0 < value < 0.1 for value in parts.values())  # which is larger, a few tokens decide
    assert any(k.startswith("fp4/decomposition_routes/") for k in out["metrics"])
    assert len(out["places"]["places"]) == 18
    assert (run / "metrics.jsonl").read_text() == lines

    assert lockstep("report", run, "--figures", tmp_path / "figures").returncode == 0
    page = (run / "report.html").read_text()
    assert 'id="decomposition"' in page and "activations" in page
    assert (tmp_path / "figures/decomposition_trace.svg").exists()


def test_of_a_recipe_nothing_is_written_unasked(tmp_path):
    out = tmp_path / "parts.json"
    done = lockstep("decompose", "recipes/demo.toml", "arm=bf16", "--n", 1, "--samples", 1,
                    "--no-places", "--json", out)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(out.read_text())["metrics"]) == {"fp4/decomposition/engine",
                                                           "fp4/decomposition/routing"}
    assert lockstep("decompose", "recipes/demo.toml", "--n", 0).returncode == 2
    assert lockstep("decompose", tmp_path / "none").returncode == 2
