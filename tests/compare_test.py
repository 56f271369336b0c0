"""`lockstep compare`: what it refuses before anything starts, and that a killed one goes on."""

import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", ROOT / "build")).resolve() / "lockstep"
ENV = {**os.environ, "LOCKSTEP_HOME": str(ROOT), "LOCKSTEP_WAIT": "0"}
# On a GPU a run that is to be killed would have ended.
BASE = """defaults = "recipes/demo.toml"
device = "cpu"
[schedule]
steps = 3
prompts = 4
samples = 4
save_every = 1
[rollout]
max_new_tokens = 48
[eval]
prompts = 4
"""
STUDY = BASE + """[compare]
arms = ["naive", "scale"]
seeds = 2
[variant.scale]
arm = "trace"
guide.mode = "rollout_scale"
"""


def compare(tmp_path, *args, text=STUDY):
    recipe = tmp_path / "study.toml"
    recipe.write_text(text)
    return [PROGRAM, "compare", recipe, *args, "--run", tmp_path / "run"]


def run(command):
    return subprocess.run(list(map(str, command)), env=ENV, text=True, capture_output=True,
                          timeout=300)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a, b):
    """Metrics but for what a clock says."""
    def strip(line):
        return {k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))}
    return [strip(x) for x in a] == [strip(x) for x in b]


