"""Which rows of a batch run, as tensors that a forward can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sglang_kvshare.attention.position_mask import last_positions
from sglang_kvshare.attention.upload import upload
from sglang_kvshare.plan import BoolArray, Int64Array

#: A slot of the pool's padding page: what is written there is never read.
PADDING_SLOT = 0


@dataclass(frozen=True)
class KeptRows:
    """The rows of a batch that run.

    Attributes:
        rows: int64 ``[k]``, indices into the extend's rows, ascending; on the host.
        row_positions: int64 ``[k]``, position of each in its request; on the host.
        cache_loc: int64 ``[k]``, slot that each writes its KV to.
        counts: kept rows of each request, all above 0.
        kv_lengths: tokens of each request's KV row, this extend included.
    """

    rows: Int64Array
    row_positions: Int64Array
    cache_loc: torch.Tensor
    counts: list[int]
    kv_lengths: list[int]

    @cached_property
    def positions(self) -> torch.Tensor:
        """``row_positions`` on the device."""
        return upload(self.cache_loc.device, self.row_positions)[0]

    @cached_property
    def block_ends(self) -> list[list[int]]:
        """See :func:`sglang_kvshare.attention.position_mask.last_positions`, for each request."""
        parts = np.split(self.row_positions, np.cumsum(self.counts)[:-1])
        return [last_positions(torch.from_numpy(part)) for part in parts]

    def part(self, request: int) -> slice:
        """The rows of one request, among the kept ones."""
        begin = sum(self.counts[:request])
        return slice(begin, begin + self.counts[request])

    def within(self, others: KeptRows) -> torch.Tensor:
        """int64 ``[k]`` on the device: where each of these rows is among ``others``."""
        index = np.searchsorted(others.rows, self.rows)
        return upload(self.cache_loc.device, index)[0]


@dataclass(frozen=True)
class Extend:
    """The rows of a batch's extend, request after request.

    Attributes:
        starts: first position of each request that runs.
        counts: rows of each request.
        cache_loc: int64 ``[rows]``, slot of each row.
    """

    starts: Sequence[int]
    counts: Sequence[int]
    cache_loc: torch.Tensor

    @classmethod
    def of(cls, batch: Any) -> Extend:
        return cls(batch.prefix_lens, batch.extend_lens, batch.out_cache_loc)

    @property
    def kv_lengths(self) -> list[int]:
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    def keep(self, kept: BoolArray) -> KeptRows:
        """The rows that ``kept`` (bool ``[rows]``) marks.

        A request of which nothing is marked still needs one row to carry it through the layers. Its
        logits are dropped, and its KV goes to the padding page: the placed values stay.
        """
        counts = np.asarray(self.counts, dtype=np.int64)
        ends = np.cumsum(counts)
        kept_counts = np.add.reduceat(kept.astype(np.int64), ends - counts)
        carriers = ends[kept_counts == 0] - 1
        if carriers.shape[0]:
            kept = kept.copy()
            kept[carriers] = True
        rows = np.flatnonzero(kept)
        offsets = np.repeat(np.asarray(self.starts, dtype=np.int64) - (ends - counts), counts)
        device = self.cache_loc.device
        index, at = upload(device, rows, np.searchsorted(rows, carriers))
        cache_loc = self.cache_loc.index_select(0, index)
        if carriers.shape[0]:
            cache_loc = cache_loc.index_fill(0, at, PADDING_SLOT)
        return KeptRows(
            rows=rows,
            row_positions=rows + offsets[rows],
            cache_loc=cache_loc,
            counts=np.maximum(kept_counts, 1).tolist(),
            kv_lengths=self.kv_lengths,
        )
