"""Drives data_tool, the program beside this file."""
import json
import os
import pathlib
import subprocess

import pytest

TOOL = pathlib.Path(os.environ.get("LOCKSTEP_BUILD", "build")) / "data_tool"
if not TOOL.exists():
    pytest.skip(f"{TOOL} is not built", allow_module_level=True)


def ask(requests):
    """The answers to a list of requests; a refusal is an Exception among them."""
    lines = "\n".join(json.dumps(request) for request in requests)
    done = subprocess.run([TOOL], input=lines.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    answers = [json.loads(line) for line in done.stdout.decode().split("\n")[:-1]]
    assert len(answers) == len(requests)
    return [a["ok"] if "ok" in a else RuntimeError(a["error"]) for a in answers]


def ask_one(request):
    (answer,) = ask([request])
    if isinstance(answer, Exception):
        raise answer
    return answer
