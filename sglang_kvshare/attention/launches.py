"""The kernel launches that a narrowed attention consists of, as index ranges.

The row at position ``p`` sees the keys ``0 .. p`` of its request. A kernel that knows batches of
requests is given *entries*: some consecutive rows of one request, and a range of its keys.

    positions of the kept rows    3 4 5     9     11 12

    runs         rows [3 4 5] keys [0, 6)    rows [9] keys [0, 10)    rows [11 12] keys [0, 13)
    mask         rows [3 4 5 9] keys [0, 10) by the mask    rows [11 12] keys [0, 13) by the mask
    two parts    rows [3 4 5 9] keys [0, 3) all, and keys [3, 10) by the mask, then merged
                 rows [11 12] keys [0, 11) all, and keys [11, 13) by the mask, then merged

*Runs* are the virtual requests of a backend that has no masks: aligned at the end, a causal kernel
does by itself what is wanted of rows that follow each other. *Mask* takes blocks of any rows, and
one bit for each row and key of a block. In *two parts* only the keys among a block's own rows need
bits, so that all masks of a request are as long as its KV row and one block high: linear in the
prompt where the others are quadratic.

Cascade inference splits shared and own keys like this (FlashInfer, arXiv 2501.01005, 3.1.2); here
the split is between what all rows of a block see and what only some do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from sglang_kvshare.plan import Int64Array


class Sees(Enum):
    """Which keys of its entry a row sees."""

    #: The last row all, each row before it one less.
    CAUSAL = "causal"
    ALL = "all"
    #: Those up to its own position.
    MASKED = "masked"


class Form(Enum):
    """How the kept rows are put before a kernel."""

    RUNS = "runs"
    MASK = "mask"
    TWO_PARTS = "two parts"


@dataclass(frozen=True)
class Launch:
    """One launch: every kept row is in exactly one entry, and entries are in the rows' order.

    Attributes:
        requests: int64 ``[entries]``, number in the batch of each entry's request.
        row_indptr: int64 ``[entries + 1]``, where the rows of each begin among the kept ones.
        key_starts, key_ends: int64 ``[entries]``, positions of the keys, ``[start, end)``.
    """

    requests: Int64Array
    row_indptr: Int64Array
    key_starts: Int64Array
    key_ends: Int64Array
    sees: Sees

    @property
    def entries(self) -> int:
        return len(self.requests)

    @property
    def row_counts(self) -> Int64Array:
        return np.diff(self.row_indptr)

    @property
    def key_counts(self) -> Int64Array:
        return self.key_ends - self.key_starts

    @property
    def listed_keys(self) -> int:
        """Slots that are listed for the kernel, those of keys that entries share repeated."""
        return int(self.key_counts.sum())

    @property
    def mask_bytes(self) -> int:
        """Of the packed mask: a bit for each row and key, each entry's at a byte of its own."""
        if self.sees is not Sees.MASKED:
            return 0
        return int(((self.row_counts * self.key_counts + 7) // 8).sum())


@dataclass(frozen=True)
class AttentionPlan:
    """How one narrowed attention is computed, in every layer until rows are dropped again.

    Attributes:
        positions: int64 ``[rows]``, of the kept rows, request after request.
        launches: one, or two whose results are merged.
    """

    form: Form
    positions: Int64Array
    launches: tuple[Launch, ...]


def in_runs(positions: Int64Array, counts: Sequence[int]) -> AttentionPlan:
    """One entry a run of consecutive positions: virtual requests.

    Args:
        positions: int64 ``[rows]``, request after request, strictly ascending in each.
        counts: rows of each request, all above 0.
    """
    begins = _request_begins(counts)
    breaks = np.empty(len(positions), dtype=np.bool_)
    breaks[1:] = positions[1:] != positions[:-1] + 1
    breaks[begins] = True
    indptr, requests, _, lasts = _cut(positions, begins, breaks)
    nothing = np.zeros_like(lasts)
    launch = Launch(requests, indptr, nothing, lasts + 1, Sees.CAUSAL)
    return AttentionPlan(Form.RUNS, positions, (launch,))


def with_mask(positions: Int64Array, counts: Sequence[int], block_rows: int) -> AttentionPlan:
    """One entry a block of up to ``block_rows`` rows, over all keys up to its last row.

    Args: as :func:`in_runs`.
    """
    indptr, requests, _, lasts = _blocks(positions, counts, block_rows)
    launch = Launch(requests, indptr, np.zeros_like(lasts), lasts + 1, Sees.MASKED)
    return AttentionPlan(Form.MASK, positions, (launch,))


def in_two_parts(positions: Int64Array, counts: Sequence[int], block_rows: int) -> AttentionPlan:
    """Each block twice: over the keys before its first row, and over those from there on.

    The second part is never empty, since every row sees itself; the first one is where a block
    begins at position 0.

    Args: as :func:`in_runs`.
    """
    indptr, requests, firsts, lasts = _blocks(positions, counts, block_rows)
    before = Launch(requests, indptr, np.zeros_like(firsts), firsts, Sees.ALL)
    among = Launch(requests, indptr, firsts, lasts + 1, Sees.MASKED)
    return AttentionPlan(Form.TWO_PARTS, positions, (before, among))


def _blocks(
    positions: Int64Array, counts: Sequence[int], block_rows: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    begins = _request_begins(counts)
    in_request = np.arange(len(positions)) - np.repeat(begins, counts)
    return _cut(positions, begins, in_request % block_rows == 0)


def _cut(
    positions: Int64Array, request_begins: Int64Array, breaks: np.ndarray
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Cut the rows before each of ``breaks``: ``row_indptr``, and of each piece its request, its
    first position and its last."""
    begins = np.flatnonzero(breaks)
    indptr = np.append(begins, len(positions))
    requests = np.searchsorted(request_begins, begins, side="right") - 1
    return indptr, requests, positions[begins], positions[indptr[1:] - 1]


def _request_begins(counts: Sequence[int]) -> Int64Array:
    rows = np.asarray(counts, dtype=np.int64)
    return np.cumsum(rows) - rows
