"""Copies of keys and values between the KV pool and host memory, bit for bit.

    out    off the scheduler's thread: a worker thread, and on an accelerator a stream of its own
    back   on the forward stream, between the last forward that was enqueued and the next one

A copy out reads slots that stay held until it is done, so that forwards run beside it. It waits for
what the forward stream was given before: the last step of the request may still be writing.
A copy back writes slots that others have just given up and that the next forward reads. It has no
time to run beside a forward, and a stream of its own would only have to wait twice.

Seams: ``MHATokenToKVPool.get_key_buffer`` and ``get_value_buffer`` (``[slots, heads, dim]``),
``ModelRunner.forward_stream``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from sglang_kvshare.engine.host_memory import Extent, HostMemory

#: Tokens that are gathered at once on an accelerator, which needs memory for them.
_STAGED_TOKENS = 8192


class Job:
    """Work for the worker: runs once, or not at all if it was cancelled before.

    Attributes:
        error: what it raised; read it when it is done.
        ms: what the copy took, without what it waited for; 0 if it was not carried out.
    """

    def __init__(self, work: Callable[[Job], None] | None = None) -> None:
        self._work = work
        self._done = threading.Event()
        self.cancelled = False
        self.error: BaseException | None = None
        self.ms = 0.0
        if work is None:
            self._done.set()

    def cancel(self) -> None:
        """It need not go on. It is done when it does not touch memory any more."""
        self.cancelled = True

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it is done within so many seconds."""
        return self._done.wait(seconds)

    @property
    def succeeded(self) -> bool:
        return self.done() and self.error is None and not self.cancelled

    def run(self) -> None:
        """Called by the worker."""
        try:
            if self._work is not None and not self.cancelled:
                self._work(self)
        except BaseException as error:
            self.error = error
        finally:
            self._work = None
            self._done.set()


class Enqueued:
    """A copy back: done when the device has come to its end."""

    def __init__(self, begin: Any, end: Any) -> None:
        self._begin, self._end = begin, end

    def done(self) -> bool:
        return bool(self._end.query())

    def wait(self, seconds: float) -> bool:
        self._end.synchronize()
        return True

    def cancel(self) -> None:
        """What is enqueued runs."""

    @property
    def ms(self) -> float:
        """When it is done."""
        return float(self._begin.elapsed_time(self._end))


