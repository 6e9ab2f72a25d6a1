"""At the check layer: how far cached values are off, and how much the probes attend to them.

    keys       0 ...... prefix ...... | reused, new, reused ... | probes
               stored                   fresh                     fresh
    probes     attend to all keys up to their own position
    told       of each reused token: its share of that attention, and how far what is stored
               of it is from what was just computed

Two launches: the first finds what the probes' softmax divides by, from a read of every key; the
second reads what is fresh and what is stored of each reused token once, for all that is told.
Its definitions are those of ``attention/attention_mass.py`` and of the signals of
``recompute/selectors``: DHD (arXiv 2503.16525) multiplies ``attention`` and ``value_l1``,
CacheBlend (arXiv 2405.16444) takes ``value_l2``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvshare.attention.attention_mass import attention_mass, influence
from sglang_kvshare.attention.kernels.slots import gather
from sglang_kvshare.attention.kernels.stored_words import POOL_DTYPES
from sglang_kvshare.attention.kernels.where import takes_kernel

#: Rows of what :func:`check_scores` returns.
TOLD = ("attention", "value_l1", "value_l2", "value_size", "key_l2")
_MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class CheckLayer:
    """What the check layer of one request has before it writes to the pool.

    Attributes:
        query: ``[rows, query_heads, head_dim]`` of the rows that run, those of other requests
            included.
        fresh_keys: ``[rows, kv_heads, head_dim]`` of the same rows, rotated.
        fresh_values: ``[rows, kv_heads, value_dim]``.
        stored_keys, stored_values: the layer's pool, ``[slots, kv_heads, dim]``, contiguous.
        slots: int64 ``[tokens]``, the request's KV row.
        fresh_rows: int32 ``[tokens]``, the row of each position, or -1 where it does not run and
            what is stored counts.
        probe_rows: int64 ``[probes]``, the rows that look.
        probe_positions: int64 ``[probes]``, ascending, where they are in the request.
        reused: int64 ``[reused]``, positions to be told of; all run.
        scale: factor on the logits.
        key_scale, value_scale: what stored numbers are multiplied by; 1 but for FP8 pools.
    """

    query: torch.Tensor
    fresh_keys: torch.Tensor
    fresh_values: torch.Tensor
    stored_keys: torch.Tensor
    stored_values: torch.Tensor
    slots: torch.Tensor
    fresh_rows: torch.Tensor
    probe_rows: torch.Tensor
    probe_positions: torch.Tensor
    reused: torch.Tensor
    scale: float
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True)
class CheckScores:
    """Each fp32 ``[reused]``, summed over heads and dimensions.

    Attributes:
        attention: received from all probes, mean over query heads.
        value_l1, value_l2: absolute and squared difference of the stored value and the fresh one.
        value_size: absolute fresh value.
        key_l2: squared difference of the keys.
    """

    attention: torch.Tensor
    value_l1: torch.Tensor
    value_l2: torch.Tensor
    value_size: torch.Tensor
    key_l2: torch.Tensor


def check_scores(
    layer: CheckLayer, out: torch.Tensor | None = None, *, kernel: bool | None = None
) -> CheckScores:
    """
    Args:
        out: fp32 ``[5, reused]``, contiguous, to spare an allocation.
        kernel: see :func:`sglang_kvshare.attention.kernels.where.takes_kernel`.

    Raises:
        ValueError: a shape, stride or dtype that the kernel does not read.
    """
    _check(layer)
    reused = layer.reused.shape[0]
    if out is None:
        out = torch.empty(len(TOLD), reused, dtype=torch.float32, device=layer.query.device)
    if out.shape != (len(TOLD), reused) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out of shape {tuple(out.shape)}, {out.dtype}")
    if reused and takes_kernel(layer.query, kernel):
        from sglang_kvshare.attention.kernels.device import check_scores as device

        device.run(layer, out)
    else:
        check_scores_reference(layer, out)
    return CheckScores(*out.unbind(0))


def check_scores_reference(layer: CheckLayer, out: torch.Tensor) -> None:
    """:func:`check_scores` in PyTorch; ``out`` is fp32 ``[5, reused]``, ordered as ``TOLD``."""
    if layer.probe_rows.shape[0]:
        keys = _as_it_will_be(layer, layer.stored_keys, layer.fresh_keys, layer.key_scale)
        query = layer.query.index_select(0, layer.probe_rows)
        mass = attention_mass(query, keys, layer.probe_positions, scale=layer.scale)
        out[0] = mass.index_select(0, layer.reused)
    else:
        # Nobody looks, and no key but the reused ones need be read.
        out[0] = 0
    change_k, change_v, fresh_v = _changes(layer)
    out[1] = change_v.abs().sum((1, 2))
    out[2] = change_v.square().sum((1, 2))
    out[3] = fresh_v.abs().sum((1, 2))
    out[4] = change_k.square().sum((1, 2))


def influence_of(
    layer: CheckLayer, probe_rows: torch.Tensor, probe_positions: torch.Tensor
) -> torch.Tensor:
    """:func:`sglang_kvshare.attention.attention_mass.influence` of the reused tokens' changes on
    these probes: fp32 ``[reused]``, in PyTorch on every device."""
    keys = _as_it_will_be(layer, layer.stored_keys, layer.fresh_keys, layer.key_scale)
    values = _as_it_will_be(layer, layer.stored_values, layer.fresh_values, layer.value_scale)
    change_k, change_v, _ = _changes(layer)
    told = influence(
        layer.query.index_select(0, probe_rows),
        keys,
        values,
        torch.zeros_like(keys).index_copy_(0, layer.reused, change_k),
        torch.zeros_like(values).index_copy_(0, layer.reused, change_v),
        probe_positions,
        scale=layer.scale,
    )
    return told.index_select(0, layer.reused)


def _as_it_will_be(
    layer: CheckLayer, stored: torch.Tensor, fresh: torch.Tensor, scale: float
) -> torch.Tensor:
    """fp32 ``[tokens, kv_heads, dim]`` of a request: fresh where rows run, else what is stored."""
    where = torch.nonzero(layer.fresh_rows >= 0).squeeze(1)
    running = layer.fresh_rows.index_select(0, where).long()
    made = _stored(stored, layer.slots, scale)
    return made.index_copy_(0, where, fresh.index_select(0, running).float())


def _changes(layer: CheckLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the reused tokens: stored less fresh keys, the same of values, and fresh values."""
    rows = layer.fresh_rows.index_select(0, layer.reused).long()
    slots = layer.slots.index_select(0, layer.reused)
    keys, values = (x.index_select(0, rows).float() for x in (layer.fresh_keys, layer.fresh_values))
    return (
        _stored(layer.stored_keys, slots, layer.key_scale) - keys,
        _stored(layer.stored_values, slots, layer.value_scale) - values,
        values,
    )


