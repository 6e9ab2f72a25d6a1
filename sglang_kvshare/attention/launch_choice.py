"""Which form of a narrowed attention is cheapest: runs, a mask, or two parts (:mod:`launches`).

A kernel works tile by tile: ``T`` query rows against one key after the other. With grouped heads
the rows of all query heads of one key head share a tile, so that ``r`` rows fill ``r * group`` of
its places. Time is counted for one key head on one multiprocessor:

    a tile over one key     key_ns          the key and its value come from memory or cache
                          + row_ns * T      products, for all places of the tile, filled or not

    runs        short runs leave their tiles empty, and read all keys before them each by itself
    mask        full tiles, but each product is masked, and bits are packed and read
    two parts   full tiles, few of them masked, but two launches and a merge

All figures are of paper, not measured: see each. The device benchmark sets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_kvshare.attention.launches import (
    AttentionPlan,
    Form,
    Launch,
    Sees,
    in_runs,
    in_two_parts,
    with_mask,
)
from sglang_kvshare.plan import Int64Array

#: Query rows of a tile that FlashInfer's FA2 kernels come in; the mean rows of an entry, heads of
#: the group counted, choose (``FA2DetermineCtaTileQ``: above 64, above 16, else).
TILES = (128, 64, 16)

#: A list of slots is int32 (``paged_kv_indices``).
SLOT_BYTES = 4


@dataclass(frozen=True)
class AttentionCosts:
    """What the choice rests on; on paper for an H100 class card, bf16, head dimension 128.

    Attributes:
        key_ns: one key and its value to one multiprocessor: 512 bytes. From memory it would be
            20 ns (3.35 TB/s over 132 multiprocessors); entries that run side by side find what
            others read in the L2 cache, which is about twice as fast.
        row_ns: two products of 128 by one row and key: 512 operations at 2.6 TFLOPS, a 132nd of
            350 TFLOPS, what FA2 kernels reach on that card.
        masked: factor on a tile whose products are masked one by one: the bits are fetched and
            tested between two matrix products, and the causal kernel does that in its last tile
            alone.
        launch_ns: a launch, as time of one multiprocessor and key head: 5 us, for 132
            multiprocessors that compute 8 key heads.
        merge_row_ns: one row of one key head merged, 4 query heads: 3 KiB read and written at a
            132nd of the bandwidth.
        block_rows: rows of a block. Higher blocks mask more, lower ones list more slots; at 4 query
            heads a key head one is two of the largest tiles.
        mask_limit_tokens: longest KV row for which the mask of whole rows is allowed. It is
            quadratic: a tenth of 32,768 rows needs 7 MB for each request, of which the masks of two
            parts are 4 %.
        mask_limit_bytes: of the masks of one batch. What is left free beside the KV pool is some
            GB, and activations need most of it.
        list_limit_bytes: of the slots listed for one batch. 500 runs in 32,768 tokens list 32 MB.
    """

    key_ns: float = 10.0
    row_ns: float = 0.2
    masked: float = 1.25
    launch_ns: float = 80_000.0
    merge_row_ns: float = 120.0
    block_rows: int = 64
    mask_limit_tokens: int = 16_384
    mask_limit_bytes: int = 16 << 20
    list_limit_bytes: int = 64 << 20


def choose(
    positions: Int64Array,
    counts: Sequence[int],
    *,
    group: int,
    costs: AttentionCosts | None = None,
) -> AttentionPlan:
    """The cheapest form that keeps within the limits; two parts always do.

    A pure function: equal on all ranks of a tensor-parallel group.

    Args:
        positions: int64 ``[rows]``, of the kept rows, request after request, strictly ascending
            in each.
        counts: rows of each request, all above 0.
        group: query heads of one key head.
    """
    costs = costs or AttentionCosts()
    plans = [_two_parts_that_fit(positions, counts, costs)]
    masked = with_mask(positions, counts, costs.block_rows)
    if _fits(masked.launches[0], costs):
        plans.append(masked)
    runs = in_runs(positions, counts)
    if _fits(runs.launches[0], costs):
        plans.append(runs)
    # Of equal ones the simplest, which stands last.
    return min(reversed(plans), key=lambda plan: cost_ns(plan, group, costs))


def _two_parts_that_fit(
    positions: Int64Array, counts: Sequence[int], costs: AttentionCosts
) -> AttentionPlan:
    """Blocks as high as it takes to list few slots; masks stay a block high."""
    block_rows = costs.block_rows
    while True:
        plan = in_two_parts(positions, counts, block_rows)
        listed = sum(launch.listed_keys for launch in plan.launches)
        if listed * SLOT_BYTES <= costs.list_limit_bytes or block_rows >= max(counts):
            return plan
        block_rows *= 2


def _fits(launch: Launch, costs: AttentionCosts) -> bool:
    if launch.listed_keys * SLOT_BYTES > costs.list_limit_bytes:
        return False
    if launch.sees is not Sees.MASKED:
        return True
    return (
        int(launch.key_ends.max()) <= costs.mask_limit_tokens
        and launch.mask_bytes <= costs.mask_limit_bytes
    )


def cost_ns(plan: AttentionPlan, group: int, costs: AttentionCosts) -> float:
    """What a plan costs in one layer, as time of one multiprocessor for one key head."""
    total = sum(_launch_ns(launch, group, costs) for launch in plan.launches)
    if plan.form is Form.TWO_PARTS:
        total += len(plan.positions) * costs.merge_row_ns
    return total


def _launch_ns(launch: Launch, group: int, costs: AttentionCosts) -> float:
    places = launch.row_counts * group
    tile = _tile(float(places.mean()))
    tiles = -(-places // tile)
    a_key = costs.key_ns + costs.row_ns * tile
    keys = launch.key_counts.astype(np.float64)
    if launch.sees is Sees.MASKED:
        a_key *= costs.masked
    elif launch.sees is Sees.CAUSAL:
        # A tile ends at the key of its last row: of an entry's own keys half are computed.
        keys -= (launch.row_counts - np.minimum(launch.row_counts, tile / group)) / 2
    return float(np.dot(tiles, keys)) * a_key + costs.launch_ns


def _tile(mean_places: float) -> int:
    large, middle, small = TILES
    if mean_places > middle:
        return large
    return middle if mean_places > small else small
