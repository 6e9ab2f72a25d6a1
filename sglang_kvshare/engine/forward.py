"""One forward with reuse: place the donors' values, then run the extend narrowed.

Seam: ``TpModelWorker.forward_batch_generation``, which the scheduler calls on the forward stream:
a copy enqueued here runs after the donor's own write and before this extend.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_kvshare.attention.layerwise_copy import Copying, Moves
from sglang_kvshare.attention.upload import upload
from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.admission import settle
from sglang_kvshare.engine.attention_backends import row_attention_of
from sglang_kvshare.engine.geometry import check_pool, layer_geometries
from sglang_kvshare.engine.graphs import check_graphs, most_decode_rows, without_prefill_graphs
from sglang_kvshare.engine.kept_rows import Extend
from sglang_kvshare.engine.narrowing import narrowed
from sglang_kvshare.engine.placement import Placer
from sglang_kvshare.engine.probe_pass import probes_of, run_probes
from sglang_kvshare.engine.ranks import Ranks, ranks_of_this_process
from sglang_kvshare.engine.refresh import refresh_of, refreshing
from sglang_kvshare.engine.row_attention import RowAttention
from sglang_kvshare.engine.row_program import Chunk, RowProgram
from sglang_kvshare.engine.schedule import schedule_of
from sglang_kvshare.engine.state import RequestState, state_of
from sglang_kvshare.engine.stopwatch import Stopwatch
from sglang_kvshare.engine.support import check_model
from sglang_kvshare.plan import Placement
from sglang_kvshare.recompute.choice import probe_layers
from sglang_kvshare.recompute.refresh_queue import RefreshQueue
from sglang_kvshare.scheduling.benefit import BenefitGate
from sglang_kvshare.scheduling.forward_cost import Load, total
from sglang_kvshare.scheduling.refresh_pace import RefreshPace

logger = logging.getLogger(__name__)

#: Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class WorkerParts:
    """What every forward needs; ``first_layer`` is the first that runs for fewer rows where the
    choice of rows was made before the forward."""

    placer: Placer
    first_layer: int
    layers: int
    stopwatch: Stopwatch
    pace: RefreshPace
    row_attention: RowAttention
    ranks: Ranks = field(default_factory=Ranks)


def prepare_worker(worker: Any, config: KVShareConfig) -> None:
    """Check the loaded model and keep what every forward needs.

    Raises:
        Unsupported: see :func:`sglang_kvshare.engine.support.check_model` and
            :mod:`sglang_kvshare.engine.geometry`.
        SeamError: SGLang's attention backend, or its library, is not as expected.
    """
    runner = worker.model_runner
    check_model(runner.model)
    check_pool(runner.token_to_kv_pool)
    check_graphs(runner)
    row_attention = row_attention_of(runner)
    layers = layer_geometries(runner.model, runner.model_config.context_len)
    if str(runner.device) == "cpu":
        keep_freed_memory()
    else:
        logger.warning("KVShare has been tried on CPUs only; this device is %s", runner.device)
    # At least one layer is narrowed, or nothing would be spared.
    first_layer = min(config.narrow_layer, len(layers) - 1)
    ranks = ranks_of_this_process()
    placer = Placer(runner.token_to_kv_pool, layers, ranks)
    worker.kvshare_parts = WorkerParts(
        placer,
        first_layer,
        len(layers),
        Stopwatch(str(runner.device)),
        # Ranks measure different times, and must refresh as many rows.
        RefreshPace(config.refresh_slowdown, most_decode_rows(runner), by_time=ranks.alone),
        row_attention,
        ranks,
    )


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
    if parts is None or batch is None:
        return original(self, batch, *args, **kwargs)
    if batch.forward_mode.is_decode():
        return _decode(original, self, parts, batch, *args, **kwargs)
    if not batch.forward_mode.is_extend_without_speculative():
        return original(self, batch, *args, **kwargs)
    _mixed(batch)
    placed = _place_or_miss(parts, batch)
    chunks = placed.chunks
    if any(chunk.placement.reused_tokens for chunk in chunks):
        program = RowProgram(Extend.of(batch), chunks, parts.first_layer, parts.layers, parts.ranks)
        try:
            with parts.stopwatch.measure(_telling(batch, program)):
                result = _narrowed(original, self, parts, batch, placed, program, *args, **kwargs)
            if not placed.copying.at_once:
                _check(parts, batch, placed)
        except Exception as error:
            # Whatever raised, the batch itself is as it was: it runs again as SGLang would have
            # run it, every row, over whatever was placed.
            placed.copying.wait()
            if isinstance(error, DonorInvalid):
                logger.warning("KVShare: %s; the batch is computed in full", error)
                _miss(batch, "copy", lost_because="donor_invalid")
            else:
                probing = isinstance(error, ProbeFailed)
                logger.exception("KVShare's narrowed forward failed; the batch is computed in full")
                _miss(
                    batch,
                    "select" if probing else "narrow",
                    lost_because="selection_failed" if probing else "narrowing_failed",
                )
            chunks = []
        else:
            _finish(batch, chunks, program.computed_rows())
            return result
    _finish(batch, chunks, batch.extend_lens)
    with parts.stopwatch.measure(_telling(batch, None)):
        return original(self, batch, *args, **kwargs)


def _narrowed(
    original: Any,
    worker: Any,
    parts: WorkerParts,
    batch: Any,
    placed: Placed,
    program: RowProgram,
    *args: Any,
    **kwargs: Any,
) -> Any:
    runner = worker.model_runner
    with without_prefill_graphs(runner):
        _probe(parts, runner, batch, placed, program)
        with narrowed(runner, program, parts.row_attention, placed.copying):
            result = original(worker, batch, *args, **kwargs)
    # Every layer has waited for its part; a model that skips one has not.
    placed.copying.wait()
    return result


def _mixed(batch: Any) -> None:
    """Requests may decode in a prefill's batch, which no decode step tells of."""
    schedule = schedule_of(batch.tree_cache)
    if batch.decoding_reqs and schedule is not None and schedule.reserving is not None:
        try:
            schedule.reserving.decodes(batch.decoding_reqs)
        except Exception:
            schedule.fault("what is reserved")


