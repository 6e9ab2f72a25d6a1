"""Hashes of every window of ``w`` tokens, vectorised over a prompt."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_kvshare.plan import Int64Array

UInt64Array = npt.NDArray[np.uint64]

#: Odd, so that multiplying by it permutes the 64-bit integers (golden ratio of 2**64).
_BASE = np.uint64(0x9E3779B97F4A7C15)


def mix(values: UInt64Array) -> UInt64Array:
    """splitmix64's finaliser: spreads small integers (token ids) over 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def window_hashes(tokens: Int64Array, window: int, seed: int) -> UInt64Array:
    """Polynomial hash, modulo 2**64, of each window of ``window`` tokens.

    Args:
        tokens: int64 ``[n]``.
        window: ``w``, at least 1.
        seed: 64-bit number of the namespace; other seeds give unrelated hashes.

    Returns:
        uint64 ``[max(0, n - w + 1)]``; entry ``i`` belongs to ``tokens[i : i + w]``. A hash only
        nominates: equality of the tokens is checked by the caller.
    """
    count = tokens.shape[0] - window + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    mixed = mix(tokens.astype(np.uint64) + _BASE)
    total = np.full(count, seed, dtype=np.uint64)
    # Horner's rule over the window, all windows at once: w vector steps instead of n rolling
    # ones, which numpy could not run without a Python loop over tokens.
    for offset in range(window):
        total = total * _BASE + mixed[offset : offset + count]
    return mix(total)