class Worker:
    """One thread, started by the first job; jobs run one after the other.

    It copies with one thread of OpenMP, itself: a second team beside the forward's would make more
    threads than cores, and libgomp then puts all of them to sleep between parallel regions, which
    takes a fifth of the speed of decoding on two cores.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._alone = threading.Event()

    def submit(self, work: Callable[[Job], None]) -> Job:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvshare-copies", daemon=True)
            self._start(self._thread)
        job = Job(work)
        self._jobs.put(job)
        return job

    def _start(self, thread: threading.Thread) -> None:
        threads = torch.get_num_threads()
        thread.start()
        self._alone.wait()
        # PyTorch's setting holds for the thread, MKL's for the process.
        torch.set_num_threads(threads)

    def _run(self) -> None:
        torch.set_num_threads(1)
        # Else the first parallel operation would read the process's setting again.
        torch.get_num_threads()
        self._alone.set()
        # As the scheduler's thread, whose tensors it reads.
        with torch.inference_mode():
            while True:
                self._jobs.get().run()


class Copier:
    """Copies between one KV pool and host memory.

    Args:
        pool: ``ModelRunner.token_to_kv_pool``.
        host_bytes: bound of the host memory.
        forward_stream: of the model runner; ``None`` on a CPU, where nothing is enqueued.
    """

    def __init__(self, pool: Any, host_bytes: int, forward_stream: Any = None) -> None:
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        buffers = [pool.get_key_buffer(layer) for layer in layers]
        buffers += [pool.get_value_buffer(layer) for layer in layers]
        rows = [buffer[0].numel() * buffer.element_size() for buffer in buffers]
        # Whole words are faster to index than bytes, and no dtype is ever converted.
        self._word = torch.int64 if all(row % 8 == 0 for row in rows) else torch.uint8
        self._buffers = [buffer.view(buffer.shape[0], -1).view(self._word) for buffer in buffers]
        self.device = self._buffers[0].device
        on_cpu = self.device.type == "cpu"
        self.capacity_tokens = host_bytes // sum(rows)
        self.memory = HostMemory(rows, self.capacity_tokens, pinned=not on_cpu)
        self.worker = Worker()
        self._forward_stream = forward_stream
        self._module = None if on_cpu else torch.get_device_module(self.device)
        self._stream = None if self._module is None else self._module.Stream()

    @property
    def bytes_per_token(self) -> int:
        return self.memory.bytes_per_token

    def out(self, slots: torch.Tensor, extents: Sequence[Extent]) -> Job:
        """Begin to copy ``slots`` (int64, on the pool's device) to ``extents``, of as many tokens.

        The slots must keep their values until the job is done.
        """
        if self._module is not None:
            self._stream.wait_stream(self._forward_stream)
            self._stream.wait_stream(self._module.current_stream())
            slots.record_stream(self._stream)
        return self.worker.submit(lambda job: self._out(job, slots, extents))

    def zero(self, extents: Sequence[Extent]) -> Job:
        """Begin to overwrite ``extents``, behind all copies out that were begun before."""
        return self.worker.submit(lambda job: self.memory.zero(extents))

    def back(self, extents: Sequence[Extent], skip: int, slots: torch.Tensor) -> Job | Enqueued:
        """Write the tokens of ``extents`` behind the first ``skip`` to ``slots`` (int64).

        On a CPU they are there when this returns, on an accelerator before the next forward.
        ``extents`` must keep their values until what is returned is done.
        """
        begin = time.perf_counter()
        with self._on_forward_stream(slots):
            first = self._event()
            for extent, part in _behind(extents, skip, slots):
                for buffer, plane in zip(self._buffers, self._planes(extent), strict=True):
                    buffer[part] = plane.to(self.device, non_blocking=True)
            last = self._event()
        if last is not None:
            return Enqueued(first, last)
        job = Job()
        job.ms = (time.perf_counter() - begin) * 1e3
        return job

    def _out(self, job: Job, slots: torch.Tensor, extents: Sequence[Extent]) -> None:
        begin = time.perf_counter()
        try:
            with nullcontext() if self._module is None else self._module.stream(self._stream):
                first = self._event()
                for extent, part in _behind(extents, 0, slots):
                    for buffer, plane in zip(self._buffers, self._planes(extent), strict=True):
                        if job.cancelled:
                            return
                        self._gather(buffer, part, plane)
                last = self._event()
        finally:
            # Whatever happened, memory is not given back while the device writes to it.
            if self._stream is not None:
                self._stream.synchronize()
        job.ms = (time.perf_counter() - begin) * 1e3 if last is None else first.elapsed_time(last)

    def _gather(self, buffer: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor) -> None:
        if self._module is None:
            torch.index_select(buffer, 0, slots, out=plane)
            return
        for part, rows in zip(
            slots.split(_STAGED_TOKENS), plane.split(_STAGED_TOKENS), strict=True
        ):
            rows.copy_(buffer.index_select(0, part), non_blocking=True)

    def _planes(self, extent: Extent) -> list[torch.Tensor]:
        return [plane.view(self._word) for plane in self.memory.planes(extent)]

    def _event(self) -> Any:
        if self._module is None:
            return None
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def _on_forward_stream(self, slots: torch.Tensor) -> Any:
        if self._module is None:
            return nullcontext()
        self._forward_stream.wait_stream(self._module.current_stream())
        slots.record_stream(self._forward_stream)
        return self._module.stream(self._forward_stream)


def _behind(
    extents: Sequence[Extent], skip: int, slots: torch.Tensor
) -> list[tuple[Extent, torch.Tensor]]:
    """Each extent behind the first ``skip`` tokens with its part of ``slots``."""
    found, at = [], 0
    for extent in extents:
        passed = min(skip, extent.tokens)
        skip -= passed
        start = extent.start + passed
        count = min(extent.stop - start, slots.shape[0] - at)
        if count > 0:
            part = Extent(extent.segment, start, start + count)
            found.append((part, slots[at : at + count]))
            at += count
    assert at == slots.shape[0], f"{slots.shape[0] - at} slots without a copy"
    return found
