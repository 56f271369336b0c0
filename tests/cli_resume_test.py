"""A run that was interrupted, or whose folder was damaged: it goes on, or says in one line why not."""

import fcntl
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", ROOT / "build")).resolve() / "lockstep"
MODEL = ROOT / "models/tiny-moe"
SMALL = ["schedule.prompts=2", "schedule.samples=2", "rollout.max_new_tokens=16", "eval.prompts=0",
         "rl.kl_weight=0.001", "store.on_disk=true",  # with a KL term every group trains
         "device=cpu"]  # on a GPU a run that is to be killed would have ended
ENV = {**os.environ, "LOCKSTEP_HOME": str(ROOT), "LOCKSTEP_WAIT": "0"}

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built")


def command(run, steps=2, *more):
    return [PROGRAM, "train", ROOT / "recipes/demo.toml", *SMALL, f"schedule.steps={steps}",
            "schedule.save_every=1", "schedule.keep=2", *more, "--run", run]


def call(args, **kwargs):
    return subprocess.run(list(map(str, args)), env=kwargs.pop("env", ENV), text=True,
                          capture_output=True, timeout=300, **kwargs)


def start(args):
    return subprocess.Popen(list(map(str, args)), env=ENV, text=True, stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE)


def refused(done, status, *words):
    assert done.returncode == status, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and done.stderr.splitlines()[-1] == errors[0], done.stderr
    for word in words:
        assert str(word) in errors[0], errors[0]


def wait_for(there, process):
    for _ in range(3000):
        if there():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("it never came to that")


