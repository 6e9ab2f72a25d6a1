"""Which rows of a prompt are computed: the choice of one request, by the core's own selectors.

    before layer 0      by the plan alone: seams        no layer runs for the others
    at a check layer    attention times value_l1        layers before it run for all

What ``engine/row_program.py`` does for a batch, its gate and its ranks, is left out here; the
kernel, the signals and the rules of choosing are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_kvshare.attention.kernels.check_scores import CheckLayer, check_scores
from sglang_kvshare.attention.layerwise_copy import Moves
from sglang_kvshare.attention.upload import upload
from sglang_kvshare.plan import BoolArray, Placement, ReusePlan, everything, place
from sglang_kvshare.recompute.selectors import (
    SelectionSettings,
    Signals,
    choose,
    forced_tokens,
    selector_named,
)

#: Rows that look at the check layer, as configured by default.
PROBE_TOKENS = 32
#: The check layer, seams and tail as configured by default.
CHECK_LAYER, SEAM_TOKENS, TAIL_TOKENS = 1, 8, 8


@dataclass(frozen=True)
class Reuse:
    """How a prompt's matched tokens are reused.

    Attributes:
        recompute_ratio: share of them that is computed all the same.
        check_layer: where it is measured which; ``None`` to take seams, before layer 0.
    """

    plan: ReusePlan
    recompute_ratio: float
    check_layer: int | None = CHECK_LAYER
    seam_tokens: int = SEAM_TOKENS
    tail_tokens: int = TAIL_TOKENS

    @property
    def settings(self) -> SelectionSettings:
        return SelectionSettings(self.recompute_ratio, self.seam_tokens, self.tail_tokens)

    def by_plan(self) -> BoolArray:
        """bool ``[matched_tokens]``, to be recomputed: chosen without a look at the model."""
        seams = selector_named("seams")
        return choose(seams, self.plan, seams.score(self.plan, Signals()), self.settings)

    def by_scores(self, attention: np.ndarray, value_l1: np.ndarray) -> BoolArray:
        """The same by dual-stage high deviation; the signals are of the matched tokens."""
        dhd = selector_named("dhd")
        scores = dhd.score(self.plan, Signals(attention=attention, value_l1=value_l1))
        return choose(dhd, self.plan, scores, self.settings)

    def kept(self, recompute: BoolArray) -> BoolArray:
        """bool ``[prompt_tokens]``: the rows that go on."""
        keep = np.ones(self.plan.prompt_tokens, dtype=np.bool_)
        keep[self.plan.positions()[~recompute]] = False
        return keep


def moves_of(plan: ReusePlan, recompute: BoolArray | None, slots: torch.Tensor) -> Moves:
    """The donors' values to be copied, those of tokens that are recomputed anyway left out.

    Args:
        recompute: ``None`` while that is not known.
        slots: int64 ``[prompt_tokens]``, the prompt's KV row.
    """
    placement: Placement = everything(plan) if recompute is None else place(plan, recompute)
    source, target, positions = upload(
        slots.device, placement.slots, placement.positions, placement.sources
    )
    return Moves(source, slots.index_select(0, target), positions, target)


def measured_choice(
    reuse: Reuse,
    query: torch.Tensor,
    fresh_keys: torch.Tensor,
    fresh_values: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    scale: float,
) -> BoolArray:
    """bool ``[matched_tokens]``, to be recomputed: what a check layer of all rows shows.

    Args:
        query, fresh_keys, fresh_values: ``[prompt_tokens, heads, head_dim]``, keys rotated.
        stored: the layer's keys and values, ``[slots, kv_heads, head_dim]``, donors placed.
        slots: int64 ``[prompt_tokens]``.
    """
    plan = reuse.plan
    matched = plan.positions()
    looking = np.ones(plan.prompt_tokens, dtype=np.bool_)
    looking[matched[~forced_tokens(plan, reuse.settings)]] = False
    probes = np.flatnonzero(looking)[-PROBE_TOKENS:]
    rows, looks, reused = upload(
        slots.device, np.arange(plan.prompt_tokens, dtype=np.int64), probes, matched
    )
    told = check_scores(
        CheckLayer(
            query=query,
            fresh_keys=fresh_keys,
            fresh_values=fresh_values,
            stored_keys=stored[0],
            stored_values=stored[1],
            slots=slots,
            fresh_rows=rows.to(torch.int32),
            probe_rows=looks,
            probe_positions=looks,
            reused=reused,
            scale=scale,
        )
    )
    # One copy to the host, which waits for it.
    attention, value_l1 = torch.stack([told.attention, told.value_l1]).double().cpu().numpy()
    return reuse.by_scores(attention, value_l1)
