"""See :mod:`sglang_kvshare.attention.kernels.check_scores`.

Query rows of one key head are the probes times the query heads that share it, probe after probe:

    row         probe 0: head 0, head 1, .. | probe 1: head 0, ..
    first       grid: splits of the keys  x  key heads  x  blocks of rows; of each row, the
                logarithm of what its softmax divides by, over the keys of the split
    second      grid: blocks of reused tokens; key head by key head: the differences, and the column
                sums of the softmax, from logits that are computed again
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_kvshare.attention.kernels.check_scores import TOLD, CheckLayer
from sglang_kvshare.attention.kernels.device.numbers import (
    FORMATS,
    UNSIGNED,
    as_bits,
    by_bits,
    widened,
)

#: Keys of a split at least, and splits at most: each block of tokens reads all of them.
_SPLIT_TOKENS = 256
_MOST_SPLITS = 32
#: Rows and keys of a tile of the first kernel; rows and reused tokens of one of the second.
_BLOCK_ROWS, _BLOCK_KEYS = 64, 64
_SCORE_BLOCK_ROWS, _BLOCK_TOKENS = 32, 32
#: A product of matrices has 16 rows, columns and terms at least.
_LEAST_BLOCK = 16
#: Of the first kernel, and of the second, which holds more.
NUM_WARPS, SCORE_WARPS = 4, 8


def constants(
    model_dtype: torch.dtype,
    pool_dtype: torch.dtype,
    query_heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    bits: bool,
    interpreted: bool,
) -> dict[str, Any]:
    """What both kernels compile in.

    Args:
        bits: see :func:`sglang_kvshare.attention.kernels.device.numbers.by_bits`.
        interpreted: Triton's interpreter has no products of bf16.
    """
    narrow = model_dtype != torch.float32 and not interpreted
    # What a pool of another dtype holds may not fit the model's; FP8 fits both of 16 bits.
    narrow &= pool_dtype == model_dtype or pool_dtype.itemsize == 1
    return {
        "KV_HEADS": kv_heads,
        "GROUP": query_heads // kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "MODEL": FORMATS[model_dtype],
        "MODEL_WORD": UNSIGNED[8 * model_dtype.itemsize],
        "POOL": FORMATS[pool_dtype],
        "POOL_WORD": UNSIGNED[8 * pool_dtype.itemsize],
        "BY_BITS": bits,
        "PRODUCTS": {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[model_dtype]
        if narrow
        else tl.float32,
        "BLOCK_DIM": max(_LEAST_BLOCK, triton.next_power_of_2(key_dim)),
    }


def normaliser_constants(rows: int) -> dict[str, int]:
    """What the first kernel compiles in beside :func:`constants`; ``rows`` of one key head."""
    return {"BLOCK_ROWS": _row_block(rows, _BLOCK_ROWS), "BLOCK_KEYS": _BLOCK_KEYS}


def score_constants(rows: int, value_dim: int, splits: int) -> dict[str, int]:
    """What the second kernel compiles in beside :func:`constants`."""
    return {
        "BLOCK_ROWS": _row_block(rows, _SCORE_BLOCK_ROWS),
        "BLOCK_VALUE": triton.next_power_of_2(value_dim),
        "BLOCK_SPLITS": triton.next_power_of_2(splits),
        "BLOCK_TOKENS": _BLOCK_TOKENS,
    }


def _row_block(rows: int, most: int) -> int:
    return int(min(most, max(_LEAST_BLOCK, triton.next_power_of_2(max(rows, 1)))))


def splits_of(tokens: int) -> tuple[int, int]:
    """How many splits of how many keys each."""
    size = max(_SPLIT_TOKENS, triton.cdiv(tokens, _MOST_SPLITS))
    size = triton.cdiv(size, _BLOCK_KEYS) * _BLOCK_KEYS
    return triton.cdiv(tokens, size), size


def run(layer: CheckLayer, out: torch.Tensor) -> None:
    """Launch twice; ``out`` is fp32 ``[5, reused]``."""
    _, query_heads, key_dim = layer.query.shape
    kv_heads, value_dim = layer.fresh_values.shape[1:]
    probes, tokens, reused = (x.shape[0] for x in (layer.probe_rows, layer.slots, layer.reused))
    assert out.shape == (len(TOLD), reused)
    device = layer.query.device
    compiled_in = constants(
        layer.query.dtype,
        layer.stored_keys.dtype,
        query_heads,
        kv_heads,
        key_dim,
        value_dim,
        by_bits(layer.stored_keys.dtype, device),
        device.type != "cuda",
    )
    rows = probes * (query_heads // kv_heads)
    splits, split_tokens = splits_of(tokens)
    sums = torch.empty(splits, kv_heads, rows, dtype=torch.float32, device=device)
    first = normaliser_constants(rows)
    second = score_constants(rows, value_dim, splits)
    blocks = triton.cdiv(rows, first["BLOCK_ROWS"])
    if blocks:
        normalisers_kernel[(splits, kv_heads, blocks)](
            layer.query,
            layer.fresh_keys,
            as_bits(layer.stored_keys),
            layer.slots,
            layer.fresh_rows,
            layer.probe_rows,
            layer.probe_positions,
            sums,
            layer.query.stride(0),
            layer.fresh_keys.stride(0),
            rows,
            tokens,
            split_tokens,
            layer.scale,
            layer.key_scale,
            **compiled_in,
            **first,
            num_warps=NUM_WARPS,
        )
    scores_kernel[(triton.cdiv(reused, second["BLOCK_TOKENS"]),)](
        layer.query,
        layer.fresh_keys,
        layer.fresh_values,
        as_bits(layer.stored_keys),
        as_bits(layer.stored_values),
        layer.slots,
        layer.fresh_rows,
        layer.probe_rows,
        layer.probe_positions,
        layer.reused,
        sums,
        out,
        layer.query.stride(0),
        layer.fresh_keys.stride(0),
        layer.fresh_values.stride(0),
        rows,
        reused,
        splits,
        layer.scale,
        layer.key_scale,
        layer.value_scale,
        **compiled_in,
        **second,
        num_warps=SCORE_WARPS,
    )


@triton.jit
def _queries(
    query,
    probe_rows,
    probe_positions,
    query_stride,
    row,
    rows,
    kv_head,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    MODEL: tl.constexpr,
    MODEL_WORD: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Queries ``[row, dim]`` for products, and the last position that each sees."""
    live = row < rows
    probe, head = row // GROUP, kv_head * GROUP + row % GROUP
    at = tl.load(probe_rows + probe, mask=live, other=0)
    last = tl.load(probe_positions + probe, mask=live, other=-1)
    dim = tl.arange(0, BLOCK_DIM)
    place = (at * query_stride + head * KEY_DIM)[:, None] + dim[None, :]
    seen = live[:, None] & (dim < KEY_DIM)[None, :]
    bits = tl.load(query.to(tl.pointer_type(MODEL_WORD)) + place, mask=seen, other=0)
    return widened(bits, MODEL, False).to(PRODUCTS), last


