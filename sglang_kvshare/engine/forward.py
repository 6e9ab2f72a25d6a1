"""One forward with reuse: place the donors' values, then run the extend narrowed.

Seam: ``TpModelWorker.forward_batch_generation``, which the scheduler calls on the forward stream:
a copy enqueued here runs after the donor's own write and before this extend.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.admission import settle
from sglang_kvshare.engine.geometry import check_pool, layer_geometries
from sglang_kvshare.engine.narrowing import KeptRows, narrowed
from sglang_kvshare.engine.placement import DonorCopy, Placer
from sglang_kvshare.engine.state import RequestState, state_of
from sglang_kvshare.engine.stopwatch import Stopwatch
from sglang_kvshare.engine.support import check_model
from sglang_kvshare.plan import Placement
from sglang_kvshare.scheduling.forward_cost import Load, total

logger = logging.getLogger(__name__)

#: Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: A slot of the pool's padding page: what is written there is never read.
PADDING_SLOT = 0


@dataclass(frozen=True)
class WorkerParts:
    placer: Placer
    first_layer: int
    stopwatch: Stopwatch


def prepare_worker(worker: Any, config: KVShareConfig) -> None:
    """Check the loaded model and keep what every forward needs.

    Raises:
        Unsupported: see :func:`sglang_kvshare.engine.support.check_model` and
            :mod:`sglang_kvshare.engine.geometry`.
    """
    runner = worker.model_runner
    check_model(runner.model)
    check_pool(runner.token_to_kv_pool)
    layers = layer_geometries(runner.model, runner.model_config.context_len)
    if str(runner.device) == "cpu":
        keep_freed_memory()
    else:
        logger.warning("KVShare has been tried on CPUs only; this device is %s", runner.device)
    # At least one layer is narrowed, or nothing would be spared.
    first_layer = min(config.narrow_layer, len(layers) - 1)
    placer = Placer(runner.token_to_kv_pool, layers[first_layer:])
    worker.kvshare_parts = WorkerParts(placer, first_layer, Stopwatch(str(runner.device)))


def keep_freed_memory() -> None:
    """Have glibc keep freed buffers instead of giving them back to the system.

    A narrowed extend uses buffers of other sizes than a full one. After a few of them glibc's
    adaptive thresholds return and fault in the memory of every later forward again, which made
    full prefills about 6 % slower (eval/README.md). Other C libraries have no ``mallopt``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, 1 << 30)


