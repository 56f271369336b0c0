"""Exits 0 when this Python has every package of requirements-test.txt, at any version; torch at its own."""

import importlib.metadata
import pathlib
import sys

for line in (pathlib.Path(__file__).parent / "requirements-test.txt").read_text().splitlines():
    name, _, version = line.partition("==")
    if name.startswith("#") or not name:
        continue
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{name} is not installed")
    if name == "torch" and found.split("+")[0] != version:
        sys.exit(f"torch is {found}, not {version}")
