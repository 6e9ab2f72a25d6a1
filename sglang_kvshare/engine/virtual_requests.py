"""Kept rows as virtual requests of a stock backend that knows no masks (Triton, FA3).

    kept rows of request 7     3 4 5       9      11 12
    batch entries              KV row 7    KV row 7     KV row 7
      prefix, rows, length     3, 3, 6     9, 1, 10     11, 2, 13

Every entry reads the same row of slots. What stands before its first row was written before, by
this forward or by an earlier one; its own rows are given along, as the stock extend does it.

Seams: ``AttentionBackend.init_forward_metadata`` and ``forward`` with a ``ForwardBatch`` of these
entries; ``forward_metadata``, what the backend has planned, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sglang_kvshare.attention.launches import Launch, in_runs
from sglang_kvshare.engine.row_attention import (
    LayerRows,
    Narrowed,
    PositionMaskRows,
    RowAttention,
)

#: Buffers of a backend that hold one number for each entry and one more, whatever the batch; the
#: next plan writes into them.
ENTRY_BUFFERS = ("kv_indptr", "qo_indptr")
#: Bytes that a stock plan takes for one key of one entry: Triton's list of slots is int64, a page
#: table is int32 and as wide as the longest entry.
KEY_BYTES = 8


@dataclass(frozen=True)
class EntryLimits:
    """How much a backend is asked to plan for one narrowing.

    Attributes:
        groups: launches a layer; the entries that do not fit into the backend's buffers go into a
            further one. Each costs a launch in every layer, and has few entries to fill the device.
        key_bytes: of all lists and tables of slots. Beside the KV pool some GB are left free, and
            activations need most of them.
    """

    groups: int = 4
    key_bytes: int = 256 << 20


@dataclass(frozen=True, eq=False)
class _Group:
    """Entries that are launched together.

    Attributes:
        rows: where their rows are among the kept ones.
        batch: ``ForwardBatch`` of the entries.
        metadata: what the backend has planned for it.
    """

    rows: slice
    batch: Any
    metadata: Any


class VirtualRequests:
    """An adapter for a backend that reads the prefix of an entry from the pool.

    Args:
        backend: the stock backend of extends.
        otherwise: attends where the entries are over the limits.
    """

    def __init__(
        self,
        backend: Any,
        limits: EntryLimits | None = None,
        otherwise: RowAttention | None = None,
    ) -> None:
        self._backend = backend
        self._limits = limits or EntryLimits()
        self._otherwise = otherwise or PositionMaskRows()
        self._planned: Narrowed | None = None
        self._groups: list[_Group] = []
        self._stock_metadata: Any = None

    def attend(self, narrowed: Narrowed, rows: LayerRows) -> torch.Tensor:
        """See :class:`sglang_kvshare.engine.row_attention.RowAttention`."""
        if self._planned is not narrowed:
            self._plan(narrowed)
        if not self._groups:
            return self._otherwise.attend(narrowed, rows)
        out = [self._launch(group, rows) for group in self._groups]
        return out[0] if len(out) == 1 else torch.cat(out)

    def end(self) -> None:
        """The backend has again what it had planned for the whole batch."""
        if self._planned is not None:
            self._backend.forward_metadata = self._stock_metadata
        self._planned, self._groups, self._stock_metadata = None, [], None
        self._otherwise.end()

    def _launch(self, group: _Group, rows: LayerRows) -> torch.Tensor:
        self._backend.forward_metadata = group.metadata
        part = group.rows
        return self._backend.forward(
            rows.q[part], rows.k[part], rows.v[part], rows.layer, group.batch, save_kv_cache=False
        )

    def _plan(self, narrowed: Narrowed) -> None:
        if self._planned is None:
            self._stock_metadata = getattr(self._backend, "forward_metadata", None)
        self._planned = narrowed
        kept = narrowed.kept
        (launch,) = in_runs(kept.row_positions, kept.counts).launches
        cuts = entry_groups(launch, self._capacity(), self._limits)
        self._groups = [self._group(narrowed, launch, begin, end) for begin, end in pairwise(cuts)]

    def _capacity(self) -> int | None:
        """Entries that the backend's buffers take."""
        buffers = (getattr(self._backend, name, None) for name in ENTRY_BUFFERS)
        sizes = [len(buffer) - 1 for buffer in buffers if torch.is_tensor(buffer)]
        return min(sizes, default=None)

    def _group(self, narrowed: Narrowed, launch: Launch, begin: int, end: int) -> _Group:
        rows = slice(int(launch.row_indptr[begin]), int(launch.row_indptr[end]))
        batch = batch_of_entries(narrowed, launch, begin, end)
        self._backend.init_forward_metadata(batch)
        return _Group(rows, batch, _detached(getattr(self._backend, "forward_metadata", None)))


def entry_groups(launch: Launch, capacity: int | None, limits: EntryLimits) -> list[int]:
    """Where groups of entries begin, and where the last one ends; empty when over the limits.

    Args:
        capacity: entries of one launch; ``None`` for any number.
    """
    entries = launch.entries
    groups = 1 if capacity is None else -(-entries // capacity)
    # A page table is as wide as the longest entry of its group.
    tables = int(launch.key_ends.max()) * entries
    if groups > limits.groups or tables * KEY_BYTES > limits.key_bytes:
        return []
    return [entries * number // groups for number in range(groups + 1)]


def batch_of_entries(narrowed: Narrowed, launch: Launch, begin: int, end: int) -> Any:
    """A ``ForwardBatch`` that tells a backend of the entries ``[begin, end)`` instead of the
    requests."""
    batch, kept = narrowed.batch, narrowed.kept
    device = kept.cache_loc.device
    first, last = int(launch.row_indptr[begin]), int(launch.row_indptr[end])
    counts = launch.row_counts[begin:end]
    lengths = launch.key_ends[begin:end]
    prefixes = lengths - counts
    requests = torch.from_numpy(launch.requests[begin:end]).to(device, non_blocking=True)

    def on_device(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(dtype).to(device, non_blocking=True)

    seq_lens = on_device(lengths, batch.seq_lens.dtype)
    return replace(
        batch,
        batch_size=end - begin,
        req_pool_indices=batch.req_pool_indices.index_select(0, requests),
        req_pool_indices_cpu=None,
        seq_lens=seq_lens,
        seq_lens_cpu=torch.from_numpy(lengths),
        seq_lens_sum=int(lengths.sum()),
        orig_seq_lens=seq_lens,
        positions=kept.positions[first:last],
        out_cache_loc=kept.cache_loc[first:last],
        extend_num_tokens=last - first,
        extend_seq_lens=on_device(counts, torch.int32),
        extend_seq_lens_cpu=counts.tolist(),
        extend_prefix_lens=on_device(prefixes, torch.int32),
        extend_prefix_lens_cpu=prefixes.tolist(),
        extend_start_loc=on_device(launch.row_indptr[begin:end] - first, torch.int32),
    )


def _detached(metadata: Any) -> Any:
    """``metadata`` with its own copies of what the backend would overwrite at the next plan."""
    if not is_dataclass(metadata) or isinstance(metadata, type):
        return metadata
    return replace(metadata, **dict(_copies(metadata)))


def _copies(metadata: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if field.name in ENTRY_BUFFERS and torch.is_tensor(value):
            yield field.name, value.clone()
