"""Running a program as a user does, and reading what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORT = re.compile(r"prefix (\d+), reused (\d+), recomputed (\d+), new (\d+) \((\w+): (\w+)\)")


def run(*args: str) -> str:
    """What ``python ARGS`` prints; it must end well."""
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=500, cwd=ROOT
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def example(name: str, *args: str) -> list[dict]:
    """The reports that an example prints, in order."""
    out = run(str(ROOT / "examples" / name), *args)
    names = ("prefix", "reused", "recomputed", "new")
    reports = [
        dict(zip(names, map(int, found[:4]), strict=True)) | {"reason": found[5]}
        for found in REPORT.findall(out)
    ]
    assert reports, out
    return reports
