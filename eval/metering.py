"""CPU time of a server's scheduler processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import psutil

#: What SGLang calls its scheduler processes; ranks of tensor parallelism follow as a suffix.
SCHEDULER_TITLE = "sglang::scheduler"


def scheduler_processes(group: int, title: str = SCHEDULER_TITLE) -> list[psutil.Process]:
    """The schedulers among the processes of one process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and "".join(process.cmdline()).startswith(title):
                found.append(process)
    return found


def cpu_seconds(processes: Sequence[psutil.Process]) -> float | None:
    """User and system time of all of them so far; ``None`` if there are none, or one has ended."""
    if not processes:
        return None
    try:
        times = [process.cpu_times() for process in processes]
    except psutil.Error:
        return None
    return float(sum(one.user + one.system for one in times))
