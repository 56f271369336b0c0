"""`lockstep inspect --why`: whether a token is guided at a place, why not, and what its codes are."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", ROOT / "build")).resolve() / "lockstep"


def lockstep(*args):
    return subprocess.run([PROGRAM, *map(str, args)], text=True, capture_output=True, timeout=300,
                          env={**os.environ, "LOCKSTEP_HOME": str(ROOT)})


@pytest.fixture
def sequence(tmp_path):
    file = tmp_path / "s.jsonl"
    file.write_text('{"text": "37*46=37*40=1480;37*6=222;1480+222=1702"}\n')
    return file


def why(sequence, place, position, subject="recipes/demo.toml"):
    done = lockstep("inspect", subject, "--why", sequence, "--place", place, "--position", position)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_guided_and_unguided_rows(sequence):
    guided = why(sequence, "4.w13_in", 20)  # the demo's drift: codes do flip
    assert "4.w13_in: guided, by lsb" in guided
    alone, left = map(int, re.search(r"alone rounds (\d+) .* leaves (\d+)", guided).groups())
    assert 0 <= left < alone <= 128
    # Each element that is shown differs from the rollout's before or after.
    for line in guided.splitlines()[4:]:
        if line.startswith("..."):
            continue
        _, _, before, used, after = map(float, line.split())
        assert before != used or after != used

    assert 'guide.layers is "latter_half", without layer 2' in why(sequence, "2.v", 20)
    assert "would leave" in why(sequence, "2.v", 20)
    assert "guide.sites has no w2_in" in why(sequence, "4.w2_in", 20)
    last = len("37*46=37*40=1480;37*6=222;1480+222=1702") - 1
    assert "last token" in why(sequence, "4.k", last)


def test_what_it_refuses(sequence):
    for args, word in [(["--place", "4.k"], "--position"), (["--place", "9.k", "--position", 1], "layers"),
                       (["--place", "4.k", "--position", 400], "tokens"),
                       (["--place", "4.x", "--position", 1], "4.x")]:
        done = lockstep("inspect", "recipes/demo.toml", "--why", sequence, *args)
        assert done.returncode == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1