def test_R65_killed_comparison_goes_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = run(compare(tmp_path / "a"))
    assert whole.returncode == 0, whole.stderr

    assert "100.0 ±0 %" in whole.stdout  # what all seeds have alike

    # Killed once a run of the second seed has begun; by then two are complete.
    part = tmp_path / "b/run/naive/seed_2/metrics.jsonl"
    process = subprocess.Popen(list(map(str, compare(tmp_path / "b"))), env=ENV,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for _ in range(3000):
        if part.exists() and part.read_text().count("\n") >= 1:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "the same command goes on" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    first = tmp_path / "b/run/naive/seed_1/metrics.jsonl"
    stamp = first.stat().st_mtime_ns

    # Two at once give what one behind the other gives.
    again = run([*compare(tmp_path / "b"), "--jobs", "2"])
    assert again.returncode == 0, again.stderr
    assert "have ended before and are not repeated" in again.stderr
    assert "runs side by side: 2" in again.stderr
    assert "scale, seed 2  step 3/3" in again.stderr
    assert first.stat().st_mtime_ns == stamp
    for arm in ["naive", "scale"]:
        for seed in ["seed_1", "seed_2"]:
            assert same(lines(tmp_path / "a/run" / arm / seed), lines(tmp_path / "b/run" / arm / seed))

    # The same prompts and draws for every arm of a seed; others under another seed.
    naive = [lines(tmp_path / "a/run/naive" / s)[0] for s in ["seed_1", "seed_2"]]
    scale = lines(tmp_path / "a/run/scale/seed_1")[0]
    assert naive[0]["critic/rewards/mean"] == scale["critic/rewards/mean"]
    assert not same(naive[:1], naive[1:])

    for where in ["a", "b"]:
        summary = json.loads((tmp_path / where / "run/summary.json").read_text())
        assert list(summary["arms"]) == ["naive", "scale"]
        for arm in summary["arms"].values():
            assert arm["seeds"] == [1, 2] and arm["verdict"].split(":")[0] in ["ok", "watch", "bad"]
            for field in ["reward_first", "reward_last", "gap_mean_first", "gap_mean_last",
                          "gap_p99_last", "eval", "gap_median", "gap_max",
                          "bytes_per_token", "tokens_per_s"]:
                assert arm[field] >= 0 and arm["spread"][field] is not None, field
            assert arm["gap_growth"] is None  # first and last five of three steps are the same
            assert arm["bytes_per_token_full"] > arm["bytes_per_token"]
        assert summary["arms"]["naive"]["covered_frac"] is None
        assert summary["arms"]["scale"]["covered_frac"] == 1
        assert (tmp_path / where / "run/report.html").stat().st_size > 10000
    both = [json.loads((tmp_path / w / "run/summary.json").read_text())["arms"] for w in "ab"]
    for arm in ["naive", "scale"]:
        assert both[0][arm]["gap_mean_last"] == both[1][arm]["gap_mean_last"]
    # The mean over seeds of what the runs' own lines say.
    gap = "train/train_rollout_logprob_abs_diff"
    means = [sum(x[gap] for x in lines(tmp_path / "a/run/naive" / s)) / 3
             for s in ["seed_1", "seed_2"]]
    assert both[0]["naive"]["gap_mean_last"] == pytest.approx(sum(means) / 2)
    assert both[0]["naive"]["spread"]["gap_mean_last"] == pytest.approx(
        abs(means[0] - means[1]) / 2 ** 0.5)

    # The same folder under another recipe is refused before anything runs.
    other = run([*compare(tmp_path / "a"), "trainer.lr=0.5"])
    assert other.returncode == 2 and "trainer.lr" in other.stderr
    assert "naive/seed_1" in other.stderr and len(other.stderr.splitlines()) == 1
    # R63: another set of quantized layers is refused, whichever verb goes on with a run.
    other = run([*compare(tmp_path / "a"), "contract.layers=1-5"])
    assert other.returncode == 2 and "contract.layers" in other.stderr


def test_room_for_the_checkpoints_of_all_runs_is_asked_for_first(tmp_path):
    # Each run alone would find it: about a tenth of what is free.
    free = shutil.disk_usage(tmp_path).free
    steps = int(0.1 * free / (14 * 390_000))
    done = run([*compare(tmp_path), "--seeds", "40", f"schedule.steps={steps}",
                "schedule.save_every=1", "schedule.keep=0", "task.repeat=true"])
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "the checkpoints of 80 runs take" in done.stderr and "--run" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text, args, words", [
    (BASE, [], ["names no arms", "--arms"]),
    (STUDY, ["--arms", "naive,trase"], ["trase", "trace"]),
    (STUDY, ["--arms", "naive,naive"], ["naive", "twice"]),
    (STUDY, ["--seeds", "0"], ["--seeds", "0"]),
    (STUDY, ["--jobs", "0"], ["--jobs", "0"]),
    (STUDY, ["arm=naive"], ["--arms"]),
    (STUDY, ["trainer.lrr=1"], ["trainer.lrr", "trainer.lr"]),
    (STUDY, ["guide.layers=0,9"], ["layer 9"]),
    # The last arm of the list is at fault: nothing of the first has run.
    (STUDY.replace("rollout_scale", "lbs"), [], ["guide.mode", "lbs", "did you mean lsb?"]),
    (STUDY.replace('guide.mode = "rollout_scale"', "qat.k = false"), [], ["qat.k", "scale"]),
    (STUDY.replace("seeds = 2", "seeds = 0"), [], ["compare.seeds", "study.toml:14"]),
    (STUDY.replace("seeds = 2", "seds = 2"), [], ["compare.seds"]),
    (STUDY.replace("variant.scale", 'variant."../x"'), [], ["cannot name an arm"]),
    (STUDY.replace("recipes/demo.toml", "no/such.toml"), [], ["defaults", "no/such.toml"]),
])
def test_bad_comparison_is_refused_in_one_line(tmp_path, text, args, words):
    done = run([*compare(tmp_path, text=text), *args])
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_arm_that_stops_does_not_end_the_comparison(tmp_path, jobs):
    # Somebody else holds the first run's folder.
    folder = tmp_path / "run/naive/seed_1"
    folder.mkdir(parents=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run([*compare(tmp_path), "--seeds", "1", "--jobs", jobs, "schedule.steps=1"])
    assert done.returncode == 1
    assert "naive, seed 1 stopped at step 1: another process" in done.stderr.splitlines()[-1]
    assert "naive: seed 1 stopped at step 1: another process" in done.stdout
    row = [line for line in done.stdout.splitlines() if line.startswith("naive ")][0].split()
    assert row[1] == "-" and row[-1] == "stopped", row
    arms = json.loads((tmp_path / "run/summary.json").read_text())["arms"]
    assert list(arms) == ["naive", "scale"] and "stopped" not in arms["scale"]
    assert arms["naive"]["reward_last"] is None and len(arms["naive"]["stopped"]) == 1
    assert not (folder / "stopped.json").exists()  # it is somebody else's
    again = [*compare(tmp_path), "--seeds", "1", "--arms", "scale", "schedule.steps=1"]
    with open(tmp_path / "run/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(again)
    assert done.returncode == 1 and "another process is at work in" in done.stderr.splitlines()[-1]
    # A run that has ended and cannot be read is not passed over in silence.
    (tmp_path / "run/scale/seed_1/metrics.jsonl").write_text("junk")
    done = run(again)
    assert done.returncode == 1 and "scale is left out" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_where_an_arm_stopped_stands_everywhere(tmp_path, jobs):
    """One whose third step finds no numbers; going on, it stops there again, or ends."""
    assert run([*compare(tmp_path), "--seeds", "1", "schedule.steps=2"]).returncode == 0
    folder = tmp_path / "run/naive/seed_1"
    state = next((folder / "checkpoints/step_2/training_state").iterdir())
    whole = state.read_bytes()
    state.write_bytes(whole[:100])
    command = [*compare(tmp_path), "--seeds", "1", "--jobs", jobs, "schedule.steps=3"]
    done = run(command)
    assert done.returncode == 1
    why = "naive, seed 1 stopped at step 3: "
    assert why in done.stderr.splitlines()[-1] and state.name in done.stderr.splitlines()[-1]
    assert "naive: seed 1 stopped at step 3: " in done.stdout
    arms = json.loads((tmp_path / "run/summary.json").read_text())["arms"]
    assert arms["naive"]["verdict"].startswith("bad: seed 1 stopped at step 3: ")
    stop = json.loads((folder / "stopped.json").read_text())
    assert stop["step"] == 3 and state.name in stop["why"]
    page = (tmp_path / "run/report.html").read_text()
    assert "stopped at step 3: " in page and "(naive/seed_1 stopped at step 3)" in page
    # Mended, it goes on, and nothing of it is left.
    state.write_bytes(whole)
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert not (folder / "stopped.json").exists() and "stopped at" not in done.stdout
    assert "stopped at step" not in (tmp_path / "run/report.html").read_text()


def test_runs_side_by_side_end_with_the_process_that_started_them(tmp_path):
    process = subprocess.Popen(
        list(map(str, [*compare(tmp_path), "--jobs", "2", "schedule.steps=200"])), env=ENV,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runs = [tmp_path / "run" / arm / "seed_1" for arm in ["naive", "scale"]]
    for _ in range(3000):
        if all((run / "metrics.jsonl").exists() for run in runs):
            break
        time.sleep(0.02)
    assert process.poll() is None
    process.kill()
    process.wait()
    for run in runs:  # what a run holds as long as it lives
        with open(run / "lock", "w") as lock:
            for _ in range(500):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
            else:
                pytest.fail(f"{run} is still at work")


def test_train_takes_a_variant(tmp_path):
    recipe = tmp_path / "study.toml"
    recipe.write_text(STUDY)
    done = run([PROGRAM, "train", recipe, "arm=scale", "schedule.steps=1", "--run", tmp_path / "run"])
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run/recipe.toml").read_text()
    assert 'arm = "trace"' in text and 'mode = "rollout_scale"' in text


def test_arms_without_a_gap_are_not_sorted_by_it(tmp_path):
    # Answers cut so short are all wrong alike, and nothing is trained on.
    done = run([*compare(tmp_path), "--seeds", "1", "schedule.steps=1", "rollout.max_new_tokens=4"])
    assert done.returncode == 0, done.stderr
    assert "By gap" not in done.stdout and "No gap was measured" in done.stdout


def test_a_finished_comparison_stays_what_it_was(tmp_path):
    """Calibrated keys and the time that its runs took, too."""
    text = BASE.replace("steps = 3", "steps = 2") + """[compare]
arms = ["static"]
[variant.static]
arm = "quads"
residual.scope = "static"
"""
    command = compare(tmp_path, text=text)
    assert run(command).returncode == 0
    file = tmp_path / "run/static/seed_1/metrics.jsonl"
    slow = [{**line, "timing_s/step": 1000.0} for line in lines(file.parent)]
    file.write_text("".join(json.dumps(line) + "\n" for line in slow))
    for steps, more in [(2, 0), (3, 1)]:  # as it stands, then extended
        again = run([*command, f"schedule.steps={steps}"])
        assert again.returncode == 0, again.stderr
        assert len(lines(file.parent)) == steps
        took = json.loads((tmp_path / "run/summary.json").read_text())["wall_s"]["run"]
        assert took == pytest.approx(sum(
            line["timing_s/step"] + line.get("timing_s/testing", 0) for line in lines(file.parent)))
        assert took > 2000 - more


def test_runs_that_began_on_different_devices_are_refused_together(tmp_path):
    """Before one of them goes on, and with all of their names."""
    command = [*compare(tmp_path), "--arms", "naive,scale", "schedule.steps=1", "device=cpu"]
    assert run(command).returncode == 0
    other = run([*command[:-1], "device=cuda:7"])
    assert other.returncode == 2 and len(other.stderr.splitlines()) == 1, other.stderr
    for name in ["naive/seed_1", "scale/seed_1", "naive/seed_2", "scale/seed_2"]:
        assert name in other.stderr
    assert "began on cpu" in other.stderr and "device=cpu" in other.stderr
    for arm in ["naive", "scale"]:
        file = tmp_path / "run" / arm / "seed_2/recipe.toml"
        file.write_text(file.read_text().replace('device = "cpu"', 'device = "cuda"'))
    mixed = run(command[:-1])
    assert mixed.returncode == 2 and len(mixed.stderr.splitlines()) == 1, mixed.stderr
    for seed, device in [(1, "cpu"), (2, "cuda")]:
        files = ", ".join(f"{arm}/seed_{seed}/recipe.toml" for arm in ["naive", "scale"])
        assert f"{files} began on {device}" in mixed.stderr
    assert str(tmp_path / "run") in mixed.stderr
