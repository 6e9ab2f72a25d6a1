"""What a reader needs to place a figure: where it was measured, with what, at which commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine_facts() -> dict[str, str]:
    """Plain facts, none of them a path or a host name."""
    return {
        "commit": git_commit(),
        "cores": str(os.cpu_count()),
        "machine": f"{platform.machine()}, {cpu_name()}",
        "python": platform.python_version(),
        "sglang": installed("sglang"),
        "torch": installed("torch"),
    }


def git_commit() -> str:
    """Short commit of the checkout that holds this file, ``+`` when it has changes."""
    folder = str(Path(__file__).parent)
    try:
        done = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown CPU"
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown CPU")


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