def _stored(buffer: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32 copy of ``buffer[slots]`` times ``scale``."""
    return gather(buffer, slots).float() * scale


def _check(layer: CheckLayer) -> None:
    for fresh in (layer.query, layer.fresh_keys, layer.fresh_values):
        if fresh.dim() != 3 or fresh.dtype not in _MODEL_DTYPES or fresh.dtype != layer.query.dtype:
            raise ValueError(f"rows of shape {tuple(fresh.shape)}, {fresh.dtype}")
        if fresh.stride(2) != 1 or fresh.stride(1) != fresh.shape[2]:
            raise ValueError(f"rows of shape {tuple(fresh.shape)}, stride {fresh.stride()}")
    heads = layer.fresh_keys.shape[1]
    if layer.query.shape[1] % heads or layer.query.shape[2] != layer.fresh_keys.shape[2]:
        raise ValueError(
            f"{layer.query.shape[1]} query heads of {layer.query.shape[2]} for {heads} key heads "
            f"of {layer.fresh_keys.shape[2]}"
        )
    pairs = (layer.stored_keys, layer.fresh_keys), (layer.stored_values, layer.fresh_values)
    for stored, fresh in pairs:
        if stored.dtype not in POOL_DTYPES or not stored.is_contiguous():
            raise ValueError(f"a KV buffer of {stored.dtype}, stride {stored.stride()}")
        if stored.shape[1:] != fresh.shape[1:]:
            raise ValueError(f"a KV buffer of {stored.shape} for rows of {fresh.shape}")
