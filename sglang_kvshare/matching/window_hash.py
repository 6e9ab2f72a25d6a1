"""Hashes of every window of ``w`` tokens, vectorised over a prompt."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from sglang_kvshare.plan import IntArray

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

#: Odd, so that multiplying by it permutes the 64-bit integers (golden ratio of 2**64).
_BASE = 0x9E3779B97F4A7C15
_WORD = 1 << 64


def window_sums(tokens: IntArray, window: int) -> UInt64Array:
    """Polynomial of each window of ``window`` tokens, modulo 2**64; no seed yet.

    Args:
        tokens: int ``[n]``, not negative.
        window: ``w``, at least 1.

    Returns:
        uint64 ``[max(0, n - w + 1)]``; entry ``i`` belongs to ``tokens[i : i + w]``.
    """
    count = tokens.shape[0] - window + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    # `block` holds the sums of windows of `size` = 1, 2, 4, ... tokens; the powers of two that
    # make up w are put one behind the other: log2(w) vector steps, for windows of any length.
    block = mixed(tokens.astype(np.uint64))
    total: UInt64Array | None = None
    covered, size = 0, 1
    while True:
        if window & size:
            part = block[covered : covered + count]
            total = part if total is None else _joined(total, part, size)
            covered += size
        if 2 * size > window:
            break
        block = _joined(block[:-size], block[size:], size)
        size *= 2
    assert total is not None
    return total


def fingerprints(sums: UInt64Array, seed: int) -> UInt32Array:
    """The upper 32 bits of each sum and the seed. They nominate: the caller compares tokens."""
    return ((sums + np.uint64(seed)) >> np.uint64(32)).astype(np.uint32)


def pair_sums(first: IntArray, second: IntArray) -> UInt64Array:
    """uint64 ``[m]``, one for each pair of numbers from 0 to ``2**32 - 1``."""
    return mixed((first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64))


def seed_of(domain: bytes, depth: int) -> int:
    """64-bit number of a trust domain and a provenance; others give unrelated fingerprints."""
    digest = hashlib.blake2b(domain, digest_size=8, salt=depth.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def _joined(front: UInt64Array, back: UInt64Array, back_size: int) -> UInt64Array:
    joined = front * np.uint64(pow(_BASE, back_size, _WORD))
    joined += back
    return joined


def mixed(values: UInt64Array) -> UInt64Array:
    """splitmix64's finaliser: spreads small integers (token ids) over 64 bits."""
    values = values + np.uint64(_BASE)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values