def forward_batch_generation(
    original: Any, self: Any, batch: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Hook of ``TpModelWorker.forward_batch_generation``."""
    parts: WorkerParts | None = getattr(self, "kvshare_parts", None)
    if parts is None or batch is None or not batch.forward_mode.is_extend_without_speculative():
        return original(self, batch, *args, **kwargs)
    chunks, kept = _place_or_miss(parts, batch)
    tell = _telling(batch, kept)
    if kept is not None:
        try:
            with (
                parts.stopwatch.measure(tell),
                narrowed(self.model_runner, kept, parts.first_layer),
            ):
                result = original(self, batch, *args, **kwargs)
        except Exception:
            # Whatever raised, the batch itself is as it was: it runs again as SGLang would have
            # run it, every row, over whatever was placed.
            logger.exception("KVShare's narrowed forward failed; the batch is computed in full")
            _miss(batch, "narrow", lost_because="narrowing_failed")
            chunks, tell = [], _telling(batch, None)
        else:
            _finish(batch, chunks)
            return result
    _finish(batch, chunks)
    with parts.stopwatch.measure(tell):
        return original(self, batch, *args, **kwargs)


def _telling(batch: Any, kept: KeptRows | None) -> Callable[[float], None]:
    """What is to be told the time of this forward."""
    gate = getattr(batch.tree_cache, "gate", None)
    if gate is None:
        return lambda ms: None
    if kept is None:
        lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        load = total(Load.of(rows, prefix + rows) for prefix, rows in lengths)
        return lambda ms: gate.observe_full(load, ms)
    load = total(map(Load.of, kept.counts, kept.kv_lengths))
    return lambda ms: gate.observe_narrowed(load, ms)


@dataclass(frozen=True)
class _Chunk:
    """The part of one request's placement that falls into this batch."""

    state: RequestState
    placement: Placement
    row: int  # first row of the request in the batch
    start: int  # position of that row


class DonorInvalid(RuntimeError):
    """A donor's values are not finite."""


def _place_or_miss(parts: WorkerParts, batch: Any) -> tuple[list[_Chunk], KeptRows | None]:
    """Copy all donors of a batch and say which rows run; ``None`` when no request reuses.

    A fault here is a miss: every row runs, and overwrites whatever was placed.
    """
    try:
        chunks = _chunks(batch)
        if chunks:
            _copy(parts, batch, chunks)
            return chunks, _kept_rows(batch, chunks)
    except DonorInvalid as error:
        logger.warning("KVShare: %s; the batch is computed in full", error)
        _miss(batch, "copy", lost_because="donor_invalid")
    except Exception:
        logger.exception("KVShare could not place donors; the batch is computed in full")
        _miss(batch, "copy", lost_because="placement_failed")
    return [], None


def _miss(batch: Any, step: str, *, lost_because: str) -> None:
    """Let go of every donor of the batch; what they would have given is computed."""
    batch.tree_cache.fault(step)
    for state in filter(None, map(state_of, batch.reqs)):
        if state.placement is not None:
            state.lost_because = lost_because
        batch.tree_cache.release(state)


def _finish(batch: Any, chunks: list[_Chunk]) -> None:
    """Note what was placed, let go of donors that have nothing left to give, and fix the reports
    of the requests whose prefill ends with this batch."""
    for chunk in chunks:
        state = chunk.state
        placed_all = _is_placed(state.placement, chunk.placement)
        state.note_placed(chunk.placement)
        if placed_all:
            batch.tree_cache.release(state)
    for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        state = state_of(req)
        if state is not None and start + count >= len(req.full_untruncated_fill_ids):
            settle(state, batch.tree_cache.metrics)


def _chunks(batch: Any) -> list[_Chunk]:
    """What the requests of this batch still have to place, cut to the rows that run now."""
    chunks: list[_Chunk] = []
    row = 0
    for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        state = state_of(req)
        if state is not None and state.placement is not None:
            part = state.placement.within(start, start + count)
            chunks.append(_Chunk(state, part, row, start))
        row += count
    return chunks


def _copy(parts: WorkerParts, batch: Any, chunks: list[_Chunk]) -> None:
    begin = time.perf_counter()
    device = batch.out_cache_loc.device
    rows = [chunk.placement.positions + (chunk.row - chunk.start) for chunk in chunks]

    def joined(arrays: list[Any]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)

    targets = batch.out_cache_loc.index_select(0, joined(rows)).to(torch.int64)
    if targets.shape[0]:
        sources = joined([chunk.placement.slots for chunk in chunks])
        finite = parts.placer.place(
            DonorCopy(
                source_slots=sources,
                target_slots=targets,
                source_positions=joined([chunk.placement.sources for chunk in chunks]),
                target_positions=joined([chunk.placement.positions for chunk in chunks]),
            )
        )
        if not finite:
            bad = parts.placer.invalid(sources).cpu().numpy()
            batch.tree_cache.index.discard(bad)
            raise DonorInvalid(f"{bad.shape[0]} cached tokens hold values that are not finite")
    # On a GPU this is the time to enqueue; on a CPU it is the time of the copy itself.
    elapsed_ms = (time.perf_counter() - begin) * 1e3
    gate = getattr(batch.tree_cache, "gate", None)
    if gate is not None:
        gate.observe_copy(int(targets.shape[0]), elapsed_ms)
    batch.tree_cache.metrics.placed(int(targets.shape[0]), elapsed_ms)


def _kept_rows(batch: Any, chunks: list[_Chunk]) -> KeptRows:
    keep = np.ones(sum(batch.extend_lens), dtype=np.bool_)
    for chunk in chunks:
        keep[chunk.placement.positions + (chunk.row - chunk.start)] = False
    extends = np.asarray(batch.extend_lens, dtype=np.int64)
    ends = np.cumsum(extends)
    # A chunk that is spared as a whole still needs one row to carry it through the layers. Its
    # logits are dropped, and its KV goes to the padding page: the placed values stay.
    kept_counts = np.add.reduceat(keep, ends - extends)
    carriers = ends[kept_counts == 0] - 1
    keep[carriers] = True
    rows = np.flatnonzero(keep)
    starts = np.asarray(batch.prefix_lens, dtype=np.int64)
    offsets = np.repeat(starts - (ends - extends), extends)
    device = batch.out_cache_loc.device
    row_index = torch.from_numpy(rows).to(device, non_blocking=True)
    cache_loc = batch.out_cache_loc.index_select(0, row_index)
    if carriers.shape[0]:
        at = torch.from_numpy(np.searchsorted(rows, carriers)).to(device)
        cache_loc = cache_loc.index_fill(0, at, PADDING_SLOT)
    return KeptRows(
        rows=row_index,
        positions=torch.from_numpy(rows + offsets[rows]).to(device, non_blocking=True),
        cache_loc=cache_loc,
        counts=np.maximum(kept_counts, 1).tolist(),
        extend_counts=extends.tolist(),
        kv_lengths=(starts + extends).tolist(),
    )


def _is_placed(placement: Placement | None, part: Placement) -> bool:
    """Whether nothing of ``placement`` lies beyond ``part``."""
    if placement is None or not placement.reused_tokens:
        return True
    return bool(part.reused_tokens) and part.positions[-1] == placement.positions[-1]
