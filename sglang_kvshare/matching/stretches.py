"""Arrays made of stretches: ranges of unequal length, and values that repeat."""

from __future__ import annotations

import numpy as np

from sglang_kvshare.plan import BoolArray, Int64Array, IntArray


def ranges(starts: IntArray, lengths: IntArray) -> Int64Array:
    """``[*range(s0, s0 + l0), *range(s1, s1 + l1), ...]`` as int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if ends.shape[0] else 0
    shift = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(total, dtype=np.int64) + shift.astype(np.int64, copy=False)


def begins(differs: BoolArray) -> BoolArray:
    """Where stretches begin, given where an item differs from the one before it."""
    found = np.ones(differs.shape[0] + 1, dtype=np.bool_)
    found[1:] = differs
    return found


def firsts(values: IntArray) -> Int64Array:
    """Where each value occurs first, by value. (``numpy.unique`` imports half of numpy first.)"""
    if values.shape[0] == 0:
        return np.empty(0, dtype=np.int64)
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    return order[begins(ranked[1:] != ranked[:-1])]
