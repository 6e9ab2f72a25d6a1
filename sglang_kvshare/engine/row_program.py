"""Which rows of one forward run, layer by layer, and how the tokens to recompute are chosen.

    layer            0      ...       check      ...          last
    chosen before    kept rows -------------------------------->    by the plan, by a probe pass
    chosen there     all rows ---------->|kept rows ----------->    by what the check layer shows

At a check layer keys and values are computed for all rows, and all the rest for the kept ones.

Several check layers narrow gradually: of ``k`` the ``i``-th leaves ``ratio ** (i / k)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_kvshare.attention.kernels.check_scores import (
    TOLD,
    CheckLayer,
    check_scores,
    influence_of,
)
from sglang_kvshare.attention.upload import upload
from sglang_kvshare.engine.kept_rows import Extend, KeptRows
from sglang_kvshare.engine.ranks import Ranks
from sglang_kvshare.plan import BoolArray, Int64Array, Placement, ReusePlan
from sglang_kvshare.recompute.choice import Choice
from sglang_kvshare.recompute.refresh_queue import LeftOver
from sglang_kvshare.recompute.selectors import Need, Signals, choose, forced_tokens
from sglang_kvshare.scheduling.forward_cost import Load

if TYPE_CHECKING:
    from sglang_kvshare.engine.narrowing import Look

#: Values of which nothing is left are off by nothing, whatever the limit.
_LEAST_SIZE = 1e-30


@dataclass(eq=False)
class Chunk:
    """The part of one request's placement that falls into this batch.

    Attributes:
        request: its number in the batch.
        row: first row of the request in the batch.
        start: position of that row.
        placement: the matched tokens whose donor values were copied.
        choice: how to choose among them in the forward; ``None`` when that is done.
        plan: the part of the plan that ``placement`` holds.
        recompute: bool, of ``placement``: the tokens that are computed all the same.
        weights: of ``placement``: how far each value was off at the first check layer.
        scores: of ``placement``: how much each would be worth recomputing.
        over_limit: of ``placement``: tokens of spans that are too far off, once that is known.
        deviations: measured of each span, by its start.
    """

    request: int
    row: int
    start: int
    placement: Placement
    recompute: BoolArray
    choice: Choice | None = None
    plan: ReusePlan | None = None
    attention: np.ndarray | None = None
    contribution: np.ndarray | None = None
    scores: np.ndarray | None = None
    weights: np.ndarray | None = None
    over_limit: BoolArray | None = field(default=None, repr=False)
    deviations: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def signals(self) -> Signals:
        """What the probe pass saw."""
        return Signals(attention=self.attention, contribution=self.contribution)

    @property
    def rows(self) -> Int64Array:
        """Rows of the batch that hold the matched tokens."""
        return self.placement.positions + (self.row - self.start)

    @property
    def left_over(self) -> LeftOver:
        """What the decode stage may recompute."""
        left = ~self.recompute
        return LeftOver(
            self.placement.positions[left],
            None if self.scores is None else self.scores[left],
            None if self.weights is None else self.weights[left],
        )

    @property
    def spared(self) -> Placement:
        return self.placement.without(self.recompute)


class RowProgram:
    """A program for :func:`sglang_kvshare.engine.narrowing.narrowed`.

    Args:
        first_layer: first layer that runs for fewer rows where the choice was made before.
        layers: decoder layers of the model.
        ranks: those that hold the other heads: all choose by what all have measured.
    """

    def __init__(
        self,
        extend: Extend,
        chunks: Sequence[Chunk],
        first_layer: int,
        layers: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self.kv_lengths = extend.kv_lengths
        self.current: KeptRows | None = None
        self._extend = extend
        self._keep = np.ones(sum(extend.counts), dtype=np.bool_)
        self._drops: dict[int, list[Chunk]] = {}
        self._looks: dict[int, list[Chunk]] = {}
        self._first_layer = first_layer
        self._layers = layers
        #: Rows of each request, layer by layer.
        self._ran: list[Sequence[int]] = []
        self._probe_rows = np.zeros(len(extend.counts))
        for chunk in chunks:
            if chunk.choice is None:
                self._drops.setdefault(first_layer, []).append(chunk)
            else:
                for layer in chunk.choice.check_layers:
                    self._looks.setdefault(layer, []).append(chunk)

    def narrow(self, layer: int) -> torch.Tensor | None:
        """See :class:`sglang_kvshare.engine.narrowing.Program`."""
        index = self._drop(self._drops.pop(layer, []))
        self._ran.append(self._counts())
        return index

    def looks(self, layer: int) -> bool:
        return layer in self._looks

    def look(self, look: Look) -> torch.Tensor | None:
        """Measure what the selectors of this layer need, let them choose, and narrow."""
        layer = look.layer.layer_id
        chunks = self._looks[layer]
        for chunk in chunks:
            self._choose(chunk, layer, look)
        index = self._drop(chunks)
        # Most of the layer's work is still to come.
        self._ran[-1] = self._counts()
        return index

    def _drop(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Let the rows that these chunks spare go."""
        if not chunks:
            return None
        before = self.current
        for chunk in chunks:
            self._keep[chunk.rows[~chunk.recompute]] = False
        self.current = self._extend.keep(self._keep)
        if before is not None:
            return self.current.within(before)
        return upload(self.current.cache_loc.device, self.current.rows)[0]

    def _counts(self) -> Sequence[int]:
        return self._extend.counts if self.current is None else self.current.counts

    def probed(self, chunk: Chunk, rows: float) -> None:
        """A probe pass that cost as much as ``rows`` rows in all layers was run for a chunk."""
        self._probe_rows[chunk.request] = rows

    def decide(self, chunk: Chunk) -> None:
        """Choose for a chunk that waited for nothing but the probe pass."""
        choice, plan = chunk.choice, chunk.plan
        assert choice is not None
        assert plan is not None
        if choice.check_layers:
            return
        chunk.scores = choice.selector.score(plan, chunk.signals)
        chunk.recompute = choose(choice.selector, plan, chunk.scores, choice.settings)
        self._drops.setdefault(self._first_layer, []).append(chunk)

    def computed_rows(self) -> list[float]:
        """Of each request: rows that ran, as a mean over layers, the probe pass included."""
        return (np.sum(self._ran, axis=0) / self._layers + self._probe_rows).tolist()

    def load(self) -> Load:
        """What the forward has cost, in rows that run through all layers."""
        rows = self.computed_rows()
        pairs = sum(a * b for a, b in zip(rows, self.kv_lengths, strict=True))
        return Load(round(sum(rows)), round(pairs))

    def _choose(self, chunk: Chunk, layer: int, look: Look) -> None:
        choice, plan = chunk.choice, chunk.plan
        assert choice is not None
        assert plan is not None
        measured = self._measure(chunk, choice, plan, look)
        if chunk.over_limit is None:
            chunk.weights = measured.signals.value_l1
            chunk.over_limit = measured.over_limit(plan, choice.max_deviation)
            chunk.deviations = {
                span.start: deviation
                for span, deviation in zip(plan.spans, measured.deviations(plan), strict=True)
            }
        step = choice.check_layers.index(layer) + 1
        last = step == len(choice.check_layers)
        settings = choice.settings
        if not last:
            ratio = settings.recompute_ratio ** (step / len(choice.check_layers))
            settings = replace(settings, recompute_ratio=ratio, recompute_error=1.0)
        scores = choice.selector.score(plan, measured.signals)
        chunk.scores = scores
        chosen = choose(choice.selector, plan, scores, settings)
        chunk.recompute = (chosen & measured.active) | chunk.over_limit

    def _measure(self, chunk: Chunk, choice: Choice, plan: ReusePlan, look: Look) -> _Measured:
        """Signals of the matched tokens that still run."""
        positions, rows = self._running(chunk)
        device = look.k.device
        active = np.isin(chunk.placement.positions, positions)
        candidates = chunk.placement.positions[active]
        wants = choice.selector.needs
        influences = Need.INFLUENCE in wants
        attends = Need.ATTENTION in wants and not choice.probes and not influences
        lookers = np.empty(0, dtype=np.int64)
        if attends or influences:
            # The rows that are not reused, or will be computed in any case; the last of them.
            forced = forced_tokens(plan, choice.settings)
            spare = chunk.placement.positions[~forced]
            lookers = np.flatnonzero(~np.isin(positions, spare) & (positions <= plan.scored_from))[
                -choice.probe_tokens :
            ]
        layer = look.layer
        key_scale, value_scale = look.reader.factors(layer)
        fresh_rows = np.full(look.slots[chunk.request].shape[0], -1, dtype=np.int64)
        fresh_rows[positions] = np.arange(rows.start, rows.stop)
        at, looking, seen, reused = upload(
            device, fresh_rows, rows.start + lookers, positions[lookers], candidates
        )
        check = CheckLayer(
            query=look.q,
            fresh_keys=look.k,
            fresh_values=look.v,
            stored_keys=look.reader.pool.get_key_buffer(layer.layer_id),
            stored_values=look.reader.pool.get_value_buffer(layer.layer_id),
            slots=look.slots[chunk.request],
            fresh_rows=at.to(torch.int32),
            probe_rows=looking[: len(lookers) if attends else 0],
            probe_positions=seen[: len(lookers) if attends else 0],
            reused=reused,
            scale=layer.scaling,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        told = torch.zeros(len(TOLD) + 1, len(candidates), dtype=torch.float32, device=device)
        check_scores(check, told[: len(TOLD)])
        if influences:
            told[-1] = influence_of(check, looking, seen)
        # One copy to the host, for all that is chosen by.
        measured = self._ranks.add_up(told).double().cpu().numpy()

        def spread(values: np.ndarray) -> np.ndarray:
            everywhere = np.zeros(len(active))
            everywhere[active] = values
            return everywhere

        by_name = dict(zip((*TOLD, "influence"), map(spread, measured), strict=True))
        signals = replace(
            chunk.signals,
            **{name: by_name[name] for name in ("value_l1", "value_l2", "key_l2", "value_size")},
        )
        if attends:
            signals = replace(signals, attention=by_name["attention"])
        if influences:
            signals = replace(signals, influence=by_name["influence"])
        return _Measured(signals, active)

    def _running(self, chunk: Chunk) -> tuple[Int64Array, slice]:
        """Positions of the request's rows that run, and where they are among all that do."""
        if self.current is not None:
            part = self.current.part(chunk.request)
            return self.current.row_positions[part], part
        count = self._extend.counts[chunk.request]
        positions = np.arange(chunk.start, chunk.start + count, dtype=np.int64)
        return positions, slice(chunk.row, chunk.row + count)


@dataclass(frozen=True)
class _Measured:
    """``active`` marks the matched tokens that still run; of the others all is 0."""

    signals: Signals
    active: BoolArray

    def _values(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.signals.value_l1 is not None
        assert self.signals.value_size is not None
        return self.signals.value_l1, self.signals.value_size

    def over_limit(self, plan: ReusePlan, limit: float) -> BoolArray:
        """Tokens of the spans whose values are off by more than ``limit`` of their size."""
        marked = np.zeros(len(self.active), dtype=np.bool_)
        begin = 0
        for span, deviation in zip(plan.spans, self.deviations(plan), strict=True):
            # Written so that a deviation that is not a number is over the limit.
            if not deviation <= limit:
                marked[begin : begin + span.length] = True
            begin += span.length
        return marked

    def deviations(self, plan: ReusePlan) -> list[float]:
        """Of each span: how far its values are off, as a share of their size."""
        lengths = np.array([span.length for span in plan.spans])
        begins = np.cumsum(lengths) - lengths
        off, size = (np.add.reduceat(values, begins) for values in self._values())
        told: list[float] = (off / np.maximum(size, _LEAST_SIZE)).tolist()
        return told
