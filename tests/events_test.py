"""TensorBoard's own reader finds in our event files what was written, resumed runs included."""

import os
import pathlib
import subprocess

import pytest

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
BUILD = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build"))


def test_tensorboard_reads_our_events(tmp_path):
    subprocess.run([BUILD / "step_test", "--gtest_filter=Events.*"], check=True,
                   env={**os.environ, "LOCKSTEP_EVENTS": str(tmp_path)})
    reader = event_accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    assert sorted(reader.Tags()["scalars"]) == ["a/b", "c"]
    values = [(e.step, e.value) for e in reader.Scalars("a/b")]
    # Steps 4 and 5 of the first file are orphans of the resumed run.
    assert values == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 40.0), (5, 50.0), (6, 60.0)]
    assert [e.step for e in reader.Scalars("c")] == [1, 2, 3]