def lines(run):
    return (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    done = call(command(run))
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run that a test may damage."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


# --- signals --------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, status", [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupted_run_says_so_and_goes_on(tmp_path, name, status):
    run = tmp_path / "run"
    process = start(command(run, 500))
    wait_for(lambda: len(lines(run)) >= 2, process)
    other = call(command(run, 500))  # meanwhile
    refused(other, 1, "another process", run)
    process.send_signal(getattr(signal, name))
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert said.splitlines()[-1].startswith(f"error: interrupted by {name}; the same command"), said
    assert said.count("error:") == 1
    process = start(command(run, 500))
    wait_for(lambda: len(lines(run)) >= 4, process)
    process.kill()
    process.communicate()
    assert [json.loads(line)["step"] for line in lines(run)[:4]] == [1, 2, 3, 4]


def test_a_lock_that_is_given_up_meanwhile_is_waited_for(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(list(map(str, command(run))), text=True, stderr=subprocess.PIPE,
                                   stdout=subprocess.DEVNULL, env={**ENV, "LOCKSTEP_WAIT": "600"})
        assert process.stderr.readline() == \
            f"waiting up to 600 s for {run}/lock, which another process has locked\n"
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    refused(call(command(run), env={**ENV, "LOCKSTEP_WAIT": "soon"}), 2, "LOCKSTEP_WAIT")


def test_an_interrupt_says_where_the_run_begins_again(tmp_path):
    process = start([*command(tmp_path / "run", 500), "schedule.save_every=400"])
    wait_for(lambda: len(lines(tmp_path / "run")) >= 1, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert "from step 1" in said.splitlines()[-1] and "step 400 (" in said, said


def test_an_interrupted_sft_says_that_it_keeps_nothing(tmp_path):
    process = start([PROGRAM, "sft", ROOT / "recipes/tiny_sft.toml", "--out", tmp_path / "out"])
    wait_for(lambda: any(tmp_path.iterdir()), process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "begins at step 1" in said.splitlines()[-1], said
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_rollout_leaves_nothing(tmp_path):
    process = start([PROGRAM, "rollout", "--n", 1000, "--samples", 64, "--out", tmp_path / "a.jsonl"])
    wait_for(lambda: any(tmp_path.iterdir()), process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143 and said.splitlines()[-1] == "error: interrupted by SIGTERM"
    assert list(tmp_path.iterdir()) == []


# --- a damaged folder -----------------------------------------------------------------------------

def test_damaged_metrics(run):
    path = run / "metrics.jsonl"
    whole = path.read_text()
    first, second = whole.splitlines(keepends=True)
    for short, steps in [("", 0), (first, 1)]:
        path.write_text(short)
        refused(call(command(run)), 1, f"metrics.jsonl has the metrics of {steps} steps", "another name")
        assert path.read_text() == short
    path.unlink()
    path.mkdir()
    refused(call(command(run)), 1, "metrics.jsonl is a folder")
    path.rmdir()
    for damaged, line in [(first + second[:40], 2), (first + second[:-1], 2),
                          ("{" + first + second, 1), (second + first, 1), (first[:20] + "\n", 1)]:
        path.write_text(damaged)
        refused(call(command(run)), 1, f"metrics.jsonl:{line} ", "another name")
        assert path.read_text() == damaged
    path.write_bytes(first.encode() + b"\xff\x00" + second.encode())
    refused(call(command(run)), 1, "metrics.jsonl:2 ")
    path.write_text(whole + '{"step": 3, "cut')  # past the checkpoint: written again
    assert call(command(run)).returncode == 0
    assert path.read_text() == whole


def test_damaged_checkpoint(run):
    newest = run / "checkpoints/step_2"
    state = newest / "training_state/trainer_state.bin"
    whole = state.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for damaged in [whole[:-100], whole[:20], b"", bytes(flipped), b"\0" * 64]:
        state.write_bytes(damaged)
        refused(call(command(run)), 1, state, f"delete {newest} to go on from the one before it, of step 1")
    state.unlink()
    refused(call(command(run)), 1, state, f"delete {newest} to go on from the one before it, of step 1")
    older = run / "checkpoints/step_1"
    older.rename(run / "checkpoints/away")
    refused(call(command(run)), 1, state, f"delete {newest} to begin anew at step 1")
    (run / "checkpoints/away").rename(older)
    before = lines(run)
    shutil.rmtree(newest)  # as the message says
    assert call(command(run)).returncode == 0
    assert state.read_bytes() == whole
    assert [json.loads(a)["critic/rewards/mean"] for a in lines(run)] == [
        json.loads(b)["critic/rewards/mean"] for b in before]


def test_stray_checkpoints(run):
    for name in ("step_0", "step_007", "step_x", "step_3.part", "notes"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints/step_5").write_text("a file")
    assert call(command(run)).returncode == 0
    (run / "checkpoints/step_9").mkdir()
    refused(call(command(run)), 1, "step 9", "checkpoints/step_9")


def test_damaged_segments_are_passed_over(run):
    (run / "trace").mkdir(exist_ok=True)
    (run / "trace/000007.segment").write_bytes(random.Random(1).randbytes(5000))
    shutil.rmtree(run / "checkpoints/step_2")
    assert call(command(run)).returncode == 0


# --- what calibration found -----------------------------------------------------------------------

def calibrated(run, key):
    """The key's value in a run's recipe, and the contract's id."""
    section, name = key.split(".")
    text = (run / "recipe.toml").read_text()
    at = text.index(f"\n[{section}]\n")
    line = next(x for x in text[at + 1:].splitlines() if x.startswith(f"{name} = "))
    return line.removeprefix(f"{name} = "), text.splitlines()[0]


@pytest.mark.parametrize("key, arm", [
    ("contract.kv_exponents", ["arm=trace"]),
    ("residual.groups", ["arm=quads", "residual.scope=static"]),
])
def test_R26_a_resumed_run_keeps_what_calibration_found(tmp_path, key, arm):
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert call(command(whole, 2, *arm)).returncode == 0
    assert call(command(part, 1, *arm)).returncode == 0
    found, contract = calibrated(part, key)
    assert len(found) > 4
    done = call(command(part, 2, *arm))
    assert done.returncode == 0, done.stderr
    assert calibrated(part, key) == (found, contract) == calibrated(whole, key)
    sameness = [[{k: v for k, v in json.loads(line).items()
                  if not k.startswith(("timing_s/", "perf/"))} for line in lines(run)]
                for run in (part, whole)]
    assert sameness[0] == sameness[1]
    # Another value is another contract, whoever gives it.
    value = json.loads(found)
    flipped = value.translate(str.maketrans("01", "10")) if isinstance(value, str) else [
        n + 1 for n in value]
    other = json.dumps(flipped)
    refused(call(command(part, 2, *arm, f"{key}={other}")), 2, key)


# --- the disk -------------------------------------------------------------------------------------

@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", folder],
                             capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("may not mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_fills_up(disk):
    run = disk / "run"
    process = start(command(run, 500))
    wait_for(lambda: (run / "checkpoints/step_1").exists(), process)
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * (1 << 16)):
                pass
        except OSError:
            pass
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.count("error:") == 1 and str(run) in said.splitlines()[-1], said
    assert not list((run / "checkpoints").glob("*.part"))
    ballast.unlink()
    steps = max(int(p.name[5:]) for p in (run / "checkpoints").iterdir())
    process = start(command(run, 500))
    wait_for(lambda: (run / f"checkpoints/step_{steps + 1}").exists(), process)
    process.kill()
    process.communicate()


def test_a_disk_that_is_read_only(disk, finished):
    run = disk / "run"
    shutil.copytree(finished, run)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    refused(call(command(run)), 1, run, "Read-only")
    refused(call(command(disk / "new")), 1, disk / "new", "Read-only")
    refused(call([PROGRAM, "rollout", "--n", 1, "--out", disk / "a.jsonl"]), 1, "a.jsonl")
    assert call([PROGRAM, "inspect", run]).returncode == 0
    built = call(["bash", ROOT / "lockstep", "doctor"], env={**ENV, "LOCKSTEP_BUILD": str(disk / "b")})
    assert built.returncode == 1 and built.stderr.count("\n") == 1, built.stderr
    assert str(disk / "b") in built.stderr and "LOCKSTEP_BUILD" in built.stderr


def test_paths_with_spaces_and_letters(tmp_path):
    home = tmp_path / "Über uns, 日本"
    home.mkdir()
    for name in ("recipes", "models"):
        (home / name).symlink_to(ROOT / name)
    run = home / "mein Lauf"
    done = call([PROGRAM, "train", "recipes/demo.toml", *SMALL, "schedule.steps=1", "--run", run],
                env={**ENV, "LOCKSTEP_HOME": str(home)}, cwd=tmp_path)
    assert done.returncode == 0 and str(run) in done.stderr, done.stderr
    assert call([PROGRAM, "eval", run, "--n", 1, "rollout.max_new_tokens=4"]).returncode == 0
    page = home / "Seite 1.html"
    assert call([PROGRAM, "report", run, "--out", page]).returncode == 0 and page.exists()


# --- files from anybody ---------------------------------------------------------------------------

@pytest.mark.parametrize("row, word", [
    (b'{"text": "1+1\0=2"}', "row"),
    (b'{"text": "1+1=\xff"}', "row"),
    (b'\xef\xbb\xbf{"text": 5}', ""),
    (b'{"text": "' + b"1" * (65 << 20) + b'"}', "bytes"),
    (b"[" * 100000, ""),
    (b'{"token_ids": ["' + b"x" * 5000 + b'"]}', "no id"),
])
def test_lines_that_are_no_rows(tmp_path, row, word):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "1+1=2"}\n' + row + b"\n")
    done = call([PROGRAM, "rollout", "--score", path, "--out", tmp_path / "out"], preexec_fn=lambda:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    refused(done, 1, f"{path}:2: ", word)
    assert len(done.stderr) < 3000
    assert list(tmp_path.iterdir()) == [path]


def test_lines_of_other_systems(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "1+1=2"}\r\n\r\n{"text": "2*3=6"}')  # CRLF, and no newline at last
    done = call([PROGRAM, "rollout", "arm=bf16", "--score", path])
    assert [json.loads(row)["line"] for row in done.stdout.splitlines()] == [1, 3], done.stderr


def test_inspect_of_what_is_damaged(run, tmp_path):
    noise = random.Random(7)
    for name in ("x.segment", "x.safetensors", "x.bin"):
        (tmp_path / name).write_bytes(noise.randbytes(4096))
        done = call([PROGRAM, "inspect", tmp_path / name])
        refused(done, done.returncode, name)
        assert done.returncode in (1, 2)
    weights = (MODEL / "model.safetensors").read_bytes()
    for seed in range(12):
        noise = random.Random(seed)
        damaged = bytearray(weights[:noise.randrange(8, 40000)])
        for _ in range(8):
            damaged[noise.randrange(len(damaged))] = noise.randrange(256)
        (tmp_path / "y.safetensors").write_bytes(damaged)
        refused(call([PROGRAM, "inspect", tmp_path / "y.safetensors"]), 1, "y.safetensors")
    (run / "metrics.jsonl").write_bytes(b"\xff\n{")
    for damaged in (b"", b"[", b"\0\xff" * 9):
        (run / "recipe.toml").write_bytes(damaged)
        done = call([PROGRAM, "inspect", run])
        assert done.returncode in (0, 1, 2) and done.stderr.count("\n") <= 1, done.stderr
