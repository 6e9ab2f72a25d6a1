"""Narrowed attention of a layer, timed beside the causal kernel on the same number of rows.

Scattered rows see half of the prompt on average, the last rows of a prompt nearly all. So that both
do the same work, the causal kernel is given a KV row whose end its rows see as many keys of in all:

    narrowed    rows at p_0 .. p_r of n keys         sum of (p + 1) pairs
    causal      the last r rows of m keys            the same, by the choice of m
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvshare_eval.device.attention_rows import RowsCase
from kvshare_eval.device.flashinfer_setup import MakeWrapper, adapter
from kvshare_eval.device.floors import Work
from kvshare_eval.device.kv_pool import PoolBackend
from kvshare_eval.device.timings import Spread, device_ms
from sglang_kvshare.attention.launch_choice import choose
from sglang_kvshare.engine.row_attention import PositionMaskRows


@dataclass(frozen=True)
class AttentionTimes:
    """
    Attributes:
        narrowed: the rows by the server's adapter; by PyTorch where FlashInfer is not there.
        naive: by PyTorch.
        causal: the causal kernel on as many rows and pairs.
        form: that was taken.
    """

    narrowed: Spread
    naive: Spread
    causal: Spread
    form: str
    work: Work


def attention_times(case: RowsCase, make: MakeWrapper | None, device: str) -> AttentionTimes:
    backend = PoolBackend.of(case.pool)
    plain = PositionMaskRows()
    naive = device_ms(lambda: case.attend(plain), device, warm_up=1, runs=5)
    form = choose(case.positions, case.narrowed.kept.counts, group=case.shape.group).form.value
    if make is None:
        narrowed, form = naive, "PyTorch"
        causal = device_ms(_sdpa_causal(case), device)
    else:
        rows = adapter(make, backend)
        # Planned once for all layers: what is timed is one of them.
        narrowed = device_ms(lambda: case.attend(rows), device)
        causal = device_ms(_flashinfer_causal(case, make, backend), device)
    return AttentionTimes(narrowed, naive, causal, form, work_of(case))


def work_of(case: RowsCase) -> Work:
    """Pairs of rows and keys; every key and value once, and each row's query and output."""
    itemsize = case.pool.dtype.itemsize
    seen = int(case.positions[-1]) + 1
    moved = seen * case.shape.token_bytes(itemsize) + 2 * case.query.nbytes
    return Work(case.pairs * case.shape.pair_operations, moved)


def equal_keys(case: RowsCase) -> int:
    """Keys of a row whose last rows, as many as the case has, see as many pairs."""
    rows = len(case.positions)
    return min(len(case.slots), max(rows, round(case.pairs / rows + (rows - 1) / 2)))


def _sdpa_causal(case: RowsCase) -> Callable[[], torch.Tensor]:
    queries, keys, values = case.parts()
    seen = equal_keys(case)
    heads = [x.movedim(0, 1).unsqueeze(0) for x in (queries, keys[:seen], values[:seen])]
    mask = causal_lower_right(len(queries), seen)
    return lambda: scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=case.shape.scale, enable_gqa=True
    )


def _flashinfer_causal(
    case: RowsCase, make: MakeWrapper, backend: PoolBackend
) -> Callable[[], torch.Tensor]:
    """The stock kernel: one request, no mask of bits."""
    shape, seen = case.shape, equal_keys(case)
    queries = case.parts()[0].contiguous()
    wrapper = make(backend.workspace_buffer)
    wrapper.plan(
        torch.tensor([0, len(queries)], dtype=torch.int32),
        torch.tensor([0, seen], dtype=torch.int32),
        case.slots[:seen].to(torch.int32),
        torch.ones(1, dtype=torch.int32),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        1,
        causal=True,
        sm_scale=shape.scale,
        q_data_type=queries.dtype,
        kv_data_type=case.pool.dtype,
    )
    pool = case.pool.get_kv_buffer(0)
    return lambda: wrapper.run(queries, pool)
