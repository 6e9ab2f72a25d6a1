"""FlashInfer where it is installed: its adapter, and its kernels compiled beside other work.

    python -m kvshare_eval.device.flashinfer_setup 128 64

compiles what rows with heads of 128 and of 64 dimensions need, by running it once. FlashInfer keeps
what it has compiled in files, so that another process finds it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvshare_eval.device.attention_rows import FORM_COSTS, RowsCase, scattered
from kvshare_eval.device.kv_pool import KVPool, PoolBackend
from kvshare_eval.device.model_shapes import ModelShape
from kvshare_eval.device.timings import synchronize
from sglang_kvshare.attention.launch_choice import AttentionCosts
from sglang_kvshare.engine.flashinfer_contract import WRAPPER, check_wrapper, installed_version
from sglang_kvshare.engine.flashinfer_rows import FlashInferRows

#: Makes FlashInfer's wrapper of a paged prefill, given the workspace.
MakeWrapper = Callable[[torch.Tensor], Any]


def found() -> bool:
    """Whether the package is there, not whether it works."""
    return importlib.util.find_spec("flashinfer") is not None


def wrapper_maker() -> MakeWrapper:
    """
    Raises:
        ImportError: FlashInfer, or something that it needs, is not there.
        SeamError: it is another version, with other parameters.
    """
    import flashinfer

    wrapper = getattr(flashinfer, WRAPPER)
    check_wrapper(wrapper)
    return lambda workspace: wrapper(workspace, "NHD", backend="fa2")


def adapter(
    make: MakeWrapper, backend: PoolBackend, costs: AttentionCosts | None = None
) -> FlashInferRows:
    """The server's own, over the pool of the check."""
    return FlashInferRows(backend, lambda: make(backend.workspace_buffer), costs)


class Compiling:
    """FlashInfer's kernels compiled in processes of their own; :meth:`result` waits for them.

    One process for each size of heads, since most of the time one compiler waits for another.
    """

    def __init__(self, head_dims: Sequence[int]) -> None:
        self._begin = time.monotonic()
        # Files, not pipes: nobody reads before the end.
        self._outputs = [tempfile.TemporaryFile("w+") for _ in head_dims]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(head_dim)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for head_dim, output in zip(head_dims, self._outputs, strict=True)
        ]

    def result(self, limit_s: float) -> tuple[bool, str]:
        """Whether they can be used, and in one line what happened."""
        end = time.monotonic() + max(1.0, limit_s)
        try:
            for process in self._processes:
                process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False, f"its kernels were not compiled within {limit_s:.0f} s"
        finally:
            self._end()
        for process, output in zip(self._processes, self._outputs, strict=True):
            output.seek(0)
            lines = output.read().strip().splitlines() or [f"exit code {process.returncode}"]
            if process.returncode:
                return False, lines[-1][:300]
        return True, f"{installed_version()}, compiled in {time.monotonic() - self._begin:.0f} s"

    def _end(self) -> None:
        """End what still runs, the compilers that it has started too."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def compile_for(head_dim: int, make: MakeWrapper, device: str = "cuda") -> None:
    """Every kernel that the rows of the check need, with heads of so many dimensions."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = ModelShape("one layer", 1, 4 * head_dim, 4, 1, head_dim, 16, 16)
    pool = KVPool(shape, 512, dtype, device)
    for costs in FORM_COSTS.values():
        rows = adapter(make, PoolBackend.of(pool), costs)
        RowsCase(shape, pool, scattered(256, 0.3)).attend(rows)
    synchronize(device)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        compile_for(int(given), wrapper_maker())