@triton.jit
def normalisers_kernel(
    query,
    fresh_keys,
    stored_keys,
    slots,
    fresh_rows,
    probe_rows,
    probe_positions,
    sums,
    query_stride,
    key_stride,
    rows,
    tokens,
    split_tokens,
    scale,
    key_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MODEL: tl.constexpr,
    MODEL_WORD: tl.constexpr,
    POOL: tl.constexpr,
    POOL_WORD: tl.constexpr,
    BY_BITS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """``sums``: fp32 ``[splits, kv_heads, rows]``, log of the sum of exponentials; -inf of none."""
    split, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    q, last = _queries(
        query,
        probe_rows,
        probe_positions,
        query_stride,
        row,
        rows,
        kv_head,
        GROUP,
        KEY_DIM,
        MODEL,
        MODEL_WORD,
        PRODUCTS,
        BLOCK_DIM,
    )
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    within = dim < KEY_DIM
    most = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    begin = split * split_tokens
    for start in range(begin, min(begin + split_tokens, tokens), BLOCK_KEYS):
        position = start + tl.arange(0, BLOCK_KEYS)
        there = position < tokens
        fresh = tl.load(fresh_rows + position, mask=there, other=0).to(tl.int64)
        slot = tl.load(slots + position, mask=there, other=0)
        runs = fresh >= 0
        # Of each key one of the two is read.
        new = tl.load(
            fresh_keys.to(tl.pointer_type(MODEL_WORD))
            + (fresh * key_stride + kv_head * KEY_DIM)[:, None]
            + dim,
            mask=(there & runs)[:, None] & within,
            other=0,
        )
        old = tl.load(
            stored_keys.to(tl.pointer_type(POOL_WORD))
            + ((slot * KV_HEADS + kv_head) * KEY_DIM)[:, None]
            + dim,
            mask=(there & (fresh < 0))[:, None] & within,
            other=0,
        )
        key = tl.where(runs[:, None], widened(new, MODEL, False), widened(old, POOL, BY_BITS))
        logits = tl.dot(q, tl.trans(key.to(PRODUCTS)), input_precision="ieee")
        logits *= scale * tl.where(runs, 1.0, key_scale)[None, :]
        logits = tl.where(
            there[None, :] & (position[None, :] <= last[:, None]), logits, float("-inf")
        )
        higher = tl.maximum(most, tl.max(logits, 1))
        # A row that has seen nothing yet has no difference to take.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        most = higher
    # Of a row that has seen nothing, most is -inf.
    told = most + tl.log(tl.where(total > 0, total, 1.0))
    tl.store(sums + (split * KV_HEADS + kv_head) * rows + row, told, mask=row < rows)


@triton.jit
def scores_kernel(
    query,
    fresh_keys,
    fresh_values,
    stored_keys,
    stored_values,
    slots,
    fresh_rows,
    probe_rows,
    probe_positions,
    reused,
    sums,
    out,
    query_stride,
    key_stride,
    value_stride,
    rows,
    count,
    splits,
    scale,
    key_scale,
    value_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MODEL: tl.constexpr,
    MODEL_WORD: tl.constexpr,
    POOL: tl.constexpr,
    POOL_WORD: tl.constexpr,
    BY_BITS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """``out``: fp32 ``[5, count]``, in the order of ``TOLD``."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    there = token < count
    position = tl.load(reused + token, mask=there, other=0)
    slot = tl.load(slots + position, mask=there, other=0)
    fresh = tl.load(fresh_rows + position, mask=there, other=0).to(tl.int64)
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    wide = tl.arange(0, BLOCK_VALUE)[None, :]
    split = tl.arange(0, BLOCK_SPLITS)[:, None]

    mass = tl.zeros([BLOCK_TOKENS], tl.float32)
    value_l1 = tl.zeros([BLOCK_TOKENS], tl.float32)
    value_l2 = tl.zeros([BLOCK_TOKENS], tl.float32)
    value_size = tl.zeros([BLOCK_TOKENS], tl.float32)
    key_l2 = tl.zeros([BLOCK_TOKENS], tl.float32)
    for kv_head in range(KV_HEADS):
        within = there[:, None] & (wide < VALUE_DIM)
        new_at = (fresh * value_stride + kv_head * VALUE_DIM)[:, None] + wide
        old_at = ((slot * KV_HEADS + kv_head) * VALUE_DIM)[:, None] + wide
        new = tl.load(fresh_values.to(tl.pointer_type(MODEL_WORD)) + new_at, mask=within, other=0)
        old = tl.load(stored_values.to(tl.pointer_type(POOL_WORD)) + old_at, mask=within, other=0)
        value = widened(new, MODEL, False)
        change = widened(old, POOL, BY_BITS) * value_scale - value
        value_l1 += tl.sum(tl.abs(change), 1)
        value_l2 += tl.sum(change * change, 1)
        value_size += tl.sum(tl.abs(value), 1)

        within = there[:, None] & (dim < KEY_DIM)
        new_at = (fresh * key_stride + kv_head * KEY_DIM)[:, None] + dim
        old_at = ((slot * KV_HEADS + kv_head) * KEY_DIM)[:, None] + dim
        new = tl.load(fresh_keys.to(tl.pointer_type(MODEL_WORD)) + new_at, mask=within, other=0)
        old = tl.load(stored_keys.to(tl.pointer_type(POOL_WORD)) + old_at, mask=within, other=0)
        key = widened(new, MODEL, False)
        change = widened(old, POOL, BY_BITS) * key_scale - key
        key_l2 += tl.sum(change * change, 1)

        keys = tl.trans(key.to(PRODUCTS))
        for start in range(0, rows, BLOCK_ROWS):
            row = start + tl.arange(0, BLOCK_ROWS)
            q, last = _queries(
                query,
                probe_rows,
                probe_positions,
                query_stride,
                row,
                rows,
                kv_head,
                GROUP,
                KEY_DIM,
                MODEL,
                MODEL_WORD,
                PRODUCTS,
                BLOCK_DIM,
            )
            parts = tl.load(
                sums + (split * KV_HEADS + kv_head) * rows + row[None, :],
                mask=(split < splits) & (row < rows)[None, :],
                other=float("-inf"),
            )
            # Every row sees a key, itself; those behind the last row get a harmless number.
            most = tl.max(parts, 0)
            most = tl.where(row < rows, most, 0.0)
            total = tl.sum(tl.exp(parts - most[None, :]), 0)
            normaliser = most + tl.log(tl.where(row < rows, total, 1.0))
            logits = tl.dot(q, keys, input_precision="ieee") * scale
            seen = (row < rows)[:, None] & (position[None, :] <= last[:, None])
            weights = tl.exp(logits - normaliser[:, None])
            mass += tl.sum(tl.where(seen, weights, 0.0), 0)
    tl.store(out + token, mass / (KV_HEADS * GROUP), mask=there)
    tl.store(out + count + token, value_l1, mask=there)
    tl.store(out + 2 * count + token, value_l2, mask=there)
    tl.store(out + 3 * count + token, value_size, mask=there)
    tl.store(out + 4 * count + token, key_l2, mask=there)
