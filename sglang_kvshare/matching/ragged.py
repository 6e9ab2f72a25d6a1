"""Ranges of unequal length, laid end to end, without a loop."""

from __future__ import annotations

import numpy as np

from sglang_kvshare.plan import Int64Array, IntArray


def ranges(starts: IntArray, lengths: IntArray) -> Int64Array:
    """``[*range(s0, s0 + l0), *range(s1, s1 + l1), ...]`` as int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if ends.shape[0] else 0
    shift = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(total, dtype=np.int64) + shift.astype(np.int64, copy=False)
