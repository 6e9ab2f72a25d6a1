"""Kept rows on FlashInfer's paged prefill: as runs, with a packed mask, or in two parts.

The wrappers are our own, so that nothing of the stock backend's plans is touched, and share its
float workspace: that one is used within a launch only, and launches follow each other on one
stream. Every slot is a page of its own, as in the stock plan.

    narrowing        plan: form, slots of the entries, mask bits      once
    each layer       one launch, or two and a merge

``plan`` is given what is on the host anyway and waits for nothing. It copies what it has worked out
from its pinned buffer without waiting either, so that a wrapper must not plan again while that copy
is under way: wrappers take turns, and each remembers when its copy is done.

Seams: ``FlashInferAttnBackend.workspace_buffer``, ``prefill_backend`` and
``prefill_split_tile_size``; of FlashInfer the wrapper's ``plan``, ``run`` and ``_mask_indptr_buf``
(:mod:`sglang_kvshare.engine.flashinfer_contract`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_kvshare.attention.kernels.pack_mask import PackedMask, pack_mask
from sglang_kvshare.attention.launch_choice import AttentionCosts, choose
from sglang_kvshare.attention.launches import AttentionPlan, Launch, Sees
from sglang_kvshare.attention.merging import merge_parts
from sglang_kvshare.engine.row_attention import LayerRows, Narrowed

#: Plans that may be under way at a time: one that runs, one that is being made.
TURNS = 2


@dataclass(eq=False)
class _Wrapper:
    """A wrapper, and when its last plan has left the pinned buffer."""

    wrapper: Any
    copied: torch.cuda.Event | None = None

    def plan(self, device: torch.device, *args: Any, **kwargs: Any) -> None:
        if self.copied is not None:
            # Two plans ago: long done, but for a host that runs far ahead.
            self.copied.synchronize()
        self.wrapper.plan(*args, **kwargs)
        if device.type == "cuda":
            self.copied = self.copied or torch.cuda.Event()
            self.copied.record()


@dataclass(eq=False)
class _Turn:
    """The wrappers of one plan, as many as it has launches; made when first needed."""

    make: Callable[[], Any]
    wrappers: list[_Wrapper] = field(default_factory=list)

    def wrapper(self, number: int) -> _Wrapper:
        while number >= len(self.wrappers):
            self.wrappers.append(_Wrapper(self.make()))
        return self.wrappers[number]


class FlashInferRows:
    """The adapter of ``--attention-backend flashinfer``.

    Args:
        backend: SGLang's ``FlashInferAttnBackend``.
        make_wrapper: makes a ``BatchPrefillWithPagedKVCacheWrapper``.
        pack: makes a mask on the device.
    """

    def __init__(
        self,
        backend: Any,
        make_wrapper: Callable[[], Any],
        costs: AttentionCosts | None = None,
        pack: Callable[..., PackedMask] = pack_mask,
    ) -> None:
        self._backend = backend
        self._costs = costs or AttentionCosts()
        self._pack = pack
        self._turns = [_Turn(make_wrapper) for _ in range(TURNS)]
        self._planned: Narrowed | None = None
        self._plan: AttentionPlan | None = None

    def attend(self, narrowed: Narrowed, rows: LayerRows) -> torch.Tensor:
        """See :class:`sglang_kvshare.engine.row_attention.RowAttention`."""
        if self._planned is not narrowed:
            self._make_plan(narrowed, rows)
        assert self._plan is not None
        layer, turn = rows.layer, self._turns[0]
        queries = rows.by_head().contiguous()
        pool = narrowed.reader.pool.get_kv_buffer(layer.layer_id)
        scales = {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        if len(self._plan.launches) == 1:
            out = turn.wrapper(0).wrapper.run(queries, pool, **scales)
        else:
            parts = [
                turn.wrapper(number).wrapper.run(queries, pool, return_lse=True, **scales)
                for number in range(len(self._plan.launches))
            ]
            out = merge_parts(*parts[0], *parts[1])
        return out.flatten(1)

    def end(self) -> None:
        """The wrappers stay for the next forward."""
        self._planned = self._plan = None

    def _make_plan(self, narrowed: Narrowed, rows: LayerRows) -> None:
        self._planned = None
        layer, kept = rows.layer, narrowed.kept
        group = layer.tp_q_head_num // layer.tp_k_head_num
        plan = choose(kept.row_positions, kept.counts, group=group, costs=self._costs)
        # What ran last keeps its plan until it has run.
        self._turns.append(self._turns.pop(0))
        for number, launch in enumerate(plan.launches):
            self._plan_launch(self._turns[0].wrapper(number), plan, launch, narrowed, rows)
        self._planned, self._plan = narrowed, plan

    def _plan_launch(
        self,
        wrapper: _Wrapper,
        plan: AttentionPlan,
        launch: Launch,
        narrowed: Narrowed,
        rows: LayerRows,
    ) -> None:
        layer, device = rows.layer, rows.q.device
        row_indptr = torch.from_numpy(launch.row_indptr)
        key_indptr = torch.zeros(launch.entries + 1, dtype=torch.int32)
        torch.cumsum(torch.from_numpy(launch.key_counts), 0, out=key_indptr[1:])
        mask: PackedMask | None = None
        if launch.sees is Sees.MASKED:
            key_starts = np.repeat(launch.key_starts, launch.row_counts)
            in_entry = torch.from_numpy(plan.positions - key_starts)
            mask = self._pack(
                in_entry.to(device, non_blocking=True),
                launch.row_counts.tolist(),
                launch.key_counts.tolist(),
            )
        wrapper.plan(
            device,
            row_indptr.to(torch.int32),
            key_indptr,
            listed_slots(launch, narrowed),
            torch.ones(launch.entries, dtype=torch.int32),
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.qk_head_dim,
            1,
            packed_custom_mask=None if mask is None else mask.bits,
            causal=launch.sees is Sees.CAUSAL,
            sm_scale=layer.scaling,
            q_data_type=rows.q.dtype,
            kv_data_type=narrowed.reader.pool.get_key_buffer(layer.layer_id).dtype,
            non_blocking=True,
            fixed_split_size=self._backend.prefill_split_tile_size,
        )
        if mask is not None:
            # `plan` counts bits where the kernel takes bytes when it is given a packed mask, so
            # that only the first entry's would be found (flashinfer pull request 2201).
            wrapper.wrapper._mask_indptr_buf = mask.indptr


def listed_slots(launch: Launch, narrowed: Narrowed) -> torch.Tensor:
    """int32 ``[listed_keys]`` on the device: the slots of each entry's keys, entry after entry."""
    device = narrowed.kept.cache_loc.device
    lengths = np.array([len(slots) for slots in narrowed.slots], dtype=np.int64)
    begins = np.cumsum(lengths) - lengths
    counts = launch.key_counts
    # Of each entry: from its place in the list to where its keys begin among all slots.
    shift = begins[launch.requests] + launch.key_starts - (np.cumsum(counts) - counts)
    on_device = torch.from_numpy(np.stack([shift, counts])).to(device, non_blocking=True)
    total = launch.listed_keys
    index = torch.repeat_interleave(on_device[0], on_device[1], output_size=total)
    index += torch.arange(total, device=device)
    return torch.cat(list(narrowed.slots)).to(torch.int32).index_select(0, index)
