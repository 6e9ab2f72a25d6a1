"""See :mod:`sglang_kvshare.attention.kernels.copy_rotate`.

A program serves :data:`rows <constants>` pairs of a token and a head, in the layers of one group:

    grid        blocks of (token, head)  x  groups of layers
    program     cosines and sines of the move, kept in registers
                for each layer:   key     first, second (neox), or pairs (gptj)  -> rotated
                                  key     what is not rotated                    -> as it is
                                  value   words of 32 bits                       -> as they are
                faults: gathered in registers, one store at the end, and only where there is one
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_kvshare.attention.kernels.copy_rotate import (
    ALIGNMENT_BYTES,
    Launch,
    PoolLayers,
    largest,
)
from sglang_kvshare.attention.kernels.device.numbers import (
    FORMATS,
    UNSIGNED,
    as_bits,
    by_bits,
    rounded,
    widened,
)
from sglang_kvshare.attention.kernels.stored_words import words_of

#: Pairs, or words of values, that a program has in hand: 8 a thread, 16 bytes of each half in bf16.
_TILE = 1024
NUM_WARPS = 4


def constants(
    dtype: torch.dtype,
    heads: int,
    key_dim: int,
    value_dim: int,
    half: int,
    gptj: bool,
    bits: bool,
) -> dict[str, Any]:
    """What the kernel compiles in.

    Args:
        half, gptj: see :class:`sglang_kvshare.attention.kernels.copy_rotate.Launch`.
        bits: see :func:`sglang_kvshare.attention.kernels.device.numbers.by_bits`.
    """
    rest, value = words_of(dtype, key_dim - 2 * half), words_of(dtype, value_dim)
    widest = triton.next_power_of_2(max(half, value.count, rest.count))
    return {
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "HALF": half,
        "GPTJ": gptj,
        "FORMAT": FORMATS[dtype],
        "STORED": UNSIGNED[8 * dtype.itemsize],
        "PAIR_WORD": UNSIGNED[16 * dtype.itemsize],
        "BY_BITS": bits,
        "LARGEST": largest(dtype),
        "ALIGNMENT": ALIGNMENT_BYTES,
        "PER_UNIT": ALIGNMENT_BYTES // dtype.itemsize,
        "REST": rest.count,
        "REST_PER_UNIT": ALIGNMENT_BYTES * 8 // rest.bits,
        "REST_WORD": UNSIGNED[rest.bits],
        "REST_MAGNITUDE": rest.magnitude,
        "REST_DISTANCE": rest.distance,
        "REST_SIGN": rest.sign,
        "REST_BEGIN": 2 * half * dtype.itemsize * 8 // rest.bits,
        "REST_STRIDE": key_dim * dtype.itemsize * 8 // rest.bits,
        "VALUE": value.count,
        "VALUE_PER_UNIT": ALIGNMENT_BYTES * 8 // value.bits,
        "VALUE_WORD": UNSIGNED[value.bits],
        "VALUE_MAGNITUDE": value.magnitude,
        "VALUE_DISTANCE": value.distance,
        "VALUE_SIGN": value.sign,
        "BLOCK_ROWS": max(1, _TILE // widest),
        "BLOCK_HALF": triton.next_power_of_2(max(half, 1)),
        "BLOCK_REST": triton.next_power_of_2(max(rest.count, 1)),
        "BLOCK_VALUE": triton.next_power_of_2(value.count),
    }


def run(
    layers: PoolLayers,
    launch: Launch,
    slots: tuple[torch.Tensor, torch.Tensor],
    positions: tuple[torch.Tensor, torch.Tensor],
    faults: torch.Tensor,
) -> None:
    """Launch once for the layers of ``launch``: from the first of each pair to the second."""
    keys, values = layers.keys[0], layers.values[0]
    _, heads, key_dim = keys.shape
    compiled_in = constants(
        keys.dtype,
        heads,
        key_dim,
        values.shape[2],
        launch.half,
        launch.gptj,
        by_bits(keys.dtype, keys.device),
    )
    rows = slots[0].shape[0] * heads
    grid = (triton.cdiv(rows, compiled_in["BLOCK_ROWS"]), launch.groups.shape[0])
    copy_rotate_kernel[grid](
        as_bits(keys),
        as_bits(values),
        launch.table,
        launch.key_offsets,
        launch.value_offsets,
        launch.table_offsets,
        launch.groups,
        launch.squares,
        *slots,
        *positions,
        faults,
        rows,
        **compiled_in,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _copied_words(
    source, target, seen, MAGNITUDE: tl.constexpr, DISTANCE: tl.constexpr, SIGN: tl.constexpr
):
    """Copy words, and tell which hold a number that is not finite: these become 0."""
    words = tl.load(source, mask=seen, other=0, eviction_policy="evict_first")
    faulty = (((words & MAGNITUDE) + DISTANCE) & SIGN) != 0
    tl.store(target, tl.where(faulty, tl.zeros_like(words), words), mask=seen)
    return faulty


@triton.jit
def copy_rotate_kernel(
    keys,
    values,
    tables,
    key_offsets,
    value_offsets,
    table_offsets,
    groups,
    squares,
    source_slots,
    target_slots,
    source_positions,
    target_positions,
    faults,
    rows,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    GPTJ: tl.constexpr,
    FORMAT: tl.constexpr,
    STORED: tl.constexpr,
    PAIR_WORD: tl.constexpr,
    BY_BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    REST: tl.constexpr,
    REST_PER_UNIT: tl.constexpr,
    REST_WORD: tl.constexpr,
    REST_MAGNITUDE: tl.constexpr,
    REST_DISTANCE: tl.constexpr,
    REST_SIGN: tl.constexpr,
    REST_BEGIN: tl.constexpr,
    REST_STRIDE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PER_UNIT: tl.constexpr,
    VALUE_WORD: tl.constexpr,
    VALUE_MAGNITUDE: tl.constexpr,
    VALUE_DISTANCE: tl.constexpr,
    VALUE_SIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Arguments: see ``Launch`` and ``copy_rotate``; ``rows`` are tokens times heads."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    token, head = row // HEADS, row % HEADS
    source = (tl.load(source_slots + token, mask=live, other=0) * HEADS + head)[:, None]
    target = (tl.load(target_slots + token, mask=live, other=0) * HEADS + head)[:, None]

    group = tl.program_id(1)
    first = tl.load(groups + 3 * group)
    end = tl.load(groups + 3 * group + 1)
    turns = tl.load(groups + 3 * group + 2) != 0

    pair = tl.arange(0, BLOCK_HALF)[None, :]
    paired = live[:, None] & (pair < HALF)
    cos = tl.full([BLOCK_ROWS, BLOCK_HALF], 1.0, tl.float32)
    sin = tl.full([BLOCK_ROWS, BLOCK_HALF], 0.0, tl.float32)
    if HALF > 0:
        table = tables + tl.load(table_offsets + group) * (ALIGNMENT // 4)
        known = paired & turns
        from_row = table + tl.load(source_positions + token, mask=live, other=0)[:, None] * (
            2 * HALF
        )
        to_row = table + tl.load(target_positions + token, mask=live, other=0)[:, None] * (2 * HALF)
        cos_s = tl.load(from_row + pair, mask=known, other=1.0)
        sin_s = tl.load(from_row + HALF + pair, mask=known, other=0.0)
        cos_t = tl.load(to_row + pair, mask=known, other=1.0)
        sin_t = tl.load(to_row + HALF + pair, mask=known, other=0.0)
        square = tl.load(squares + group)
        cos = tl.math.div_rn(cos_t * cos_s + sin_t * sin_s, square)
        sin = tl.math.div_rn(sin_t * cos_s - cos_t * sin_s, square)

    faulty_pairs = tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.int32)
    faulty_rest = tl.zeros([BLOCK_ROWS, BLOCK_REST], tl.int32)
    faulty_values = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.int32)
    for layer in range(first, end):
        # A distance in units of 16 bytes from an aligned pointer: accesses can be as wide.
        key_offset = tl.load(key_offsets + layer)
        value_offset = tl.load(value_offsets + layer)
        if HALF > 0:
            key_base = keys.to(tl.pointer_type(STORED)) + key_offset * PER_UNIT
            from_key = key_base + source * KEY_DIM
            to_key = key_base + target * KEY_DIM
            if GPTJ:
                # Both of a pair are side by side, and are read as one word.
                pairs_from = from_key.to(tl.pointer_type(PAIR_WORD)) + pair
                word = tl.load(pairs_from, mask=paired, other=0, eviction_policy="evict_first")
                a = word.to(STORED)
                b = (word >> PAIR_WORD.primitive_bitwidth // 2).to(STORED)
            else:
                a = tl.load(from_key + pair, mask=paired, other=0, eviction_policy="evict_first")
                b = tl.load(
                    from_key + HALF + pair, mask=paired, other=0, eviction_policy="evict_first"
                )
            x = widened(a, FORMAT, BY_BITS)
            y = widened(b, FORMAT, BY_BITS)
            turned_x = tl.where(turns, x * cos - y * sin, x)
            turned_y = tl.where(turns, y * cos + x * sin, y)
            # Written so that not a number is not finite.
            fine = (tl.abs(turned_x) <= LARGEST) & (tl.abs(turned_y) <= LARGEST)
            faulty_pairs |= tl.where(fine, 0, 1)
            # Without a rotation the very bits are written back.
            a = tl.where(turns, rounded(turned_x, FORMAT, BY_BITS), a)
            b = tl.where(turns, rounded(turned_y, FORMAT, BY_BITS), b)
            a = tl.where(fine, a, tl.zeros_like(a))
            b = tl.where(fine, b, tl.zeros_like(b))
            if GPTJ:
                word = (b.to(PAIR_WORD) << PAIR_WORD.primitive_bitwidth // 2) | a.to(PAIR_WORD)
                tl.store(to_key.to(tl.pointer_type(PAIR_WORD)) + pair, word, mask=paired)
            else:
                tl.store(to_key + pair, a, mask=paired)
                tl.store(to_key + HALF + pair, b, mask=paired)
        if REST > 0:
            rest = keys.to(tl.pointer_type(REST_WORD)) + key_offset * REST_PER_UNIT + REST_BEGIN
            word = tl.arange(0, BLOCK_REST)[None, :]
            faulty_rest |= _copied_words(
                rest + source * REST_STRIDE + word,
                rest + target * REST_STRIDE + word,
                live[:, None] & (word < REST),
                REST_MAGNITUDE,
                REST_DISTANCE,
                REST_SIGN,
            )
        value_base = values.to(tl.pointer_type(VALUE_WORD)) + value_offset * VALUE_PER_UNIT
        word = tl.arange(0, BLOCK_VALUE)[None, :]
        faulty_values |= _copied_words(
            value_base + source * VALUE + word,
            value_base + target * VALUE + word,
            live[:, None] & (word < VALUE),
            VALUE_MAGNITUDE,
            VALUE_DISTANCE,
            VALUE_SIGN,
        )
    found = tl.max(tl.max(faulty_pairs, 1), 0) | tl.max(tl.max(faulty_values, 1), 0)
    if REST > 0:
        found |= tl.max(tl.max(faulty_rest, 1), 0)
    # All who write write the same.
    tl.store(faults, 1, mask=found != 0)