def _decode(
    original: Any, worker: Any, parts: WorkerParts, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """A decode step, with rows that refresh prompt tokens where that is asked for."""
    try:
        refresh = refresh_of(batch, parts.pace)
    except Exception:
        logger.exception("KVShare could not choose what to refresh; the step decodes alone")
        _no_refresh(batch)
        refresh = None
    rows = 0 if refresh is None else refresh.rows
    requests = len(batch.reqs)
    schedule = schedule_of(batch.tree_cache)

    def measured(ms: float) -> None:
        parts.pace.observe(requests, rows, ms)
        if schedule is not None:
            schedule.decoded(requests, ms)

    with parts.stopwatch.measure(measured):
        if refresh is None or not (rows or refresh.looks):
            return original(worker, batch, *args, **kwargs)
        try:
            with refreshing(worker.model_runner, refresh, parts.layers, parts.ranks) as tell:
                result = original(worker, batch, *args, **kwargs)
        except Exception:
            # The rows of the requests are as they were, and their tokens were not sampled yet.
            logger.exception("KVShare's refresh failed; the step decodes alone")
            _no_refresh(batch)
            return original(worker, batch, *args, **kwargs)
        try:
            refresh.note(batch)
            tell()
        except Exception:
            logger.exception("KVShare could not rank anew what to refresh; it refreshes no more")
            _no_refresh(batch)
        return result


def _no_refresh(batch: Any) -> None:
    batch.tree_cache.fault("refresh")
    for state in filter(None, map(state_of, batch.reqs)):
        state.queue = None


def _telling(batch: Any, program: RowProgram | None) -> Callable[[float], None]:
    """What is to be told the time of this forward."""
    gate = _gate(batch)
    if gate is None:
        return lambda ms: None
    if program is None:
        lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        load = total(Load.of(rows, prefix + rows) for prefix, rows in lengths)
        return lambda ms: gate.observe_full(load, ms)
    # The rows that run are known when they have run.
    return lambda ms: gate.observe_narrowed(program.load(), ms)


def _gate(batch: Any) -> BenefitGate | None:
    """What learns from this batch; nothing does where stock SGLang's tree cache serves."""
    gate_of = getattr(batch.tree_cache, "gate_of", None)
    return None if gate_of is None else gate_of(batch.reqs)


class ProbeFailed(RuntimeError):
    """The probe pass raised."""


def _probe(
    parts: WorkerParts, runner: Any, batch: Any, placed: Placed, program: RowProgram
) -> None:
    """Run the probe pass of those chunks that want one, and choose where no layer is waited for."""
    chunks = placed.chunks
    wanting = [chunk for chunk in chunks if chunk.choice is not None and chunk.choice.probes]
    if not wanting:
        return
    try:
        probes = [probes_of(chunk) for chunk in wanting]
        counted = probe_layers(parts.layers)
        # It reads what is placed layer by layer, as the forward does, but at once.
        placed.copying.wait()
        seen = run_probes(runner, batch, probes, counted, parts.ranks)
        for chunk, part, told in zip(wanting, probes, seen, strict=True):
            # Tokens behind the first probe row have no key but their own, and receive nothing.
            before = chunk.placement.positions < part.rows[0]
            at = np.searchsorted(part.seen, chunk.placement.positions[before])
            chunk.attention, chunk.contribution = np.zeros((2, len(before)))
            chunk.attention[before] = told.attention[at]
            chunk.contribution[before] = told.contribution[at]
            program.probed(chunk, len(part.rows) * counted.stop / parts.layers)
            program.decide(chunk)
    except Exception as error:
        raise ProbeFailed from error


class DonorInvalid(RuntimeError):
    """A donor's values are not finite."""


@dataclass(frozen=True)
class Placed:
    """What was placed for a batch.

    Attributes:
        chunks: of the requests that reuse; empty when none does.
        copying: the copy of it.
        sources: int64 ``[n]``, the slots that it reads; ``None`` when nothing is copied.
    """

    chunks: list[Chunk]
    copying: Copying = field(default_factory=Copying)
    sources: torch.Tensor | None = None


def _place_or_miss(parts: WorkerParts, batch: Any) -> Placed:
    """Copy all donors of a batch; returns what was placed, nothing when no request reuses.

    A fault here is a miss: every row runs, and overwrites whatever was placed.
    """
    try:
        chunks = _chunks(batch)
        if not chunks:
            return Placed([])
        placed = _copy(parts, batch, chunks)
        if placed.copying.at_once:
            _check(parts, batch, placed)
        return placed
    except DonorInvalid as error:
        logger.warning("KVShare: %s; the batch is computed in full", error)
        _miss(batch, "copy", lost_because="donor_invalid")
    except Exception:
        logger.exception("KVShare could not place donors; the batch is computed in full")
        _miss(batch, "copy", lost_because="placement_failed")
    if parts.placer.copying is not None:
        parts.placer.copying.wait()
    return Placed([])


def _check(parts: WorkerParts, batch: Any, placed: Placed) -> None:
    """
    Raises:
        DonorInvalid: something that was placed is not finite; its donors serve nobody any more.
    """
    if placed.sources is None or parts.placer.finite(placed.copying):
        return
    bad = parts.placer.invalid(placed.sources).cpu().numpy()
    batch.tree_cache.mirror.discard(bad)
    raise DonorInvalid(f"{bad.shape[0]} cached tokens hold values that are not finite")


def _miss(batch: Any, step: str, *, lost_because: str) -> None:
    """Let go of every donor of the batch; what they would have given is computed."""
    batch.tree_cache.fault(step)
    for state in filter(None, map(state_of, batch.reqs)):
        if state.placement is not None:
            state.lost_because = lost_because
        batch.tree_cache.release(state)


def _finish(batch: Any, chunks: list[Chunk], computed_rows: Sequence[float]) -> None:
    """Note what was placed and what ran, let go of donors that have nothing left to give, and fix
    the reports of the requests whose prefill ends with this batch."""
    for chunk in chunks:
        state = state_of(batch.reqs[chunk.request])
        assert state is not None
        placed_all = _is_placed(state.placement, chunk.placement)
        state.note_placed(chunk.spared)
        state.deviations.update(chunk.deviations)
        if state.options.refresh_tokens > 0:
            state.left_over.append(chunk.left_over)
        if placed_all:
            batch.tree_cache.release(state)
    lengths = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, computed_rows, strict=True)
    for req, start, count, rows in lengths:
        state = state_of(req)
        if state is None:
            continue
        state.computed_rows += rows
        if start + count >= len(req.full_untruncated_fill_ids):
            if state.left_over:
                # Once: in a mixed batch the rows of decoding requests end here at every step.
                state.queue, state.left_over = RefreshQueue.of(state.left_over), []
            settle(state, batch.tree_cache.metrics)
            batch.tree_cache.measured(state)


def _chunks(batch: Any) -> list[Chunk]:
    """What the requests of this batch still have to place, cut to the rows that run now."""
    chunks: list[Chunk] = []
    row = 0
    lengths = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    for number, (req, start, count) in enumerate(lengths):
        state = state_of(req)
        if state is not None and state.placement is not None:
            chunks.append(_chunk(state, number, row, start, count, req))
        row += count
    return chunks


def _chunk(state: RequestState, number: int, row: int, start: int, count: int, req: Any) -> Chunk:
    assert state.placement is not None
    part = state.placement.within(start, start + count)
    chunk = Chunk(number, row, start, part, np.zeros(part.reused_tokens, dtype=np.bool_))
    pending = state.pending
    if pending is None or not part.reused_tokens:
        return chunk
    if start + count >= len(req.full_untruncated_fill_ids):
        chunk.choice, chunk.plan = pending.choice, pending.plan.after(start)
    else:
        # The rows that the choice would look at are not in this chunk.
        state.fell_back = True
        chunk.recompute = pending.without_measuring[state.placement.indices(start, start + count)]
    return chunk


def _copy(parts: WorkerParts, batch: Any, chunks: list[Chunk]) -> Placed:
    begin = time.perf_counter()
    placements = [chunk.placement for chunk in chunks]
    rows, sources, source_positions, target_positions = upload(
        batch.out_cache_loc.device,
        np.concatenate([chunk.rows for chunk in chunks]),
        *(
            np.concatenate([getattr(placement, name) for placement in placements])
            for name in ("slots", "sources", "positions")
        ),
    )
    count = rows.shape[0]
    placed = Placed(chunks)
    if count:
        targets = batch.out_cache_loc.index_select(0, rows).to(torch.int64)
        moves = Moves(sources, targets, source_positions, target_positions)
        placed = Placed(chunks, parts.placer.place(moves), sources)
    # On a GPU this is the time to enqueue; on a CPU it is the time of the copy itself.
    elapsed_ms = (time.perf_counter() - begin) * 1e3
    gate = _gate(batch)
    if gate is not None:
        gate.observe_copy(count, elapsed_ms)
    batch.tree_cache.metrics.placed(count, elapsed_ms)
    return placed


def _is_placed(placement: Placement | None, part: Placement) -> bool:
    """Whether nothing of ``placement`` lies beyond ``part``."""
    if placement is None or not placement.reused_tokens:
        return True
    return bool(part.reused_tokens) and part.positions[-1] == placement.positions[-1]
